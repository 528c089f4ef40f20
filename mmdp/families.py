"""What is known of each model family: how packed rows reach it, and which attentions keep their samples apart in it.

Adds: `resolve`, a model or its config as a `Target`: family, config, attention, dtype. It refuses what would leak.
Leaves out: the inputs themselves (`adapters.py`), inputs that come from elsewhere (`leaks.py`).

| family | samples are told apart by | attentions |
|---|---|---|
| `smolvlm`, `idefics3`, `llava_onevision`, text-only models | positions that restart | sdpa, eager, flash, flex |
| `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl` | row 0 of four rows of positions | sdpa, eager, flash |
| `gemma3` | two masks, (B, 1, L, L) each | sdpa, eager, flex |

Read from, and tested with, the model classes of transformers 5.24 (tests/test_adapters.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from mmdp.refusals import shorten

_ALL = ("sdpa", "eager", "flash", "flex")
ATTENTIONS: dict[str, tuple[str, ...]] = {
    "smolvlm": _ALL,
    "idefics3": _ALL,
    "llava_onevision": _ALL,
    # Their classes lack the flag for flex_attention, and loading them with it is refused.
    "qwen2_vl": ("sdpa", "eager", "flash"),
    "qwen2_5_vl": ("sdpa", "eager", "flash"),
    "qwen3_vl": ("sdpa", "eager", "flash"),
    # A flash kernel knows no mask, so that the tokens of an image could not see each other both ways.
    "gemma3": ("sdpa", "eager", "flex"),
}
"""The attentions of each vision family that keep packed samples apart."""

TEXT_ONLY = ("gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Text-only models that are tested. Others may do as well: `text` stands for any that goes by positions."""

MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose positions have a time, a height and a width."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the inputs are made for.

    Attributes:
        family: a key of `ATTENTIONS`, one of `TEXT_ONLY`, or `text`.
        attention: "sdpa", "eager", "flash" or "flex".
        config: of the whole model; None for `text`.
        dtype: of the model's weights; float32 where only a config without one was given.
    """

    family: str
    attention: str
    config: Any
    dtype: torch.dtype

    @property
    def has_vision(self) -> bool:
        """Whether it takes images."""
        return self.family in ATTENTIONS


def resolve(model_or_config: Any, attention: str | None = None) -> Target:
    """What a model, or its config, is known to need.

    Args:
        model_or_config: a model of transformers, also inside DistributedDataParallel, torch.compile or the like; its
            config; or `text`, for a text-only model that is not listed.
        attention: what its language model runs with; by default what its config says.

    Raises:
        ValueError: an unknown family or attention, or a pair of them that leaks.
    """
    if model_or_config == "text":
        return Target("text", attention_kind(attention), None, torch.float32)
    model, config = _unwrapped(model_or_config)
    family = str(config.model_type)
    if family not in ATTENTIONS and family not in TEXT_ONLY:
        raise ValueError(
            f"unknown model family {shorten(family)}: the families are {', '.join((*ATTENTIONS, *TEXT_ONLY))}. "
            "Give 'text' instead, and the attention, for another text-only model that finds packed samples by their "
            "positions, and prove that it does with mmdp.check_isolation"
        )
    own = _own_attention(config)
    if attention is not None and own is not None and attention_kind(attention) != attention_kind(own):
        raise ValueError(
            f"inputs for {attention!r} were asked for, but this {family} runs {own!r}: leave `attention` out, or "
            f"change the model first, model.set_attn_implementation({attention!r})"
        )
    kind = attention_kind(attention or own)
    _check_pair(family, kind, model)
    dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None)
    return Target(family, kind, config, dtype if isinstance(dtype, torch.dtype) else torch.float32)


def attention_kind(name: str | None) -> str:
    """The kind that a name of transformers stands for.

    >>> attention_kind("flash_attention_2")
    'flash'

    Raises:
        ValueError: no name, or one of another kind.
    """
    if name is None:
        raise ValueError("this config does not say which attention its model runs: give attention='sdpa', or the model")
    if name in ("sdpa", "eager"):
        return name
    if name in ("flex", "flex_attention"):
        return "flex"
    if "flash" in name and not name.startswith("paged"):
        return "flash"  # also the kernels of the Hub, such as kernels-community/flash-attn2
    raise ValueError(f"unknown attention {shorten(name)}: the attentions are sdpa, eager, flash (2, 3, 4) and flex")


def _check_pair(family: str, kind: str, model: Any) -> None:
    allowed = ATTENTIONS.get(family, _ALL)
    if kind == "flash" and kind not in allowed:
        raise ValueError(
            f"{family} with flash attention: the kernel knows no mask, so that the tokens of an image no longer see "
            f"each other both ways. Load the model with attn_implementation={allowed[0]!r}"
        )
    if kind not in allowed or (kind == "flex" and getattr(model, "_supports_flex_attn", True) is False):
        others = ", ".join(other for other in allowed if other != kind)
        raise ValueError(f"{family} with {kind} attention: its class does not allow it. Load the model with {others}")


def _own_attention(config: Any) -> str | None:
    """What the language model runs; its vision tower may run another."""
    text = config.get_text_config()
    return getattr(text, "_attn_implementation", None) or getattr(config, "_attn_implementation", None)


def _unwrapped(model_or_config: Any) -> tuple[Any, Any]:
    """The model of transformers inside its wrappers, or None, and its config."""
    if isinstance(model_or_config, PreTrainedConfig):
        return None, model_or_config
    model = model_or_config
    while not isinstance(getattr(model, "config", None), PreTrainedConfig):
        # DistributedDataParallel, FSDP and DeepSpeed keep the model in `module`; torch.compile shows its attributes.
        inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            raise ValueError(
                f"{shorten(model_or_config)} is no model of transformers and no config of one: give one of them, or "
                "a name, one of 'nanovlm', 'thd' and 'text'"
            )
        model = inner
    return model, model.config
