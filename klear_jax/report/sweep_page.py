# SPDX-License-Identifier: Apache-2.0
"""Writes the page of a sweep, and its table as sweep.csv: read `write_sweep_page`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from klear_jax.report import sweep_data, sweep_plots, sweep_stats
from klear_jax.report.page import render, replace
from klear_jax.report.records import Card, Picture, Section, Table
from klear_jax.report.sweep_data import Check, SweepRuns
from klear_jax.report.sweep_plots import Estimate
from klear_jax.report.sweep_stats import Comparison

CAN_SHOW = (
    "The model has 0.3 million parameters, sorts six digits, and was first taught to sort them the "
    "wrong way round on purpose; its Adam steps are 100 times those of the paper's runs. So the "
    "page can show the mechanism: which tokens an arm clips, how much gradient they keep, how far "
    "the policy moves in one rollout, and whether any of that is visible in the reward here. It "
    "cannot show which variant is better for a large model, for long reasoning, at learning rates "
    "near 1e-6, or over more than the steps that were run. Few seeds find large differences only: "
    "'no difference shown' does not mean that there is none."
)
METHOD = (
    "Each arm against {baseline}, paired by seed: within a seed the questions, the sampling noise "
    "and the starting weights are the same. Two-sided paired t-test; p-values corrected by Holm's "
    "method over all arms and settings of one outcome ({family} comparisons). Intervals are 95 % t "
    "intervals of one difference, not corrected. The {seeds} seeds start from {starts} SFT starts, "
    "so they are not fully independent, which the tests do not know. Outcomes and comparisons were "
    "written into sweep.json and this code before the first run. In red: a difference that is "
    "shown."
)
TELEMETRY = {
    "clip": ("clipped tokens", 2, True), "kept": ("mass on clipped", 2, True),
    "lost": ("mass lost", 2, True), "grad_norm": ("gradient norm", 2, False),
    "kl": ("KL a rollout", 4, False), "drop": ("log-prob change, A < 0", 3, False),
    "entropy": ("entropy, end", 4, False), "worst": ("worst reward, 2nd half", 3, False),
    "to_target": ("steps to 0.8", 1, False), "seconds": ("seconds", 0, False),
}  # fmt: skip
"""Column of the summary -> (heading, decimals, as a percentage)."""


def write_sweep_page(path: Path) -> tuple[Path, list[str]]:
    """Write `report.html`, `sweep.csv` and `figures/*.png` into a sweep's folder.

    Returns the page, and in words each check that does not hold.

    Raises:
        FileNotFoundError: the folder holds no plan.
        ValueError: no run has finished.
    """
    sweep = sweep_data.read_sweep(path)
    table = sweep_stats.summary(sweep)
    found = sweep_stats.compare(sweep, table)
    checks = sweep_data.checks(sweep)
    replace(path / "sweep.csv", sweep.table.to_csv(index=False).encode())
    (path / "figures").mkdir(exist_ok=True)
    sections = [
        _summary(sweep, found, checks),
        *[_setting(sweep, table, found, name) for name in sweep.settings],
        _sentences(sweep, found),
        _telemetry(sweep, table),
        _checks(checks),
        _arms(sweep),
        Section("What this can and cannot show", CAN_SHOW),
        Section("Plan", fold=("sweep.json", json.dumps(_short_plan(sweep), indent=2))),
    ]
    notes = ["Made by klear_jax.report from sweep.json and the files of its runs; sweep.csv holds "
             "every value."]  # fmt: skip
    if sweep.missing:
        notes.append(f"Not finished, so not in here: {', '.join(sweep.missing)}.")
    title = "Clipping variants compared"
    subtitle = (
        f"klear_jax · planned {sweep.plan['created']} · revision "
        f"{str(sweep.plan['git_revision'])[:12]} · folder {path.resolve().name}"
    )
    page = path / "report.html"
    replace(page, render(title, subtitle, sections, notes).encode("utf-8", errors="replace"))
    faults = [f"{check.name}: no. {check.detail}" for check in checks if not check.holds]
    return page, faults


def _summary(sweep: SweepRuns, found: Sequence[Comparison], checks: Sequence[Check]) -> Section:
    shown = [c for c in found if c.shown]
    holding = sum(check.holds for check in checks)
    seeds = sweep_stats.seeds_of(sweep)
    cards = (
        Card("Runs", f"{len(sweep.runs)} of {len(sweep.plan['runs'])}",
             f"{len(sweep.arms)} arms, {len(sweep.settings)} settings, {seeds} seeds"),
        Card("Differences shown", f"{len(shown)} of {len(found)}", "Holm-corrected p below 0.05"),
        Card("Checks", f"{holding} of {len(checks)} hold", "pairing, configs, mechanism"),
    )  # fmt: skip
    return Section("Result", _in_short(found), cards)


def _in_short(found: Sequence[Comparison]) -> str:
    """One sentence an outcome: which comparisons show a difference."""
    parts = []
    for name in dict.fromkeys(c.outcome.text for c in found):
        family = [c for c in found if c.outcome.text == name]
        shown = [
            f"{c.arm} {'higher' if c.mean > 0 else 'lower'} ({c.setting})"
            for c in family
            if c.shown
        ]
        what = ", ".join(shown) if shown else "no difference shown"
        parts.append(f"{name[:1].upper()}{name[1:]}: {what}.")
    return " ".join(parts)


def _setting(
    sweep: SweepRuns, table: pd.DataFrame, found: Sequence[Comparison], setting: str
) -> Section:
    """Curves, dots and differences of one setting."""
    have = [arm for arm in sweep.arms if any(k[:2] == (setting, arm) for k in sweep.runs)]
    pictures = []

    def add(name: str, png: bytes, alt: str, caption: str) -> None:
        replace(sweep.path / "figures" / f"{setting}_{name}.png", png)
        pictures.append(Picture(f"{setting}_{name}", png, alt, caption, wide=True))

    if sweep.baseline in have:
        for metric, label, percent in (
            ("reward", "reward", False),
            ("mass/clipped", "mass on clipped", True),
        ):
            curves = {a: sweep_stats.arm_curve(sweep, setting, a, metric) for a in have}
            curves = {arm: curve for arm, curve in curves.items() if len(curve)}
            if sweep.baseline not in curves:
                continue
            add(
                metric.replace("/", "_"),
                sweep_plots.multiples(curves, sweep.baseline, label, percent=percent),
                f"Plot: {label} of each arm",
                f"{label[:1].upper()}{label[1:]} in training: mean and 95 % interval over seeds. "
                f"Grey: {sweep.baseline}.",
            )  # fmt: skip
    names = {o.name: o.label for o in sweep_stats.outcomes(sweep.plan["steps"])}
    by_arm = {arm: table.loc[(setting, arm)] for arm in have}
    if not have:
        return Section(f"Setting {setting}", "No run has finished.")
    add("seeds", sweep_plots.dots(by_arm, sweep.baseline, names), "Plot: outcomes of every run",
        "Every run is a dot, the bar is the mean of an arm, the dashed line that of "
        f"{sweep.baseline}.")  # fmt: skip
    panels = []
    for name, text in names.items():
        chosen = [c for c in found if c.setting == setting and c.outcome.name == name]
        estimates = {
            c.arm: Estimate(c.mean, c.low, c.high, c.shown) for c in chosen if math.isfinite(c.mean)
        }
        panels.append((text, estimates))
    others = [arm for arm in have if arm != sweep.baseline]
    if others:
        caption = f"Difference from {sweep.baseline}, mean over seeds with a 95 % t interval."
        add("differences", sweep_plots.forest(panels, others), "Plot: paired differences", caption)
    return Section(f"Setting {setting}", sweep.plan["settings"][setting], figures=tuple(pictures))


def _sentences(sweep: SweepRuns, found: Sequence[Comparison]) -> Section:
    family = len(found) // max(len({c.outcome.name for c in found}), 1)
    seeds = sweep_stats.seeds_of(sweep)
    rows = tuple((sweep_stats.sentence(c, seeds),) for c in found)
    starts = len({entry["sft_seed"] for entry in sweep.plan["runs"]})
    intro = METHOD.format(baseline=sweep.baseline, family=family, seeds=seeds, starts=starts)
    return Section("Comparisons, one sentence each", intro, table=Table((), rows, kind="texts"))


def _telemetry(sweep: SweepRuns, table: pd.DataFrame) -> Section:
    rows = []
    for setting in sweep.settings:
        for arm in sweep.arms:
            if (setting, arm) not in table.index.droplevel("seed"):
                continue
            part = table.loc[(setting, arm)]
            cells = [
                _cell(part[name], digits, percent=percent)
                for name, (_, digits, percent) in TELEMETRY.items()
            ]
            rows.append((f"{setting} {arm}", *cells))
    header = ("Arm", *[heading for heading, _, _ in TELEMETRY.values()])
    intro = (
        "Mean over the steps of a run and then over seeds. Mass: share of the gradient mass "
        "|w W A|; lost: mass that an unclipped objective would have more. In brackets, where some "
        "runs never got there: how many did."
    )
    return Section("Telemetry", intro, table=Table(header, tuple(rows), kind="numbers"))


def _cell(values: pd.Series, digits: int, *, percent: bool) -> str:
    known = values.dropna()
    if not len(known):
        return "never" if values.name == "to_target" else "-"
    text = f"{100 * known.mean():.{digits}f}%" if percent else f"{known.mean():.{digits}f}"
    return text if len(known) == len(values) else f"{text} ({len(known)})"


def _checks(checks: Sequence[Check]) -> Section:
    rows = tuple((c.name, "yes" if c.holds else "NO", c.detail) for c in checks)
    intro = (
        "What must hold for the comparisons to mean what they say. The mechanism of each arm was "
        "declared in the plan: a metric that must stay exactly 0, or that must move."
    )
    return Section("Checks", intro, table=Table(("Check", "holds", "found"), rows, kind="facts"))


def _arms(sweep: SweepRuns) -> Section:
    header = ("Arm", "what it does", "variant", "level", "low", "high", "beta low", "beta high",
              "erc")  # fmt: skip
    rows = tuple(tuple(map(str, row)) for row in sweep_data.settings_read(sweep))
    return Section("Arms", "Read back from the config that each run wrote.",
                   table=Table(header, rows, kind="facts"))  # fmt: skip


def _short_plan(sweep: SweepRuns) -> dict[str, object]:
    """The plan without the full config of every run, which the runs hold too."""
    runs = [{k: v for k, v in run.items() if k != "config"} for run in sweep.plan["runs"]]
    return {**sweep.plan, "runs": runs}
