"""Spans of worker processes, sent along with the results.

Adds: `traced`, a function that returns its result and the spans of its process; `untraced`, which takes the spans off
again. Between the two lies any executor: threads record where everybody sees it, and send nothing.
Leaves out: recording (`spans`), running (`executors`). Workers of torch's DataLoader hand over batches, not results of
a function: their spans stay with them.

    results = untraced(executor.run(traced(build), items, depth=16))

Same results, same order, same errors. A span in a worker that dies is lost; one of an item that failed comes with the
next result of its worker.
"""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from mmdp import spans
from mmdp.span_table import Spans

_CAPACITY = 2**14
"""Spans that a worker keeps for its next result; a row makes some tens."""

_process = (0, "")


def _this_process() -> str:
    """A name that no other process has, a fork of this one included."""
    global _process
    if _process[0] != os.getpid():
        _process = (os.getpid(), secrets.token_hex(8))
    return _process[1]


@dataclass(frozen=True, slots=True)
class Carried:
    """A result, and the spans that came along.

    Attributes:
        value: the result.
        spans: of the process that made it, since its last result.
    """

    value: Any
    spans: Spans


def traced(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, which sends spans along from whatever other process it runs in.

    Args:
        function: picklable, if it is to run elsewhere. One with the two phases `fetch`, on an event loop, and
            `assemble` keeps them.
    """
    phased = inspect.iscoroutinefunction(getattr(function, "fetch", None))
    return (_TracedPhases if phased else _Traced)(function, _this_process(), spans.own_clock())


def untraced(results: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """The results alone; their spans go to this process's recording. Closing it closes `results`."""
    try:
        yield from map(_opened, results)  # a map holds no result while the consumer works on it
    finally:
        results.close()


def _opened(result: Any) -> Any:
    if not isinstance(result, Carried):
        return result
    spans.receive(result.spans)
    return result.value


@dataclass(frozen=True)
class _Traced:
    """A function at home in one process; elsewhere its results are `Carried`."""

    function: Any
    home: str
    clock: spans.Clock

    def __call__(self, item: Any) -> Any:
        return self._carry(self.function, item)

    def _is_away(self) -> bool:
        if _this_process() == self.home:
            return False
        if not spans.is_on():
            spans.start(_CAPACITY, self.clock)
        return True

    def _carry(self, function: Callable[[Any], Any], item: Any) -> Any:
        is_away = self._is_away()
        value = function(item)
        return Carried(value, spans.take()) if is_away else value


class _TracedPhases(_Traced):
    async def fetch(self, item: Any) -> Any:
        self._is_away()
        return await self.function.fetch(item)

    def assemble(self, fetched: Any) -> Any:
        return self._carry(self.function.assemble, fetched)
