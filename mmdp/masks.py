"""Masks that keep the samples of a row apart, where positions alone can't.

Adds: `block_mask`, (B, 1, L, L), built on the device of the batch; `gemma3_masks`, the two that Gemma 3 takes.
Leaves out: models that find their samples by positions, which need no mask (`families.py`).

A mask costs B * L * L bytes, 64 MiB for 4 rows of 4096, and is built on the device in a moment; in a loader's workers
it takes seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def block_mask(runs: torch.Tensor, blocks: torch.Tensor | None = None, window: int | None = None) -> torch.Tensor:
    """Which token may see which.

    Args:
        runs: (B, L) integers, another number in each segment and tail of a row.
        blocks: (B, L) integers: tokens of the same number above 0, in the same run, see each other both ways.
        window: tokens; how far a token sees back, itself counted.

    Returns:
        (B, 1, L, L) bool, True where the token of the third dimension sees that of the fourth.

    >>> block_mask(torch.tensor([[1, 1, 2, 2]])).int().tolist()
    [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]]
    """
    place = torch.arange(runs.shape[1], device=runs.device)
    allowed = place[:, None] >= place[None, :]
    if blocks is not None:
        allowed = allowed | ((blocks[:, :, None] == blocks[:, None, :]) & (blocks > 0)[:, :, None])
    if window is not None:
        allowed = allowed & (place[:, None] - place[None, :] < window)
    return (allowed & (runs[:, :, None] == runs[:, None, :]))[:, None]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same mask in the form that eager attention adds to its scores: 0, or the least number of `dtype`."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def image_blocks(runs: np.ndarray, is_image: np.ndarray) -> np.ndarray:
    """(B, L) int32: a number above 0 for each stretch of image tokens in one run, 0 for text.

    >>> image_blocks(np.array([[1, 1, 1, 2, 2]]), np.array([[0, 1, 1, 1, 0]], dtype=bool)).tolist()
    [[0, 1, 1, 2, 0]]
    """
    starts = is_image.copy()
    starts[:, 1:] &= ~is_image[:, :-1] | (runs[:, 1:] != runs[:, :-1])
    return np.where(is_image, np.cumsum(starts, axis=1), 0).astype(np.int32)


def gemma3_masks(
    runs: np.ndarray, is_image: np.ndarray, window: int, *, attention: str, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What Gemma 3 takes as `attention_mask`: one mask for its full layers, one for its sliding layers.

    Given only positions, transformers 5.24 would look up image blocks by the positions inside a sample, and so give
    all samples of a row the blocks of its first one in the sliding layers.

    Args:
        runs: (B, L) integers, another number in each segment and tail of a row.
        is_image: (B, L) bool, the placeholders.
        window: tokens, the config's `sliding_window`.
        attention: "sdpa" (bool masks), "eager" (masks to add) or "flex" (`BlockMask`).
        device: where the masks are built.
        dtype: of the masks for eager.
    """
    on_device = torch.from_numpy(runs).to(device)
    blocks = torch.from_numpy(image_blocks(runs, is_image)).to(device)
    windows = {"full_attention": None, "sliding_attention": window}
    if attention == "flex":
        return {layer: _flex_mask(on_device, blocks, size) for layer, size in windows.items()}
    masks = {layer: block_mask(on_device, blocks, size) for layer, size in windows.items()}
    return masks if attention == "sdpa" else {layer: additive(mask, dtype) for layer, mask in masks.items()}


def _flex_mask(runs: torch.Tensor, blocks: torch.Tensor, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        allowed = (query >= key) | ((blocks[row, query] == blocks[row, key]) & (blocks[row, query] > 0))
        if window is not None:
            allowed = allowed & (query - key < window)
        return allowed & (runs[row, query] == runs[row, key])

    return create_block_mask(sees, runs.shape[0], None, runs.shape[1], runs.shape[1], device=str(runs.device))
