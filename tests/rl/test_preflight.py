# SPDX-License-Identifier: Apache-2.0
"""The preflight on real parts of a tiny model: all pass, and each fault is found and named."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.data.chat import encode_prompt
from klear_jax.data.sources import task_stream
from klear_jax.data.tokenizer import load_tokenizer
from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3
from klear_jax.rewards import math as math_rewards
from klear_jax.rewards.verdict import TRAINING_REWARDS, Reason, Verdict, format_of
from klear_jax.rl import checks, minibatch, preflight, rollout
from klear_jax.rl.checks import Parts
from klear_jax.rl.loss import make_policy_loss
from klear_jax.rl.minibatch import Layout
from klear_jax.rl.objective import Objective
from klear_jax.rl.surrogates import Clip
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.sampler import Completion, Sampler
from klear_jax.train.checkpoint import CheckpointError, Checkpoints
from klear_jax.train.optim import OptimConfig, make_optimizer
from klear_jax.train.state import TrainState, init_state
from klear_jax.train.step import make_scorer, make_step

CFG = dataclasses.replace(QWEN3["tiny"], layers=2, init_range=0.2)
TOKENIZER = load_tokenizer("bytes")
OPTIM = OptimConfig(learning_rate=1e-4, b2=0.99)
NAMES = [
    "ratio", "packing", "padding", "end token", "sampler", "update", "grader", "noise",
    "checkpoint",
]  # fmt: skip
ROW, TOKENS = 64, 24
PROBLEMS = task_stream(("sum", "sort"), 4, seed=0)(0)


@functools.lru_cache
def programs(dtype="float32", temperature=0.8, scored=None):
    """loss, scorer and step; `scored` is a temperature of the scorer's own."""
    cfg = dataclasses.replace(CFG, dtype=dtype)
    loss = make_policy_loss(cfg, clip=Clip(low=0.2, high=0.2), temperature=temperature)
    step = make_step(loss, optimizer=make_optimizer(OPTIM))
    return loss, make_scorer(cfg, temperature=scored or temperature), step


def make_parts(folder, mesh, *, dtype="float32", **changes):
    cfg = dataclasses.replace(CFG, dtype=dtype)
    engine = EngineConfig(slots=4, length=64, stop_ids=TOKENIZER.stop_ids, prefill_rows=4)
    params = params_lib.init(cfg, 0, mesh)
    loss, score, step = programs(dtype)
    parts = Parts(
        state=init_state(params, make_optimizer(OPTIM)), mesh=mesh, layout=Layout(ROW, 4, 2),
        tokenizer=TOKENIZER, encode=lambda p: tuple(encode_prompt(TOKENIZER, p.messages)),
        decode=lambda ids: TOKENIZER.decode(ids.tolist()),
        sampler=Sampler(params, cfg, engine, seed=3), grade=math_rewards.grade_problem,
        reward=TRAINING_REWARDS["raw"], objective=Objective(), optim=OPTIM, loss=loss, score=score,
        step=step, samples=8, max_tokens=TOKENS, temperature=0.8, seed=3, folder=folder,
    )  # fmt: skip
    return dataclasses.replace(parts, **changes)


@pytest.fixture(scope="module")
def mesh():
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def parts(mesh, tmp_path):
    return make_parts(tmp_path, mesh)


def failures(parts, problems=PROBLEMS):
    return {c.name: str(c) for c in preflight.preflight(parts, problems) if not c.passed}


def only(parts, name, *says):
    """The fault fails this check and no other, and its text names the cause."""
    found = failures(parts)
    assert list(found) == [name], found
    for text in says:
        assert text in found[name]


# --- sound parts --------------------------------------------------------------------------------


