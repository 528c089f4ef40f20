"""Simulated time: processes that wait for events, places that they take, processors and links that they share.

Adds: `Simulation`, a clock that jumps from event to event; `Event` and `Process`; `Places`, `Processors`, `Link`.
Leaves out: what a pipeline is made of (`pipeline_model`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from itertools import count


class Event:
    """Something that processes wait for."""

    def __init__(self) -> None:
        self.happened = False
        self.waiting: list[Process] = []


Process = Generator[Event, None, None]


class Simulation:
    """Simulated time. A process is a generator of the events that it waits for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Does something at a time."""
        heapq.heappush(self._due, (time, next(self._order), action))

    def fire(self, event: Event) -> None:
        """Wakes all that wait for an event."""
        event.happened = True
        for process in event.waiting:
            self.go(process)
        event.waiting.clear()

    def go(self, process: Process) -> None:
        """Runs a process as far as it comes."""
        for event in process:
            if not event.happened:
                event.waiting.append(process)
                return

    def sleep(self, seconds: float) -> Event:
        """Happens so much later."""
        event = Event()
        self.at(self.now + seconds, lambda: self.fire(event))
        return event

    def run(self, until: Event) -> None:
        """Lets time pass."""
        while not until.happened:
            self.now, _, action = heapq.heappop(self._due)
            action()


class Places:
    """So many at a time; first come, first served."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation = simulation
        self._free = list(range(number))[::-1]
        self._queue: deque[Event] = deque()

    def enter(self) -> Generator[Event, None, int]:
        """Waits for a place; its number."""
        if not self._free:
            turn = Event()
            self._queue.append(turn)
            yield turn
        return self._free.pop()

    def leave(self, place: int) -> None:
        """Gives the place to the next."""
        self._free.append(place)
        if self._queue:
            self._simulation.fire(self._queue.popleft())


class Processors:
    """All that compute get an equal share of them, one at most."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._begun = 0.0
        self._simulation = simulation
        self._number = number
        self._left: dict[Event, float] = {}
        self._since = 0.0
        self._version = 0

    def work(self, seconds: float) -> Event:
        """Happens when so many processor seconds are done."""
        event = Event()
        self._begun += seconds
        self._advance()
        self._left[event] = seconds
        self._plan()
        return event

    def used(self) -> float:
        """Processor seconds that were worked so far."""
        self._advance()
        return self._begun - sum(self._left.values())

    def _share(self) -> float:
        return min(1.0, self._number / max(1, len(self._left)))

    def _advance(self) -> None:
        done = (self._simulation.now - self._since) * self._share()
        self._since = self._simulation.now
        for event in self._left:
            self._left[event] -= done

    def _plan(self) -> None:
        self._version += 1
        if self._left:
            version = self._version
            soonest = max(0.0, min(self._left.values())) / self._share()
            self._simulation.at(self._simulation.now + soonest, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version == self._version:  # nobody came or went since it was planned
            self._advance()
            least = min(self._left.values()) + 1e-12
            for event in [event for event, left in self._left.items() if left <= least]:
                del self._left[event]
                self._simulation.fire(event)
            self._plan()


class Link:
    """One direction of a network card: what is sent passes in the order in which it was begun.

    Args:
        simulation: whose time it is.
        rate: bytes a second; may be infinite.

    Attributes:
        num_bytes: that were sent.
    """

    def __init__(self, simulation: Simulation, rate: float) -> None:
        self.num_bytes = 0.0
        self._simulation = simulation
        self._rate = rate
        self._free = 0.0

    def send(self, num_bytes: float) -> float:
        """Begins to send; the time at which the last byte has passed."""
        self.num_bytes += num_bytes
        self._free = max(self._free, self._simulation.now) + num_bytes / self._rate
        return self._free
