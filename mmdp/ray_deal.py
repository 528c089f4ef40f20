"""What a coordinator is made of, and what it gives to a rank: a few hundred bytes a row, never a tensor.

Adds: `Terms`, `Job`; `Dealt`, one step of one rank, with a `DealtRow` for each of its rows; `Finished`.
Leaves out: who makes and sends them (`ray_dealer`), and who reads them (`ray_reader`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmdp.ray_actor import Placement
from mmdp.ray_job import Built
from mmdp.ray_worker import Block


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks must agree on.

    Attributes:
        plan: its fingerprint.
        batch_size: rows a rank and step, B.
        world_size: ranks, W.
        drop_last: leave the last, incomplete step out.
        length: tokens a row of a batch, L.
        pad_id: fills the tail of a row.
        strict: raise a sample's error instead of counting it.
        max_failures: samples that may fail one after the other.
    """

    plan: str
    batch_size: int
    world_size: int
    drop_last: bool
    length: int
    pad_id: int
    strict: bool
    max_failures: int


@dataclass(frozen=True, slots=True)
class Job:
    """What a coordinator is made of.

    Attributes:
        terms: that ranks agree on.
        plan: pickled.
        build: pickled, makes a row of sample indices.
        path: where the modules of both are found.
        depth: rows a rank may have in flight.
        max_bytes: of pixels likewise.
        by_value: send rows through the coordinator.
        num_workers: actors.
        num_cpus: of each.
        max_concurrency: rows each has at a time.
        placement: of actors.
        maker: who made this; no two are alike.
        node: where it was made.
    """

    terms: Terms
    plan: bytes
    build: bytes
    path: Sequence[str]
    depth: int
    max_bytes: int
    by_value: bool
    num_workers: int
    num_cpus: float
    max_concurrency: int
    placement: Placement
    maker: str
    node: str


@dataclass(frozen=True, slots=True)
class DealtRow:
    """One row, for the rank that reads it.

    Attributes:
        samples: its sample indices.
        parts: the row; or, where it killed its worker, its samples, each as a row of its own.
        killed: the samples that killed theirs.
        blocks: of the parts, where they come by value.
    """

    samples: tuple[int, ...]
    parts: Sequence[Built]
    killed: tuple[int, ...] = ()
    blocks: Sequence[Block] = ()


@dataclass(frozen=True, slots=True)
class Dealt:
    """One step of one rank.

    Attributes:
        number: of the loop's steps, from 0.
        rows: B of them.
        step_label_tokens: of the step over all ranks, as measured.
        state: after it.
        ready: rows that lie ready behind it.
        depth: rows that the rank may have in flight.
        num_workers: actors of all ranks.
        epoch: of the step.
        full: what was full when the rank asked, `rows` or `bytes` in flight; "" where more had room.
    """

    number: int
    rows: Sequence[DealtRow]
    step_label_tokens: int
    state: Mapping[str, Any]
    ready: int
    depth: int
    num_workers: int
    epoch: int
    full: Literal["", "rows", "bytes"]


@dataclass(frozen=True, slots=True)
class Finished:
    """No step of the epoch is left.

    Attributes:
        state: at its end.
        epoch: its number.
        left_out: samples that `drop_last` leaves out.
    """

    state: Mapping[str, Any]
    epoch: int
    left_out: int