def test_sound_parts_pass_and_are_left_as_they_were(parts, tmp_path):
    before = jax.device_get(parts.state)
    made = preflight.preflight(parts, PROBLEMS)
    assert [check.name for check in made] == NAMES
    assert not failures(parts)
    assert not [check for check in made if check.skipped]
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(parts.state))
    assert list(tmp_path.iterdir()) == []
    by_name = {check.name: check for check in made}
    assert by_name["update"].figure > 1e-5
    assert 0 < by_name["sampler"].figure < 2e-5


@pytest.mark.slow
def test_no_check_is_empty_on_a_mesh(tmp_path):
    cut = make_mesh(MeshSpec(fsdp=2), jax.devices()[:2])
    with jax.set_mesh(cut):
        assert not failures(make_parts(tmp_path, cut))


@pytest.mark.slow
def test_bfloat16_has_limits_of_its_own(mesh, tmp_path):
    parts = make_parts(tmp_path, mesh, dtype="bfloat16")
    made = {check.name: check for check in preflight.preflight(parts, PROBLEMS)}
    assert all(check.passed for check in made.values()), made
    assert 1e-4 < made["sampler"].figure < 0.03


def test_a_run_of_one_short_sequence_passes(parts):
    """The smallest layout there is, and a single sample a problem."""
    objective = Objective(advantage="batch_normalised")
    small = dataclasses.replace(
        parts, layout=Layout(ROW, 1, 1), samples=1, max_tokens=1, objective=objective
    )
    assert not failures(small, PROBLEMS[:1]).keys() - {"update"}


def test_a_resumed_state_passes(parts):
    """Moments of earlier updates may move a weight further than the rate."""
    state = parts.state
    made = preflight._assemble(parts, preflight._sample(parts, PROBLEMS[:2]))
    (scored,) = minibatch.with_old_logprobs(
        [made], functools.partial(parts.score, state.params), parts.mesh
    )
    state = jax.tree.map(jnp.copy, state)
    for _ in range(6):
        state, _ = parts.step(state, scored.batch, scored.microbatches, 1e-4)
    parts.sampler.update(state.params)
    assert not failures(dataclasses.replace(parts, state=state))


def test_no_program_is_compiled_twice(parts):
    """The run's own calls find what the preflight compiled."""
    preflight.preflight(parts, PROBLEMS)
    sizes = [parts.score._cache_size(), parts.step._cache_size()]
    made = preflight._assemble(parts, preflight._sample(parts, PROBLEMS[:2]))
    (scored,) = minibatch.with_old_logprobs(
        [made], functools.partial(parts.score, parts.state.params), parts.mesh
    )
    parts.step(parts.state, scored.batch, scored.microbatches, 0.0)
    assert [parts.score._cache_size(), parts.step._cache_size()] == sizes


def test_a_large_state_is_not_copied_and_saves_a_leaf(parts, monkeypatch):
    monkeypatch.setattr(preflight, "COPY_LIMIT", 0)
    monkeypatch.setattr(checks, "SAVE_LIMIT", 100_000)
    saved = []

    class Recording(Checkpoints):
        def save(self, step, state, record):
            saved.append(sum(x.nbytes for x in jax.tree.leaves(state)))
            super().save(step, state, record)

    def refuse(*args):
        raise AssertionError("the step was called")

    large = dataclasses.replace(parts, step=refuse, checkpoints=Recording)
    made = {check.name: check for check in preflight.preflight(large, PROBLEMS)}
    assert all(check.passed for check in made.values()), made
    assert "GiB a device" in made["update"].skipped
    assert [name for name, check in made.items() if check.skipped] == ["update"]
    assert 10_000 < saved[0] <= 100_008
    # The loss is still compared with the scorer.
    other = dataclasses.replace(large, loss=programs(temperature=0.7)[0])
    assert list(failures(other)) == ["ratio"]


# --- one fault at a time ------------------------------------------------------------------------


def test_a_scorer_of_another_temperature(parts):
    wrong = dataclasses.replace(parts, score=programs(scored=0.9)[1])
    found = failures(wrong)
    assert list(found) == ["ratio", "sampler"]
    assert "one temperature" in found["ratio"]


