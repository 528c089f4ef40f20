"""transformers.Trainer over packed batches: the losses of a raw loop, and law 12 through its checkpoints."""

import json
import logging
import socket
import warnings
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from runs import Road, forkserver, in_child
from streams import Listed
from tiny_models import SPECS, make_model, packed
from torch.utils.data import DataLoader, IterableDataset
from training_runs import (
    arguments,
    life_of_trainer,
    losses_of,
    parts_of,
    parts_of_ranks,
    prepare_children,
    rank_of_trainer,
    raw_loop,
    sgd_for_trainer,
    weights,
)
from transformers import SmolVLMImageProcessor, Trainer

import mmdp
from mmdp.trainer_checkpoint import loader_state

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Trainer's own, on a machine without a device to pin memory for.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

DATALOADER = Road()
INLINE = Road("inline")


@pytest.fixture(scope="module", autouse=True)
def children():
    prepare_children()


@pytest.fixture(scope="module")
def parts():
    return {family: parts_of(family) for family in ("smolvlm", "qwen3_vl", "llama")}


def windows(loader, every: int, num_epochs: int) -> list[int]:
    """Batches of each optimiser step: Trainer's last step of an epoch may have fewer."""
    whole, rest = divmod(len(loader), every)
    return ([every] * whole + [rest] * bool(rest)) * num_epochs


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_its_losses_are_those_of_a_raw_loop(parts, family, tmp_path):
    """Also with micro-steps, where Qwen-VL does not take their number of label tokens from Trainer."""
    model = make_model(family).train()
    loader = INLINE.batches(parts[family], 2)
    every = next(number for number in (2, 3, 4) if len(loader) % number)  # the last step of an epoch has fewer
    steps = windows(loader, every, 2)
    wanted, wanted_weights = raw_loop(model, loader, steps), weights(model)

    model = make_model(family).train()
    args = arguments(
        tmp_path, num_train_epochs=2, gradient_accumulation_steps=every, include_num_input_tokens_seen="non_padding"
    )
    trainer = mmdp.packed_trainer(
        model, args, INLINE.batches(parts[family], 2), optimizers=sgd_for_trainer(model), labelled_only=True
    )
    trainer.train()
    assert wanted == pytest.approx(losses_of(trainer), rel=1e-6)  # Trainer adds them up in float32
    assert torch.allclose(wanted_weights, weights(model), rtol=0, atol=1e-10)
    assert len(steps) == trainer.state.global_step == trainer.state.max_steps
    assert 2 == trainer.state.epoch
    assert not parts[family].plan.skipped
    assert 2 * parts[family].plan.sizes.tokens.sum() == trainer.state.num_input_tokens_seen


class Given(IterableDataset):
    """What a user would hand to Trainer: the keyword arguments of the model, batch by batch."""

    def __init__(self, batches) -> None:
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def first_loss_of_plain_trainer(family, batch, folder, *, iterable=False, **changes) -> float:
    model = make_model(family).train()
    inputs = mmdp.adapt(batch, model)
    data, collate = (Given([inputs]), dict) if iterable else ([inputs], lambda samples: samples[0])
    trainer = Trainer(
        model,
        arguments(folder, max_steps=1, per_device_train_batch_size=1, **changes),
        data_collator=collate,
        train_dataset=data,
        optimizers=sgd_for_trainer(model),
    )
    if iterable:
        loader = DataLoader(data, batch_size=None, collate_fn=collate)
        trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(loader)
    trainer.train()
    return losses_of(trainer)[0]


def test_what_plain_trainer_does_to_packed_batches(tmp_path):
    """The traps are real: Trainer takes `use_cache` out of a batch, and Qwen-VL leaks; accelerate cuts batches."""
    batch = packed("qwen3_vl", [[1, 4]])  # text alone: with an image the cut is an error, and not silent
    right = float(mmdp.loss(make_model("qwen3_vl"), batch).detach())

    def found(**how) -> float:
        return first_loss_of_plain_trainer("qwen3_vl", batch, tmp_path, **how)

    assert right == pytest.approx(found(remove_unused_columns=False), rel=1e-5)
    assert abs(found() - right) > 0.01
    assert abs(found(remove_unused_columns=False, iterable=True) - right) > 0.01


