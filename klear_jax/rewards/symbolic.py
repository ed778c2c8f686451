# SPDX-License-Identifier: Apache-2.0
"""The algebra of math grading: math-verify plus the rules it lacks. Runs in a worker process.

Owns everything that may hang or eat memory, so nothing else in the project imports it;
`math_pool` starts it as `python -m klear_jax.rewards.symbolic`, talks to it in JSON lines and
kills it when it is late.
"""

import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 2 * 1024**3
"""Address space of a worker."""
ORPHAN_S = 30
"""A worker still busy after so many seconds ends itself: its parent is gone."""
TINY = 1e-3
"""Below this magnitude the absolute rounding of math-verify (6 decimals) says nothing."""
RELATIVE = 1e-6
"""Largest relative difference of two tiny values that count as equal."""


def main() -> None:
    """Answer requests on stdin until it closes; see `answer_request`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Stray prints of a library must not reach the channel.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    # Default action: the kernel ends the process even inside a long C call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answer_request({"gold": "1", "answers": ["x+1"], "boxed": True})
    reply: dict[str, str] = {"outcome": "ready"}
    while True:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()
        line = sys.stdin.readline()
        if not line:
            return
        signal.alarm(ORPHAN_S)
        try:
            reply = {"outcome": answer_request(json.loads(line))}
        except (MemoryError, RecursionError) as error:
            reply = {"outcome": "limit", "detail": type(error).__name__}
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            reply = {"outcome": "wrong", "detail": f"{type(error).__name__} while comparing"}
        signal.alarm(0)


def answer_request(request: dict[str, Any]) -> str:
    """One of "bad_gold", "no_answer", "wrong", "right".

    Without answers "right" says that the gold can be read.
    """
    gold = _gold(request["gold"])
    if gold is None:
        return "bad_gold"
    if not request["answers"]:
        return "right"
    read_any = False
    for text in request["answers"]:
        parsed = _parse(f"\\boxed{{{text}}}" if request["boxed"] else text)
        if parsed is None:
            continue
        read_any = True
        if _equal(gold, parsed):
            return "right"
    return "wrong" if read_any else "no_answer"


@functools.lru_cache(maxsize=256)
def _gold(text: str) -> list[Any] | None:
    return _parse(f"\\boxed{{{text}}}")


def _parse(text: str) -> list[Any] | None:
    """What math-verify reads in `text`: expression and source text; None without expression."""
    from math_verify import parse

    parsed = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return parsed if len(parsed) >= 2 else None


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    left, right = gold[0], answer[0]
    # Sets and relations are compared both ways round: [2, oo) and x >= 2 say the same.
    same = verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)
    if same:
        return not _tiny_and_different(left, right)
    return _same_solution_set(left, right) or _same_radical(left, right)


def _tiny_and_different(left: Any, right: Any) -> bool:
    """Whether two values that agree in absolute terms differ in relative ones."""
    import sympy

    if isinstance(left, sympy.Equality) and isinstance(right, sympy.Equality):
        left, right = left.rhs, right.rhs
    if all(isinstance(side, sympy.Tuple | sympy.Interval) for side in (left, right)):
        # A pair in brackets is read as an open interval; its ends come first among the arguments.
        pairs = zip(left.args, right.args, strict=False)
        return any(_tiny_and_different(a, b) for a, b in pairs)
    if isinstance(left, sympy.FiniteSet) and isinstance(right, sympy.FiniteSet):
        return any(all(_tiny_and_different(a, b) for b in right) for a in left)
    if not all(isinstance(e, sympy.Expr) and e.is_number for e in (left, right)) or left == right:
        return False
    readings = [(a, b) for a in _values(left) for b in _values(right)]
    if min(abs(v) for v in readings[0]) >= TINY:
        return False
    return not any(abs(a - b) <= RELATIVE * min(abs(a), abs(b)) for a, b in readings)


def _values(expression: Any) -> list[Any]:
    """The value of a number; for a percentage also the number before the sign."""
    import sympy

    value = sympy.N(expression.doit(), 30)
    return [value, 100 * value] if expression.has(sympy.UnevaluatedExpr) else [value]


def _same_solution_set(left: Any, right: Any) -> bool:
    """Inequalities in one variable against intervals, as sets of numbers."""
    import sympy

    sets = [_as_sets(side) for side in (left, right)]
    kinds = {isinstance(side, sympy.Interval | sympy.Union) for side in (left, right)}
    if not all(sets) or kinds != {True, False}:
        return False
    return any(a == b for a in sets[0] for b in sets[1])


def _as_sets(side: Any) -> list[Any]:
    """The set that `side` stands for: inequalities hold together or, if they cannot, in turn."""
    import sympy

    if isinstance(side, sympy.Interval | sympy.Union):
        return [side]
    parts = list(side) if isinstance(side, sympy.FiniteSet | sympy.Tuple) else [side]
    if not all(isinstance(p, sympy.Rel | sympy.And | sympy.Or) for p in parts):
        return []
    symbols = set().union(*(part.free_symbols for part in parts))
    if len(symbols) != 1:
        return []
    real = sympy.Dummy("x", real=True)
    variable = symbols.pop()
    conditions: list[Any] = [part.subs(variable, real) for part in parts]
    found = [condition.as_set() for condition in conditions]
    common = sympy.Intersection(*found)
    return [sympy.Union(*found) if common == sympy.EmptySet else common]


def _same_radical(left: Any, right: Any) -> bool:
    """Radicals that agree for positive letters, such as sqrt(1/n) and 1/sqrt(n)."""
    import sympy

    if not all(isinstance(e, sympy.Expr) and _has_radical(e) for e in (left, right)):
        return False
    if left.free_symbols != right.free_symbols:
        return False
    positive = {symbol: sympy.Dummy(symbol.name, positive=True) for symbol in left.free_symbols}
    return sympy.simplify(left.subs(positive) - right.subs(positive)) == 0


def _has_radical(expression: Any) -> bool:
    import sympy

    return not expression.has(sympy.Abs) and any(
        power.base.free_symbols and power.exp.is_Rational and not power.exp.is_Integer
        for power in expression.atoms(sympy.Pow)
    )


if __name__ == "__main__":
    main()
