"""One worker actor, seen from outside: it is started somewhere, takes functions, works on items, and may be gone.

Adds: `start_worker`; `Worker`, which knows what its actor has; `Function`; `patiently`, which waits for a reference on
an event loop; `Placement`.
Leaves out: what the actor does (`ray_worker`), and who gets which item (`ray_pool`).

| placement | actors are |
|---|---|
| together | where Ray puts them by default: on the node of whoever makes them, until half of its CPUs are taken |
| spread | one node after the other, if Ray can: it is a wish |
| near | on the node they work for, if it lives |

Actors that take no CPU at all are put on nodes by chance, whatever is asked for: Ray looks at a strategy only for what
takes something. So spread and near are refused for them, and together means nothing.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from mmdp.ray_call import gone_errors, told
from mmdp.ray_start import load_ray
from mmdp.ray_warnings import Warned
from mmdp.ray_worker import Block, Meta, Place, RowWorker
from mmdp.refusals import shorten
from mmdp.wire import WorkerError

Placement: TypeAlias = Literal["together", "spread", "near"]
Ref: TypeAlias = Any  # ray.ObjectRef; ray is not imported before it is needed

_LEAST_CPUS = 0.0001  # in which Ray counts; less is none
_LOAD_SECONDS = 300.0  # to import the function's modules; torch on a busy machine with cold disks takes half a minute


class ActorGone(Exception):  # noqa: N818 - says what happened
    """The actor died, or its node did. The message says how, in one line."""


@dataclass(slots=True, eq=False)
class Function:
    """A function that actors have, or will have.

    Attributes:
        digest: its name.
        pickled: reference to its pickle, (bytes,) uint8.
        failure: why no actor can run it.
        num_runs: that use it now.
    """

    digest: str
    pickled: Ref
    failure: WorkerError | None = None
    num_runs: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """An actor that has come up.

    Attributes:
        actor: its handle.
        place: where it is.
        jobs: what it has in work.
        loaded: digests of the functions it has.
        is_ended: we ended it ourselves.
    """

    actor: Any
    place: Place
    jobs: set[Any] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    is_ended: bool = False
    _loads: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def load(self, function: Function) -> None:
        """Gives it a function, unless it has it.

        Raises:
            ActorGone: it died meanwhile.
            WorkerError: it can't take the function; nobody can, then.
        """
        if function.digest not in self._loads:
            self._loads[function.digest] = asyncio.ensure_future(self._ask_to_load(function))
        await asyncio.shield(self._loads[function.digest])

    async def _ask_to_load(self, function: Function) -> None:
        try:
            report = await patiently(self.actor.load.remote(function.digest, function.pickled), _LOAD_SECONDS)
        except TimeoutError:
            function.failure = WorkerError(f"a worker actor can't load the function within {_LOAD_SECONDS:.0f} s")
            raise function.failure from None
        if report is not None:
            function.failure = WorkerError(
                f"a worker actor can't load the function: {report.name}: {report.message}. The modules it needs must "
                "be there on every node"
            )
            function.failure.add_note(report.traceback)
            raise function.failure
        self.loaded.add(function.digest)

    async def work(self, function: Function, item: Block, run: int, timeout: float | None) -> tuple[Meta, Ref]:
        """What became of the item, and a reference to its block.

        Raises:
            ActorGone: it died meanwhile.
            TimeoutError: it has not answered in time.
        """
        answer, block = self.actor.work.options(num_returns=2).remote(function.digest, item, run)
        return await patiently(answer, timeout), block

    async def heard(self) -> list[Warned]:
        """What it has warned of since the last call, once there is something; ActorGone where it died meanwhile."""
        warned: list[Warned] = await patiently(self.actor.heard.remote(), None)
        return warned

    def drop(self, run: int) -> None:
        """It begins nothing more of a run."""
        self.actor.drop.remote(run)

    def forget(self, function: Function) -> None:
        """Lets a function go."""
        self.loaded.discard(function.digest)
        if self._loads.pop(function.digest, None) is not None:
            self.actor.forget.remote(function.digest)

    def end(self) -> None:
        """Ends the actor at once, and whatever it does."""
        self.is_ended = True
        self.make_sure()

    def make_sure(self) -> None:
        """Ends an actor that is taken for dead: it may only be out of reach, and must not come back."""
        load_ray().kill(self.actor)


async def start_worker(
    *, num_cpus: float, max_concurrency: int, placement: Placement, node: str, seconds: float
) -> Worker:
    """A new actor, once it has come up.

    Args:
        num_cpus: that it takes of its node; 0 and fractions are allowed.
        max_concurrency: items it has at a time.
        placement: as the table above says.
        node: that it works for; "" for none.
        seconds: to wait for it.

    Raises:
        ActorGone: it died while it started.
        TimeoutError: it has not come up.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = load_ray()
    strategy: Any = "DEFAULT"
    if placement == "spread":
        strategy = "SPREAD"
    elif placement == "near" and node:
        strategy = NodeAffinitySchedulingStrategy(node, soft=True)
    options = {
        "num_cpus": num_cpus,
        "max_concurrency": max_concurrency + 3,  # `drop`, `forget` and `heard` never wait for an item
        "max_restarts": 0,  # `ray_pool` says why
        "max_task_retries": 0,
        "scheduling_strategy": strategy,
    }
    actor = ray.remote(RowWorker).options(**options).remote(max_concurrency, num_cpus, sys.path)
    try:
        return Worker(actor, await patiently(actor.where.remote(), seconds))
    except TimeoutError:
        ray.kill(actor)
        raise


async def patiently(ref: Ref, seconds: float | None) -> Any:
    """What a reference stands for.

    Args:
        ref: of a call.
        seconds: to wait; None for as long as it takes.

    Raises:
        ActorGone: whoever was called has gone.
        TimeoutError: the time is over. The call goes on.
        Exception: what the call raised.
    """
    errors = load_ray().exceptions
    future = asyncio.wrap_future(ref.future())
    future.add_done_callback(_look)
    done, _ = await asyncio.wait({future}, timeout=seconds)
    if not done:
        raise TimeoutError
    try:
        return future.result()
    except gone_errors() as death:
        raise ActorGone(told(death)) from None
    except errors.RayTaskError as error:
        raise error.cause from None


def _look(future: asyncio.Future[Any]) -> None:
    """Marks an error as seen: nobody may wait for it any more."""
    if not future.cancelled():
        future.exception()


def check_placeable(placement: str, num_cpus: float) -> None:
    """ValueError where Ray would put actors of so many CPUs anywhere, though it matters where they are."""
    if placement != "together" and num_cpus < _LEAST_CPUS:
        raise ValueError(
            f"num_cpus is {num_cpus:g}, with placement {placement!r}: Ray puts actors that take no CPU on nodes by "
            f"chance. Give at least {_LEAST_CPUS:g}, or 'together'"
        )


def check_placement(placement: str, num_cpus: float) -> Placement:
    """The same; ValueError where there is none of this name, or where actors of so many CPUs can't be placed so."""
    if placement not in get_args(Placement):
        raise ValueError(f"no placement {shorten(placement)}: choose of {', '.join(get_args(Placement))}")
    check_placeable(placement, num_cpus)
    return placement  # type: ignore[return-value]
