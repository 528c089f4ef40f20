"""What nobody can run here, predicted for `simulate.py`: a cluster of hosts, and 64 ranks.

Adds: `cluster`, the table of `cluster.py`, whose order of cells has been measured; `scale`, an answer and its figure.
Leaves out: calibrating, and comparing with runs of this machine (`simulate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mmdp.pipeline_model import CallCost, FetchCost, Numbers, Outcome, RowCost, Settings
from mmdp.pipeline_run import simulate
from mmdp.plots.scale import wait_map
from mmdp.plots.style import save
from mmdp.simulate import CHECKED, candidates, recommend, sentence, try_out

LARGE = Settings(ranks=64, nodes=16, processors=16, link=25e9 / 8, latency=0.04, steps=12, epoch_rows=0)


def numbers_of(saved: Mapping[str, Any]) -> Numbers:
    """The numbers, as a report has them."""
    nested = {
        "rows": tuple(RowCost(*row) for row in saved["rows"]),
        "fetch": FetchCost(**saved["fetch"]),
        "call": CallCost(**saved["call"]),
    }
    return Numbers(**{**saved, **nested})


def cluster_cells(numbers: Numbers) -> dict[str, Outcome]:
    """The cells of `cluster.py`: rows of four JPEGs of 11 KB, 150 KB each once they are decoded; cards of 50 Mbit/s."""
    mean = sum(row.compute for row in numbers.rows) / max(1, sum(row.images for row in numbers.rows))
    block = replace(
        numbers,
        rows=(RowCost(4, 4 * mean, 4.0),),
        step_rows=4,
        train=0.8,
        fetch=replace(numbers.fetch, latency=0.001, num_bytes=11e3),
        row_bytes=4 * 3 * 224 * 224,
        epoch_rows=0,
        start=0.0,
        background=0.0,
    )
    small = Settings(
        nodes=5,
        rank_nodes=1,
        rank_nodes_build=False,
        workers=8,
        depth=4,
        processors=16,
        link=50e6 / 8,
        rank_link=200e6 / 8,
        ahead=1,
        steps=30,
    )
    large = replace(small, nodes=6, rank_nodes=2, ranks=4, depth=12)
    return {
        f"{scale}, {placement} by {'value' if by_value else 'reference'}": simulate(
            block, replace(settings, placement=placement, by_value=by_value)
        )
        for scale, settings in (("small", small), ("large", large))
        for placement, by_value in (
            *(("together", True), ("together", False)),
            *(("spread", True), ("spread", False), ("near", False)),
        )
    }


def cluster(numbers: Numbers) -> dict[str, dict[str, float]]:
    """Prints the table, and gives it."""
    table = Table(title="the cluster of hosts, predicted", box=None)
    for column in ("cell", "waits", "samples/s"):
        table.add_column(column, justify="left" if column == "cell" else "right")
    found = {}
    for name, one in cluster_cells(numbers).items():
        found[name] = {"wait_ratio": one.wait_ratio, "samples_per_second": one.samples_per_second}
        table.add_row(name, f"{one.wait_ratio:.2f}", f"{one.samples_per_second:.1f}")
    Console(width=120).print(table)
    return found


def scale(numbers: Numbers, figure: Path, *, quick: bool) -> dict[str, Any]:
    """64 ranks: the answer, and the wait ratio over ranks and actors."""
    tried = try_out(numbers, candidates(numbers, LARGE))
    chosen = recommend(tried)
    answer = sentence(chosen)
    print(f"{answer}\n{CHECKED}")
    ranks = [8, 64] if quick else [8, 16, 32, 64, 128]
    most = 4 * (chosen.settings.workers or 1)
    workers = [most // 2**power for power in range(6)][::-1]
    ratios = [[_waits(numbers, chosen.settings, one, many) for many in workers] for one in ranks]
    drawn = wait_map(ratios, ranks, workers, chosen=(LARGE.ranks, chosen.settings.workers or 0), answer=answer)
    save(drawn, figure)
    return {
        "answer": answer,
        "checked": False,
        "tried": [
            {
                **{key: getattr(one.settings, key) for key in ("placement", "workers", "depth", "coordinators")},
                **{key: getattr(one.outcome, key) for key in ("wait_ratio", "samples_per_second")},
                "busy": one.outcome.busy._asdict(),
            }
            for one in tried
        ],
        "map": {"ranks": ranks, "workers": workers, "wait_ratio": ratios},
    }


def _waits(numbers: Numbers, chosen: Settings, ranks: int, workers: int) -> float:
    """With nodes and coordinators in proportion."""
    coordinators = min(workers, max(1, chosen.coordinators * ranks // LARGE.ranks))
    nodes = max(1, LARGE.nodes * ranks // LARGE.ranks)
    fit = replace(chosen, ranks=ranks, nodes=nodes, coordinators=coordinators, workers=workers)
    return simulate(numbers, fit).wait_ratio
