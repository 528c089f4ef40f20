"""The handed cases of packing, workers, order and memory, met by a whole run: measure, plan, load.

Many were written for a packing `IterableDataset` over encoded samples. Here `Exact` stands for their bases: its sample
i has as many tokens and images as the case says, and starts with token i + 10. What single modules decide is tested
beside them; ends and deaths of workers are in `test_loader_ends.py`.
"""

import json
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from odd_sources import Exact, Unreadable
from runs import (
    Parts,
    Road,
    digest,
    digests,
    forkserver,
    in_child,
    keep,
    make_parts,
    one_epoch,
    peak,
    with_small_shared_memory,
)
from small import tokenizer, write_data
from torch.utils.data import DataLoader

import mmdp
from mmdp.executors import Processes
from mmdp.loader import Loader
from mmdp.packed_dataset import PackedDataset

pytestmark = pytest.mark.timeout(120)


def exact_parts(folder: Path, tokens, images=None, *, budget: mmdp.Budget, side: int = 2, seed: int = 0) -> Parts:
    exact = Exact(tuple(tokens), None if images is None else tuple(images), side)
    return Parts(exact, exact, mmdp.plan(mmdp.measure(exact, exact, cache=folder), budget, seed))


def ids_of(batch) -> list[list[int]]:
    """The samples in each row, told by their first tokens."""
    return [[token - 10 for token in row.tolist() if token >= 10] for row in batch.input_ids]


# Padding and packing

CASES = [
    "PACK-01a",
    "PACK-01b",
    "PACK-02",
    "PACK-03",
    "PACK-04a",
    "PACK-04b",
    "PACK-04c",
    "PACK-04d",
    "PACK-06",
    "PACK-07",
    "PACK-08",
]


@pytest.mark.parametrize("name", CASES)
def test_rows_are_what_the_case_expects(case_script, tmp_path, name):
    """PACK-01 to 08: as its judge sees the rows that come out; where nothing fits, that is an error."""
    cases = case_script("pack_cases")
    case = next(case for case in cases.CASES if case["id"] == name)
    tokens = [count + case["separator"] for count in case["tokens"]]  # a separator is part of a sample's tokens
    budget = mmdp.Budget(case["capacity"], case["image_budget"])
    parts = exact_parts(tmp_path, tokens, case["images"], budget=budget)
    dropped = {index: str(reason) for index, reason in parts.plan.skipped.items()}
    assert case["dropped"] == dropped
    if len(dropped) == len(tokens):
        with pytest.raises(ValueError, match=f"none of the {len(tokens)} samples fits"):
            list(Loader(*parts))
        return
    for _ in range(2):
        batches = list(Loader(*parts, batch_size=3, executor="inline"))
        rows = [row for batch in batches for row in ids_of(batch) if row]
        assert [] == cases.judge(case, rows, dropped)
        assert rows == [list(samples) for batch in batches for samples in batch.samples if samples]
        for batch in batches:
            doc_ids = batch.segments.long() - 1
            labels = batch.labels
            assert [] == [
                bad
                for row, ys in zip(doc_ids.tolist(), labels.tolist(), strict=True)
                for bad in cases.judge_labels(row, ys, False)
            ]


def test_no_samples_at_all(tmp_path):
    """PACK-05: no rows, and an error at once rather than an empty batch."""
    with pytest.raises(ValueError, match="none of the 0 samples can be used"):
        exact_parts(tmp_path, [], budget=mmdp.Budget(16))


def test_shifted_labels_cross_no_boundary(case_script, tmp_path):
    """PACK-09: with the labels as they are, and as the model shifts them."""
    judge = case_script("pack_cases").judge_labels
    parts = exact_parts(tmp_path, [5] * 40, budget=mmdp.Budget(16))
    seen = 0
    for batch in Loader(*parts, batch_size=2, executor="inline"):
        for segments, labels in zip(batch.segments.tolist(), batch.labels.tolist(), strict=True):
            doc_ids = [segment - 1 for segment in segments]
            assert [] == judge(doc_ids, labels, False)
            assert [] == judge(doc_ids, [*labels[1:], -100], True)
            seen += max(segments)
    assert 40 == seen


