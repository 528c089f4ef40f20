"""Laws of `batching.py`: joining loses nothing, positions restart, padding is on the right, failures leave."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import forkserver
from small import tokenizer, write_data
from torch.utils.data import DataLoader

import mmdp
from mmdp.batching import RowBuilder, Rows, batch, join
from mmdp.records import IGNORE, Encoded, ImageLayout
from mmdp.refusals import DataError, Reason


def encoded(tokens: int, images: int = 0, first: int = 1) -> Encoded:
    ids = np.arange(first, first + tokens, dtype=np.int32)
    labels = np.where(np.arange(tokens) % 2 == 0, ids, IGNORE).astype(np.int32)
    return Encoded(ids, labels, (ImageLayout(1, 1, 2, 3),) * images)


def pixels(one: Encoded, fill: int) -> list[np.ndarray]:
    return [np.full((3, at.height, at.width), fill + number, np.uint8) for number, at in enumerate(one.layouts)]


samples_of_rows = st.lists(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=4), min_size=1, max_size=4
)


@given(samples_of_rows, st.integers(0, 5))
def test_unjoining_a_batch_gives_the_samples_back(rows, extra):
    """Law 5: token by token and image by image; positions restart; no label on a segment's first token."""
    originals, joined, index = [], [], 0
    for row in rows:
        members = []
        for tokens, images in row:
            one = encoded(tokens, images, first=100 * index + 1)
            members.append((index, one, pixels(one, 3 * index)))
            index += 1
        originals.append(members)
        joined.append(join([m[1] for m in members], [m[2] for m in members], [m[0] for m in members]))
    length = max(len(row) for row in joined) + extra
    made = batch(joined, pad_id=0, length=length)
    assert (len(rows), length) == tuple(made.input_ids.shape)
    seen = 0
    for number, members in enumerate(originals):
        assert tuple(m[0] for m in members) == made.samples[number]
        segments, start = made.segments[number], 0
        for place, (sample, one, images) in enumerate(members):
            end = start + len(one.ids)
            assert (segments[start:end] == place + 1).all()
            assert one.ids.tolist() == made.input_ids[number, start:end].tolist()
            assert [IGNORE, *one.labels[1:].tolist()] == made.labels[number, start:end].tolist()
            assert list(range(end - start)) == made.position_ids[number, start:end].tolist()
            for image in images:
                assert sample == int(made.images.samples[seen])
                assert number == int(made.images.rows[seen])
                assert np.array_equal(image, made.images[seen].numpy())
                seen += 1
            start = end
        tail = slice(start, length)
        assert (segments[tail] == 0).all()
        assert (made.labels[number, tail] == IGNORE).all()
        assert (made.input_ids[number, tail] == 0).all()
        assert list(range(length - start)) == made.position_ids[number, tail].tolist()
    assert seen == len(made.images)
    assert made.label_tokens == int((made.labels != IGNORE).sum())
    assert made.num_tokens + made.padded_tokens == made.segments.numel()


def test_joining_does_not_write_to_what_it_is_given():
    """PACK-11: labels of a cached sample stay as they are, epoch after epoch."""
    one = encoded(4)
    one.ids.flags.writeable = one.labels.flags.writeable = False
    row = join([one, one], [[], []], [0, 0])
    assert IGNORE == row.labels[4]
    assert 1 == one.labels[0]


def test_rows_at_the_length_are_kept_and_longer_ones_counted():
    """PACK-01: exactly full is kept, one more is dropped with its index and reason; nothing is cut."""
    rows = [join([encoded(n)], [[]], [n]) for n in (15, 16, 17)]
    made = batch(rows, pad_id=0, length=16)
    assert ((15,), (16,)) == made.samples
    assert {17: Reason.TOO_LONG} == made.skipped


def test_no_batch_at_all_rather_than_an_empty_one():
    """PACK-05: a batch of only over-long rows is an error that says so, and the limit."""
    rows = [join([encoded(40)], [[]], [0])]
    with pytest.raises(ValueError, match=r"no batch of 1 row: all are longer than 16 tokens"):
        batch(rows, pad_id=0, length=16)


def test_batches_without_images_have_a_well_formed_empty_buffer():
    """WRK-10: text-only batches are delivered, with an image field of no images."""
    made = batch([join([encoded(3)], [[]], [0])], pad_id=0)
    assert 0 == len(made.images) == made.images.pixels.numel()
    assert [0] == made.images.offsets.tolist()
    assert [] == list(made.images)
    with pytest.raises(IndexError):
        made.images[0]


def test_a_sample_that_fails_leaves_its_row(tmp_path):
    """The others move up, the failure is counted with its index and reason; a row that loses all stays, unlearnt."""
    path = write_data(tmp_path, (1, 1, 1), repeat=1)
    source, encoder = mmdp.open_source(path), mmdp.Encoder(tokenizer(), "fixed:4")
    sizes = mmdp.measure(source, encoder)
    whole = (tmp_path / "1-0.png").read_bytes()
    (tmp_path / "1-0.png").write_bytes(whole[: len(whole) // 2])  # the header is good, the body is not
    build = RowBuilder(source, encoder, sizes)
    row = build([0, 1, 2])
    assert (0, 2) == row.samples
    assert {1: Reason.DAMAGED_IMAGE} == row.skipped
    assert [1] * sizes.tokens[0] + [2] * sizes.tokens[2] == row.segments.tolist()
    made = batch([build([1]), build([0])], pad_id=0, length=64)
    assert ((), (0,)) == made.samples
    assert (made.labels[0] == IGNORE).all()
    assert {1: Reason.DAMAGED_IMAGE} == made.skipped
    assert (1, 1) == tuple(batch([build([1])], pad_id=0).input_ids.shape)
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        RowBuilder(source, encoder, sizes, strict=True)([0, 1, 2])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("error")
def test_a_data_loader_gives_each_sample_once_with_or_without_workers(tmp_path, num_workers):
    """Law 1, WRK-08: rows, builder, source and encoder reach workers; batches are the same for any number of them."""
    source = mmdp.open_source(write_data(tmp_path))
    encoder = mmdp.Encoder(tokenizer(), "fixed:4")
    sizes = mmdp.measure(source, encoder)
    rows = Rows(RowBuilder(source, encoder, sizes), [[index] for index in range(12)])
    context = forkserver() if num_workers else None  # all of it is pickled, as with "spawn"
    loader = DataLoader(
        rows,
        batch_size=4,
        collate_fn=lambda_free_collate,
        num_workers=num_workers,
        multiprocessing_context=context,
    )
    made = list(loader)
    assert [(index,) for index in range(12)] == [row for one in made for row in one.samples]
    assert sizes.tokens.sum() == sum(one.num_tokens for one in made)
    assert sizes.images.sum() == sum(len(one.images) for one in made)
    again = list(DataLoader(rows, batch_size=4, collate_fn=lambda_free_collate))
    for one, other in zip(made, again, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.images.pixels, other.images.pixels)


def lambda_free_collate(rows):
    return batch(rows, pad_id=0)


def test_a_batch_moves_whole():
    """`Batch.to` moves every tensor of the step; here to the meta device, which any machine has."""
    made = batch([join([encoded(3, 1)], [pixels(encoded(3, 1), 7)], [0])], pad_id=0).to("meta")
    tensors = (made.input_ids, made.labels, made.position_ids, made.segments, made.images.pixels)
    assert ["meta"] * 5 == [tensor.device.type for tensor in tensors]
