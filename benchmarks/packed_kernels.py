"""Do packed samples stay apart in the real kernels of attention? The first part of `gpu_check.py`, which runs it.

In bfloat16, against each sample alone in float32 with sdpa: the largest difference of a logit, in standard deviations
of the sample's logits. Weights are random, and large enough that a leak stands far above rounding.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForImageTextToText

import mmdp
from mmdp.families import ATTENTIONS, resolve
from mmdp.isolation import LIMITS
from mmdp.leaks import LEAKS
from mmdp.records import Batch
from mmdp.tiny_model import tiny_vlm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import tiny_models

Figures = dict[str, Any]

DTYPE = torch.bfloat16
LIMIT = LIMITS[DTYPE]


class Subject(NamedTuple):
    """A model and packed batches for it.

    Attributes:
        name: of the family.
        model: in float32, on the device.
        batches: by their form; each has a tail.
        alone: one sample, by its index, as a batch of its own.
    """

    name: str
    model: Any
    batches: dict[str, Batch]
    alone: Callable[[int], Batch]


def subjects(device: str) -> Iterator[Subject]:
    """SmolVLM with heads of 64, rows of 1024 tokens and images of 64; then tiny models of two trickier families."""
    source, encoder = mmdp.open_source("demo"), mmdp.Encoder()
    sizes = mmdp.measure(source, encoder, samples=300)
    rows = mmdp.plan(sizes, mmdp.Budget(1000, 9)).epoch(0)[:2]
    build = mmdp.RowBuilder(source, encoder, sizes, strict=True)
    first, second = build(rows[0]), build(rows[1])
    model = tiny_vlm(encoder, hidden=256)
    liven(model)
    yield Subject(
        "smolvlm",
        model.to(device),
        {
            "one row": mmdp.batch([first], pad_id=encoder.pad_id, length=1024).to(device),
            "two rows": mmdp.batch([first, second], pad_id=encoder.pad_id, length=1024).to(device),
        },
        lambda index: mmdp.batch([build([index])], pad_id=encoder.pad_id).to(device),
    )
    for family in ("qwen3_vl", "gemma3"):
        yield Subject(
            family,
            tiny_models.make_model(family, dtype=torch.float32).to(device),
            {
                "one row": tiny_models.packed(family, [[0, 1, 2]], tail=5).to(device),
                "two rows": tiny_models.packed(family, [[0, 1, 2], [3, 4]], tail=5).to(device),
            },
            lambda index, family=family: tiny_models.packed(family, [[index]]).to(device),
        )


def liven(model: torch.nn.Module) -> None:
    """Weights so large that what a token sees matters: with those of a fresh model, a leak would hide in rounding."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def kernels(model: Any, device: str) -> dict[str, str]:
    """Attention to the name by which this model runs it here, or to the reason why not, in brackets."""
    found = {"sdpa": "sdpa"}
    kinds = ATTENTIONS[model.config.model_type]
    if "flash" in kinds:
        found["flash"] = flash_kernel(model, device)
    if "flex" in kinds:
        small = model.config.get_text_config().head_dim < 16
        found["flex"] = (
            "(on a CPU it compiles for minutes)"
            if device == "cpu"
            else "(heads under 16 have no kernel)"
            if small
            else "flex_attention"
        )
    return found


def flash_kernel(model: Any, device: str) -> str:
    """The first that loads."""
    if device == "cpu":
        return "(no kernel on a CPU)"
    tried, before = [], model.config.get_text_config()._attn_implementation
    for name in ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"):
        try:
            model.set_attn_implementation(name)
        except Exception as error:  # each kernel has its own way to be missing
            tried.append(f"{name}: {(str(error) or type(error).__name__).splitlines()[0][:90]}")
        else:
            return name
        finally:
            model.set_attn_implementation(before)
    return f"(missing: {'; '.join(tried)})"


