"""Notebooks are in step with their scripts, run from top to bottom without a network, and show their figures."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent


def _load():
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["notebooks"] = module
    spec.loader.exec_module(module)
    return module


notebooks = _load()


@pytest.fixture
def copy(tmp_path) -> Path:
    """The scripts and notebooks in a folder where they may be changed."""
    for script in ROOT.glob("0*.py"):
        shutil.copy(script, tmp_path)
    shutil.copy(ROOT / notebooks.BY_HAND, tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    return tmp_path


def test_committed_notebooks_are_in_step(capsys):
    """Cell for cell what the scripts have, run once from top to bottom, with figures, small, and without errors."""
    assert ["00", "01", "02", "03", "04", "05", "06"] == notebooks.stages(ROOT)
    assert 0 == notebooks.main(["--check"])
    assert "7 notebooks are in step" in capsys.readouterr().out


def _change(path: Path, change) -> None:
    made = json.loads(path.read_text())
    change([cell for cell in made["cells"] if cell["cell_type"] == "code"])
    path.write_text(json.dumps(made))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda code: code[1]["source"].append("\n1"), "cell 3: not what the script has"),
        (lambda code: code[-1].update(outputs=[]), "no figure is among its outputs"),
        (lambda code: code[0].update(execution_count=7), "not run once from top to bottom"),
        (
            lambda code: code[0].update(
                outputs=[{"output_type": "error", "ename": "E", "evalue": "e", "traceback": []}]
            ),
            "an error is among its outputs",
        ),
        (
            lambda code: code[0].update(outputs=[{"output_type": "stream", "name": "stdout", "text": "x" * 10**6}]),
            "1,[0-9]{3},[0-9]{3} bytes, more than 1,000,000",
        ),
        (
            lambda code: code[0].update(
                outputs=[{"output_type": "stream", "name": "stdout", "text": f"{Path.home()}/x"}]
            ),
            "names a folder of the machine",
        ),
    ],
)
def test_what_is_out_of_step_is_named_with_the_remedy(copy, capsys, change, message):
    """The check finds each kind of fault, says where it is, and what to run."""
    _change(copy / "notebooks" / "04_knapsack.ipynb", change)
    assert 1 == notebooks.main(["--check"], copy)
    out = capsys.readouterr().out
    assert "04_knapsack.ipynb" in out
    assert re.search(message, out), out
    assert "uv run tools/notebooks.py --only 04" in out or "make its figures smaller" in out


def test_a_script_that_changed_and_a_notebook_that_is_missing(copy, capsys):
    """An edit of a script is noticed, in its text too."""
    script = copy / "02_naive_pad_dataloader.py"
    script.write_text(script.read_text().replace("it is wasteful", "it is very wasteful"))
    (copy / "notebooks" / "03_constrained_pad.ipynb").unlink()
    short = copy / "notebooks" / "04_knapsack.ipynb"
    made = nbformat.read(short, as_version=4)
    made.cells.pop()
    nbformat.write(made, short)
    assert 1 == notebooks.main(["--check"], copy)
    first, second, third = capsys.readouterr().out.splitlines()
    assert "02_naive_pad_dataloader.ipynb, cell 0" in first
    assert "03_constrained_pad.ipynb is missing: run `uv run tools/notebooks.py --only 03`" in second
    assert re.search(r"04_knapsack.ipynb: \d+ cells, and the script has \d+", third)


def _figures(made) -> int:
    return sum("image/png" in output.get("data", {}) for cell in made.cells for output in cell.get("outputs", ()))


def _text(made) -> str:
    outputs = [output for cell in made.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_prepare_runs_top_to_bottom(monkeypatch):
    """About ten short cells; each runs, and the sizes are drawn."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = notebooks.run("00", ROOT)
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    assert 4 <= len(code) <= 10
    assert max(cell.source.count("\n") + 1 for cell in code) <= 15
    assert "500 samples can be used, left out: none" in _text(made)
    assert 2 == _figures(made)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("stage", "figures", "said"), [("01", 3, "[01 dataset] 500 samples"), ("04", 4, "2 rows")])
def test_stages_run_as_notebooks(monkeypatch, stage, figures, said):
    """From a kernel, without flags: the line, and every figure once."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = notebooks.run(stage, ROOT)
    assert figures == _figures(made)
    assert said in _text(made)
    assert "\x1b" not in _text(made)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cell_that_fails_is_named(copy):
    """Notebook, cell and error; and the kernel has ended."""
    script = copy / "01_check_dataset.py"
    script.write_text(script.read_text().replace("import numpy as np\n", "import numpy as np\n\n1 / 0\n"))
    with pytest.raises(SystemExit, match=r"(?s)01_check_dataset.ipynb, cell 1 .*ZeroDivisionError"):
        notebooks.run("01", copy)
