"""A batch as the keyword arguments that a model family wants.

Adds: `adapt`. What it gives keeps the samples of a packed row apart, and it refuses at once what would not.
Leaves out: which families there are (`families.py`), pixels (`vision_inputs.py`), the loss.

| attention | how samples are told apart |
|---|---|
| sdpa, eager, flex | positions that restart, no mask and no cache: the model finds the borders itself |
| flash | the same, and `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` for the kernel |
| Gemma 3, any | two masks (`masks.py`) |

`use_cache=False` stands in every result: with a cache, which models make by default, packed rows are not recognised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmdp.blank_image import with_blank_image
from mmdp.families import MROPE, Target, resolve
from mmdp.masks import gemma3_masks
from mmdp.mrope import mrope_positions
from mmdp.records import Batch, check_batch
from mmdp.refusals import counted
from mmdp.trainer_forms import megatron_thd, nanovlm
from mmdp.vision import filter_of
from mmdp.vision_inputs import image_cells, num_image_tokens, vision_inputs


def adapt(
    batch: Batch,
    model_or_config: Any,
    attention: str | None = None,
    *,
    always_vision: bool = False,
    flatten: bool | None = None,
    image_processor: Any = None,
) -> dict[str, Any]:
    """The keyword arguments of one forward pass, on the device that the batch is on.

    Args:
        batch: B rows of L tokens. Move it to the device first: pixels are normalised there.
        model_or_config: a model of transformers, also inside its wrappers, or its config; or a name: `nanovlm`, `thd`
            (Megatron), or `text` for a text-only model that is not listed.
        attention: what the language model runs: "sdpa", "eager", "flash" or "flex". By default its config says.
        always_vision: give a batch without images a blank one that nothing sees, so that the vision tower runs and has
            gradients, of zero. For training on several ranks, where a rank whose tower does not run stops all others.
        flatten: make one row of all, (1, B * L). By default for flash only; both ways are right.
        image_processor: takes mean and deviation of the pixels from it, and the filter that the whole image of SmolVLM
            and Idefics3 is made with, where they are not those of the family.

    Returns:
        `input_ids`, `labels` (unshifted: the model shifts), `position_ids`, `use_cache=False`, and what the family and
        the attention need beside them. `position_ids` are (4, B, L) for Qwen-VL: first those of the row, then time,
        height and width. The names of other trainers are theirs (`trainer_forms.py`).

    Raises:
        ValueError: a family or attention that would leak or is not known, or images that do not fit the text.
    """
    check_batch(batch)
    if isinstance(model_or_config, str) and model_or_config in _FORMS:
        if always_vision:
            raise ValueError(f"always_vision needs to know the model, and {model_or_config!r} is but a form")
        return _FORMS[model_or_config](batch)
    target = resolve(model_or_config, attention)
    if not target.has_vision:
        if len(batch.images) or always_vision:
            found = counted(len(batch.images), "image") if len(batch.images) else "always_vision=True"
            raise ValueError(f"{found} for {target.family}, a text-only model: give a model with a vision tower")
    elif always_vision and not len(batch.images):
        batch = with_blank_image(batch, target.config)
    flat = flatten if flatten is not None else target.attention == "flash"
    shape = (1, batch.input_ids.numel()) if flat else tuple(batch.input_ids.shape)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids.reshape(shape),
        "labels": batch.labels.reshape(shape),
        "position_ids": _positions(batch, target, shape),
        "use_cache": False,
    }
    if target.attention == "flash":
        inputs |= _boundaries(batch)
    if target.family == "gemma3":
        inputs["attention_mask"] = _gemma3_masks(batch, target, shape)
    if target.has_vision:
        check_placeholders(batch, target.config)
        own = _of_processor(image_processor) if image_processor is not None else {}
        inputs |= vision_inputs(batch.images, target.config, num_rows=shape[0], dtype=target.dtype, **own)
    return inputs


def check_placeholders(batch: Batch, config: Any) -> None:
    """Refuses a batch whose text has other places for image features than its images give.

    Raises:
        ValueError: the first segment where they differ, with both numbers and the remedy.
    """
    ids, segments = batch.on_host()
    width = int(segments.max()) + 1
    keys = segments + np.arange(len(ids))[:, None] * width
    found = np.bincount(keys[ids == config.image_token_id], minlength=len(ids) * width)
    given = np.zeros_like(found)
    if len(batch.images):
        tokens = num_image_tokens(batch.images, config)
        if batch.images.segments is None:
            raise ValueError("these images do not know their segments: make the batch with mmdp.batch")
        np.add.at(given, batch.images.rows.numpy() * width + batch.images.segments.numpy(), tokens)
    if (found != given).any():
        row, segment = divmod(int(np.argmax(found != given)), width)
        place = f"row {row}, segment {segment}" if segment else f"the tail of row {row}"
        raise ValueError(
            f"{place} has {found[row * width + segment]} image placeholders (token {config.image_token_id}), its "
            f"images give {given[row * width + segment]} features: encode with the vision family, the options and the "
            f"image token of this {config.model_type}, and build rows with their pixels"
        )


def _of_processor(image_processor: Any) -> dict[str, Any]:
    normal = image_processor.image_mean, image_processor.image_std
    return {"normal": normal, "filter": filter_of(image_processor)}


def _positions(batch: Batch, target: Target, shape: tuple[int, ...]) -> torch.Tensor:
    rows = batch.position_ids.reshape(shape)
    if target.family not in MROPE:
        return rows
    ids = batch.on_host()[0]
    starts = batch.cu_seqlens
    restarted = (np.arange(ids.size) - np.repeat(starts[:-1], np.diff(starts))).reshape(shape)
    cells = image_cells(batch.images, target.config)
    grid = mrope_positions(restarted, (ids == target.config.image_token_id).reshape(shape), cells)
    return torch.cat([rows[None], torch.from_numpy(grid).to(rows.device)])


def _boundaries(batch: Batch) -> dict[str, Any]:
    """For flash kernels, of the flattened batch; the library flattens B rows in the same order."""
    bounds = torch.from_numpy(batch.cu_seqlens).to(batch.input_ids.device)
    longest = batch.max_seqlen
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _gemma3_masks(batch: Batch, target: Target, shape: tuple[int, ...]) -> dict[str, Any]:
    ids, bounds = batch.on_host()[0], batch.cu_seqlens
    runs = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    return gemma3_masks(
        runs.reshape(shape),
        (ids == target.config.image_token_id).reshape(shape),
        target.config.get_text_config().sliding_window,
        attention=target.attention,
        device=batch.input_ids.device,
        dtype=target.dtype,
    )


_FORMS = {"nanovlm": nanovlm, "thd": megatron_thd}
