# SPDX-License-Identifier: Apache-2.0
"""Faults of other systems, group "Loss and normalisation": right values, and no dead knob.

Every report of that group and its test, here where no file is named:

- trl#3021, trl#3231, verl#2857, open-instruct#1137, marin rl_losses.py: `test_trl_3021_*`.
  seq-mean-token-sum (10) is no option: it is `constant` times max_tokens, a factor that the
  learning rate has, and it grows with the length of responses.
- trl#4159, prime-rl#697, NeMo-RL#935: `test_trl_4159_*`.
- prime-rl#2972: `test_prime_rl_2972_*`, and for every variant test_loss.py.
- open-instruct#534, NeMo-RL#2506, marin#1708: `test_open_instruct_534_*`; test_objective.py
  (`test_k1_pulls_nowhere_on_average`, `test_kl_by_hand`).
- slime#397, PR 1247 (every knob): `test_slime_397_*`.
- maxtext PR 4016: `test_maxtext_4016_*`.
- EasyDeL, open-instruct#1264, #1269, trl#4499: the gradient table of test_surrogates.py.
- Soup#723: `test_soup_723_*`; test_levels.py `test_the_layout_changes_nothing`.
- trl#3032, trl PR 6021, RLinf#1471: `test_trl_3032_*`; test_telemetry.py.
- verl#6829, slime#774: test_loop.py `test_every_ratio_of_the_first_update_is_one`.
- verl PR 3635: test_advantages.py (`test_one_success_of_four`, `test_uniform_and_singleton_*`).
- CoursIA#10603: test_rollout.py `test_expected_share_of_informative_groups`.
"""

import dataclasses
import functools
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.core.numerics import linear_logprob
from klear_jax.data.problems import Message, Problem
from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3
from klear_jax.rewards.verdict import Format, Reason, Verdict
from klear_jax.rl import minibatch
from klear_jax.rl.loop import LoopConfig, roll_out, train_gppo
from klear_jax.rl.loss import policy_loss
from klear_jax.rl.minibatch import Layout
from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout import Group, Overlong
from klear_jax.rl.surrogates import Clip
from klear_jax.sampling.request import Completion
from klear_jax.sampling.sampler import SampleCounts
from klear_jax.train.state import init_state
from klear_jax.train.step import make_scorer, make_step

FORMAT = Format(think_opened=True, think_closed=True, boxed=True)
VERDICTS = {
    "+": Verdict.right(format=FORMAT),
    "-": Verdict.miss(Reason.WRONG, format=FORMAT),
    "?": Verdict.invalid(Reason.INFRASTRUCTURE, format=FORMAT),
}
MAX_TOKENS = 8


def completion_of(name, mark, length):
    """The first token tells the verdict, and the others the sample."""
    seed = [ord(c) for c in name]
    rng = np.random.default_rng(seed)
    tokens = np.append("+-?".index(mark), rng.integers(20, 250, length - 1)).astype(np.int32)
    stop = "length" if length == MAX_TOKENS else "stop"
    return Completion(name, tokens, rng.normal(-1, 0.6, length).astype(np.float32), stop)


def assembled(marks, lengths, objective, layout):
    """The mini-batch of one problem's samples."""
    done = [completion_of(str(i), *x) for i, x in enumerate(zip(marks, lengths, strict=True))]
    verdicts = tuple(VERDICTS[mark] for mark in marks)
    problem = Problem("p", (Message("user", "q"),), "1")
    group = Group(problem, (7, 8), tuple(done), tuple(marks), verdicts)
    rewards = np.array([[v.reward for v in verdicts]])
    (made,) = minibatch.assemble(
        [group], rewards, np.ones(rewards.shape, bool), objective,
        updates=1, layout=layout, max_tokens=MAX_TOKENS,
    )  # fmt: skip
    return made


# --- normalisation ----------------------------------------------------------------------------


