# SPDX-License-Identifier: Apache-2.0
"""The clipping notebook runs from the first cell to the last, and is kept without outputs."""

import json
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "clipping.ipynb"


def test_valid_compiles_and_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    for cell in code:
        compile(cell.source, cell.id, "exec")


@pytest.mark.slow
def test_runs(tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The kernel starts in an empty folder, so its runs go there; compiled programs do not.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax-tests"))
    first = notebook.cells[1]
    for long, short in (
        ("pathlib.Path.cwd()", f"pathlib.Path({str(NOTEBOOK.parent)!r})"),
        ("STEPS = 6", "STEPS = 2"),
    ):
        assert long in first.source
        first.source = first.source.replace(long, short)
    setup = f"import os; os.chdir({str(tmp_path)!r})"
    notebook.cells.insert(1, nbformat.v4.new_code_cell(setup))
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()

    def cell(text: str):
        (found,) = (c for c in notebook.cells if c.cell_type == "code" and text in c.source)
        return found

    for text in ("figure.supxlabel", "heatmap.png"):
        assert "image/png" in cell(text).outputs[-1]["data"]
    assert "gspo_matched" in cell("shown.rows").outputs[-1]["data"]["text/plain"]
    said = "".join(out.get("text", "") for out in cell("sweep_stats.sentence").outputs)
    assert said.count("gppo against ppo, strong, ") == 4
    (page,) = tmp_path.glob("runs/sweep-clipping-0001/report.html")
    plan = json.loads((page.parent / "sweep.json").read_text())
    assert [run["arm"] for run in plan["runs"]] == ["ppo", "gppo"] * 2
