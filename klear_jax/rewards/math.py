# SPDX-License-Identifier: Apache-2.0
r"""Grading of math answers: a gold answer and a response in, a `Verdict` out.

Order: the last balanced `\boxed{}` after the think block; equal text, words, choices and exact
numbers (`literals`); guards against hostile input; algebra in a worker process (`symbolic`, by
math-verify) that is killed when late. Total: any response gives a verdict, within about 3 s once
a worker is free. A problem whose own answer cannot be read gives an invalid verdict, never a
score.

Known limits: a decimal is right only if it equals the gold to about 6 decimals (33.3 is not
100/3), and relatively to 1e-6 when either is below 1e-3. An answer in words must stand in a box.
Letters are real numbers, positive ones under a root.
"""

import atexit
import functools
import os
import threading
from dataclasses import dataclass

from klear_jax.data.problems import Problem, strip_box
from klear_jax.rewards.boxed import final_text, find_boxes
from klear_jax.rewards.literals import (
    MAX_ANSWER,
    clean,
    decide,
    hostile,
    number,
    unwrap_numbers,
    words,
)
from klear_jax.rewards.math_pool import MathPool, OverLimit, WorkerFailed
from klear_jax.rewards.verdict import Format, Reason, Verdict, format_of

_pool: MathPool | None = None
_pool_lock = threading.Lock()


@dataclass(frozen=True)
class _Answer:
    """What a response offers."""

    texts: tuple[str, ...]
    """Readings of it as written; one right reading is enough. None when it is too long."""
    boxed: bool
    """False: `texts` is running text, in which an answer is still to be found."""


def grade(gold: str, response: str, *, strict: bool = False) -> Verdict:
    r"""Compare the answer of a response with the gold answer. Never raises on any response.

    Args:
        gold: the right answer in LaTeX or plain text; may be boxed.
        response: the whole response, think block and all.
        strict: read only the last `\boxed{}`. Default: also `\fbox{}`, several boxes of one final
            statement as a list (if the gold is a list), and without any box what math-verify
            finds in the text.
    """
    layout = format_of(response)
    gold = clean(strip_box(gold))
    try:
        fault = _gold_fault(gold)
        if fault:
            return Verdict.invalid(Reason.UNPARSABLE_GOLD, format=layout, detail=fault)
        answer = _read(gold, response, strict=strict)
        if answer is None:
            return Verdict.miss(Reason.NO_ANSWER, format=layout)
        return _compare(gold, answer, layout)
    except WorkerFailed as error:
        return Verdict.invalid(Reason.INFRASTRUCTURE, format=layout, detail=str(error))


def grade_problem(problem: Problem, response: str) -> Verdict:
    """`grade` against a problem's own answer.

    Raises:
        ValueError: the problem has no answer (a code problem).
    """
    if problem.answer is None:
        raise ValueError(f"problem {problem.id!r} has no answer to compare with; is it a code one?")
    return grade(problem.answer, response)


def extract_answer(response: str, *, strict: bool = False) -> str | None:
    r"""The content of the last box after the think block, or None. `strict` ignores `\fbox{}`."""
    boxes = find_boxes(final_text(response), frames=not strict)
    return (boxes.contents[-1] or None) if boxes.contents else None


def validate_gold(gold: str) -> None:
    """Check once, when a data set is built, that a gold answer can be graded against.

    Raises:
        ValueError: it is empty, too long, too costly to evaluate, or no expression and no text.
        WorkerFailed: the grader's own processes failed.
    """
    fault = _gold_fault(clean(strip_box(gold)))
    if fault:
        raise ValueError(
            f"gold answer {gold[:200]!r}: {fault}; give a number, an expression in LaTeX or a text"
        )


def close_pool() -> None:
    """End the worker processes; the next comparison that needs one starts them again."""
    global _pool
    with _pool_lock:
        if _pool is not None and _pool.owner == os.getpid():
            _pool.close()
        _pool = None


def _shared_pool() -> MathPool:
    """The pool of this process. A forked child gets its own: pipes cannot be shared."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool.owner != os.getpid():
            _pool = MathPool(size=max(2, min(8, (os.cpu_count() or 1) // 2)))
        return _pool


atexit.register(close_pool)


@functools.lru_cache(maxsize=4096)
def _gold_fault(gold: str) -> str | None:
    """Why a cleaned gold answer cannot be used, or None. A worker's failure is not cached."""
    if not gold:
        return "it is empty"
    if len(gold) > MAX_ANSWER:
        return f"it has {len(gold)} characters, the limit is {MAX_ANSWER}"
    cost = hostile(gold)
    if cost:
        return f"it is too costly to evaluate ({cost})"
    if number(gold) is not None or words(gold) is not None:
        return None
    try:
        outcome = _shared_pool().call({"gold": gold, "answers": [], "boxed": True})
    except OverLimit:
        return "reading it takes too long"
    return None if outcome == "right" else "it is no expression that can be read"


def _read(gold: str, response: str, *, strict: bool) -> _Answer | None:
    """What the response offers, or None for nothing."""
    text = final_text(response)
    boxes = find_boxes(text, frames=not strict)
    if boxes.contents:
        texts = [boxes.contents[-1]]
        if not strict and len(boxes.together) > 1 and _is_list(gold):
            texts.append(", ".join(boxes.together))
        if not texts[0]:
            return None
        return _Answer(tuple(t for t in texts if len(t) <= MAX_ANSWER), boxed=True)
    # An unclosed box is a cut or broken answer; what stands in it must not be guessed at.
    if strict or boxes.unclosed or not text.strip() or words(gold) is not None:
        return None
    return _Answer((unwrap_numbers(text.strip()[-MAX_ANSWER:]),), boxed=False)


def _is_list(gold: str) -> bool:
    return "," in gold or " and " in gold or " or " in gold


def _compare(gold: str, answer: _Answer, layout: Format) -> Verdict:
    if not answer.texts:
        return Verdict.miss(Reason.WRONG, format=layout, detail="answer too long")
    readings = answer.texts
    if answer.boxed:
        cleaned = tuple(map(clean, answer.texts))
        decisions = [decide(gold, text) for text in cleaned]
        if True in decisions:
            return Verdict.right(format=layout, detail="literal")
        if None not in decisions:
            return Verdict.miss(Reason.WRONG, format=layout, detail="literal")
        # Not for running text, where "it is 100000!" is no factorial; there the limit of time
        # decides.
        cost = next(filter(None, map(hostile, cleaned)), None)
        if cost:
            return Verdict.miss(Reason.TIMEOUT, format=layout, detail=cost)
        # As written too: cleaning helps algebra with some answers and hinders it with others.
        written = [text for text in answer.texts if hostile(text) is None]
        readings = tuple(dict.fromkeys([*cleaned, *written]))
    request = {"gold": gold, "answers": list(readings), "boxed": answer.boxed}
    try:
        outcome = _shared_pool().call(request)
    except OverLimit as error:
        return Verdict.miss(Reason.TIMEOUT, format=layout, detail=str(error))
    if outcome == "right":
        return Verdict.right(format=layout, detail="algebra")
    if outcome == "bad_gold":
        return Verdict.invalid(
            Reason.UNPARSABLE_GOLD, format=layout, detail="unreadable in a worker"
        )
    reason = Reason.NO_ANSWER if outcome == "no_answer" and not answer.boxed else Reason.WRONG
    return Verdict.miss(reason, format=layout, detail="algebra")
