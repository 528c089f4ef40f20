"""Simulated time: processes that wait for events, places that they take, processors and links that they share.

Adds: `Simulation`, a clock that jumps from event to event; `Event` and `Process`; `Places`, in turn; `Processors` and
`Link`, in equal shares.
Leaves out: what a pipeline is made of (`pipeline_model`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Hashable
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


class Shared:
    """Something that all who use it get an equal share of.

    Args:
        simulation: whose time it is.
        rate: what it does a second, for all together; may be infinite.
        most: what it does a second for one of them, at most.
    """

    def __init__(self, simulation: Simulation, rate: float, most: float) -> None:
        self._simulation = simulation
        self._rate = rate
        self._most = most
        self._each = 0.0  # what somebody would have got who had been here from the start
        self._ends: list[tuple[float, int, Event]] = []  # each is through when `_each` gets there
        self._order = count()
        self._since = 0.0
        self._version = 0
        self._done = 0.0

    def use(self, amount: float) -> Event:
        """Happens when so much is done."""
        event = Event()
        if not amount or self._rate == math.inf:
            self._done += amount
            event.happened = True
            return event
        self._advance()
        heapq.heappush(self._ends, (self._each + amount, next(self._order), event))
        self._plan()
        return event

    def used(self) -> float:
        """What was done so far."""
        self._advance()
        return self._done

    def _share(self) -> float:
        return min(self._most, self._rate / len(self._ends))

    def _advance(self) -> None:
        if self._ends:
            done = (self._simulation.now - self._since) * self._share()
            self._each += done
            self._done += done * len(self._ends)
        self._since = self._simulation.now

    def _plan(self) -> None:
        self._version += 1
        if self._ends:
            version = self._version
            soonest = max(0.0, self._ends[0][0] - self._each) / self._share()
            self._simulation.at(self._simulation.now + soonest, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:  # somebody came since it was planned
            return
        self._advance()
        self._each = max(self._each, self._ends[0][0])  # rounding must not leave it a hair before
        through: list[Event] = []
        while self._ends and self._ends[0][0] <= self._each:
            through.append(heapq.heappop(self._ends)[2])
        self._plan()
        for event in through:
            self._simulation.fire(event)


class Processors(Shared):
    """So many, for threads that compute: each gets one at most. Amounts are processor seconds."""

    def __init__(self, simulation: Simulation, number: float) -> None:
        super().__init__(simulation, number, 1.0)
        self._turns: dict[Hashable, Places] = {}

    def work(self, seconds: float, thread: Hashable = None) -> Event:
        """Happens when so many processor seconds are done.

        Args:
            seconds: that it takes.
            thread: that does it, in its turn; None for one of its own.
        """
        if thread is None:
            return self.use(seconds)
        done = Event()
        self._simulation.go(self._in_turn(seconds, thread, done))
        return done

    def _in_turn(self, seconds: float, thread: Hashable, done: Event) -> Process:
        turns = self._turns.setdefault(thread, Places(self._simulation, 1))
        place = yield from turns.enter()
        yield self.use(seconds)
        turns.leave(place)
        self._simulation.fire(done)


class Link(Shared):
    """One direction of a network card, for streams. Amounts are bytes, and `rate` is bytes a second."""

    def __init__(self, simulation: Simulation, rate: float) -> None:
        super().__init__(simulation, rate, rate)
