# SPDX-License-Identifier: Apache-2.0
"""The figures of a frozen-rollout bench and what they show in words, from frozen.json alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from klear_jax.report import heatmap
from klear_jax.report.heatmap import TokenRow
from klear_jax.report.records import Table

SAME = 1 - 1e-6
"""From this cosine on two gradients have one direction, to rounding."""
CONTEXT = 44
"""Characters of text shown before a token."""
SAME_POLICY = 1e-4
"""Where no log-ratio is larger than this, the weights are those that sampled, to rounding."""
LEGEND = """\
Shares by the sign of A. clipped: of all tokens, beyond the variant's own bounds. kept: gradient
mass |w W A| on those, and lost: mass that the unclipped objective has more, both of all unclipped
mass. W = 0: of the tokens with A != 0, those without gradient. on PPO's: of the variant's own mass,
what lies on tokens that ppo clips. cos: cosine with the gradient of another variant. Mass is not
gradient norm: a token that the model is sure of has mass and hardly a gradient in the parameters,
so directions may differ far more than masses."""
SHARES = {
    "W = 0": "no_gradient",
    "clipped A>0": "clipped_pos", "A<0 ": "clipped_neg",
    "kept A>0": "kept_pos", "A<0  ": "kept_neg",
    "lost A>0": "lost_pos", "A<0   ": "lost_neg",
    "on PPO's": "on_ppo_clipped",
}  # fmt: skip
"""Column of the table -> field of a variant. (Blanks keep the names apart.)"""


def plain(value: Any) -> Any:
    """Lists and numbers of JSON, with null for what is no finite number."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def remark(change: Mapping[str, float]) -> str:
    """What makes a comparison empty; nothing where it is not.

    Args:
        change: `policy` of frozen.json.
    """
    if change["log_ratio_max_abs"] <= SAME_POLICY:
        return (
            "Nothing to compare: every ratio is 1, as the weights are those that sampled. Give "
            "--weights that have moved."
        )
    if change["ppo_clipped_pos"] + change["ppo_clipped_neg"] == 0:
        return (
            "No token is clipped at token level, so ppo and the gppo family are the same here. "
            "Give --weights that have moved further."
        )
    return ""


def table(record: Mapping[str, Any]) -> Table:
    """A row for each variant: its widths, loss, gradient and shares."""
    names, cosines = record["cosines"]["names"], record["cosines"]["values"]
    near = [names.index(name) for name in ("ppo", "gppo") if name in names]
    cosine_columns = [f"cos {names[n]}" for n in near]
    header = ("variant", "low", "high", "loss", "|grad|", *cosine_columns, *SHARES)
    rows = []
    for name, row in zip(names, cosines, strict=True):
        of = record["variants"][name]
        rows.append(
            (
                name, f"{of['clip']['low']:.3g}", f"{of['clip']['high']:.3g}",
                _figure(of["loss"], "+.5f"), _figure(of["grad_norm"], ".4f"),
                *(_figure(row[n], ".3f") for n in near),
                *(_figure(of[share], ".1%") for share in SHARES.values()),
            )
        )  # fmt: skip
    return Table(header, tuple(rows))


def _figure(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def figures(record: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> PNG: the cosines, and the gradient weights of single tokens."""
    names, cosines = record["cosines"]["names"], _array(record["cosines"]["values"])
    norms = _array([record["variants"][name]["grad_norm"] for name in names])
    drawn = {"heatmap.png": heatmap.cosine_map(names, norms, cosines, cosine_note(record))}
    if record["tokens"]:
        rows = [token_row(token, names) for token in record["tokens"]]
        drawn["tokens.png"] = heatmap.weight_map(names, rows, token_note(record))
    return {name: heatmap.save(figure) for name, figure in drawn.items()}


def cosine_note(record: Mapping[str, Any]) -> str:
    """What the map of cosines is of, and what is seen in it."""
    names, cosines = record["cosines"]["names"], _array(record["cosines"]["values"])
    whole = record["terms"] == "objective"
    what = "of the surrogate and the run's terms beside it" if whole else "of the surrogate alone"
    lines = [_where(record), f"Gradients {what}, mean over the mini-batches."]
    if record["remark"]:
        lines.append(record["remark"])
    seen = [_pair("ppo", "gppo", names, cosines), _least(names, cosines)]
    same = [" = ".join(group) for group in same_direction(names, cosines)]
    if same:
        seen.append(f"Same direction: {'; '.join(same)}.")
    return "\n".join([*lines, *(text for text in seen if text)])


def token_note(record: Mapping[str, Any]) -> str:
    """How to read the map of weights."""
    bounds = record["bounds"]
    return (
        f"Chosen: the tokens with the largest |w A| |W - W of PPO|, root mean square over the "
        f"variants; bounds {1 - bounds['low']:g} and {1 + bounds['high']:g} at token level.\n"
        "r: ratio to the policy that sampled; A: advantage; H: entropy in nats; 2x: stands twice "
        "in the batch, after the same text.\n"
        "Grey: W = 0, no gradient. Where a sequence is clipped as a whole, W is that of all its "
        "tokens.\n"
        f"{_where(record)}"
    )


def same_direction(names: Sequence[str], cosines: np.ndarray) -> list[list[str]]:
    """Groups of two and more variants whose gradients are parallel, in the order of the names."""
    groups: list[list[int]] = []
    for number in range(len(names)):
        for group in groups:
            if cosines[number, group[0]] >= SAME:
                group.append(number)
                break
        else:
            groups.append([number])
    return [[names[n] for n in group] for group in groups if len(group) > 1]


def token_row(token: Mapping[str, Any], names: Sequence[str]) -> TokenRow:
    """A token of frozen.json as a row of the map."""
    before = heatmap.one_line(token["before"])
    text = f"{'…' * (len(before) > CONTEXT)}{before[-CONTEXT:]}[{heatmap.one_line(token['token'])}]"
    facts = (
        f"r {_short(token['ratio']):>5}  A {token['advantage']:+.2f}  H {token['entropy']:.2f}"
        f"{'  {}x'.format(token['copies']) if token['copies'] > 1 else ''}"
    )
    weights = tuple(_number(token["weights"][name]) for name in names)
    return TokenRow(text, facts, token["cell"], weights)


def _where(record: Mapping[str, Any]) -> str:
    change = record["policy"]
    beyond = change["ppo_clipped_pos"] + change["ppo_clipped_neg"]
    return (
        f"Rollout of step {record['step']}, {change['tokens']:,} tokens, scored by "
        f"{record['weights']['name']}: KL {change['kl']:.2g} a token, r from "
        f"{change['ratio_min']:.2g} to {change['ratio_max']:.3g}, {beyond:.1%} clipped by PPO."
    )


def _pair(one: str, other: str, names: Sequence[str], cosines: np.ndarray) -> str:
    if one not in names or other not in names:
        return ""
    value = cosines[names.index(one), names.index(other)]
    return f"Cosine of {one} and {other}: {value:.3f}." if np.isfinite(value) else ""


def _least(names: Sequence[str], cosines: np.ndarray) -> str:
    if not np.isfinite(cosines).any() or len(names) < 2:
        return ""
    row, column = divmod(int(np.nanargmin(cosines)), len(names))
    return f"Least alike: {names[row]} and {names[column]}, {cosines[row, column]:.3f}."


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.3g}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _array(values: Sequence[Any]) -> np.ndarray:
    """Numbers with null for what is none."""
    return np.array(values, dtype=np.float64)