def shifted_loss(params, piece):
    """The loss where log p is that of the reference + a parameter."""
    logprobs = piece.reference_logprobs + params["shift"]
    clip = Clip(low=0.2, high=0.2)
    return policy_loss(logprobs, jnp.ones_like(logprobs), piece, clip=clip)


STEP = make_step(shifted_loss, optimizer=optax.identity())


def one_step(batch, pieces, rate, shift=0.0):
    state = init_state({"shift": jnp.asarray(shift)}, optax.identity())
    state, values = STEP(state, batch, pieces, rate)
    return float(state.params["shift"]), jax.device_get(values)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["1x2", "2x1"])
@pytest.mark.parametrize(
    ("aggregation", "right"), [("token_mean", 2.5), ("sequence_mean", 2.0), ("constant", 1.25)]
)
def test_trl_3021_token_mean_over_the_whole_minibatch(aggregation, right, shape):
    """2 tokens of loss 1 and 6 of loss 3; the mean of micro-batch means is 2.0, and marin's second
    division by the batch 1.25."""
    pieces, rows = shape
    layout = Layout(row_tokens=MAX_TOKENS, rows=rows, microbatches=pieces)
    objective = Objective(aggregation=aggregation, positive_nll=0.0)
    made = assembled("+-", (2, 6), objective, layout)
    assert made.microbatches == pieces
    # At ratio 1 the loss of a token is -A: responses of 2 tokens have A = -1, of 6 A = -3.
    short = made.batch.mask.sum(axis=2, keepdims=True) == 2
    advantages = np.where(made.batch.mask, np.where(short, -1, -3), 0).astype(np.float32)
    batch = dataclasses.replace(made.batch, advantages=advantages)

    shift, values = one_step(batch, pieces, 0.5)
    assert values["loss"] == pytest.approx(right, rel=1e-6)
    assert values["grad_norm"] == pytest.approx(right, rel=1e-6)
    assert shift == pytest.approx(-0.5 * right, rel=1e-6)


def test_constant_of_one_is_the_mean_of_token_sums():
    """seq-mean-token-sum: 10."""
    weights = minibatch.token_weights(np.array([2, 6]), "constant", 1)
    assert (weights * [2 * 1, 6 * 3]).sum() == 10


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_trl_4159_temperature_divides_logits(temperature):
    """-0.01815 at T = 0.5; the unscaled -0.12693 is that of T = 1, and -0.25386 that of neither."""
    hidden, head = jnp.array([[[1.0]]]), jnp.array([[2.0, 0.0]])
    logprobs, _ = linear_logprob(
        hidden, head, jnp.array([[0]]), live_vocab=2, temperature=temperature
    )
    right = {0.5: -0.01815, 1.0: -0.12693}[temperature]
    assert float(logprobs[0, 0]) == pytest.approx(right, abs=5e-6)


# --- a batch for the tests below ---------------------------------------------------------------

SAMPLES = [("++-?", (3, 5, 6, 4)), ("+--+", (8, 2, 7, 8)), ("----", (3, 3, 8, 4))]
"""Verdicts and lengths of each problem's samples; those of `MAX_TOKENS` were cut."""
LAYOUT = Layout(row_tokens=20, rows=4, microbatches=1)
LOOP = LoopConfig(
    steps=1, samples=4, keep=3, updates=1, max_tokens=MAX_TOKENS, temperature=1.0,
    group_filter="none", eval_every=0, save_every=0,
)  # fmt: skip
NOTHING = {Clip: {}, Objective: {}, Overlong: {}}


class FakeSampler:
    counts = SampleCounts()
    copied_bytes = 0

    def __init__(self, turned):
        self.turned = turned

    def update(self, params):
        pass

    def release(self):
        pass

    def sample(self, requests):
        for request in requests:
            problem, sample = map(int, request.id.split("/"))
            if self.turned:
                problem, sample = len(SAMPLES) - 1 - problem, 3 - sample
            marks, lengths = SAMPLES[problem]
            done = completion_of(f"{problem}/{sample}", marks[sample], lengths[sample])
            yield dataclasses.replace(done, id=request.id)


