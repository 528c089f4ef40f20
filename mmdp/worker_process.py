"""One worker process: give it a function once, then ask it item by item.

Adds: `WorkerProcess`. In: a pickled function, then items. Out: for each item the function's result, or `Raised`.
Leaves out: many workers, order, another try after a death (`executors`); how values travel (`wire`).

How a worker ends:

- its socket is closed: it leaves, after the item in work;
- its parent is gone, even by `kill -9`: it ends within two seconds, in the midst of an item too (unless the item is in
  C code that holds Python's lock; then once that returns);
- Ctrl-C: never on its own. It ignores SIGINT from its first moment; its parent decides.

A spawned worker is a fresh interpreter that imports what the function names, and nothing else. The main script is
imported only if the function, or an item, is defined there; so a script without `if __name__ == "__main__"`, and a
notebook, may use processes for functions that live in a module. POSIX only (Linux, macOS).
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from multiprocessing import resource_tracker, spawn
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NoReturn

from mmdp.wire import Kind, Message, Raised, Report, WorkerDied, WorkerError, name_exit

StartMethod = Literal["spawn", "fork", "forkserver"]

_START_SECONDS = 300.0  # to import the function's modules; torch on a busy machine with cold disks takes half a minute
_TICK_SECONDS = 0.5  # between two looks at whether the other side still lives
_LEAVE_SECONDS = 2.0  # for an orderly exit, before it is forced

_start_lock = threading.Lock()  # one start at a time, so that no fork inherits the child's end of another's socket
_importing_main = False  # in a worker, while it imports the main script


class WorkerProcess:
    """A process that runs one function. All methods but `kill` belong to one thread.

    Args:
        start_method: as in `multiprocessing`.
    """

    def __init__(self, start_method: StartMethod) -> None:
        self._start_method = start_method
        self._owner = os.getpid()
        self._loaded = b""  # digest of the function
        self._has_main = start_method != "spawn"  # the other two have the main module from their start
        self._killed = False
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | BaseProcess | None = None

    def load(self, pickled: bytes) -> None:
        """Gives the worker its function, unless it has it already; starts it if need be.

        Raises:
            WorkerDied: the process ended meanwhile.
            WorkerError: it can't start, or can't load the function.
        """
        digest = blake2b(pickled).digest()
        if digest == self._loaded:
            return
        try:
            if self._channel is None:
                self._start()
                self._answer(_START_SECONDS)
            self._import_main_for(pickled)
            self._order(Message.of(Kind.FUNCTION, pickled))
        except TimeoutError as error:
            raise WorkerError(f"a worker process can't start: {error}. See what it printed, if anything") from error
        self._loaded = digest

    def call(self, item: Any, timeout: float | None) -> Any:
        """What the function makes of the item: its result, or `Raised`.

        Args:
            item: anything that pickles.
            timeout: seconds; None waits as long as the worker lives.

        Raises:
            WorkerDied: the process ended.
            TimeoutError: the time is over. The process still runs: kill it.
        """
        try:
            message = Message.of(Kind.ITEM, item)
        except Exception as error:
            return Raised(error)
        self._import_main_for(message.pickled)
        return self._ask(message, timeout)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._exit_code(0) is None

    def kill(self) -> None:
        """Ends the process at once. May be called from any thread, at any time, more than once."""
        self._killed = True
        process = self._process
        if process is not None and self._owner == os.getpid():  # a forked copy of this object owns no process
            process.kill()

    def close(self) -> None:
        """Lets the process leave, and waits for it; forces it where it doesn't."""
        if self._channel is not None:
            self._channel.close()
        if self._owner == os.getpid() and self._exit_code(_LEAVE_SECONDS) is None:
            self.kill()
            self._exit_code(_LEAVE_SECONDS)

    def _start(self) -> None:
        if _importing_main:
            raise WorkerError(
                "a worker process imports this script to find its function, and meets a run of its own: "
                'put what the script does under `if __name__ == "__main__":`, or the function into a module'
            )
        try:
            if self._start_method == "forkserver":
                resource_tracker.ensure_running()  # it would let interrupts through that are held back
            with _start_lock:
                self._channel, theirs = socket.socketpair()
                with theirs, _interrupt_held_back():
                    if self._start_method == "spawn":
                        self._process = _spawn(theirs)
                    else:
                        self._process = _fork(self._start_method, self._channel, theirs)
        except Exception as error:
            raise WorkerError(f"a worker process can't start: {type(error).__name__}: {error}") from error
        if self._killed:  # while it started
            self.kill()

    def _import_main_for(self, pickled: bytes | bytearray) -> None:
        if self._has_main or b"__main__" not in pickled:
            return
        self._has_main = True
        names = ("init_main_from_name", "init_main_from_path")
        orders = spawn.get_preparation_data("worker")
        self._order(Message.of(Kind.MAIN, {name: orders[name] for name in names if name in orders}))

    def _order(self, message: Message) -> None:
        outcome = self._ask(message, _START_SECONDS)
        if isinstance(outcome, Raised):
            raise WorkerError(
                f"a worker process can't load the function: {type(outcome.error).__name__}: {outcome.error}. "
                "What runs in a process is defined in a module, not in a notebook; or use threads"
            ) from outcome.error

    def _ask(self, message: Message, timeout: float | None) -> Any:
        assert self._channel is not None
        try:
            message.send(self._channel)
        except OSError:
            self._raise_death()
        return self._answer(timeout)

    def _answer(self, timeout: float | None) -> Any:
        assert self._channel is not None
        end = float("inf") if timeout is None else time.monotonic() + timeout
        ready = select.poll()
        ready.register(self._channel, select.POLLIN)
        while not ready.poll(1000 * min(_TICK_SECONDS, max(0.0, end - time.monotonic()))):
            # A death closes the socket, and so ends the wait, unless a process that the worker left holds it open.
            if self._exit_code(0) is not None and not ready.poll(0):
                self._raise_death()
            if time.monotonic() >= end:
                raise TimeoutError(f"no result within {timeout} s")
        try:
            message = Message.receive(self._channel)
        except (EOFError, OSError):
            self._raise_death()
        try:
            return message.value()
        except Exception as error:  # such as a class that this process can't import
            return Raised(error)

    def _raise_death(self) -> NoReturn:
        code = self._exit_code(_LEAVE_SECONDS)
        self.kill()  # it may have closed the socket and live on
        raise WorkerDied(f"it ended with {name_exit(code)}", exit_code=code)

    def _exit_code(self, patience: float) -> int | None:
        if self._process is None:
            return 0
        if isinstance(self._process, BaseProcess):
            self._process.join(patience)
            return self._process.exitcode
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None