def test_epochs_leave_samples_and_caches_as_they_were(tmp_path):
    """PACK-11: files of the token cache do not change, and an epoch comes again as it was."""
    parts = make_parts(tmp_path)
    files = sorted(parts.plan.sizes.cache.folder.iterdir())
    before = [path.read_bytes() for path in files]
    loader = Loader(*parts, batch_size=2, executor="threads", num_workers=2)
    first = [digest(batch) for batch in loader]
    list(loader)
    loader.set_epoch(0)
    assert first == [digest(batch) for batch in loader]
    assert before == [path.read_bytes() for path in files]


def test_the_length_of_a_packed_data_set_is_true(tmp_path):
    """PACK-12: of Good(100) in every epoch; of AllTooLong(10) there is none, but an error."""
    parts = exact_parts(tmp_path, [5] * 100, budget=mmdp.Budget(16))
    dataset = PackedDataset(*parts)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert 34 == len(dataset) == len([dataset[row] for row in range(len(dataset))])
    too_long = PackedDataset(*exact_parts(tmp_path, [10_000] * 10, budget=mmdp.Budget(16)))
    with pytest.raises(ValueError, match=r"none of the 10 samples fits.*'too_long': 10"):
        len(too_long)


def test_no_row_without_a_label(tmp_path):
    """PACK-13: samples with nothing to learn are dropped and counted, so only filler rows have no label."""
    path = write_data(tmp_path, (0, 1), repeat=6)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::4]:
        row["texts"][0]["assistant"] = ""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, encoder = mmdp.open_source(path), mmdp.Encoder(tokenizer(), "fixed:4:side=16")
    plan = mmdp.plan(mmdp.measure(source, encoder), mmdp.Budget(40))
    assert {"no_answer": 3} == plan.sizes.counts(plan.budget)
    batches = list(Loader(source, encoder, plan, batch_size=4, executor="inline"))
    assert 9 == sum(len(row) for batch in batches for row in batch.samples)
    for batch in batches:
        without = (batch.labels == -100).all(dim=1)
        assert [not samples for samples in batch.samples] == without.tolist()


