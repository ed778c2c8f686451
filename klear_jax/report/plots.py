# SPDX-License-Identifier: Apache-2.0
"""Figures of a run: data in, matplotlib Figure out; no files and no run folders in here.

A `Panel` is a title and a function that draws on given axes, so the same panel serves as one figure
of the page (`single`) and as one part of the summary (`grid`). NaN is a gap in every plot. Figures
are made without pyplot, which keeps no global state and needs no display.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from klear_jax.report.runfiles import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    # Named in signatures that may be checked at run time; the import itself would cost every user
    # half a second.
    Axes = Figure = Any

# The palette of Okabe and Ito, which stays apart under the common kinds of colour blindness.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8A8F98",
)
INK = "#30353D"
SINGLE_DPI = 120
SUMMARY_DPI = 150
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#B4B9C1",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E8EAED",
    "grid.linewidth": 0.8,
    "xtick.color": "#6B717B",
    "ytick.color": "#6B717B",
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.6,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Panel:
    """A titled plot that can be drawn on any axes. `height` is in inches, for `single`."""

    title: str
    draw: Callable[[Axes], None]
    height: float = 3.5


@dataclass(frozen=True)
class Look:
    """How a curve is drawn. With `smooth`, the raw curve is pale under its centred 5-step mean."""

    color: str
    label: str = ""
    style: str = "-"
    width: float = 1.9
    smooth: bool = False
    marker: bool = False


@dataclass(frozen=True)
class Scale:
    """The axes of a plot over steps; `limits` are of the y axis, None where the data decide.

    `log` asks for a logarithmic y axis, which is used when the values differ by a factor of more
    than 4.
    """

    ylabel: str
    xlabel: str = "RL step"
    percent: bool = False
    log: bool = False
    limits: tuple[float | None, float | None] = (None, None)


def lines(
    title: str,
    scale: Scale,
    curves: Sequence[tuple[Curve, Look]],
    *,
    band: tuple[Curve, Curve] | None = None,
) -> Panel:
    """Curves over steps. `band` is a (low, high) pair, shaded in the first curve's colour."""

    def draw(axes: Axes) -> None:
        log = scale.log and _spread([curve for curve, _ in curves]) > 4
        if log:
            axes.set_yscale("log", nonpositive="mask")
        for curve, look in curves:
            _draw_curve(axes, curve, look, log=log)
        if band is not None:
            low, high = band
            color = curves[0][1].color
            axes.fill_between(low.steps, low.values, high.values, color=color, alpha=0.16, lw=0)
        axes.set(xlabel=scale.xlabel, ylabel=scale.ylabel + ", log axis" * log)
        # A log axis has no zero to start from.
        axes.set_ylim(None if log else scale.limits[0], scale.limits[1])
        _ticks(axes, percent=scale.percent)
        _legend(axes)

    return Panel(title, draw)


def clip_fractions(cells: Sequence[tuple[str, Curve]]) -> Panel:
    """Shares of trained tokens beyond a ratio bound, by sign of the advantage and side.

    `cells` holds (metric name, curve) for any of clip/pos_high, clip/neg_low, outside/pos_low and
    outside/neg_high. The first two, which the clip acts on, are drawn strongly; the other two are
    dashed.
    """
    looks = {
        "clip/pos_high": ("A > 0, r high (clipped)", VERMILLION, "-", 2.2),
        "clip/neg_low": ("A < 0, r low (clipped)", BLUE, "-", 2.2),
        "outside/pos_low": ("A > 0, r low", ORANGE, (0, (3, 2)), 1.2),
        "outside/neg_high": ("A < 0, r high", SKY, (0, (3, 2)), 1.2),
    }

    def draw(axes: Axes) -> None:
        for name, curve in cells:
            label, color, style, width = looks[name]
            axes.plot(
                curve.steps,
                curve.values,
                color=color,
                linestyle=style,
                linewidth=width,
                label=label,
            )
        axes.set(xlabel="RL step", ylabel="share of trained tokens")
        axes.set_ylim(bottom=0)
        _ticks(axes, percent=True)
        _legend(axes)

    return Panel("Tokens beyond a clip bound", draw)


def ratio_histogram(
    edges: np.ndarray,
    parts: Sequence[tuple[str, np.ndarray]],
    bounds: tuple[float, float],
) -> Panel:
    """Token counts over the log-ratio, as shares, for one or two parts of a run.

    `parts` are (label, counts); `edges` are in nats; `bounds` are ratios such as (0.8, 1.28), drawn
    as vertical lines at their logarithm.
    """

    def draw(axes: Axes) -> None:
        smallest = 1.0
        for (label, counts), color in zip(parts, (GREY, BLUE)[-len(parts) :], strict=True):
            shares = counts / counts.sum()
            smallest = min(smallest, float(shares[shares > 0].min()))
            # A log axis has no zero: an empty bin goes to a value below the visible range.
            shares = np.where(shares > 0, shares, smallest * 1e-3)
            axes.stairs(shares, edges, color=color, linewidth=1.7, label=label)
        for bound in bounds:
            if np.isfinite(bound) and bound > 0:
                axes.axvline(np.log(bound), color=VERMILLION, linewidth=1.2, linestyle=(0, (4, 2)))
                axes.annotate(
                    f"r = {bound:g}",
                    (np.log(bound), 0.98),
                    xycoords=("data", "axes fraction"),
                    xytext=(4 if bound > 1 else -4, 0),
                    textcoords="offset points",
                    ha="left" if bound > 1 else "right",
                    va="top",
                    fontsize="small",
                    color=VERMILLION,
                )
        axes.set_yscale("log")
        axes.set_ylim(smallest / 2, 2.0)
        axes.set(xlabel="log-ratio log r (nats)", ylabel="share of trained tokens")
        _legend(axes)

    return Panel("Ratio of new to old policy", draw)


