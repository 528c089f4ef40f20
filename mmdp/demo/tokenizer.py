"""The demo tokenizer: a byte-level BPE with ChatML marks and a chat template, trained on the text of the rows.

Adds: `demo_tokenizer`, a folder that transformers loads offline.
Leaves out: the rows (`rows`), and filling a folder whole or not at all (`files`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmdp.demo.files import make_once
from mmdp.demo.rows import VERSION, make_row

VOCABULARY = 4096
TRAINING_ROWS = 2000
"""The tokenizer learns from the text of this many rows of seed 0, the first 500 of which are the default set."""

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def demo_tokenizer(cache: Path) -> Path:
    """The folder of the demo tokenizer, a byte-level BPE with ChatML marks; trained where it is not there yet.

    Args:
        cache: the folder to keep it in.

    Returns:
        A folder with `tokenizer.json` and `tokenizer_config.json`, as `AutoTokenizer.from_pretrained` takes it.
    """
    folder = cache / f"demo-tokenizer-{VERSION}"
    make_once(folder, _write_tokenizer)
    return folder


def _texts() -> Iterator[str]:
    for index in range(TRAINING_ROWS):
        for turn in make_row(index, seed=0)["texts"]:
            yield f"user\n{turn['user']}\nassistant\n{turn['assistant']}\nsystem\n"


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,  # the text is small: a word read once is worth an entry
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "extra_special_tokens": {"image_token": "<|image|>"},
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="ascii")