def test_equal_lengths_pack_alike(case_script, tmp_path):
    """PACK-14: the same order and seed, the same rows; another seed, other rows of the same fill."""
    ties = case_script("pack_cases").TIES
    runs = [
        [
            row
            for batch in Loader(*exact_parts(tmp_path, ties, budget=mmdp.Budget(16), seed=seed))
            for row in batch.samples
        ]
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert [15] * 3 == [len([row for row in rows if row]) for rows in runs]


# Workers


@pytest.mark.parametrize("count", [1, 5, 10])
@pytest.mark.filterwarnings("ignore:.*worker processes in total:UserWarning")
def test_every_sample_once_over_any_number_of_workers(tmp_path, count):
    """WRK-03: Good(n) with 0 to 7 workers, more than samples too, through `Loader` and through a DataLoader."""
    parts = exact_parts(tmp_path, [5] * count, budget=mmdp.Budget(8))
    wanted = [digest(batch) for batch in Loader(*parts, batch_size=2, executor="inline")]
    assert -(-count // 2) == len(wanted)
    for num_workers in range(1, 8):
        loader = Loader(*parts, batch_size=2, executor="threads", num_workers=num_workers)
        assert wanted == [digest(batch) for batch in loader]
    for num_workers in (0, 2, 7):
        dataset = PackedDataset(*parts)
        loader = DataLoader(
            dataset, batch_sampler=dataset.sampler(2), collate_fn=dataset.collate, num_workers=num_workers
        )
        assert wanted == [digest(batch) for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_reaches_the_consumer(tmp_path, num_workers):
    """WRK-01: FailsAt(10, 5) behind a DataLoader: the same type, the sample in its message, in seconds."""
    parts = exact_parts(tmp_path, [5] * 10, budget=mmdp.Budget(8))
    parts = parts._replace(source=Unreadable(parts.source, 5, 1000, tmp_path))
    start = time.monotonic()
    with pytest.raises(OSError, match="the disk is tired") as caught:
        in_child(digests, Road(None, num_workers, context="fork"), parts)
    assert "sample 5 of exact" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert time.monotonic() - start < 20


def test_seven_samples_over_three_ranks(tmp_path):
    """WRK-07: the same number of steps on every rank, and the remainder counted, as filler rows or as dropped."""
    parts = exact_parts(tmp_path, [5] * 7, budget=mmdp.Budget(8))
    for drop_last, num_steps, fillers, dropped in ((False, 3, 2, {}), (True, 2, 0, {0: 1})):
        ranks = [
            Loader(*parts, batch_size=1, rank=rank, world_size=3, drop_last=drop_last, executor="inline")
            for rank in range(3)
        ]
        epochs = [list(rank) for rank in ranks]
        assert [num_steps] * 3 == [len(batches) for batches in epochs]
        samples = [sample for batches in epochs for batch in batches for row in batch.samples for sample in row]
        assert 7 - sum(dropped.values()) == len(samples) == len(set(samples))
        assert fillers == sum(batch.filler_rows for batches in epochs for batch in batches)
        assert [dropped] * 3 == [rank.dropped for rank in ranks]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.filterwarnings("error", "ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_tokenizer_used_before_workers_start(tmp_path, capfd, method):
    """WRK-08: all start methods work and say nothing, where the parent has used the tokenizer on all its threads."""
    forkserver()
    parts = make_parts(tmp_path)
    parts.encoder.tokenizer(["what is it"] * 2000)
    wanted = [digest(batch) for batch in Loader(*parts, batch_size=2, executor="inline")]
    dataset = pickle.loads(pickle.dumps(PackedDataset(*parts)))
    loader = DataLoader(
        dataset,
        batch_sampler=dataset.sampler(2),
        collate_fn=dataset.collate,
        num_workers=1,
        multiprocessing_context=method,
    )
    assert wanted == [digest(batch) for batch in loader]
    assert ("", "") == capfd.readouterr()


def test_a_rank_with_text_only(tmp_path):
    """WRK-10: its batches come, with an image field of no images; `len(batch.images)` is what a trainer acts on."""
    parts = exact_parts(tmp_path, [8, 4], [0, 1], budget=mmdp.Budget(8))
    batches = [
        next(iter(Loader(*parts, batch_size=1, rank=rank, world_size=2, executor="inline"))) for rank in range(2)
    ]
    text, picture = sorted(batches, key=lambda batch: len(batch.images))
    assert (((0,),), ((1,),)) == (text.samples, picture.samples)
    assert (0, 1) == (len(text.images), len(picture.images))
    assert 0 == text.images.pixels.numel()
    assert picture.images.pixels.dtype == text.images.pixels.dtype == torch.uint8
    assert 7 == text.label_tokens


# Order and chance

CHANGES_NOTHING = """
import random, sys
import numpy, torch
random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
before = states(), torch.get_num_threads(), torch.get_default_dtype(), dict(__import__("os").environ)
import mmdp
for name in mmdp.__all__:
    if name != "packed_trainer":  # transformers.Trainer, which it stands on, names torch's cache as it is imported
        getattr(mmdp, name)
import mmdp.loader, mmdp.measure, mmdp.cli, mmdp.plots
assert before == (states(), torch.get_num_threads(), torch.get_default_dtype(), dict(__import__("os").environ))
print("unchanged")
"""


def test_importing_changes_nothing():
    """RES-01: neither the process-wide generators nor torch's settings nor the environment."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", CHANGES_NOTHING], capture_output=True, text=True, check=False
    )
    assert ("unchanged\n", 0) == (done.stdout, done.returncode), done.stderr


def states() -> tuple:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def test_chance_is_our_own(tmp_path):
    """RES-01, RES-04: no process-wide generator is used or changed; two runs and three processes see the same epoch."""
    parts = make_parts(tmp_path)
    random.seed(7)
    before = states()
    seen = [digest(batch) for batch in Loader(*parts, batch_size=2, executor="threads", num_workers=2)]
    dataset = PackedDataset(*parts)
    for _ in DataLoader(
        dataset,
        batch_sampler=dataset.sampler(2),
        collate_fn=dataset.collate,
        generator=torch.Generator(),  # else a DataLoader draws a seed for its workers from torch's own
    ):
        pass
    assert before == states()
    assert [True, True, False] == [seen == in_child(one_epoch, parts, epoch) for epoch in (0, 0, 1)]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_that_persist_hear_of_the_epoch(tmp_path, method):
    """RES-02: Good(60), rows by number, two persistent workers: three epochs, each other than the last, and again."""
    forkserver()
    parts = exact_parts(tmp_path, [5] * 60, budget=mmdp.Budget(16))
    dataset = PackedDataset(*parts)
    loader = DataLoader(
        dataset,
        batch_size=2,
        collate_fn=dataset.collate,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    for epoch in (0, 1, 2, 0):
        dataset.set_epoch(epoch)
        seen = [samples for batch in loader for samples in batch.samples]
        assert [tuple(row) for row in parts.plan.epoch(epoch)] == seen
    assert 3 == len({str(list(parts.plan.epoch(epoch))) for epoch in range(3)})


# Memory


def test_kept_batches_hold_no_file_handles(tmp_path):
    """MEM-02: any number of them from `Loader`; behind a DataLoader, whose batches hold some, torch gives an error."""
    parts = exact_parts(tmp_path, [5] * 400, [1] * 400, budget=mmdp.Budget(5), side=128)
    assert 200 == in_child(keep, Road(Processes(2, "fork")), parts, 60)
    with pytest.raises((RuntimeError, OSError), match=r"ancdata|open files"):
        in_child(keep, Road(None, 2, context="fork"), parts, 60)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux' /proc")
def test_memory_is_bounded_by_bytes(tmp_path):
    """MEM-03: what is in flight, four batches, and a row for each worker; where rows are large, bytes count."""
    side, batch_size, max_bytes = 1024, 2, 40 * 2**20
    image = 3 * side**2
    parts = exact_parts(tmp_path, [5] * 120, [1] * 120, budget=mmdp.Budget(10, 2), side=side)
    row = 2 * image
    allowed = max_bytes + 4 * batch_size * row + 2 * row + 24 * 2**20  # for all that is not pixels
    assert 4 * allowed < 3 * 120 * image, "the case could not arise"
    for executor in ("inline", "threads"):
        assert in_child(peak, Road(executor, 2), parts, batch_size, 1000, max_bytes) < allowed
    unbounded = in_child(peak, Road("threads", 2), parts, batch_size, 1000, 2**40)
    assert unbounded > allowed, "the case did not arise"


def test_shared_memory_is_not_needed(tmp_path):
    """MEM-04: with 1 MB of it, batches of 12 MB come from processes; a DataLoader's error names it."""
    parts = exact_parts(tmp_path, [5] * 8, [1] * 8, budget=mmdp.Budget(5), side=1024)
    seen = in_child(with_small_shared_memory, Road(Processes(2, "fork")), parts)
    if seen is None:
        pytest.skip("this user may not mount a small /dev/shm for itself")
    assert [digest(batch) for batch in Loader(*parts, batch_size=4, executor="inline")] == seen
    with pytest.raises(RuntimeError, match=r"no shared memory for a batch of 12,.* bytes.*--shm-size.*mmdp.Loader"):
        in_child(with_small_shared_memory, Road(None, 2, context="fork"), parts)
