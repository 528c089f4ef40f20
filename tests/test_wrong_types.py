"""What a hurried user passes in the wrong place is refused at once, with what to give instead."""

import re

import numpy as np
import pytest
import torch
from small import tokenizer, write_data

import mmdp


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A source, an encoder, sizes, a plan, and a batch."""
    source = mmdp.open_source(write_data(tmp_path_factory.mktemp("types"), (1, 0), repeat=1))
    encoder = mmdp.Encoder(tokenizer(), "fixed:16")
    sizes = mmdp.measure(source, encoder)
    plan = mmdp.plan(sizes, mmdp.Budget(tokens=200, images=4))
    build = mmdp.RowBuilder(source, encoder, sizes)
    return source, encoder, sizes, plan, mmdp.batch([build((0, 1))], pad_id=encoder.pad_id)


class Processor:
    """As those of transformers are."""

    def __init__(self):
        self.tokenizer = tokenizer()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Processor(), "of the type Processor, which is no fast tokenizer: give its `.tokenizer`"),
        (None, "of the type NoneType, which is no fast tokenizer: give a fast one of transformers, or a name"),
    ],
)
def test_a_tokenizer(wrong, says):
    """A processor has one; anything else is none."""
    with pytest.raises(ValueError, match=re.escape(says)):
        mmdp.Encoder(wrong)


def test_a_tokenizers_folder_may_be_a_path(tmp_path):
    """As every folder may."""
    tokenizer().save_pretrained(tmp_path)
    assert mmdp.Encoder(tmp_path, "fixed:16").fingerprint == mmdp.Encoder(str(tmp_path), "fixed:16").fingerprint


def test_a_family():
    """A number is no family, and a processor is none; the message says how to come by one."""
    for wrong in (64, Processor()):
        with pytest.raises(ValueError, match=rf"of the type {type(wrong).__name__}, .* mmdp\.vision\.spec_of\("):
            mmdp.Encoder(tokenizer(), wrong)


@pytest.mark.parametrize("given", [{"tokens": "1024"}, {"tokens": 1024.5}, {"tokens": 9, "images": 2.0}])
def test_a_budget(given):
    """Whole numbers; those of NumPy are."""
    with pytest.raises(ValueError, match="give a whole number"):
        mmdp.Budget(**given)


def test_a_budget_of_a_numpy_integer(parts):
    """What `sizes.tokens.max()` gives; the packer shifts bits by it."""
    sizes = parts[2]
    budget = mmdp.Budget(sizes.tokens.max(), images=np.int8(4))
    assert (int, int) == (type(budget.tokens), type(budget.images))
    assert [[0], [1]] == sorted(row.tolist() for row in mmdp.plan(sizes, budget).epoch(0))


def test_a_plan(parts):
    """Sizes, or a budget, in its place."""
    source, encoder, sizes, plan, _ = parts
    for make in (mmdp.Loader, mmdp.PackedDataset):
        with pytest.raises(ValueError, match=r"is no plan: give what mmdp\.plan\(sizes, budget\) returns"):
            make(source, encoder, sizes)
    with pytest.raises(ValueError, match="batch_size is '8': it must be a whole number"):
        mmdp.Loader(source, encoder, plan, batch_size="8")


@pytest.mark.parametrize("wrong", [{"input_ids": torch.zeros(1, 4)}, None])
def test_a_batch(wrong):
    """The mapping that another collator makes."""
    says = rf"the batch is of the type {type(wrong).__name__}: give one as mmdp\.Loader or mmdp\.batch makes it"
    for use in (
        lambda: mmdp.loss(torch.nn.Linear(1, 1), wrong),
        lambda: mmdp.adapt(wrong, "text"),
        lambda: mmdp.check_isolation(torch.nn.Linear(1, 1), wrong),
    ):
        with pytest.raises(ValueError, match=says):
            use()


def test_what_is_printed_fits_a_line(parts):
    """Sizes, a plan, a batch and its images: what a newcomer prints first. Numbers, and no arrays."""
    _, _, sizes, plan, batch = parts
    tokens = int(sizes.tokens.sum())
    assert f"<Sizes of 2 samples: {tokens} tokens, 1 image, 0 can't be used>" == repr(sizes)
    assert "<Plan of 2 samples into rows of Budget(tokens=200, images=4), seed 0>" == repr(plan)
    assert f"<Batch of 1 row x {batch.input_ids.shape[1]} tokens: 2 samples, 1 image, " in repr(batch)
    assert f"<ImageBuffer of 1 image, {batch.images.pixels.numel():,} values>" == repr(batch.images)
