"""Writes the notebooks of the stages: cells from the scripts, outputs from a run.

    uv run tools/notebooks.py                 # run all, 00 too, and write them
    uv run tools/notebooks.py --only 04 05    # these
    uv run tools/notebooks.py --check         # compare with the scripts, run nothing
    uv run tools/notebooks.py --dry-run       # run all, write nothing

A stage script is the only source of its notebook: edit the script, then run this. `00_prepare.ipynb` is written by
hand, and only its outputs are made here. A notebook is run in an empty folder, so that it shows what a newcomer gets.
What is in it afterwards are figures and text, without times of execution, colour codes or folders of this machine.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
BY_HAND = "00_prepare.ipynb"
MAX_BYTES = 10**6  # of a notebook: what a reviewer's browser still renders at once
CELL_SECONDS = 600  # that one cell may take; stage 06 starts Ray
AGAIN = "uv run tools/notebooks.py --only {stage}"

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def stages(root: Path) -> list[str]:
    """Numbers of the stages, in order: "00" to "06"."""
    return [BY_HAND[:2], *(script.name[:2] for script in sorted(root.glob("0[1-9]_*.py")))]


def notebook_of(stage: str, root: Path) -> Path:
    """Where the notebook of a stage lies."""
    return root / BY_HAND if stage == BY_HAND[:2] else root / "notebooks" / f"{_script(stage, root).stem}.ipynb"


def cells_of(stage: str, root: Path) -> NotebookNode:
    """The notebook of a stage as its source has it: every cell, no outputs."""
    if stage == BY_HAND[:2]:
        made = nbformat.read(root / BY_HAND, as_version=4)
        for cell in made.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
    else:
        made = jupytext.read(_script(stage, root), fmt="py:percent")
    made.metadata = nbformat.from_dict({"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    made.nbformat, made.nbformat_minor = 4, 5
    for number, cell in enumerate(made.cells):
        cell.id = f"{stage}-{number:02d}"  # the same at each run, so that a change shows as what it is
        cell.metadata = nbformat.from_dict({})
    return made


def run(stage: str, root: Path) -> NotebookNode:
    """The notebook of a stage with the outputs of a run from top to bottom.

    Raises:
        SystemExit: a cell failed or took too long; names notebook, cell and remedy.
    """
    made, name = cells_of(stage, root), notebook_of(stage, root).name
    with tempfile.TemporaryDirectory(prefix="mmdp-notebook-") as folder:
        client = NotebookClient(
            made,
            extra_arguments=["--log-level=40"],  # not that its port, on this machine only, is not encrypted
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute()
        except CellExecutionError as error:
            raise SystemExit(f"{name}, {_at(made)}: {_COLOURS.sub('', str(error))}") from None
        except (CellTimeoutError, DeadKernelError) as error:
            text = str(error).splitlines()[0]
            raise SystemExit(f"{name}, {_at(made)}: {text}. Does the script itself run?") from None
        _clean(made, folder)
    return made


def _at(made: NotebookNode) -> str:
    """The cell that was run last."""
    code = [(number, cell) for number, cell in enumerate(made.cells) if cell.cell_type == "code"]
    number, cell = next(((n, c) for n, c in reversed(code) if c.execution_count or c.outputs), code[0])
    return f"cell {number} ({cell.source.strip().splitlines()[0]!r})"


def _clean(made: NotebookNode, folder: str) -> None:
    """Takes out what belongs to this run and this machine only."""
    made.metadata = nbformat.from_dict({"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    for cell in made.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type != "code":
            continue
        kept = []
        for output in cell.outputs:
            if output.get("name") == "stderr":
                continue  # progress, and notes on where things are kept: for the person who waits
            if "text" in output:
                output.text = _COLOURS.sub("", output.text).replace(f"{folder}/", "")
                if not output.text.strip():
                    continue
            if "data" in output:
                output.metadata = nbformat.from_dict({})
                if "application/vnd.jupyter.widget-view+json" in output.data:
                    continue  # a progress bar
                for kind, text in output.data.items():
                    if kind.startswith("text/"):
                        output.data[kind] = _COLOURS.sub("", text)
            kept.append(output)
        cell.outputs = kept


def faults(stage: str, root: Path) -> Iterable[str]:
    """What is wrong with the notebook of a stage, and the command that mends it."""
    path, mend = notebook_of(stage, root), f"run `{AGAIN.format(stage=stage)}`"
    name = path.relative_to(root)
    if not path.exists():
        yield f"{name} is missing: {mend}"
        return
    found, wanted = nbformat.read(path, as_version=4), cells_of(stage, root)
    for number, (one, other) in enumerate(zip(found.cells, wanted.cells, strict=False)):
        if (one.cell_type, one.source) != (other.cell_type, other.source):
            first = next(iter(other.source.strip().splitlines()), "")
            yield f"{name}, cell {number}: not what the script has, {first!r}: {mend}"
            return
    if len(found.cells) != len(wanted.cells):
        yield f"{name}: {len(found.cells)} cells, and the script has {len(wanted.cells)}: {mend}"
        return
    if path.stat().st_size > MAX_BYTES:
        yield f"{name}: {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}: make its figures smaller"
    code = [(number, cell) for number, cell in enumerate(found.cells) if cell.cell_type == "code"]
    counts = [cell.execution_count for _, cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"{name}: its cells were not run once from top to bottom: {mend}"
    for number, cell in code:
        images = sum("image/png" in output.get("data", {}) for output in cell.outputs)
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"{name}, cell {number}: an error is among its outputs: mend the script, then {mend}"
        elif re.search(r"^show\(", cell.source, re.MULTILINE) and not images:
            yield f"{name}, cell {number}: no figure is among its outputs: {mend}"
    if str(Path.home()) in path.read_text() or str(root) in path.read_text():
        yield f"{name}: names a folder of the machine that it was run on: {mend}"


def _script(stage: str, root: Path) -> Path:
    return next(root.glob(f"{stage}_*.py"))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The command. Returns 1 where a check finds a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=stages(root), default=stages(root), metavar="NN")
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--dry-run", action="store_true", help="run, and write nothing")
    given = parser.parse_args(arguments)
    if given.check:
        wrong = [fault for stage in given.only for fault in faults(stage, root)]
        print("\n".join(wrong) or f"{len(given.only)} notebooks are in step with their scripts")
        return bool(wrong)
    for stage in given.only:
        path, start = notebook_of(stage, root), time.monotonic()
        print(f"{path.relative_to(root)} ...", end=" ", flush=True)
        made = run(stage, root)
        if not given.dry_run:
            path.parent.mkdir(exist_ok=True)
            nbformat.write(made, path)
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a kernel ends as well
    sys.exit(main())
