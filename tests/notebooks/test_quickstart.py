# SPDX-License-Identifier: Apache-2.0
"""The quickstart notebook runs from the first cell to the last, and is kept without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "quickstart.ipynb"


def test_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.slow
def test_runs(tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The kernel starts in an empty folder, so its runs and caches go there.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    setup = f"import os; os.chdir({str(tmp_path)!r})"
    find = notebook.cells[1]
    find.source = find.source.replace("pathlib.Path.cwd()", f"pathlib.Path({str(NOTEBOOK.parent)!r})")
    notebook.cells.insert(1, nbformat.v4.new_code_cell(setup))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    results = next(c for c in notebook.cells if "outcome.results" in c.source).outputs[-1]
    assert "heldout/sampled" in results["data"]["text/plain"]
    assert list(tmp_path.glob("runs/gppo-0001/report.html"))
