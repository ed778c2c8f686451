# SPDX-License-Identifier: Apache-2.0
"""Reads a sweep's folder: the plan in sweep.json, its runs as one tidy table, and the checks.

The plan was written before the first run, so what is compared, with what, and what must be seen of
each arm was settled before any result was. Read `read_sweep` first.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from klear_jax.report.runfiles import Record, Run, flatten, number, read_run

PLAN = "sweep.json"
COLUMNS = ("setting", "arm", "seed", "sft_seed", "step", "metric", "value")

RL_METRICS = {
    name: name
    for name in (
        "reward", "accuracy", "entropy", "kl", "rollout/kl", "rollout/logprob_change_pos",
        "rollout/logprob_change_neg", "clip", "clip/pos_high", "clip/neg_low", "mass/clipped",
        "mass/lost", "grad_norm", "grad_norm_max", "ratio/max", "erc/dropped", "groups/trained",
        "updates_skipped",
    )
} | {"seconds": "step_seconds"}  # fmt: skip
"""Name in the table -> name in metrics.jsonl, in the records of training."""
EVAL_METRICS = ("heldout/sampled", "heldout/greedy")
BY_SIGN = {"mass/clipped_pos": "pos", "mass/clipped_neg": "neg"}
"""Mass on clipped tokens with A > 0 and with A < 0, as a share of the unclipped mass; added up
from the deciles of the entropy, which keep the signs apart."""


@dataclass(frozen=True)
class Check:
    """Something that has to hold for a comparison to mean what it says."""

    name: str
    holds: bool
    detail: str = ""
    """What was found; where it does not hold, in which runs."""


@dataclass(frozen=True)
class SweepRuns:
    """A sweep as its files tell it."""

    path: Path
    plan: Record
    runs: Mapping[tuple[str, str, int], Run]
    """(setting, arm, seed) -> run, for those that finished."""
    table: pd.DataFrame
    """One row a value: the columns `COLUMNS`."""
    missing: tuple[str, ...]
    """Runs of the plan that did not finish."""

    @property
    def arms(self) -> list[str]:
        return list(self.plan["arms"])

    @property
    def settings(self) -> list[str]:
        return list(self.plan["settings"])

    @property
    def baseline(self) -> str:
        return self.plan["baseline"]


def finished(folder: Path, phase: str, steps: int) -> bool:
    """Whether a run has logged `phase` at its last step and has written its page after that."""
    if not (folder / "report.html").is_file():
        return False
    try:
        rows = read_run(folder).rows(phase)
    except (OSError, ValueError):
        return False
    return bool(rows) and rows[-1]["step"] >= steps


def read_sweep(path: Path) -> SweepRuns:
    """Read the plan and every finished run.

    Raises:
        FileNotFoundError: the folder holds no plan.
        ValueError: none of the runs has finished.
    """
    file = path / PLAN
    if not file.is_file():
        raise FileNotFoundError(f"{path}: holds no {PLAN}; give the folder that a sweep wrote")
    plan = json.loads(file.read_text(encoding="utf-8"))
    runs, missing, frames = {}, [], []
    for entry in plan["runs"]:
        key = (entry["setting"], entry["arm"], entry["seed"])
        folder = path / entry["folder"]
        if not finished(folder, "eval", plan["steps"]):
            missing.append(f"{key[0]} {key[1]} seed {key[2]}")
            continue
        runs[key] = read_run(folder)
        frames.append(_rows(runs[key], entry))
    if not frames:
        raise ValueError(f"{path}: no run has finished, so there is nothing to compare")
    table = pd.concat(frames, ignore_index=True)
    return SweepRuns(path, plan, runs, table, tuple(missing))


def _rows(run: Run, entry: Record) -> pd.DataFrame:
    """A run's part of the table."""
    found: list[tuple[int, str, float]] = []
    for row in run.rows("rl"):
        values = {name: number(row.get(key)) for name, key in RL_METRICS.items()}
        values |= {name: _kept(row, sign) for name, sign in BY_SIGN.items()}
        found += [(row["step"], name, value) for name, value in values.items()]
    for row in run.rows("eval"):
        found += [(row["step"], name, number(row.get(name))) for name in EVAL_METRICS]
    frame: Any = pd.DataFrame(found, columns=["step", "metric", "value"]).dropna()
    for name in ("setting", "arm", "seed", "sft_seed"):
        frame[name] = entry[name]
    return frame[list(COLUMNS)]


def _kept(row: Record, sign: str) -> float:
    tenths = row.get(f"entropy_deciles/{sign}_kept")
    return float(np.sum(tenths)) if isinstance(tenths, list) else np.nan


def curves(table: pd.DataFrame, setting: str, arm: str, metric: str) -> pd.DataFrame:
    """One metric of an arm: a row a step, a column a seed."""
    chosen: Any = table[
        (table["setting"] == setting) & (table["arm"] == arm) & (table["metric"] == metric)
    ]
    return chosen.pivot(index="step", columns="seed", values="value").sort_index()


