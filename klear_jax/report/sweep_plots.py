# SPDX-License-Identifier: Apache-2.0
"""The figures of a sweep: arms as small multiples beside the baseline, seeds as dots, intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from klear_jax.report import plots
from klear_jax.report.plots import BLUE, GREY, INK, VERMILLION

COLUMNS = 4
WIDTH = 11.6
"""Inches of a figure as wide as the page."""


@dataclass(frozen=True)
class Estimate:
    """A mean, its 95 % interval (NaN where there is none), and whether a difference is shown."""

    mean: float
    low: float
    high: float
    shown: bool


def multiples(
    curves: Mapping[str, pd.DataFrame], baseline: str, ylabel: str, *, percent: bool
) -> bytes:
    """One small plot an arm: its mean and 95 % interval over seeds, the baseline in grey behind.

    `curves` maps an arm to a frame with the columns mean, low, high over steps.
    """
    arms = [arm for arm in curves if arm != baseline] or [baseline]
    rows = -(-len(arms) // COLUMNS)
    with _style():
        figure = _figure(2.5 * rows)
        grid = np.atleast_1d(
            figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        )
        for axes, arm in zip(grid.flat, arms, strict=False):
            _mean_and_band(axes, curves[baseline], GREY, baseline)
            if arm != baseline:
                _mean_and_band(axes, curves[arm], BLUE, arm)
            axes.set_title(arm)
            plots._ticks(axes, percent=percent)
        for axes in grid.flat[len(arms) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel(ylabel)
        for column in range(COLUMNS):
            shown = [axes for axes in grid[:, column] if axes.axison]
            if shown:
                shown[-1].set_xlabel("RL step")
                shown[-1].tick_params(labelbottom=True)
        return plots.png_bytes(figure)


def dots(table: Mapping[str, pd.DataFrame], baseline: str, names: Mapping[str, str]) -> bytes:
    """Every run as a dot: a row an arm, a panel an outcome; the line is the baseline's mean.

    `table` maps an arm to a frame with a row a seed and a column an outcome; `names` maps an
    outcome to its label.
    """
    arms = list(table)
    with _style():
        figure = _figure(0.34 * len(arms) + 1.3)
        for axes, (name, label) in zip(
            figure.subplots(1, len(names), sharey=True, squeeze=False)[0],
            names.items(),
            strict=True,
        ):
            middle = float(np.mean(table[baseline][name])) if baseline in table else math.nan
            if math.isfinite(middle):
                axes.axvline(middle, color=GREY, linewidth=1, linestyle=(0, (4, 2)))
            for place, arm in enumerate(arms):
                values = table[arm][name].dropna()
                color = GREY if arm == baseline else BLUE
                axes.plot(values, [place] * len(values), "o", color=color, alpha=0.55, markersize=5)
                if len(values):
                    axes.plot([values.mean()] * 2, [place - 0.3, place + 0.3], color=INK, lw=1.6)
            _arms_down(axes, arms, label)
        return plots.png_bytes(figure)


def forest(panels: Sequence[tuple[str, Mapping[str, Estimate]]], arms: Sequence[str]) -> bytes:
    """Differences from the baseline with intervals: a panel an outcome, a row an arm."""
    with _style():
        figure = _figure(0.34 * len(arms) + 1.3)
        for axes, (label, estimates) in zip(
            figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True
        ):
            axes.axvline(0, color=GREY, linewidth=1)
            for place, arm in enumerate(arms):
                if (found := estimates.get(arm)) is None:
                    continue
                color = VERMILLION if found.shown else BLUE
                if math.isfinite(found.low):
                    axes.plot([found.low, found.high], [place] * 2, color=color, linewidth=1.6)
                axes.plot([found.mean], [place], "o", color=color, markersize=5)
            _arms_down(axes, arms, label)
        return plots.png_bytes(figure)


def _mean_and_band(axes: Any, curve: pd.DataFrame, color: str, label: str) -> None:
    axes.fill_between(curve.index, curve["low"], curve["high"], color=color, alpha=0.18, lw=0)
    axes.plot(curve.index, curve["mean"], color=color, linewidth=1.6, label=label)


def _arms_down(axes: Any, arms: Sequence[str], label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(4))  # more labels than this run into each other
    axes.set_yticks(range(len(arms)), arms)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.set_title(label)


def _style() -> Any:
    from matplotlib import rc_context

    small: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 9.5, "legend.fontsize": 8}
    return rc_context({**plots._STYLE, **small})


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=plots.SINGLE_DPI, layout="constrained")
