"""What is asked of worker actors, and what comes back.

Adds: `Run`, a function at work on items; `Job`, one of them on its way; `Built`, what became of it.
Leaves out: who works on it (`ray_pool`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmdp.ray_actor import Function, Ref
from mmdp.ray_worker import Block, Meta


class Built(NamedTuple):
    """What became of an item.

    Attributes:
        meta: the few bytes about it.
        block: reference to its result; to None where `meta` has a failure.
        node: where it was made.
    """

    meta: Meta
    block: Ref
    node: str = ""


@dataclass(slots=True, eq=False)
class Run:
    """A function at work on some items, until it is ended.

    Attributes:
        number: of the pool's runs.
        function: what runs.
        is_ended: no result is wanted any more.
    """

    number: int
    function: Function
    is_ended: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """An item on its way.

    Attributes:
        run: what it belongs to.
        item: as the caller gave it.
        block: as it travels.
        node: where its result is wanted; "" for anywhere.
        timeout: seconds an actor may have it.
        outcome: what becomes of it.
        is_suspect: an actor died while it had it, so it is tried alone.
    """

    run: Run
    item: Any
    block: Block
    node: str
    timeout: float | None
    outcome: asyncio.Future[Built]
    is_suspect: bool

    def refuse(self, error: BaseException) -> None:
        """An error is what becomes of it, unless it is done already."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
