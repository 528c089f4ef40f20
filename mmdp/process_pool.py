"""Worker processes on loan: one for each thread of a run, replaced where it dies, kept for the next run if asked to.

Adds: `ProcessPool`. In: a function. Out: `hands`, each of which runs it in a process of its own.
Leaves out: the order of results (`in_order`), what happens inside a process (`worker_process`).
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

from mmdp.in_order import name_item
from mmdp.wire import Raised, WorkerDied, WorkerError, name_exit
from mmdp.worker_process import StartMethod, WorkerProcess

_STARTS = 3
"""Processes that die while they start, one after the other, before it is said that none can."""


class ProcessPool:
    """Processes between two runs.

    Args:
        start_method: as in `multiprocessing`.

    Attributes:
        keeps: how many processes stay after a run.
    """

    def __init__(self, start_method: StartMethod) -> None:
        self.start_method = start_method
        self.keeps = 0
        self._idle: list[WorkerProcess] = []

    def hands(self, function: Callable[[Any], Any], count: int, timeout: float | None) -> list[InProcess]:
        """Hands for `count` threads; a process starts with the first item of its thread.

        Raises:
            WorkerError: the function can't be sent.
        """
        try:
            pickled = pickle.dumps(function, protocol=5)
        except Exception as error:
            raise WorkerError(
                f"{name_item(function)} can't be sent to a process: {type(error).__name__}: {error}. What runs in a "
                "process is defined at the top of a module, and holds no locks and no open files; or use threads"
            ) from error
        return [InProcess(self, pickled, timeout) for _ in range(count)]

    def take(self) -> WorkerProcess | None:
        """A process that a former run left and that still lives, if there is one."""
        while self._idle:
            try:
                worker = self._idle.pop()
            except IndexError:  # another run was faster
                break
            if worker.is_alive():
                return worker
            worker.close()
        return None

    def give_back(self, worker: WorkerProcess) -> None:
        """Keeps a process for the next run, or ends it."""
        if len(self._idle) < self.keeps:
            self._idle.append(worker)
        else:
            worker.close()

    def close(self) -> None:
        """Ends the processes that no run has."""
        while (worker := self.take()) is not None:
            worker.close()


class InProcess:
    """Hands that ask a process of their own, and get a new one where it dies.

    Args:
        pool: gives and takes processes.
        pickled: the function.
        timeout: seconds an item may take.
    """

    def __init__(self, pool: ProcessPool, pickled: bytes, timeout: float | None) -> None:
        self._pool = pool
        self._pickled = pickled
        self._timeout = timeout
        self._worker: WorkerProcess | None = None
        self._killed = False

    def __call__(self, item: Any) -> Any:
        """The result, or `Raised`; raises `WorkerError` where no process can start."""
        try:
            return self._ask(item, self._worker or self._hire())
        except WorkerDied as death:
            if self._killed:
                raise
            warnings.warn(
                f"a worker process ended with {name_exit(death.exit_code)} while it worked on {name_item(item)}; "
                "the item is tried once more in a new one",
                RuntimeWarning,
                stacklevel=2,
            )
        # Nothing ran in the new process before: if that dies too, the item is to blame, and not a neighbour.
        try:
            return self._ask(item, self._hire(new=True))
        except WorkerDied as death:
            message = f"{name_item(item)} ended two worker processes, the second with {name_exit(death.exit_code)}"
            return Raised(WorkerDied(message, item=item, exit_code=death.exit_code))

    def _ask(self, item: Any, worker: WorkerProcess) -> Any:
        try:
            return worker.call(item, self._timeout)
        except WorkerError:
            self._dismiss()
            raise
        except Exception as error:  # too slow, or its result is too large for this process
            self._dismiss()
            return Raised(error)

    def _hire(self, *, new: bool = False) -> WorkerProcess:
        num_dead = 0
        while True:
            idle = None if new else self._pool.take()
            self._worker = worker = idle or WorkerProcess(self._pool.start_method)
            if self._killed:
                worker.kill()
            try:
                worker.load(self._pickled)
                return worker
            except WorkerDied as death:
                self._dismiss()
                if self._killed:
                    raise
                num_dead += idle is None
                if num_dead == _STARTS:
                    raise WorkerError(
                        f"{num_dead} worker processes ended while they started, the last with "
                        f"{name_exit(death.exit_code)}. See what they printed, if anything"
                    ) from death
                warnings.warn(
                    f"a worker process ended with {name_exit(death.exit_code)} while it started; a new one starts",
                    RuntimeWarning,
                    stacklevel=3,
                )
            except WorkerError:
                self._dismiss()
                if idle is None:
                    raise

    def _dismiss(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.close()
        self._worker = None

    def kill(self) -> None:
        """Ends the process, and with it the item in work."""
        self._killed = True
        worker = self._worker
        if worker is not None:
            worker.kill()

    def leave(self) -> None:
        """Gives the process back."""
        if self._killed:
            self._dismiss()
        elif self._worker is not None:
            self._pool.give_back(self._worker)
            self._worker = None
