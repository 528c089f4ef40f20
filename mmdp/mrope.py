"""Positions with a time, a height and a width (M-RoPE), for all samples of a batch at once and without a model.

Adds: `mrope_positions`.
Leaves out: videos.

In each sample text counts on by one. An image starts at the position where the text stopped; its tokens share that
time, and their height and width count up from it over its grid of cells. The text behind it goes on where the longer
side of the grid ends. Source: M-RoPE of Qwen2-VL, https://arxiv.org/abs/2409.12191; equal to `get_rope_index` of the
model classes on every sample alone (tests/test_adapters.py). That method itself can't be used on a packed row: it would
run on over the borders of samples.
"""

from __future__ import annotations

import numpy as np


def mrope_positions(positions: np.ndarray, is_image: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """Time, height and width of each token.

    Args:
        positions: (B, L) integers, 0 at the start of each segment and tail.
        is_image: (B, L) bool, the placeholders; those of one image stand side by side.
        grids: (N, 2) integers, lines and columns of cells of each image, in reading order over all rows.

    Returns:
        (3, B, L) int64.

    >>> positions = np.array([[0, 1, 2, 3, 4, 5, 0, 1]])  # two samples; an image of 2 x 2 cells in the first
    >>> is_image = np.array([[0, 1, 1, 1, 1, 0, 0, 0]], dtype=bool)
    >>> mrope_positions(positions, is_image, np.array([[2, 2]])).tolist()
    [[[0, 1, 1, 1, 1, 3, 0, 1]], [[0, 1, 1, 2, 2, 3, 0, 1]], [[0, 1, 2, 1, 2, 3, 0, 1]]]
    """
    flat, on = positions.reshape(-1).astype(np.int64), is_image.reshape(-1)
    if not len(grids):
        return np.broadcast_to(flat, (3, flat.size)).reshape(3, *positions.shape).copy()
    cells = grids.prod(axis=1)
    ends = np.cumsum(cells)
    saved = np.append(0, np.cumsum(cells - grids.max(axis=1)))  # positions that the images so far did without
    before = np.cumsum(on) - on  # placeholders in front of each token
    image = np.searchsorted(ends, before, side="right")  # images in front of each token; its own number within one
    first = image[np.arange(flat.size) - flat]  # images in front of the token's sample
    packed = np.tile(flat - (saved[image] - saved[first]), (3, 1))
    own = image[on]
    offset = before[on] - (ends - cells)[own]
    packed[:, on] -= offset  # back to the first token of the image
    packed[1, on] += offset // grids[own, 1]
    packed[2, on] += offset % grids[own, 1]
    return packed.reshape(3, *positions.shape)
