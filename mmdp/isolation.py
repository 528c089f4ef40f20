"""Does a packed row keep its samples apart? Run each alone and packed, and compare.

Adds: `check_isolation`, for any model of transformers on any device, with the very inputs that training uses.
Leaves out: the ways to get it wrong (`leaks.py`), which are tried when it fails, to name the likely one.

Alone, a sample runs as the model's own code has it: no positions, no mask, nothing of ours but its pixels. So the check
also holds our positions against those that the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mmdp.adapters import adapt
from mmdp.families import Target, resolve
from mmdp.leaks import LEAKS, refuse_leaks
from mmdp.records import Batch, ImageBuffer, check_batch
from mmdp.refusals import counted, shorten

LIMITS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.05}
"""The largest logit difference that rounding explains, in standard deviations of the logits; a leak is about 1 or more.
In float64 sines and cosines are float32 even then."""


@dataclass(frozen=True, slots=True)
class SampleError:
    """How far a sample is from itself alone.

    Attributes:
        row: of the batch.
        segment: of the row, from 1 on.
        sample: its index in the data set.
        tokens: how many it has.
        images: how many it has.
        error: the largest difference of any logit, in standard deviations of the sample's logits; NaN where one is NaN.
    """

    row: int
    segment: int
    sample: int
    tokens: int
    images: int
    error: float


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """What `check_isolation` found. `str` makes a table of it.

    Attributes:
        family: of the model.
        attention: of its language model.
        limit: what rounding explains, in standard deviations of the logits.
        samples: each of the batch.
        traps: names of the likely reasons in `leaks.LEAKS`: what the inputs show, else all that give these logits.
    """

    family: str
    attention: str
    limit: float
    samples: tuple[SampleError, ...]
    traps: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether each sample is the same packed as alone; a NaN is not."""
        return all(one.error <= self.limit for one in self.samples)

    @property
    def error(self) -> float:
        """The largest error of any sample; NaN where one is NaN."""
        errors = [one.error for one in self.samples]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    def __str__(self) -> str:
        head = f"{self.family}, {self.attention}: packed samples "
        head += f"are the same as alone, within {self.limit:g}" if self.passed else "are NOT the same as alone"
        lines = [f"{head} (in standard deviations of the logits)", "  row  sample  tokens  images      error"]
        for one in self.samples:
            mark = "" if one.error <= self.limit else "  <-- differs"
            lines.append(f"{one.row:5} {one.sample:7} {one.tokens:7} {one.images:7}  {one.error:9.2g}{mark}")
        lines += [f"likely reason, {trap}: {LEAKS[trap].reason}" for trap in self.traps]
        if not self.passed and not self.traps:
            lines.append("none of the known reasons gives these logits: look at what changes the model's attention")
        return "\n".join(lines)


def check_isolation(
    model: Any,
    batch: Batch,
    *,
    attention: str | None = None,
    layout: str | Callable[[Batch], Mapping[str, Any]] | None = None,
    limit: float | None = None,
) -> IsolationReport:
    """Runs every sample of a batch alone and packed.

    Args:
        model: of transformers, wrapped or not. Its mode is restored, no gradient is kept.
        batch: at least two samples; it is moved to where the model is. Logits of all its tokens must fit in memory.
        attention: as `adapt` takes it.
        layout: makes the packed inputs instead of `adapt`: a function of the batch, such as your own collator, or the
            name of a known leak, to see what it does.
        limit: the largest error that passes; by default that in `LIMITS` of the dtype that the model computes in: its
            own, or that of the autocast which it runs below.

    Raises:
        ValueError: fewer than two samples, an unknown name, a layout of other tokens, and what `adapt` raises.
    """
    check_batch(batch)
    target = resolve(model, attention)
    segments = batch.on_host()[1]
    places = [(row, int(number)) for row, line in enumerate(segments) for number in np.unique(line[line > 0])]
    if len(places) < 2:
        raise ValueError(
            f"a batch of {counted(len(places), 'sample')} shows nothing: give one with at least two, packed"
        )
    batch = batch.to(next(model.parameters()).device)
    with torch.no_grad(), _evaluating(model), _autocast_seen(model, batch.input_ids.device.type) as autocast:
        inputs = _layout(layout, target, model, attention)(batch)
        packed = _logits(model, inputs)
        if len(packed) != segments.size:
            raise ValueError(
                f"the layout's inputs have {len(packed)} tokens, the batch has {segments.size}: a layout must keep "
                "every token of the batch, tails too, row after row"
            )
        errors = []
        for row, number in places:
            one, at = _sample(batch, row, number)
            logits = _logits(model, _alone_inputs(one, model, attention, target))
            sample = batch.samples[row][number - 1] if number <= len(batch.samples[row]) else -1
            errors.append(SampleError(row, number, sample, len(at), len(one.images), _error(packed[at], logits)))
        dtype = autocast[0] if autocast else target.dtype
        report = IsolationReport(target.family, target.attention, limit or LIMITS.get(dtype, 0.3), tuple(errors))
        if report.passed:
            return report
        return replace(report, traps=_traps(model, batch, target, attention, inputs, packed))


