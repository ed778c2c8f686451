# SPDX-License-Identifier: Apache-2.0
"""Heat maps with a number in every cell: numpy in, matplotlib Figure out.

Colour repeats what the numbers say, so the maps can be read without it.
"""

import functools
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from klear_jax.report import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

CELL = 0.52
"""Width of a cell in inches."""
HEIGHT = 0.36
"""Height of a cell in inches."""
NARROWEST = 9.5
"""Width in inches that the lines of a note need."""
WIDEST_WEIGHT = 4.0
"""Gradient weights beyond this factor from 1 have the colour of this factor."""
NOTHING = "#C5C9CF"
"""Of a cell without a value, and of a gradient weight that is 0."""


@dataclass(frozen=True)
class TokenRow:
    """One token of `weight_map`."""

    text: str
    """What stands before the token, and the token, on one line."""
    facts: str
    """Its ratio and so on, shown at the right."""
    group: str
    """Rows of one group stand together, under this heading."""
    weights: tuple[float, ...]
    """The gradient weight W under each variant; NaN where there is none."""


def _styled(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the style of these maps, whatever the caller has set."""

    @functools.wraps(function)
    def draw(*args: Any) -> Figure:
        from matplotlib import rc_context

        style: dict[Any, Any] = {
            "font.size": 9.5, "text.color": plots.INK, "xtick.color": plots.INK,
            "ytick.color": plots.INK, "axes.titlesize": 11.5, "axes.titleweight": "bold",
            "axes.titlelocation": "left",
        }  # fmt: skip
        with rc_context(style):
            return function(*args)

    return draw


@_styled
def cosine_map(names: Sequence[str], norms: np.ndarray, cosines: np.ndarray, note: str) -> Figure:
    """Pairwise cosines of gradients, with the norm of each beside its name.

    The colours reach from the smallest cosine to 1, or from -1 where one is negative.
    """
    count = len(names)
    known = cosines[np.isfinite(cosines)]
    smallest = float(known.min()) if known.size else 0.0
    low = -1.0 if smallest < 0 else min(np.floor(smallest * 10) / 10, 0.9)
    colours = "RdBu" if low < 0 else "Blues"

    figure = _figure(2.6 + CELL * count, HEIGHT * count, note)
    axes = figure.add_subplot()
    texts = [[_cosine(value) for value in row] for row in cosines]
    # The darkest blues would hide that cells differ; 1 is not quite the end of the scale.
    image = _cells(axes, cosines, texts, colours, (low, 1.0 if low < 0 else 1.0 + (1 - low) / 4))
    labels = [f"{name}   |g| {norm:.3g}" for name, norm in zip(names, norms, strict=True)]
    axes.set_yticks(range(count), labels)
    _columns(axes, names)
    axes.set_title("Cosine between the gradients of the variants, same tokens, same weights")
    _scale(figure, axes, image, "cosine", (low, 1.0))
    _note(figure, note)
    return figure


@_styled
def weight_map(columns: Sequence[str], rows: Sequence[TokenRow], note: str) -> Figure:
    """The gradient weight W of chosen tokens (rows, in groups) under each variant (columns).

    1 is white, more is red and less blue, in equal steps of the logarithm; 0 is grey.
    """
    weights = np.array([row.weights for row in rows], np.float64).reshape(-1, len(columns))
    with np.errstate(divide="ignore", invalid="ignore"):
        shade = np.where(weights > 0, np.log2(weights), np.nan)
    # An empty line before each group holds its heading.
    lines: list[TokenRow | str] = []
    for row in rows:
        if row.group not in lines:
            lines.append(row.group)
        lines.append(row)
    shown = np.full((len(lines), len(columns)), np.nan)
    texts = [[""] * len(columns) for _ in lines]
    at = [number for number, line in enumerate(lines) if isinstance(line, TokenRow)]
    shown[at] = shade
    for number, row in zip(at, rows, strict=True):
        texts[number] = [_weight(value) for value in row.weights]

    figure = _figure(6.4 + CELL * len(columns), HEIGHT * len(lines), note)
    axes = figure.add_subplot()
    limit = np.log2(WIDEST_WEIGHT)
    _cells(axes, shown, texts, "RdBu_r", (-limit, limit))
    for number, line in enumerate(lines):
        if isinstance(line, str):
            blank = [(-0.5, number - 0.5), len(columns), 1]
            axes.add_patch(_rectangle(*blank))
            axes.text(-0.5, number + 0.1, line, ha="left", va="center", weight="bold")
    named = [line.text if isinstance(line, TokenRow) else "" for line in lines]
    axes.set_yticks(range(len(lines)), named, family="monospace", fontsize=8.5)
    _columns(axes, columns)
    right = axes.secondary_yaxis("right")
    facts = [line.facts if isinstance(line, TokenRow) else "" for line in lines]
    right.set_yticks(range(len(lines)), facts, family="monospace", fontsize=8.5)
    right.tick_params(length=0)
    right.spines[:].set_visible(False)
    for label in (*axes.get_yticklabels(), *right.get_yticklabels()):
        label.set_parse_math(False)  # a dollar sign of a model is a dollar sign
    axes.set_title("Gradient weight W of single tokens:  d objective / d log π  =  W A")
    _note(figure, note)
    return figure


def save(figure: Figure) -> bytes:
    """The figure as a PNG file's content. Letters that the font lacks become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        return plots.png_bytes(figure)


def one_line(text: str) -> str:
    """Text with line ends marked and the invisible spelt out, to stand in a label or a table."""
    return "".join(_spelt(character) for character in text)


def _spelt(character: str) -> str:
    if character == "\n":
        return "↵"
    # Control and format characters, lone surrogates, private use, other line separators.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"\\u{ord(character):04x}"
    return character


def _figure(width: float, cells: float, note: str) -> Figure:
    """A figure for cells of this height, in inches, with room for names and the note."""
    from matplotlib.figure import Figure as NewFigure

    lines = note.count("\n") + 1
    size = (max(width, NARROWEST), 1.6 + cells + 0.17 * lines)
    return NewFigure(figsize=size, dpi=plots.SINGLE_DPI, layout="constrained")


def _cells(
    axes: Axes,
    values: np.ndarray,
    texts: list[list[str]],
    colours: str,
    limits: tuple[float, float],
) -> Any:
    """Coloured cells with a text in each, dark on light and light on dark."""
    from matplotlib import colormaps

    colormap = colormaps[colours].with_extremes(bad=NOTHING)
    image = axes.imshow(
        np.ma.masked_invalid(values), colormap, vmin=limits[0], vmax=limits[1], aspect="auto"
    )
    for (row, column), value in np.ndenumerate(values):
        red, green, blue, _ = image.to_rgba(value) if np.isfinite(value) else (1, 1, 1, 1)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        axes.text(
            column, row, texts[row][column], ha="center", va="center", fontsize=8.5,
            color="white" if dark else plots.INK,
        )  # fmt: skip
    for number in range(values.shape[1] + 1):
        axes.axvline(number - 0.5, color="white", linewidth=1.2)
    for number in range(values.shape[0] + 1):
        axes.axhline(number - 0.5, color="white", linewidth=1.2)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def _rectangle(corner: tuple[float, float], width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor="white", edgecolor="none", zorder=2)


def _columns(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")


def _scale(figure: Figure, axes: Axes, image: Any, label: str, limits: tuple[float, float]) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02, label=label)
    bar.ax.set_ylim(*limits)
    bar.outline.set_visible(False)


def _note(figure: Figure, note: str) -> None:
    figure.supxlabel(note, x=0.01, ha="left", fontsize=9, color=plots.INK)


def _cosine(value: float) -> str:
    if not np.isfinite(value):
        return "-"
    # 1.00 is said of equal directions only, not of nearly equal ones.
    return ">.99" if 0.995 <= value < 1 - 1e-6 else f"{value:.2f}"


def _weight(value: float) -> str:
    if not np.isfinite(value):
        return ""
    if value == 0:
        return "0"
    if abs(value) < 0.005:
        return "<.01"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
