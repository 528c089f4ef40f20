"""Evaluation of transformers.Trainer over packed batches: the token-weighted mean, however samples are packed.

Adds: `PackedEvaluation`, the part of a packed trainer that evaluates; `Stream`, a loader as Trainer takes it.
Leaves out: training (`trainer.py`), and evaluation over single samples, which stays Trainer's own.

Trainer's own mean is one over batches, so it depends on how many samples stand in one. Here sums are kept, of losses
and of label tokens, over all batches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from mmdp.device import feed
from mmdp.objective import loss
from mmdp.records import Batch
from mmdp.trainer_checks import is_packed, steps_an_epoch


class PackedEvaluation(Trainer):
    """A Trainer that evaluates over packed batches too."""

    _labelled_only: bool
    _image_processor: Any
    _sums: list[torch.Tensor]  # (3,) losses, label tokens and samples, of each batch evaluated so far

    def packed_loss(self, model: Any, batch: Batch, label_tokens: int, world_size: int) -> torch.Tensor:
        """`mmdp.loss`, as this trainer was made."""
        return loss(
            model,
            batch,
            label_tokens=label_tokens,
            world_size=world_size,
            labelled_only=self._labelled_only,
            image_processor=self._image_processor,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """One epoch of the loader's batches, on the device; Trainer's own for single samples."""
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(found, str) and isinstance(self.eval_dataset, dict):
            found = self.eval_dataset[found]
        if not is_packed(found):
            return super().get_eval_dataloader(eval_dataset)
        return DataLoader(Stream(found, self.args.device), batch_size=None, collate_fn=as_it_is)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The loss of one batch; its sums are kept."""
        if "batch" not in inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        batch = inputs["batch"]
        with torch.no_grad(), self.compute_loss_context_manager():
            mean = self.packed_loss(model, batch, max(1, batch.label_tokens), 1).float()
        more = [float(mean) * batch.label_tokens, batch.label_tokens, sum(map(len, batch.samples))]
        self._sums.append(torch.tensor(more, dtype=torch.float64))
        return mean, None, None

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; over packed batches the loss is the token-weighted mean over all of them and all ranks."""
        self._sums = []
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        if not isinstance(dataloader.dataset, Stream):
            return output
        if not self._sums:
            raise ValueError("the loader for evaluation gave no batch: there is nothing to evaluate on")
        # Floats of 32 bits where the device has no others; a count of samples or tokens beyond 2**24 is rounded there.
        kind = torch.float32 if self.args.device.type == "mps" else torch.float64
        sums = torch.stack(self._sums).sum(0).to(self.args.device, kind)
        total, tokens, samples = self.accelerator.reduce(sums, "sum").tolist()
        if not tokens:
            raise ValueError("the batches for evaluation have no label token: there is nothing to evaluate on")
        prefix = kwargs.get("metric_key_prefix", "eval")
        metrics = {**(output.metrics or {}), f"{prefix}_loss": total / tokens}
        return output._replace(metrics=metrics, num_samples=round(samples))


class Stream(IterableDataset[dict[str, Any]]):
    """One epoch of a loader in each loop, for evaluation: the same batches each time, where the loader can go back.

    Of a loader that counts epochs it is the first, from its start, wherever the loader stands, and stands then.

    Args:
        loader: gives packed batches.
        device: where they are to be.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._loader = loader
        self._device = device

    def __len__(self) -> int:
        found = steps_an_epoch(self._loader)
        if found is None:
            raise TypeError("this loader has no length")
        return found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = self._loader.state_dict() if hasattr(self._loader, "rewind") else None
        if start is not None and hasattr(self._loader, "set_epoch"):
            for epoch in (1, 0):  # the second is another one than the first, so it begins at its start
                self._loader.set_epoch(epoch)
        for batch in feed(self._loader, self._device):
            yield as_trainer_takes_it(batch)
        if start is not None:
            self._loader.rewind(start)


def as_trainer_takes_it(batch: Batch) -> dict[str, Any]:
    """A batch, and beside it what Trainer counts tokens and operations by."""
    return {"batch": batch, "input_ids": batch.input_ids, "attention_mask": batch.segments > 0}


def as_it_is(sample: Any) -> Any:
    """The collator of what is a batch already."""
    return sample
