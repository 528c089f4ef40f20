"""Is it right? Packed samples against the same samples alone, for every family and attention, and how a leak looks.

    uv run benchmarks/isolation.py [--report FILE.json] [--markdown FILE.md]

Every number is the largest difference of any logit of any sample, in standard deviations of that sample's logits. The
columns of attentions are what `mmdp.adapt` gives; the last two are the worst and the least of the known ways to get it
wrong (`mmdp.leaks`): a check that could not tell them from rounding would be worth nothing.

Tiny models with random weights, the real classes of transformers, on the CPU: the numbers are about inputs and masks,
which size does not change. sdpa and flash run in float64, eager in float32, as its softmax does. Flash kernels are
stood in for by plain torch behind the dispatch of transformers; `benchmarks/gpu_check.py` is for the real ones. Each
number is over three forms of a batch: one row, one row with a tail, two rows, with samples of 0, 1 and 2 images. A leak
counts where it shows: with flash some need several rows or a tail.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

import mmdp
from mmdp.families import ATTENTIONS, resolve
from mmdp.leaks import LEAKS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # the tiny models, their batches, and the stand-in for flash kernels

import tiny_models  # noqa: E402
from flash_stand_in import flash_kernels  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "isolation.json"
FORMS = (([[0, 1, 2]], 0), ([[0, 1, 2]], 9), ([[0, 1, 2], [3, 4]], 0))
KINDS = ("sdpa", "eager", "flash")  # flex compiles for minutes on a CPU


@dataclass(frozen=True, slots=True)
class Line:
    """One family with one attention; errors in standard deviations of the logits.

    Attributes:
        family: its model type.
        attention: of its language model.
        error: of the right inputs, the largest.
        limit: what passes.
        passed: whether each sample did.
        leaks: the largest error of each known leak.
    """

    family: str
    attention: str
    error: float
    limit: float
    passed: bool
    leaks: dict[str, float]


def measure(family: str, attention: str) -> Line:
    model = tiny_models.make_model(family, attention, torch.float32 if attention == "eager" else torch.float64)
    target = resolve(model)
    batches = [tiny_models.packed(family, rows, tail=tail) for rows, tail in FORMS]
    reports = [mmdp.check_isolation(model, batch) for batch in batches]
    leaks = {}
    for name, leak in LEAKS.items():
        if leak.applies(target):

            def spoilt(batch: mmdp.records.Batch, leak=leak) -> dict:
                return leak.spoil(mmdp.adapt(batch, model, flatten=False), batch, target)

            leaks[name] = worst([mmdp.check_isolation(model, batch, layout=spoilt).error for batch in batches])
    passed = all(report.passed for report in reports)
    return Line(family, attention, worst([one.error for one in reports]), reports[0].limit, passed, leaks)


def worst(errors: list[float]) -> float:
    """The largest; a NaN is larger than all, which `max` would lose."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def cells(lines: list[Line], family: str) -> list[str]:
    by_kind = {line.attention: line for line in lines if line.family == family}
    right = [shown(by_kind[kind].error) if kind in by_kind else "refused" for kind in KINDS]
    leaks = [(error, name) for line in by_kind.values() for name, error in line.leaks.items()]
    return [family, *right, *(f"{error:.1f} ({name})" for error, name in (max(leaks), min(leaks)))]


def shown(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}"


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="the table alone, for a README")
    given = parser.parse_args()
    torch.set_num_threads(1)  # on busy cores threads wait for each other, and these models are tiny
    families = [*ATTENTIONS, "llama"]
    with flash_kernels():
        lines = [
            measure(family, kind) for family in families for kind in KINDS if kind in ATTENTIONS.get(family, KINDS)
        ]
    headings = ["family", *KINDS, "worst leak", "least leak"]
    rows = [cells(lines, family) for family in families]
    table = Table(box=box.SIMPLE)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print("largest difference packed / alone, in standard deviations of the logits")
    console.print(table)
    found = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "flash": "plain torch behind the dispatch of transformers",
        "lines": [asdict(line) for line in lines],
    }
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if given.markdown is not None:
        given.markdown.write_text(markdown(headings, rows), encoding="utf-8")
    failed = [line for line in lines if not line.passed]
    console.print(f"{len(lines) - len(failed)} of {len(lines)} pairs keep samples apart; saved in {given.report.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
