"""A run over a store that fails: what is done to it, and what must come of it.

Adds: `measured`, `passes`, `loses`, `stops`. Each puts a fault into a store, runs a loader over it, with threads and
with Ray actors, says how often the fault struck, and raises `Broken` where a promise is not kept.
Leaves out: which faults (`drill`), the store (`faulty_store`), and processes that die (`drill_processes`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mmdp.drill_range import Range
from mmdp.faulty_store import Fault
from mmdp.refusals import Reason
from mmdp.remote import FetchError
from mmdp.seen import Broken, Seen, same, without

WHERE = ("threads", "ray")
"""Executors that each fault of a store is tried on."""


def measured(fault: Fault, place: Range) -> int:
    """Sizes are measured with nothing known before, the rows fetched anew too: they are the same."""
    mine, plan = place.parts
    with tempfile.TemporaryDirectory(dir=place.folder) as cache:
        place.store.play(fault)
        source, sizes = place.measured(Path(cache))
        struck = place.store.heal()
        if source.fingerprint != mine.fingerprint or sizes.skipped:
            raise Broken(f"other rows were read, or samples were left out: {sizes.counts()}")
        for name in ("tokens", "images", "vision", "label_tokens"):
            if not np.array_equal(getattr(plan.sizes, name), getattr(sizes, name)):
                raise Broken(f"other {name} were measured")
    return sum(struck.values())


def passes(fault: Fault, place: Range) -> int:
    """The batches of an undisturbed run come all the same."""
    wanted, total = place.wanted(), 0
    for where in WHERE:
        place.store.play(fault)
        seen = list(place.batches(where))
        total += _must_strike(place.store.heal(), where)
        same(wanted, seen, where)
    return total


def loses(fault: Fault, place: Range) -> int:
    """Samples whose image is not there any more leave their rows, and nothing else changes."""
    source, _ = place.parts
    wanted, total = place.wanted(), 0
    lost = {
        index: Reason.MISSING_IMAGE
        for one in wanted
        for index in one.samples
        if any(fault.reaches(image.name) for image in source[index].images)
    }
    for where in WHERE:
        place.store.play(fault)
        seen = list(place.batches(where))
        total += _must_strike(place.store.heal(), where)
        without(wanted, seen, lost, where)
    return total


def stops(fault: Fault, place: Range) -> int:
    """The run ends with an error that names key and answer; once all is well, it goes on from its state."""
    wanted, total = place.wanted(), 0
    for where in WHERE:
        place.store.play(fault)
        seen: list[Seen] = []
        try:
            seen.extend(place.batches(where))
        except FetchError as error:
            struck = place.store.heal()
            total += _must_strike(struck, where)
            if f"{fault.status} {fault.code}" not in str(error) or not any(key in str(error) for key in struck):
                raise Broken(f"{where}: the error names no key, or not what was answered: {error}") from None
        else:
            raise Broken(f"{where}: no error came")
        seen.extend(place.batches(where, state=seen[-1].state if seen else None))
        same(wanted, seen, where)
    return total


def _must_strike(struck: Mapping[str, int], where: str) -> int:
    if not struck:
        raise Broken(f"{where}: the fault did not strike, so nothing was shown")
    return sum(struck.values())
