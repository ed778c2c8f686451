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
from klear_jax.report.runfiles import Curve, Record, Run, number

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
    scale = Scale("nats per token", limits=_FROM_ZERO)
    looks = {
        "rollout/kl": Look(plots.BLUE, "after the step's last update"),
        "kl": Look(plots.GREY, "before each update, mean", width=1.3),
    }
    return _curves(run, "rl", "KL from the sampling policy", scale, looks)


def mass(run: Run) -> Panel | None:
    """Gradient mass on clipped tokens, and what is lost against an unclipped objective."""
    looks = {
        "mass/clipped": Look(plots.BLUE, "on clipped tokens"),
        "mass/lost": Look(plots.VERMILLION, "lost against unclipped", width=1.3),
    }
    scale = Scale("share of gradient mass", percent=True, limits=_FROM_ZERO)
    return _curves(run, "rl", "Gradient mass and clipping", scale, looks)


def entropy_deciles(run: Run) -> Panel | None:
    """Gradient mass of clipped tokens by the entropy of the token's distribution."""
    parts = []
    for sign, label in (("pos", "A > 0"), ("neg", "A < 0")):
        kept, lost = (
            _mean_list(run, f"entropy_deciles/{sign}_{part}") for part in ("kept", "lost")
        )
        if kept is None or lost is None or len(kept) != len(lost):
            return None
        parts.append((label, kept, lost))
    if len(parts[0][1]) != len(parts[1][1]):
        return None
    scale = Scale("share of all gradient mass", "tenth of the tokens, by entropy", percent=True)
    labels = [str(n + 1) for n in range(len(parts[0][1]))]
    return plots.signed_bars("Clipped gradient mass by entropy", scale, labels, parts)


def logprob_change(run: Run) -> Panel | None:
    """What a step's updates do to the log-prob of its own good and bad samples."""
    looks = {
        "rollout/logprob_change_pos": Look(plots.BLUE, "A > 0"),
        "rollout/logprob_change_neg": Look(plots.VERMILLION, "A < 0"),
    }
    scale = Scale("nats per token")
    return _curves(run, "rl", "Log-prob change over a step", scale, looks)


def by_update(run: Run) -> Panel | None:
    """Clipped share by the place of the update in its step, mean over the run."""
    names = {"by_update/clip/pos_high": plots.VERMILLION, "by_update/clip/neg_low": plots.BLUE}
    labels = ("A > 0, r high (clipped)", "A < 0, r low (clipped)")
    curves = []
    for (name, color), label in zip(names.items(), labels, strict=True):
        if (values := _mean_list(run, name)) is not None and len(values) > 1:
            steps = np.arange(1, len(values) + 1, dtype=np.float64)
            curves.append((Curve(steps, values), Look(color, label, marker=True)))
    scale = Scale("share of trained tokens", "update of a step", percent=True, limits=_FROM_ZERO)
    return plots.lines("Clipping by update", scale, curves) if curves else None


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


def _mean_list(run: Run, key: str) -> np.ndarray | None:
    """The mean over steps of a metric that is a list, from steps whose list is a full one."""
    lists = [row[key] for row in run.rows("rl") if isinstance(row.get(key), list)]
    longest = max((len(values) for values in lists), default=0)
    full = [[number(v) for v in values] for values in lists if len(values) == longest]
    table = np.array(full, dtype=np.float64).reshape(len(full), longest)
    table = table[np.isfinite(table).all(axis=1)]
    return table.mean(axis=0) if table.size else None


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
    FigureSpec(
        "mass",
        mass,
        "Gradient mass of a token: the size of its contribution to the gradient of the loss in its "
        "log-prob. PPO has none on clipped tokens.",
    ),
    FigureSpec(
        "entropy_deciles",
        entropy_deciles,
        "Tokens in ten equal parts, from those the policy is sure of (1) to those it is least sure "
        "of (10); mean over steps. Solid: mass that clipped tokens keep; hatched: mass that an "
        "unclipped objective would have more.",
    ),
    FigureSpec(
        "by_update",
        by_update,
        "The first update of a step sees the policy that sampled, so it clips nothing; each later "
        "one sees a policy further away. Mean over the steps.",
    ),
    FigureSpec(
        "logprob_change",
        logprob_change,
        "From before the first to after the last update, on the tokens of the step's first "
        "mini-batch.",
    ),
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
        "KL(old || new) on the tokens drawn. After the last update: on the step's first "
        "mini-batch. Before each update: the first adds 0 and the last is not in it.",
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
