"""transformers.Trainer, made right for packed batches.

Adds: `packed_trainer`, a Trainer over one of our loaders.
Leaves out: the loss (`objective.py`), the loader's state in checkpoints (`trainer_checkpoint.py`), evaluation
(`trainer_evaluation.py`), and what is refused (`trainer_checks.py`).

| what Trainer does by itself | what is done here |
|---|---|
| accelerate cuts every tensor of a batch along its first dimension, one row for each | batches come whole, by `feed` |
| it takes `use_cache=False` out of a batch, and packed samples of Qwen-VL see each other | `adapt`, right at the call |
| it leaves the mean over micro-steps to the model, and some models (Qwen-VL) do not take it | `mmdp.loss`, in one sum |
| it resumes by building all batches of the epoch again, and dropping them | the loader goes on where it was |
| it saves the weights of some models (Qwen2.5-VL) under other names than it loads them by: a resumed run begins with \
fresh ones, and a warning | weights of other names are loaded by `from_pretrained`; any that lack are an error |

The epochs of Trainer all have as many steps as the first epoch of the plan. Those of a plan may differ by a few rows,
and so the loader's batches run on from one epoch into the next: none is lost, and none comes twice.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

from mmdp.device import Feed, feed
from mmdp.records import Batch
from mmdp.trainer_checkpoint import LoaderProgress, last_whole, load_misnamed, loader_progress, trainer_state
from mmdp.trainer_checks import check_arguments, check_checkpoint, steps_an_epoch, steps_of
from mmdp.trainer_evaluation import PackedEvaluation, as_it_is, as_trainer_takes_it


def packed_trainer(
    model: Any,
    args: TrainingArguments,
    loader: Iterable[Batch],
    *,
    labelled_only: bool = False,
    image_processor: Any = None,
    **kwargs: Any,
) -> Trainer:
    """A Trainer whose `train` takes packed batches from a loader, and goes on exactly after a kill.

    Batches, their order and their workers are the loader's affair: the `dataloader_*` arguments change nothing, and
    `per_device_train_batch_size` only the samples a second that Trainer reckons where `max_steps` is given. Trainer
    counts a batch of the loader as one micro-step.

    Args:
        model: of a family that `adapt` knows.
        args: Trainer's own.
        loader: `Loader`, or a DataLoader with `PackedDataset.sampler` as its batch sampler, of this rank. Each `train`
            without a checkpoint starts where the loader was at the first one; a DataLoader just goes on.
        labelled_only: as in `loss`.
        image_processor: as in `adapt`.
        kwargs: for Trainer, such as `callbacks` and `optimizers`. `eval_dataset` may be a loader of packed batches, of
            this rank, or a dict of them: the loss is then the token-weighted mean over an epoch of it. Else it is a
            data set of single samples, with its `data_collator`, and the loss is Trainer's mean over batches.

    Raises:
        ImportError: accelerate is missing.
        ValueError: an argument that would be without effect, or make the training wrong.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError("transformers.Trainer needs accelerate: pip install 'accelerate>=1.10'")
    check_arguments(args, loader, kwargs)
    return PackedTrainer(model, args, loader, labelled_only, image_processor, **kwargs)


