# SPDX-License-Identifier: Apache-2.0
"""The loop with fakes for everything slow: who is called when, with which policy, and how it ends;
then the real parts on a tiny model."""

import collections
import dataclasses
import functools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.data.chat import encode_prompt
from klear_jax.data.problems import Message, Problem
from klear_jax.data.sources import task_stream
from klear_jax.data.tokenizer import load_tokenizer
from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3
from klear_jax.rewards.verdict import Format, Reason, Verdict
from klear_jax.rl import loop
from klear_jax.rl.loop import LoopConfig, train_gppo
from klear_jax.rl.loss import make_policy_loss
from klear_jax.rl.minibatch import Layout
from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout_file import load_rollout, save_rollout
from klear_jax.rl.surrogates import Clip
from klear_jax.sampling import engine as engine_lib
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.sampler import Completion, SampleCounts, Sampler
from klear_jax.train import optim
from klear_jax.train.checkpoint import Checkpoints, model_record, restore_or_init
from klear_jax.train.state import abstract_state, init_state
from klear_jax.train.step import make_scorer, make_step

FULL = Format(think_opened=True, think_closed=True, boxed=True)
RIGHT, WRONG = Verdict.right(format=FULL), Verdict.miss(Reason.WRONG, format=FULL)
CONFIG = LoopConfig(
    steps=4, samples=2, keep=3, updates=2, max_tokens=6, temperature=0.5, group_filter="reward",
    eval_every=2, save_every=3,
)  # fmt: skip


def one_device():
    return make_mesh(MeshSpec(), jax.devices()[:1])


def raw(kind, verdict):
    return verdict.reward


# --- fakes ------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeState:
    """Its parameters are a number: how many updates were taken."""

    params: int


class Fakes:
    """Every argument of the loop, and a list of what was called."""

    copied_bytes = 0

    def __init__(self, *, verdict=None, stop_after=math.inf, skipped=0):
        self.counts = SampleCounts(busy_row_steps=8, busy_live_steps=6)
        self.events = []
        self.params = None
        self.verdict = verdict or (lambda text: RIGHT if text == "0" else WRONG)
        self.stop_after, self.steps, self.skipped = stop_after, 0, skipped
        self.logged = []
        self.noise = []
        self.trained_on, self.saved = [], []

    def problems(self, number):
        self.events.append(("problems", number))
        return [Problem(f"{number}-{i}", (Message("user", "q"),), "1") for i in range(4)]

    def update(self, params):
        self.params = params

    def release(self):
        self.events.append(("release", self.params))
        self.params = None

    def sample(self, requests):
        self.events.append(("sample", self.params, len(requests)))
        self.noise.append([request.sample_id for request in requests])
        for request in reversed(requests):
            member = int(request.id.partition("/")[2])
            yield Completion(request.id, np.array([member, 9], np.int32), np.zeros(2), "stop")

    def grade(self, problem, text):
        return self.verdict(text)

    def score(self, params, batch, microbatches):
        self.events.append(("score", params))
        return (jnp.full(batch.old_logprobs.shape, float(params)),) * 2

    def step(self, state, batch, microbatches, rate):
        old = set(np.unique(batch.old_logprobs).tolist())
        self.events.append(("step", state.params, old, rate, microbatches))
        values = {
            "loss": np.float32(state.params), "grad_norm": np.float32(state.params % 2),
            "updates_skipped": np.int32(self.skipped), "tokens/trained": np.int32(4),
            "ratio/max": np.float32(state.params), "ratio_histogram": np.ones(3),
            "nll_positive": np.float32(math.nan if state.params % 2 else 3.0),
        }  # fmt: skip
        return FakeState(state.params + 1), values

    def log(self, phase, step, values):
        self.events.append(("log", step))
        self.logged.append((phase, step, values))

    def evaluate(self, state, step):
        self.events.append(("evaluate", state.params, step))

    def rolled_out(self, done):
        self.trained_on.append(done)

    def save(self, state, step, position, ahead):
        self.events.append(("save", state.params, step))
        self.saved.append((position, tuple(ahead)))

    def stop(self):
        self.steps += 1
        return self.steps >= self.stop_after

    def run(self, cfg=CONFIG, first_step=0, params=0):
        return train_gppo(
            cfg, state=FakeState(params), first_step=first_step, problems=self.problems,
            encode=lambda problem: (1, 2), decode=lambda ids: str(ids[0]), sampler=self,
            grade=self.grade, reward=raw, objective=Objective(), layout=Layout(16, 2, 3),
            score=self.score, step=self.step, learning_rate=lambda n: n / 10,
            mesh=one_device(), hooks=self,
        )  # fmt: skip