def score(params, batch, microbatches):
    """Old policy and reference, told apart by `params`; they think something of every target."""
    known = jnp.where(batch.mask, -1 + 0.6 * jnp.sin(params * batch.targets), 0.0)
    return known, jnp.where(batch.mask, 1.0, 0.0)


@functools.cache
def one_device():
    return make_mesh(MeshSpec(), jax.devices()[:1])


def outcome(given, cells=None, turned=False):
    """(mini-batch, loss, gradients, metrics) under `{class: fields}`, by the loop's `roll_out`."""
    clip, objective, overlong = (cls(**given[cls]) for cls in (Clip, Objective, Overlong))
    clip.check_effect()
    problems = [Problem(f"p{i}", (Message("user", "q"),), "1") for i in range(3)]
    rolled = roll_out(
        dataclasses.replace(LOOP, overlong=overlong), 0, 0, 2.0, lambda _: problems,
        lambda problem: (7, 8), lambda tokens: "+-?"[tokens[0]], FakeSampler(turned),
        lambda problem, text: VERDICTS[text], lambda kind, verdict: verdict.reward,
        objective, LAYOUT, score, one_device(), 3.0 if objective.kl_coef else None,
    )  # fmt: skip
    batch = jax.tree.map(lambda x: jnp.asarray(np.asarray(x[0])), rolled.minibatches[0].batch)
    logprobs = -1 + 0.6 * jnp.sin(5.0 * batch.targets)
    if cells is not None:
        batch, logprobs = cells(batch, logprobs)
    entropy = jnp.exp(0.3 * jnp.sin(7.0 * batch.targets))

    def loss(logprobs, entropy):
        return policy_loss(logprobs, entropy, batch, clip=clip, objective=objective)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, metrics), gradients = run(logprobs, entropy)
    summary = {name: np.asarray(x) for name, x in metrics.summarise().items()}
    return batch, float(value), *map(np.asarray, gradients), summary


def test_prime_rl_2972_a_token_that_the_sampler_found_impossible():
    """Trainer -2, sampler (or old policy) -91: finite, and exactly nothing where it is masked."""
    given = NOTHING | {Objective: {"tis": "token"}, Clip: {"variant": "ppo"}}

    def spoil(batch, logprobs, *, mask):
        spoiled = {k: getattr(batch, k).at[0, 2].set(-91.0)
                   for k in ("sampler_logprobs", "old_logprobs")}  # fmt: skip
        # -2 and r = e^89 with A < 0, which PPO does not clip.
        spoiled["advantages"] = batch.advantages.at[0, 2].set(-1.0)
        spoiled["mask"] = batch.mask.at[0, 2].set(mask)
        spoiled["loss_weights"] = jnp.where(spoiled["mask"], batch.loss_weights, 0.0)
        return dataclasses.replace(batch, **spoiled), logprobs.at[0, 2].set(-2.0)

    def tidy(batch, logprobs):
        mask = batch.mask.at[0, 2].set(False)
        weights = jnp.where(mask, batch.loss_weights, 0.0)
        return dataclasses.replace(batch, mask=mask, loss_weights=weights), logprobs

    _, loss, gradient, _, _ = outcome(given, cells=functools.partial(spoil, mask=True))
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    batch, loss, gradient, _, _ = outcome(given, cells=functools.partial(spoil, mask=False))
    _, expected, expected_gradient, _, _ = outcome(given, cells=tidy)
    assert not bool(batch.mask[0, 2])
    assert loss == expected
    np.testing.assert_array_equal(gradient, expected_gradient)
    assert gradient[0, 2] == 0


def test_open_instruct_534_k1_is_refused_as_a_loss():
    with pytest.raises(ValueError, match="gradient of expectation 0"):
        Objective(kl_coef=0.1, kl_estimator="k1")


