"""Resizing of pixels that are already on the device, as Pillow does it.

Adds: `resize`, two matrix products; the same within one level of 255 on every device.
Leaves out: resizing while decoding (`images.py`). torch has no Lanczos filter on a GPU, and no antialiased one on some
devices; the processors of transformers silently take another filter there.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch


def resize(image: torch.Tensor, height: int, width: int, *, filter: str) -> torch.Tensor:
    """An image of another size, antialiased; across first, then down, rounded in between, as Pillow does.

    Args:
        image: (C, H, W) uint8.
        height: pixels.
        width: pixels.
        filter: "bicubic" or "lanczos".

    Returns:
        (C, height, width) uint8; the image itself where it has that size.
    """
    if image.shape[1:] == (height, width):
        return image
    across = _weights(image.shape[2], width, filter, image.device)
    down = _weights(image.shape[1], height, filter, image.device)
    wide = (image.to(torch.float32) @ across.T).round().clamp(0, 255)
    return (down @ wide).round().clamp(0, 255).to(torch.uint8)


@lru_cache(maxsize=16)  # of 4 MiB each for the largest images there are
def _weights(before: int, after: int, filter: str, device: torch.device) -> torch.Tensor:
    """(after, before) float32: how much each old pixel counts for each new one."""
    scale = before / after
    centres = (np.arange(after)[:, None] + 0.5) * scale
    distance = np.abs(np.arange(before) + 0.5 - centres) / max(scale, 1.0)
    weights = _FILTERS[filter](distance)
    whole = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return torch.from_numpy(whole).to(device)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic with a = -0.5, https://doi.org/10.1109/TASSP.1981.1163711."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    """The sinc windowed by three times as wide a sinc."""
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


_FILTERS = {"bicubic": _bicubic, "lanczos": _lanczos}