def with_segments(parts, change):
    """The scorer, shown other segments than the batch has."""
    inner = parts.score

    def score(params, batch, microbatches):
        return inner(params, batch.replace(segments=change(batch.segments)), microbatches)

    return dataclasses.replace(parts, score=score)


def test_attention_across_segments(parts):
    found = failures(with_segments(parts, lambda s: jnp.minimum(s, 1)))
    assert "Attention leaks between the sequences of a row" in found["packing"]
    assert "padding" not in found


def test_padding_that_is_attended_to(parts):
    found = failures(with_segments(parts, lambda s: jnp.where(s == 0, 1, s)))
    assert "Padding is attended to" in found["padding"]


@pytest.mark.parametrize("lost", ["mask", "weight", "token"])
def test_an_end_token_that_is_dropped(parts, monkeypatch, lost):
    """As it goes where the pad id is the end id and masks come from comparing ids."""
    real = minibatch.pack

    def pack(*args, **fields):
        packed = real(*args, **fields)
        ends = np.isin(packed.targets, TOKENIZER.stop_ids)
        if lost == "mask":
            return dataclasses.replace(packed, mask=packed.mask & ~ends)
        if lost == "token":
            return dataclasses.replace(packed, targets=np.where(ends, 0, packed.targets))
        weights = np.where(ends, 0, packed.per_token["loss_weights"])
        return dataclasses.replace(packed, per_token={**packed.per_token, "loss_weights": weights})

    monkeypatch.setattr(minibatch, "pack", pack)
    only(parts, "end token", "masks must come from lengths", str(TOKENIZER.end_id))


def test_a_sampler_that_misses_a_stop_id(parts):
    engine = dataclasses.replace(parts.sampler.engine, stop_ids=TOKENIZER.stop_ids[:1])
    parts.sampler.engine = engine
    missed = TOKENIZER.stop_ids[1]
    found = failures(parts)
    assert f"the sampler does not stop at {missed}" in found["end token"]


def test_a_loss_that_counts_fewer_tokens(parts):
    def step(*args):
        state, values = parts.step(*args)
        return state, values | {"tokens/trained": values["tokens/trained"] - 1}

    only(dataclasses.replace(parts, step=step), "end token", "the loss counts")


def test_a_sampler_of_other_weights(parts):
    parts.sampler.update(params_lib.init(CFG, 1, parts.mesh))
    only(parts, "sampler", "hand the sampler the trainer's parameters")


def test_an_id_without_a_row(parts):
    class Wild:
        cfg, engine, seed, params = parts.sampler.cfg, parts.sampler.engine, 3, parts.sampler.params

        def sample(self, requests):
            for r in requests:
                yield Completion(r.id, np.array([5, 263], np.int32), np.zeros(2), "length")

    wild = dataclasses.replace(parts, sampler=Wild())  # pyright: ignore[reportArgumentType]
    only(wild, "sampler", "id 263 was drawn, the model knows 0..262")


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_learning_rate_that_breaks_the_policy(parts, rate):
    wrong = dataclasses.replace(parts, optim=dataclasses.replace(OPTIM, learning_rate=rate))
    only(wrong, "update", f"learning_rate {rate:g} breaks", "--optim.learning-rate")


def test_a_step_that_moves_further_than_adam(parts):
    def step(state, batch, microbatches, rate):
        return parts.step(state, batch, microbatches, 1.5 * rate)

    only(dataclasses.replace(parts, step=step), "update", "more than AdamW may")


def test_a_step_that_moves_nothing(parts):
    def step(state, batch, microbatches, rate):
        return parts.step(state, batch, microbatches, 0.0)

    only(dataclasses.replace(parts, step=step), "update", "moved nothing")