_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from mmdp.worker_process import serve_descriptor; serve_descriptor(int(sys.argv[1]))"
)


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    descriptor = theirs.fileno()
    return subprocess.Popen(  # noqa: S603 - this same interpreter
        [sys.executable, "-c", _PROGRAM, str(descriptor), *(path for path in sys.path if isinstance(path, str))],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        # Processes are many already: with a thread a core in each, they would only wait for each other.
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )


def _fork(method: Literal["fork", "forkserver"], ours: socket.socket, theirs: socket.socket) -> BaseProcess:
    # Python imports this when it first waits for such a process. At exit that were too late: the import makes it forget
    # that Ctrl-C is why it ends, and it exits with code 1.
    import multiprocessing.connection

    arguments = (theirs, ours if method == "fork" else None)
    context: Any = multiprocessing.get_context(method)
    # Daemonic: this program's exit ends it, even in the midst of an item.
    process: BaseProcess = context.Process(target=_serve_forked, args=arguments, daemon=True)
    process.start()
    return process


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Ctrl-C goes to the whole process group: a child that starts now must not see it before it can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# From here on: the life of a worker.


def serve_descriptor(descriptor: int) -> None:
    """What a spawned worker does, from start to end."""
    _serve(socket.socket(fileno=descriptor))


def _serve_forked(channel: socket.socket, inherited: socket.socket | None) -> None:
    global _start_lock
    _start_lock = threading.Lock()  # a fork inherits it locked
    if inherited is not None:
        inherited.close()  # the parent's end: as long as it is open here too, nobody notices that the parent closed it
    _serve(channel)


def _serve(channel: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, args=(channel.fileno(), os.getppid()), daemon=True).start()
    function = _Function()
    try:
        Message.of(Kind.RESULT, None).send(channel)  # ready
        while True:
            # No name for the reply: its arrays are free before the next message comes.
            function.do(Message.receive(channel)).send(channel)
    except (EOFError, OSError):
        return  # the parent closed the socket, or is gone


class _Function:
    """The function of this worker, once it came."""

    def __init__(self) -> None:
        self._call: Callable[[Any], Any] | None = None

    def do(self, message: Message) -> Message:
        """Does what a message asks for, and makes the reply."""
        try:
            value = message.value()
            if message.kind is Kind.ITEM:
                assert self._call is not None
                return Message.of(Kind.RESULT, self._call(value))
            if message.kind is Kind.FUNCTION:
                self._call = pickle.loads(value)  # noqa: S301 - from our own parent
            else:
                _import_main(value)
            return Message.of(Kind.RESULT, None)
        except BaseException as error:  # SystemExit too: it is the function's, and the parent's to judge
            return Message.of(Kind.FAILURE, Report.of(error))


def _import_main(orders: dict[str, Any]) -> None:
    global _importing_main
    _importing_main = True
    try:
        spawn.prepare(orders)
    finally:
        _importing_main = False


def _end_with_parent(descriptor: int, parent: int) -> None:
    """Ends this process when its parent is gone, whatever its main thread does."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)  # a hang-up is all it reports
    # A fork of the parent may hold the socket open: so the parent's number is looked at too.
    while not hung_up.poll(1000 * _TICK_SECONDS) and os.getppid() == parent:
        pass
    time.sleep(_LEAVE_SECONDS / 2)  # an idle worker leaves in good order by itself
    os._exit(1)
