"""A batch without images, with one blank image behind its samples, so that the vision tower runs on every rank.

Adds: `with_blank_image`. Where the gradients of several ranks are joined, or their parameters gathered, a rank whose
tower does not run makes the others wait for ever. The blank image is a segment of its own without labels: no sample
sees it, the loss stays what it was, and the tower's gradients are there, and zero.
Leaves out: batches that have an image, and models that have no tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from mmdp.families import MROPE
from mmdp.records import IGNORE, Batch, ImageBuffer
from mmdp.vision_inputs import llava_rules, num_image_tokens


def with_blank_image(batch: Batch, config: Any) -> Batch:
    """The batch with one image in the longest tail; all rows grow, where no tail is long enough.

    Args:
        batch: without images.
        config: of a model with a vision tower.

    Returns:
        A batch whose `samples` do not name the blank image; its sample index is -1.
    """
    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size if config.model_type in MROPE else vision.image_size
    is_llava = config.model_type == "llava_onevision"
    height = llava_rules(config).layout(side, side).height if is_llava else side
    ids, segments = batch.on_host()
    used = np.max((segments > 0) * np.arange(1, segments.shape[1] + 1), axis=1)
    row, number = int(used.argmin()), int(segments.max()) + 1
    device = batch.input_ids.device
    blank = ImageBuffer(
        pixels=torch.zeros(3 * height * side, dtype=torch.uint8, device=batch.images.pixels.device),
        offsets=torch.tensor([0, 3 * height * side]),
        heights=torch.tensor([height]),
        widths=torch.tensor([side]),
        rows=torch.tensor([row]),
        samples=torch.tensor([-1]),
        segments=torch.tensor([number]),
        originals=torch.tensor([[side, side]]),
    )
    tokens = int(num_image_tokens(blank, config)[0])
    more = max(0, int(used[row]) + tokens - segments.shape[1])
    filling = 0 if config.image_token_id else 1  # any text token: no sample sees a tail
    ids = np.pad(ids, ((0, 0), (0, more)), constant_values=filling)
    segments = np.pad(segments, ((0, 0), (0, more)))
    ids[row, -tokens:], segments[row, -tokens:] = config.image_token_id, number
    made = replace(
        batch,
        input_ids=torch.from_numpy(ids),
        segments=torch.from_numpy(segments),
        labels=pad(batch.labels, (0, more), value=IGNORE),
        images=blank,
        host=None,
    )
    positions = np.arange(ids.size) - np.repeat(made.cu_seqlens[:-1], np.diff(made.cu_seqlens))
    return replace(
        made,
        input_ids=made.input_ids.to(device),
        segments=made.segments.to(device),
        position_ids=torch.from_numpy(positions.reshape(ids.shape)).to(device),
        host=None if batch.host is None else (made.input_ids, made.segments),
    )
