"""Inputs that look right and let samples of a packed row see each other.

Adds: `LEAKS`, each known way to get it wrong, by name, with the reason and the way out; `refuse_leaks`, which finds
them in inputs that did not come from `adapt`, before the model runs.
Leaves out: finding them by running the model (`isolation.py`).

Nothing warns of them, and the loss can even go down: the model then reads answers in the sample before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from mmdp.families import MROPE, Target, resolve
from mmdp.records import Batch

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Leak:
    """One way to get packed inputs wrong.

    Attributes:
        spoil: makes it of right inputs and the batch they were made of.
        reason: why it leaks, and the way out.
        applies: whether a target can meet it at all.
    """

    spoil: Callable[[Inputs, Batch, Target], Inputs]
    reason: str
    applies: Callable[[Target], bool] = lambda _target: True


def refuse_leaks(inputs: Mapping[str, Any], model_or_config: Any, attention: str | None = None) -> None:
    """Refuses inputs for packed rows that would leak.

    Args:
        inputs: keyword arguments of the model.
        model_or_config: as `adapt` takes it.
        attention: likewise.

    Raises:
        ValueError: the reason, and the way out.
    """
    target = resolve(model_or_config, attention)
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if _ndim(mask) == 2:
        _refuse("positions_and_mask", target)
    if target.family == "gemma3" and not (isinstance(mask, Mapping) and all(_ndim(one) == 4 for one in mask.values())):
        _refuse("no_masks", target)
    if target.family in MROPE and _ndim(positions) == 2:
        _refuse("flat_positions", target)
    if mask is not None:
        return  # of four dimensions: it tells the samples apart, whatever else is given
    if target.attention == "flash":
        if all(inputs.get(name) is not None for name in _BOUNDARIES):
            return
        if inputs["input_ids"].shape[0] > 1:
            _refuse("no_boundaries", target)
    if positions is None:
        _refuse("no_positions", target)
    if target.family in MROPE and positions.shape[0] != 4:
        _refuse("three_row_positions", target)
    default = getattr(target.config.get_text_config(), "use_cache", True) if target.config is not None else True
    if any(inputs.get(name) is not None for name in ("cache", "past_key_values")) or inputs.get("use_cache", default):
        _refuse("cache", target)


def _refuse(name: str, target: Target) -> NoReturn:
    raise ValueError(f"{name} for {target.family} with {target.attention} attention: {LEAKS[name].reason}")


def _ndim(value: Any) -> int | None:
    shape = getattr(value, "shape", None)  # a tensor's, or a BlockMask's
    return None if shape is None else len(shape)


_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _without(inputs: Inputs, *names: str) -> Inputs:
    """Fewer inputs; those for flash kernels always go, since no one who forgets the rest has them."""
    return {name: value for name, value in inputs.items() if name not in (*names, *_BOUNDARIES)}


def _no_positions(inputs: Inputs, _batch: Batch, target: Target) -> Inputs:
    return _without(inputs, "position_ids", "attention_mask") | _image_types(inputs, target)


def _mask_of_ones(inputs: Inputs, _batch: Batch, target: Target) -> Inputs:
    made = _without(inputs, "position_ids") | _image_types(inputs, target)
    return made | {"attention_mask": torch.ones_like(inputs["input_ids"])}


def _positions_and_mask(inputs: Inputs, _batch: Batch, target: Target) -> Inputs:
    return _without(inputs) | {"attention_mask": torch.ones_like(inputs["input_ids"])} | _token_types(inputs, target)


def _positions_and_padding_mask(inputs: Inputs, batch: Batch, target: Target) -> Inputs:
    mask = (batch.segments > 0).long().reshape(inputs["input_ids"].shape)
    return _without(inputs) | {"attention_mask": mask} | _token_types(inputs, target)


def _cache(inputs: Inputs, _batch: Batch, target: Target) -> Inputs:
    return _without(inputs, "attention_mask") | {"use_cache": True} | _token_types(inputs, target)


def _image_types(inputs: Inputs, target: Target) -> Inputs:
    """Which tokens are those of an image, for a Qwen-VL that is to find its own positions; also for Gemma 3."""
    if target.family in MROPE:
        return {"mm_token_type_ids": (inputs["input_ids"] == target.config.image_token_id).int()}
    return _token_types(inputs, target)


def _token_types(inputs: Inputs, target: Target) -> Inputs:
    """Which tokens are those of an image, for Gemma 3 that is to make its own masks."""
    if target.family != "gemma3":
        return {}
    return {"token_type_ids": (inputs["input_ids"] == target.config.image_token_id).long()}


def _is_mrope(target: Target) -> bool:
    return target.family in MROPE


LEAKS: dict[str, Leak] = {
    "no_positions": Leak(
        _no_positions,
        "without positions that restart, nothing tells where a sample ends. Give the `position_ids` of mmdp.adapt",
    ),
    "mask_of_ones": Leak(
        _mask_of_ones,
        "a mask of ones and no positions is one long sample. Give the inputs of mmdp.adapt, without a mask",
    ),
    "positions_and_mask": Leak(
        _positions_and_mask,
        "a mask (B, L), even one of ones or of sample numbers, stops the model from looking for samples in the "
        "positions. Leave `attention_mask` out: padding is a sample of its own, and its labels are -100",
    ),
    "positions_and_padding_mask": Leak(
        _positions_and_padding_mask,
        "a mask (B, L) stops the model from looking for samples in the positions, and makes flash kernels forget the "
        "boundaries. Leave `attention_mask` out: padding is a sample of its own, and its labels are -100",
    ),
    "cache": Leak(
        _cache,
        "with a cache, which models make by default, also in training, packed samples are not recognised. Give "
        "`use_cache=False` with every batch; setting it in the config of a Qwen-VL does not reach its language model",
        lambda target: target.family != "gemma3",  # its masks hold with a cache too
    ),
    "three_row_positions": Leak(
        lambda inputs, _batch, _target: _without(inputs) | {"position_ids": inputs["position_ids"][1:]},
        "three rows of positions (time, height, width) do not say where samples start. Put the row's own positions in "
        "front, (4, B, L), as mmdp.adapt does",
        _is_mrope,
    ),
    "flat_positions": Leak(
        lambda inputs, _batch, _target: _without(inputs) | {"position_ids": inputs["position_ids"][0]},
        "positions (B, L) are taken for time, height and width alike, so that images lose their grid and samples their "
        "borders. Give (4, B, L), as mmdp.adapt does",
        _is_mrope,
    ),
    "no_masks": Leak(
        lambda inputs, _batch, target: _without(inputs, "attention_mask") | _token_types(inputs, target),
        "from positions alone it places the images of every sample where the first one has them, in its sliding "
        "layers. Give the two masks of mmdp.adapt as `attention_mask`",
        lambda target: target.family == "gemma3",
    ),
    "no_boundaries": Leak(
        lambda inputs, _batch, _target: _without(inputs),
        "with several rows a flash kernel finds samples by `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and "
        "`max_length_k` only; without them each row is one sample. Give those of mmdp.adapt, or one row",
        lambda target: target.attention == "flash",
    ),
}
"""The known ways to get packed inputs wrong. Measured on every family in tests/test_isolation.py."""
