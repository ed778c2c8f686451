# SPDX-License-Identifier: Apache-2.0
"""The demo learns what it says it learns, with each of three seeds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One working folder, so that the three runs share compiled programs."""
    return tmp_path_factory.mktemp("demo")


def run_demo(folder: Path, *flags: str) -> list[dict]:
    """The evaluations of a run of the demo."""
    out = folder / "-".join(flags).replace("=", "").strip("-")
    command = [sys.executable, str(ROOT / "experiments" / "run_gppo.py"), "demo", f"--out={out}"]
    done = subprocess.run([*command, *flags], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (out / "report.html").is_file()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "eval"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_accuracy(folder, seed):
    first, *_, last = run_demo(folder, f"--seed={seed}")
    assert 0.10 <= first["heldout/sampled"] <= 0.35
    assert last["step"] == 40
    assert last["heldout/sampled"] >= 0.70
    assert last["heldout/greedy"] >= 0.90


def test_the_third_task_is_learned_too(folder):
    first, *_, last = run_demo(folder, "--tasks=reverse")
    assert first["heldout/sampled"] < 0.10
    assert last["heldout/sampled"] > 0.40
    assert last["heldout/greedy"] > 0.75
