"""What actors warn of, on the screen of whoever started them: nobody reads the logs of a worker.

Adds: `Heard`, what this process has warned of since it was last asked; `repeat`, which warns of the same here.
Leaves out: who asks: a staff its workers (`ray_staff`), the maker of a coordinator that one (`ray_coordinator`).
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

_MOST = 64  # that are kept until somebody asks; of more, the last ones
_BY = "told by an actor of Ray: "


class Warned(NamedTuple):
    """A warning that crosses the border.

    Attributes:
        category: name of its class.
        text: what it says.
    """

    category: str
    text: str


class Heard:
    """The warnings of this process, for whoever asks. They go into its log as well, and pass its filters first."""

    def __init__(self) -> None:
        self._warned: deque[Warned] = deque(maxlen=_MOST)
        self._has_come = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            show(message, category, *where, **more)
            self._warned.append(Warned(category.__name__, str(message)))
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._has_come.set)

        warnings.showwarning = note

    async def next(self) -> list[Warned]:
        """What was warned of since the last call; waits until there is something."""
        self._loop = asyncio.get_running_loop()
        while not self._warned:
            self._has_come.clear()
            if not self._warned:  # none came in between
                await self._has_come.wait()
        found = []
        while self._warned:
            found.append(self._warned.popleft())
        return found


def repeat(warned: Iterable[Warned]) -> None:
    """Warns of the same in this process; one of a class that is not Python's own as a `UserWarning`."""
    for category, text in warned:
        own = getattr(builtins, category, UserWarning)
        said = text if text.startswith(_BY) else _BY + text
        with contextlib.suppress(own):  # as an error it would end nothing but the listening
            warnings.warn(said, own, stacklevel=2)