def layouts(batch: Batch, model: Any) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, inputs, and whether samples stay apart."""
    target = resolve(model)
    rows = mmdp.adapt(batch, model, flatten=False)
    if target.attention == "flash":
        yield "P1", LEAKS["no_boundaries"].spoil(rows, batch, target), len(batch.samples) == 1
        yield "P4", mmdp.adapt(batch, model), True
        yield "P4 in rows", rows, True
    else:
        yield "P1" if target.family != "gemma3" else "two masks", rows, True
    yield "N4", LEAKS["positions_and_padding_mask"].spoil(rows, batch, target), False


@torch.no_grad()
def logits_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """(B, L, V) float32."""
    return model(**{name: value for name, value in inputs.items() if name != "labels"}).logits.float()


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest, in standard deviations; NaN stays NaN."""
    return float((found - wanted).abs().max() / wanted.std())


def check_layouts(device: str) -> list[Figures]:
    """One entry for each family, attention, form of batch, and layout."""
    found: list[Figures] = []
    for subject in subjects(device):
        exact, model = subject.model.eval(), in_bfloat16(subject.model).to(device).eval()
        indices = {index for batch in subject.batches.values() for index, _, _ in samples_in(batch)}
        alone = {index: subject.alone(index) for index in indices}
        wanted = {index: logits_of(exact, mmdp.adapt(one, exact))[0] for index, one in alone.items()}
        rounded = {index: logits_of(model, mmdp.adapt(one, model))[0] for index, one in alone.items()}
        rounding = worst(difference(rounded[index], wanted[index]) for index in indices)
        for kind, kernel in kernels(model, device).items():
            known = {"family": subject.name, "attention": kind, "kernel": kernel, "alone": rounding}
            if kernel.startswith("("):
                found.append(known | {"kernel": None, "why": kernel[1:-1]})
                continue
            try:
                model.set_attn_implementation(kernel)
                found += [known | one for one in run(model, subject.batches, wanted, kind)]
            except Exception as error:  # the other kernels are still of interest
                traceback.print_exc()
                why = f"{type(error).__name__}: {str(error)[:200]}"
                found.append(known | {"kernel": None, "why": why, "ok": False})
    return found


def run(model: Any, batches: dict[str, Batch], wanted: dict[int, torch.Tensor], kind: str) -> Iterator[Figures]:
    """Every form of batch in every layout; and what users run, `check_isolation`."""
    for form, batch in batches.items():
        for layout, inputs, apart in layouts(batch, model):
            logits = logits_of(model, inputs).reshape(*batch.input_ids.shape, -1)
            error = worst(difference(logits[row, at], wanted[index]) for index, row, at in samples_in(batch))
            ok = error <= LIMIT if apart else error > LIMIT
            yield {"rows": form, "layout": layout, "apart": apart, "error": error, "ok": ok}
        if kind != "flex":  # which compiles anew for each sample alone
            report = mmdp.check_isolation(model, batch)
            entry = {"rows": form, "layout": "check_isolation", "apart": True}
            yield entry | {"error": report.error, "ok": report.passed}


def in_bfloat16(model: Any) -> Any:
    """A copy, made in that dtype and not cast to it: so angles of positions stay in float32, as in a loaded model."""
    made = AutoModelForImageTextToText.from_config(copy.deepcopy(model.config), dtype=DTYPE, attn_implementation="sdpa")
    made.load_state_dict(model.state_dict())
    return made


def worst(errors: Iterator[float]) -> float:
    """The largest; a NaN is larger than any."""
    return max(errors, key=lambda error: (error != error, error))


def samples_in(batch: Batch) -> Iterator[tuple[int, int, slice]]:
    """Index, row and place of each sample."""
    segments = batch.on_host()[1]
    for row, samples in enumerate(batch.samples):
        for number, index in enumerate(samples, start=1):
            at = (segments[row] == number).nonzero()[0]
            yield index, row, slice(int(at[0]), int(at[-1]) + 1)
