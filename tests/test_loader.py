"""Laws of `loader.py`: every sample once, the same batches from every executor, ranks in step, failures counted."""

import errno
from collections import Counter
from itertools import chain

import pytest
from odd_sources import Exact, Unreadable
from runs import Parts, digest, make_parts, rows_of
from small import tokenizer, write_data
from torch.utils.data import DataLoader

import mmdp
from mmdp.loader import Loader
from mmdp.packed_dataset import PackedDataset
from mmdp.records import IGNORE
from mmdp.refusals import DataError, Reason

pytestmark = pytest.mark.timeout(120)


def samples_of(batches) -> list[int]:
    return [sample for batch in batches for row in batch.samples for sample in row]


def data_loader(parts: Parts, batch_size: int, rank: int = 0, world_size: int = 1, **options) -> DataLoader:
    dataset = PackedDataset(*parts, **options)
    sampler = dataset.sampler(batch_size, rank, world_size)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)


# What comes out


def test_every_executor_gives_the_same_batches(parts, any_executor):
    """Laws 1, 7, 12, RES-01: each sample once an epoch, epochs differ, and all is the same bit for bit."""
    loader = Loader(*parts, batch_size=3, executor=any_executor)
    epochs = [list(loader) for _ in range(2)]
    again = Loader(*parts, batch_size=3, executor="inline")
    for epoch in epochs:
        assert list(range(40)) == sorted(samples_of(epoch))
        assert [digest(batch) for batch in again] == [digest(batch) for batch in epoch]
        assert parts.plan.sizes.tokens.sum() == sum(batch.num_tokens for batch in epoch)
        assert parts.plan.sizes.images.sum() == sum(len(batch.images) for batch in epoch) > 0
    assert samples_of(epochs[0]) != samples_of(epochs[1])
    assert {} == loader.skipped == loader.dropped


@pytest.mark.parametrize(("depth", "max_bytes"), [(1, 1), (3, 2**20), (1000, 2**30)])
def test_what_is_in_flight_changes_no_batch(parts, depth, max_bytes):
    """Law 10: less than a batch in flight, or more than an epoch."""
    wanted = [digest(batch) for batch in Loader(*parts, batch_size=3, executor="inline")]
    loader = Loader(*parts, batch_size=3, executor="threads", num_workers=2, depth=depth, max_bytes=max_bytes)
    assert wanted == [digest(batch) for batch in loader]


def test_a_data_loader_gives_the_same_batches(parts):
    """The rows of the plan by number, in order, or by `sampler`; the latter is what `Loader` gives, state and all."""
    wanted = list(Loader(*parts, batch_size=3, executor="inline"))
    assert [digest(batch) for batch in wanted] == [digest(batch) for batch in data_loader(parts, 3)]
    for rank in range(2):
        of_rank = Loader(*parts, batch_size=3, rank=rank, world_size=2, executor="inline")
        assert [digest(batch) for batch in of_rank] == [digest(batch) for batch in data_loader(parts, 3, rank, 2)]
    dataset = PackedDataset(*parts)
    assert len(parts.plan.epoch(0)) == len(dataset)
    plain = list(DataLoader(dataset, batch_size=3, shuffle=False, collate_fn=dataset.collate))
    assert [row for batch in wanted for row in batch.samples if row] == [
        row for batch in plain for row in batch.samples
    ]
    assert {None} == {batch.state for batch in plain}
    dataset.set_epoch(1)
    assert [tuple(row) for row in parts.plan.epoch(1)] == [dataset[row].samples for row in range(len(dataset))]
    assert dataset[len(dataset) - 1].samples == dataset[-1].samples
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 2), (2, 1), (3, 2), (4, 3)])
def test_ranks_take_equal_steps_and_share_the_epoch(parts, world_size, batch_size, drop_last):
    """Law 12, WRK-06, WRK-07: each row to one rank; fillers and dropped samples counted; the step's labels known."""
    ranks = [
        Loader(*parts, batch_size=batch_size, rank=rank, world_size=world_size, drop_last=drop_last, executor="inline")
        for rank in range(world_size)
    ]
    rows = [tuple(map(int, row)) for row in parts.plan.epoch(0)]
    step = world_size * batch_size
    num_steps = len(rows) // step if drop_last else -(-len(rows) // step)
    assert [num_steps] * world_size == [len(rank) for rank in ranks]
    cursor = fillers = 0
    for batches in zip(*ranks, strict=True):
        expected = rows[cursor : cursor + step]
        cursor += len(expected)
        assert Counter(expected) == Counter(row for batch in batches for row in batch.samples if row)
        assert {batch_size} == {len(batch.samples) for batch in batches}
        assert {sum(batch.label_tokens for batch in batches)} == {batch.step_label_tokens for batch in batches}
        assert [{"epoch": 0, "cursor": cursor}] * world_size == [
            {name: batch.state[name] for name in ("epoch", "cursor")} for batch in batches
        ]
        fillers += sum(batch.filler_rows for batch in batches)
    lost = sum(map(len, rows[cursor:]))
    assert (0 if drop_last else num_steps * step - len(rows)) == fillers
    assert [{0: lost} if lost else {}] * world_size == [rank.dropped for rank in ranks]
    assert drop_last or lost == 0