def test_soup_723_order_of_samples_and_padding_change_nothing_in_gspo():
    given = NOTHING | {Clip: {"variant": "ppo", "level": "sequence"}}

    batch, loss, gradient, _, _ = outcome(given, cells=spoil_padding)
    other, turned_loss, turned_gradient, _, _ = outcome(given, cells=spoil_padding, turned=True)
    assert not np.array_equal(batch.tokens, other.tokens)
    assert loss == pytest.approx(turned_loss, rel=1e-6)
    for b, g in ((batch, gradient), (other, turned_gradient)):
        np.testing.assert_array_equal(g[~np.asarray(b.mask)], 0)
    np.testing.assert_allclose(
        np.sort(gradient.ravel()), np.sort(turned_gradient.ravel()), rtol=1e-5, atol=1e-9
    )


def spoil_padding(batch, logprobs):
    return batch, jnp.where(batch.mask, logprobs, jnp.nan)


def test_trl_3032_clip_fractions_are_weighted_by_tokens():
    """r = .5, 1.5, .5, 1.5 with A = +, +, -, -: .25, .25, .5, also as 1 token and 3 tokens."""
    shape = (2, 1, MAX_TOKENS)
    ratio = np.resize([0.5, 1.5, 0.5, 1.5], shape)
    integers, zeros = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    names = ("positive_weights", "old_entropy", "reference_logprobs", "sampler_logprobs")
    batch = RolloutBatch(
        tokens=integers, targets=integers, positions=integers, segments=integers + 1,
        mask=zeros > 0, loss_weights=zeros,
        advantages=np.resize(np.float32([1, 1, -1, -1]), shape),
        old_logprobs=-np.log(ratio).astype(np.float32), **dict.fromkeys(names, zeros),
    )  # fmt: skip
    for sizes in ((4, 0), (1, 3)):
        place, ends = np.arange(MAX_TOKENS), np.array(sizes)
        mask = (place < ends[:, None])[:, None]
        if sizes == (1, 3):
            mask[1, 0] = (place >= 1) & (place < 4)
        case = dataclasses.replace(batch, mask=mask, loss_weights=(mask / 4).astype(np.float32))
        _, values = one_step(case, 2, 0.0)
        got = [float(values[name]) for name in ("clip/neg_low", "clip/pos_high", "clip")]
        assert got == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("pads", [3, 61])
def test_maxtext_4016_padding_before_a_row_is_not_attended(pads):
    cfg = dataclasses.replace(QWEN3["tiny"], layers=1)
    layout = Layout(row_tokens=72, rows=1, microbatches=1)
    batch = assembled("+", (8,), Objective(), layout).batch
    params = jax.tree.map(lambda x: 4 * x, params_lib.init(cfg, 0))
    run = scorer(cfg)
    moved = jax.tree.map(lambda x: np.roll(x, pads, axis=-1), batch)
    # Whatever stands in the padding.
    moved = dataclasses.replace(moved, tokens=np.where(moved.segments > 0, moved.tokens, 99))
    for got, want in zip(run(params, moved, 1), run(params, batch, 1), strict=True):
        assert np.abs(want).max() > 0.5
        np.testing.assert_allclose(np.roll(got, -pads, axis=-1), want, atol=1e-5)


@functools.cache
def scorer(cfg):
    return make_scorer(cfg, temperature=0.8)


# --- every knob -------------------------------------------------------------------------------

