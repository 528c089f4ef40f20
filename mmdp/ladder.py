"""The ladder: six ways to make the same batches, each one idea more than the last, from waiting to almost none.

Adds: `RUNGS`; `Setup`, what all rungs share; `open_rung`, the batches of a rung.
Leaves out: running one and measuring it (`climb`), the object store (`local_store`), all that a rung is made of
(`loader`, `ray_executor`, `ray_coordinator`, `ray_reader`).

| rung | rows are made | and get to the trainer |
|---|---|---|
| serial | when the trainer asks, by itself: fetched one by one, decoded one by one | they are there |
| concurrent | when the trainer asks, all of a step at once: fetched on event loops, decoded in Ray actors | by value |
| prefetch | while the trainer works, as far ahead as rows and bytes allow | by value, through a coordinator |
| references | the same | by reference: the coordinator deals references, the rank reads Ray's shared memory |
| spread | the same, by actors that are spread over the nodes | by reference |
| near | the same, by actors on the nodes of the ranks that read | by reference |

All of them run the same function from sample indices to a row, `RowBuilder`, and give the same batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import torch

from mmdp.batching import RowBuilder, batch
from mmdp.device import feed
from mmdp.records import Batch, Row
from mmdp.spans import is_on, span
from mmdp.steps import Steps, row_length
from mmdp.traced import traced, untraced

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.planner import Plan
    from mmdp.ray_actor import Placement
    from mmdp.ray_coordinator import Coordinator
    from mmdp.sources import Source

_INLINE_BYTES = 100 * 2**10  # below this, Ray sends a result with the answer of a call, and puts no object


@dataclass(frozen=True, slots=True)
class Rung:
    """How batches come about.

    Attributes:
        name: of the rung.
        has_actors: rows are made in Ray actors, side by side; else by the trainer, one by one.
        is_ahead: they are made while the trainer works.
        by_reference: they stay in Ray's shared memory until their rank copies them.
        placement: of the actors, as in `ray_actor`.
    """

    name: str
    has_actors: bool = False
    is_ahead: bool = False
    by_reference: bool = False
    placement: Placement = "together"


_SERIAL = Rung("serial")
_CONCURRENT = replace(_SERIAL, name="concurrent", has_actors=True)
_PREFETCH = replace(_CONCURRENT, name="prefetch", is_ahead=True)
_REFERENCES = replace(_PREFETCH, name="references", by_reference=True)
_SPREAD = replace(_REFERENCES, name="spread", placement="spread")
_NEAR = replace(_REFERENCES, name="near", placement="near")

RUNGS: Mapping[str, Rung] = {rung.name: rung for rung in (_SERIAL, _CONCURRENT, _PREFETCH, _REFERENCES, _SPREAD, _NEAR)}


@dataclass(frozen=True, slots=True)
class Setup:
    """What all rungs share.

    Attributes:
        source: the samples.
        encoder: makes tokens and pixels of them.
        plan: the rows, from complete sizes.
        batch_size: rows a batch, B.
        num_workers: actors; by default one for each processor of this machine, or CPU of the cluster.
        num_cpus: that Ray counts for each.
        depth: rows in flight where they are made ahead; by default three batches.
        device: where batches go.
        strict: raise a sample's error instead of counting it.
        address: of a Ray cluster; by default `RAY_ADDRESS`, or a Ray of our own.
    """

    source: Source
    encoder: Encoder
    plan: Plan
    batch_size: int = 8
    num_workers: int | None = None
    num_cpus: float = 1.0
    depth: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    strict: bool = False
    address: str | None = None

    @property
    def build(self) -> RowBuilder:
        """Sample indices to a row: the same function on every rung."""
        return RowBuilder(self.source, self.encoder, self.plan.sizes, strict=self.strict)


@dataclass(slots=True)
class Passed:
    """Rows that came to the trainer by value, from actors.

    Attributes:
        bytes: of their arrays.
        objects: that were put into Ray's shared memory for it.
    """

    bytes: int = 0
    objects: int = 0

    def add(self, row: Row) -> None:
        """Counts one."""
        arrays = (row.ids, row.labels, row.positions, row.segments, row.image_segments, *row.images)
        num_bytes = sum(array.nbytes for array in arrays)
        self.bytes += num_bytes
        self.objects += num_bytes > _INLINE_BYTES


@dataclass(frozen=True, slots=True)
class Opened:
    """A rung that runs.

    Attributes:
        batches: without end, epoch after epoch.
        passed: what came to the trainer by value, where the trainer itself coordinates.
        coordinator: where there is one.
    """

    batches: Iterable[Batch]
    passed: Passed
    coordinator: Coordinator | None = None


@contextmanager
def open_rung(rung: Rung, setup: Setup) -> Iterator[Opened]:
    """The batches of a rung; with the block, all that makes them ends.

    Raises:
        ValueError: what the rung is made of refuses a number.
    """
    passed = Passed()
    if not rung.has_actors:
        with closing(_on_request(setup, partial(map, replace(setup.build, side_by_side=False)))) as batches:
            yield Opened(batches, passed)
    elif not rung.is_ahead:
        from mmdp.ray_executor import RayExecutor

        workers, build = setup.num_workers, traced(setup.build) if is_on() else setup.build
        with RayExecutor(workers, num_cpus=setup.num_cpus, address=setup.address) as actors:
            # A step is wanted whole, whatever it weighs.
            at_once = partial(actors.run, build, depth=setup.batch_size, weight=lambda _: 0.0)
            making = _on_request(setup, lambda rows: _counted(at_once(rows), passed), actors.num_workers)
            with closing(making) as batches:
                yield Opened(batches, passed)
    else:
        from mmdp.ray_coordinator import Coordinator
        from mmdp.ray_reader import RankReader

        with (
            Coordinator(
                setup.source,
                setup.encoder,
                setup.plan,
                name=f"ladder-{token_hex(4)}",
                batch_size=setup.batch_size,
                num_workers=setup.num_workers,
                num_cpus=setup.num_cpus,
                placement=rung.placement,
                depth=setup.depth,
                by_value=not rung.by_reference,
                strict=setup.strict,
                address=setup.address,
            ) as coordinator,
            RankReader(coordinator.name, address=coordinator.address) as reader,
        ):
            # A reader works ahead by itself; on a GPU the copy to the device goes on meanwhile too.
            fed = reader if setup.device.type == "cpu" else feed(reader, setup.device)
            with closing(epochs(fed)) as batches:
                yield Opened(batches, passed, coordinator)


def epochs(loader: Iterable[Batch]) -> Generator[Batch, None, None]:
    """Loop after loop, without end. Raises a ValueError where a loop brings nothing: that would go on for ever."""
    for number in count():
        is_empty = True
        for made in loader:
            is_empty = False
            yield made
        if is_empty:
            raise ValueError(f"epoch {number} has no batch")


def _on_request(
    setup: Setup, build_rows: Callable[[Sequence[tuple[int, ...]]], Iterable[Row]], num_workers: int = 0
) -> Generator[Batch, None, None]:
    """Batches whose rows are begun when the trainer asks for them, and not a moment before.

    Args:
        setup: which rows.
        build_rows: the rows of a step, from the sample indices of each.
        num_workers: that build them; 0 where the trainer does.
    """
    steps, length = Steps(setup.plan, setup.batch_size), row_length(setup.plan.budget, None)
    for epoch in map(setup.plan.epoch, count()):
        for step in steps.places(epoch):
            samples = [place.samples for place in step]
            with span("gather", depth=len(step), rows=len(step), ahead=0, samples=sum(map(len, samples))) as work:
                if num_workers:
                    work.add(workers=num_workers)
                rows = list(build_rows(samples))
            with span("join"):
                made = batch(rows, pad_id=setup.encoder.pad_id, length=length)
            rows.clear()  # the batch holds copies
            state = steps.state(epoch.number, step[0].after, step[0].digest)
            made = replace(made, step_label_tokens=step[0].step_label_tokens, state=state)
            yield made if setup.device.type == "cpu" else made.to(setup.device)
            del made
        if not len(epoch):
            raise ValueError("the plan has no row: every sample was left out")


def _counted(rows: Generator[Any, None, None], passed: Passed) -> Iterator[Row]:
    for row in untraced(rows):
        passed.add(row)
        yield row


def simulated(milliseconds: float) -> Callable[[Batch], None]:
    """A trainer that is busy for so long and computes nothing: it stands for a GPU, which needs no processor here."""
    if not 0 <= milliseconds < math.inf:
        raise ValueError(f"a step of {milliseconds} ms: give 0 or more")

    def train(_: Batch) -> None:
        time.sleep(milliseconds / 1000)

    return train


def tiny(encoder: Encoder, device: torch.device, seed: int = 0) -> Callable[[Batch], None]:
    """A trainer of a tiny vision-language model of a real family, forward, backward and step."""
    from mmdp.objective import loss
    from mmdp.tiny_model import tiny_vlm

    model: torch.nn.Module = tiny_vlm(encoder, seed=seed)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(batch: Batch) -> None:
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return train
