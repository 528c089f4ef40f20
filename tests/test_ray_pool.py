"""Laws of who works on which item, with workers that need no Ray; real ones are in `test_ray_executor.py`."""

import asyncio
from itertools import count

import pytest

from mmdp.ray_actor import Function, Place, Worker
from mmdp.ray_job import Run
from mmdp.ray_pool import WorkerPool
from mmdp.ray_staff import Seat
from mmdp.wire import WorkerError

AT_ONCE = 3


class Hand(Worker):
    """A worker that has an item until `finish`."""

    def __init__(self, node: str = "") -> None:
        super().__init__(None, Place(node, 0), loaded={"f"})
        self.begun: list[object] = []
        self.most = 0
        self.may_finish = asyncio.Event()

    async def work(self, function, item, run, timeout):
        self.begun.append(item)
        self.most = max(self.most, len(self.jobs))
        await self.may_finish.wait()
        return None, item

    def drop(self, run):
        """Nothing is kept here."""

    def make_sure(self):
        """There is no process."""


class Counting(WorkerPool):
    """Counts how often it looks at an item."""

    looks = 0

    def _is_settled(self, job):
        self.looks += 1
        return super()._is_settled(job)


def pool_of(*hands: Hand) -> Counting:
    pool = Counting(num_cpus=1, max_concurrency=AT_ONCE, placement="together")
    pool.staff.seats = [Seat("", hand) for hand in hands]
    return pool


def run_of(pool: WorkerPool, number: int = 0, digest: str = "f") -> Run:
    function = Function(digest, None, num_runs=1)
    pool.staff._functions[digest] = function
    return Run(number, function)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_many_that_wait_cost_no_more_than_few():
    """64 ranks have some 1,500 rows waiting: each is looked at a few times, not at every step of every other one."""

    async def main():
        hands = Hand(), Hand()
        pool = pool_of(*hands)
        run = run_of(pool)
        outcomes = [pool.call(run, number) for number in range(2000)]
        await settled()
        assert [AT_ONCE, AT_ONCE] == [len(hand.begun) for hand in hands]
        for hand in hands:
            hand.may_finish.set()
        await asyncio.gather(*outcomes)
        assert 2000 == sum(len(hand.begun) for hand in hands)
        assert AT_ONCE == max(hand.most for hand in hands)
        assert pool.looks < 4 * 2000

    asyncio.run(main())


def test_items_are_begun_in_order():
    async def main():
        hand = Hand()
        pool = pool_of(hand)
        run = run_of(pool)
        numbers = count()
        outcomes = [pool.call(run, next(numbers)) for _ in range(20)]
        hand.may_finish.set()
        built = await asyncio.gather(*outcomes)
        assert [one.block for one in built] == hand.begun

    asyncio.run(main())


def test_an_item_that_nobody_has_the_function_for_holds_up_no_other():
    """It stays where it was in the queue, and goes first once the function has come."""

    async def main():
        hand = Hand()
        pool = pool_of(hand)
        known, unknown = run_of(pool), run_of(pool, 1, "g")
        waiting = [pool.call(unknown, number) for number in range(3)]
        done = [pool.call(known, number) for number in range(10)]
        hand.may_finish.set()
        await asyncio.gather(*done)
        assert not any(one.done() for one in waiting)
        later = pool.call(unknown, 3)
        hand.loaded.add("g")
        pool._deal()
        order = [one.block for one in await asyncio.gather(*waiting, later)]
        assert order == hand.begun[10:]

    asyncio.run(main())


def test_a_run_that_ends_leaves_nothing_in_the_queue():
    """And the items of others come next."""

    async def main():
        hand = Hand()
        pool = pool_of(hand)
        first, second = run_of(pool), run_of(pool, 1)
        dropped = [pool.call(first, number) for number in range(10)]
        kept = [pool.call(second, number) for number in range(2)]
        await settled()
        pool.end(first)
        assert all(one.cancelled() for one in dropped)
        assert 2 == len(pool._queue)
        hand.may_finish.set()
        await asyncio.gather(*kept)
        await pool.staff.close()

    asyncio.run(main())


def test_a_suspect_goes_alone_and_before_those_that_wait():
    """It may end its actor: nothing else is with it."""

    async def main():
        hand = Hand()
        pool = pool_of(hand)
        run = run_of(pool)
        first = [pool.call(run, number) for number in range(AT_ONCE)]
        rest = [pool.call(run, number) for number in range(10, 20)]
        suspect = pool.call(run, 99, is_suspect=True)
        await settled()
        hand.may_finish.set()
        await asyncio.gather(*first, *rest, suspect)
        numbers = [one.block for one in await asyncio.gather(*first, suspect, *rest)]
        assert numbers == hand.begun

    asyncio.run(main())


def test_a_suspect_whose_function_can_not_be_loaded_waits_for_nobody():
    """Its new actor lives, and can't take the function: the item is refused, and the seat is free for others."""

    async def main():
        hand = Hand()
        pool = pool_of(hand)
        known, broken = run_of(pool), run_of(pool, 1, "g")
        suspect = pool.call(broken, 0, is_suspect=True)
        other = pool.call(known, 1)
        await settled()
        assert not suspect.done()
        broken.function.failure = WorkerError("no such module")
        pool._deal()
        with pytest.raises(WorkerError, match="no such module"):
            await suspect
        hand.may_finish.set()
        pool._deal()
        await asyncio.wait_for(other, 5)

    asyncio.run(main())
