"""One plan, many ranks: a coordinator has rows built by Ray actors, and deals references to the ranks.

Adds: `Coordinator`, which starts the named actor, or joins the one that is there; `stats`.
Leaves out: what the actor does (`ray_dealer`), the ranks (`ray_reader`), the workers (`ray_pool`).

    with ExitStack() as held:
        if rank == 0:  # it makes the coordinator, keeps it open, and reads as well
            coordinator = held.enter_context(Coordinator(source, encoder, plan, batch_size=8, world_size=4))
        for batch in held.enter_context(RankReader(rank=rank, world_size=4, address=address)):
            train(batch)

`docs/many_ranks.md` has it whole, with the address, a saved state and a resume.

The batches of a rank are those of `Loader` for the same plan, rank and world size, bit for bit; so is the state they
resume from. A row is made by a worker, lies in the object store of its node, and is copied once: by its rank, into the
batch. In between goes a reference, which costs about a millisecond; so it stands for a row, never for a sample.

In flight for each rank: `depth` rows, `max_bytes` of pixels, built or in work or handed over and not yet copied. All
ranks together must stay under 40 % of the smallest object store, so that nothing is spilled to disk. Order has its
price here too: a row that takes long holds back its step, and the wait that its rank sees shows it.

What may fail:

| it | then |
|---|---|
| a worker dies, or its node | its rows are made again, one by one: the same batches come, a little later |
| a row kills its workers | it is built sample by sample; one that kills alone is left out and counted, as in `Loader` |
| a block is lost with its node | its row is made again |
| the coordinator dies, or its maker | every rank gets an error within seconds: start again from the last state |
| the maker is killed, and had started Ray itself | Ray goes with it, and ends other ranks, often without an error: \
exit code 1, and a line on standard error. A Ray that is started apart (`ray start --head`) stays: they get the error |
| a rank dies | as in any training: the job starts again from the last state. Here nobody waits for it: the others get \
their rows, its own stay in flight until it comes back and begins a loop, from whatever state |
| a rank is slow | its own window fills, and nobody else's |

One coordinator hands out some 500 rows a second. Where ranks want more, give each group of them one under a name of its
own, with the same plan and the whole `world_size`: the plan is a function, so they need not talk.

The coordinator keeps nothing that the state does not say: rows that were read ahead are made again after a restart.
Its node needs the token cache that the plan was made from, and the nodes of workers need what rows are built from: the
data, and that same cache. A shared disk, or an object store, does.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, Self

from mmdp import ray_start, spans
from mmdp.assemble import MAX_BYTES
from mmdp.failures import MAX_FAILURES
from mmdp.placement import choose
from mmdp.ray_actor import Placement, check_placeable, check_placement
from mmdp.ray_call import CallStopped, answer, letting_go
from mmdp.ray_crew import STORE_SHARE
from mmdp.ray_deal import Job, Terms
from mmdp.ray_dealer import Dealer
from mmdp.ray_engine import check_cpus
from mmdp.ray_executor import MAX_CONCURRENCY
from mmdp.ray_links import measured
from mmdp.ray_start import NAMESPACE, Session, program_id
from mmdp.ray_warnings import repeat
from mmdp.row_builder import RowBuilder
from mmdp.steps import check_ranks, row_length
from mmdp.traced import traced

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.planner import Plan
    from mmdp.sources import Source

NAME = "mmdp"
"""Of a coordinator; a cluster with several runs needs several."""

_START_SECONDS = 300.0  # to import what the plan is made of
_CALL_SECONDS = 30.0  # for an answer that needs no row
_LEAVE_SECONDS = 10.0  # for the other ranks to take their last batch


class Coordinator:
    """Starts the coordinator of this name, or joins it where another rank was first. `close` it, or use `with`.

    The one that started it ends it: its `close` waits some seconds for ranks that are still reading. Keep it as long as
    any rank reads; with the program that made it, the coordinator ends as well.

    Credentials of a store are those in the environment of each node, as `ray start` found it, and not of this program.

    Args:
        source: the samples.
        encoder: makes tokens and pixels of them.
        plan: the rows, from complete sizes.
        name: by which ranks find it.
        batch_size: rows a rank and step, B.
        world_size: ranks, W.
        num_workers: actors; by default as many as the cluster's CPUs allow.
        num_cpus: that Ray counts for each.
        placement: "together", "spread" or "near" the ranks, as in `ray_actor`; "auto" measures a link of the cluster
            and the bytes of a row, chooses, and says why.
        step_seconds: of training on a batch, for "auto"; by default ranks are taken to want all that workers can build.
        max_concurrency: rows an actor has at a time.
        depth: rows in flight for each rank, at least B; by default three batches.
        max_bytes: bytes of pixels in flight for each rank; by default as `Loader`, or less where the store is small.
        by_value: send every row through the coordinator. It shows what that costs, and is good for nothing else.
        drop_last: leave the last, incomplete step out instead of completing it with filler rows.
        length: tokens a row, L; by default the budget's.
        strict: raise a sample's error instead of counting it.
        max_failures: raise when so many samples fail one after the other.
        address: of a cluster, as in `ray_start.Session`.

    Attributes:
        name: by which ranks find it.
        address: of its cluster, for ranks in other programs.
        placement: where actors are asked to be.
        reason: why, where it was "auto".

    Raises:
        ValueError: a number out of range, sizes that are not complete, more bytes than the object store can hold, more
            CPUs than there are, or a coordinator of this name that serves another plan.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        plan: Plan,
        *,
        name: str = NAME,
        batch_size: int = 8,
        world_size: int = 1,
        num_workers: int | None = None,
        num_cpus: float = 1.0,
        placement: Placement | Literal["auto"] = "together",
        step_seconds: float | None = None,
        max_concurrency: int = MAX_CONCURRENCY,
        depth: int | None = None,
        max_bytes: int | None = None,
        by_value: bool = False,
        drop_last: bool = False,
        length: int | None = None,
        strict: bool = False,
        max_failures: int = MAX_FAILURES,
        address: str | None = None,
    ) -> None:
        check_ranks(batch_size, 0, world_size)
        if placement == "auto":
            check_placeable(placement, num_cpus)
        else:
            check_placement(placement, num_cpus)
        if step_seconds is not None and not 0 < step_seconds < math.inf:
            raise ValueError(f"step_seconds is {step_seconds}: it must be above 0, and finite")
        depth = 3 * batch_size if depth is None else depth
        if depth < batch_size:
            raise ValueError(f"a depth of {depth} rows never holds a batch of {batch_size}: give at least that many")
        if not plan.sizes.complete:
            raise ValueError("the plan's sizes are not complete: measure all samples first, without lazy=True")
        build: Any = RowBuilder(source, encoder, plan.sizes, strict=strict)
        terms = Terms(
            plan=plan.fingerprint,
            batch_size=batch_size,
            world_size=world_size,
            drop_last=drop_last,
            length=row_length(plan.budget, length),
            pad_id=encoder.pad_id,
            strict=strict,
            max_failures=max_failures,
        )
        self.name = name
        self._is_open = True
        self._is_over = threading.Event()
        self._listener: threading.Thread | None = None
        weakref.finalize(self, self._is_over.set)
        self._session = Session(address, num_cpus=(num_workers or 1) * num_cpus)
        try:
            self.address = self._session.address
            pickler = self._session.ray.cloudpickle
            workers = num_workers or max(1, int(ray_start.total_cpus() / (num_cpus or 1)))
            check_cpus(workers, num_cpus)
            self.reason = ""
            if placement == "auto":
                wanted = math.inf if step_seconds is None else world_size * batch_size / step_seconds
                at_once = min(workers, ray_start.total_cpus())
                chosen = choose(measured(build, plan, ranks=world_size, wanted=wanted, workers=at_once))
                placement, self.reason = chosen.placement, chosen.reason
                print(f"mmdp: workers are placed {placement}: {self.reason}", file=sys.stderr)
            self.placement: Placement = placement
            job = Job(
                terms=terms,
                plan=pickler.dumps(plan),
                build=pickler.dumps(traced(build) if spans.is_on() else build),
                path=sys.path,
                depth=depth,
                max_bytes=_bytes_per_rank(max_bytes, world_size),
                by_value=by_value,
                num_workers=workers,
                num_cpus=num_cpus,
                max_concurrency=max_concurrency,
                placement=self.placement,
                maker=token_hex(8),
                node=self._session.ray.get_runtime_context().get_node_id(),
            )
            self._start(job)
        except BaseException:
            self._session.close()
            raise
        weakref.finalize(self, self._session.close)

    def _start(self, job: Job) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "name": self.name,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_restarts": 0,  # what it owned would be gone: a new one starts from the ranks' state
            "max_concurrency": 1000,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(job.node, soft=False),
        }
        # Of several that start it at once, one is its maker; the others get a handle to the same.
        self._actor = self._session.ray.remote(Dealer).options(**options, get_if_exists=True).remote(job)
        there, maker = answer(self._actor.terms.remote(), f"the coordinator {self.name!r}", _START_SECONDS)
        self._is_maker = maker == job.maker
        if self._is_maker:
            self._listener = threading.Thread(
                target=_listen,
                args=(self._actor, self.name, self._is_over),
                name=f"mmdp-listener-{self.name}",
                daemon=True,
            )
            self._listener.start()
        if there != job.terms:
            raise ValueError(
                f"the coordinator {self.name!r} serves other terms ({there}) than asked for ({job.terms}): give this "
                "one another name, or wait until that run has ended"
            )

    def stats(self) -> dict[str, Any]:
        """Counters since the start.

        | key | is |
        |---|---|
        | steps, rows, bytes | dealt to ranks: also what their readers hold, which no trainer may ever get |
        | bytes_inline | of rows under 100 KB, which Ray sends with the answer of a call |
        | bytes_by_value | that went through the coordinator because of `by_value` |
        | objects | that were put into the object store |
        | peak_bytes | in flight for all ranks, at most |
        | store_bytes | in the object stores of all nodes now, whoever put them there |
        | ready | rank to rows that lie ready for it |
        | ranks | rank to its node |
        | workers | node to the number of workers on it that have come up |
        | worker_pids, deaths | their processes, each as its node numbers it; how many are known to have died |
        | pid, peak_memory, own_memory | of the coordinator: its process, bytes at most, bytes now |
        | store_memory | bytes of the object store that it has looked at |

        A death is known within moments where the worker has rows in work, else when it is next asked for one: a worker
        that dies idle, while windows are full or no rank reads, is counted, and replaced, only then.
        """
        stats: dict[str, Any] = answer(self._actor.stats.remote(), f"the coordinator {self.name!r}", _CALL_SECONDS)
        return stats

    def close(self) -> None:
        """Lets go; whoever started the coordinator ends it, once the ranks have left."""
        if not self._is_open:
            return
        self._is_open = False
        who = f"the coordinator {self.name!r}"
        try:
            if self._is_maker:
                with letting_go():
                    # Ranks of this program are over with it, whether they said so or not.
                    gone = self._actor.all_gone.remote(_LEAVE_SECONDS, program_id())
                    answer(gone, who, _LEAVE_SECONDS + _CALL_SECONDS)
                    answer(self._actor.close.remote(), who, _CALL_SECONDS)
                    self._session.ray.kill(self._actor)
        finally:
            self._is_over.set()
            if self._listener is not None:
                self._listener.join()
            del self._actor
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _listen(actor: Any, name: str, is_over: threading.Event) -> None:
    """Warns here of what the coordinator and its workers warn of, until it has gone or nobody cares."""
    with contextlib.suppress(CallStopped), letting_go():
        while True:
            repeat(answer(actor.heard.remote(), f"the coordinator {name!r}", math.inf, is_over.is_set))


def _bytes_per_rank(max_bytes: int | None, world_size: int) -> int:
    store = ray_start.store_bytes()
    most = int(STORE_SHARE * store / world_size)
    if max_bytes is None:
        return min(MAX_BYTES, most)
    if max_bytes > most:
        raise ValueError(
            f"{max_bytes:,} bytes in flight for each of {world_size} ranks are too much for an object store of "
            f"{store:,} bytes: at most {STORE_SHARE:.0%} of it for all, {most:,} for each, so that nothing is spilled "
            "to disk. Give less, or start Ray with a larger object_store_memory"
        )
    return max_bytes
