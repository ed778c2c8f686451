# SPDX-License-Identifier: Apache-2.0
"""The page of a sweep, from hand-made run folders: table, statistics, sentences and checks."""

import html
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from klear_jax.report import sweep_stats
from klear_jax.report.sweep_data import COLUMNS, checks, finished, read_sweep
from klear_jax.report.sweep_page import CAN_SHOW, write_sweep_page
from klear_jax.report.sweep_stats import Outcome, compare, paired, sentence, summary

STEPS, SEEDS = 8, 3
"""So windows are of 4 steps."""
SETTINGS = ("mild", "strong")
ARMS = {
    "ppo": {"text": "drops", "zero": ["mass/clipped"], "positive": ["clip"]},
    "gppo": {"text": "keeps <both>", "zero": [], "positive": ["clip", "mass/clipped"]},
    "gppo_high": {
        "text": "keeps the upper", "zero": ["mass/clipped_neg"],
        "positive": ["clip", "mass/clipped_pos"],
    },
}  # fmt: skip
SHIFTS = {
    ("mild", "gppo"): (0.1, 0.11, 0.1),
    ("mild", "gppo_high"): (0.02, -0.01, 0.0),
    ("strong", "gppo"): (0.03, 0.01, 0.06),
    ("strong", "gppo_high"): (-0.1, -0.12, -0.11),
}
"""What an arm has more reward than ppo from step 2 on, seed by seed."""


def rl_row(setting: str, arm: str, seed: int, step: int) -> dict[str, Any]:
    shift = SHIFTS[setting, arm][seed] if arm != "ppo" and step > 1 else 0.0
    kept = {"ppo": (0.0, 0.0), "gppo": (0.02, 0.01), "gppo_high": (0.02, 0.0)}[arm]
    return {
        "phase": "rl", "step": step, "reward": 0.1 + 0.1 * step + 0.005 * seed + shift,
        "entropy": 0.1 * step, "rollout/kl": 0.01, "rollout/logprob_change_neg": -0.1 + shift,
        "clip": 0.05, "mass/clipped": sum(kept), "mass/lost": 0.01, "grad_norm": float(step),
        "updates_skipped": 0, "step_seconds": 2.0, "tokens_per_second": 99.0,
        "entropy_deciles/pos_kept": [0.0] * 9 + [kept[0]],
        "entropy_deciles/neg_kept": [kept[1]] + [0.0] * 9,
    }  # fmt: skip


def eval_row(setting: str, arm: str, seed: int, step: int) -> dict[str, Any]:
    shift = SHIFTS[setting, arm][seed] if arm != "ppo" and step else 0.0
    sampled = 0.2 + step / 20 + 0.005 * seed + shift
    return {"phase": "eval", "step": step, "heldout/sampled": sampled, "heldout/greedy": 0.9}