def test_a_gradient_that_is_not_finite(parts):
    def step(state, batch, microbatches, rate):
        weights = batch.loss_weights * jnp.inf
        return parts.step(state, batch.replace(loss_weights=weights), microbatches, rate)

    only(dataclasses.replace(parts, step=step), "update", "NaN or an infinity")


def right(problem, text):
    return Verdict.right(format=format_of(text))


def wrong(problem, text):
    return Verdict.miss(Reason.WRONG, format=format_of(text))


def broken(problem, text):
    raise OSError("grader died")


@pytest.mark.parametrize(
    ("grade", "says"),
    [(right, "the wrong answer"), (wrong, "its own answer"), (broken, "grader died")],
)
def test_a_grader_that_does_not_grade(parts, grade, says):
    only(dataclasses.replace(parts, grade=grade), "grader", says, "graded")


def test_a_decoder_that_loses_the_box(parts):
    lossy = dataclasses.replace(parts, decode=lambda ids: TOKENIZER.decode(ids[:9].tolist()))
    only(lossy, "grader", "its own answer")


def test_a_reward_that_pays_for_wrong(parts):
    paid = dataclasses.replace(parts, reward=lambda kind, verdict: 1 - verdict.reward)
    only(paid, "grader", "right earns 0 and wrong 1")


def test_noise_that_is_shared(parts, monkeypatch):
    real = rollout.sample_id
    monkeypatch.setattr(rollout, "sample_id", lambda step, problem, i: real(step, problem))
    only(parts, "noise", "named by step, problem and sample")


def test_noise_of_another_seed(parts):
    only(dataclasses.replace(parts, seed=4), "noise", "the sampler has seed 3, the run 4")


class Corrupting(Checkpoints):
    def restore(self, step, abstract) -> TrainState:
        state = super().restore(step, abstract)
        embed = state.params.embed * (1 + 1e-6)
        return state.replace(params=state.params.replace(embed=embed))  # pyright: ignore


class Full(Checkpoints):
    def save(self, step, state, record):
        raise CheckpointError("no space left")


@pytest.mark.parametrize(("kind", "says"), [(Corrupting, ".embed"), (Full, "no space left")])
def test_a_checkpoint_that_does_not_come_back(parts, tmp_path, kind, says):
    broken = dataclasses.replace(parts, checkpoints=kind)
    only(broken, "checkpoint", says, "could not be resumed")
    assert list(tmp_path.iterdir()) == []


# --- the parts of it ----------------------------------------------------------------------------


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.99), (0.9, 0.999), (0.0, 0.9), (0.9, 0.5), (0, 0)])
def test_adam_bound_holds_and_is_reached(b1, b2):
    """Gradients in proportion to (b1 / b2)^age reach it; random ones stay below."""
    rng = np.random.default_rng(0)

    def direction(grads):
        m = v = 0.0
        for g in grads:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        t = len(grads)
        return m / (1 - b1**t) / np.sqrt(v / (1 - b2**t))

    for updates in (1, 2, 7, 30):
        bound = preflight.adam_bound(b1, b2, updates)
        assert updates > 1 or bound == pytest.approx(1)
        for _ in range(50):
            assert abs(direction(rng.standard_normal(updates))) <= bound * (1 + 1e-9)
        if b1 and b2:
            worst = (b1 / b2) ** np.arange(updates)[::-1]
            assert direction(worst) == pytest.approx(bound)


def test_groups_that_do_not_fit_are_left_out(parts):
    groups = preflight._sample(parts, PROBLEMS[:2])
    assert preflight.fitting(groups, Layout(ROW, 4, 1)) == groups
    assert preflight.fitting(groups, Layout(ROW, 2, 1)) == groups[:1]


def test_a_figure_that_is_no_number_fails():
    check = checks.Check("ratio", "difference", float("nan"), 1e-5, "Cause.", "detail")
    assert not check.passed
    assert str(check) == "ratio: difference nan, at most 1e-05 allowed (detail). Cause."
