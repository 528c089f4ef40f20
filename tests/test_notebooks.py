"""The notebook written by hand runs from top to bottom, without a network, and shows its figures."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_prepare_runs_top_to_bottom(tmp_path, monkeypatch):
    """About ten short cells; each runs, none writes to standard error, the sizes are drawn."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(ROOT / "00_prepare.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert 4 <= len(code) <= 10
    assert max(cell.source.count("\n") + 1 for cell in code) <= 15
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in code for output in cell.outputs]
    assert "".join(output.text for output in outputs if output.get("name") == "stderr") == ""
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "500 samples can be used, left out: none" in text
    assert 2 == sum("image/png" in output.get("data", {}) for output in outputs)