def test_order_of_calls():
    """Four problems of which three are kept, in mini-batches of two and one."""
    fakes = Fakes()
    state = fakes.run()
    expected = []
    for n in range(4):
        p = 2 * n
        expected += [
            ("problems", n), ("sample", p, 8),
            # Both old log-probs come from the policy that sampled.
            ("score", p), ("score", p),
            ("step", p, {float(p)}, n / 10, 1), ("step", p + 1, {float(p)}, n / 10, 1),
            # How far the policy moved, on the first mini-batch.
            ("score", p + 2), ("log", n + 1),
        ]  # fmt: skip
        expected += [("evaluate", p + 2, n + 1)] if n + 1 in (2, 4) else []
        expected += [("save", p + 2, n + 1)] if n + 1 in (3, 4) else []
    assert fakes.events == expected
    assert state.params == 8


def test_noise_of_a_problem_differs_between_steps_and_repeats():
    """The same four problems at every step; groups of two."""
    one, two = Fakes(), Fakes()
    for fakes in (one, two):
        fakes.problems = lambda number: Fakes.problems(Fakes(), 0)
        fakes.run()
    assert one.noise == two.noise
    assert len({i for ids in one.noise for i in ids}) == 4 * 8


def happened(fakes, name):
    return [event[-1] for event in fakes.events if event[0] == name]


@pytest.mark.parametrize(
    ("eval_every", "save_every", "evaluated", "saved"),
    [(1, 2, [1, 2, 3, 4], [2, 4]), (0, 0, [4], [4]), (3, 1, [3, 4], [1, 2, 3, 4])],
)
def test_cadence(eval_every, save_every, evaluated, saved):
    fakes = Fakes()
    fakes.run(dataclasses.replace(CONFIG, eval_every=eval_every, save_every=save_every))
    assert happened(fakes, "evaluate") == evaluated
    assert happened(fakes, "save") == saved


@pytest.mark.parametrize("at", [1, 2, 4])
def test_stop_saves_and_ends(at):
    fakes = Fakes(stop_after=at)
    assert fakes.run().params == 2 * at
    assert happened(fakes, "log") == list(range(1, at + 1))
    assert happened(fakes, "save")[-1] == at
    assert happened(fakes, "save").count(at) == 1
    assert fakes.events[-1] == ("save", 2 * at, at)
    # The last evaluation is made although the end was asked for in the last step.
    assert happened(fakes, "evaluate") == [n for n in (2, 4) if n < at or at == 4]


def test_a_later_first_step():
    fakes = Fakes()
    fakes.run(first_step=3, params=6)
    assert happened(fakes, "problems") == [3]
    assert happened(fakes, "log") == [4]
    nothing = Fakes()
    assert nothing.run(first_step=4, params=8).params == 8
    assert nothing.events == []


@pytest.mark.parametrize("verdict", [RIGHT, WRONG, None], ids=["right", "wrong", "invalid"])
def test_steps_in_which_nothing_can_be_learned(verdict):
    """Counted and left out: no update, no NaN, and the run goes on."""

    def judge(text):
        if verdict is None:
            raise RuntimeError("no grader")
        return verdict

    fakes = Fakes(verdict=judge)
    assert fakes.run().params == 0
    assert not [e for e in fakes.events if e[0] in ("score", "step")]
    assert happened(fakes, "save") == [3, 4]
    for phase, _, values in fakes.logged:
        assert phase == "rl"
        assert (values["updates"], values["updates_skipped"], values["groups/trained"]) == (0, 0, 0)
        assert values["groups/informative"] == 0
        assert values["invalid"] == (8 if verdict is None else 0)
        assert values["padding_share"] == 0
        assert values["updates_missing"] == 2
        finite = {k for k, v in values.items() if np.isfinite(v)}
        assert values.keys() - finite == (
            set() if verdict else {"reward", "accuracy", "groups/expected_informative"}
        )


