# SPDX-License-Identifier: Apache-2.0
"""Statistics of a sweep: outcomes of a run, paired comparisons, and a sentence for each.

Every arm is compared with the baseline on the outcomes in `OUTCOMES`, seed by seed, in each
setting: a two-sided paired t-test. All comparisons of one outcome, over arms and settings, are a
family, whose p-values are corrected by Holm's method. Intervals are 95 % t intervals of one
comparison and are not corrected.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.multitest import multipletests

from klear_jax.report.sweep_data import SweepRuns, curves

WINDOW = 10
"""Steps at either end of a run that a mean is taken over; half of a run where it is shorter."""
TARGET = 0.8
LEVEL = 0.05


@dataclass(frozen=True)
class Outcome:
    """A number for each run; `text` is its name in a sentence, `label` over a plot."""

    name: str
    text: str
    label: str


def outcomes(steps: int) -> tuple[Outcome, ...]:
    """What arms are compared on, settled before a sweep of so many steps."""
    window = window_of(steps)
    return (
        Outcome("first", f"reward of the first {window} steps", f"reward, first {window}"),
        Outcome("last", f"reward of the last {window} steps", f"reward, last {window}"),
        Outcome("heldout", "held-out accuracy at the end, sampled", "held-out, sampled"),
        Outcome(
            "drop",
            "log-prob change of tokens with A < 0 in a rollout's updates",
            "log-prob change, A < 0",
        ),
    )


def window_of(steps: int) -> int:
    return min(WINDOW, max(1, steps // 2))


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline on one outcome."""

    setting: str
    arm: str
    baseline: str
    outcome: Outcome
    differences: tuple[float, ...]
    """Arm minus baseline, one for each seed that both have."""
    mean: float
    low: float
    high: float
    """95 % t interval of the mean; NaN where there is none."""
    p: float
    """Two-sided p-value of the paired t-test; NaN where there is none."""
    holm: float = math.nan
    """The same, corrected over the family."""

    @property
    def shown(self) -> bool:
        return self.holm < LEVEL


def summary(sweep: SweepRuns) -> pd.DataFrame:
    """A row for each run (setting, arm, seed), a column for each number of the page."""
    steps, rows = sweep.plan["steps"], []
    window = window_of(steps)
    for key in sweep.runs:
        one: Any = sweep.table[
            (sweep.table["setting"] == key[0])
            & (sweep.table["arm"] == key[1])
            & (sweep.table["seed"] == key[2])
        ]
        wide: Any = one.pivot(index="step", columns="metric", values="value").sort_index()

        def metric(name: str, wide: Any = wide) -> Any:
            return wide[name].dropna() if name in wide else pd.Series(dtype=float)

        reward = metric("reward")
        rows.append(
            dict(zip(("setting", "arm", "seed"), key, strict=True))
            | {
                "first": reward[reward.index <= window].mean(),
                "last": reward[reward.index > steps - window].mean(),
                "heldout": _last(metric("heldout/sampled")),
                "greedy": _last(metric("heldout/greedy")),
                "worst": reward[reward.index > steps / 2].min(),
                "to_target": _steps_to(reward, TARGET),
                "drop": metric("rollout/logprob_change_neg").mean(),
                "clip": metric("clip").mean(),
                "kept": metric("mass/clipped").mean(),
                "lost": metric("mass/lost").mean(),
                "grad_norm": metric("grad_norm").mean(),
                "kl": metric("rollout/kl").mean(),
                "entropy": metric("entropy")[metric("entropy").index > steps - window].mean(),
                "seconds": metric("seconds").sum(),
            }
        )
    return pd.DataFrame(rows).set_index(["setting", "arm", "seed"]).sort_index()


def _last(values: pd.Series) -> float:
    return float(values.iloc[-1]) if len(values) else math.nan


def _steps_to(reward: pd.Series, target: float) -> float:
    """First step at which the mean reward of it and the two before is at least `target`, or NaN."""
    smooth: Any = reward.rolling(3).mean()
    reached = smooth[smooth >= target]
    return float(reached.index[0]) if len(reached) else math.nan


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean and 95 % t interval of the finite values; NaN ends for fewer than two."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        return math.nan, math.nan, math.nan
    mean = float(known.mean())
    if len(known) < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(known) - 1) * known.std(ddof=1) / math.sqrt(len(known)))
    return mean, mean - half, mean + half


