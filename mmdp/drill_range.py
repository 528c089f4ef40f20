"""Where faults are drilled: real data in a store that fails by script, loaders over it, ranks that can be killed.

Adds: `Range`, all that a drill needs, each part made when it is first wanted; `Poisoned`, a source that kills; `Rank`,
a rank in another process.
Leaves out: the faults, and what must hold under each (`drill`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from mmdp.config import Config
from mmdp.encode import Encoder
from mmdp.faulty_store import FaultyStore
from mmdp.loader import Loader
from mmdp.measuring import measure
from mmdp.planner import Plan, plan
from mmdp.records import Budget, Sample
from mmdp.refusals import shorten
from mmdp.seen import Broken, Seen, see
from mmdp.sizes import Sizes
from mmdp.sources import Source, open_source

if TYPE_CHECKING:
    from mmdp.ray_coordinator import Coordinator
    from mmdp.ray_executor import RayExecutor
    from mmdp.ray_start import Session

WORLD = 2
"""Ranks, where there are several."""

_BATCH_SIZE = 2
_NUM_WORKERS = 2
_NUM_THREADS = 8  # a thread waits for an image at a time, so that a few of them wait for most of the faults together
_NUM_CPUS = 0.1  # that Ray counts for a worker: they work one after the other, and all must find room
_MAX_BYTES = 32 * 2**20  # of pixels in flight
_STORE_BYTES = 256 * 2**20
_ANSWER_SECONDS = 60.0  # for a rank in another process to start, or to give a batch

# So that what a store owes is missed soon, and every kind of fault is met within a second or two.
_READ_SECONDS, _FETCH_SECONDS, _FETCH_RETRIES = 1.5, 20.0, 5


@dataclass(frozen=True, slots=True)
class Poisoned:
    """Another source, of which one sample kills the process that reads it, unless it is the one that made this.

    Attributes:
        source: read through.
        bad: the sample.
        marks: a folder, where each kill leaves a file.
        home: the process that is spared.
    """

    source: Source
    bad: int
    marks: Path
    home: int

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.source.name

    @property
    def fingerprint(self) -> str:
        """That of the source: its rows are the same."""
        return self.source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        if index == self.bad and os.getpid() != self.home:
            (self.marks / uuid4().hex).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source[index]


class Range:
    """Data, a store, loaders, and what runs on Ray; all of this machine. `close` it, or use `with`.

    Args:
        rows: a JSONL file, its images beside it.
        folder: empty; for all that is kept meanwhile.
        samples: read so many.
        loader: makes the loader that is drilled, as `Loader` is made.
    """

    def __init__(
        self, rows: Path, folder: Path, *, samples: int | None = 160, loader: Callable[..., Loader] = Loader
    ) -> None:
        self.store = FaultyStore(rows.parent)
        self.folder = folder
        self._rows = rows
        self._samples = samples
        self._loader = loader
        self._wanted: dict[tuple[int, int], list[Seen]] = {}
        self._open = ExitStack()
        self._open.enter_context(self.store)
        self._session: Session | None = None
        self._coordinator: Coordinator | None = None

    @cached_property
    def encoder(self) -> Encoder:
        """Makes tokens and pixels of samples."""
        return Encoder("demo", "fixed:64")

    def measured(self, cache: Path) -> tuple[Source, Sizes]:
        """The data set, opened in the store and measured there, with nothing known of it before."""
        knobs = Config(
            cache_dir=cache,
            read_seconds=_READ_SECONDS,
            fetch_seconds=_FETCH_SECONDS,
            fetch_retries=_FETCH_RETRIES,
        )
        with self.store.asked() as uri:
            source = open_source(f"{uri}/{self._rows.name}", config=knobs)
        return source, measure(source, self.encoder, samples=self._samples, cache=cache)

    @cached_property
    def parts(self) -> tuple[Source, Plan]:
        """The data set and the plan, made while nothing disturbs it."""
        source, sizes = self.measured(self.folder / "cache")
        return source, plan(sizes, Budget(1024, 9))

    def wanted(self, rank: int = 0, world_size: int = 1) -> list[Seen]:
        """The batches of an epoch, undisturbed, built here one by one."""
        if (rank, world_size) not in self._wanted:
            source, rows = self.parts
            loader = Loader(
                source,
                self.encoder,
                rows,
                batch_size=_BATCH_SIZE,
                rank=rank,
                world_size=world_size,
                executor="inline",
                strict=True,
            )
            self._wanted[rank, world_size] = [see(batch) for batch in loader]
        return self._wanted[rank, world_size]

    def batches(
        self, where: str, *, state: Mapping[str, Any] | None = None, source: Source | None = None
    ) -> Iterator[Seen]:
        """The batches of an epoch, or what is left of it, from the loader that is drilled.

        Args:
            where: "threads" or "ray".
            state: of the last batch before.
            source: instead of the data set's own.
        """
        mine, rows = self.parts
        loader = self._loader(
            source or mine,
            self.encoder,
            rows,
            batch_size=_BATCH_SIZE,
            executor=self.actors if where == "ray" else where,
            num_workers=_NUM_THREADS,
            max_bytes=_MAX_BYTES,
        )
        if state is not None:
            loader.load_state_dict(state)
        with closing(loader):
            yield from map(see, loader)

    @cached_property
    def actors(self) -> RayExecutor:
        """Worker actors for loaders."""
        from mmdp.ray_executor import RayExecutor

        self.start_ray()
        return self._open.enter_context(RayExecutor(_NUM_WORKERS, num_cpus=_NUM_CPUS, views=True))

    def coordinator(self, *, anew: bool = False) -> Coordinator:
        """A coordinator for two ranks, with workers of its own.

        Args:
            anew: another one than before, which has died.
        """
        from mmdp.ray_coordinator import Coordinator

        if anew or self._coordinator is None:
            self.start_ray()
            source, rows = self.parts
            made = Coordinator(
                source,
                self.encoder,
                rows,
                name=f"drill-{uuid4().hex[:8]}",
                batch_size=_BATCH_SIZE,
                world_size=WORLD,
                num_workers=_NUM_WORKERS,
                num_cpus=_NUM_CPUS,
                max_bytes=_MAX_BYTES,
            )
            self._coordinator = self._open.enter_context(made)
        return self._coordinator

    def close(self) -> None:
        """Ends all of it."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start_ray(self) -> None:
        """Starts or joins Ray. One that is started ends with the thread that did it, so let that be one that stays."""
        from mmdp.ray_start import Session

        if self._session is None:
            self._session = self._open.enter_context(closing(Session(store_bytes=_STORE_BYTES)))


