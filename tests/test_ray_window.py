"""Laws of a rank's window: never more in flight than said, whole steps, and an end that lets go of all. No Ray."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest

from mmdp.ray_window import Row, Window
from mmdp.steps import Place


class Pool:
    """Counts runs; what it would build, the tests build."""

    def __init__(self) -> None:
        self.open: list[object] = []

    def begin(self, build):
        self.open.append(run := SimpleNamespace(build=build))
        return run

    def end(self, run):
        self.open.remove(run)


class Filling:
    """Fills a window with steps of `batch_size` rows, each of these bytes, as the coordinator does."""

    def __init__(self, weights, *, batch_size=2, depth=6, max_bytes=10**9, error=None):
        self.window = Window(1, depth, max_bytes, Pool(), b"build")
        self.begun: list[Row] = []
        self.may_finish = asyncio.Event()
        self.weights, self.batch_size, self.error = weights, batch_size, error
        self.window.start(self.produce())

    async def produce(self):
        for start in range(0, len(self.weights), self.batch_size):
            mine = self.weights[start : start + self.batch_size]
            held = self.window.add([Place((start,), 0, start, 0)] * len(mine), {"cursor": start})
            for weight in mine:
                await self.window.room(held, weight)
                row = Row((start,), weight)
                self.begun.append(row)
                self.window.begin(held, row, self.build())
        if self.error is not None:
            raise self.error

    async def build(self):
        await self.may_finish.wait()


class Block:
    """Stands for what was built."""


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_never_more_rows_than_said():
    """Law 10: so many rows are begun; each step that is released makes room for its rows."""

    async def run():
        filling = Filling([1] * 20, depth=5)
        await settled()
        seen = [len(filling.begun)]
        for _ in range(3):
            await filling.window.next()
            filling.window.release(1)
            await settled()
            seen.append(len(filling.begun))
        assert [5, 7, 9, 11] == seen
        filling.window.end()

    asyncio.run(run())


def test_never_more_bytes_than_said():
    """Law 10 for bytes: what is begun weighs no more, except for the one step that the rank waits for.

    What was released last is let go where its bytes are wanted.
    """

    async def run():
        filling = Filling([40, 40, 30, 30, 10, 10, 90, 90, 10, 10], depth=10, max_bytes=100)
        await settled()
        loads = [filling.window.num_bytes]
        for _ in range(4):
            step = await filling.window.next()
            assert len(step.rows) == 2
            filling.window.release(1)
            await settled()
            loads.append(filling.window.num_bytes)
        assert [80, 80, 20, 180, 20] == loads
        filling.window.end()

    asyncio.run(run())


@pytest.mark.parametrize(("depth", "max_bytes", "full"), [(3, 10**9, "rows"), (10, 30, "bytes"), (10, 10**9, "")])
def test_what_is_full_is_said(depth, max_bytes, full):
    """The bound that the next row waits for; neither where all rows are begun, however few lie ready."""

    async def run():
        filling = Filling([10] * 8, depth=depth, max_bytes=max_bytes)
        await settled()
        assert full == filling.window.full
        for _ in range(3):
            await filling.window.next()
            filling.window.release(1)
            await settled()
        assert 8 == len(filling.begun)
        assert "" == filling.window.full
        filling.window.end()

    asyncio.run(run())


def test_references_outlive_those_of_the_rank():
    """Ray never forgets an object whose owner lets go before the borrower: so they go one release later, and all do."""

    async def run():
        filling = Filling([1] * 12, depth=12)
        await settled()
        rows = []
        for _ in range(4):
            step = await filling.window.next()
            for row in step.rows:
                row.parts.append(Block())
            rows.append([weakref.ref(row.parts[0]) for row in step.rows])
            del step, row
            filling.window.release(1)
            filling.begun.clear()
        filling.may_finish.set()
        await settled()
        gc.collect()
        assert [0, 0, 0, 2] == [sum(row() is not None for row in step) for step in rows]
        filling.window.end()
        assert filling.window.num_bytes == 0
        gc.collect()
        assert not any(row() for row in rows[-1])

    asyncio.run(run())


def test_steps_come_in_order_and_then_none():
    """Each once, with all of its rows begun; the last may be short."""

    async def run():
        filling = Filling([1] * 5, depth=4)
        steps = []
        while (step := await filling.window.next()) is not None:
            steps.append((step.number, len(step.rows)))
            filling.window.release(1)
        assert [(0, 2), (1, 2), (2, 1)] == steps
        assert filling.window.state == {"cursor": 4}

    asyncio.run(run())


def test_what_is_ready_is_told():
    """Rows that are built and not yet asked for."""

    async def run():
        filling = Filling([1] * 6, depth=4)
        await settled()
        assert 0 == filling.window.num_ready
        filling.may_finish.set()
        await settled()
        assert 4 == filling.window.num_ready
        await filling.window.next()
        assert 2 == filling.window.num_ready
        filling.window.end()

    asyncio.run(run())


def test_an_end_lets_go_of_all():
    """The pool hears of it; whoever waits for a step is told, and does not wait for ever."""

    async def run():
        filling = Filling([1] * 20, depth=2)
        await filling.window.next()
        waiting = asyncio.create_task(filling.window.next())
        await settled()
        assert not waiting.done()
        filling.window.end()
        with pytest.raises(RuntimeError, match="this loop was ended"):
            await asyncio.wait_for(waiting, 5)
        assert 0 == filling.window.num_bytes
        assert [] == filling.window._pool.open
        assert 2 == len(filling.begun)

    asyncio.run(run())


def test_an_error_of_the_plan_comes_behind_the_steps_before_it():
    """Nothing that was planned is lost."""

    async def run():
        filling = Filling([1] * 4, depth=4, error=KeyError("the token cache is gone"))
        for number in (0, 1):
            assert number == (await filling.window.next()).number
        with pytest.raises(KeyError, match="token cache"):
            await asyncio.wait_for(filling.window.next(), 5)
        filling.window.end()

    asyncio.run(run())
