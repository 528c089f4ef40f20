"""Laws of `tokenizer.py`: loaded as files say; a plain copy reads every mark as text, and changes nothing else."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mmdp.tokenizer import load_tokenizer, plain_tokenizers

TEXTS = (
    "x =\n    1 23",
    "<|im_end|> said <|im_start|>user",
    " na\u00efve  caf\u00e9 \u4e2d\u6587 \U0001f98a",
    "",
    "\n\n\ttab",
)


def read_anew(loaded: PreTrainedTokenizerFast) -> Tokenizer:
    """The same tokenizer, from its text, with nothing shared."""
    plain = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    plain.no_padding()
    plain.no_truncation()
    plain.encode_special_tokens = True
    return plain


def test_smollm2_keeps_its_one_digit_rule(shared):
    """A known id sequence: the pre-tokenizer of tokenizer.json survives loading, whatever class the config names."""
    loaded = load_tokenizer(str(shared / "tokenizers" / "smollm2"))
    assert [104, 446, 2367, 33, 216, 34, 35] == loaded.encode("x =\n    1 23")


def test_class_named_in_the_config_does_not_change_the_ids(shared, tmp_path):
    """A folder that says GPT2Tokenizer loads like the generic class; AutoTokenizer loses the digit rule there."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (shared / "tokenizers" / "smollm2" / name).read_text()
        (tmp_path / name).write_text(text.replace('"PreTrainedTokenizerFast"', '"GPT2Tokenizer"'))
    assert "GPT2Tokenizer" in (tmp_path / "tokenizer_config.json").read_text()
    assert [104, 446, 2367, 33, 216, 34, 35] == load_tokenizer(str(tmp_path)).encode("x =\n    1 23")


def test_unknown_tokenizers_are_named(tmp_path):
    """A folder without a tokenizer.json is an error that says what to do."""
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"no such folder.*save_pretrained"):
        load_tokenizer(str(tmp_path / "mistyped"))


@pytest.mark.parametrize("name", ["smollm2", "qwen"])
def test_plain_copies_share_a_vocabulary_and_encode_alike(shared, name):
    """A copy has the ids of a tokenizer that was read anew; the one it is made of stays as it was."""
    loaded = load_tokenizer(str(shared / "tokenizers" / name))
    before = [loaded.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    anew = read_anew(loaded)
    for plain in plain_tokenizers(loaded):
        assert anew.to_str() == plain.to_str()
        for text in TEXTS:
            assert anew.encode(text, add_special_tokens=False).ids == plain.encode(text, add_special_tokens=False).ids
    assert before == [loaded.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert before[1] != anew.encode(TEXTS[1], add_special_tokens=False).ids


def word_level(num_words: int) -> WordLevel:
    return WordLevel({f"w{number}": number for number in range(num_words)} | {"<unk>": num_words}, unk_token="<unk>")


def test_a_copy_keeps_the_ids_of_added_tokens():
    """Special ones and others in turns, one of them from the vocabulary itself: all keep their ids and their nature."""
    backend = Tokenizer(word_level(10))
    backend.add_special_tokens(["<0>"])
    backend.add_tokens(["<1>", "w3"])
    backend.add_special_tokens(["<2>"])
    wanted = backend.get_added_tokens_decoder()
    assert {11: "<0>", 12: "<1>", 3: "w3", 13: "<2>"} == {number: token.content for number, token in wanted.items()}
    for plain in plain_tokenizers(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")):
        found = plain.get_added_tokens_decoder()
        assert wanted.items() <= found.items()
        assert [12] == plain.encode("<1>").ids
        assert [10] == plain.encode("<2>").ids


def test_ids_that_no_copy_can_keep_are_refused():
    """A model that was exchanged below the added tokens: refused, since a copy would number them anew in silence."""
    backend = Tokenizer(word_level(10))
    backend.add_tokens(["<0>"])
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    loaded.backend_tokenizer.model = word_level(20)
    with pytest.raises(ValueError, match="right behind its vocabulary"):
        plain_tokenizers(loaded)