CHANGES = {
    # (class, field): (a value, what must be set for it to have an effect)
    (Clip, "low"): (0.1, {}),
    (Clip, "high"): (0.1, {}),
    (Clip, "dual"): (1.5, {}),
    (Clip, "beta_low"): (0.5, {Clip: {"variant": "ce_gppo"}}),
    (Clip, "beta_high"): (0.5, {Clip: {"variant": "ce_gppo"}}),
    (Clip, "tau_positive"): (2.0, {Clip: {"variant": "sapo"}}),
    (Clip, "tau_negative"): (2.0, {Clip: {"variant": "sapo"}}),
    (Clip, "variant"): ("ppo", {}),
    (Clip, "level"): ("sequence", {}),
    (Objective, "advantage"): ("mean_centred", {}),
    (Objective, "aggregation"): ("constant", {}),
    (Objective, "old_logprobs"): ("sampler", {}),
    (Objective, "positive_nll"): (0.2, {}),
    (Objective, "positive_threshold"): (0.0, {}),
    (Objective, "kl_coef"): (0.1, {}),
    (Objective, "kl_estimator"): ("k2", {Objective: {"kl_coef": 0.1}}),
    (Objective, "entropy_coef"): (0.1, {}),
    (Objective, "tis"): ("token", {}),
    (Objective, "tis_cap"): (1.5, {Objective: {"tis": "token"}}),
    (Objective, "erc"): ((0.9, 1.1), {}),
    (Overlong, "buffer"): (4, {}),
    (Overlong, "factor"): (0.5, {Overlong: {"buffer": 4}}),
    (Overlong, "filter"): (True, {}),
}
IDS = [f"{cls.__name__}-{field}" for cls, field in CHANGES]


def differ(one, other):
    """Whether the loss, a gradient or a metric is another."""
    (*arrays, metrics), (*other_arrays, other_metrics) = one[1:], other[1:]
    if metrics.keys() != other_metrics.keys():
        return True
    pairs = [*zip(arrays, other_arrays, strict=True)]
    pairs += [(metrics[name], other_metrics[name]) for name in metrics]
    return any(not np.allclose(a, b, rtol=1e-4, atol=1e-7, equal_nan=True) for a, b in pairs)


@functools.cache
def baseline():
    return outcome(NOTHING)


def test_every_field_is_walked():
    """A new field of the objective needs its line in `CHANGES`."""
    fields = [(cls, f.name) for cls in NOTHING for f in dataclasses.fields(cls)]
    assert list(CHANGES) == fields
    assert not differ(baseline(), outcome(NOTHING))


@pytest.mark.parametrize(("cls", "field"), CHANGES, ids=IDS)
def test_slime_397_every_knob_has_an_effect_or_is_refused(cls, field):
    value, switch = CHANGES[cls, field]
    before = {c: NOTHING[c] | switch.get(c, {}) for c in NOTHING}
    after = before | {cls: before[cls] | {field: value}}
    assert differ(outcome(after), outcome(before) if switch else baseline())
    if switch:
        with pytest.raises(ValueError, match=f"{field} .*has no effect"):
            outcome(NOTHING | {cls: {field: value}})


CHOICES = [
    (cls, field, value)
    for cls, field in CHANGES
    for value in get_args(get_type_hints(cls)[field])
    if isinstance(value, str)
]


@pytest.mark.parametrize(("cls", "field", "value"), CHOICES)
def test_every_choice_differs_from_the_default(cls, field, value):
    default = next(f.default for f in dataclasses.fields(cls) if f.name == field)
    others = {
        "geometric": {Clip: {"variant": "unclipped"}},
        "kl_estimator": {Objective: {"kl_coef": 0.1}},
        # At a share of 1 the general form is GPPO.
        "ce_gppo": {Clip: {"beta_low": 0.5}},
    }
    switch = others.get(value, others.get(field, {}))
    given = {c: NOTHING[c] | switch.get(c, {}) for c in NOTHING}
    given[cls] = given[cls] | {field: value}
    if value == "k1":
        with pytest.raises(ValueError, match="use k2 or k3"):
            outcome(given)
    else:
        on = outcome(NOTHING | switch) if field == "kl_estimator" else baseline()
        assert differ(outcome(given), on) == (value != default)


def test_slime_397_a_kl_term_without_a_reference_is_refused():
    cfg = dataclasses.replace(LOOP, steps=0)
    unused = dict.fromkeys((
        "state", "problems", "encode", "decode", "sampler", "grade", "reward", "layout", "score",
        "step", "learning_rate", "mesh", "hooks", "reference",
    ))  # fmt: skip
    with pytest.raises(ValueError, match="reference"):
        train_gppo(cfg, first_step=0, objective=Objective(kl_coef=0.1), **unused)
