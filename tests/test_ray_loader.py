"""Laws of a loader whose rows are built by Ray actors: the batches of inline, bit for bit, whoever dies."""

import os
from collections.abc import Iterator
from itertools import islice

import pytest
from odd_sources import Kills
from ray_work import Plain
from runs import Parts, digest, make_parts

import mmdp
from mmdp import samples_ahead
from mmdp.loader import Loader
from mmdp.ray_executor import RayExecutor
from mmdp.refusals import Reason


@pytest.fixture(scope="module")
def kept(ray_cluster) -> Iterator[RayExecutor]:
    """Two actors for all tests, since each takes a while to start."""
    with RayExecutor(2, num_cpus=0.1) as actors:
        yield actors


def test_batches_are_those_of_inline(kept, tmp_path):
    """Law 7, law 12: tokens, pixels and state, epoch after epoch, after a break and from a state."""
    parts = make_parts(tmp_path)
    inline = Loader(*parts, batch_size=2, executor="inline")
    length = len(inline)
    wanted = [digest(batch) for _ in range(3) for batch in inline]
    loader = Loader(*parts, batch_size=2, executor=kept, max_bytes=2**25)
    seen = [digest(batch) for batch in loader]
    seen += [digest(batch) for batch in islice(loader, 3)]
    state = loader.state_dict()
    seen += [digest(batch) for batch in loader]
    assert wanted[: len(seen)] == seen
    again = Loader(*parts, batch_size=2, executor=kept, max_bytes=2**25)
    again.load_state_dict(state)
    assert wanted[length + 3] == digest(next(iter(again)))


def test_a_mix_is_built_by_actors_as_inline(kept, tmp_path):
    """Each actor opens the sources of the mixture that was sent to it."""
    one, other = make_parts(tmp_path / "one"), make_parts(tmp_path / "other", (0, 2), repeat=6)
    source = mmdp.mix([(one.source, 0.5), (other.source, 2)])
    plan = mmdp.plan(mmdp.measure(source, one.encoder), mmdp.Budget(64, 3), window=8, block=2, buffer=16)
    loaders = [
        Loader(source, one.encoder, plan, batch_size=2, executor=each, max_bytes=2**25) for each in ("inline", kept)
    ]
    inline, by_actors = ([digest(batch) for batch in loader] for loader in loaders)
    assert len(inline) > 4
    assert inline == by_actors


def test_a_loader_makes_its_own_actors_and_ends_them(ray_cluster):
    """By name; the arrays of a batch are its own, whatever the store does."""
    plain = Plain(12, side=200)
    sizes = mmdp.measure(plain, plain)
    parts = Parts(plain, plain, mmdp.plan(sizes, mmdp.Budget(64, 2)))
    options = {"batch_size": 2, "max_bytes": 2**25}
    loader = Loader(*parts, executor="ray", num_workers=1, **options)
    batches = list(loader)
    assert [digest(batch) for batch in Loader(*parts, executor="inline", **options)] == [digest(b) for b in batches]
    loader.close()
    for batch in batches:
        batch.images.pixels.add_(1)  # memory of the store, which is gone, would end the program here
        batch.labels.add_(1)


@pytest.mark.filterwarnings("ignore:a worker process ended:RuntimeWarning")
def test_a_sample_that_kills_costs_only_itself(kept):
    """RAY-01: refused by name, counted; the others of its row come, and so does every other row."""
    plain = Plain(40)
    sizes = mmdp.measure(plain, plain)
    plan = mmdp.plan(sizes, mmdp.Budget(64, 2))
    row = next(row.tolist() for row in plan.epoch(0) if len(row) == 2)
    loader = Loader(Kills(plain, (row[0],), os.getpid()), plain, plan, batch_size=2, executor=kept, max_bytes=2**25)
    with pytest.warns(RuntimeWarning, match="a worker actor died"):
        batches = list(loader)
    assert {"killed_worker": 1} == loader.skipped
    assert {row[0]: Reason.KILLED_WORKER} == {i: why for batch in batches for i, why in batch.skipped.items()}
    seen = [sample for batch in batches for samples in batch.samples for sample in samples]
    assert sorted(set(range(40)) - {row[0]}) == sorted(seen)


def test_rows_are_fetched_on_an_event_loop(monkeypatch):
    """The builder has the two phases that an actor looks for, and `fetch` asks for the row's samples."""
    import asyncio

    from mmdp.ray_worker import TwoPhase
    from mmdp.row_builder import RowBuilder

    asked = []

    async def fetch_samples(source, indices, *, images):
        asked.append((list(indices), images))
        return {}

    monkeypatch.setattr("mmdp.row_builder.fetch_samples", fetch_samples)
    build = RowBuilder(Plain(4), Plain(4))
    assert isinstance(build, TwoPhase)
    assert asyncio.iscoroutinefunction(build.fetch)
    assert build((0, 3)).samples == build.assemble(asyncio.run(build.fetch((0, 3)))).samples
    assert [([0, 3], True)] == asked
    assert samples_ahead.fetch_samples is not fetch_samples
