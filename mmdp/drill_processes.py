"""A run whose processes die: what is done to it, and what must come of it.

Adds: `poisons`, `kills_actors`, `kills_a_rank`, `kills_the_coordinator`. Each says how many processes really died, and
raises `Broken` where a promise is not kept.
Leaves out: faults of a store (`drill_store`).
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

from mmdp.drill_range import WORLD, Poisoned, Range, Rank
from mmdp.ray_reader import RankReader
from mmdp.refusals import Reason
from mmdp.seen import Broken, Seen, same, see, without


def poisons(place: Range) -> int:
    """A sample that kills whoever reads it is left out, and costs its neighbours nothing."""
    wanted = place.wanted()
    bad = next(row[-1] for one in wanted[2:] for row in one.rows if len(row) > 1)  # the last: fewer processes start
    with tempfile.TemporaryDirectory(dir=place.folder) as marks:
        source = Poisoned(place.parts[0], bad, Path(marks), os.getpid())
        seen = list(place.batches("ray", source=source))
        num_killed = len(list(Path(marks).iterdir()))
    without(wanted, seen, {bad: Reason.KILLED_WORKER}, "ray")
    return num_killed


def kills_actors(place: Range) -> int:
    """Every worker of a coordinator is killed while two ranks read: the same batches come."""
    coordinator = place.coordinator()
    num_died = coordinator.stats()["deaths"]
    seen: list[list[Seen]] = [[] for _ in range(WORLD)]
    with ExitStack() as opened:
        readers = [opened.enter_context(RankReader(coordinator.name, rank, WORLD)) for rank in range(WORLD)]
        for number, batches in enumerate(zip(*readers, strict=True)):
            for mine, batch in zip(seen, batches, strict=True):
                mine.append(see(batch))
            if number == 0:
                for pid in coordinator.stats()["worker_pids"]:
                    os.kill(pid, signal.SIGKILL)
    for rank, mine in enumerate(seen):
        same(place.wanted(rank, WORLD), mine, f"rank {rank}")
    return int(coordinator.stats()["deaths"] - num_died)


def kills_a_rank(place: Range) -> int:
    """A rank is killed in its midst: the other goes on, and a new process takes its place, from its last state."""
    coordinator = place.coordinator()
    mine: list[Seen] = []
    theirs: list[Seen] = []
    with RankReader(coordinator.name, 0, WORLD) as here:
        with Rank(coordinator.name, coordinator.address, 1, here.state_dict()) as there:
            loop, batches = map(see, here), there.batches()
            for _ in range(3):
                mine.append(next(loop))
                theirs.append(next(batches))
            has_died = there.kill()
        mine.extend(loop)
        with Rank(coordinator.name, coordinator.address, 1, theirs[-1].state) as again:
            theirs.extend(again.batches())
    same(place.wanted(0, WORLD), mine, "rank 0")
    same(place.wanted(1, WORLD), theirs, "rank 1")
    return int(has_died)


def kills_the_coordinator(place: Range) -> int:
    """Every rank hears of it; with a new coordinator, each goes on from its last state."""
    coordinator = place.coordinator()
    seen: list[list[Seen]] = [[] for _ in range(WORLD)]
    with ExitStack() as opened:
        readers = [opened.enter_context(RankReader(coordinator.name, rank, WORLD, ahead=1)) for rank in range(WORLD)]
        loops = [map(see, reader) for reader in readers]
        for mine, loop in zip(seen, loops, strict=True):
            mine.append(next(loop))
        os.kill(coordinator.stats()["pid"], signal.SIGKILL)
        for rank, loop in enumerate(loops):
            try:
                seen[rank].extend(loop)
            except RuntimeError as error:
                if f"{coordinator.name!r} has died" not in str(error) or "last state" not in str(error):
                    raise Broken(f"rank {rank}: the error says not what died, or not what to do: {error}") from None
            else:
                raise Broken(f"rank {rank} did not hear that the coordinator had died")
    again = place.coordinator(anew=True)
    for rank, mine in enumerate(seen):
        with RankReader(again.name, rank, WORLD) as reader:
            reader.load_state_dict(mine[-1].state)
            mine.extend(map(see, reader))
        same(place.wanted(rank, WORLD), mine, f"rank {rank}")
    return 1
