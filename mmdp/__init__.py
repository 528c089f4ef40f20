"""mmdp: why is my GPU waiting, and how do I feed it?

 source ──> measure ──> plan ──> build ──> collate ──> feed
 samples    sizes       rows     tensors    batch       device
            and ids,    (lists   of one     (B rows)    (pinned,
            no pixels   of       packed                 one step
                        sample   row                    ahead)
                        indices)

Plan first, pixels last: a sample's size is known from its text and its image headers, so packing is integer work, and
pixels are decoded only when a row is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdp.batching import RowBuilder, Rows, batch, join
    from mmdp.encode import Encoder
    from mmdp.loader import Loader
    from mmdp.packed_dataset import PackedDataset
    from mmdp.planner import plan
    from mmdp.records import Budget, DataError
    from mmdp.sizes import measure
    from mmdp.sources import open_source

__version__ = "0.1.0.dev0"
__all__ = [
    "Budget",
    "DataError",
    "Encoder",
    "Loader",
    "PackedDataset",
    "RowBuilder",
    "Rows",
    "batch",
    "join",
    "knapsack",
    "measure",
    "open_source",
    "plan",
]

_HOME = {
    "Budget": "records",
    "DataError": "records",
    "Encoder": "encode",
    "Loader": "loader",
    "PackedDataset": "packed_dataset",
    "RowBuilder": "batching",
    "Rows": "batching",
    "batch": "batching",
    "join": "batching",
    "measure": "sizes",
    "open_source": "sources",
    "plan": "planner",
}
"""The module of each public name. It is imported when the name is first used, since torch takes seconds to load."""


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"mmdp.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name == "knapsack":
        return import_module("mmdp.knapsack")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
