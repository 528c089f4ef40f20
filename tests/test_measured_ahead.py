"""Lazy sizes measured in a thread beside the loop: same batches, the same errors, and no thread left."""

import threading

import pytest
from odd_sources import Unreadable
from runs import digest

import mmdp
from mmdp.measured_ahead import measured_ahead

WINDOW = {"window": 8, "block": 2, "buffer": 16}


def measuring() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mmdp-measure"]


def lazy_plan(parts, cache, source=None):
    sizes = mmdp.measure(source or parts.source, parts.encoder, cache=cache, lazy=True)
    return mmdp.plan(sizes, mmdp.Budget(64, 3), **WINDOW)


def test_batches_are_those_of_measured_sizes(parts, tmp_path):
    """Law 4: what is measured when changes no row."""
    plan = lazy_plan(parts, tmp_path)
    assert not plan.sizes.complete
    lazy = mmdp.Loader(parts.source, parts.encoder, plan, batch_size=2)
    seen = [digest(batch) for batch in lazy]
    assert [digest(batch) for batch in mmdp.Loader(*parts, batch_size=2)] == seen
    assert plan.sizes.complete
    assert [] == measuring()


def test_the_thread_measures_ahead_and_ends_with_the_block(parts, tmp_path):
    """It gets through the whole epoch though nobody asks for a row; and leaves when told to."""
    plan = lazy_plan(parts, tmp_path)
    with measured_ahead(plan, 0):
        (thread,) = measuring()
        thread.join(60)
        assert plan.sizes.complete
    assert [] == measuring()
    plan = lazy_plan(parts, tmp_path / "again")
    loader = mmdp.Loader(parts.source, parts.encoder, plan, batch_size=2)
    next(iter(loader))
    loader.close()
    assert [] == measuring()


def test_an_error_is_raised_where_the_plan_asks(parts, tmp_path):
    """A disk that fails is no reason to skip a sample, nor to lose the error in a thread."""
    source = Unreadable(parts.source, 5, 10_000, tmp_path)
    loader = mmdp.Loader(source, parts.encoder, lazy_plan(parts, tmp_path / "cache", source), batch_size=2)
    with pytest.raises(OSError, match="the disk is tired"):
        list(loader)
    assert [] == measuring()
