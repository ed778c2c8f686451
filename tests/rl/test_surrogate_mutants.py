# SPDX-License-Identifier: Apache-2.0
"""Mutation check: every small fault written into rl/surrogates.py is found by the suite.

A mutant is the module with one node of its syntax tree changed, judged once for each variant whose
objective reaches that node: `faults` of test_surrogates.py, the same that judges the real module,
must find something in that variant. The closed forms are left as they are. Mutants that no value
and no gradient can tell from the original stand in `EQUIVALENT`, each with the reason.
"""

import ast
import copy
import dataclasses
import importlib.util
import inspect
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from klear_jax.rl import surrogates

SOURCE = inspect.getsource(surrogates)
SWAPS = {
    "low": "high", "high": "low", "beta_low": "beta_high", "beta_high": "beta_low",
    "tau_positive": "tau_negative", "tau_negative": "tau_positive",
}  # fmt: skip
COMPARISONS = {ast.Gt: (ast.Lt, ast.GtE), ast.Lt: (ast.Gt, ast.LtE), ast.Is: (ast.IsNot,)}
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def load_checks():
    path = Path(__file__).with_name("test_surrogates.py")
    spec = importlib.util.spec_from_file_location("surrogate_checks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks = load_checks()


# --- how a node may be changed ------------------------------------------------------------------


def changes(node) -> Iterator[tuple[str, ast.AST]]:
    """(kind of mutation, what stands in place of the node)."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right):
            for other in COMPARISONS[type(op)]:
                kind = "bound open" if other in (ast.GtE, ast.LtE) else "comparison flipped"
                yield kind, ast.Compare(left, [other()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield "operator", ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=operand):
            yield "sign dropped", operand
        case ast.Attribute(value=ast.Name(), attr=attr) if attr in SWAPS:
            yield "low and high swapped", ast.Attribute(node.value, SWAPS[attr], node.ctx)
        case ast.IfExp(body=body, orelse=orelse):
            yield "branch", body
            yield "branch", orelse
        case ast.Constant(value=bool() | str() | None):
            return
        case ast.Constant(value=value):
            yield "number", ast.Constant(1 - value if value in (0, 1) else 2 * value)
        case ast.Call(func=func, args=args, keywords=keywords):
            yield from calls(ast.unparse(func).split(".")[-1], node, func, args, keywords)


def calls(name, node, func, args, keywords):
    if name == "where":
        condition, one, other = args
        yield "branches swapped", ast.Call(func, [condition, other, one], keywords)
        yield "branch", one
        yield "branch", other
    elif name == "stop_gradient":
        yield "stop-gradient dropped", args[0]
    elif name == "anchor_of":
        yield "anchor dropped", ast.Call(ast.parse("jnp.ones_like").body[0].value, args, [])
    elif name in ("minimum", "clip"):
        yield "bound dropped", args[0]
    elif name == "_clipped":
        swapped = [ast.keyword(SWAPS[k.arg], k.value) for k in keywords]
        yield "low and high swapped", ast.Call(func, args, swapped)
    elif name == "surrogate":
        for i in range(len(args)):
            yield "field not declared", ast.Call(func, args[:i] + args[i + 1 :], [])


def swapped_throughout(function):
    """Every field of one side replaced by that of the other, in the whole function."""
    changed = copy.deepcopy(function)
    for node in ast.walk(changed):
        if isinstance(node, ast.Attribute) and node.attr in SWAPS:
            node.attr = SWAPS[node.attr]
    return changed


# Whole expressions as papers print them, which this project avoids: (function, before, after).
REWRITTEN = [
    (
        "anchor_of",
        "jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))",
        "ratio_of(log_ratio) / jax.lax.stop_gradient(ratio_of(log_ratio))",
    ),
    (
        "anchor_of",
        "jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))",
        "jnp.exp(log_ratio) / jax.lax.stop_gradient(jnp.exp(log_ratio))",
    ),
    (
        "ppo",
        "_clipped(log_ratio, advantages, clip, high=high, low=low) * advantages",
        "jnp.minimum((r := ratio_of(log_ratio)) * advantages, jnp.clip(r, low, high) * advantages)",
    ),
    ("sapo", "4 / tau * jnp.where(x > 0, 1 - tail, tail)", "4 / tau * (1 - jax.nn.sigmoid(x))"),
]


# --- the mutants --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    function: str
    kind: str
    change: str
    tree: ast.Module

    def load(self):
        module = types.ModuleType("mutant")
        exec(compile(self.tree, "mutant", "exec"), module.__dict__)
        return module


def mutants() -> Iterator[Mutant]:
    """Of every function that an objective reaches, and of the limit of r."""
    tree = ast.parse(SOURCE)
    for position, top in enumerate(tree.body):
        function = getattr(top, "name", "")
        if isinstance(top, ast.Assign) and ast.unparse(top.targets[0]) == "MAX_LOG_RATIO":
            function = "ratio_of"
        if function not in REACHED:
            continue
        for path, node in walk(top):
            for kind, new in changes(node):
                change = f"{ast.unparse(node)} -> {ast.unparse(new)}"
                yield Mutant(function, kind, change, rebuilt(tree, position, path, new))
        whole = swapped_throughout(top)
        if ast.dump(whole) != ast.dump(top):
            kind = "low and high swapped"
            yield Mutant(function, kind, "throughout", rebuilt(tree, position, (), whole))
    for function, before, after in REWRITTEN:
        start = SOURCE.index(f"def {function}(")
        assert before in SOURCE[start:]
        text = SOURCE[:start] + SOURCE[start:].replace(before, after, 1)
        yield Mutant(function, "as papers print it", after, ast.parse(text))


def walk(node, path=()):
    """Every node below this one with the way to it; annotations left out."""
    yield path, node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield from walk(child, (*path, (field, i if isinstance(value, list) else None)))


def rebuilt(tree, position, path, new):
    """The module with one node of one function, found along `path`, replaced."""
    top = copy.deepcopy(tree.body[position]) if path else new
    parent = top
    for field, i in path[:-1]:
        parent = getattr(parent, field) if i is None else getattr(parent, field)[i]
    if path:
        field, i = path[-1]
        if i is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[i] = new
    body = [*tree.body[:position], top, *tree.body[position + 1 :]]
    return ast.fix_missing_locations(ast.Module(body, []))


def reached() -> dict[str, set[str]]:
    """Function -> variants whose objective calls it, directly or not."""
    functions = {f.name: f for f in ast.parse(SOURCE).body if isinstance(f, ast.FunctionDef)}
    used = {
        name: {n.id for s in f.body for n in ast.walk(s) if isinstance(n, ast.Name)} & {*functions}
        for name, f in functions.items()
    }

    def below(name):
        return {name}.union(*(below(other) for other in used[name]))

    found: dict[str, set[str]] = {}
    for variant in surrogates.SURROGATES:
        for name in below(variant):
            found.setdefault(name, set()).add(variant)
    return found


REACHED = reached()
DETACHED = {n for n, f in surrogates.SURROGATES.items() if "stop_gradient(" in inspect.getsource(f)}
"""Variants that use r as a weight without gradient."""

# --- the check ----------------------------------------------------------------------------------

ZERO = "at A = 0 value and gradient are 0 whichever branch is chosen"
EDGE = "the constant is used where |l| > 20 alone, and there both forms agree"
CONTINUOUS = "W and value are the same on both sides of this bound, so the bound may go to either"
EQUIVALENT = {
    # Telemetry uses these two alone, where A = 0 does matter: test_trl_3032 holds them to it.
    ("clipped_high", "advantages > 0 -> advantages >= 0"): (ZERO, None),
    ("clipped_low", "advantages < 0 -> advantages <= 0"): (ZERO, None),
    ("_clipped", "advantages < 0 -> advantages <= 0"): (ZERO, None),
    ("sapo", "advantages > 0 -> advantages >= 0"): (ZERO, None),
    ("aspo", "advantages > 0 -> advantages >= 0"): (ZERO, None),
    ("ratio_of", "log_ratio > 0 -> log_ratio >= 0"): (EDGE, None),
    ("ratio_of", "0 -> 1"): (EDGE, None),
    ("ratio_of", "0.0 -> 1.0"): ("any finite number may stand in the branch not chosen", None),
    ("ratio_of", "jnp.abs(log_ratio) > MAX_LOG_RATIO -> jnp.abs(log_ratio) >= MAX_LOG_RATIO"): (
        "the ratio is detached, and at l = 20 it is exp(20) on either side",
        DETACHED,
    ),
    ("ratio_of", "jnp.where(outside, 0.0, log_ratio) -> log_ratio"): (
        "the ratio is detached: an infinity that is not chosen has no gradient to spoil",
        DETACHED,
    ),
    ("above", "log_ratio > log_high(clip) -> log_ratio >= log_high(clip)"): (
        CONTINUOUS, {"gppo", "gppo_high"},
    ),
    ("below", "log_ratio < log_low(clip) -> log_ratio <= log_low(clip)"): (
        CONTINUOUS, {"gppo", "gppo_low"},
    ),
}  # fmt: skip
"""(function, change) -> (why no gradient shows it, in which variants; None: in all)."""


def verdict(module, variant) -> str:
    """ "found" where the suite of the real module finds something in this one, or "raised"."""
    try:
        # What would be a RuntimeWarning of the real module is a fault too.
        with np.errstate(divide="raise", invalid="raise"):
            return "found" if next(checks.faults(module, variant), None) else "survived"
    except Exception:
        return "raised"


def test_every_mutant_is_killed():
    killed, argued, survivors, raised = Counter(), Counter(), [], 0
    unused = set(EQUIVALENT)
    for mutant in mutants():
        key = (mutant.function, mutant.change)
        why, where = EQUIVALENT.get(key, ("", set()))
        unused.discard(key)
        module = mutant.load()
        for variant in sorted(REACHED[mutant.function]):
            if why and (where is None or variant in where):
                argued[mutant.kind] += 1
                continue
            how = verdict(module, variant)
            raised += how == "raised"
            if how == "survived":
                survivors.append((variant, *key))
            else:
                killed[mutant.kind] += 1
    total = killed.total() + argued.total() + len(survivors)
    print(
        f"\n{killed.total()} of {total} mutants killed ({raised} by an exception), "
        f"{argued.total()} argued as equivalent"
    )
    for kind in sorted(killed | argued):
        print(f"  {kind}: {killed[kind]} killed, {argued[kind]} argued")
    assert not survivors
    assert not unused, "arguments about code that is gone"
    required = {"comparison flipped", "branches swapped", "low and high swapped",
                "stop-gradient dropped", "anchor dropped", "bound open"}  # fmt: skip
    assert required <= set(killed)
