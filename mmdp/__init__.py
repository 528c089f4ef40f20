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
    from mmdp.adapters import adapt
    from mmdp.batching import RowBuilder, Rows, batch, join
    from mmdp.config import Config
    from mmdp.device import feed
    from mmdp.encode import Encoder
    from mmdp.isolation import check_isolation
    from mmdp.loader import Loader
    from mmdp.measuring import measure
    from mmdp.mixture import mix
    from mmdp.objective import loss
    from mmdp.packed_dataset import PackedDataset
    from mmdp.planner import plan
    from mmdp.records import Batch, Budget
    from mmdp.refusals import DataError
    from mmdp.sources import open_source
    from mmdp.stream_loader import StreamLoader
    from mmdp.trainer import packed_trainer
    from mmdp.wait_meter import WaitMeter

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Budget",
    "Config",
    "DataError",
    "Encoder",
    "Loader",
    "PackedDataset",
    "RowBuilder",
    "Rows",
    "StreamLoader",
    "WaitMeter",
    "adapt",
    "batch",
    "check_isolation",
    "feed",
    "join",
    "knapsack",
    "loss",
    "measure",
    "mix",
    "open_source",
    "packed_trainer",
    "plan",
]

_HOME = {
    "Batch": "records",
    "Budget": "records",
    "Config": "config",
    "DataError": "refusals",
    "Encoder": "encode",
    "Loader": "loader",
    "PackedDataset": "packed_dataset",
    "RowBuilder": "batching",
    "Rows": "batching",
    "StreamLoader": "stream_loader",
    "WaitMeter": "wait_meter",
    "adapt": "adapters",
    "batch": "batching",
    "check_isolation": "isolation",
    "feed": "device",
    "join": "batching",
    "loss": "objective",
    "measure": "measuring",
    "mix": "mixture",
    "open_source": "sources",
    "packed_trainer": "trainer",
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