def curve_interval(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean, low and high over the seeds, step by step."""
    rows = [mean_interval(values) for values in frame.to_numpy()]
    return pd.DataFrame(rows, index=frame.index, columns=["mean", "low", "high"])


def compare(sweep: SweepRuns, table: pd.DataFrame) -> list[Comparison]:
    """All comparisons that the plan declared, in the order outcome, setting, arm."""
    found: list[Comparison] = []
    for outcome in outcomes(sweep.plan["steps"]):
        family = [
            paired(table, setting, arm, sweep.baseline, outcome)
            for setting in sweep.settings
            for arm in sweep.arms
            if arm != sweep.baseline
        ]
        found += corrected(family)
    return found


def paired(
    table: pd.DataFrame, setting: str, arm: str, baseline: str, outcome: Outcome
) -> Comparison:
    """The paired t-test of one comparison, not yet corrected."""

    def values(name: str) -> pd.Series:
        if (setting, name) not in table.index.droplevel("seed"):
            return pd.Series(dtype=float)
        return table.loc[(setting, name), outcome.name]

    both = (values(arm) - values(baseline)).dropna()
    differences = tuple(float(x) for x in both)
    mean, low, high = mean_interval(differences)
    p = math.nan
    # Equal differences have no variance to judge by, but rounding leaves some.
    if len(differences) > 1 and np.ptp(differences) > 1e-12:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            test: Any = stats.ttest_1samp(differences, 0.0)
            p = float(test.pvalue)
    else:
        low = high = math.nan
    return Comparison(setting, arm, baseline, outcome, differences, mean, low, high, p)


def corrected(family: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with Holm's p-values.

    One without a p-value counts in the size of the family, as if its p were 1: leaving it out would
    make the others look better.
    """
    if not family:
        return []
    known = [1.0 if math.isnan(c.p) else c.p for c in family]
    holm: Any = multipletests(known, alpha=LEVEL, method="holm")[1]
    return [
        Comparison(**{**vars(c), "holm": math.nan if math.isnan(c.p) else float(p)})
        for c, p in zip(family, holm, strict=True)
    ]


def sentence(c: Comparison, seeds: int) -> str:
    """The comparison in plain words."""
    start = f"{c.arm} against {c.baseline}, {c.setting}, {c.outcome.text}: "
    n = len(c.differences)
    if n == 0:
        return start + "no seed has both, so nothing can be said."
    pairs = "" if n == seeds else f" ({n} of {seeds} seeds)"
    difference = f"difference {signed(c.mean)}{pairs}"
    if n == 1:
        return start + difference + ", one seed, so no interval: no difference shown."
    if math.isnan(c.p):
        same = "the same in every seed, so there is no variance to test by: no difference shown."
        return f"{start}{difference}, {same}"
    end = "no difference shown"
    if c.shown:
        end = "higher" if c.mean > 0 else "lower"
    interval = f"95 % interval {signed(c.low)} to {signed(c.high)}"
    return f"{start}{difference} ({interval}), Holm p {p_text(c.holm)}: {end}."


def signed(value: float) -> str:
    """Three decimals with a sign; zero has none."""
    text = f"{value:+.3f}"
    return "0.000" if text in ("+0.000", "-0.000") else text


def p_text(p: float) -> str:
    """= 0.012, = 1.00, < 0.001."""
    if p < 0.001:
        return "< 0.001"
    return f"= {p:.2f}" if p >= 0.1 else f"= {p:.3f}"


def seeds_of(sweep: SweepRuns) -> int:
    return len({entry["seed"] for entry in sweep.plan["runs"]})


def arm_curve(sweep: SweepRuns, setting: str, arm: str, metric: str) -> pd.DataFrame:
    """Mean and interval of a metric over the seeds of an arm, step by step."""
    return curve_interval(curves(sweep.table, setting, arm, metric))
