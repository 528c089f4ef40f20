"""What a packed trainer is given, looked at before it trains: loaders, arguments, and the checkpoint it goes on from.

Adds: `check_arguments`, `check_checkpoint`; `is_packed`, `steps_of` and `steps_an_epoch`, which read a loader.
Leaves out: the training (`trainer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainingArguments

from mmdp.device import Feed
from mmdp.loader import Loader
from mmdp.packed_dataset import PackedDataset
from mmdp.refusals import shorten
from mmdp.steps import Steps
from mmdp.stream_loader import StreamLoader

_PLAIN_SAMPLING = ("random", "sequential")


def steps_of(loader: Any) -> Steps | None:
    """What a `Loader`, or the batch sampler of a DataLoader, knows of its rows; None where there is no plan."""
    for part in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(steps := getattr(part, "steps", None), Steps):
            return steps
    return None


def steps_an_epoch(loader: Any) -> int | None:
    """Of the plan's first epoch, wherever the loader stands; None without a length."""
    steps = steps_of(loader)
    if steps is not None:
        return steps.count(steps.plan.epoch(0))
    try:
        return len(loader)
    except TypeError:
        return None


def is_packed(data: Any) -> bool:
    """Whether this gives packed batches, and is no data set of single samples."""
    return isinstance(data, (Loader, StreamLoader)) or (isinstance(data, DataLoader) and steps_of(data) is not None)


def check_arguments(args: TrainingArguments, loader: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses what would be without effect, or wrong.

    Args:
        args: Trainer's own.
        loader: gives the batches to train on.
        kwargs: of Trainer.

    Raises:
        ValueError: with the value, the reason and the remedy.
    """
    if isinstance(loader, Feed):
        raise ValueError("give the loader itself, not a feed of it: Trainer's device decides where batches go")
    if isinstance(loader, PackedDataset):
        raise ValueError(
            "a PackedDataset gives rows, and no batches: give mmdp.Loader(source, encoder, plan), or a DataLoader with "
            "PackedDataset.sampler as its batch sampler"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"this process sees {args.n_gpu} GPUs, and Trainer would cut each batch over them (DataParallel): start "
            "one process a GPU with torchrun, or show it one, CUDA_VISIBLE_DEVICES=0"
        )
    _check_rank(args, loader, "the loader")
    _check_evaluation(args, kwargs)
    for name, why in {
        "train_dataset": "batches come from the loader",
        "compute_loss_func": "the loss is mmdp.loss",
    }.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}={shorten(kwargs[name])} would be without effect: {why}. Leave it out")
    for name, idle, why in (
        ("label_smoothing_factor", (0,), "mmdp.loss is the plain cross entropy"),
        ("auto_find_batch_size", (False,), "the loader decides how many rows a batch has"),
        ("parallelism_config", (None,), "a row's tokens must stay together on one device"),
        ("train_sampling_strategy", _PLAIN_SAMPLING, "the plan decides the order"),
        ("group_by_length", (False,), "the plan decides the order"),
    ):
        if (value := getattr(args, name, idle[0])) not in idle:
            raise ValueError(f"{name}={shorten(value)} can't be had with packed batches: {why}. Leave it out")


def check_checkpoint(args: TrainingArguments, saved: Mapping[str, Any], *, steps: int | None, checkpoint: str) -> None:
    """Refuses to go on by epochs where they have another number of steps than those of the checkpoint.

    Trainer reckons the epoch that it stands in, and the steps that are left, from the steps it has made; they would be
    too many or too few.

    Args:
        args: of this run.
        saved: what the checkpoint says: `micro_steps` an epoch, and how many make a step (`accumulation`).
        steps: micro-steps of an epoch now.
        checkpoint: its name.

    Raises:
        ValueError: what differs, and what to do.
    """
    if args.max_steps > 0:
        return
    for name, before, now, remedy in (
        ("batches an epoch", saved.get("micro_steps"), steps, "the same rows a batch and ranks"),
        ("batches a step", saved.get("accumulation"), args.gradient_accumulation_steps, "the same accumulation"),
    ):
        if before is not None and before != now:
            raise ValueError(
                f"{checkpoint} was made with {before} {name}, this run has {now}: Trainer counts epochs in steps, and "
                f"would train on rows too many or too few. Give {remedy}, or say when to stop by max_steps, or begin a "
                "training from its weights, with the loader at `mmdp.trainer_checkpoint.loader_state(checkpoint)`"
            )


def _check_rank(args: TrainingArguments, loader: Any, what: str) -> None:
    steps = steps_of(loader)
    if steps is not None and (steps.rank, steps.world_size) != (args.process_index, args.world_size):
        raise ValueError(
            f"{what} is for rank {steps.rank} of {steps.world_size}, this process is rank {args.process_index} of "
            f"{args.world_size}: give rank=args.process_index and world_size=args.world_size"
        )


def _check_evaluation(args: TrainingArguments, kwargs: Mapping[str, Any]) -> None:
    given = kwargs.get("eval_dataset")
    for data in given.values() if isinstance(given, Mapping) else [given]:
        if is_packed(data):
            _check_rank(args, data, "the loader for evaluation")
        elif isinstance(data, (Feed, DataLoader, PackedDataset)):
            raise ValueError(
                f"evaluation can't go over a {type(data).__name__}: give a loader of packed batches as eval_dataset, "
                "such as mmdp.Loader, or a data set of single samples with its data_collator"
            )
        elif data is not None and kwargs.get("data_collator") is None:
            raise ValueError(
                "eval_dataset has single samples, and no data_collator says how to put them together: give a loader of "
                "packed batches instead, such as mmdp.Loader, or your data_collator"
            )
    if given is None and kwargs.get("data_collator") is not None:
        raise ValueError("data_collator would be without effect: batches come from the loader. Leave it out")
