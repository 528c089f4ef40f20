"""Trainings to compare: tiny models of real families over real files, in this process and in others."""

import json
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from runs import Parts, Road, epochs, forkserver
from tiny_models import SPECS, encoder, folder_of, make_model
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainingArguments

import mmdp
from mmdp.loader import Loader

_prepared: list[str] = []


def prepare_children() -> None:
    """A fork server that has imported all that a child of ours needs: models and Trainer take many seconds."""
    context = forkserver()
    if not _prepared:
        server = multiprocessing.forkserver._forkserver  # one that other tests have started knows less
        if server._forkserver_pid is not None:
            # Asked to end, it would wait for all that have its pipe: a worker of a DataLoader whose trainer is killed
            # as it starts takes that one's death for granted, and never ends.
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
        _prepared.append("once in this process")
    context.set_forkserver_preload(["mmdp.trainer", "transformers.models.smolvlm.modeling_smolvlm"])
    multiprocessing.forkserver.ensure_running()


def parts_of(family: str, num_images: Sequence[int] = (1, 0, 2, 0, 0), *, repeat: int = 4, max_tokens=100) -> Parts:
    """Samples with so many images, or none for a text-only model, in rows for a tiny model of the family."""
    images = tuple(num_images) * repeat if family in SPECS else (0,) * len(num_images) * repeat
    source, encode = mmdp.open_source(folder_of(images) / "rows.jsonl"), encoder(family)
    sizes = mmdp.measure(source, encode)
    return Parts(source, encode, mmdp.plan(sizes, mmdp.Budget(max_tokens, 2), window=8, block=2, buffer=16))


def parts_of_ranks() -> Parts:
    """For two ranks: steps with an image on both, on one and on none of them, and a filler row at the end."""
    return parts_of("smolvlm", (1, 0, 0, 0, 0, 0, 0), max_tokens=64)


def sgd(model: Any) -> torch.optim.Optimizer:
    """With momentum, so that a checkpoint without it would show."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def weights(model: Any) -> torch.Tensor:
    """All of them, flat."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradients(model: Any) -> torch.Tensor:
    """All of them, flat; a parameter without one is an error."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def raw_loop(model: Any, loader: Any, micro_steps: Sequence[int], **options) -> list[float]:
    """The loss of each optimiser step; each takes so many batches of the loader, epoch after epoch."""
    optimizer, batches, losses = sgd(model), epochs(loader, 100), []
    for number in micro_steps:
        step = list(islice(batches, number))
        tokens = sum(batch.step_label_tokens for batch in step)
        losses.append(0.0)
        for batch in step:
            share = mmdp.loss(model, batch, label_tokens=tokens, **options)
            share.backward()
            losses[-1] += float(share.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# transformers.Trainer


def arguments(folder: Path, **changes) -> TrainingArguments:
    """Quiet, on the CPU, each step logged; a plain optimiser step."""
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    plain = {"max_grad_norm": 0, "save_strategy": "no"}
    return TrainingArguments(str(folder), **quiet | plain | changes)


def sgd_for_trainer(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """With a learning rate that stays."""
    optimizer = sgd(model)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def losses_of(trainer: Any) -> list[float]:
    """Of each optimiser step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class DieAt(TrainerCallback):
    """Kills its own process at the end of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, _args, state, _control, **_) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def life_of_trainer(family: str, parts: Parts, road: Road, folder: Path, die_at: int | None, resume: bool, changes):
    """Losses and weights of a training by Trainer, if it lives to the end."""
    torch.set_num_threads(1)
    model = make_model(family).train()
    args = arguments(folder, save_strategy="steps", save_steps=2, **changes)
    callbacks = [] if die_at is None else [DieAt(die_at)]
    loader = road.batches(parts, 1)
    trainer = mmdp.packed_trainer(model, args, loader, callbacks=callbacks, optimizers=sgd_for_trainer(model))
    trainer.train(resume_from_checkpoint=resume)
    return losses_of(trainer), weights(model).numpy()


def rank_of_trainer(family: str, parts: Parts, folder: Path, rank: int, port: int, changes) -> None:
    """One of two processes under Trainer; the first writes losses and weights."""
    torch.set_num_threads(1)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"}
    model = make_model(family).train()
    args = arguments(folder, ddp_backend="gloo", ddp_find_unused_parameters=False, **changes)
    loader = Loader(*parts, batch_size=1, rank=rank, world_size=2, executor="inline")
    evaluated = Loader(*parts, batch_size=1, rank=rank, world_size=2, executor="inline")
    trainer = mmdp.packed_trainer(model, args, loader, optimizers=sgd_for_trainer(model), eval_dataset=evaluated)
    trainer.train()
    judged = trainer.evaluate()["eval_loss"]
    if rank == 0:
        torch.save({"losses": losses_of(trainer), "weights": weights(model), "judged": judged}, folder / "end.pt")
    distributed.destroy_process_group()


# Ranks by hand


def train_rank(
    family: str, parts: Parts, folder: Path, rank: int, world_size: int, rows: int, total: int, life: int, pace: float
) -> None:
    """Trains up to `total` steps of so many rows, from the checkpoint on if there is one.

    A checkpoint is one file, written by the first rank before the step is told of in `progress`: weights, momentum, the
    loader's state, the gradient of the first step, and for each step its loss and the images and labels of each rank.
    """
    torch.set_num_threads(1)
    if world_size > 1:
        meeting = f"file://{folder}/meeting-{life}"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    bare = make_model(family).train()
    # Unused parameters are an error here, or make the other rank wait: each rank must run its vision tower.
    model = DistributedDataParallel(bare) if world_size > 1 else bare
    optimizer = sgd(bare)
    loader = Loader(*parts, batch_size=rows // world_size, rank=rank, world_size=world_size, executor="inline")
    history, first, path = [], None, folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path)
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        history, first = saved["history"], saved["first"]
    for batch in islice(epochs(loader, 100), total - len(history)):
        time.sleep(pace)
        # One process needs no blank image. Without it the optimiser would leave the tower alone, momentum and all.
        share = mmdp.loss(model, batch, always_vision=True if world_size == 1 else None)
        share.backward()
        mine = (float(share.detach()), len(batch.images), batch.label_tokens)
        told = [mine] * world_size
        if world_size > 1:
            distributed.all_gather_object(told, mine)
        first = gradients(bare) if first is None else first
        optimizer.step()
        optimizer.zero_grad()
        losses, images, labels = zip(*told, strict=True)
        history.append({"loss": sum(losses) / world_size, "images": images, "labels": labels})
        if rank == 0:
            saved = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "loader": batch.state}
            torch.save(saved | {"history": history, "first": first}, folder / "next.pt")
            (folder / "next.pt").replace(path)
            (folder / "progress").write_text(json.dumps(len(history)))
    if world_size > 1:
        distributed.destroy_process_group()
