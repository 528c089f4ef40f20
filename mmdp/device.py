"""Batches on the device, one ahead of the training loop.

Adds: `feed`, which makes a `Feed` of any loader. In: batches on the host, nested as they may be. Out: the same batches
on the device, in the same order.
Leaves out: building batches (`loader.py`), how one gets to the device (`lanes.py`), how long the loop waits
(`wait_meter.py`).

On CUDA a thread takes a batch from the loader, copies it into pinned memory, and starts its copy to the device on a
stream of its own: all while the loop trains on the batch before. The loop's stream waits for that copy, the loop itself
does not. Pixels travel as uint8; a model casts them on the device, where that costs next to nothing.

On the CPU and other devices the same thread takes one batch ahead. There is no pinned memory, and the copy is made when
the loop asks for the batch.

The thread is needed because a loader may take long: without one, the loop gets batch k only once batch k + 1 is there.
"""

from __future__ import annotations

import atexit
import copy
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from mmdp.ahead import ahead as in_thread
from mmdp.lanes import Lane, Sent, find, lane_to
from mmdp.records import Batch

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def feed(loader: Iterable[T], device: torch.device | str, *, ahead: int = 1) -> Feed[T]:
    """The loader's batches on the device, made ready while the loop trains.

    Args:
        loader: `Loader`, torch's DataLoader, or any iterable of batches. It must not write into a batch that it has
            given.
        device: "cuda", "cuda:1", "cpu", "mps", ... Where torch sees no such device at all, batches stay on the CPU, and
            the log says so.
        ahead: batches that may wait on the device, at least 1. Beside them there are the one in use, and one on its
            way: each costs the device its bytes.

    Raises:
        ValueError: no such device, or a number below 1.
    """
    return Feed(loader, device, ahead)


class Feed(Generic[T]):
    """Batches on the device; made by `feed`.

    `for batch in feed` is one loop over the loader. One that is left early ends its thread and lets go of all that was
    read ahead; a loader that can be rewound (ours can) gives it again in the next loop, so that nothing is lost.

    A batch belongs to the stream that is current when it is handed out. If you use it on another stream, record it
    there yourself.

    Attributes:
        loader: where batches come from. While a loop is open, it is ahead of what you see; what ends a loop of one of
            ours ends that of the feed.
        device: where batches go.
    """

    def __init__(self, loader: Iterable[T], device: torch.device | str, ahead: int = 1) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}: a feed has at least 1 batch ready")
        self.loader = loader
        self.device = find(device)
        self._ahead = ahead
        self._state: Mapping[str, Any] | None = None
        self._is_ahead = False  # the loader has given batches that nobody saw
        self._is_reading = False
        self._is_used = False
        # Weak, so that a loop ends with its thread when the `for` that runs it does.
        self._loop: weakref.ref[Generator[T, None, None]] | None = None

    def __iter__(self) -> Iterator[T]:
        self._settle()
        loop = self._batches()
        self._loop = weakref.ref(loop)
        return loop

    def __len__(self) -> int:
        """The loader's: of ours, the steps of the next loop. While a loop is open, the loader is some steps ahead."""
        return len(self.loader)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was handed out, whatever was read ahead.

        Raises:
            RuntimeError: neither the loader nor its batches tell a state.
        """
        state = self._state if self._is_ahead else self._state_of_loader() or self._state
        if state is None:
            raise RuntimeError(
                f"a {type(self.loader).__name__} tells no state, and no batch that was handed out has one: save it "
                "after a batch of `mmdp.Loader`, or of a DataLoader with `PackedDataset.sampler`"
            )
        return dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch is the one after the state. Raises what the loader raises.

        Raises:
            TypeError: the loader can't load one.
        """
        self._settle()
        self._parts_with("load_state_dict")[0].load_state_dict(state)
        self._state, self._is_ahead = dict(state), False

    def set_epoch(self, epoch: int) -> None:
        """As the loader does it. A loop that is open ends.

        Raises:
            TypeError: the loader knows no epochs.
        """
        self._settle()
        for part in self._parts_with("set_epoch"):
            part.set_epoch(epoch)
        self._state, self._is_ahead = None, False

    def close(self) -> None:
        """Ends the loop and its thread, lets go of what was read ahead, and closes the loader where it can be."""
        self._end_loop()
        if hasattr(self.loader, "close") and not self._is_reading:  # a thread that is stuck in it may not be disturbed
            self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _parts_with(self, method: str) -> list[Any]:
        """The loader; or, of a DataLoader, the samplers and the data set, which keep the epoch."""
        parts = [self.loader, *(getattr(self.loader, name, None) for name in ("batch_sampler", "sampler", "dataset"))]
        able = [part for part in parts if hasattr(part, method)]
        if not able:
            raise TypeError(f"a {type(self.loader).__name__} has no {method}: give `feed` a loader that has")
        return able[:1] if able[0] is self.loader else able

    def _state_of_loader(self) -> Mapping[str, Any] | None:
        state_dict = getattr(self.loader, "state_dict", None)
        # A copy: torch's state_dict give away what they go on writing to.
        return copy.deepcopy(state_dict()) if callable(state_dict) else None

    def _end_loop(self) -> None:
        loop = self._loop() if self._loop is not None else None
        if loop is not None:
            loop.close()

    def _tell(self, end: Callable[[], None] | None) -> None:
        """The loader, of who takes its batches."""
        if hasattr(self.loader, "read_by"):
            self.loader.read_by(end)

    def _settle(self) -> None:
        """No loop is open, and the loader is where the consumer is."""
        self._end_loop()
        self._go_back()
        if self._is_reading:
            raise RuntimeError("the loader still makes a batch for a loop that was left long ago: it may be stuck")

    def _go_back(self) -> None:
        """The loader goes back to where the consumer is, once nobody reads from it."""
        if self._is_reading or not self._is_ahead:
            return
        if self._state is not None and hasattr(self.loader, "rewind"):
            self.loader.rewind(self._state)
            self._is_ahead = False

    def _batches(self) -> Generator[T, None, None]:
        self._state = self._state_of_loader() or self._state
        source = iter(self.loader)  # here, not in the thread: a DataLoader forks now, and looks after its workers
        if source is self.loader and self._is_used:
            raise RuntimeError("an iterator can be fed once, and this one has been: give a loader that starts anew")
        self._is_used = self._is_ahead = True
        self._tell(self._end_loop)
        lane = lane_to(self.device)
        on_the_way = in_thread(self._send(source, lane), self._ahead)
        unregister = atexit.unregister
        atexit.register(self._end_loop)  # while there still are modules
        try:
            for sent in on_the_way:
                received = [lane.receive(sent)]
                self._state = sent.state
                yield received.pop()  # the consumer's alone
            self._is_ahead = False
        finally:
            unregister(self._end_loop)
            self._tell(None)
            on_the_way.close()
            self._go_back()

    def _send(self, source: Iterator[T], lane: Lane) -> Generator[Sent, None, None]:
        """Runs in the thread."""
        self._is_reading = True
        try:
            for batch in source:
                sent = lane.send(batch)
                told = batch.state if isinstance(batch, Batch) else None
                sent.state = told if told is not None else self._state_of_loader()
                del batch  # it may go while the next one is made
                yield sent
                del sent
        finally:
            if isinstance(source, Generator):
                source.close()
            self._is_reading = False