class Batches:
    """The batches that the loss was asked for, while it stays what it is."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list = []
        real = mmdp.loss

        def spy(model, batch, **options):
            self.seen.append(batch)
            return real(model, batch, **options)

        monkeypatch.setattr("mmdp.trainer_evaluation.loss", spy)

    def samples(self) -> list:
        return [batch.samples for batch in self.seen]


def test_epochs_of_other_lengths_lose_nothing(tmp_path, monkeypatch):
    """Law 1 through Trainer: its epochs have equal steps, the loader's run on, and each sample comes once an epoch."""
    parts = parts_of("llama", repeat=9, max_tokens=130)
    loader = INLINE.batches(parts, 1)
    lengths = [len(parts.plan.epoch(number)) for number in range(4)]
    assert max(lengths) > lengths[0], "the case did not arise: an epoch of more steps than the first"
    batches = Batches(monkeypatch)
    trainer = mmdp.packed_trainer(make_model("llama"), arguments(tmp_path, num_train_epochs=4), loader)
    trainer.train()
    assert 4 * lengths[0] == trainer.state.global_step
    found = Counter((batch.state["epoch"], sample) for batch in batches.seen for row in batch.samples for sample in row)
    assert {1} == set(found.values())
    whole = [sum(epoch == number for epoch, _ in found) for number in range(3)]
    assert [len(parts.source)] * 3 == whole


@pytest.mark.parametrize("road", [INLINE, Road("threads", 2), DATALOADER], ids=["inline", "threads", "DataLoader"])
def test_every_loader_gives_the_same(parts, road, tmp_path):
    """`Loader` and a DataLoader with `PackedDataset.sampler`; the loop over it is closed at the end."""
    found = []
    for one in (INLINE, road):
        model = make_model("llama").train()
        loader = one.batches(parts["llama"], 2)
        trainer = mmdp.packed_trainer(
            model, arguments(tmp_path, max_steps=7), loader, optimizers=sgd_for_trainer(model)
        )
        trainer.train()
        found.append(losses_of(trainer))
    assert 7 == len(found[0])
    assert found[0] == found[1]


def test_a_stream_without_length(parts, tmp_path):
    """`StreamLoader` has no length: `max_steps` says when to stop, and a checkpoint goes on."""
    source, encoder, _ = parts["llama"]
    stream = Listed([source[number] for number in range(len(source))])

    def trained(folder, resume=False, **changes):
        loader = mmdp.StreamLoader(stream, encoder, mmdp.Budget(100, 2), batch_size=1, executor="inline")
        model = make_model("llama").train()
        trainer = mmdp.packed_trainer(model, arguments(folder, **changes), loader, optimizers=sgd_for_trainer(model))
        trainer.train(resume_from_checkpoint=resume)
        return losses_of(trainer)

    wanted = trained(tmp_path / "whole", max_steps=9, gradient_accumulation_steps=2)
    saving = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    trained(tmp_path / "cut", max_steps=4, **saving)
    assert wanted == trained(tmp_path / "cut", True, max_steps=9, **saving)
    with pytest.raises(ValueError, match="max_steps must be set"):
        trained(tmp_path / "none")


def test_training_twice_starts_at_the_same_place(parts, tmp_path, monkeypatch):
    """As Trainer does by itself; and where the loader stood at first, if that was not its start."""
    loader = INLINE.batches(parts["llama"], 1)
    next(iter(loader))
    batches = Batches(monkeypatch)
    trainer = mmdp.packed_trainer(make_model("llama"), arguments(tmp_path, max_steps=3), loader)
    trainer.train()
    once = batches.samples()
    trainer.train()
    assert once * 2 == batches.samples()
    whole = list(INLINE.batches(parts["llama"], 1))
    assert [batch.samples for batch in whole[1:4]] == once
    assert whole[4].samples == next(iter(loader)).samples, "a loop of one's own goes on where Trainer stopped"


# Checkpoints


