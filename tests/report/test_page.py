# SPDX-License-Identifier: Apache-2.0
"""The report of synthetic runs: what is shown, what is left out, and that nothing in a run's files
can break it.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from klear_jax.report import write_report
from klear_jax.report.__main__ import main
from klear_jax.report.cards import count, duration, percent, rl_cards
from klear_jax.report.completions import pairs, visible_text
from klear_jax.report.plots import smoothed
from klear_jax.report.runfiles import number, read_run

HOSTILE = (
    "<think>a<script>alert(1)</script>\n</think>"
    "<img src=x onerror=alert(2)>\"'</pre></td>\u202eevil\x00\ud800 \\boxed{<b>7</b>}"
)


def rl_row(step: int, rng: np.random.Generator) -> dict[str, Any]:
    """A plausible record of one RL step."""
    done = 1 - math.exp(-step / 9)
    noise = float(rng.normal(0, 0.025))
    edges = np.linspace(-1.5, 1.5, 61)
    width = 0.05 + 0.05 * (1 - done)
    counts = rng.poisson(5500 * np.exp(-np.abs((edges[1:] + edges[:-1]) / 2) / width))
    norm = 1.4 + 1.8 * done + 8 * abs(noise)
    return {
        "phase": "rl",
        "step": step,
        "time": 42 + 2.9 * step,
        "reward": 0.2 + 0.63 * done + noise,
        "accuracy": 0.18 + 0.63 * done + noise,
        "loss": 0.01 * noise,
        "entropy": 0.42 * math.exp(-step / 14) + 0.04,
        "grad_norm": norm,
        "grad_norm_max": norm * float(1.3 + rng.exponential(0.9)),
        "clip/pos_high": 0.0018 * math.exp(-step / 20) + 0.0006 * abs(noise) / 0.025,
        "clip/neg_low": 0.0035 * math.exp(-step / 30) + 0.0008 * abs(noise) / 0.025,
        "outside/pos_low": 0.0004,
        "outside/neg_high": 0.0007 + 0.0002 * abs(noise) / 0.025,
        "clip": 0.006,
        "mass/clipped": 0.02 * done,
        "mass/lost": 0.01 * done,
        "rollout/kl": 0.01 + 0.02 * done,
        "rollout/logprob_change_pos": 0.01,
        "rollout/logprob_change_neg": -0.1 * done,
        "by_update/clip/pos_high": [0.0, 0.001, 0.002, 0.004],
        "by_update/clip/neg_low": [0.0, 0.002, 0.003, None if step == 3 else 0.004],
        **{
            f"entropy_deciles/{sign}_{part}": [0.0] * 8 + [0.001, 0.01]
            for sign in ("pos", "neg")
            for part in ("clipped", "kept", "lost")
        },
        "kl": 0.004 + 0.01 * done + 0.02 * abs(noise),
        "ratio/max": 3.1,
        "nll_positive": 0.1,
        "lr": 1e-4,
        "updates": 4,
        "updates_skipped": 0,
        "groups/informative": 0.85 - 0.4 * done + noise,
        "groups/expected_informative": 0.9 - 0.38 * done,
        "length/mean": 22 + 0.6 * done + 4 * noise,
        "length/max": 28,
        "truncated": 0.02 * (1 - done),
        "invalid": 0.0,
        "sampler_gap": 4e-7 * (1 + abs(noise)),
        "padding_share": 0.2,
        "tokens_per_second": 5200,
        "seconds/sample": 1.5 if step > 1 else 9.0,
        "seconds/train": 1.1 if step > 1 else 11.0,
        "seconds/grade": 0.1,
        "ratio_histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "something/unknown": {"nested": [1]},
    }


def sft_rows(steps: int = 400) -> list[dict[str, Any]]:
    """A falling SFT loss."""
    rng = np.random.default_rng(1)
    return [
        {
            "phase": "sft",
            "step": step,
            "time": 0.1 * step,
            "loss": 0.35 + 3.6 * math.exp(-step / 45) + float(rng.normal(0, 0.02)),
            "grad_norm": 0.4 + 2 * math.exp(-step / 60) + float(rng.exponential(0.1)),
            "lr": 2e-3,
            "tokens_per_second": 21000.0,
        }
        for step in range(1, steps + 1)
    ]


def eval_rows() -> list[dict[str, Any]]:
    """Held-out accuracy every ten steps."""
    rows = []
    for step, sampled, greedy in zip(
        (0, 10, 20, 30, 40),
        (0.21, 0.58, 0.77, 0.8, 0.81),
        (0.11, 0.7, 0.9, 0.95, 0.965),
        strict=True,
    ):
        margin = 1.96 * math.sqrt(sampled * (1 - sampled) / 256)
        row = {"phase": "eval", "step": step, "time": 42 + 3 * step}
        for kind, value in (("sampled", sampled), ("greedy", greedy)):
            row |= {f"heldout/{kind}": value}
            row |= {f"heldout/{kind}/sum": value - 0.03, f"heldout/{kind}/sort": value + 0.03}
        rows.append(
            row
            | {"heldout/sampled_low": sampled - margin, "heldout/sampled_high": sampled + margin}
        )
    return rows


def completion_rows() -> list[dict[str, Any]]:
    """Ten problems of two tasks, answered at steps 0, 20 and 40."""
    rows = []
    for step in (0, 20, 40):
        for index in range(10):
            task, right = ("sum", "91") if index < 6 else ("sort", "0134589")
            good = step == 40 and index != 3
            answer = right if good else ("81" if task == "sum" else "9854310")
            thought = "7+4=11 carry 1\n3+5+1=9" if good else "7+4=11\n3+5=8"
            rows.append(
                {
                    "step": step,
                    "problem_id": f"{task}-{index}",
                    "question": f"{37 + index}+54" if task == "sum" else "sort 9 3 5 0 8 4 1",
                    "answer": right,
                    "response": f"<think>{thought}</think>\\boxed{{{answer}}}<|im_end|>",
                    "correct": good,
                    "reward": float(good),
                    "tokens": 24,
                    "stop": "stop",
                    "reason": "matches" if good else "wrong value",
                }
            )
    return rows


CONFIG = {
    "preset": "tiny",
    "git_revision": "0123456789abcdef",
    "created": "2025-01-31T12:00:00Z",
    "versions": {"jax": "0.10.2", "numpy": "2.4.6"},
    "command": "python experiments/run_gppo.py",
    "parameters": 311280,
    "config": {
        "model": {"name": "tiny", "layers": 3},
        "clip": {"variant": "gppo", "low": 0.2, "high": 0.28, "dual": None},
        "sft": {"steps": 400, "lr": 0.002, "batch": 64},
        "rl": {"steps": 40, "lr": 0.0001, "problems_per_step": 32, "samples_per_problem": 8},
        "seed": 0,
    },
    "sft_run": None,
}


def lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rl_rows(steps: int = 40) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [rl_row(step, rng) for step in range(1, steps + 1)]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are built but not turned into pixels, which is most of a report's time."""
    monkeypatch.setattr("klear_jax.report.plots.png_bytes", lambda figure: b"png")


