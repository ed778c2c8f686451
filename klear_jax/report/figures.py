# SPDX-License-Identifier: Apache-2.0
"""The figures a report can hold: a run in, a panel out, or None when metrics are missing.

`PROGRESS` to `SFT` at the end are the lists that sections are made of, and the place to add a
figure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from klear_jax.report import plots
from klear_jax.report.plots import Look, Panel, Scale
from klear_jax.report.runfiles import Record, Run, number

_FRACTION = (-0.02, 1.02)
_FROM_ZERO = (0.0, None)


@dataclass(frozen=True)
class FigureSpec:
    """One figure: its file name without ending, how to make it, and how to read it."""

    name: str
    panel: Callable[[Run], Panel | None]
    caption: str


def reward(run: Run) -> Panel | None:
    """Mean reward and share of correct completions of the problems trained on."""
    looks = {
        "reward": Look(plots.BLUE, "reward", smooth=True),
        "accuracy": Look(plots.ORANGE, "share correct", width=1.4, smooth=True),
    }
    return _curves(run, "rl", "Reward in training", Scale("mean over completions"), looks)


def heldout(run: Run) -> Panel | None:
    """Held-out accuracy: sampled with its interval, and greedy."""
    looks = {
        "heldout/sampled": Look(plots.BLUE, "sampled", marker=True),
        "heldout/greedy": Look(plots.ORANGE, "greedy", marker=True),
    }
    xlabel = "RL step" if run.rows("rl") else "step"
    scale = Scale("share correct", xlabel, percent=True, limits=_FRACTION)
    return _curves(run, "eval", "Held-out accuracy", scale, looks, band="heldout/sampled")


def entropy(run: Run) -> Panel | None:
    """Mean entropy of the policy's next-token distribution."""
    looks = {"entropy": Look(plots.GREEN)}
    scale = Scale("nats per token", limits=_FROM_ZERO)
    return _curves(run, "rl", "Entropy of the policy", scale, looks)


def clip(run: Run) -> Panel | None:
    """Shares of trained tokens in the four cells beyond a clip bound."""
    names = ("clip/pos_high", "clip/neg_low", "outside/pos_low", "outside/neg_high")
    cells = [(name, curve) for name in names if (curve := run.curve("rl", name)) is not None]
    return plots.clip_fractions(cells) if cells else None


def grad_norm(run: Run) -> Panel | None:
    """Gradient norm of the updates of a step: mean and largest."""
    looks = {
        "grad_norm": Look(plots.BLUE, "mean of the step's updates"),
        "grad_norm_max": Look(plots.VERMILLION, "largest", width=1.3),
    }
    return _curves(run, "rl", "Gradient norm", Scale("L2 norm", log=True, limits=_FROM_ZERO), looks)


