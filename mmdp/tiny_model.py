"""A vision-language model of a real family, small enough to train on a laptop, that fits an encoder.

Adds: `tiny_vlm`: the family's class with random weights; vocabulary, image token and the tokens of an image are those
of the encoder. For stages, benchmarks and tests: it shows that batches train, not that a model gets good.
Leaves out: what it is fed (`adapters.py`), the loss (`objective.py`).

| encoder | model |
|---|---|
| `fixed:N`, `smolvlm` | SmolVLM |
| any other family | that family |

Patches are as large as the tokens of an image allow, so that the vision tower is cheap; where the family fixes them
(Qwen-VL, LLaVA-OneVision) they are its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mmdp.vision_resized import QwenVL, Square
from mmdp.vision_tiled import Idefics3, LlavaOnevision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from mmdp.encode import Encoder

_HEADS = 4
_WIDTH_STEP = 16  # each head's width must be a multiple of 4, for rotary positions of two dimensions
_LONGEST = 32_768  # positions; rotary ones cost nothing
_WINDOW = 1024  # tokens; the sliding layers of Gemma 3


def tiny_vlm(
    encoder: Encoder, *, hidden: int = 64, layers: int = 2, seed: int = 0, attention: str = "sdpa"
) -> PreTrainedModel:
    """A model of the encoder's family with random weights: with the demo tokenizer about half a million.

    Args:
        encoder: of any vision family. The image tokens of `fixed:N`, of a tile, or of Gemma 3 must make a square.
        hidden: width of the language model and the vision tower, a multiple of 16.
        layers: of each.
        seed: of the weights; the random state of torch is left as it was.
        attention: what the language model runs.

    Raises:
        ValueError: a width or number of layers that can't be, image tokens that make no square grid, or a family that
            has no model here.

    Source: the model classes of transformers, and the shapes of their released checkpoints where they matter: M-RoPE,
    the window of Gemma 3.
    """
    from transformers import AutoModelForImageTextToText

    if hidden < _WIDTH_STEP or hidden % _WIDTH_STEP or layers < 1:
        raise ValueError(
            f"hidden is {hidden} and layers {layers}: hidden must be a multiple of {_WIDTH_STEP}, layers at least 1"
        )
    config = _config(encoder, hidden, layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=attention
        )
    return model


def _config(encoder: Encoder, hidden: int, layers: int) -> PreTrainedConfig:
    from transformers import AutoConfig

    family = encoder.family
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 2 * hidden}
    vision = size | {"num_attention_heads": _HEADS}
    text = vision | {
        "num_key_value_heads": _HEADS // 2,
        "head_dim": hidden // _HEADS,
        "vocab_size": len(encoder.tokenizer),
        "max_position_embeddings": _LONGEST,
        "pad_token_id": encoder.pad_id,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }
    kind, rest = _family(family, hidden, layers, text, vision)
    whole = {"image_token_id": encoder.image_id, "pad_token_id": encoder.pad_id, "tie_word_embeddings": True}
    if isinstance(family, QwenVL):  # an id that no text has, where the tokenizer knows no videos
        whole["video_token_id"] = encoder.tokenizer.get_vocab().get("<|video_pad|>", len(encoder.tokenizer))
    made: PreTrainedConfig = AutoConfig.for_model(kind, **whole, **rest)
    return made


def _family(
    family: Any, hidden: int, layers: int, text: dict[str, Any], vision: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The model type, and what its config has beside the tokens."""
    if isinstance(family, QwenVL):
        return family.name, _qwen(family, hidden, layers, text, vision)
    if isinstance(family, LlavaOnevision):
        return "llava_onevision", _llava(family, text, vision)
    if isinstance(family, Square) and family.start:
        return "gemma3", _gemma3(family, hidden, layers, text, vision)
    is_tiled = isinstance(family, Idefics3)
    if not is_tiled and not isinstance(family, Square):
        raise ValueError(
            f"there is no tiny model for the vision family {getattr(family, 'name', family)}: enter one in `_family` "
            "of mmdp/tiny_model.py, or give the encoder another family"
        )
    side, tokens = (family.tile, family.image_seq_len) if is_tiled else (family.side, family.tokens)
    rest = {
        "text_config": text | {"model_type": "llama"},
        "vision_config": vision | {"image_size": side, "patch_size": _patch(family.name, side, tokens)},
        "scale_factor": 1,
    }
    return family.name if is_tiled else "smolvlm", rest


def _qwen(family: QwenVL, hidden: int, layers: int, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """M-RoPE as released: of a head's 64 pairs height and width have 24 each, in Qwen3-VL 20; time has the rest."""
    half = hidden // _HEADS // 2
    cell = half * 3 // 8 if family.name != "qwen3_vl" else half * 5 // 16
    sections = [half - 2 * cell, cell, cell]
    tower: dict[str, Any] = {"depth": layers, "hidden_size": hidden, "num_heads": _HEADS, "patch_size": family.patch}
    if family.name == "qwen2_vl":
        tower |= {"embed_dim": hidden, "mlp_ratio": 2}
    else:
        tower |= {"out_hidden_size": hidden, "intermediate_size": vision["intermediate_size"]}
    if family.name == "qwen2_5_vl":
        tower["fullatt_block_indexes"] = [layers - 1]
    if family.name == "qwen3_vl":
        tower["deepstack_visual_indexes"] = [0]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    return {"text_config": text | {"rope_parameters": rope}, "vision_config": tower}


def _llava(family: LlavaOnevision, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    sides = [family.tile * number for number in range(1, family.grid + 1)]
    tower = {
        "model_type": "siglip_vision_model",
        "image_size": family.tile,
        "patch_size": family.patch,
        "vision_use_head": False,
    }
    return {
        "text_config": text | {"model_type": "qwen2"},
        "vision_config": vision | tower,
        "image_grid_pinpoints": [[height, width] for height in sides for width in sides],
        "vision_aspect_ratio": f"anyres_max_{family.anyres_max}",
    }


def _gemma3(family: Square, hidden: int, layers: int, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    tower = {
        "image_size": family.side,
        "patch_size": _patch(family.name, family.side, family.tokens),
        "vision_use_head": False,
    }
    kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    windows = {"sliding_window": _WINDOW, "layer_types": kinds, "query_pre_attn_scalar": hidden // _HEADS}
    return {
        "text_config": text | windows,
        "vision_config": vision | tower,
        "mm_tokens_per_image": family.tokens,
    }


def _patch(name: str, side: int, tokens: int) -> int:
    """Pixels of a patch's side, so that a square of so many pixels has one patch a token."""
    grid = math.isqrt(tokens)
    if grid**2 != tokens or side < grid or side // (side // grid) != grid:
        raise ValueError(
            f"{name}: {tokens} tokens for {side} x {side} pixels make no square grid of patches: choose a square "
            "number well below the number of pixels, such as fixed:64"
        )
    return side // grid
