# SPDX-License-Identifier: Apache-2.0
"""From groups to mini-batches: every weight, mask and count against numbers worked out by hand."""

import threading
import time

import numpy as np
import pytest

from klear_jax.data.problems import Message, Problem
from klear_jax.rewards.verdict import Format, Reason, Verdict
from klear_jax.rl import minibatch as minibatch_lib
from klear_jax.rl import rollout
from klear_jax.rl.minibatch import Layout
from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout import Group, Overlong
from klear_jax.sampling.sampler import Completion

END = 0
"""The end token, which is also what padding holds."""
FULL = Format(think_opened=True, think_closed=True, boxed=True)
RIGHT, WRONG = Verdict.right(format=FULL), Verdict.miss(Reason.WRONG, format=FULL)
BROKEN = Verdict.invalid(Reason.INFRASTRUCTURE, format=FULL)
VERDICTS = {"+": RIGHT, "-": WRONG, "?": BROKEN}
LAYOUT = Layout(row_tokens=24, rows=2, microbatches=4)


def problem_of(name):
    return Problem(id=str(name), messages=(Message("user", f"question {name}"),), answer="1")


def group_of(name, marks, lengths=None, prompt=(7, 8, 9)):
    """A group from marks such as "+-?": right, wrong, invalid. Sample i of length n ends by END."""
    lengths = [3] * len(marks) if lengths is None else lengths
    completions = []
    for i, n in enumerate(lengths):
        tokens = np.append(np.arange(100 + 10 * i, 100 + 10 * i + n - 1), END).astype(np.int32)
        completions.append(Completion(f"{name}/{i}", tokens, -np.arange(1.0, n + 1), "stop"))
    verdicts = tuple(VERDICTS[mark] for mark in marks)
    return Group(problem_of(name), tuple(prompt), tuple(completions), tuple(marks), verdicts)


def rewards_of(groups):
    return rollout.training_rewards(groups, lambda kind, verdict: verdict.reward, Overlong(), 10)


def valid_of(groups):
    return rollout.trainable(groups, Overlong())


def kept_of(groups, rewards, group_filter, limit):
    valid = valid_of(groups)
    return rollout.keep_informative(groups, rewards, valid, group_filter, limit)


def summary_of(groups, kept):
    return rollout.summarise(groups, rewards_of(groups), valid_of(groups), kept)


def assembled(groups, updates, layout=LAYOUT, max_tokens=10, **objective):
    return minibatch_lib.assemble(
        groups, rewards_of(groups), valid_of(groups), Objective(**objective),
        updates=updates, layout=layout, max_tokens=max_tokens,
    )  # fmt: skip


def flat(minibatch, name):
    return getattr(minibatch.batch, name).reshape(-1)


def targets_of(minibatch):
    return flat(minibatch, "targets")[flat(minibatch, "mask")].tolist()


# --- requests ---------------------------------------------------------------------------------


def requests(step, samples=4, names="ab"):
    return rollout.make_requests(
        [problem_of(n) for n in names], lambda p: (1, ord(p.id)),
        step=step, samples=samples, max_tokens=5, temperature=0.7,
    )  # fmt: skip


def test_requests_are_in_order_and_carry_everything():
    made = requests(3, samples=2)
    assert [r.id for r in made] == ["0/0", "0/1", "1/0", "1/1"]
    assert [r.prompt for r in made] == [(1, 97), (1, 97), (1, 98), (1, 98)]
    assert {(r.max_tokens, r.temperature) for r in made} == {(5, 0.7)}


def test_noise_differs_within_a_group_between_problems_and_between_steps_and_repeats():
    ids = [r.sample_id for step in (1, 2, 12, "evaluation") for r in requests(step, samples=8)]
    assert len(set(ids)) == 4 * 2 * 8
    assert ids == [r.sample_id for s in (1, 2, 12, "evaluation") for r in requests(s, samples=8)]
    assert all(0 <= i < 2**32 for i in ids)
    # The noise of a problem does not depend on its place in the step.
    assert requests(1, names="b")[0].sample_id == requests(1, names="ab")[4].sample_id
    # Parts do not run into one another.
    assert rollout.sample_id(1, "12", 3) != rollout.sample_id(11, "2", 3)