def test_filter_none_trains_on_equal_rewards():
    fakes = Fakes(verdict=lambda text: WRONG)
    assert fakes.run(dataclasses.replace(CONFIG, group_filter="none")).params == 8


def test_metrics_of_a_step():
    """Two updates with parameters 0 and 1: means, maxima and sums; a missing value is left out."""
    fakes = Fakes(skipped=1)
    fakes.run(dataclasses.replace(CONFIG, steps=1))
    ((_, _, values),) = fakes.logged
    expected = {
        "loss": 0.5, "grad_norm": 0.5, "grad_norm_max": 1, "updates_skipped": 2,
        "tokens/trained": 8, "ratio/max": 1, "nll_positive": 3.0, "updates": 0, "lr": 0,
        "groups/trained": 3, "groups/informative": 1.0, "reward": 0.5, "tokens/sampled": 16,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert values["ratio_histogram"].tolist() == [2, 2, 2]
    # Two samples of three cells in each group; rows of 16, two a micro-batch.
    assert values["padding_share"] == pytest.approx(1 - (12 + 6) / 64)


def test_no_update_of_a_step_has_a_value():
    nan = np.float32(math.nan)
    skipped = {"updates_skipped": 1, "grad_norm": nan, "nll_positive": 9.0}
    taken = {"updates_skipped": 0, "grad_norm": 1.0, "nll_positive": 2.0}
    merged = loop.merge_updates([taken, skipped])
    assert merged.pop("by_update/grad_norm")[0] == 1.0
    assert merged == {
        "updates_skipped": 1, "grad_norm": 1.0, "nll_positive": 2.0, "grad_norm_max": 1.0
    }  # fmt: skip
    merged = loop.merge_updates([{"updates_skipped": 0, "grad_norm": 1.0, "nll_positive": nan}] * 2)
    assert math.isnan(merged["nll_positive"])


def test_grading_overlaps_decoding():
    """The sampler does not go on until the first completion has been graded."""
    fakes, graded = Fakes(), threading.Event()
    sample = fakes.sample

    def slow(requests):
        completions = sample(requests)
        yield next(completions)
        assert graded.wait(60), "grading waits for decoding to end"
        yield from completions

    fakes.sample = slow
    fakes.verdict = lambda text: (graded.set(), WRONG)[1]
    fakes.run(dataclasses.replace(CONFIG, steps=1))


# --- how off-policy an update is ---------------------------------------------------------------


def steps_of(fakes):
    """(updates taken before, updates the old policy had taken) of every optimizer step."""
    return [(event[1], *event[2]) for event in fakes.events if event[0] == "step"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_lag_is_exact(lag, overlap):
    """Step n trains on what the policy of step n - lag sampled, two updates a step."""
    fakes = Fakes()
    fakes.run(dataclasses.replace(CONFIG, lag=lag, overlap=overlap))
    expected = [(2 * n + k, 2 * max(n - lag, 0)) for n in range(4) for k in range(2)]
    assert steps_of(fakes) == expected
    # Each batch of problems was drawn once, and none for steps that do not come.
    assert happened(fakes, "problems") == [0, 1, 2, 3]
    assert [r.number for r in fakes.trained_on] == [0, 1, 2, 3]
    # With an overlap the sampler has a copy of its own; each goes before the next is made.
    assert ("release" in {event[0] for event in fakes.events}) == overlap
    # What waits is handed to each save, which comes after steps 3 and 4.
    waiting = [[r.number for r in ahead] for _, ahead in fakes.saved]
    assert waiting == [[3], []]


def test_epochs_and_updates_are_exact():
    fakes = Fakes()
    fakes.run(dataclasses.replace(CONFIG, epochs=3, steps=2))
    assert steps_of(fakes) == [(6 * n + k, 6 * n) for n in range(2) for k in range(6)]
    for _, _, values in fakes.logged:
        assert values["updates"] == 6
        assert values["updates_missing"] == 0
        assert len(values["by_update/loss"]) == 6


def test_metrics_by_update_are_in_order():
    fakes = Fakes()
    fakes.run(dataclasses.replace(CONFIG, epochs=2, steps=1))
    assert fakes.logged[0][2]["by_update/loss"] == [0, 1, 2, 3]


def test_fewer_groups_than_updates():
    """Three groups and five updates: one group each, and the metric says what is missing."""
    fakes = Fakes()
    fakes.run(dataclasses.replace(CONFIG, updates=5, steps=1))
    assert [len(fakes.trained_on[0].minibatches), len(steps_of(fakes))] == [3, 3]
    assert fakes.logged[0][2]["updates_missing"] == 2


def test_dynamic_sampling_fills_the_step():
    """Batches 0, 3, 6, ... of problems are informative: each step draws until it has three."""
    fakes = Fakes()
    number_of = {}

    def problems(number):
        batch = Fakes.problems(fakes, number)
        number_of.update({problem.id: number for problem in batch})
        return batch

    def grade(problem, text):
        informative = number_of[problem.id] % 3 == 0
        return RIGHT if informative and text == "0" else WRONG

    fakes.problems, fakes.grade = problems, grade
    fakes.run(dataclasses.replace(CONFIG, rounds=4, steps=3, save_every=1))
    assert happened(fakes, "problems") == [0, 1, 2, 3, 4, 5, 6]
    assert [values["rounds"] for _, _, values in fakes.logged] == [1, 3, 3]
    assert [values["groups/trained"] for _, _, values in fakes.logged] == [3, 3, 3]
    assert [values["groups/sampled"] for _, _, values in fakes.logged] == [4, 12, 12]
    assert [position for position, _ in fakes.saved] == [1, 4, 7]
    # Noise is named by the batch of problems, so no two rounds share it.
    drawn = [noise for noises in fakes.noise for noise in noises]
    assert len(set(drawn)) == len(drawn)


def test_dynamic_sampling_of_a_uniform_source_falls_back():
    """After the last round the step trains on what there is: here nothing, and the run goes on."""
    fakes = Fakes(verdict=lambda text: WRONG)
    assert fakes.run(dataclasses.replace(CONFIG, rounds=3, steps=2)).params == 0
    assert happened(fakes, "problems") == [0, 1, 2, 3, 4, 5]
    for _, _, values in fakes.logged:
        assert (values["rounds"], values["updates"], values["updates_missing"]) == (3, 0, 2)


def test_dynamic_sampling_keeps_a_partly_filled_step():
    fakes = Fakes()
    fakes.grade = lambda problem, text: RIGHT if problem.id == "0-1" and text == "0" else WRONG
    fakes.run(dataclasses.replace(CONFIG, rounds=2, steps=1))
    (_, _, values) = fakes.logged[0]
    assert (values["rounds"], values["groups/trained"], values["updates"]) == (2, 1, 1)


def test_sampler_metrics_are_those_of_all_rounds():
    fakes = Fakes(verdict=lambda text: WRONG)
    sample, numbers = fakes.sample, iter([(8, 6, 1), (32, 8, 2)])

    def sample_and_count(requests):
        rows, live, aside = next(numbers)
        fakes.counts = SampleCounts(busy_row_steps=rows, busy_live_steps=live, set_aside=aside)
        return sample(requests)

    fakes.sample = sample_and_count
    fakes.run(dataclasses.replace(CONFIG, rounds=2, steps=1))
    (_, _, values) = fakes.logged[0]
    assert (values["sampler/fill"], values["sampler/set_aside"]) == (14 / 40, 3)


def test_an_error_while_sampling_beside_the_updates_ends_the_run():
    fakes = Fakes()

    def problems(number):
        if number == 2:
            raise OSError("the problems are gone")
        return Fakes.problems(fakes, number)

    fakes.problems = problems
    with pytest.raises(OSError, match="the problems are gone"):
        fakes.run(dataclasses.replace(CONFIG, lag=1, overlap=True))


# --- the real parts ---------------------------------------------------------------------------

CFG = QWEN3["tiny"]
TOKENIZER = load_tokenizer("bytes")
OPTIM = optim.OptimConfig(learning_rate=1e-3)
REAL = dataclasses.replace(
    CONFIG, steps=6, samples=4, keep=4, max_tokens=24, temperature=0.8, eval_every=0, save_every=3
)
ENGINE = EngineConfig(
    slots=8, length=64, stop_ids=(*TOKENIZER.stop_ids, *range(0, 250, 12)), prefill_rows=4
)
LAYOUT = Layout(row_tokens=64, rows=4, microbatches=2)
TIMES = ("seconds/sample", "seconds/train", "seconds/score", "step_seconds", "tokens_per_second")


@functools.cache
def parts():
    """The compiled functions, shared by all runs of a test."""
    optimizer = optim.make_optimizer(OPTIM)
    loss = make_policy_loss(CFG, clip=Clip(), temperature=0.8)
    return optimizer, make_step(loss, optimizer=optimizer), make_scorer(CFG, temperature=0.8)


def even(problem, text):
    """Something that random weights do now and then and that depends on every token."""
    return RIGHT if sum(text.encode()) % 2 else WRONG


class RealHooks:
    def __init__(self, folder=None, stop_at=None):
        self.lines, self.ahead = [], {}
        self.saves = Checkpoints(folder) if folder else None
        self.stop_at = stop_at

    def log(self, phase, step, values):
        self.lines.append((step, {k: v for k, v in values.items() if k not in TIMES}))

    def evaluate(self, state, step):
        pass

    def rolled_out(self, done):
        pass

    def save(self, state, step, position, ahead):
        self.ahead[step] = (position, ahead)
        if self.saves:
            self.saves.save(step, state, {"model": model_record(CFG)})

    def stop(self):
        return self.stop_at is not None and len(self.lines) >= self.stop_at


def train(mesh, hooks, cfg=REAL, *, step=None, reward=raw, grade=even, position=None, ahead=()):
    """A run of the tiny model, from the last checkpoint of `hooks` where there is one."""
    optimizer, real_step, score = parts()

    def make():
        return init_state(params_lib.init(CFG, 0, mesh), optimizer)

    with jax.set_mesh(mesh):
        state, first = make(), 0
        if hooks.saves:
            record = {"model": model_record(CFG)}
            abstract = abstract_state(CFG, optimizer, mesh)
            state, first = restore_or_init(hooks.saves, record, abstract, make)
        return train_gppo(
            cfg, state=state, first_step=first,
            problems=task_stream(("sum", "sort"), 6, seed=3),
            encode=lambda p: tuple(encode_prompt(TOKENIZER, p.messages)),
            decode=lambda ids: TOKENIZER.decode(ids.tolist()),
            sampler=Sampler(state.params, CFG, ENGINE, seed=1), grade=grade, reward=reward,
            objective=Objective(), layout=LAYOUT, score=score, step=step or real_step,
            learning_rate=lambda n: OPTIM.learning_rate, mesh=mesh, hooks=hooks,
            position=position, ahead=ahead,
        )  # fmt: skip


def assert_same(got, expected):
    got, expected = jax.device_get((got, expected))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def assert_same_lines(got, expected):
    assert [step for step, _ in got] == [step for step, _ in expected]
    for (step, mine), (_, other) in zip(got, expected, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], other[name], err_msg=f"{name} of {step}")


@pytest.fixture(scope="module")
def whole():
    """Six steps in one go on one device: the state on the host, and the log."""
    hooks = RealHooks()
    state = jax.device_get(train(one_device(), hooks))
    assert all(values["updates"] == 2 for _, values in hooks.lines)
    assert int(state.updates) == 12
    return state, hooks.lines


def test_first_update_is_on_policy_and_the_second_is_not(whole):
    _, real_step, _ = parts()
    updates = []

    def step(*args):
        state, metrics = real_step(*args)
        updates.append(jax.device_get(metrics))
        return state, metrics

    hooks = RealHooks()
    train(one_device(), hooks, dataclasses.replace(REAL, steps=2), step=step)
    assert_same_lines(hooks.lines, whole[1][:2])
    for first, second in (updates[:2], updates[2:]):
        middle = first["ratio_histogram"].shape[0] // 2
        counts = first["ratio_histogram"]
        assert counts[middle - 1 : middle + 1].sum() == counts.sum() == first["tokens/trained"]
        assert abs(first["ratio/max"] - 1) < 1e-5
        assert abs(first["kl"]) < 1e-9
        assert first["clip/pos_high"] == first["clip/neg_low"] == 0
        # The sampler and the trainer agree about what was drawn.
        assert first["sampler_gap/max"] < 1e-4
        assert second["ratio/max"] - 1 > 1e-3


def test_every_ratio_of_the_first_update_is_one():
    """max |r - 1| < 1e-5, seen by a loss that returns the ratios themselves."""
    _, _, score = parts()
    seen = []

    def step(state, batch, microbatches, rate):
        gap = jnp.abs(score(state.params, batch, microbatches)[0] - batch.old_logprobs)
        seen.append(float(jnp.where(batch.mask, gap, 0).max()))
        return parts()[1](state, batch, microbatches, rate)

    train(one_device(), RealHooks(), dataclasses.replace(REAL, steps=1), step=step)
    assert seen[0] < 1e-5
    assert seen[1] > 1e-3


def test_nothing_is_compiled_again(whole):
    """Lengths and counts of all kinds came up in `whole`; one more step on a state of its own."""
    _, step, score = parts()
    lengths = {values["length/mean"] for _, values in whole[1]}
    assert len(lengths) > 1
    engine = (engine_lib.prefill, engine_lib.insert, engine_lib.generate)
    functions = (step, score, *(f.jitted("cpu") for f in engine))
    before = [f._cache_size() for f in functions]
    train(one_device(), RealHooks(), dataclasses.replace(REAL, steps=3))
    assert [f._cache_size() for f in functions] == before


@pytest.mark.parametrize(
    "spec", ["data:1", pytest.param("fsdp:2,tensor:2", marks=pytest.mark.slow)]
)
def test_one_program_for_every_step(spec):
    """A fresh state and one that a step returned have one layout."""
    mesh = one_device() if spec == "data:1" else make_mesh(MeshSpec.parse(spec))
    optimizer = parts()[0]
    loss = make_policy_loss(CFG, clip=Clip(), temperature=0.8)
    step, score = make_step(loss, optimizer=optimizer), make_scorer(CFG, temperature=0.8)
    with jax.set_mesh(mesh):
        state = init_state(params_lib.init(CFG, 0, mesh), optimizer)
        train_gppo(
            dataclasses.replace(REAL, steps=3), state=state, first_step=0,
            problems=task_stream(("sum",), 4, seed=3),
            encode=lambda p: tuple(encode_prompt(TOKENIZER, p.messages)),
            decode=lambda ids: TOKENIZER.decode(ids.tolist()),
            sampler=Sampler(state.params, CFG, ENGINE, seed=1), grade=even, reward=raw,
            objective=Objective(), layout=LAYOUT, score=score, step=step,
            learning_rate=lambda n: OPTIM.learning_rate, mesh=mesh, hooks=RealHooks(),
        )  # fmt: skip
    assert (step._cache_size(), score._cache_size()) == (1, 1)


@pytest.mark.parametrize("stop_at", [None, 2], ids=["save", "stop"])
def test_resume_is_bitwise(whole, tmp_path, stop_at):
    """Six steps equal three and three, and also two, an interruption, and four."""
    state, lines = whole
    first = RealHooks(tmp_path, stop_at)
    train(one_device(), first, dataclasses.replace(REAL, steps=6 if stop_at else 3))
    first.saves.close()
    assert len(first.lines) == (stop_at or 3)
    rest, programs = RealHooks(tmp_path), parts()[1]._cache_size()
    resumed = train(one_device(), rest)
    rest.saves.close()
    assert parts()[1]._cache_size() == programs
    assert_same_lines(first.lines + rest.lines, lines)
    assert_same(resumed, state)


def test_resume_on_another_mesh(whole, tmp_path):
    """A checkpoint of one device goes on over four; the first step sees the same rollouts."""
    first = RealHooks(tmp_path)
    train(one_device(), first, dataclasses.replace(REAL, steps=3))
    first.saves.close()
    rest = RealHooks(tmp_path)
    state = train(make_mesh(MeshSpec.parse("fsdp:2,tensor:2")), rest)
    rest.saves.close()
    assert [step for step, _ in rest.lines] == [4, 5, 6]
    (_, got), (_, expected) = rest.lines[0], whole[1][3]
    for name in ("reward", "tokens/sampled", "tokens/trained", "groups/trained"):
        assert got[name] == expected[name]
    for name in ("loss", "grad_norm", "entropy"):
        assert got[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5)
    assert int(state.updates) == 12
    assert state.params.embed.sharding.mesh.shape["tensor"] == 2


def test_nothing_to_learn_leaves_the_weights(whole):
    hooks = RealHooks()
    cfg = dataclasses.replace(REAL, steps=2)
    state = train(one_device(), hooks, cfg, grade=lambda problem, text: WRONG)
    assert_same(state.params, params_lib.init(CFG, 0, one_device()))
    assert int(state.updates) == 0
    assert [values["updates"] for _, values in hooks.lines] == [0, 0]


def test_a_broken_grader_is_counted_and_the_rest_trains(whole):
    calls = collections.Counter()

    def grade(problem, text):
        calls[problem.id] += 1
        if problem.source == "sort":
            raise OSError("grader died")
        return even(problem, text)

    hooks = RealHooks()
    train(one_device(), hooks, dataclasses.replace(REAL, steps=1), grade=grade)
    ((_, values),) = hooks.lines
    assert values["invalid"] == 12
    assert values["groups/trained"] <= 3
    assert values["updates"] > 0
    assert np.isfinite(values["loss"])


@pytest.fixture(scope="module")
def lagging():
    """Six steps with a lag of one step."""
    hooks = RealHooks()
    cfg = dataclasses.replace(REAL, lag=1)
    return jax.device_get(train(one_device(), hooks, cfg)), hooks.lines


def test_one_step_off_overlaps_and_is_exactly_lag_one(whole, lagging):
    state, lines = lagging
    hooks = RealHooks()
    overlapped = train(one_device(), hooks, dataclasses.replace(REAL, lag=1, overlap=True))
    assert_same_lines(hooks.lines, lines)
    assert_same(overlapped, state)
    # And it is another run than one without a lag, from the second step on.
    assert lines[0][1]["loss"] == whole[1][0][1]["loss"]
    assert lines[1][1]["loss"] != whole[1][1][1]["loss"]
    assert lines[1][1]["by_update/ratio/max"][0] > 1 + 1e-3


def test_a_lagging_run_resumes_bitwise(lagging, tmp_path):
    """What was sampled ahead is kept with the checkpoint, as a file."""
    state, lines = lagging
    cfg = dataclasses.replace(REAL, lag=1)
    first = RealHooks(tmp_path, stop_at=3)
    train(one_device(), first, cfg)
    first.saves.close()
    position, (waiting,) = first.ahead[3]
    assert position == 4
    save_rollout(tmp_path / "ahead.npz", waiting, {})
    restored, _ = load_rollout(tmp_path / "ahead.npz", one_device())
    assert_same(restored.minibatches[0].batch, waiting.minibatches[0].batch)
    rest = RealHooks(tmp_path)
    resumed = train(one_device(), rest, cfg, position=position, ahead=[restored])
    rest.saves.close()
    assert_same_lines(first.lines + rest.lines, lines)
    assert_same(resumed, state)