def _layout(
    layout: str | Callable[[Batch], Mapping[str, Any]] | None, target: Target, model: Any, attention: str | None
) -> Callable[[Batch], Mapping[str, Any]]:
    if layout is None:
        return lambda batch: adapt(batch, model, attention)
    if callable(layout):
        return layout
    if layout not in LEAKS or not LEAKS[layout].applies(target):
        known = ", ".join(name for name, leak in LEAKS.items() if leak.applies(target))
        raise ValueError(f"unknown layout {shorten(layout)} for {target.family}: the known leaks are {known}")
    return lambda batch: LEAKS[layout].spoil(adapt(batch, model, attention), batch, target)


@contextmanager
def _autocast_seen(model: Any, device: str) -> Iterator[list[torch.dtype]]:
    """The dtypes of the autocast that the model's embeddings run below, as they run: its `forward` may begin one."""
    seen: list[torch.dtype] = []

    def note(_module: Any, _arguments: Any) -> None:
        if torch.is_autocast_enabled(device):
            seen.append(torch.get_autocast_dtype(device))

    hooks = [
        module.register_forward_pre_hook(note) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _logits(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """(tokens, vocabulary), rows back to back."""
    logits: torch.Tensor = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    return logits.flatten(0, 1)


def _error(packed: torch.Tensor, alone: torch.Tensor) -> float:
    """In standard deviations; a NaN anywhere stays one, which `max` of Python would lose."""
    dtype = torch.promote_types(alone.dtype, torch.float32)
    return float((packed.to(dtype) - alone.to(dtype)).abs().max() / alone.to(dtype).std())


def _alone_inputs(one: Batch, model: Any, attention: str | None, target: Target) -> dict[str, Any]:
    """The inputs of a single sample as the model's own processor would give them: it places the tokens itself."""
    return LEAKS["no_positions"].spoil(adapt(one, model, attention), one, target)


def _sample(batch: Batch, row: int, number: int) -> tuple[Batch, np.ndarray]:
    """One sample as a batch of its own, and its places in the flattened batch."""
    line = batch.on_host()[1][row]
    at = np.flatnonzero(line == number)
    part = slice(int(at[0]), int(at[-1]) + 1)

    def cut(values: torch.Tensor) -> torch.Tensor:
        return values[row : row + 1, part]

    images = batch.images
    if images.segments is None:
        chosen = []
    else:
        chosen = np.flatnonzero((images.rows.numpy() == row) & (images.segments.numpy() == number)).tolist()
    one = replace(
        batch,
        input_ids=cut(batch.input_ids),
        labels=cut(batch.labels),
        position_ids=cut(batch.position_ids),
        segments=torch.ones_like(cut(batch.segments)),
        images=_chosen(images, chosen),
        samples=(batch.samples[row][number - 1 : number],),
        host=None,
    )
    return one, at + row * len(line)


def _chosen(images: ImageBuffer, chosen: list[int]) -> ImageBuffer:
    parts = [images[index].reshape(-1) for index in chosen]
    lengths = torch.tensor([0, *map(len, parts)])
    return ImageBuffer(
        pixels=torch.cat(parts) if parts else images.pixels[:0],
        offsets=lengths.cumsum(0),
        heights=images.heights[chosen],
        widths=images.widths[chosen],
        rows=torch.zeros(len(chosen), dtype=torch.int64),
        samples=images.samples[chosen],
        segments=torch.ones(len(chosen), dtype=torch.int64),
        originals=None if images.originals is None else images.originals[chosen],
    )


def _traps(
    model: Any,
    batch: Batch,
    target: Target,
    attention: str | None,
    inputs: Mapping[str, Any],
    packed: torch.Tensor,
) -> tuple[str, ...]:
    """The known leak that the inputs show; where they look right, those that give the same logits."""
    try:
        refuse_leaks(inputs, model, attention)
    except ValueError as error:
        return tuple(name for name in LEAKS if str(error).startswith(f"{name} "))
    right = adapt(batch, model, attention)
    tried = {name: leak for name, leak in LEAKS.items() if leak.applies(target)}
    spoilt = {name: _logits(model, leak.spoil(right, batch, target)) for name, leak in tried.items()}
    return tuple(name for name, logits in spoilt.items() if _error(packed, logits) <= LIMITS[torch.float32])


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout; each part of the model gets its mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