def test_filler_rows_are_padding_and_nothing_else(parts):
    """They count neither as padding tokens nor as failures, and carry no label."""
    last = list(Loader(*parts, batch_size=11, executor="inline"))[-1]
    fillers = [row for row, samples in enumerate(last.samples) if not samples]
    assert len(fillers) == last.filler_rows > 0
    assert (last.segments[fillers] == 0).all()
    assert (last.labels[fillers] == IGNORE).all()
    assert (last.input_ids[fillers] == parts.encoder.pad_id).all()
    real = len(last.samples) - len(fillers)
    assert real * last.segments.shape[1] - last.num_tokens == last.padded_tokens


def test_the_stated_length_is_true(parts):
    """PACK-12: before a loop, within one, after one that was left early, and after `set_epoch`."""
    loader = Loader(*parts, batch_size=2, executor="inline")
    for epoch in range(3):
        whole = len(loader)
        for taken, _ in enumerate(loader):
            left = whole - taken - 1
            if left:
                assert left == len(loader)
        assert taken + 1 == whole
        assert len(loader) == -(-len(parts.plan.epoch(epoch + 1)) // 2)
    next(iter(loader))
    left = len(loader)
    assert left == len(list(loader))
    loader.set_epoch(1)
    assert -(-len(parts.plan.epoch(1)) // 2) == len(loader) == len(list(loader))


def test_an_epoch_is_chosen_also_out_of_a_loop(parts):
    """`set_epoch` ends an open loop: no state names an epoch whose rows it does not hold."""
    loader = Loader(*parts, batch_size=2, executor="threads", num_workers=2)
    loop = iter(loader)
    next(loop)
    loader.set_epoch(3)
    assert [] == list(loop)
    assert (3, 0) == (loader.state_dict()["epoch"], loader.state_dict()["cursor"])
    assert [digest(batch) for batch in loader] == [digest(batch) for batch in fresh(parts, 3)]
    loader.set_epoch(3)  # done: once more
    next(iter(loader))
    loader.set_epoch(3)  # in its middle: on
    assert 2 == loader.state_dict()["cursor"]


def test_an_epoch_that_a_state_has_ended_does_not_come_again(parts):
    """The loop of torch, `for epoch in range(state["epoch"], n): set_epoch(epoch)`, after each batch of two epochs."""
    wanted = [[digest(batch) for batch in fresh(parts, epoch)] for epoch in range(3)]
    loader = Loader(*parts, batch_size=2, executor="inline")
    states = [batch.state for _ in range(2) for batch in loader]
    for seen, state in enumerate(states, 1):
        resumed = Loader(*parts, batch_size=2, executor="inline")
        resumed.load_state_dict(state)
        rest = []
        for epoch in range(state["epoch"], 3):
            resumed.set_epoch(epoch)
            assert len(resumed) == (
                len(list(chain(*wanted[: epoch + 1]))) - seen if epoch == state["epoch"] else len(wanted[epoch])
            )
            rest += [digest(batch) for batch in resumed]
        assert list(chain(*wanted))[seen:] == rest
    resumed = Loader(*parts, batch_size=2, executor="inline")
    resumed.load_state_dict(states[len(wanted[0]) - 1])
    assert wanted[1] == [digest(batch) for batch in resumed], "without `set_epoch` the next one comes at once"
    resumed.set_epoch(1)  # in the same run: asked for once more, it comes once more
    assert wanted[1] == [digest(batch) for batch in resumed]


def fresh(parts: Parts, epoch: int) -> Loader:
    loader = Loader(*parts, batch_size=2, executor="inline")
    loader.set_epoch(epoch)
    return loader


def test_a_longer_row_is_padding(parts):
    """`length` pads beyond the budget; a shorter one could not hold the plan's rows."""
    batch = next(iter(Loader(*parts, batch_size=2, executor="inline", length=100)))
    assert (2, 100) == tuple(batch.input_ids.shape)
    for make in (Loader, PackedDataset):
        with pytest.raises(ValueError, match="rows of 63 tokens can't hold the 64"):
            make(*parts, length=63)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1 of 1"),
        ({"executor": "fast"}, "no executor is called 'fast'"),
        ({"num_workers": 0}, "0 workers"),
    ],
)
def test_wrong_arguments_are_told(parts, wrong, message):
    with pytest.raises(ValueError, match=message):
        Loader(*parts, **wrong)


