# SPDX-License-Identifier: Apache-2.0
"""Verdicts: what a grader says of one response, and how presets turn that into a training reward.

A verdict is three-valued: right, wrong, or not valid. An invalid one (our fault, not the
response's) has reward NaN and must leave the group's statistics. The think block is a fact beside
the verdict.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from klear_jax.rewards.boxed import final_text, find_boxes

Kind = Literal["math", "code"]


class Reason(StrEnum):
    """Why a verdict is what it is."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """Nothing in the response could be read as an answer or a program."""
    UNPARSABLE_GOLD = "unparsable_gold"
    """The problem's own answer cannot be read: not valid."""
    TIMEOUT = "timeout"
    """The response's answer or program went over a limit of time or memory."""
    CRASHED = "crashed"
    """The response's program failed while running."""
    TRUNCATED = "truncated"
    """The response was cut at the length limit; valid or not, as the recipe decides."""
    INFRASTRUCTURE = "infrastructure"
    """A grader process failed: not valid."""


_NEVER_VALID = (Reason.UNPARSABLE_GOLD, Reason.INFRASTRUCTURE)
_MAYBE_INVALID = (*_NEVER_VALID, Reason.TRUNCATED)


@dataclass(frozen=True)
class Format:
    """Facts about the layout of a response; they never decide `Verdict.correct`."""

    think_opened: bool
    """The text holds `<think>`."""
    think_closed: bool
    """The text holds `</think>`."""
    boxed: bool
    r"""A balanced `\\boxed{}` stands after the last `</think>`."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one response. Construction refuses fields that contradict each other."""

    reward: float
    """Raw reward: 0 or 1 for math, the share of tests passed for code; NaN when not valid."""
    correct: bool
    valid: bool
    """False when the sample must leave statistics, mask and denominators."""
    reason: Reason
    passed: tuple[bool, ...] = ()
    """Code only: the outcome of each test, in the tests' order."""
    format: Format = Format(think_opened=False, think_closed=False, boxed=False)
    detail: str = ""
    """A few words for a person who reads the log."""

    def __post_init__(self) -> None:
        if not self.valid:
            if not math.isnan(self.reward) or self.correct or self.reason not in _MAYBE_INVALID:
                raise ValueError(
                    f"invalid verdict with {self.reward=}, {self.correct=}, {self.reason=}; it"
                    " needs reward NaN, correct False and a reason of"
                    f" {[r.value for r in _MAYBE_INVALID]}"
                )
            return
        if not 0.0 <= self.reward <= 1.0:
            raise ValueError(f"{self.reward=}; a valid verdict has a reward in [0, 1]")
        if self.reason in _NEVER_VALID:
            raise ValueError(f"{self.reason=} in a valid verdict; set valid=False and reward NaN")
        if self.correct != (self.reason is Reason.CORRECT) or self.correct != (self.reward == 1.0):
            raise ValueError(
                f"{self.correct=}, {self.reason=}, {self.reward=} disagree; correct goes with"
                " reason 'correct' and reward 1, and with nothing else"
            )
        if self.passed and abs(self.reward - sum(self.passed) / len(self.passed)) > 1e-9:
            raise ValueError(f"{self.reward=} is not the passed share of {self.passed}")

    @classmethod
    def right(cls, *, format: Format, detail: str = "") -> "Verdict":
        """A correct answer."""
        return cls(1.0, True, True, Reason.CORRECT, format=format, detail=detail)

    @classmethod
    def miss(cls, reason: Reason, *, format: Format, detail: str = "") -> "Verdict":
        """A valid verdict that earns nothing."""
        return cls(0.0, False, True, reason, format=format, detail=detail)

    @classmethod
    def invalid(cls, reason: Reason, *, format: Format, detail: str = "") -> "Verdict":
        """A verdict that must not be used for training or statistics."""
        return cls(math.nan, False, False, reason, format=format, detail=detail)


def format_of(response: str) -> Format:
    """Read the layout facts off a response (prompt not included)."""
    return Format(
        think_opened="<think>" in response,
        think_closed="</think>" in response,
        boxed=bool(find_boxes(final_text(response)).contents),
    )


def _raw(kind: Kind, verdict: Verdict) -> float:
    """The raw reward."""
    return verdict.reward


def _paper(kind: Kind, verdict: Verdict) -> float:
    """Klear-Reasoner as written (section on rewards): math +1 or -1, code the passed share p.

    The paper penalises a missing think block without giving a number. Chosen here: the response
    gets the lowest reward of its kind, -1 for math and 0 for code.
    """
    block = verdict.format.think_opened and verdict.format.think_closed
    if kind == "code":
        return verdict.reward if block else 0.0
    return 1.0 if verdict.correct and block else -1.0


def _released(kind: Kind, verdict: Verdict) -> float:
    """Klear-Reasoner's released code: format checks first, then math +1/-1 or code 2p - 1."""
    if not verdict.format.think_closed:
        return -0.5
    if not verdict.format.think_opened:
        return -2.0
    if kind == "code":
        return 2.0 * verdict.reward - 1.0
    return 1.0 if verdict.correct else -1.0


def _nan_if_invalid(rule: Callable[[Kind, Verdict], float]) -> Callable[[Kind, Verdict], float]:
    def reward(kind: Kind, verdict: Verdict) -> float:
        return rule(kind, verdict) if verdict.valid else math.nan

    reward.__doc__ = rule.__doc__
    return reward


TRAINING_REWARDS: dict[str, Callable[[Kind, Verdict], float]] = {
    "raw": _nan_if_invalid(_raw),
    "paper": _nan_if_invalid(_paper),
    "released": _nan_if_invalid(_released),
}
"""Training reward of a verdict by preset name; NaN for an invalid verdict."""
