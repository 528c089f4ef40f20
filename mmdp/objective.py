"""The loss of a packed batch, right in every sum it is a part of.

Adds: `loss`, the cross entropy summed over label tokens / the label tokens of the whole step.
Leaves out: what the model is given (`adapters.py`), the loop around it (`trainer.py` is one).

Why not the loss that a model of transformers returns: that is the mean over the label tokens of one batch.

| where | its mean | here |
|---|---|---|
| a batch without labels | 0 / 0, NaN | 0, and gradients of 0 |
| ranks with unequal numbers of label tokens | a token counts for more where there are few | every token counts alike |
| gradient accumulation | likewise, from one micro-step to the next | likewise; `label_tokens` is the sum over them |

So a step's gradient is that of one large batch, however it is cut. It is the token-weighted mean, as packing gives
it, and not the mean of the means of samples: a long answer weighs more than a short one.

The label tokens of a step are those that were measured. A sample that fails while its row is built stays in that
number: all ranks must divide by the same one, and none of them knows what failed on another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.nn.functional import cross_entropy

from mmdp.adapters import adapt
from mmdp.families import resolve
from mmdp.records import IGNORE, Batch, check_batch


def loss(
    model: Any,
    batch: Batch,
    *,
    attention: str | None = None,
    label_tokens: int | None = None,
    world_size: int | None = None,
    always_vision: bool | None = None,
    labelled_only: bool = False,
    image_processor: Any = None,
) -> torch.Tensor:
    """The share of this batch in the loss of its step, to call `backward` on.

    The sum of these numbers over ranks and micro-steps is the token-weighted mean over the step, and the gradients add
    up to its gradient::

        micro_steps = list(itertools.islice(feed, 4))
        tokens = sum(batch.step_label_tokens for batch in micro_steps)
        for batch in micro_steps:
            mmdp.loss(model, batch, label_tokens=tokens).backward()

    Args:
        model: of a family that `adapt` knows, also inside DistributedDataParallel, FSDP or torch.compile.
        batch: on the device of the model.
        attention: what the language model runs; by default its config says.
        label_tokens: what to divide by. By default those of the batch's step over all ranks, or of the batch where it
            belongs to no step. For gradient accumulation: their sum over the micro-steps.
        world_size: a factor, for who takes the mean of gradients over ranks where the sum is meant. By default the
            ranks of the process group where the model is inside DistributedDataParallel or FSDP (`fully_shard` too),
            which both take the mean; and else 1, also below `torch.no_grad`, as in an evaluation. Give it where some
            dimension of FSDP's mesh is not data-parallel.
        always_vision: run the vision tower for a batch without images too. The loss stays what it is, and the tower has
            gradients of 0 instead of none: an optimiser then goes on with its momentum and weight decay, and leaves it
            alone otherwise. Ranks wait for one another where gradients or weights of the tower meet. So by default
            where the model is inside such a wrapper, or `world_size` is above 1.
        labelled_only: compute logits only where there are labels. Saves memory, most of it where the vocabulary is
            large; the host waits for the device once.
        image_processor: of the checkpoint, where its pixels are not normalised as the family's are; as in `adapt`.

    Returns:
        A scalar, in float32 or what is finer in the model.

    Raises:
        ValueError: what `adapt` refuses; a number of label tokens that can't be; a wrapper that splits the batch, or of
            which it is not known whether it takes the mean.
    """
    check_batch(batch)
    ranks = _ranks_of_mean(model)
    if always_vision is None:
        always_vision = (ranks is not None or (world_size or 1) > 1) and resolve(model, attention).has_vision
    if world_size is None:
        world_size = _checked(ranks, model) if torch.is_grad_enabled() else 1
    divisor = _label_tokens(batch, label_tokens, world_size)
    inputs = adapt(batch, model, attention, always_vision=always_vision, image_processor=image_processor)
    targets = _shifted(inputs.pop("labels"))
    if labelled_only:
        # (B, L) bool: transformers takes these tokens out before the head, (label tokens, V) in one dimension.
        inputs["logits_to_keep"] = targets != IGNORE
        targets = targets[inputs["logits_to_keep"]]
    logits = model(**inputs).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total * (world_size / divisor)


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """(B, L): at each token the label of the next. The first of each segment is -100, so that none crosses over."""
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1] = IGNORE
    return shifted


def _label_tokens(batch: Batch, label_tokens: int | None, world_size: int) -> int:
    if label_tokens is not None:
        if label_tokens < batch.label_tokens:
            raise ValueError(
                f"label_tokens is {label_tokens}, and this batch alone has {batch.label_tokens}: give the sum of "
                "`step_label_tokens` over the batches of an optimiser step"
            )
    elif batch.step_label_tokens is not None:
        label_tokens = batch.step_label_tokens
    elif world_size > 1:
        raise ValueError(
            "this batch belongs to no step, so that it knows the label tokens of its own rank alone: take batches from "
            "mmdp.Loader, or from a DataLoader with PackedDataset.sampler, or give label_tokens over all ranks"
        )
    else:
        label_tokens = batch.label_tokens
    return max(1, label_tokens)


def _ranks_of_mean(model: Any) -> int | None:
    """Over how many ranks a wrapper takes the mean of gradients; None where there is no such wrapper."""
    if isinstance(model, torch.nn.DataParallel):
        raise ValueError(
            "DataParallel cuts every tensor along its first dimension, and packed batches with it: start one process a "
            "device (torchrun) and use DistributedDataParallel"
        )
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    model = getattr(model, "_orig_mod", model)  # torch.compile
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return distributed.get_world_size(model.process_group)
    if isinstance(model, (FullyShardedDataParallel, FSDPModule)):
        return distributed.get_world_size()
    return None


def _checked(ranks: int | None, model: Any) -> int:
    """The factor where none was given; refuses to guess it for a wrapper that nobody here knows."""
    if ranks is not None:
        return ranks
    is_alone = not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1
    if not is_alone and isinstance(getattr(model, "module", None), torch.nn.Module):
        raise ValueError(
            f"a {type(model).__name__} may or may not take the mean of gradients over ranks: give world_size, the "
            "number of ranks where it does (DeepSpeed) and 1 where it takes the sum"
        )
    return 1
