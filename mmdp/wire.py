"""Messages between a process and its worker: values and errors over a socket.

Adds: `Message`, a value as bytes, sent and received; `Report`, an error that crosses the border with its class, message
and traceback; `Raised`, what stands in place of a result; `WorkerError` and `WorkerDied`.
Leaves out: who talks to whom (`worker_process`).

A message is one pickle (protocol 5). The memory of large arrays in it follows as it is, without a copy, and is read
straight into memory of its own. So what arrives belongs to the receiver alone, is writable where it was, and holds no
file handle and no shared memory, however much of it is kept.

Measured with arrays of 2 MB: a block of shared memory that is used again and copied out of takes as long as the socket.
A new block for each array takes 2 to 4 times as long, for its pages have to be made; a plain pickle 5 times and more.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import traceback
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

_INLINE_BYTES = 16 * 2**10  # below this, a copy inside the pickle is cheaper than a part of its own

_Bytes: TypeAlias = "memoryview[int]"


class WorkerError(RuntimeError):
    """A worker process can't start or take its function, or its error can't be rebuilt in this process."""


class WorkerDied(WorkerError):  # noqa: N818 - says what happened
    """A worker process ended in the midst of its work.

    Args:
        message: what happened.
        item: what it worked on.
        exit_code: as the system gave it; -9 for signal 9. None if unknown.
    """

    def __init__(self, message: str, *, item: object = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.item = item
        self.exit_code = exit_code


def name_exit(code: int | None) -> str:
    """How a process ended, in words.

    >>> print(name_exit(-9))
    signal 9, SIGKILL (often the out-of-memory killer)
    """
    if code is None:
        return "an unknown exit code"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"
    return f"signal {-code}, {name}" + (" (often the out-of-memory killer)" if name == "SIGKILL" else "")


@dataclass(frozen=True, slots=True)
class Raised:
    """In place of a result: what the function raised."""

    error: BaseException


class Kind(IntEnum):
    """What a message is."""

    MAIN = 0  # to the worker: import this main script
    FUNCTION = 1  # to the worker: run this from now on
    ITEM = 2  # to the worker: run it on this
    RESULT = 3  # from the worker: a value
    FAILURE = 4  # from the worker: a Report


_HEADER = struct.Struct("<BIQ")  # kind, how many arrays follow, bytes of the pickle


@dataclass(frozen=True, slots=True)
class Message:
    """One value on its way.

    Attributes:
        kind: what it is.
        pickled: the value without its large arrays.
        arrays: their memory.
    """

    kind: Kind
    pickled: bytes | bytearray
    arrays: list[_Bytes]

    @classmethod
    def of(cls, kind: Kind, value: Any) -> Message:
        """The message of a value; raises what `pickle` raises, before anything is sent."""
        arrays: list[_Bytes] = []

        def stays_inside(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < _INLINE_BYTES:
                return True
            arrays.append(view)
            return False

        return cls(kind, pickle.dumps(value, protocol=5, buffer_callback=stays_inside), arrays)

    def value(self) -> Any:
        """The value back; `Raised` for a failure. Raises what `pickle` raises."""
        value = pickle.loads(self.pickled, buffers=self.arrays)  # noqa: S301 - from our own parent or child
        return Raised(value.rebuild()) if self.kind is Kind.FAILURE else value

    def send(self, channel: socket.socket) -> None:
        """Writes the message, and waits until the other side has taken nearly all of it."""
        header = _HEADER.pack(self.kind, len(self.arrays), len(self.pickled))
        sizes = struct.pack(f"<{len(self.arrays)}Q", *(array.nbytes for array in self.arrays))
        channel.sendall(b"".join((header, sizes, self.pickled)))
        for array in self.arrays:
            channel.sendall(array)

    @classmethod
    def receive(cls, channel: socket.socket) -> Message:
        """Reads one message; EOFError where the other side is gone."""
        kind, num_arrays, num_bytes = _HEADER.unpack(_read(channel, memoryview(bytearray(_HEADER.size))))
        sizes = struct.unpack(f"<{num_arrays}Q", _read(channel, memoryview(bytearray(8 * num_arrays))))
        pickled = bytearray(num_bytes)
        _read(channel, memoryview(pickled))
        return cls(Kind(kind), pickled, [_read(channel, _room(size)) for size in sizes])


def _room(num_bytes: int) -> _Bytes:
    import numpy as np  # not before it is needed: without it a worker starts in a tenth of the time

    return np.empty(num_bytes, dtype=np.uint8).data  # unlike a bytearray, not filled with zeros first


def _read(channel: socket.socket, room: _Bytes) -> _Bytes:
    left = room
    while left.nbytes:
        # One call for all of it: each return would wait for Python's lock, which a busy trainer holds for 5 ms a time.
        count = channel.recv_into(left, left.nbytes, socket.MSG_WAITALL)
        if count == 0:
            raise EOFError("the other side closed the socket")
        left = left[count:]
    return room


@dataclass(frozen=True, slots=True)
class Report:
    """An error on its way.

    Attributes:
        name: of its class.
        message: its text.
        traceback: where it was raised, as text.
        pickled: itself, where that survives.
    """

    name: str
    message: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Report:
        """The report of an error that was just caught; never fails."""
        try:
            message = str(error)
        except Exception as second:
            message = f"(its message can't be shown: {type(second).__name__})"
        return cls(type(error).__qualname__, message, _traceback(error), _pickle_error(error))

    def rebuild(self) -> BaseException:
        """The error, its traceback as a note; a `WorkerError` that names class and message if it can't be rebuilt.

        An error of a class with `says_all` is about data, and not about code: of its traceback, the first line is kept.
        """
        error: BaseException = WorkerError(f"{self.name}: {self.message}")
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)  # noqa: S301 - from our own child
            except Exception as second:
                error.add_note(f"(it can't be rebuilt here: {type(second).__name__}: {second})")
        error.add_note(self.traceback.partition(":\n")[0] if getattr(error, "says_all", False) else self.traceback)
        return error


def _traceback(error: BaseException) -> str:
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception as second:
        text = f"(its traceback can't be shown: {type(second).__name__})"
    return f"in worker process {os.getpid()}:\n{text.rstrip()}"


def _pickle_error(error: BaseException) -> bytes | None:
    """The error pickled, if the copy says the same; an own `__init__` often makes it fail, or say something else."""
    try:
        pickled = pickle.dumps(error, protocol=5)
        again = pickle.loads(pickled)  # noqa: S301 - made a line above
        return pickled if type(again) is type(error) and str(again) == str(error) else None
    except Exception:
        return None