def test_a_plan_of_other_data_is_refused(parts, tmp_path):
    """Rows would hold other samples than was planned."""
    other = mmdp.open_source(write_data(tmp_path, repeat=1))
    for make in (Loader, PackedDataset):
        with pytest.raises(ValueError, match="of another source or encoder"):
            make(other, parts.encoder, parts.plan)
        with pytest.raises(ValueError, match="of another source or encoder"):
            make(parts.source, mmdp.Encoder(tokenizer(), "fixed:5"), parts.plan)


def test_accelerate_does_not_deal_out_a_second_time_what_the_plan_has_dealt(parts):
    """Half of each epoch was lost without a word; on one process it takes nothing away."""
    from accelerate.data_loader import prepare_data_loader

    for world_size in (1, 2):
        with pytest.raises(RuntimeError, match="prepare the model and the optimizer only"):
            prepare_data_loader(data_loader(parts, 2, 0, world_size), num_processes=2, process_index=0)
    alone = prepare_data_loader(data_loader(parts, 2), num_processes=1, process_index=0, put_on_device=False)
    assert sorted(samples_of(alone)) == sorted(samples_of(data_loader(parts, 2)))


def test_an_epoch_that_gives_nothing_is_an_error(parts, tmp_path):
    """PACK-05, PACK-06, WRK-04: nothing fits, or no step is whole: said at once, each time, and no endless loop."""
    exact = Exact((9,) * 4)
    nothing_fits = Parts(exact, exact, mmdp.plan(mmdp.measure(exact, exact, cache=tmp_path), mmdp.Budget(8)))
    loader, dataset = Loader(*nothing_fits, executor="inline"), PackedDataset(*nothing_fits)
    for ask in (len, list) * 2:
        for empty in (loader, dataset, data_loader(nothing_fits, 2)):
            with pytest.raises(ValueError, match="none of the 4 samples fits a row"):
                ask(empty)
    loader = Loader(*parts, batch_size=1000, drop_last=True, executor="inline")
    assert 0 == len(loader)
    dataset = PackedDataset(*parts)
    sampler = dataset.sampler(1000, drop_last=True)
    for endless in (loader, DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)):
        for _ in range(2):
            with pytest.raises(ValueError, match="less than a step of 1 rank x 1000 rows"):
                list(endless)


# Failures while a row is built


@pytest.fixture
def damaged(tmp_path) -> Parts:
    """Samples 5 and 12 were good when they were measured; now an image of each is cut."""
    parts = make_parts(tmp_path / "data")
    for name in ("5-0.png", "12-1.png"):
        path = tmp_path / "data" / name
        path.write_bytes(path.read_bytes()[:-30])
    return parts


def test_a_sample_that_fails_leaves_its_row(damaged, parts, any_executor):
    """IMG-01, law 1: its neighbours move up, it is counted with its reason, and steps and states stay as they were."""
    loader = Loader(*damaged, batch_size=2, executor=any_executor)
    batches = list(loader)
    assert {"damaged_image": 2} == loader.skipped
    assert dict.fromkeys((5, 12), Reason.DAMAGED_IMAGE) == loader.failed
    assert [5, 12] == sorted(loader.messages())
    assert all("rows.jsonl:" in text and "images[" in text for text in loader.messages().values())
    skipped = {index: reason for batch in batches for index, reason in batch.skipped.items()}
    assert dict.fromkeys((5, 12), Reason.DAMAGED_IMAGE) == skipped
    assert list(range(40)) == sorted([*samples_of(batches), *skipped])
    rows = [tuple(map(int, row)) for row in damaged.plan.epoch(0)]
    assert Counter(tuple(sample for sample in row if sample not in skipped) for row in rows) == Counter(
        row for batch in batches for row in batch.samples if row or batch.filler_rows == 0
    )
    undamaged = {row for batch in Loader(*parts, batch_size=2, executor="inline") for row in rows_of(batch)}
    untouched = [row for batch in batches for row in rows_of(batch) if row[0] in rows]
    assert len(rows) - 2 == len(untouched)
    assert undamaged >= set(untouched)
    assert [digest(batch) for batch in data_loader(damaged, 2)] == [digest(batch) for batch in batches]


