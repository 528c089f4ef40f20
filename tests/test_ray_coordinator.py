"""Laws of the coordinator and its ranks: the batches of Loader, bit for bit, whoever dies; and what it costs."""

import asyncio
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from odd_sources import Kills
from ray_work import Plain, PlainThatWarns
from runs import Parts, digest, make_parts

import mmdp
from mmdp import ray_reader
from mmdp.loader import Loader
from mmdp.ray_call import CallStopped
from mmdp.ray_coordinator import Coordinator
from mmdp.ray_deal import Job, Terms
from mmdp.ray_dealer import Dealer
from mmdp.ray_fetch import BlockLost, fetch
from mmdp.ray_reader import RankReader
from mmdp.ray_start import used_store_bytes
from mmdp.refusals import DataError, Reason
from mmdp.seen import see
from mmdp.steps import Position

TESTS = Path(__file__).parent
SECONDS = 30  # in which a thing that ends "within seconds" must have ended, however busy the machine is
WORLD = 2


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Parts:
    return make_parts(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def wanted(parts) -> list[list[str]]:
    """For each rank, the digests of Loader's batches, epoch after epoch."""
    loaders = [Loader(*parts, batch_size=2, rank=rank, world_size=WORLD, executor="inline") for rank in range(WORLD)]
    return [[digest(batch) for _ in range(6) for batch in loader] for loader in loaders]


@pytest.fixture(scope="module")
def plain() -> Parts:
    """Samples that workers need no tokenizer for, since that takes most of their start."""
    return plain_parts(Plain(40))


def plain_parts(plain: Plain) -> Parts:
    sizes = mmdp.measure(plain, plain)
    return Parts(plain, plain, mmdp.plan(sizes, mmdp.Budget(64, 2), window=8, block=2, buffer=16))


@pytest.fixture(scope="module")
def coordinator(ray_cluster, parts) -> Iterator[Coordinator]:
    """One for many tests, since it and its workers take a while to start."""
    with Coordinator(*parts, name="shared", batch_size=2, world_size=WORLD, num_workers=2, num_cpus=0.1) as made:
        yield made


def readers(name: str, **options) -> list[RankReader]:
    return [RankReader(name, rank, WORLD, **options) for rank in range(WORLD)]


def in_step(ranks: list[RankReader], num_epochs: int = 1) -> list[list[str]]:
    """The digests of each rank's batches; all take the same number of steps."""
    seen: list[list[str]] = [[] for _ in ranks]
    for _ in range(num_epochs):
        for batches in zip(*ranks, strict=True):
            for rank, batch in enumerate(batches):
                seen[rank].append(digest(batch))
    return seen


def begins(wanted: list[list[str]], seen: list[list[str]], start: int = 0) -> bool:
    """Whether each rank has seen the batches that it must, from this one on."""
    return all(
        mine and all_of_it[start : start + len(mine)] == mine for all_of_it, mine in zip(wanted, seen, strict=True)
    )


def close(ranks: list[RankReader]) -> None:
    for rank in ranks:
        rank.close()


# The plan, in the actor's class, without Ray


@pytest.fixture
def dealer() -> Dealer:
    plain = plain_parts(Plain(400))
    terms = Terms(plain.plan.fingerprint, 2, WORLD, False, 64, 0, False, 10)
    job = Job(terms, pickle.dumps(plain.plan), b"", [], 6, 2**20, False, 1, 0.1, 1, "together", "", "")
    return Dealer(job)


def test_two_epochs_are_kept(dealer):
    """A coordinator that kept every plan would grow without end. Those that are kept are the same for all ranks."""
    kept, start = [], Position(dealer._steps(0)).state()
    for number in range(5):
        of_ranks = [dealer._begun(rank, start | {"epoch": number}).epoch for rank in range(WORLD)]
        assert [number] * WORLD == [epoch.number for epoch in of_ranks]
        assert of_ranks[0] is of_ranks[1]
        kept.append(weakref.ref(of_ranks[0]))
        del of_ranks
    gc.collect()
    assert [False, False, False, True, True] == [epoch() is not None for epoch in kept]
    assert 1 == dealer._epoch(1).number, "a rank that is far behind"
    assert {3, 4} == dealer._epochs.keys()


def test_an_epoch_is_planned_no_further_than_ranks_are(dealer):
    """The first rows of a large plan come at once: a rank that begins does not wait until all of it is packed."""
    state = Position(dealer._steps(0)).state()
    epoch = dealer._begun(0, state).epoch
    begun = epoch.num_bytes
    assert dealer._begun(1, state).epoch is epoch
    assert begun == epoch.num_bytes
    assert 0 < len(epoch)
    assert begun < epoch.num_bytes


# Law 7, law 12


def test_ranks_get_the_batches_of_a_loader(coordinator, parts, wanted):
    """Bit for bit, state and label tokens of the step too, epoch after epoch; together each sample once an epoch."""
    ranks = readers("shared")
    assert len(ranks[0]) == len(Loader(*parts, batch_size=2, world_size=WORLD, executor="inline"))
    seen = in_step(ranks, 2)
    assert begins(wanted, seen)
    assert 8 < len(seen[0])
    samples = [
        sample for batches in zip(*ranks, strict=True) for batch in batches for row in batch.samples for sample in row
    ]
    assert list(range(len(parts.source))) == sorted(samples)
    close(ranks)


def test_groups_of_ranks_have_coordinators_of_their_own(coordinator, parts, wanted):
    """The way out where one is too few: the plan is a function, so coordinators with the whole world need not talk."""
    with Coordinator(*parts, name="other group", batch_size=2, world_size=WORLD, num_workers=1, num_cpus=0.1):
        ranks = [RankReader("shared", 0, WORLD), RankReader("other group", 1, WORLD)]
        assert begins(wanted, in_step(ranks))
        close(ranks)


def test_a_state_resumes_exactly_here_and_in_a_loader(coordinator, parts, wanted):
    """Law 12: after any batch, whatever was read ahead; with another read-ahead; and between reader and loader."""
    for taken, ahead in ((1, 3), (4, 1), (6, 2)):
        ranks = readers("shared", ahead=ahead)
        for rank in ranks:
            loops = (batch for _ in range(2) for batch in rank)
            assert wanted[rank._rank][:taken] == [digest(batch) for batch in islice(loops, taken)]
        states = [json.dumps(rank.state_dict()) for rank in ranks]
        assert states[0] == states[1]
        assert len(states[0]) < 200
        close(ranks)
        again = readers("shared")
        for rank in again:
            rank.load_state_dict(json.loads(states[0]))
        assert begins(wanted, in_step(again, 1), taken)
        close(again)
        loader = Loader(*parts, batch_size=2, rank=1, world_size=WORLD, executor="inline")
        loader.load_state_dict(json.loads(states[0]))
        assert wanted[1][taken] == digest(next(iter(loader)))


def test_a_loop_that_is_left_goes_on(coordinator, wanted):
    """Law 9: nothing is lost and nothing comes twice; what was read ahead is built again; no thread is left."""
    ranks = readers("shared")
    for rank in ranks:
        seen = [digest(batch) for batch in islice(rank, 2)]
        for batch in rank:
            seen.append(digest(batch))
            break
        seen += [digest(batch) for batch in rank]
        assert wanted[rank._rank][: len(seen)] == seen
    assert not [thread for thread in threading.enumerate() if thread.name == "mmdp-ahead"]
    close(ranks)


def test_an_epoch_that_a_state_has_ended_does_not_come_again(coordinator, wanted):
    """`for epoch in range(state["epoch"], n): set_epoch(epoch)` goes on with the next epoch, as of a `Loader`."""
    first = readers("shared")
    before = in_step(first)
    state = first[0].state_dict()
    close(first)
    ranks = readers("shared")
    seen: list[list[str]] = [[], []]
    for rank in ranks:
        rank.load_state_dict(state)
    for epoch in range(state["epoch"], 2):
        for rank in ranks:
            rank.set_epoch(epoch)
        for mine, more in zip(seen, in_step(ranks), strict=True):
            mine += more
    assert begins(wanted, before)
    assert len(before[0]) - 2 < len(seen[0]) < len(before[0]) + 2, "one epoch"
    assert begins(wanted, seen, len(before[0]))
    close(ranks)


def test_a_reader_that_is_closed_ends_its_feed(coordinator, wanted):
    """In the midst of a loop over the feed, whose thread takes the batches: the loop ends, and no thread stays."""
    ranks = readers("shared")
    seen = []
    for batch in mmdp.feed(ranks[0], "cpu"):
        seen.append(digest(batch))
        if len(seen) == 2:
            ranks[0].close()
    assert wanted[0][:2] == seen
    assert not [thread for thread in threading.enumerate() if thread.name == "mmdp-ahead"]
    ranks[1].close()


def test_a_loop_that_waits_for_a_row_is_left_at_once(coordinator, wanted, monkeypatch):
    """Law 9: a row that is on its way over a slow link holds nobody up who wants it no more; the next loop gets it."""
    passed, waits = [], threading.Event()

    def stays_away(parts, seconds, is_stopped):
        if len(passed) < 2:  # the rows of the first batch
            passed.append(parts)
            return fetch(parts, seconds, is_stopped)
        waits.set()
        while not is_stopped():
            time.sleep(0.01)
        raise CallStopped

    ranks = readers("shared", ahead=1)
    with monkeypatch.context() as slow:
        slow.setattr(ray_reader, "fetch", stays_away)
        loop = iter(ranks[0])
        assert wanted[0][0] == digest(next(loop))
        assert waits.wait(SECONDS)
        start = time.monotonic()
        loop.close()
        assert time.monotonic() - start < 2
    assert wanted[0][1] == digest(next(iter(ranks[0])))
    close(ranks)


def test_epochs_may_be_chosen(coordinator, wanted, parts):
    """`set_epoch`, `rewind` and `len`, as those of a loader."""
    (rank, other) = readers("shared")
    loader = Loader(*parts, batch_size=2, world_size=WORLD, executor="inline")
    start = rank.state_dict()
    for one in (rank, loader):
        one.set_epoch(3)
    assert len(loader) == len(rank)
    assert [digest(batch) for batch in loader] == [digest(batch) for batch in rank]
    rank.rewind(start)
    assert wanted[0][0] == digest(next(iter(rank)))
    with pytest.raises(RuntimeError, match="load the state before the first loop"):
        rank.load_state_dict(start)
    with pytest.raises(ValueError, match="another plan, which differs in all of it, or the version of mmdp"):
        other.load_state_dict({**start, "plan": "another"})
    close([rank, other])


def test_another_world_and_batch_size_give_the_same_rows(ray_cluster, plain):
    """Law 12: a state of two ranks goes on with one rank and other batches, the last incomplete step dropped."""
    two = Loader(*plain, batch_size=2, world_size=WORLD, executor="inline")
    assert 2 == len(list(islice(two, 2)))
    state = two.state_dict()
    left = len(plain.plan.epoch(0)) - state["cursor"]
    options = {"batch_size": next(size for size in (3, 4, 5) if left % size), "drop_last": True}
    loader = Loader(*plain, executor="inline", **options)
    loader.load_state_dict(state)
    with (
        Coordinator(*plain, name="one", num_workers=1, num_cpus=0.1, placement="near", **options) as coordinator,
        RankReader("one") as rank,
    ):
        rank.load_state_dict(state)
        assert [digest(batch) for batch in loader] == [digest(batch) for batch in rank]
        assert loader.dropped == rank.dropped
        assert {coordinator.stats()["ranks"][0]: 1} == coordinator.stats()["workers"], "near is on the rank's node"
        assert loader.dropped


# Who dies


def test_a_worker_that_is_killed_costs_a_moment(coordinator, wanted):
    """Law 11: the same batches come."""
    before = coordinator.stats()
    ranks = readers("shared")
    seen: list[list[str]] = [[], []]
    for batches in zip(*ranks, strict=True):
        for rank, batch in enumerate(batches):
            seen[rank].append(digest(batch))
        if len(seen[0]) == 1:
            for pid in before["worker_pids"]:
                os.kill(pid, signal.SIGKILL)
    seen = [mine + more for mine, more in zip(seen, in_step(ranks), strict=True)]
    assert begins(wanted, seen)
    assert before["deaths"] + 1 <= coordinator.stats()["deaths"]
    assert [{}, {}] == [rank.skipped for rank in ranks]
    close(ranks)


def test_a_block_that_is_lost_is_made_again(coordinator, wanted, monkeypatch):
    """Law 11: a rank that can't have a row, since its node has gone, asks for it again, and gets the same one."""
    lost = []

    def lose_some(parts, *more):
        if len(lost) < 3:
            lost.append(parts)
            raise BlockLost("its node is gone")
        return fetch(parts, *more)

    monkeypatch.setattr(ray_reader, "fetch", lose_some)
    ranks = readers("shared")
    with pytest.raises(RuntimeError, match="was lost 3 times over, with its node"):
        next(iter(ranks[0]))
    lost.pop()
    assert begins(wanted, in_step(ranks))
    assert 4 == sum(rank.counts.lost for rank in ranks)
    close(ranks)


def test_a_sample_that_kills_is_left_out_as_in_a_loader(ray_cluster, plain):
    """A row that kills is built sample by sample: one image does not cost its neighbours; and it is counted."""
    row = next(row.tolist() for row in plain.plan.epoch(0) if len(row) == 2)
    bad = row[1]
    source = Kills(plain.source, (bad,), os.getpid())
    whole = {batch.samples: digest(batch) for batch in Loader(*plain, batch_size=2, executor="inline")}
    with (
        Coordinator(source, *plain[1:], name="killed", batch_size=2, num_workers=1, num_cpus=0.1) as coordinator,
        RankReader("killed") as rank,
    ):
        batches = list(rank)
        assert {"killed_worker": 1} == rank.skipped
        assert {bad: Reason.KILLED_WORKER} == {i: why for batch in batches for i, why in batch.skipped.items()}
        assert (row[0],) in [samples for batch in batches for samples in batch.samples]
        untouched = [batch for batch in batches if not batch.skipped]
        assert [whole[batch.samples] for batch in untouched] == [digest(batch) for batch in untouched]
        assert len(whole) - 1 == len(untouched)
        assert 2 <= coordinator.stats()["deaths"] <= 3, "with others, alone, and as a sample"


@pytest.fixture(scope="module")
def strict(ray_cluster, plain) -> Iterator[tuple[Coordinator, int]]:
    """For two ranks, in strict mode; and a sample near the end that can't be read. Its last test kills it."""
    gone = int(plain.plan.epoch(0)[-3][0])
    options = {"batch_size": 1, "world_size": WORLD, "num_workers": 1, "num_cpus": 0.1, "strict": True}
    with Coordinator(replace(plain.source, gone=gone), *plain[1:], name="strict", **options) as made:
        yield made, gone


def test_an_error_comes_at_its_place(strict, plain):
    """Law 8: in strict mode a bad sample is an error of its batch, with the row's name; all before it come, to all."""
    _, gone = strict
    ranks, errors = readers("strict", ahead=1), []
    for number, rank in enumerate(ranks):
        seen = []
        try:
            seen.extend(batch.samples for batch in rank)
        except DataError as error:
            errors.append(error)
        loader = Loader(*plain, batch_size=1, rank=number, world_size=WORLD, executor="inline")
        wanted = [batch.samples for batch in loader]
        bad = next((place for place, (row,) in enumerate(wanted) if gone in row), len(wanted))
        assert wanted[:bad] == seen
        if bad < len(wanted):
            assert f"sample {gone} is gone" in str(errors[0])
            assert str(wanted[bad][0]) in "".join(errors[0].__notes__)
            assert WORLD * bad == rank.state_dict()["cursor"] > WORLD
    assert 1 == len(errors)
    close(ranks)


def test_a_coordinator_that_dies_is_told_within_seconds(strict):
    """Law 11, RAY-08: every rank hears of it, in a loop or before it; closing all is no error then."""
    made, _ = strict
    ranks = readers("strict", ahead=1)
    loops = [iter(rank) for rank in ranks]
    next(loops[0])
    os.kill(made.stats()["pid"], signal.SIGKILL)
    start = time.monotonic()
    for loop in loops:
        with pytest.raises(RuntimeError, match=r"the coordinator 'strict' has died.*go on from the last state"):
            list(loop)
    assert time.monotonic() - start < SECONDS
    close(ranks)
    made.close()


def test_what_its_workers_warn_of_is_read_by_who_made_it(ray_cluster, plain, heard):
    """Law 11: through the coordinator, while the row waits; and no thread stays."""
    file, texts = heard
    source = PlainThatWarns(len(plain.source), heard=file)
    with (
        Coordinator(source, *plain[1:], name="warns", batch_size=2, num_workers=1, num_cpus=0.1) as made,
        RankReader("warns") as reader,
    ):
        assert len(made.stats()["ranks"]) == 1
        assert [digest(batch) for batch in Loader(*plain, batch_size=2)] == [digest(batch) for batch in reader]
    assert ["RuntimeWarning: told by an actor of Ray: item 0 waits"] == texts
    assert [] == [thread for thread in threading.enumerate() if thread.name == "mmdp-listener-warns"]


RANK = """
import json, pickle, sys
from pathlib import Path
sys.path[:0] = {path!r}
from mmdp.ray_reader import RankReader
from mmdp.seen import see
from mmdp.steps import Position

with RankReader("shared", 1, 2, address={address!r}) as reader:
    reader.load_state_dict(json.loads(sys.argv[1]))
    for batch in reader:
        print(json.dumps([see(batch).whole, reader.state_dict()]), flush=True)
        sys.stdin.readline()
"""


def rank_elsewhere(coordinator: Coordinator, state: dict) -> subprocess.Popen:
    path = [str(TESTS.parent), str(TESTS)]
    return subprocess.Popen(
        [sys.executable, "-c", RANK.format(path=path, address=coordinator.address), json.dumps(state)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_rank_in_another_process_and_its_death(coordinator, parts, wanted):
    """It gets its batches; killed, it disturbs nobody; another one goes on from its last state."""
    here = RankReader("shared", 0, WORLD)
    there = rank_elsewhere(coordinator, here.state_dict())
    code, state = json.loads(there.stdout.readline())
    loader = Loader(*parts, batch_size=2, rank=1, world_size=WORLD, executor="inline")
    assert see(next(iter(loader))).whole == code
    there.kill()
    there.wait()
    seen = [digest(batch) for batch in here]
    assert wanted[0][: len(seen)] == seen
    again = RankReader("shared", 1, WORLD)
    again.load_state_dict(state)
    assert wanted[1][1 : len(seen)] == [digest(batch) for batch in again]
    close([here, again])


def test_one_rank_in_two_places_is_told(coordinator, wanted):
    """A rank that begins a loop elsewhere ends the one it had: no row goes to two."""
    one, other = (RankReader("shared", 0, WORLD, ahead=1) for _ in range(2))
    loop = iter(one)
    next(loop)
    assert wanted[0][0] == digest(next(iter(other)))
    with pytest.raises(RuntimeError, match="rank 0 has begun another loop since"):
        list(loop)
    close([one, other])


@pytest.mark.parametrize(("is_replaced", "error"), [(True, RuntimeError), (False, asyncio.CancelledError)])
def test_a_step_that_another_loop_lets_go_of_is_told_as_that(dealer, is_replaced, error):
    """Rows that are waited for are cancelled with their loop, which Ray would raise as an error of its own."""

    class LetGo:
        loop, full = 1, None

        def release(self, _released):
            pass

        async def next(self):
            if is_replaced:
                dealer._windows.clear()
            raise asyncio.CancelledError

    dealer._windows[0] = LetGo()
    with pytest.raises(error):
        asyncio.run(dealer.take(0, 1, 0))


# What it costs


@pytest.fixture(scope="module")
def heavy() -> Parts:
    """Forty images of 3 MB; a row has two samples, or three."""
    return plain_parts(Plain(80, side=1000))


@pytest.mark.parametrize("by_value", [False, True])
def test_no_tensor_goes_through_the_coordinator(ray_cluster, heavy, by_value):
    """Its process looks at less than 1 % of the bytes, unless it passes them on by value; ranks get the same."""
    options = {"batch_size": 4, "max_bytes": 2**25}
    with (
        Coordinator(*heavy, name="heavy", num_workers=1, num_cpus=0.1, by_value=by_value, **options) as coordinator,
        RankReader("heavy", ahead=1) as rank,
    ):
        before = coordinator.stats()
        seen = [digest(batch) for batch in rank]
        after = coordinator.stats()
        num_bytes, num_rows = 40 * 3 * 1000 * 1000, sum(any(row % 2) for row in heavy.plan.epoch(0))
        assert num_bytes <= after["bytes"] == rank.counts.bytes <= 1.01 * num_bytes
        looked_at = after["store_memory"] - before["store_memory"]
        grown = after["peak_memory"] - before["peak_memory"]
        if by_value:
            assert after["bytes"] == after["bytes_by_value"]
            assert looked_at > 2**23, "the measure shows what passes through"
            assert num_rows + len(seen) == after["objects"]
        else:
            assert 0 == after["bytes_by_value"]
            assert after["bytes_inline"] < num_bytes / 100, "rows without an image come with the answer"
            assert looked_at < num_bytes / 100
            assert grown - looked_at < num_bytes / 10
            assert num_rows == after["objects"], "one a row that has an image"
        assert 0 < after["peak_bytes"] <= 2**25
    assert [digest(batch) for batch in Loader(*heavy, batch_size=4, executor="inline")] == seen


def test_the_store_is_empty_behind_a_loop(ray_cluster):
    """References are released: what was read is gone, also where a loop was left in its midst."""
    end = time.monotonic() + SECONDS
    while (left := used_store_bytes()) > 2**21 and time.monotonic() < end:
        time.sleep(0.2)
    assert left <= 2**21


# What a user may get wrong


def test_terms_must_be_the_same(coordinator, parts):
    """Another plan under a name that is taken, another world size, a rank that is not there, or no coordinator."""
    with pytest.raises(ValueError, match="the coordinator 'shared' serves other terms"):
        Coordinator(*parts, name="shared", batch_size=3, world_size=WORLD)
    joined = Coordinator(*parts, name="shared", batch_size=2, world_size=WORLD, num_workers=1)
    joined.close()
    assert coordinator.stats()["workers"], "who joins does not end it"
    with pytest.raises(ValueError, match="rank 0 is of 3 ranks, and this coordinator deals to 2"):
        RankReader("shared", 0, 3)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        RankReader("shared", 2, 2)
    with pytest.raises(RuntimeError, match=r"no coordinator 'nobody' on the cluster at .* within 0 s: start one"):
        RankReader("nobody", patience=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4, "depth": 3}, "a depth of 3 rows never holds a batch of 4"),
        ({"max_bytes": 10**9, "world_size": 2}, "1,000,000,000 bytes in flight for each of 2 ranks are too much"),
        ({"placement": "far"}, "no placement 'far'"),
        ({"placement": "near", "num_cpus": 0}, "num_cpus is 0, with placement 'near'"),
        ({"placement": "auto", "num_cpus": 0}, "num_cpus is 0, with placement 'auto'"),
        ({"num_workers": 10**6}, "1000000 workers of 1 CPUs ask for"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"length": 3}, "rows of 3 tokens"),
    ],
)
def test_wrong_arguments_are_told(ray_cluster, parts, options, message):
    with pytest.raises(ValueError, match=message):
        Coordinator(*parts, name="wrong", **options)


def test_sizes_must_be_complete(ray_cluster, parts, tmp_path):
    """A plan that measures as it goes can't be sent to another process."""
    sizes = mmdp.measure(parts.source, parts.encoder, lazy=True, cache=tmp_path)
    plan = mmdp.plan(sizes, parts.plan.budget)
    with pytest.raises(ValueError, match="sizes are not complete: measure all samples first"):
        Coordinator(parts.source, parts.encoder, plan, name="lazy")
