"""A small tokenizer and small data sets, made in a moment: real files, real classes, nothing handed or fetched."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmdp.template import CHATML

WORDS = [
    "what is shown here\n\nChoices:\nA. fox\nB. owl",
    "Answer: B",
    "system user assistant User Assistant model 0 1 2",
]
MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<s>",
    "</s>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<end_of_utterance>",
]

QWEN_MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


def tokenizer(template: str | None = CHATML, marks: Sequence[str | AddedToken] = MARKS) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these marks; pad equals the end mark, as in small instruct models."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        WORDS * 20, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(list(marks))
    loaded = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    loaded.chat_template = template
    return loaded


def write_data(folder: Path, num_images: Sequence[int] = (1, 0, 2, 1), *, repeat: int = 3) -> Path:
    """A JSONL with `repeat` rounds of samples that have so many images; sample i has i % 5 + 1 words to answer."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(num_images * repeat):
        names = []
        for image in range(count):
            name = f"{number}-{image}.png"
            colour = (number * 20 % 256, image * 80, 99)
            Image.new("RGB", (40 + number, 30 + image), colour).save(folder / name)
            names.append(name)
        answer = " ".join(["fox"] * (number % 5 + 1))
        rows.append({"id": f"s{number}", "images": names, "texts": [{"user": "what is it", "assistant": answer}]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