def test_strict_raises_the_first_failure(damaged, any_executor):
    """IMG-01: with file, line, id and field; what came before it came; and it comes again when asked again."""
    loader = Loader(*damaged, batch_size=1, executor=any_executor, strict=True)
    rows = [tuple(map(int, row)) for row in damaged.plan.epoch(0)]
    first = next(number for number, row in enumerate(rows) if {5, 12} & set(row))
    for place in (range(first), range(0)):
        seen = []
        with pytest.raises(
            DataError, match=r"rows\.jsonl:(6|13) \(id 's(5|12)'\), field images\[\d\] = .*damaged_image"
        ):
            seen.extend(batch.samples[0] for batch in loader)
        assert [rows[number] for number in place] == seen
    with pytest.raises(DataError, match=r"rows\.jsonl:(6|13)"):
        list(data_loader(damaged, 1, strict=True))


def test_a_data_set_that_is_gone_stops_the_run(parts, tmp_path, any_executor):
    """Not one sample skipped after the other, for ever: a clear error, and the run can be resumed once it is mended."""
    source = tmp_path / "data"
    broken = make_parts(source, (1,), repeat=30)
    images = list(source.glob("*.png"))
    for image in images:
        image.rename(image.with_suffix(".away"))
    loader = Loader(*broken, batch_size=2, executor=any_executor, max_failures=7)
    with pytest.raises(RuntimeError, match=r"the last (7|8|9) samples failed.*missing_image.*max_failures"):
        list(loader)
    state = loader.state_dict()
    for image in images:
        image.with_suffix(".away").rename(image)
    resumed = Loader(*broken, batch_size=2, executor="inline")
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert state["cursor"] + sum(len(batch.samples) - batch.filler_rows for batch in rest) == len(broken.plan.epoch(0))
    assert {} == resumed.skipped


def test_failures_that_are_not_in_a_row_do_not_stop_it(damaged):
    """`max_failures` counts what fails one after the other, not what fails in all."""
    loader = Loader(*damaged, batch_size=1, executor="inline", max_failures=2)
    for _ in range(3):
        list(loader)
    assert {"damaged_image": 6} == loader.skipped


@pytest.mark.parametrize("times", [2, 3])
def test_a_tired_disk_is_asked_again_and_then_the_run_stops(parts, tmp_path, any_executor, times):
    """WRK-01: two errors cost nothing; the third is raised as it is, names the sample, and nothing is ever skipped."""
    source = Unreadable(parts.source, 7, times, tmp_path)
    loader = Loader(source, *parts[1:], batch_size=1, executor=any_executor)
    rows = [tuple(map(int, row)) for row in parts.plan.epoch(0)]
    if times == 2:
        assert rows == [row for batch in loader for row in batch.samples]
    else:
        seen = []
        with pytest.raises(OSError, match="the disk is tired") as caught:
            seen.extend(batch.samples[0] for batch in loader)
        assert errno.EIO == caught.value.errno
        assert "sample 7 of rows.jsonl" in "\n".join(caught.value.__notes__)
        assert rows[: [7 in row for row in rows].index(True)] == seen
        assert [row for row in rows if row not in seen] == [row for batch in loader for row in batch.samples], "resumed"
    assert times == source.tries()
    assert {} == loader.skipped


def test_an_error_while_planning_does_not_end_the_epoch(tmp_path):
    """A disk that fails while sizes are measured lazily: the loop raises, and the next one has all that is left."""
    source, encoder = mmdp.open_source(write_data(tmp_path / "data", (0,), repeat=600)), mmdp.Encoder(tokenizer())
    budget, window = mmdp.Budget(64), {"buffer": 16, "window": 8}
    last = mmdp.plan(mmdp.measure(source, encoder, cache=tmp_path / "before"), budget, **window).epoch(0)[-1]
    tired = Unreadable(source, int(last[0]), 2, tmp_path)  # once beside the loop, once in it
    plan = mmdp.plan(mmdp.measure(tired, encoder, cache=tmp_path / "after", lazy=True), budget, **window)
    loader = Loader(tired, encoder, plan, batch_size=2, executor="inline")
    seen = []
    with pytest.raises(OSError, match="the disk is tired"):
        seen.extend(batch.samples for batch in loader)
    assert len(seen) > 10, "the case did not arise"
    seen.extend(batch.samples for batch in loader)
    assert list(range(600)) == sorted(sample for rows in seen for row in rows for sample in row)


def test_a_folder_that_is_gone_is_no_bad_sample(tmp_path, any_executor):
    """An unmounted disk stops the run; nothing is skipped for it."""
    broken = make_parts(tmp_path / "data", (1,), repeat=10)
    loader = Loader(*broken, batch_size=1, executor=any_executor)
    next(iter(loader))
    (tmp_path / "data").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        list(loader)
    assert {} == loader.skipped
