"""Tiny models of every family from their configs, real classes with random weights, and packed batches that suit them.

The layout rules are those of `mmdp.vision`, with options that make an image cost a few tokens.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from small import MARKS, WORDS, tokenizer

import mmdp
from mmdp.vision import vision_family

SPECS = {
    "smolvlm": "smolvlm:longest_edge=32,tile=16,image_seq_len=4",
    "idefics3": "idefics3:longest_edge=32,tile=16,image_seq_len=4",
    "llava_onevision": "llava_onevision:grid=2,anyres_max=2,tile=16,patch=8",
    "qwen2_vl": "qwen2_vl:min_pixels=784,max_pixels=4704",
    "qwen2_5_vl": "qwen2_5_vl:min_pixels=784,max_pixels=4704",
    "qwen3_vl": "qwen3_vl:min_pixels=1024,max_pixels=6144",
    "gemma3": "gemma3:side=28,tokens=4",
}
"""The vision family of each tiny model; 640 x 480 pixels cost from 4 to 29 tokens."""

TEXT = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}


@functools.cache
def encoder(family: str) -> mmdp.Encoder:
    """The tokenizer with the family's marks, and its rules; `text` for a model without images."""
    if family not in SPECS:
        return mmdp.Encoder(tokenizer(), "fixed:4")
    marks = [mark for mark in vision_family(SPECS[family]).marks if mark not in MARKS]
    return mmdp.Encoder(tokenizer(marks=[*MARKS, *marks]), SPECS[family])


def make_config(family: str) -> Any:
    """The config of a tiny model, with the image token of `encoder(family)`."""
    if family not in SPECS:
        return hf.AutoConfig.for_model(family, **TEXT | _text_changes(family))
    return _CONFIGS[family](encoder(family).image_id)


def make_model(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model with random weights; the same for every attention. `flash` and `flex` by their short names."""
    torch.manual_seed(0)
    config = make_config(family)
    kind = hf.AutoModelForImageTextToText if family in SPECS else hf.AutoModelForCausalLM
    name = {"flash": "sdpa", "flex": "flex_attention"}.get(attention, attention)
    model = kind.from_config(config, attn_implementation=name, dtype=torch.float32)
    for parameter in model.parameters():  # some start at zero, and most so small that a leak would hide
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    if attention == "flash":
        set_attention(model, "flash_attention_2")
    return model.to(dtype).eval()


def set_attention(model: Any, name: str) -> None:
    """What `set_attn_implementation` does, without its question whether the kernel is installed."""
    for module in model.modules():
        if isinstance(getattr(module, "config", None), hf.PreTrainedConfig):
            module.config._attn_implementation = name


@functools.cache
def folder_of(num_images: tuple[int, ...]) -> Path:
    """A data set of samples with so many images, all of other shapes, full of noise."""
    folder, noise = Path(tempfile.mkdtemp(prefix="mmdp-tiny-")), np.random.default_rng(0)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sides, lines = itertools.cycle([(64, 40), (30, 90), (80, 80), (97, 33), (20, 60)]), []
    for number, count in enumerate(num_images):
        names = [f"{number}-{image}.png" for image in range(count)]
        for name in names:
            width, height = next(sides)
            Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
        text = {"user": " ".join(WORDS[: number % 3 + 1]), "assistant": " ".join(["fox"] * (number % 4 + 1))}
        lines.append(json.dumps({"id": str(number), "images": names, "texts": [text]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    return folder


def packed(family: str, rows: list[list[int]], *, tail: int = 0, num_images: tuple[int, ...] = (1, 0, 2, 1, 0, 1)):
    """A batch of these samples, real pixels included; the longest row gets a tail of so many tokens."""
    if family not in SPECS:
        num_images = (0,) * len(num_images)
    encode = encoder(family)
    build = mmdp.RowBuilder(mmdp.open_source(folder_of(num_images) / "rows.jsonl"), encode, strict=True)
    made = [build(row) for row in rows]
    return mmdp.batch(made, pad_id=encode.pad_id, length=max(map(len, made)) + tail)


def _text_changes(family: str) -> dict[str, Any]:
    if family in ("gemma3_text", "mistral"):
        return {"sliding_window": 7, "head_dim": 8}
    return {"head_dim": 8} if family == "qwen3" else {}


def _mrope(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


def _idefics3(kind: Any, token: int) -> Any:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    return kind(text_config=TEXT | {"model_type": "llama"}, vision_config=vision, image_token_id=token, scale_factor=2)


def _llava(token: int) -> Any:
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
        "vision_use_head": False,
    }
    return hf.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_id=token,
        image_grid_pinpoints=[[height, width] for height in (16, 32) for width in (16, 32)],
        vision_aspect_ratio="anyres_max_2",
    )


def _qwen2(kind: Any, token: int) -> Any:
    if kind is hf.Qwen2VLConfig:
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
    else:
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "fullatt_block_indexes": [1],
        }
    return kind(
        text_config=TEXT | {"rope_parameters": _mrope([1, 1, 2])},
        vision_config=vision | {"patch_size": 14},
        image_token_id=token,
        video_token_id=499,
    )


def _qwen3(token: int) -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return hf.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 8, "rope_parameters": _mrope([2, 1, 1])},
        vision_config=vision,
        image_token_id=token,
        video_token_id=499,
    )


def _gemma3(token: int) -> Any:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 7,
        "vision_use_head": False,
    }
    text = TEXT | {
        "head_dim": 8,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    }
    return hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=token)


_CONFIGS = {
    "smolvlm": functools.partial(_idefics3, hf.SmolVLMConfig),
    "idefics3": functools.partial(_idefics3, hf.Idefics3Config),
    "llava_onevision": _llava,
    "qwen2_vl": functools.partial(_qwen2, hf.Qwen2VLConfig),
    "qwen2_5_vl": functools.partial(_qwen2, hf.Qwen2_5_VLConfig),
    "qwen3_vl": _qwen3,
    "gemma3": _gemma3,
}
