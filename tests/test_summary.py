"""The text about a data set: its numbers are those of its sizes and of the two epochs."""

import numpy as np
import pytest
from small import tokenizer, write_data

import mmdp
from mmdp.metrics import Tally
from mmdp.sizes import Sizes
from mmdp.summary import summary


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> Sizes:
    """24 samples of 0 to 2 images, one of which is gone."""
    path = write_data(tmp_path_factory.mktemp("letter"), repeat=6)
    next(path.parent.glob("2-1.png")).unlink()
    return mmdp.measure(mmdp.open_source(path), mmdp.Encoder(tokenizer(), "fixed:16"))


def test_the_numbers_are_those_of_the_data(sizes):
    """How many, how long, what is left out and why, and a budget that holds 99 %."""
    budget = mmdp.Budget(tokens=int(sizes.tokens.max()) - 1, images=9)
    too_long = int((sizes.tokens > budget.tokens).sum())
    assert too_long
    naive, packed = Tally(tokens=100, padded_tokens=150), Tally(tokens=100, padded_tokens=0)
    text = summary("rows.jsonl", sizes, budget, naive, packed)
    kept = sizes.tokens[sizes.kept()]
    assert "What rows.jsonl asks for" == text.splitlines()[0]
    assert f"24: median {np.median(kept):,.0f}" in text
    assert f"longest {kept.max():,} tokens" in text
    assert "60% of all tokens are padding" in text
    assert "the same tokens cost the model 2.5 times less" in text
    assert f"{too_long + 1} of 24: missing_image 1, too_long {too_long}" in text
    better = sizes.suggest()
    assert f"--max-tokens {better.tokens} --max-images {better.images} holds 99 %" in text
    assert max(map(len, text.splitlines())) <= 120


def test_an_epoch_of_nothing_is_refused(sizes):
    """Nothing to compare is an error with the way out, and not a number."""
    with pytest.raises(ValueError, match="see the reasons why samples are skipped"):
        summary("rows.jsonl", sizes, mmdp.Budget(100), Tally(), Tally(tokens=1))