CHANGES = {"num_train_epochs": 3, "gradient_accumulation_steps": 5}


@pytest.fixture(scope="module")
def uninterrupted(parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert len(INLINE.batches(parts["smolvlm"], 1)) % CHANGES["gradient_accumulation_steps"], "the case did not arise"
    return life_of_trainer("smolvlm", parts["smolvlm"], INLINE, folder, None, False, CHANGES)


@pytest.mark.parametrize(("road", "die_at"), [(Road("threads", 2), 3), (DATALOADER, 5)], ids=["Loader", "DataLoader"])
def test_a_killed_run_goes_on_with_the_next_batch(parts, uninterrupted, road, die_at, tmp_path):
    """Law 12: `kill -9`, then Trainer resumes in a new process; losses and weights are those of a run never killed."""
    wanted, wanted_weights = uninterrupted
    for number, resume in ((die_at, False), (die_at + 2, True)):
        with pytest.raises(EOFError):  # the child is gone without a word
            in_child(life_of_trainer, "smolvlm", parts["smolvlm"], road, tmp_path, number, resume, CHANGES)
    assert len(wanted) > die_at + 2
    found, found_weights = in_child(life_of_trainer, "smolvlm", parts["smolvlm"], INLINE, tmp_path, None, True, CHANGES)
    assert wanted == found
    assert np.array_equal(wanted_weights, found_weights)


def test_a_checkpoint_tells_the_last_batch_trained_on(parts, tmp_path, monkeypatch, caplog):
    """Not what was read ahead. One that a kill has cut is passed over, and named; so a raw loop can go on as well."""
    batches = Batches(monkeypatch)
    args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
    loader = Road("threads", 2).batches(parts["llama"], 1)
    mmdp.packed_trainer(make_model("llama"), args, loader).train()
    assert batches.seen[3].state == loader_state(tmp_path / "checkpoint-2")
    assert batches.seen[7].state == loader_state(tmp_path / "checkpoint-4")
    follower = INLINE.batches(parts["llama"], 1, loader_state(tmp_path / "checkpoint-2"))
    assert batches.seen[4].samples == next(iter(follower)).samples

    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"global_step"')
    trainer = mmdp.packed_trainer(make_model("llama"), args, INLINE.batches(parts["llama"], 1))
    del batches.seen[:4]
    with caplog.at_level(logging.WARNING, "mmdp"):
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-4 is no whole checkpoint" in caplog.text
    assert batches.samples()[:4] == batches.samples()[4:]


@pytest.mark.parametrize("family", SPECS)
def test_a_checkpoint_gives_back_the_weights(family, tmp_path):
    """Of every family, also where they are saved under other names than they have: into a model of other weights."""
    parts = parts_of(family, repeat=2)

    def trainer(shift: float, steps: int):
        model = make_model(family, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(shift)
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": steps}
        loader = INLINE.batches(parts, 2)
        return mmdp.packed_trainer(model, arguments(tmp_path, **options), loader, optimizers=sgd_for_trainer(model))

    first = trainer(0, 2)
    first.train()
    resumed = trainer(1, 2)
    assert not torch.equal(weights(first.model), weights(resumed.model))
    resumed._load_from_checkpoint(str(tmp_path / "checkpoint-2"))  # as `train` does it
    assert torch.equal(weights(first.model), weights(resumed.model))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    """Weights that are not there are an error, and no warning."""
    parts = parts_of("qwen2_5_vl", repeat=2)
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    model = make_model("qwen2_5_vl", dtype=torch.float32)
    mmdp.packed_trainer(model, arguments(tmp_path, **options), INLINE.batches(parts, 2)).train()
    other = make_model("smolvlm", dtype=torch.float32)
    again = mmdp.packed_trainer(other, arguments(tmp_path, **options), INLINE.batches(parts_of("smolvlm"), 2))
    with pytest.raises(ValueError, match=r"lacks \d+ weights of the model"):
        again._load_from_checkpoint(str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize(
    ("rows", "changes", "says"),
    [
        (1, {}, r"made with \d+ batches an epoch, this run has \d+: .* Give the same rows a batch"),
        (2, {"gradient_accumulation_steps": 3}, "made with 2 batches a step, this run has 3: .* the same accumulation"),
    ],
)
def test_epochs_of_another_length_are_not_gone_on_with(parts, tmp_path, rows, changes, says):
    """Trainer would reckon its place wrong, and train on rows twice or never; `max_steps` needs no reckoning."""
    saving = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    first = mmdp.packed_trainer(make_model("llama"), arguments(tmp_path, **saving), INLINE.batches(parts["llama"], 2))
    first.train()
    other = INLINE.batches(parts["llama"], rows)
    args = arguments(tmp_path, **saving | changes)
    with pytest.raises(ValueError, match=says):
        mmdp.packed_trainer(make_model("llama"), args, other).train(resume_from_checkpoint=True)
    args = arguments(tmp_path, **saving | changes, max_steps=first.state.max_steps + 1)
    again = mmdp.packed_trainer(make_model("llama"), args, other)
    again.train(resume_from_checkpoint=True)
    assert first.state.max_steps + 1 == again.state.global_step


def test_checkpoints_that_can_not_be_resumed(parts, tmp_path):
    """Each by its own words: another plan, another trainer, no checkpoint at all, batches without a state."""
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    model = make_model("llama")
    mmdp.packed_trainer(model, args, INLINE.batches(parts["llama"], 1)).train()
    plan = replace(parts["llama"].plan, seed=1)
    other = mmdp.packed_trainer(model, args, INLINE.batches(parts["llama"]._replace(plan=plan), 1))
    with pytest.raises(ValueError, match="the state is of another plan, which differs in the order"):
        other.train(resume_from_checkpoint=True)

    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["LoaderProgress"]
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="checkpoint-2 tells no state of a loader"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    empty = arguments(tmp_path / "empty", max_steps=2)
    with pytest.raises(ValueError, match="there is no whole checkpoint"):
        mmdp.packed_trainer(model, empty, INLINE.batches(parts["llama"], 1)).train(resume_from_checkpoint=True)

    dataset = mmdp.PackedDataset(*parts["llama"])
    stateless = DataLoader(dataset, batch_size=2, collate_fn=dataset.collate)
    with pytest.raises(ValueError, match="tell no state"):
        mmdp.packed_trainer(model, args, stateless).train()
    mmdp.packed_trainer(model, empty, stateless).train()


# Ranks


def test_two_ranks_are_one_large_batch(tmp_path):
    """WRK-10 through Trainer and DistributedDataParallel: unequal label counts, and a rank whose batch has no image."""
    parts = parts_of_ranks()
    pairs = zip(*(INLINE.batches(parts, 1, rank=rank, world_size=2) for rank in range(2)), strict=True)
    told = [(len(a.images), len(b.images), a.label_tokens, b.label_tokens) for a, b in pairs]
    assert any(a != b for a, b, _, _ in told), "the case did not arise: a rank without images"
    assert any(a != b for _, _, a, b in told)
    model = make_model("smolvlm").train()
    wanted, wanted_weights = raw_loop(model, INLINE.batches(parts, 2), [2] * 5, always_vision=True), weights(model)

    changes = {"max_steps": 5, "gradient_accumulation_steps": 2}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = forkserver()
    ranks = [
        context.Process(target=rank_of_trainer, args=("smolvlm", parts, tmp_path, rank, port, changes))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(150)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert [0, 0] == codes
    end = torch.load(tmp_path / "end.pt")
    assert wanted == pytest.approx(end["losses"], rel=1e-6)
    assert mean_loss(model, INLINE.batches(parts, 2)) == pytest.approx(end["judged"], rel=1e-6)
    assert torch.allclose(wanted_weights, end["weights"], rtol=0, atol=1e-10)


# Evaluation


def mean_loss(model, batches) -> float:
    """The token-weighted mean over an epoch."""
    total = tokens = 0.0
    with torch.no_grad():
        for batch in batches:
            total += float(mmdp.loss(model.eval(), batch, label_tokens=batch.label_tokens)) * batch.label_tokens
            tokens += batch.label_tokens
    return total / tokens


@pytest.mark.parametrize("family", ["smolvlm", "llama"])
@pytest.mark.parametrize(("rows", "max_tokens"), [(1, 100), (2, 100), (3, 250)])
def test_evaluation_is_the_mean_over_label_tokens(parts, family, rows, max_tokens, tmp_path):
    """However samples are packed, and as often as it is asked for; each alone says the same."""
    model = make_model(family)
    packed_otherwise = parts_of(family, max_tokens=max_tokens)
    assert parts[family].source.fingerprint == packed_otherwise.source.fingerprint
    trainer = mmdp.packed_trainer(
        model,
        arguments(tmp_path, max_steps=1),
        INLINE.batches(parts[family], 2),
        eval_dataset=INLINE.batches(packed_otherwise, rows),
    )
    alone = parts[family]._replace(
        plan=mmdp.plan(parts[family].plan.sizes, mmdp.Budget(parts[family].plan.sizes.tokens.max(), 2))
    )
    wanted = mean_loss(model, INLINE.batches(alone, 1))
    first, second = trainer.evaluate(), trainer.evaluate()
    assert wanted == pytest.approx(first["eval_loss"], rel=1e-6)
    assert first["eval_loss"] == second["eval_loss"]
    samples = first["eval_samples_per_second"] * first["eval_runtime"]
    assert len(parts[family].source) == pytest.approx(samples, rel=0.1)  # both are rounded


@pytest.mark.parametrize("peeks", [1, 3, 100])
def test_evaluation_goes_over_a_whole_epoch_wherever_the_loader_stands(parts, peeks, tmp_path):
    """Looked at before, left in its middle, or gone over once: the mean over all, and the loader is where it was."""
    model = make_model("llama")
    wanted = mean_loss(model, INLINE.batches(parts["llama"], 2))
    judge = INLINE.batches(parts["llama"], 2)
    assert list(islice(judge, peeks))
    state = judge.state_dict()
    trainer = mmdp.packed_trainer(
        model, arguments(tmp_path, max_steps=1), INLINE.batches(parts["llama"], 2), eval_dataset=judge
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Length of IterableDataset")
        found = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    assert [pytest.approx(wanted, rel=1e-6)] * 2 == found
    assert state == judge.state_dict()


def test_evaluation_while_it_trains_changes_nothing(parts, tmp_path):
    """Every two steps, by two loaders with names; the losses of training are those without it."""
    found = []
    for evaluated in (False, True):
        model = make_model("llama").train()
        changes = {"eval_strategy": "steps", "eval_steps": 2} if evaluated else {}
        sets = {"a": Road("threads", 2).batches(parts["llama"], 2), "b": DATALOADER.batches(parts["llama"], 1)}
        trainer = mmdp.packed_trainer(
            model,
            arguments(tmp_path, max_steps=4, **changes),
            INLINE.batches(parts["llama"], 1),
            optimizers=sgd_for_trainer(model),
            eval_dataset=sets if evaluated else None,
        )
        trainer.train()
        found.append(losses_of(trainer))
    assert found[0] == found[1]
    judged = [(one["eval_a_loss"], one["step"]) for one in trainer.state.log_history if "eval_a_loss" in one]
    other = [one["eval_b_loss"] for one in trainer.state.log_history if "eval_b_loss" in one]
    assert [2, 4] == [step for _, step in judged]
    assert other == pytest.approx([loss for loss, _ in judged], rel=1e-6)
    assert judged[-1][0] == pytest.approx(mean_loss(model, INLINE.batches(parts["llama"], 2)), rel=1e-6)


def test_the_mean_and_deviation_of_another_processor_reach_the_loss(parts, tmp_path):
    """In training and in evaluation."""

    other = SmolVLMImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.9, 0.8, 0.7])
    model = make_model("smolvlm")
    found = {}
    for processor in (None, other):
        trainer = mmdp.packed_trainer(
            model,
            arguments(tmp_path, max_steps=1, learning_rate=0.0),
            INLINE.batches(parts["smolvlm"], 2),
            eval_dataset=INLINE.batches(parts["smolvlm"], 2),
            image_processor=processor,
        )
        judged = trainer.evaluate()["eval_loss"]
        trainer.train()
        batch = next(iter(INLINE.batches(parts["smolvlm"], 2)))
        wanted = float(mmdp.loss(model.train(), batch, image_processor=processor).detach())
        assert wanted == pytest.approx(losses_of(trainer)[0], rel=1e-6)
        found[processor is None] = judged
    assert found[True] != pytest.approx(found[False], rel=1e-6)


# What stays, and what is refused


def test_evaluation_over_single_samples_is_left_as_it_is(parts, tmp_path):
    """Over a data set and a collator of the caller, it gives what plain Trainer gives."""
    model = make_model("llama").eval()
    samples = [{"input_ids": torch.arange(3, 3 + length), "labels": torch.arange(3, 3 + length)} for length in (5, 9)]
    kwargs = {"eval_dataset": samples, "data_collator": lambda some: {k: v[None] for k, v in some[0].items()}}
    args = arguments(tmp_path, max_steps=1, per_device_eval_batch_size=1)
    wanted = Trainer(model, args, **kwargs).evaluate()["eval_loss"]
    trainer = mmdp.packed_trainer(model, args, INLINE.batches(parts["llama"], 2), **kwargs)
    assert wanted == trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("changes", "kwargs", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1 can't be had with packed batches"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=True can't be had"),
        ({}, {"train_dataset": [1]}, "train_dataset=.* would be without effect: batches come from the loader"),
        ({}, {"compute_loss_func": print}, "compute_loss_func=.* would be without effect"),
        ({}, {"eval_dataset": DataLoader([1])}, "evaluation can't go over a DataLoader: give a loader of packed"),
        ({}, {"eval_dataset": [{"input_ids": [1]}]}, "no data_collator says how to put them together: give a loader"),
        ({}, {"data_collator": list}, "data_collator would be without effect"),
        ({"train_sampling_strategy": "group_by_length"}, {}, "can't be had with packed batches: the plan decides"),
    ],
)
def test_what_would_be_wrong_or_without_effect(parts, tmp_path, changes, kwargs, message):
    """With the value, the reason and the remedy."""
    with pytest.raises(ValueError, match=message):
        mmdp.packed_trainer(
            make_model("llama"), arguments(tmp_path, **changes), INLINE.batches(parts["llama"], 2), **kwargs
        )


def test_loaders_of_the_wrong_kind(parts, tmp_path):
    """Of another rank, a feed, several GPUs in one process, and one that gives nothing."""
    model, args = make_model("llama"), arguments(tmp_path)
    loader = INLINE.batches(parts["llama"], 2)
    with pytest.raises(ValueError, match="the loader is for rank 1 of 2, this process is rank 0 of 1"):
        mmdp.packed_trainer(model, args, INLINE.batches(parts["llama"], 2, rank=1, world_size=2))
    with pytest.raises(ValueError, match="not a feed of it"):
        mmdp.packed_trainer(model, args, mmdp.feed(loader, "cpu"))
    with pytest.raises(ValueError, match=r"a PackedDataset gives rows, and no batches: give mmdp\.Loader"):
        mmdp.packed_trainer(model, args, mmdp.PackedDataset(*parts["llama"]))
    other = INLINE.batches(parts["llama"], 2, rank=1, world_size=2)
    with pytest.raises(ValueError, match="the loader for evaluation is for rank 1 of 2"):
        mmdp.packed_trainer(model, args, loader, eval_dataset={"one": other})
    with pytest.raises(ValueError, match="no batch in a whole loop"):
        mmdp.packed_trainer(model, arguments(tmp_path, max_steps=2), Nothing()).train()
    args.__dict__["_n_gpu"] = 2
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        mmdp.packed_trainer(model, args, loader)


class Nothing:
    """A loader that is empty in each loop."""

    def __iter__(self):
        return iter([])


def test_accelerate_is_asked_for(monkeypatch):
    """Where it is missing, the error says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install 'accelerate"):
        mmdp.packed_trainer(None, None, [])
