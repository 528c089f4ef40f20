"""How a batch gets to a device.

Adds: `CudaLane`, by pinned memory and a stream of its own; `PlainLane`, by a copy when it is asked for; `lane_to`, the
one for a device; `find`, a device by name.
Leaves out: the thread that sends batches ahead (`device.py`), their nesting (`nested.py`).

| what could go wrong on CUDA | what stands against it |
|---|---|
| the device is given memory that the consumer's kernels still read | each tensor is recorded on the consumer's stream |
| pinned memory is used anew while its copy still runs | it is torch's own, which waits for the copy |
| the consumer reads what has not arrived yet | its stream waits for the event behind the copy |
| a worker of a loader touches the device | nothing here does, before the first batch is there |
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mmdp.nested import map_tensors, tensors_of
from mmdp.refusals import shorten
from mmdp.spans import span

_log = logging.getLogger(__name__)
_noted: set[str] = set()


@dataclass(slots=True)
class Sent:
    """A batch on its way. Whoever receives it takes it out, so that nothing but the consumer holds it.

    Attributes:
        batch: on the device, or on its way there.
        arrived: the event behind its copy; None where no copy was started.
        state: the loader's, after it.
    """

    batch: Any
    arrived: torch.cuda.Event | None = None
    state: Mapping[str, Any] | None = None

    def take(self) -> Any:
        """The batch, once."""
        batch, self.batch = self.batch, None
        return batch


class Lane(Protocol):
    """How batches get to a device."""

    def send(self, batch: Any) -> Sent:
        """Starts a batch on its way; in the thread."""

    def receive(self, sent: Sent) -> Any:
        """The batch on the device; in the thread of the consumer."""


class PlainLane:
    """A copy when the consumer asks for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cpu":  # whoever asks for the CPU knows
            _note(str(device), f"on {device} batches are plain ones: pinned memory and streams of copies are for CUDA")

    def send(self, batch: Any) -> Sent:
        """Nothing to start."""
        return Sent(batch)

    def receive(self, sent: Sent) -> Any:
        """Copies, where batch and device are apart."""
        return _moved(sent.take(), self._device, non_blocking=False)


class CudaLane:
    """Pinned memory and a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        index: int | None = device.index
        if index is None:  # in a thread of our own the current device is always the first one, so look here
            index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        self._device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream | None = None

    def send(self, batch: Any) -> Sent:
        """Into pinned memory, and off to the device."""
        if self._stream is None:  # not before there is a batch: by then, the workers that made it have started
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with span("transfer"), torch.cuda.stream(self._stream):
            if any(tensor.is_cuda for tensor in tensors_of(batch)):  # a loader that decodes on the device
                self._stream.wait_stream(torch.cuda.default_stream(self._device))
            moved = _moved(map_tensors(batch, _pinned), self._device, non_blocking=True)
            return Sent(moved, self._stream.record_event())

    def receive(self, sent: Sent) -> Any:
        """The current stream waits for the copy, and the memory for the stream."""
        assert sent.arrived is not None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent.arrived)
        batch = sent.take()
        for tensor in tensors_of(batch):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return batch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In pinned memory, its gaps closed: a copy to the device in one go. The order of its strides stays."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def _moved(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """The batch on the device. A record with a `to` of its own, as `Batch`, knows itself what moves."""

    def whole(record: Any) -> Any:
        move = getattr(record, "to", None)
        if not callable(move):
            return None
        return move(device, non_blocking=non_blocking) if _takes_non_blocking(move) else move(device)

    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), whole)


def _takes_non_blocking(move: Any) -> bool:
    parameters = inspect.signature(move).parameters.values()
    return any(one.name == "non_blocking" or one.kind is one.VAR_KEYWORD for one in parameters)


def find(name: torch.device | str) -> torch.device:
    """The device of this name; the CPU where torch sees none of its kind."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device is called {shorten(name)}: give cpu, cuda, cuda:1, mps, ...") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            return _cpu_instead("CUDA")
        if device.index is not None and device.index >= count:
            raise ValueError(f"there is no {device}: torch sees {count} CUDA devices, from cuda:0 on")
    if device.type == "mps" and not torch.backends.mps.is_available():
        return _cpu_instead("MPS")
    return device


def lane_to(device: torch.device) -> Lane:
    """The lane for a device. Made in the thread of the consumer: the current CUDA device is another in each thread."""
    return CudaLane(device) if device.type == "cuda" else PlainLane(device)


def _cpu_instead(kind: str) -> torch.device:
    _note(kind, f"torch sees no {kind} device: batches stay on the CPU, as plain ones")
    return torch.device("cpu")


def _note(key: str, text: str) -> None:
    """Says it once in the life of this process."""
    if key not in _noted:
        _noted.add(key)
        _log.warning("mmdp.feed: %s", text)