def signed_bars(
    title: str,
    scale: Scale,
    labels: Sequence[str],
    parts: Sequence[tuple[str, np.ndarray, np.ndarray]],
) -> Panel:
    """Bars side by side for each label: (name, solid height, height of the outline on top)."""

    def draw(axes: Axes) -> None:
        at, width = np.arange(len(labels)), 0.8 / len(parts)
        for number, ((name, solid, outline), color) in enumerate(
            zip(parts, (BLUE, VERMILLION), strict=False)
        ):
            x = at + (number - (len(parts) - 1) / 2) * width
            axes.bar(x, solid, width * 0.92, color=color, label=f"{name}: kept")
            axes.bar(
                x, outline, width * 0.92, bottom=solid, fill=False, edgecolor=color, hatch="////",
                linewidth=0.8, label=f"{name}: lost",
            )  # fmt: skip
        axes.set(xlabel=scale.xlabel, ylabel=scale.ylabel)
        axes.set_xticks(at, labels)
        axes.set_ylim(bottom=0)
        _ticks(axes, percent=scale.percent)
        _legend(axes)

    return Panel(title, draw)


def stacked(title: str, scale: Scale, parts: Sequence[tuple[str, Curve]]) -> Panel:
    """Parts of a whole per step, stacked as filled stairs; a missing value adds nothing."""

    def draw(axes: Axes) -> None:
        steps = parts[0][1].steps
        edges = np.append(steps - 0.5, steps[-1] + 0.5)
        below = np.zeros(len(steps))
        for (label, curve), color in zip(parts, _cycle(len(parts)), strict=True):
            top = below + np.nan_to_num(curve.values)
            axes.stairs(top, edges, baseline=below, fill=True, color=color, alpha=0.85, label=label)
            below = top
        axes.set(xlabel=scale.xlabel, ylabel=scale.ylabel)
        # Compilation makes the first step many times longer than the rest, which would flatten all
        # others.
        ceiling = 3 * float(np.median(below))
        axes.set_ylim(0, ceiling if 0 < ceiling < below.max() else None)
        for step, height in zip(steps, below, strict=True):
            if 0 < ceiling < height:
                axes.annotate(
                    f" {height:.3g}",
                    (step + 0.5, ceiling),
                    va="top",
                    fontsize="small",
                    annotation_clip=False,
                )
        _ticks(axes, percent=scale.percent)
        _legend(axes, columns=3)

    return Panel(title, draw)


def single(panel: Panel) -> Figure:
    """One panel as a figure for the page: 6.2 inches wide."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as NewFigure

    with rc_context(_STYLE):
        figure = NewFigure(figsize=(6.2, panel.height), dpi=SINGLE_DPI, layout="constrained")
        axes = figure.add_subplot()
        panel.draw(axes)
        axes.set_title(panel.title)
    return figure


def grid(panels: Sequence[Panel], *, columns: int = 3) -> Figure:
    """Several panels as one picture, for the top of a README."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as NewFigure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = -(-len(panels) // columns)
    style: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 10.5, "legend.fontsize": 8}
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    with rc_context({**_STYLE, **style}):
        figure = NewFigure(figsize=(11.6, 3.05 * rows), dpi=SUMMARY_DPI, layout=layout)
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            panel.draw(axes)
            axes.set_title(panel.title)
    return figure


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG file's content."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", facecolor="white", metadata={"Software": None})
    return stream.getvalue()


def smoothed(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Centred moving mean over the finite values of a window; NaN stays NaN."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    total = np.convolve(np.where(known, values, 0.0), kernel)
    count = np.convolve(known.astype(np.float64), kernel)
    middle = slice(window // 2, window // 2 + len(values))
    return np.where(known, total[middle] / np.maximum(count[middle], 1.0), np.nan)


def _draw_curve(axes: Axes, curve: Curve, look: Look, *, log: bool) -> None:
    steps, values = curve.steps, curve.values
    if log:
        values = np.where(values > 0, values, np.nan)
    # A line needs two points: a run of one step would otherwise show nothing.
    marker = "o" if look.marker or len(steps) < 3 else ""
    if look.smooth and len(steps) >= 10:
        axes.plot(steps, values, color=look.color, linewidth=1.0, alpha=0.35)
        values = smoothed(values)
    axes.plot(
        steps,
        values,
        color=look.color,
        linestyle=look.style,
        linewidth=look.width,
        marker=marker,
        markersize=4.5,
        label=look.label,
    )


def _ticks(axes: Axes, *, percent: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    def text(value: float, _: int | None = None) -> str:
        return f"{100 * value:.4g}%" if percent else f"{value:.4g}"

    steps = [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(text))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=steps))


def _spread(curves: Sequence[Curve]) -> float:
    """Largest over smallest positive value of all curves; 0 when none is positive."""
    values = np.concatenate([curve.finite for curve in curves])
    values = values[values > 0]
    return float(values.max() / values.min()) if len(values) else 0.0


def _legend(axes: Axes, *, columns: int = 2) -> None:
    """A legend under the axes, where it can hide no data."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns, columnspacing=1.2
        )


def _cycle(count: int) -> list[str]:
    colors = [BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, GREY]
    return [colors[index % len(colors)] for index in range(count)]