def ratio(run: Run) -> Panel | None:
    """Histogram of the log-ratio, summed over the first and over the last steps."""
    rows = [(row["step"], hist) for row in run.rows("rl") if (hist := _histogram(row)) is not None]
    if not rows:
        return None
    edges = rows[-1][1][0]
    same = [(step, counts) for step, (other, counts) in rows if np.array_equal(other, edges)]
    span = min(10, len(same) // 2)

    def total(part: list[tuple[int, np.ndarray]]) -> tuple[str, np.ndarray]:
        label = f"steps {part[0][0]}\u2013{part[-1][0]}" if len(part) > 1 else f"step {part[0][0]}"
        return label, np.sum([counts for _, counts in part], axis=0)

    parts = [total(same[:span]), total(same[-span:])] if span else [total(same)]
    return plots.ratio_histogram(edges, parts, run.ratio_bounds)


def groups(run: Run) -> Panel | None:
    """Share of groups whose rewards differ, beside what independent completions would give."""
    looks = {
        "groups/informative": Look(plots.BLUE, "measured"),
        "groups/expected_informative": Look(plots.GREY, "expected", style="--", width=1.3),
    }
    scale = Scale("share of groups", percent=True, limits=_FRACTION)
    return _curves(run, "rl", "Informative groups", scale, looks)


def length(run: Run) -> Panel | None:
    """Completion lengths: mean and longest."""
    looks = {
        "length/mean": Look(plots.BLUE, "mean"),
        "length/max": Look(plots.GREY, "longest", style="--", width=1.3),
    }
    return _curves(run, "rl", "Completion length", Scale("tokens", limits=_FROM_ZERO), looks)


def endings(run: Run) -> Panel | None:
    """Shares of completions that were cut off or could not be graded."""
    looks = {
        "truncated": Look(plots.PURPLE, "cut off at the length limit"),
        "invalid_share": Look(plots.VERMILLION, "reward invalid", width=1.3),
    }
    scale = Scale("share of completions", percent=True, limits=_FROM_ZERO)
    return _curves(run, "rl", "Unfinished completions", scale, looks)


def drift(run: Run) -> Panel | None:
    """Distance of the trained policy from the one that sampled."""
    scale = Scale("nats per token")
    return _curves(run, "rl", "KL from the sampling policy", scale, {"kl": Look(plots.BLUE)})


def sampler_gap(run: Run) -> Panel | None:
    """Difference of the sampler's and the trainer's log-probabilities of the same tokens."""
    scale = Scale("nats per token", log=True, limits=_FROM_ZERO)
    looks = {"sampler_gap": Look(plots.PURPLE)}
    return _curves(run, "rl", "Gap between sampler and trainer", scale, looks)


def seconds(run: Run) -> Panel | None:
    """Seconds of each step by what they were spent on."""
    parts = [
        (name.removeprefix("seconds/"), curve)
        for name in run.keys("rl", "seconds/")
        if (curve := run.curve("rl", name)) is not None
    ]
    return plots.stacked("Time of a step", Scale("seconds"), parts) if parts else None


def sft_loss(run: Run) -> Panel | None:
    """Supervised loss on the demonstrations."""
    scale = Scale("nats per token", "SFT step", limits=_FROM_ZERO)
    looks = {"loss": Look(plots.BLUE, smooth=True)}
    return _curves(run, "sft", "Loss on the demonstrations", scale, looks)


def sft_grad_norm(run: Run) -> Panel | None:
    """Gradient norm during supervised fine-tuning."""
    scale = Scale("L2 norm", "SFT step", log=True, limits=_FROM_ZERO)
    looks = {"grad_norm": Look(plots.BLUE, smooth=True)}
    return _curves(run, "sft", "Gradient norm (SFT)", scale, looks)


def _curves(
    run: Run,
    phase: str,
    title: str,
    scale: Scale,
    looks: Mapping[str, Look],
    *,
    band: str | None = None,
) -> Panel | None:
    """A panel of the metrics in `looks` that the run holds; `band` has _low and _high."""
    curves = {key: curve for key in looks if (curve := run.curve(phase, key)) is not None}
    if not curves:
        return None
    low, high = run.curve(phase, f"{band}_low"), run.curve(phase, f"{band}_high")
    shaded = (low, high) if band in curves and low is not None and high is not None else None
    return plots.lines(title, scale, [(c, looks[key]) for key, c in curves.items()], band=shaded)


def _histogram(row: Record) -> tuple[np.ndarray, np.ndarray] | None:
    """The (edges, counts) of a step's log-ratio histogram, or None when they do not fit."""
    stored = row.get("ratio_histogram")
    if not isinstance(stored, dict):
        return None
    edges, counts = (
        np.array([number(value) for value in values]) if isinstance(values, list) else np.zeros(0)
        for values in (stored.get("edges"), stored.get("counts"))
    )
    if (
        len(counts) < 2
        or len(edges) != len(counts) + 1
        or np.isnan(counts).any()
        or counts.sum() <= 0
    ):
        return None
    # An open outermost bin (infinite edge, read as NaN) is drawn as wide as its neighbour.
    if np.isnan(edges[0]):
        edges[0] = 2 * edges[1] - edges[2]
    if np.isnan(edges[-1]):
        edges[-1] = 2 * edges[-2] - edges[-3]
    return (edges, counts) if bool((np.diff(edges) > 0).all()) else None


PROGRESS = (
    FigureSpec(
        "reward",
        reward,
        "Mean over the completions of each step. Pale: each step; strong: centred mean of five "
        "steps.",
    ),
    FigureSpec(
        "heldout",
        heldout,
        "Problems kept out of training. Sampled: drawn at the run's evaluation "
        "temperature; greedy: the likeliest token each time. The band is the 95% interval of the "
        "sampled accuracy.",
    ),
)
POLICY = (
    FigureSpec(
        "entropy",
        entropy,
        "How undecided the policy is about its next token. It falls as one way of answering wins; "
        "near zero there is nothing left to explore.",
    ),
    FigureSpec("clip", clip, "A: advantage, r: ratio of new to old policy. See the table below."),
)
UPDATES = (
    FigureSpec(
        "grad_norm",
        grad_norm,
        "Length of the gradient before it is cut to its limit. Spikes of the largest mark "
        "unstable updates.",
    ),
    FigureSpec(
        "ratio",
        ratio,
        "New to old probability of trained tokens, seen by each update before it is made: the "
        "first update of a step sees 1. Dashed: the clip bounds. Log axis: most tokens sit at 0.",
    ),
    FigureSpec(
        "drift",
        drift,
        "Estimated before each update and averaged over a step's updates: the first adds 0, and "
        "what the last one does is not in it.",
    ),
    FigureSpec(
        "groups",
        groups,
        "Groups whose completions earned different rewards: only these give a gradient. Expected: "
        "if every problem had the mean chance of success; unequal problems give less.",
    ),
)
SAMPLING = (
    FigureSpec("length", length, "Tokens of a completion, its end token included."),
    FigureSpec(
        "endings",
        endings,
        "Cut-off completions ran into the length limit. Invalid ones could not be graded and "
        "leave the update.",
    ),
    FigureSpec(
        "sampler_gap",
        sampler_gap,
        "Sampler and trainer compute the same log-probabilities by different programs. Anything "
        "well above rounding makes the ratio wrong before the first update.",
    ),
    FigureSpec(
        "time",
        seconds,
        "Where the seconds of each step went. The first step includes compilation; a bar cut at "
        "the top carries its height.",
    ),
)
SFT = (
    FigureSpec(
        "sft_loss",
        sft_loss,
        "Mean over response tokens. It does not reach zero when the demonstrations contradict one "
        "another.",
    ),
    FigureSpec(
        "sft_grad_norm", sft_grad_norm, "Length of the gradient before it is cut to its limit."
    ),
)
SUMMARY = (reward, heldout, entropy, clip, grad_norm, ratio)