def write_lines(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_sweep(path: Path, seeds: int = SEEDS) -> Path:
    """Every run of 3 arms in 2 settings, finished."""
    runs = []
    for seed in range(seeds):
        for setting in SETTINGS:
            for arm in ARMS:
                folder = path / "runs" / setting / arm / f"seed-{seed}"
                folder.mkdir(parents=True)
                config = {"clip": {"variant": arm, "low": 0.2}, "seed": seed, "out": str(folder)}
                runs.append(
                    {
                        "setting": setting, "arm": arm, "seed": seed, "sft_seed": seed % 2,
                        "config": config, "folder": str(folder.relative_to(path)), "command": "x",
                    }
                )  # fmt: skip
                info = {"config": config, "git_revision": "abc"}
                (folder / "config.json").write_text(json.dumps(info))
                (folder / "report.html").write_text("page")
                of = (setting, arm, seed)
                rows = [rl_row(*of, step) for step in range(1, STEPS + 1)]
                write_lines(folder, rows + [eval_row(*of, step) for step in (0, 4, STEPS)])
    plan = {
        "kind": "clipping", "created": "2025-01-31", "git_revision": "abc", "baseline": "ppo",
        "settings": {name: f"{name} updates" for name in SETTINGS}, "arms": ARMS, "steps": STEPS,
        "runs": runs,
    }  # fmt: skip
    (path / "sweep.json").write_text(json.dumps(plan))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_sweep(tmp_path)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are built but not turned into pixels, which is most of a page's time."""
    monkeypatch.setattr("klear_jax.report.plots.png_bytes", lambda figure: b"png")


def edit(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """`change` each record of a run in place; one for which it gives False is taken out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run, [row for row in rows if change(row) is not False])


def text_of(page: Path) -> str:
    return html.unescape(re.sub("<[^>]*>", "", page.read_text().split("</style>")[1]))


def failing(path: Path) -> dict[str, str]:
    return {check.name: check.detail for check in checks(read_sweep(path)) if not check.holds}


# --- the table, and a row a run ---------------------------------------------------------------


def test_the_table_has_a_row_for_each_value(folder: Path) -> None:
    table = read_sweep(folder).table
    assert tuple(table.columns) == COLUMNS
    assert not table.duplicated(list(COLUMNS[:-1])).any()
    assert table["value"].notna().all()
    one = table[(table["setting"] == "strong") & (table["arm"] == "gppo") & (table["seed"] == 1)]
    assert set(one["sft_seed"]) == {1}

    def values(metric: str) -> list[float]:
        return one[one["metric"] == metric]["value"].tolist()

    assert values("reward") == pytest.approx([0.205, *(0.115 + 0.1 * s for s in range(2, 9))])
    assert values("heldout/sampled") == pytest.approx([0.205, 0.415, 0.615])
    assert values("mass/clipped_neg") == pytest.approx([0.01] * 8)
    assert values("seconds") == [2.0] * 8
    assert values("tokens_per_second") == values("kl") == []


def test_numbers_of_a_run_by_hand(folder: Path) -> None:
    of = summary(read_sweep(folder)).loc[("mild", "ppo", 2)]
    # Rewards 0.21, 0.31 .. 0.91; the mean of three reaches 0.8 at step 8 only: (.71+.81+.91)/3.
    expected = {
        "first": 0.36, "last": 0.76, "worst": 0.61, "to_target": 8, "heldout": 0.61,
        "greedy": 0.9, "drop": -0.1, "clip": 0.05, "kept": 0, "lost": 0.01, "grad_norm": 4.5,
        "kl": 0.01, "entropy": 0.65, "seconds": 16,
    }  # fmt: skip
    assert of.to_dict() == pytest.approx(expected)


def test_a_target_never_reached_and_numbers_not_recorded_are_nan(folder: Path) -> None:
    def poor(row: dict[str, Any]) -> None:
        row["reward"] = 0.79
        row["grad_norm"] = math.nan if row["step"] == 8 else row.get("grad_norm")
        row.pop("rollout/kl", None)

    edit(folder / "runs/mild/ppo/seed-0", poor)
    of = summary(read_sweep(folder)).loc[("mild", "ppo", 0)]
    assert math.isnan(of["to_target"])
    assert math.isnan(of["kl"])
    assert of["grad_norm"] == 4


def test_windows_are_ten_steps_or_half_a_run() -> None:
    assert [sweep_stats.window_of(steps) for steps in (2, 3, 8, 20, 24)] == [1, 1, 4, 10, 10]


# --- comparisons ------------------------------------------------------------------------------

LAST = Outcome("last", "reward at the end", "reward")


def outcome_table(ppo: list[float], gppo: list[float]) -> pd.DataFrame:
    rows = [
        {"setting": "mild", "arm": arm, "seed": seed, "last": value}
        for arm, values in (("ppo", ppo), ("gppo", gppo))
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows).set_index(["setting", "arm", "seed"]).sort_index()


def against_ppo(ppo: list[float], gppo: list[float]) -> sweep_stats.Comparison:
    return paired(outcome_table(ppo, gppo), "mild", "gppo", "ppo", LAST)


def test_paired_t_and_interval_by_hand() -> None:
    found = against_ppo([0.5, 0.1, 0.3], [0.6, 0.3, 0.6])
    assert found.differences == pytest.approx((0.1, 0.2, 0.3))
    # t = 0.2 / (0.1 / sqrt 3) = 3.464; with 2 degrees p = 1 - t / sqrt(2 + t^2).
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    # t at 97.5 % with 2 degrees is 4.30265.
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half))
    text = sentence(sweep_stats.corrected([found])[0], 3)
    assert text == (
        "gppo against ppo, mild, reward at the end: difference +0.200 (95 % interval -0.048 to "
        "+0.448), Holm p = 0.074: no difference shown."
    )


def test_all_comparisons_of_an_outcome_are_one_holm_family(folder: Path) -> None:
    sweep = read_sweep(folder)
    table = summary(sweep)
    found = compare(sweep, table)
    assert len(found) == 4 * 4
    for name in ("first", "last", "heldout", "drop"):
        family = [c for c in found if c.outcome.name == name]
        assert [(c.setting, c.arm) for c in family] == list(SHIFTS)
        raw = [
            stats.ttest_rel(table.loc[(s, arm), name], table.loc[(s, "ppo"), name]).pvalue
            for s, arm in SHIFTS
        ]
        assert [c.p for c in family] == pytest.approx(raw)
        ordered = np.argsort(raw)
        steps = np.maximum.accumulate(np.array(raw)[ordered] * [4, 3, 2, 1])
        assert [family[n].holm for n in ordered] == pytest.approx(np.minimum(steps, 1))
    last = {(c.setting, c.arm): c for c in found if c.outcome.name == "last"}
    assert last["mild", "gppo"].mean == pytest.approx(0.31 / 3)
    assert [key for key, c in last.items() if c.shown] == [
        ("mild", "gppo"), ("strong", "gppo_high")
    ]  # fmt: skip
    ends = [sentence(c, SEEDS).rsplit(": ", 1)[1] for c in last.values()]
    assert ends == ["higher.", "no difference shown.", "no difference shown.", "lower."]


@pytest.mark.parametrize("seeds", [2, 5])
def test_equal_differences_have_no_p(seeds: int) -> None:
    found = against_ppo([0.1 * n for n in range(seeds)], [0.1 * n + 0.3 for n in range(seeds)])
    assert math.isnan(found.p)
    assert math.isnan(found.low)
    assert sentence(found, seeds) == (
        "gppo against ppo, mild, reward at the end: difference +0.300, the same in every seed, so "
        "there is no variance to test by: no difference shown."
    )


def test_one_seed_has_no_interval() -> None:
    found = against_ppo([0.5], [0.9])
    assert (found.mean, math.isnan(found.low), found.shown) == (0.4, True, False)
    assert sentence(found, 3).endswith(
        "difference +0.400 (1 of 3 seeds), one seed, so no interval: no difference shown."
    )


def test_only_seeds_that_both_have_are_compared() -> None:
    found = against_ppo([0.1, math.nan, 0.2, 0.3], [0.2, 0.9, math.nan, 0.6, 0.7])
    assert found.differences == pytest.approx((0.1, 0.3))
    assert "(2 of 5 seeds)" in sentence(found, 5)
    nothing = against_ppo([math.nan], [0.5])
    assert sentence(nothing, 1).endswith("no seed has both, so nothing can be said.")
    assert paired(outcome_table([0.1], []), "mild", "gppo", "ppo", LAST).differences == ()


def test_a_comparison_without_p_counts_in_its_family() -> None:
    tested, untested = against_ppo([0.5, 0.1, 0.3], [0.6, 0.3, 0.6]), against_ppo([0.5], [0.9])
    one, other = sweep_stats.corrected([tested, untested])
    assert one.holm == pytest.approx(2 * tested.p)
    assert math.isnan(other.holm)
    assert sweep_stats.corrected([]) == []


def test_numbers_in_words() -> None:
    assert [sweep_stats.p_text(p) for p in (0.0004, 0.0123, 0.0999, 0.123, 1.0)] == [
        "< 0.001", "= 0.012", "= 0.100", "= 0.12", "= 1.00"
    ]  # fmt: skip
    assert [sweep_stats.signed(x) for x in (0.1, -0.02, 0.0, -1e-9)] == [
        "+0.100", "-0.020", "0.000", "0.000"
    ]  # fmt: skip


# --- checks -----------------------------------------------------------------------------------


def test_all_checks_of_a_whole_sweep_hold(folder: Path) -> None:
    assert failing(folder) == {}
    assert len(checks(read_sweep(folder))) == 4 + 2 * (2 + 2 + 3)


@pytest.mark.parametrize(
    ("arm", "metric", "value", "check"),
    [
        ("gppo", "mass/clipped", 0.0, "gppo: mass/clipped > 0"),
        ("ppo", "mass/clipped", 1e-9, "ppo: mass/clipped is 0"),
        ("ppo", "mass/clipped", None, "ppo: mass/clipped is 0"),
        ("gppo_high", "clip", 0.0, "gppo_high: clip > 0"),
        ("gppo_high", "entropy_deciles/neg_kept", [0.0, 1e-9], "gppo_high: mass/clipped_neg is 0"),
        ("gppo_high", "entropy_deciles/pos_kept", [0.0], "gppo_high: mass/clipped_pos > 0"),
    ],
)
def test_a_mechanism_not_seen_in_one_run_fails(folder, arm, metric, value, check) -> None:
    edit(folder / f"runs/strong/{arm}/seed-1", lambda row: row.update({metric: value}))
    faults = failing(folder)
    assert list(faults) == [f"strong, {check}"]
    assert faults[f"strong, {check}"].startswith("seed 1: ")


def test_a_metric_that_moves_at_one_step_suffices(folder: Path) -> None:
    def rare(row: dict[str, Any]) -> None:
        row["clip"] = 0.01 * (row["step"] == 5)

    edit(folder / "runs/mild/gppo/seed-0", rare)
    assert failing(folder) == {}


@pytest.mark.parametrize(
    ("phase", "step", "metric"), [("rl", 1, "reward"), ("eval", 0, "heldout/sampled")]
)
def test_runs_of_a_seed_that_begin_apart_fail_the_pairing(folder, phase, step, metric) -> None:
    def other(row: dict[str, Any]) -> None:
        if (row["phase"], row["step"]) == (phase, step):
            row[metric] += 1e-6

    edit(folder / "runs/strong/gppo/seed-2", other)
    (fault,) = failing(folder).items()
    assert fault[0].startswith("Arms of a seed begin alike")
    assert fault[1].startswith(f"seed 2: {metric}")


def test_another_config_or_version_fails(folder: Path) -> None:
    run = folder / "runs/mild/gppo/seed-0"
    info = json.loads((run / "config.json").read_text())
    info["config"] |= {"out": "elsewhere", "resume": True}
    (run / "config.json").write_text(json.dumps(info))
    assert failing(folder) == {}
    info["config"]["clip"]["low"] = 0.3
    (run / "config.json").write_text(json.dumps(info | {"git_revision": "abd"}))
    assert list(failing(folder).values()) == ["runs/mild/gppo/seed-0: clip.low", "abc; abd"]


def test_a_skipped_update_fails(folder: Path) -> None:
    edit(folder / "runs/mild/ppo/seed-2", lambda row: row.update(updates_skipped=2))
    (detail,) = failing(folder).values()
    assert detail == "mild ppo 2: 16"


# --- the page ---------------------------------------------------------------------------------


def test_the_page_is_one_file_with_all_it_says(folder: Path) -> None:
    page, faults = write_sweep_page(folder)
    assert faults == []
    tags = re.findall(r"<(\w+)([^>]*)>", page.read_text())
    assert not {name for name, _ in tags} & {"script", "link", "iframe", "object", "embed"}
    sources = [found for _, rest in tags for found in re.findall(r'src="([^"]{0,30})', rest)]
    assert len(sources) == 8
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "://" not in "".join(rest for _, rest in tags)
    text = text_of(page)
    sweep = read_sweep(folder)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "sweep.csv"), sweep.table)
    for comparison in compare(sweep, summary(sweep)):
        assert sentence(comparison, SEEDS) in text
    for words in (
        CAN_SHOW, "0.3 million parameters", "cannot show which variant is better", "18 of 18",
        "18 of 18 hold", "gppo higher (mild), gppo_high lower (strong).", "keeps <both>",
    ):  # fmt: skip
        assert words in text
    drawn = list((folder / "figures").glob("*.png"))
    assert len(drawn) == 8
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn)


@pytest.mark.usefixtures("undrawn")
def test_a_partly_finished_sweep(folder: Path) -> None:
    for seed in range(SEEDS):
        (folder / f"runs/strong/gppo/seed-{seed}/report.html").unlink()
    edit(folder / "runs/mild/ppo/seed-2", lambda row: row["step"] < 8)
    page, faults = write_sweep_page(folder)
    text = text_of(page)
    assert "14 of 18" in text
    assert "strong gppo seed 0, " in text
    assert "mild ppo seed 2" in text
    assert "gppo against ppo, strong, reward of the last 4 steps: no seed has both" in text
    assert "(2 of 3 seeds)" in text
    assert [fault.split(": no")[0] for fault in faults] == [
        "strong, gppo: clip > 0", "strong, gppo: mass/clipped > 0"
    ]  # fmt: skip


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("gone", ["ppo", "gppo*"])
def test_a_sweep_without_the_baseline_or_with_nothing_else_has_a_page(folder, gone) -> None:
    for file in folder.glob(f"runs/*/{gone}/*/metrics.jsonl"):
        file.unlink()
    text = text_of(write_sweep_page(folder)[0])
    assert "Reward of the last 4 steps: no difference shown." in text


def test_a_run_is_finished_once_its_page_follows_its_last_step(folder: Path) -> None:
    run = folder / "runs/mild/ppo/seed-0"
    assert finished(run, "eval", STEPS)
    assert not finished(run, "eval", STEPS + 1)
    assert not finished(run, "sft", STEPS)
    (run / "metrics.jsonl").write_text("{")
    assert not finished(run, "eval", STEPS)
    assert not finished(folder / "absent", "eval", STEPS)


def test_no_plan_and_no_finished_run_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no sweep\.json"):
        write_sweep_page(tmp_path / "runs")
    for page in folder.glob("runs/*/*/*/report.html"):
        page.unlink()
    with pytest.raises(ValueError, match="no run has finished"):
        write_sweep_page(folder)
    assert not (folder / "report.html").exists()
