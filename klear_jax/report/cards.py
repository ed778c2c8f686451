# SPDX-License-Identifier: Apache-2.0
"""Headline numbers of a run: functions that give a card, or None when the files lack it."""

import math
from collections.abc import Sequence

import numpy as np

from klear_jax.report.records import Card, Table
from klear_jax.report.runfiles import Curve, Run, number

ENDS = 10
"""Steps at either end of a run that a mean is taken over; fewer when the run is short."""


def rl_cards(run: Run) -> tuple[Card, ...]:
    """The headline numbers of reinforcement learning, most important first."""
    cards = (
        _accuracy(run, "sampled"),
        _accuracy(run, "greedy"),
        _reward(run),
        _time(run, ("rl", "eval")),
        _tokens(run),
        _updates(run),
    )
    return tuple(card for card in cards if card is not None)


def eval_cards(run: Run) -> tuple[Card, ...]:
    """The headline numbers of a run that only evaluates."""
    cards = (_accuracy(run, "sampled"), _accuracy(run, "greedy"), _time(run, ("eval",)))
    return tuple(card for card in cards if card is not None)


def sft_cards(run: Run) -> tuple[Card, ...]:
    """The headline numbers of supervised fine-tuning."""
    cards: list[Card | None] = []
    if (loss := run.curve("sft", "loss")) is not None:
        value = f"{loss.first:.2f} → {loss.last:.2f}"
        cards.append(Card("SFT loss", value, f"nats per token, {_span(loss)}"))
    cards += [_accuracy(run, "sampled"), _time(run, ("sft",), "SFT time")]
    if (speed := run.curve("sft", "tokens_per_second")) is not None:
        cards.append(
            Card("SFT speed", f"{count(float(np.median(speed.finite)))}/s", "tokens, median")
        )
    return tuple(card for card in cards if card is not None)


def task_table(run: Run) -> Table | None:
    """Held-out accuracy of each task, first and last; None when only the total is recorded."""
    tasks: dict[str, None] = {}
    for kind in ("sampled", "greedy"):
        prefix = f"heldout/{kind}/"
        tasks |= {key.removeprefix(prefix): None for key in run.keys("eval", prefix)}
    rows = tuple(
        (
            task,
            *(
                _change(run.curve("eval", f"heldout/{kind}/{task}"))
                for kind in ("sampled", "greedy")
            ),
        )
        for task in tasks
    )
    return Table(("Held-out accuracy by task", "sampled", "greedy"), rows) if rows else None


def percent(value: float) -> str:
    """A share as a percentage; one decimal below 10% and at 99% or more, where it matters."""
    if math.isnan(value):
        return "not recorded"
    return f"{value:.1%}" if 0 < value < 0.1 or 0.99 <= value < 1 else f"{value:.0%}"


def duration(seconds: float) -> str:
    """Seconds in words, to about two figures: "48 s", "3 min 05 s", "2 h 14 min"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(value: float) -> str:
    """A count to about three figures: "812", "17.3 k", "311 k", "8.19 M"."""
    for unit, size in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - int(math.log10(abs(scaled))))}f}{unit}"
    return f"{value:.0f}"


def _accuracy(run: Run, kind: str) -> Card | None:
    curve = run.curve("eval", f"heldout/{kind}")
    if curve is None:
        return None
    detail = _span(curve)
    low, high = (run.curve("eval", f"heldout/{kind}_{side}") for side in ("low", "high"))
    if low is not None and high is not None:
        detail += f"; 95% interval {100 * low.last:.0f}\u2013{100 * high.last:.0f}%"
    return Card(f"Held-out accuracy, {kind}", _change(curve), detail)


def _change(curve: Curve | None) -> str:
    if curve is None:
        return "not recorded"
    if len(curve.finite) == 1:
        return percent(curve.last)
    return f"{percent(curve.first)} → {percent(curve.last)}"


def _span(curve: Curve) -> str:
    """The steps at which the curve has its first and last value."""
    steps = curve.steps[np.isfinite(curve.values)]
    return f"step {steps[0]:.0f}" if len(steps) == 1 else f"step {steps[0]:.0f} → {steps[-1]:.0f}"


def _reward(run: Run) -> Card | None:
    curve = run.curve("rl", "reward")
    if curve is None:
        return None
    span = min(ENDS, max(1, len(curve.finite) // 2))
    first, last = curve.finite[:span].mean(), curve.finite[-span:].mean()
    detail = f"mean of the first and the last {span} steps" if span > 1 else "first and last step"
    return Card("Reward in training", f"{first:.2f} → {last:.2f}", detail)


def _time(run: Run, phases: Sequence[str], label: str = "Time") -> Card | None:
    ends = [
        _elapsed(curve.finite)
        for phase in phases
        if (curve := run.curve(phase, "time")) is not None
    ]
    if not ends:
        return None
    steps = max((int(row["step"]) for row in run.rows(phases[0])), default=0)
    return Card(
        label, duration(max(ends)), f"{steps} step{'s' * (steps != 1)}, compilation included"
    )


def _elapsed(seconds: np.ndarray) -> float:
    """Seconds a run took: its clock restarts at 0 when it is resumed, so the parts are added."""
    part_ends = np.append(seconds[1:] < seconds[:-1], True)
    return float(seconds[part_ends].sum())


def _tokens(run: Run) -> Card | None:
    """Tokens sampled: as recorded, or else mean length times completions, from the config."""
    detail = "in training, evaluation not counted"
    if (recorded := run.curve("rl", "tokens/sampled")) is not None:
        return Card("Tokens sampled", count(float(recorded.finite.sum())), detail)
    lengths = run.curve("rl", "length/mean")
    problems = number(run.setting("problems_per_step", "prompts_per_step", "problems", "prompts"))
    samples = number(run.setting("samples_per_problem", "group_size", "samples"))
    if lengths is None or math.isnan(problems * samples):
        return None
    total = float(lengths.finite.sum()) * problems * samples
    return Card("Tokens sampled", f"≈ {count(total)}", f"mean length \u00d7 completions; {detail}")


def _updates(run: Run) -> Card | None:
    skipped, updates = run.curve("rl", "updates_skipped"), run.curve("rl", "updates")
    if skipped is None and updates is None:
        return None
    made = f"{updates.finite.sum():.0f}" if updates is not None else "not recorded"
    missed = f"{skipped.finite.sum():.0f} skipped" if skipped is not None else ""
    return Card("Optimizer updates", made, f"{missed} (gradient not finite)" if missed else "")
