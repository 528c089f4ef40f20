"""Training on packed batches: one process or several ranks, killed or not, packed or not, it is the same training."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from runs import forkserver
from tiny_models import make_model, packed
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training_runs import gradients, parts_of_ranks, prepare_children, train_rank

import mmdp
from mmdp.tiny_model import tiny_vlm

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, STEPS = 4, 7
"""Rows a step over all ranks, and steps: an epoch of five, and some of the next."""


def relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((wanted - found).norm() / wanted.norm())


@pytest.fixture(scope="module", autouse=True)
def children():
    prepare_children()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The checkpoint of one process that trains on all rows."""
    folder = tmp_path_factory.mktemp("alone")
    train_rank("smolvlm", parts_of_ranks(), folder, 0, 1, ROWS, STEPS, 0, 0.0)
    return torch.load(folder / "checkpoint.pt")


def start_ranks(function, *arguments) -> list:
    """Two processes; each is told its rank after the first three arguments."""
    before, after = arguments[:3], arguments[3:]
    ranks = [forkserver().Process(target=function, args=(*before, rank, *after)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    return ranks


def end_ranks(ranks, timeout_s: float) -> list[int | None]:
    """How each of them ended, None for one that had to be killed."""
    end = time.monotonic() + timeout_s
    for rank in ranks:
        rank.join(max(0, end - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return codes


def test_two_ranks_are_one_process_with_all_rows(alone, tmp_path):
    """WRK-10 and law 12: DistributedDataParallel, killed in midway and resumed, gives the training of one process.

    Ranks have unequal label counts, one or both of them now and then no image, and one a filler row.
    """
    parts = parts_of_ranks()
    progress, lives = tmp_path / "progress", 0
    while not progress.exists() or int(progress.read_text() or 0) < STEPS:
        last = int(progress.read_text()) if progress.exists() else 0
        ranks = start_ranks(train_rank, "smolvlm", parts, tmp_path, 2, ROWS, STEPS, lives, 0.1)
        if lives == 0:
            while not progress.exists() or int(progress.read_text() or 0) < last + 3:
                assert all(rank.is_alive() for rank in ranks)
                time.sleep(0.005)
            end_ranks(ranks, 0)
            assert 3 <= int(progress.read_text()) < STEPS, "the case did not arise: no kill in midway"
        else:
            assert [0, 0] == end_ranks(ranks, 120)
        lives += 1
    assert 2 == lives
    found = torch.load(tmp_path / "checkpoint.pt")

    images = [step["images"] for step in found["history"]]
    assert any((first > 0) != (second > 0) for first, second in images), "the case did not arise: images on one rank"
    assert (0, 0) in images
    assert any(first != second for first, second in (step["labels"] for step in found["history"]))
    assert [sum(step["labels"]) for step in alone["history"]] == [sum(step["labels"]) for step in found["history"]]

    assert relative(alone["first"], found["first"]) < 1e-10
    losses = [step["loss"] for step in alone["history"]]
    assert losses == pytest.approx([step["loss"] for step in found["history"]], rel=1e-10)
    wanted = torch.cat([value.flatten() for value in alone["model"].values()])
    weights = torch.cat([value.flatten() for value in found["model"].values()])
    assert relative(wanted, weights) < 1e-10
    assert alone["loader"] == found["loader"]


class Engine(torch.nn.Module):
    """A wrapper of a kind that nobody here knows."""

    def __init__(self, module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)


def losses_of_wrappers(folder, batch, _, rank) -> None:
    """What each wrapper makes of the loss; the first rank writes it."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, found = make_model("llama"), []
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for one, world_size in ((model, None), (wrapped, None), (wrapped, 5), (Engine(model), 2), (Engine(model), None)):
        try:
            found.append(float(mmdp.loss(one, batch, world_size=world_size).detach()))
        except ValueError as error:
            found.append(str(error))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    distributed.destroy_process_group()


def test_who_takes_the_mean_gets_the_factor(tmp_path):
    """DistributedDataParallel takes it, a bare model does not, and of another wrapper it must be told."""
    batch = packed("llama", [[0, 1], [2]])
    batch = replace(batch, step_label_tokens=2 * batch.label_tokens)
    own = float(mmdp.loss(make_model("llama"), batch).detach())
    assert [0, 0] == end_ranks(start_ranks(losses_of_wrappers, tmp_path, batch, None), 120)
    *factors, engine = torch.load(tmp_path / "found.pt")
    assert [own, 2 * own, 5 * own, 2 * own] == pytest.approx(factors)
    assert "Engine may or may not take the mean of gradients over ranks: give world_size" in engine


def gradients_of_shards(folder, batches, _, rank) -> None:
    """By `fully_shard`, each rank with its own batch; the first one writes them, put together."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, mesh = make_model("smolvlm"), init_device_mesh("cpu", (2,))
    for part in (*model.model.text_model.layers, model):
        fully_shard(part, mesh=mesh)
    mmdp.loss(model, batches[rank]).backward()
    whole = torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()])
    if rank == 0:
        torch.save(whole, folder / "gradients.pt")
    distributed.destroy_process_group()


def test_sharded_ranks_are_one_process_with_all_rows(tmp_path):
    """WRK-10 by FSDP: the gradients of one process over all rows, though one rank has no image."""
    batches = [packed("smolvlm", [[0, 1]]), packed("smolvlm", [[1, 4, 1]])]
    assert [1, 0] == [len(batch.images) for batch in batches]
    tokens = [batch.label_tokens for batch in batches]
    assert tokens[0] != tokens[1]
    batches = [replace(batch, step_label_tokens=sum(tokens)) for batch in batches]
    assert [0, 0] == end_ranks(start_ranks(gradients_of_shards, tmp_path, batches, None), 120)
    model = make_model("smolvlm")
    mmdp.loss(model, packed("smolvlm", [[0, 1], [1, 4, 1]])).backward()
    assert relative(gradients(model), torch.load(tmp_path / "gradients.pt")) < 1e-10


def test_packed_and_unpacked_are_the_same_training():
    """A tiny model overfits 32 demo samples by the same curve, within the noise of the order of sums; a leak does not.

    Both see all samples in each step, once in packed rows and once in a row for each.
    """
    source, encoder = mmdp.open_source("demo"), mmdp.Encoder("demo", "fixed:4:side=16")
    sizes = mmdp.measure(source, encoder)
    with_images = np.flatnonzero(sizes.images > 0)
    chosen = with_images[np.argsort(sizes.tokens[with_images], kind="stable")[:32]]  # the shortest, for speed
    build = mmdp.RowBuilder(source, encoder, strict=True)

    def batch_of(rows):
        made = [build([int(chosen[place]) for place in row]) for row in rows]
        return mmdp.batch(made, pad_id=encoder.pad_id, length=max(map(len, made)))

    places = mmdp.knapsack.pack(sizes.tokens[chosen], sizes.images[chosen], mmdp.Budget(200, 8))
    joined, single = batch_of(places), batch_of([[place] for place in range(32)])
    assert 32 == sum(map(len, joined.samples))
    assert len(joined.samples) <= 12
    assert len(single.samples) == 32
    running = torch.arange(joined.input_ids.shape[1]).expand_as(joined.input_ids)
    leaking = replace(joined, position_ids=running)

    curves = []
    for batch, steps in ((joined, 30), (single, 30), (leaking, 3)):
        model = tiny_vlm(encoder, hidden=64, layers=1).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        curves.append([])
        for _ in range(steps):
            loss = mmdp.loss(model, batch, labelled_only=True)  # the vocabulary is most of such a model
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curves[-1].append(float(loss.detach()))
    assert curves[0] == pytest.approx(curves[1], rel=1e-8)
    assert curves[0][-1] < curves[0][0] / 10
    assert all(abs(right - wrong) > 1e-4 for right, wrong in zip(curves[0][:3], curves[2], strict=True))