class PackedTrainer(PackedEvaluation):
    """Made by `packed_trainer`."""

    # Before transformers knew this name, it asked whether the model scales its loss: see __init__.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        loader: Iterable[Batch],
        labelled_only: bool,
        image_processor: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, args=args, **kwargs)
        if not hasattr(Trainer, "loss_is_scaled_for_ga"):
            self.model_accepts_loss_kwargs = True
        self._loader = loader
        self._labelled_only = labelled_only
        self._image_processor = image_processor
        self._steps_an_epoch = steps_an_epoch(loader)
        self.add_callback(LoaderProgress(self._steps_an_epoch, args.gradient_accumulation_steps))
        self._start: dict[str, Any] | None = None
        self._resumed: str | None = None
        self._stream: _Stream | None = None
        self._misnamed: list[str] = []

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_misnamed(resume_from_checkpoint, self.model if model is None else model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_misnamed(str(self.state.best_model_checkpoint), self.model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._misnamed = [*load_result.missing_keys, *load_result.unexpected_keys]

    def _load_misnamed(self, folder: str, model: Any) -> None:
        """Loads a checkpoint by the names that its model was saved with, where some did not fit."""
        names, self._misnamed = self._misnamed, []
        if names:
            load_misnamed(model, folder, names)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; from a checkpoint it goes on with the batch after the last one trained on.

        True takes the last whole checkpoint of the output folder.

        Raises:
            ValueError: a checkpoint that no packed trainer wrote, one of another plan, or of other epochs.
        """
        is_any = isinstance(resume_from_checkpoint, bool) and resume_from_checkpoint
        self._resumed = last_whole(self.args.output_dir) if is_any else str(resume_from_checkpoint or "") or None
        try:
            return super().train(self._resumed, *args, **kwargs)
        finally:
            if self._stream is not None:
                self._stream.close()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches, on the device; taken up where the loader or the checkpoint says. Trainer asks once a `train`."""
        goal, skip = self._start, 0
        if self._start is None and hasattr(self._loader, "rewind"):
            self._start = self._loader.state_dict()  # type: ignore[attr-defined]
        if self._resumed is not None:
            saved = loader_progress(self._resumed)
            check_checkpoint(self.args, saved, steps=self._steps_an_epoch, checkpoint=self._resumed)
            goal, skip = saved["loader_state"], self._micro_steps_skipped(self._resumed)
        if goal is not None:
            _go_to(self._loader, goal)
        batches = _endless(feed(self._loader, self.args.device))
        must_tell = self.args.save_strategy != "no"
        self._stream = _Stream(batches, self._steps_an_epoch, skip, goal or self._start, must_tell)
        return DataLoader(self._stream, batch_size=None, collate_fn=as_it_is)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, _device: torch.device) -> Any:
        """The batches of one optimiser step, and the label tokens of all of them over all ranks."""
        samples = list(islice(epoch_iterator, num_batches))
        batches = [sample["batch"] for sample in samples]
        tokens = [one.label_tokens if one.step_label_tokens is None else one.step_label_tokens for one in batches]
        if self.args.world_size > 1 and any(one.step_label_tokens is None for one in batches):
            raise ValueError(
                "these batches belong to no step, so that ranks do not know each other's label tokens: give "
                "mmdp.Loader, or a DataLoader with PackedDataset.sampler, with this rank and world size"
            )
        return samples, sum(tokens)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`mmdp.loss` of a packed batch; Trainer's own of what a data set for evaluation gives."""
        if "batch" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # Whatever wraps the model, accelerate lets it take the mean.
        return self.packed_loss(model, inputs["batch"], num_items_in_batch, self.args.world_size)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Samples of an epoch over all ranks, where the plan is known; what Trainer reckons its speed by."""
        steps = steps_of(self._loader)
        if steps is None or dataloader.dataset is not self._stream:
            return super().num_examples(dataloader)
        return len(steps.plan.sizes) - len(steps.plan.skipped)

    def _micro_steps_skipped(self, checkpoint: str) -> int:
        """How many micro-steps of its epoch Trainer is going to skip, by its own reckoning."""
        if self.args.ignore_data_skip:
            return 0
        done, every = trainer_state(checkpoint)["global_step"], self.args.gradient_accumulation_steps
        if self._steps_an_epoch is not None:
            done %= max(1, -(-self._steps_an_epoch // every))
        return int(done * every)


class _Stream(IterableDataset[dict[str, Any]]):
    """Batches of the loader without end, an epoch's number of them in each loop.

    Args:
        batches: without end.
        length: steps an epoch; None where the loader has no length.
        skip: micro-steps that Trainer will take and throw away in the first loop. It gets nothing for them.
        state: the loader's, before the first batch.
        must_tell: refuse a batch without a state.

    Attributes:
        state: the loader's, after the last batch that was handed out.
    """

    def __init__(
        self,
        batches: Generator[Batch, None, None],
        length: int | None,
        skip: int,
        state: Mapping[str, Any] | None,
        must_tell: bool,
    ) -> None:
        self.state = state
        self._batches = batches
        self._length = length
        self._skip = skip
        self._must_tell = must_tell

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this loader has no length: give TrainingArguments(max_steps=...)")
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        skip, self._skip = self._skip, 0
        for number in count() if self._length is None else range(self._length):
            yield {} if number < skip else self._next()

    def close(self) -> None:
        """Ends the loop over the loader, which is then after the last batch that was handed out."""
        self._batches.close()

    def _next(self) -> dict[str, Any]:
        batch = next(self._batches)
        if batch.state is None and self._must_tell:
            raise ValueError(
                "the batches of this loader tell no state, so that no checkpoint could be resumed: give mmdp.Loader, "
                "or a DataLoader with PackedDataset.sampler, or save_strategy='no'"
            )
        self.state = batch.state
        return as_trainer_takes_it(batch)


def _endless(source: Feed[Batch]) -> Generator[Batch, None, None]:
    while True:
        found = False
        for batch in source:
            found = True
            yield batch
        if not found:
            raise ValueError("the loader gave no batch in a whole loop: there is nothing to train on")


def _go_to(loader: Any, state: Mapping[str, Any]) -> None:
    """The next batch is the one after the state."""
    for part, name in (
        (loader, "rewind"),  # also after a loop has begun
        (loader, "load_state_dict"),
        (getattr(loader, "batch_sampler", None), "load_state_dict"),
    ):
        if hasattr(part, name):
            getattr(part, name)(state)
            return
    raise ValueError(f"a {type(loader).__name__} can't load a state: give mmdp.Loader, or PackedDataset.sampler")