def test_noise_is_pinned():
    """A change of the hash changes every published run."""
    assert rollout.sample_id(0, "sum-12+34", 5) == 517825253


# --- grading ----------------------------------------------------------------------------------


def completions_of(made, order):
    return [Completion(made[i].id, np.array([i, END]), np.zeros(2), "stop") for i in order]


def collect(made, completions, grade, decode=lambda ids: f"text {ids[0]}"):
    problems = [problem_of(n) for n in "ab"]
    return rollout.collect(problems, made, completions, decode=decode, grade=grade)


def test_collect_restores_the_order_whatever_finishes_first():
    made = requests(0)
    seen = []

    def grade(problem, text):
        seen.append((problem.id, text))
        return RIGHT if text in ("text 1", "text 6") else WRONG

    groups = collect(made, completions_of(made, [5, 0, 7, 1, 6, 2, 4, 3]), grade)
    assert [g.problem.id for g in groups] == ["a", "b"]
    assert [g.prompt for g in groups] == [(1, 97), (1, 98)]
    assert [c.id for g in groups for c in g.completions] == [r.id for r in made]
    assert groups[0].texts == ("text 0", "text 1", "text 2", "text 3")
    assert groups[0].correct.tolist() == [False, True, False, False]
    assert groups[1].correct.tolist() == [False, False, True, False]
    assert sorted(seen) == [("a" if i < 4 else "b", f"text {i}") for i in range(8)]


def test_a_grader_that_raises_makes_its_sample_invalid_and_no_other():
    made = requests(0)

    def grade(problem, text):
        if text == "text 2":
            raise RuntimeError("lost worker")
        return RIGHT

    groups = collect(made, completions_of(made, range(8)), grade)
    assert groups[0].valid.tolist() == [True, True, False, True]
    assert groups[1].valid.all()
    verdict = groups[0].verdicts[2]
    assert verdict.reason is Reason.INFRASTRUCTURE
    assert verdict.detail == "RuntimeError: lost worker"
    assert np.isnan(verdict.reward)


def test_grading_starts_while_others_still_decode():
    made = requests(0)
    graded = threading.Event()

    def decode_slowly():
        first, *rest = completions_of(made, range(8))
        yield first
        assert graded.wait(60), "the first completion was not graded while others were decoded"
        yield from rest

    def grade(problem, text):
        graded.set()
        return WRONG

    assert len(collect(made, decode_slowly(), grade)) == 2


def test_samples_of_one_moment_are_graded_side_by_side():
    made = requests(0)
    together = threading.Barrier(rollout.GRADING_THREADS, timeout=60)
    groups = collect(
        made, completions_of(made, range(8)), lambda problem, text: (together.wait(), RIGHT)[1]
    )
    assert all(group.valid.all() for group in groups), "the barrier broke"


def test_an_interrupt_does_not_wait_for_the_queue():
    made = requests(0, samples=100)
    graded = []

    def interrupted():
        yield from completions_of(made, range(200))
        raise KeyboardInterrupt

    def grade(problem, text):
        graded.append(text)
        time.sleep(0.05)
        return WRONG

    with pytest.raises(KeyboardInterrupt):
        collect(made, interrupted(), grade)
    assert len(graded) < 100


# --- which groups -----------------------------------------------------------------------------


def test_filter_keeps_what_can_teach_in_order_without_refill():
    groups = [group_of(i, m) for i, m in enumerate(["++", "+-", "--", "-+", "?+", "+-", "??"])]
    rewards = rewards_of(groups)
    assert kept_of(groups, rewards, "reward", 9) == [1, 3, 5]
    assert kept_of(groups, rewards, "reward", 2) == [1, 3]
    assert kept_of(groups, rewards, "accuracy", 9) == [1, 3, 5]
    assert kept_of(groups[:1], rewards[:1], "reward", 9) == []


