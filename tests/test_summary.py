"""The text about a data set: its numbers are those of its sizes and of the two epochs."""

import copy
from collections import Counter

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
    """How many, how long, what is left out and why, wherever it was, and a budget that holds 99 %."""
    budget = mmdp.Budget(tokens=int(sizes.tokens.max()) - 1, images=9)
    too_long = int((sizes.tokens > budget.tokens).sum())
    assert too_long
    skipped = Counter(sizes.counts(budget)) + Counter(damaged_image=5)
    naive, packed = Tally(tokens=100, padded_tokens=150), Tally(tokens=100, padded_tokens=10, skipped=skipped)
    text = summary("rows.jsonl", sizes, budget, naive, packed)
    kept = sizes.tokens[sizes.kept()]
    assert "What rows.jsonl asks for" == text.splitlines()[0]
    assert "24, of which 23 could be measured;" in text
    assert f"median {np.median(kept):,.0f}, 95 % up to {np.sort(kept)[21]:,}, 99 % up to {kept.max():,}" in text
    assert f"99 % up to {sorted(kept)[-1]:,}" in text  # a sample's own length: less would not hold so many
    assert f"longest {kept.max():,} tokens" in text
    assert "60% of all tokens are padding" in text
    assert "the model computes 1.10 positions for each real token, not 2.50" in text
    assert f"{too_long + 6} of 24: damaged_image 5, " in text  # the most frequent first
    assert f"too_long {too_long}" in text
    assert "missing_image 1" in text
    better = sizes.suggest()
    assert f"--max-tokens {better.tokens} --max-images {better.images} holds 99 %" in text
    assert f"--max-images {sizes.suggest(budget.tokens).images}" in text
    enough = sizes.suggest(budget.tokens).images
    for images, more in ((enough, ""), (enough + 1, f" is enough; {enough + 1} as here may let rows differ more")):
        said = summary("rows.jsonl", sizes, mmdp.Budget(budget.tokens, images), naive, packed)
        assert f"--max-images {enough}{more}\n" in said
    assert "ATTENTION" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_few_longest_are_told_apart(sizes):
    """A second budget, for 95 %, where one outlier asks for the first."""
    long = copy.copy(sizes)
    long.tokens = sizes.tokens.copy()
    long.tokens[sizes.kept()[0]] = 5000
    text = summary("rows.jsonl", long, mmdp.Budget(6000, 9), Tally(tokens=1), Tally(tokens=1))
    first, second = (line for line in text.splitlines() if " holds 9" in line)
    assert "--max-tokens 5056 " in first
    assert second.strip().startswith(f"--max-tokens {long.suggest(share=0.95).tokens} --max-images ")
    assert second.endswith("holds 95 %: only the few longest ask for more")


def test_no_advice_where_most_is_left_out(sizes):
    """More than half left out: said first, with the reason that most have, and no budget is suggested from the rest."""
    skipped = Counter(image_places=12, missing_image=1)
    text = summary("rows.jsonl", sizes, mmdp.Budget(1000), Tally(tokens=1), Tally(tokens=1, skipped=skipped))
    found = "ATTENTION 13 of 24 samples are left out, 12 of them for image_places: mend that first."
    assert found in text.splitlines()[1]
    long = summary("rows", sizes, mmdp.Budget(9), Tally(tokens=1), Tally(tokens=1, skipped=Counter(too_long=20)))
    assert "ATTENTION 20 of 24 samples are left out, all for too_long: raise the budget." in long.splitlines()[1]
    assert "--max-" not in text
    assert max(map(len, text.splitlines())) <= 120
    skipped = Counter(image_places=12)
    assert "--max-" in summary("", sizes, mmdp.Budget(1000), Tally(tokens=1), Tally(tokens=1, skipped=skipped))


def test_many_reasons_are_no_single_one(sizes):
    """The first of ten reasons with one sample each is not what to mend first."""
    skipped = Counter(image_places=3, missing_image=4, empty_image=6)
    text = summary("rows.jsonl", sizes, mmdp.Budget(1000), Tally(tokens=1), Tally(tokens=1, skipped=skipped))
    assert "ATTENTION 13 of 24 samples are left out, for 3 reasons: mend those first." in text.splitlines()[1]


def test_few_rows_are_said_first(sizes):
    """What ten samples say of packing is no reason to be for it or against it."""
    naive = Tally(tokens=100, padded_tokens=150)
    for rows, is_few in ((1, True), (19, True), (20, False)):
        text = summary("rows.jsonl", sizes, mmdp.Budget(1000), naive, Tally(tokens=100, rows=rows))
        assert is_few == text.splitlines()[1].startswith(f"  note      {rows} row")
        assert is_few == ("say little of packing" in text)
        assert max(map(len, text.splitlines())) <= 120


def test_what_is_lost_is_told_where_it_was_measured(sizes):
    """A missing image has no tokens: 0 % of them would sound as if nothing were lost."""
    tokens = int(sizes.tokens[sizes.kept()].sum())
    for delivered, clause in ((tokens, ""), (tokens // 2, "; 50% of the tokens that were measured")):
        packed = Tally(tokens=delivered, rows=30, skipped=Counter(missing_image=1))
        text = summary("rows.jsonl", sizes, mmdp.Budget(1000), Tally(tokens=100), packed)
        assert f"  skipped   1 of 24: missing_image 1{clause}\n" in text


def test_filler_rows_are_computed_too(sizes):
    """What completes the last batch costs as much as any row: 100 tokens in 2 rows of 60, and 3 of filler."""
    packed = Tally(tokens=100, padded_tokens=20, rows=2, filler_rows=3)
    text = summary("rows.jsonl", sizes, mmdp.Budget(60), Tally(tokens=100, padded_tokens=150), packed)
    assert "the model computes 1.20 positions for each real token, not 2.50" in text
    assert "3 of 5 rows complete the last batch as filler: with them 3.00" in text
    assert "filler" not in summary("", sizes, mmdp.Budget(60), Tally(tokens=1), Tally(tokens=1, filler_rows=0))
    assert max(map(len, text.splitlines())) <= 120


def test_an_epoch_of_nothing_is_refused(sizes):
    """Nothing to compare is an error with the way out, and not a number."""
    with pytest.raises(ValueError, match="see the reasons why samples are skipped"):
        summary("rows.jsonl", sizes, mmdp.Budget(100), Tally(), Tally(tokens=1))