# --- checks ---------------------------------------------------------------------------------------


def checks(sweep: SweepRuns) -> list[Check]:
    """Everything that must hold, in the order of the page."""
    found = [_configs(sweep), _pairing(sweep), _updates(sweep), _one_version(sweep)]
    for setting in sweep.settings:
        for arm in sweep.arms:
            found += _mechanism(sweep, setting, arm)
    return found


def _configs(sweep: SweepRuns) -> Check:
    """The config that each run wrote is the one it was meant to have."""
    wrong = []
    for entry in sweep.plan["runs"]:
        run = sweep.runs.get((entry["setting"], entry["arm"], entry["seed"]))
        if run is None:
            continue
        meant, had = flatten(entry["config"]), flatten(run.config)
        # A resumed run is still the same run.
        differ = [n for n in meant.keys() | had.keys() if meant.get(n) != had.get(n)]
        if differ := sorted(set(differ) - {"out", "resume"}):
            wrong.append(f"{entry['folder']}: {', '.join(differ)}")
    return _check("Every run had the config that the plan gave it", len(sweep.runs), wrong)


def _pairing(sweep: SweepRuns) -> Check:
    """Equal weights and equal noise: until the first update nothing may differ between arms."""
    first: Any = sweep.table[
        ((sweep.table["metric"] == "reward") & (sweep.table["step"] == 1))
        | ((sweep.table["metric"] == "heldout/sampled") & (sweep.table["step"] == 0))
    ]
    wrong = []
    for (seed, metric), group in first.groupby(["seed", "metric"]):
        if group["value"].nunique() > 1:
            wrong.append(f"seed {seed}: {metric} {sorted(group['value'].unique())}")
    name = "Arms of a seed begin alike: same accuracy before training, same first rollout"
    return _check(name, len(sweep.runs), wrong)


def _updates(sweep: SweepRuns) -> Check:
    skipped: Any = sweep.table[sweep.table["metric"] == "updates_skipped"]
    by_run = skipped.groupby(["setting", "arm", "seed"])["value"].sum()
    wrong = [f"{' '.join(map(str, key))}: {int(n)}" for key, n in by_run.items() if n > 0]
    return _check("No update was skipped (loss or gradient not finite)", len(sweep.runs), wrong)


def _one_version(sweep: SweepRuns) -> Check:
    versions = {str(run.info.get("git_revision")) for run in sweep.runs.values()}
    wrong = [] if len(versions) == 1 else sorted(versions)
    return _check("All runs are of one version of the code", len(sweep.runs), wrong)


def _mechanism(sweep: SweepRuns, setting: str, arm: str) -> list[Check]:
    """What the plan says must be seen of an arm, in every one of its runs."""
    treatment, found = sweep.plan["arms"][arm], []
    wanted = [(m, "is 0") for m in treatment["zero"]] + [(m, "> 0") for m in treatment["positive"]]
    for metric, how in wanted:
        table: Any = curves(sweep.table, setting, arm, metric)
        seeds = [key[2] for key in sweep.runs if key[:2] == (setting, arm)]
        wrong, means = [], []
        for seed in seeds:
            values = table[seed].dropna() if seed in table else pd.Series(dtype=float)
            good = (values == 0).all() if how == "is 0" else (values > 0).any()
            means.append(float(values.mean()) if len(values) else np.nan)
            if not len(values):
                wrong.append(f"seed {seed}: not recorded")
            elif not good:
                wrong.append(f"seed {seed}: largest {values.abs().max():.3g}")
        if not seeds:
            wrong.append("no run finished")
        check = _check(f"{setting}, {arm}: {metric} {how}", len(seeds), wrong)
        if not wrong:
            check = Check(check.name, True, f"mean {np.mean(means):.3g} over {len(seeds)} runs")
        found.append(check)
    return found


def _check(name: str, runs: int, wrong: list[str]) -> Check:
    if not wrong:
        return Check(name, True, f"{runs} runs")
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Check(name, False, "; ".join(wrong[:3]) + more)


def settings_read(sweep: SweepRuns) -> list[tuple[Any, ...]]:
    """A row an arm, from the configs that its runs wrote: what the clip was."""
    names = ("clip.variant", "clip.level", "clip.low", "clip.high", "clip.beta_low",
             "clip.beta_high", "objective.erc")  # fmt: skip
    rows = []
    for arm in sweep.arms:
        configs = [flatten(run.config) for key, run in sweep.runs.items() if key[1] == arm]
        cells = []
        for name in names:
            values = {str(config.get(name)) for config in configs}
            cells.append(", ".join(sorted(values)) or "no run")
        rows.append((arm, sweep.plan["arms"][arm]["text"], *cells))
    return rows