class Rank:
    """A rank in a process of its own, which reads a batch when it is asked for one, and can be killed.

    Args:
        name: of the coordinator.
        address: of its cluster.
        rank: which.
        state: where it begins.
    """

    def __init__(self, name: str, address: str, rank: int, state: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_read, args=(there, name, address, rank, dict(state)), daemon=True)
        self._process.start()
        there.close()
        self._rank = rank

    def batches(self) -> Iterator[Seen]:
        """Those of the epoch, each once it is asked for."""
        while True:
            self._pipe.send("next")
            if not self._pipe.poll(_ANSWER_SECONDS):
                raise Broken(f"rank {self._rank} has given no batch within {_ANSWER_SECONDS:.0f} s")
            try:
                seen: Seen | str | None = self._pipe.recv()
            except EOFError:
                raise Broken(f"the process of rank {self._rank} has ended by itself") from None
            if isinstance(seen, str):
                raise Broken(f"rank {self._rank}: {seen}")
            if seen is None:
                return
            yield seen

    def kill(self) -> bool:
        """Ends its process, as `kill -9` does; whether that is how it ended."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        return self._process.exitcode == -signal.SIGKILL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


def _read(pipe: Any, name: str, address: str, rank: int, state: Mapping[str, Any]) -> None:
    """What the process of a rank does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    try:
        from mmdp.ray_reader import RankReader

        with RankReader(name, rank, WORLD, address=address) as reader:
            reader.load_state_dict(state)
            for batch in reader:
                pipe.recv()
                pipe.send(see(batch))
            pipe.recv()
            pipe.send(None)
    except EOFError:  # whoever started it has gone
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {shorten(str(error), 300)}")
