"""A batch in the forms of trainers with models of their own, whose labels are shifted already.

Adds: `nanovlm`, what nanoVLM's `VisionLanguageModel.forward` takes; `megatron_thd`, Megatron's packed form "THD".
Leaves out: models of transformers (`adapters.py`). Neither nanoVLM nor Megatron is needed here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmdp.masks import block_mask
from mmdp.records import IGNORE, Batch


def nanovlm(batch: Batch) -> dict[str, Any]:
    """The arguments of nanoVLM's forward, by its names.

    Its released attention takes a mask of keys only, (B, L), and with it every sample of a row sees those before it. A
    packed row needs the mask given here as the `attn_mask` of its `scaled_dot_product_attention`, with
    `is_causal=False`; the same fix is proposed there (huggingface/nanoVLM#204).

    Returns:
        `input_ids` (B, L), `images` (N, 3, H, W) float32 in 0..1 or an empty list, `attention_mask` (B, 1, L, L) bool,
        `targets` (B, L), shifted.

    Raises:
        ValueError: images of several sizes.
    """
    bounds = batch.cu_seqlens
    runs = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)).reshape(batch.input_ids.shape)
    return {
        "input_ids": batch.input_ids,
        "images": _same_size(batch) if len(batch.images) else [],
        "attention_mask": block_mask(torch.from_numpy(runs).to(batch.input_ids.device)),
        "targets": batch.shifted_labels(),
    }


def megatron_thd(batch: Batch) -> dict[str, Any]:
    """All rows as one, with the boundaries that `PackedSeqParams` takes.

    Returns:
        `tokens`, `labels` (shifted), `loss_mask` (float32, 1 where a label counts) and `position_ids`, (1, B * L) each;
        `qkv_format="thd"`, `cu_seqlens_q` and `cu_seqlens_kv` (n + 1,) int32, `max_seqlen_q` and `max_seqlen_kv`;
        `images`, uint8 views (3, H, W) in reading order: how they become features is the model's own affair.
    """
    labels = batch.shifted_labels().reshape(1, -1)
    bounds = torch.from_numpy(batch.cu_seqlens).to(labels.device)
    return {
        "tokens": batch.input_ids.reshape(1, -1),
        "labels": labels,
        "loss_mask": (labels != IGNORE).to(torch.float32),
        "position_ids": batch.position_ids.reshape(1, -1),
        "qkv_format": "thd",
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_kv": batch.max_seqlen,
        "images": list(batch.images),
    }


def _same_size(batch: Batch) -> torch.Tensor:
    images = batch.images
    sizes = {(int(height), int(width)) for height, width in zip(images.heights, images.widths, strict=True)}
    if len(sizes) > 1:
        raise ValueError(f"nanoVLM takes images of one size, these have {sorted(sizes)}: encode with `fixed:N`")
    return images.pixels.view(len(images), 3, *sizes.pop()).to(torch.float32) / 255