def test_filter_none_keeps_all_but_groups_without_a_valid_sample():
    groups = [group_of(i, m) for i, m in enumerate(["??", "++", "?-", "--"])]
    assert kept_of(groups, rewards_of(groups), "none", 9) == [1, 2, 3]


def test_accuracy_filter_looks_at_correctness_and_reward_filter_at_rewards():
    """Two wrong answers of which one has no think block: rewards differ, correctness does not."""
    groups = [group_of(0, "--"), group_of(1, "++")]
    rewards = np.array([[-1.0, -0.5], [1.0, -1.0]])
    assert kept_of(groups, rewards, "reward", 9) == [0, 1]
    assert kept_of(groups, rewards, "accuracy", 9) == []


# --- mini-batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "updates", "expected"),
    [(8, 4, [2, 2, 2, 2]), (6, 4, [2, 2, 1, 1]), (3, 4, [1, 1, 1]), (1, 4, [1]), (5, 1, [5])],
)
def test_whole_groups_in_so_many_minibatches(count, updates, expected):
    layout = Layout(row_tokens=24, rows=2, microbatches=6)
    groups = [group_of(i, "+-", prompt=(7, 50 + i)) for i in range(count)]
    batches = assembled(groups, updates, layout)
    # Each of two samples of a group has three tokens.
    assert [len(targets_of(m)) // 6 for m in batches] == expected
    owners = [{t - 50 for t in flat(m, "tokens").tolist() if t in range(50, 60)} for m in batches]
    assert sorted(i for owner in owners for i in owner) == list(range(count))


def test_no_group_gives_no_minibatch():
    assert assembled([], 4) == []


def test_all_minibatches_have_one_shape_and_count_what_they_use():
    groups = [group_of(0, "+-", lengths=[20, 20]), group_of(1, "+-", lengths=[2, 2])]
    batches = assembled(groups, 2)
    shapes = {x.shape for m in batches for x in vars(m.batch).values()}
    assert shapes == {(4, 2, 24)}
    assert [m.microbatches for m in batches] == [1, 1]
    assert batches[0].padding_share == pytest.approx(1 - 2 * 22 / 48)
    assert batches[1].padding_share == pytest.approx(1 - 2 * 4 / 48)
    (third,) = assembled([group_of(0, "+--", lengths=[20, 20, 20])], 1)
    assert third.microbatches == 2


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_of_every_minibatch_sum_to_one(updates, aggregation):
    groups = [group_of(i, "+-?", lengths=[2 + i, 5, 9]) for i in range(4)]
    for minibatch in assembled(groups, updates, aggregation=aggregation):
        assert flat(minibatch, "loss_weights").sum() == pytest.approx(1, rel=1e-6)


def test_token_weights_by_hand():
    """Two sequences of 2 and 6 tokens, constant L = 8 (faults.md: losses 1 and 3 each)."""
    lengths, losses = np.array([2, 6]), np.array([1.0, 3.0])

    def value(aggregation):
        return (minibatch_lib.token_weights(lengths, aggregation, 8) * lengths * losses).sum()

    np.testing.assert_allclose(
        minibatch_lib.token_weights(lengths, "token_mean", 8), [1 / 8, 1 / 8]
    )
    np.testing.assert_allclose(
        minibatch_lib.token_weights(lengths, "sequence_mean", 8), [1 / 4, 1 / 12]
    )
    np.testing.assert_allclose(
        minibatch_lib.token_weights(lengths, "constant", 8), [1 / 16, 1 / 16]
    )
    assert value("token_mean") == pytest.approx(2.5)
    assert value("sequence_mean") == pytest.approx(2.0)
    assert value("constant") == pytest.approx(1.25)


def by_target(minibatch, name):
    """{target id: value} over the trained cells."""
    mask = flat(minibatch, "mask")
    values = flat(minibatch, name)[mask].tolist()
    return dict(zip(flat(minibatch, "targets")[mask].tolist(), values, strict=True))


def test_values_of_one_group_by_hand():
    """Three valid samples of 2, 3 and 5 tokens, rewards 1, 0, 0, and an invalid one of 4."""
    (minibatch,) = assembled([group_of(0, "+-?-", lengths=[2, 3, 4, 5])], 1)
    assert sorted(targets_of(minibatch)) == sorted(
        [100, END, 110, 111, END, 130, 131, 132, 133, END]
    )
    weights, advantages = by_target(minibatch, "loss_weights"), by_target(minibatch, "advantages")
    for target in (100, 110, 111, 130, 133):
        assert weights[target] == pytest.approx(1 / 10)
    # Mean 1/3 and population deviation sqrt(2)/3 over the three valid rewards.
    assert advantages[100] == pytest.approx(2**0.5, rel=1e-6)
    assert advantages[110] == advantages[131] == pytest.approx(-(0.5**0.5), rel=1e-6)
    positives = by_target(minibatch, "positive_weights")
    assert positives[100] == pytest.approx(0.1 / 2)
    assert positives[110] == positives[130] == 0
    assert flat(minibatch, "positive_weights").sum() == pytest.approx(0.1, rel=1e-6)
    # The invalid sample is nowhere: neither as token nor as target.
    everything = {*flat(minibatch, "tokens").tolist(), *flat(minibatch, "targets").tolist()}
    assert not everything & {120, 121, 122}


def test_alpha_is_divided_by_the_positive_tokens_of_the_minibatch():
    groups = [group_of(0, "+-", lengths=[4, 9]), group_of(1, "-+", lengths=[9, 6])]
    (both,) = assembled(groups, 1, positive_nll=0.2)
    values = flat(both, "positive_weights")
    assert sorted(set(values.tolist())) == [0, pytest.approx(0.2 / 10)]
    assert (values > 0).sum() == 10
    apart = assembled(groups, 2, positive_nll=0.2)
    assert [flat(m, "positive_weights").max() for m in apart] == pytest.approx([0.05, 0.2 / 6])
    (off,) = assembled(groups, 1, positive_nll=0.0)
    assert not off.batch.positive_weights.any()


def test_no_positive_sample_gives_no_weight_and_no_nan():
    (minibatch,) = assembled([group_of(0, "--")], 1)
    assert not minibatch.batch.positive_weights.any()
    assert not minibatch.batch.advantages.any()
    assert minibatch.batch.loss_weights.sum() == pytest.approx(1)


def test_positive_threshold():
    group = group_of(0, "--")
    rewards = np.array([[0.5, 0.25]])
    (minibatch,) = minibatch_lib.assemble(
        [group], rewards, valid_of([group]), Objective(positive_threshold=0.5),
        updates=1, layout=LAYOUT, max_tokens=10,
    )  # fmt: skip
    assert (minibatch.batch.positive_weights > 0).sum() == 3


@pytest.mark.parametrize("advantage", ["group_normalised", "group_normalised_sample"])
def test_advantages_follow_the_objective(advantage):
    (minibatch,) = assembled([group_of(0, "+---")], 1, advantage=advantage)
    right = {"group_normalised": 3**0.5, "group_normalised_sample": 0.75 / (0.5 + 1e-6)}
    assert by_target(minibatch, "advantages")[100] == pytest.approx(right[advantage], rel=1e-6)


def test_the_end_token_is_trained_although_padding_has_its_id():
    """Completion [5, 6, END] with pad = END: mask [1, 1, 1], then zeros."""
    completion = Completion(
        "0/0", np.array([5, 6, END], np.int32), np.array([-1.0, -2, -3]), "stop"
    )
    group = Group(problem_of(0), (7, 8), (completion,), ("",), (RIGHT,))
    layout = Layout(row_tokens=8, rows=1, microbatches=1)
    (m,) = assembled([group], 1, layout)
    assert flat(m, "tokens").tolist() == [7, 8, 5, 6, 0, 0, 0, 0]
    assert flat(m, "targets").tolist() == [8, 5, 6, END, 0, 0, 0, 0]
    assert flat(m, "mask").tolist() == [False, True, True, True, False, False, False, False]
    assert flat(m, "segments").tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert flat(m, "sampler_logprobs").tolist() == [0, -1, -2, -3, 0, 0, 0, 0]
    third = pytest.approx(1 / 3)
    assert flat(m, "loss_weights").tolist() == [0, third, third, third, 0, 0, 0, 0]


def test_a_completion_cut_by_the_limit_is_trained_to_its_last_token():
    completion = Completion("0/0", np.array([5, 6, 9], np.int32), np.zeros(3), "length")
    group = Group(problem_of(0), (7, 8), (completion,), ("",), (WRONG,))
    (m,) = assembled([group], 1)
    assert targets_of(m) == [5, 6, 9]


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="sequence 0 needs 27 cells; a row holds 1 to 24"):
        assembled([group_of(0, "+", lengths=[25])], 1)


