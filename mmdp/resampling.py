"""Resizing of pixels that are already on the device, as `vision_pictures.py` does it with Pillow.

Adds: `resize`, two matrix products; the same within one level of 255 on every device. `weights`, what they multiply by.
Leaves out: resizing while decoding (`images.py`). torch has no Lanczos filter on a GPU, and no antialiased one on some
devices; the processors of transformers silently take another filter there.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch


def resize(image: torch.Tensor, height: int, width: int, *, filter: str) -> torch.Tensor:
    """An image of another size, antialiased; across first, then down, rounded and cut to 0..255 in between.

    Args:
        image: (C, H, W) uint8.
        height: pixels.
        width: pixels.
        filter: "bilinear", "bicubic" or "lanczos".

    Returns:
        (C, height, width) uint8; the image itself where it has that size.
    """
    if image.shape[1:] == (height, width):
        return image
    across = _on_device(image.shape[2], width, filter, image.device)
    down = _on_device(image.shape[1], height, filter, image.device)
    wide = _whole(image.to(torch.float32) @ across.T)
    return _whole(down @ wide).to(torch.uint8)


def _whole(values: torch.Tensor) -> torch.Tensor:
    """The nearest levels of 0..255; half goes up, as with Pillow."""
    return (values + 0.5).floor().clamp(0, 255)


@lru_cache(maxsize=16)  # of 4 MiB each for the largest images there are
def _on_device(before: int, after: int, filter: str, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights(before, after, filter)).to(device)


def weights(before: int, after: int, filter: str) -> np.ndarray:
    """(after, before) float32: how much each old pixel counts for each new one, along a line."""
    scale = before / after
    centres = (np.arange(after)[:, None] + 0.5) * scale
    distance = np.abs(np.arange(before) + 0.5 - centres) / max(scale, 1.0)
    shares = _FILTERS[filter](distance)
    whole: np.ndarray = (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)
    return whole


def _bilinear(x: np.ndarray) -> np.ndarray:
    """A triangle."""
    return np.where(x < 1, 1 - x, 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic with a = -0.5, https://doi.org/10.1109/TASSP.1981.1163711."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    """The sinc windowed by three times as wide a sinc."""
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


_FILTERS = {"bilinear": _bilinear, "bicubic": _bicubic, "lanczos": _lanczos}
