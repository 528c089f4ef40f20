"""docs/training.md: its code as it stands there, block after block, and what it says of a batch."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import mmdp

PAGE = Path(__file__).resolve().parent.parent / "docs" / "training.md"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Trainer's own, on a machine without a device to pin memory for.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_code_runs_and_resumes(tmp_path, monkeypatch, capsys):
    """All of it once; and the first block again, which goes on behind what it saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    first, *others = blocks()
    seen = []
    real = mmdp.loss

    def spy(model, batch, **options):
        seen.append(batch.samples)
        return real(model, batch, **options)

    monkeypatch.setattr(mmdp, "loss", spy)
    shown = {}
    exec(first, shown)
    assert 5 == len(seen)
    assert "waits " in capsys.readouterr().out
    exec(first, {})
    assert seen[4] == seen[5], "the fifth batch came after the last checkpoint"
    monkeypatch.setattr(mmdp, "loss", real)
    assert 9 == len(others), "another block? see that it is run"
    for block in others:
        if "step := list(islice" in block:  # a whole epoch: of few rows, and each sample once
            shown["plan"] = shown["held_out"]
            monkeypatch.setattr(mmdp, "loss", spy)
            seen.clear()
        exec(block.replace("label_smoothing=0.1", "label_smoothing=0.0"), shown)
        if "step := list(islice" in block:
            fed = [sample for samples in seen for row in samples for sample in row]
            monkeypatch.setattr(mmdp, "loss", real)
        if "cross_entropy" in block:
            ours = mmdp.loss(shown["model"], shown["batch"]).item()
            assert ours == pytest.approx((shown["summed"] / shown["batch"].step_label_tokens).item(), rel=1e-5)
        if "diagnose(" in block:
            said = capsys.readouterr().out.strip().split("\n")
            begins = ("bound by ", "a step has ", "twice as much ", "next: ")
            assert [True] * 4 == [line.startswith(begin) for line, begin in zip(said[-4:], begins, strict=True)]
    assert sorted(fed) == sorted(int(sample) for row in shown["held_out"].epoch(0) for sample in row)
    assert 0 < shown["loss"] < 20
    assert 0 < shown["held_out_loss"] < 20
    assert 1 == shown["batch"].state["epoch"]
    assert 4 == shown["trainer"].state.global_step
    assert not (tmp_path / "checkpoint.part").exists()


def test_each_field_of_a_batch_is_told():
    """By its name; `host` is what only the batch itself reads."""
    told = set(re.findall(r"`(\w+)`", PAGE.read_text().split("## What is in a batch")[1].split("`help(")[0]))
    fields = {field.name for field in dataclasses.fields(mmdp.Batch)} - {"host"}
    assert fields <= told, fields - told
    assert all(hasattr(mmdp.Batch, name) or name in fields for name in told - {"ImageBuffer"} - {"images", "mmdp"})


def test_the_meter_says_what_it_found():
    """In one line, from the second step on."""
    times = iter(range(100))
    meter = mmdp.WaitMeter(clock=lambda: float(next(times)))
    assert "<WaitMeter: 0 steps, of which none behind the first>" == repr(meter)
    for _ in meter.over([1, 2, 3]):
        pass
    assert re.fullmatch(r"<WaitMeter: waits \d+\.\d% of the time over 2 steps behind the first, .* s>", repr(meter))