def test_negative_alpha_is_refused():
    with pytest.raises(ValueError, match=r"positive_nll -0\.1: must be >= 0"):
        Objective(positive_nll=-0.1)


# --- summary ----------------------------------------------------------------------------------


def test_summary_by_hand():
    groups = [group_of(0, "+--?", [2, 4, 6, 8]), group_of(1, "----", [3] * 4)]
    cut = groups[1].completions
    cut = (*cut[:3], Completion("1/3", cut[3].tokens, cut[3].logprobs, "length"))
    groups[1] = Group(groups[1].problem, groups[1].prompt, cut, groups[1].texts, groups[1].verdicts)
    values = summary_of(groups, [0])
    seventh = 1 / 7
    assert values == {
        "reward": pytest.approx(seventh),
        "accuracy": pytest.approx(seventh),
        "groups/informative": 0.5,
        "groups/expected_informative": pytest.approx(1 - seventh**4 - (1 - seventh) ** 4),
        "groups/sampled": 2,
        "groups/trained": 1,
        "invalid": 1,
        "invalid_share": 1 / 8,
        "overlong_filtered": 0,
        "length/mean": 4.0,
        "length/max": 8,
        "truncated": 1 / 8,
        "tokens/sampled": 32,
    }


def test_expected_share_of_informative_groups():
    """faults.md: p = .1819 gives .298 at G = 2 and .80 at G = 8."""
    marks = "+" * 1819 + "-" * (10_000 - 1819)
    for size, expected in ((2, 0.298), (8, 0.80)):
        groups = [group_of(i, marks[i * size : (i + 1) * size]) for i in range(10_000 // size)]
        values = summary_of(groups, [])
        assert values["groups/expected_informative"] == pytest.approx(expected, abs=2e-3)


def test_summary_of_nothing_valid_has_counts_and_no_warning():
    groups = [group_of(0, "??")]
    values = summary_of(groups, [])
    assert np.isnan(values["reward"])
    assert np.isnan(values["accuracy"])
    assert (values["invalid"], values["groups/informative"], values["groups/trained"]) == (2, 0, 0)


# --- lengths, dynamic sampling, fixed-size mini-batches -----------------------------------------


def cut_group(number, marks, lengths, cut):
    """A group whose completions numbered in `cut` were cut at the limit."""
    group = group_of(number, marks, lengths)
    completions = tuple(
        Completion(c.id, c.tokens, c.logprobs, "length" if i in cut else c.stop)
        for i, c in enumerate(group.completions)
    )
    return Group(group.problem, group.prompt, completions, group.texts, group.verdicts)


def test_dapo_keeps_the_groups_that_differ():
    """Rewards [[1, 1], [0, 0], [1, 0], [0, 1]] keep groups 2 and 3, counted from 0."""
    groups = [group_of(n, marks) for n, marks in enumerate(["++", "--", "+-", "-+"])]
    for group_filter in ("reward", "accuracy"):
        assert kept_of(groups, rewards_of(groups), group_filter, 9) == [2, 3]


def test_soft_overlong_penalty_in_tokens():
    """Limit 10, buffer 4: nothing up to 6 tokens, then a quarter a token, 1 x factor at 10."""
    group = group_of(0, "+++++", lengths=[2, 6, 7, 9, 10])
    rewards = rollout.training_rewards(
        [group], lambda kind, verdict: verdict.reward, Overlong(buffer=4, factor=2.0), 10
    )
    np.testing.assert_allclose(rewards, [[1, 1, 0.5, -0.5, -1]])


def test_overlong_filter_leaves_cut_completions_out_everywhere():
    groups = [cut_group(0, "+---", [2, 3, 4, 10], {3}), cut_group(1, "+-", [2, 10], {1})]
    (first,), (second,) = [groups[0]], [groups[1]]
    on = rollout.trainable([first], Overlong(filter=True))
    np.testing.assert_array_equal(on, [[True, True, True, False]])
    np.testing.assert_array_equal(valid_of([first]), [[True] * 4])
    # Without the cut member a pair is a singleton, which teaches nothing.
    alone = rollout.trainable([second], Overlong(filter=True))
    assert rollout.keep_informative([second], rewards_of([second]), alone, "reward", 9) == []
    (batch,) = minibatch_lib.assemble(
        [first], rewards_of([first]), on, Objective(), updates=1, layout=LAYOUT, max_tokens=10
    )
    assert batch.batch.mask.sum() == 2 + 3 + 4
    np.testing.assert_allclose(batch.batch.loss_weights.sum(), 1, rtol=1e-6)
    advantages = np.unique(batch.batch.advantages[batch.batch.mask])
    np.testing.assert_allclose(advantages, [-(0.5**0.5), 2**0.5], rtol=1e-6)
    values = rollout.summarise([first], rewards_of([first]), on, [0])
    assert (values["overlong_filtered"], values["truncated"], values["invalid"]) == (1, 0.25, 0)


@pytest.mark.parametrize("bad", [{"buffer": -1}, {"factor": -1.0, "buffer": 3}, {"factor": 2.0}])
def test_overlong_refuses(bad):
    with pytest.raises(ValueError, match="overlong"):
        Overlong(**bad)


def test_fixed_size_minibatches_weigh_the_short_last_one():
    """Five groups of two in mini-batches of two: the last has weight rows / size = 2 / 4."""
    groups = [group_of(n, "+-", lengths=[2, 3]) for n in range(5)]
    batches = minibatch_lib.assemble(
        groups, rewards_of(groups), valid_of(groups), Objective(positive_nll=0.2), updates=3,
        minibatch_groups=2, layout=LAYOUT, max_tokens=10,
    )  # fmt: skip
    sums = [float(m.batch.loss_weights.sum()) for m in batches]
    np.testing.assert_allclose(sums, [1, 1, 0.5], rtol=1e-6)
    positives = [float(m.batch.positive_weights.sum()) for m in batches]
    np.testing.assert_allclose(positives, [0.2, 0.2, 0.1], rtol=1e-6)
    assert [int(m.batch.mask.sum()) for m in batches] == [10, 10, 5]


def test_a_full_minibatch_with_an_invalid_sample_is_not_scaled():
    groups = [group_of(n, "+-?", lengths=[2, 3, 4]) for n in range(2)]
    (batch,) = minibatch_lib.assemble(
        groups, rewards_of(groups), valid_of(groups), Objective(), updates=1, minibatch_groups=2,
        layout=LAYOUT, max_tokens=10,
    )  # fmt: skip
    np.testing.assert_allclose(batch.batch.loss_weights.sum(), 1, rtol=1e-6)
