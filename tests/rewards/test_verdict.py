# SPDX-License-Identifier: Apache-2.0
"""Verdicts: no contradictory record, and the training reward of each preset by table."""

import math

import pytest

from klear_jax.rewards.verdict import TRAINING_REWARDS, Format, Kind, Reason, Verdict, format_of

FULL = Format(think_opened=True, think_closed=True, boxed=True)
CUT = Format(think_opened=True, think_closed=False, boxed=False)
HEADLESS = Format(think_opened=False, think_closed=True, boxed=True)
BARE = Format(think_opened=False, think_closed=False, boxed=True)


def code(passed: str, layout: Format) -> Verdict:
    """A code verdict from marks such as "++-"."""
    marks = tuple(mark == "+" for mark in passed)
    share = sum(marks) / len(marks)
    reason = Reason.CORRECT if all(marks) else Reason.WRONG
    return Verdict(share, all(marks), True, reason, passed=marks, format=layout)


@pytest.mark.parametrize(
    ("response", "layout"),
    [
        ("<think>\na\n</think>\n\n\\boxed{5}", FULL),
        ("<think>\\boxed{5}", Format(True, False, True)),
        ("<think>\\boxed{5}</think> five", Format(True, True, False)),
        ("a</think>\\boxed{5}", HEADLESS),
        ("\\boxed{5", Format(False, False, False)),
        ("", Format(False, False, False)),
    ],
)
def test_format_of(response: str, layout: Format) -> None:
    assert format_of(response) == layout


RIGHT, WRONG = (
    lambda layout: Verdict.right(format=layout),
    lambda layout: Verdict.miss(Reason.WRONG, format=layout),
)


@pytest.mark.parametrize(
    ("kind", "verdict", "raw", "paper", "released"),
    [
        ("math", RIGHT(FULL), 1.0, 1.0, 1.0),
        ("math", WRONG(FULL), 0.0, -1.0, -1.0),
        ("math", RIGHT(CUT), 1.0, -1.0, -0.5),
        ("math", WRONG(CUT), 0.0, -1.0, -0.5),
        ("math", RIGHT(HEADLESS), 1.0, -1.0, -2.0),
        ("math", WRONG(HEADLESS), 0.0, -1.0, -2.0),
        # No tag at all: the check for the closing one comes first.
        ("math", RIGHT(BARE), 1.0, -1.0, -0.5),
        ("math", Verdict.miss(Reason.NO_ANSWER, format=FULL), 0.0, -1.0, -1.0),
        ("math", Verdict.miss(Reason.TIMEOUT, format=FULL), 0.0, -1.0, -1.0),
        ("code", code("+---", FULL), 0.25, 0.25, -0.5),
        ("code", code("++++", FULL), 1.0, 1.0, 1.0),
        ("code", code("----", FULL), 0.0, 0.0, -1.0),
        ("code", code("+++-", HEADLESS), 0.75, 0.0, -2.0),
        ("code", code("+++-", CUT), 0.75, 0.0, -0.5),
        ("code", Verdict.miss(Reason.NO_ANSWER, format=FULL), 0.0, 0.0, -1.0),
    ],
)
def test_training_rewards(
    kind: Kind, verdict: Verdict, raw: float, paper: float, released: float
) -> None:
    got = {name: reward(kind, verdict) for name, reward in TRAINING_REWARDS.items()}
    assert got == {"raw": raw, "paper": paper, "released": released}


@pytest.mark.parametrize("reason", [Reason.INFRASTRUCTURE, Reason.UNPARSABLE_GOLD])
@pytest.mark.parametrize("layout", [FULL, CUT, HEADLESS, BARE])
@pytest.mark.parametrize("name", ["raw", "paper", "released"])
def test_an_invalid_verdict_has_no_reward(name: str, layout: Format, reason: Reason) -> None:
    verdict = Verdict.invalid(reason, format=layout)
    assert math.isnan(TRAINING_REWARDS[name]("math", verdict))
    assert math.isnan(TRAINING_REWARDS[name]("code", verdict))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ((1.0, True, False, Reason.INFRASTRUCTURE), "it needs reward NaN"),
        ((0.0, False, False, Reason.INFRASTRUCTURE), "it needs reward NaN"),
        ((math.nan, True, False, Reason.INFRASTRUCTURE), "it needs reward NaN"),
        ((math.nan, False, False, Reason.WRONG), "it needs reward NaN"),
        ((math.nan, False, True, Reason.WRONG), r"reward in \[0, 1\]"),
        ((1.5, False, True, Reason.WRONG), r"reward in \[0, 1\]"),
        ((-1.0, False, True, Reason.WRONG), r"reward in \[0, 1\]"),
        ((0.0, False, True, Reason.INFRASTRUCTURE), "set valid=False"),
        ((1.0, True, True, Reason.WRONG), "disagree"),
        ((0.0, True, True, Reason.CORRECT), "disagree"),
        ((1.0, False, True, Reason.WRONG), "disagree"),
    ],
)
def test_contradictions_are_refused(
    fields: tuple[float, bool, bool, Reason], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Verdict(*fields)


def test_the_reward_is_the_passed_share() -> None:
    with pytest.raises(ValueError, match="is not the passed share"):
        Verdict(0.5, False, True, Reason.WRONG, passed=(True, False, False))


def test_a_truncated_response_may_be_valid_or_not() -> None:
    assert Verdict.miss(Reason.TRUNCATED, format=CUT).reward == 0.0
    assert math.isnan(Verdict.invalid(Reason.TRUNCATED, format=CUT).reward)