@pytest.fixture
def full_run(tmp_path: Path) -> Path:
    """A finished run whose fine-tuning lies in another folder, with a torn last line."""
    start, run = tmp_path / "start", tmp_path / "run"
    start.mkdir()
    run.mkdir()
    (start / "metrics.jsonl").write_text(lines(sft_rows()))
    (run / "metrics.jsonl").write_text(lines(rl_rows() + eval_rows()) + '{"phase": "rl", "st')
    (run / "completions.jsonl").write_text(lines(completion_rows()))
    (run / "config.json").write_text(json.dumps({**CONFIG, "sft_run": str(start)}))
    return run


def write_run(folder: Path, rows: Iterable[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(lines(rows))
    return folder


class Page(HTMLParser):
    """Collects what a browser would see: section titles, tags with their attributes, and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "h2":
            self.titles.append("")
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["h2"]:
            self.titles[-1] += data
        self.text += data


def test_full_run(full_run: Path) -> None:
    path = write_report(full_run)
    page = Page(path)
    assert path == full_run / "report.html"
    assert page.titles == [
        "Results",
        "Exploration and clipping",
        "Updates",
        "Sampling and time",
        "Completions before and after",
        "Supervised fine-tuning",
        "What this can and cannot show",
        "Configuration",
    ]
    for words in ("21% → 81%", "11% → 96%", "160", "GPPO run: tiny", "311,280", "0.3 million"):
        assert words in page.text
    assert "1 line of the run's files" in page.text
    assert "Left out" not in page.text
    pictures = {path.stem for path in (full_run / "figures").iterdir()}
    assert pictures >= {
        "reward",
        "heldout",
        "entropy",
        "clip",
        "grad_norm",
        "ratio",
        "mass",
        "entropy_deciles",
        "by_update",
        "logprob_change",
        "length",
        "summary",
    }
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (full_run / "figures").iterdir())
    assert path.stat().st_size < 3_000_000
    assert not list(full_run.glob(".*.tmp"))


@pytest.mark.usefixtures("undrawn")
def test_page_is_self_contained(full_run: Path) -> None:
    page = Page(write_report(full_run))
    names = {name for name, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "form", "base"}
    for name, attributes in page.tags:
        assert not any(key.startswith("on") for key in attributes)
        if name == "img":
            assert attributes["src"]
            assert attributes["src"].startswith("data:image/png;base64,")
            assert attributes["alt"]
        else:
            assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "http:" not in page.text
    assert "https:" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_hostile_text_is_escaped(full_run: Path) -> None:
    rows = completion_rows()
    for row in rows:
        row |= dict.fromkeys(("question", "answer", "response", "reason"), HOSTILE)
        row["problem_id"] += "<script>"
    (full_run / "completions.jsonl").write_text(lines(rows))
    config = {**CONFIG, "preset": "<script>x</script>", "command": HOSTILE}
    (full_run / "config.json").write_text(json.dumps(config))
    page = Page(write_report(full_run))
    names = [name for name, _ in page.tags]
    assert "script" not in names
    assert all((tag[1].get("src") or "data:").startswith("data:") for tag in page.tags)
    assert names.count("td") < 200
    assert "<img src=x onerror=alert(2)>" in page.text
    assert "\u202e" not in page.text.split("Configuration")[0]


def test_visible_text_marks_what_would_not_show() -> None:
    assert "&lt;think&gt;" in visible_text("<think>")
    assert 'class="tag"' in visible_text("<think>")
    assert "↵" in visible_text("a\nb")
    assert visible_text("a\x07\u202eb") == "a\\u0007\\u202eb"
    assert visible_text("x" * 30, limit=10).endswith("20 more characters</span>")
    assert "<script" not in visible_text("<script>alert(1)</script>")


def test_completions_are_paired_by_problem_and_mix_tasks() -> None:
    shown, first, last = pairs(completion_rows())
    assert (first, last, len(shown)) == (0, 40, 8)
    names = [pair.before["problem_id"] for pair in shown]
    assert [n for n in names if n.startswith("sort")] == [f"sort-{i}" for i in (6, 7, 8, 9)]
    assert all(p.after and p.after["problem_id"] == p.before["problem_id"] for p in shown)
    assert all(p.after and p.after["step"] == 40 and p.before["step"] == 0 for p in shown)
    only_start, *steps = pairs([row for row in completion_rows() if row["step"] == 0])
    assert steps == [0, 0]
    assert only_start[0].after is None


def test_not_a_number_and_none_are_gaps(tmp_path: Path) -> None:
    rows = rl_rows(12)
    for index, value in enumerate((math.nan, None, math.inf, "text", True, 10**400)):
        rows[index]["reward"] = rows[index]["grad_norm"] = rows[index]["kl"] = value
    for row in rows:
        row["entropy"] = math.nan
        row["clip/pos_high"] = None
    rows[3]["ratio_histogram"] = {"edges": [0, 1], "counts": "many"}
    rows[4]["ratio_histogram"]["edges"][0] = None
    run = write_run(tmp_path / "run", rows)
    curve = read_run(run).curve("rl", "reward")
    assert curve is not None
    assert np.isnan(curve.values).sum() == 6
    page = Page(write_report(run))
    assert "entropy" in page.text.split("Left out")[1]
    assert not (run / "figures" / "entropy.png").exists()


@pytest.mark.parametrize(
    "key", sorted(rl_row(1, np.random.default_rng(0)).keys() - {"phase", "step"})
)
@pytest.mark.usefixtures("undrawn")
def test_any_single_metric_suffices(tmp_path: Path, key: str) -> None:
    rows = [{name: row[name] for name in ("phase", "step", key)} for row in rl_rows(3)]
    page = Page(write_report(write_run(tmp_path / "run", rows)))
    assert "What this can and cannot show" in page.titles


@pytest.mark.usefixtures("undrawn")
def test_sft_only_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sft_rows(50))
    page = Page(write_report(run, title="My run"))
    assert page.titles == ["Supervised fine-tuning"]
    assert "My run" in page.text
    assert "SFT loss" in page.text
    assert {p.stem for p in (run / "figures").iterdir()} == {"sft_loss", "sft_grad_norm"}


@pytest.mark.usefixtures("undrawn")
def test_evaluation_only_run(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run", eval_rows()[:1])))
    assert page.titles == ["Evaluation"]
    assert "21%" in page.text
    assert "→" not in page.text


def test_last_line_of_a_repeated_step_wins(tmp_path: Path) -> None:
    rows = [
        {"phase": "rl", "step": step, "reward": value} for step, value in ((2, 5), (1, 1), (2, 7))
    ]
    curve = read_run(write_run(tmp_path / "run", rows)).curve("rl", "reward")
    assert curve is not None
    assert curve.steps.tolist() == [1, 2]
    assert curve.values.tolist() == [1, 7]


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b'{"phase": "rl"', b"[1]\n3\n", b'{"step": 1}\n', b"\xff\xfe"]
)
def test_unusable_metrics_are_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="nothing to report"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_damaged_side_files_are_left_out(full_run: Path) -> None:
    (full_run / "config.json").write_text("{")
    (full_run / "completions.jsonl").write_text("{\n" + json.dumps({"step": 0}) + "\n")
    page = Page(write_report(full_run))
    assert "configuration" in page.text
    assert "completions" in page.text.split("Left out")[1]
    assert "Configuration" not in page.titles


@pytest.mark.usefixtures("undrawn")
def test_command_line(full_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (full_run / "report.html").write_text("old")
    assert main([str(full_run)]) == 0
    assert capsys.readouterr().out.strip() == str(full_run / "report.html")
    assert (full_run / "report.html").read_text().startswith("<!DOCTYPE html>")
    for bad in (tmp_path / "absent", tmp_path):
        assert main([str(bad)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_import_is_light() -> None:
    code = "import sys, klear_jax.report; print({'jax', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_numbers_in_words() -> None:
    assert [percent(v) for v in (0.0, 0.0213, 0.21, 0.996, 1.0)] == [
        "0%",
        "2.1%",
        "21%",
        "99.6%",
        "100%",
    ]
    assert [duration(v) for v in (2.34, 48.2, 185.0, 8040.0)] == [
        "2.3 s",
        "48 s",
        "3 min 05 s",
        "2 h 14 min",
    ]
    assert [count(v) for v in (7.0, 812.0, 17300.0, 311280.0, 8.19e9)] == [
        "7",
        "812",
        "17.3 k",
        "311 k",
        "8.19 G",
    ]
    assert math.isnan(number(True))
    assert math.isnan(number("1"))
    assert number(2) == 2.0


def test_time_of_a_resumed_run_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    times = (5.0, 10.0, 2.0, 7.0)
    rows = [{"phase": "rl", "step": i + 1, "time": t, "reward": 0} for i, t in enumerate(times)]
    shown = {card.label: card.value for card in rl_cards(read_run(write_run(tmp_path / "r", rows)))}
    assert shown["Time"] == "17 s"


def test_smoothing_keeps_gaps_and_constants() -> None:
    values = np.array([1.0, 1.0, np.nan, 1.0, 1.0, 1.0])
    np.testing.assert_array_equal(np.isnan(smoothed(values)), np.isnan(values))
    np.testing.assert_allclose(smoothed(values)[[0, 1, 3, 4, 5]], 1.0)
    np.testing.assert_allclose(smoothed(np.arange(7.0))[2:5], [2, 3, 4])
