"""The loss of a packed batch: the token-weighted mean over its step, however the step is cut."""

from dataclasses import replace

import pytest
import torch
import transformers as hf
from flash_stand_in import flash_kernels
from tiny_models import SPECS, make_model, packed
from training_runs import gradients

import mmdp
from mmdp import objective
from mmdp.families import ATTENTIONS
from mmdp.records import IGNORE

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [[0, 1], [2, 4, 3], [5]]


def relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((wanted - found).norm() / wanted.norm())


def without_labels(batch):
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE), label_tokens=0)


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "llama"])
def test_it_is_the_token_weighted_mean_of_samples_alone(family):
    """Law 6: by the model's own loss of each sample, times its label tokens."""
    model = make_model(family)
    total = tokens = 0
    for row in ROWS:
        for sample in row:
            alone = packed(family, [[sample]])
            total += float(model(**mmdp.adapt(alone, model)).loss.detach()) * alone.label_tokens
            tokens += alone.label_tokens
    batch = packed(family, ROWS, tail=3)
    assert tokens == batch.label_tokens
    assert total / tokens == pytest.approx(float(mmdp.loss(model, batch).detach()), rel=1e-6)  # theirs is in float32


def test_the_mean_of_a_checkpoint_reaches_the_pixels():
    """`image_processor` does what it does in `adapt`: another mean is another loss."""
    model, batch = make_model("smolvlm"), packed("smolvlm", ROWS)
    own = hf.SmolVLMImageProcessor(image_mean=[0.1, 0.4, 0.9], image_std=[0.2, 0.3, 0.4])
    inputs = mmdp.adapt(batch, model, image_processor=own)
    targets = batch.shifted_labels()
    logits = model(**inputs).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    found = float(mmdp.loss(model, batch, image_processor=own).detach())
    assert float(wanted.detach()) == pytest.approx(found, rel=1e-9)
    assert abs(found - float(mmdp.loss(model, batch).detach())) > 1e-3


@pytest.mark.parametrize("family", [*SPECS, "llama"])
def test_logits_only_where_labels_are(family):
    """`labelled_only` changes neither loss nor gradient."""
    batch = packed(family, ROWS[:2], tail=3)
    assert 0 < batch.label_tokens < batch.num_tokens
    found, widths = [], []
    for labelled_only in (False, True):
        model = make_model(family)
        head = next(module for name, module in model.named_modules() if name.endswith("lm_head"))
        head.register_forward_hook(lambda module, inputs, output: widths.append(output.numel() // output.shape[-1]))
        value = mmdp.loss(model, batch, labelled_only=labelled_only)
        value.backward()
        found.append((float(value.detach()), gradients_or_zero(model)))
    assert [batch.input_ids.numel(), batch.label_tokens] == widths
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert relative(found[0][1], found[1][1]) < 1e-10


def gradients_or_zero(model) -> torch.Tensor:
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("labelled_only", [False, True])
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_a_row_without_labels_gives_zero(family, labelled_only):
    """A dead row at B = 1: loss 0, gradients 0, where the model's own mean is no number."""
    model = make_model(family)
    dead = without_labels(packed(family, [[0, 1]], tail=3))
    assert torch.isnan(model(**mmdp.adapt(dead, model)).loss)
    value = mmdp.loss(model, dead, labelled_only=labelled_only)
    value.backward()
    assert 0 == float(value.detach())
    assert all(one.grad is None or not one.grad.count_nonzero() for one in model.parameters())
    assert any(one.grad is not None for one in model.parameters())


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_a_filler_row_gives_zero(family):
    """The all-padding rows that complete a step."""
    model = make_model(family)
    filler = mmdp.batch([mmdp.join([], [], [])], pad_id=0, length=8)
    value = mmdp.loss(model, filler, always_vision=True)
    value.backward()
    assert 0 == float(value.detach())
    assert not gradients(model).count_nonzero()


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_micro_steps_add_up_to_the_large_batch(family):
    """Gradient accumulation is exact, also where micro-steps differ in label tokens; their own means are not."""
    gradient, loss = {}, {}
    parts = [packed(family, [row]) for row in ROWS]
    whole = packed(family, ROWS)
    tokens = sum(part.label_tokens for part in parts)
    assert whole.label_tokens == tokens
    assert 1 < len({part.label_tokens for part in parts})
    for name, batches, divisor, count in (
        ("whole", [whole], None, 1),
        ("micro-steps", parts, tokens, 1),
        ("own means", parts, None, len(parts)),
    ):
        model = make_model(family)
        loss[name] = 0
        for batch in batches:
            share = mmdp.loss(model, batch, label_tokens=divisor) / count
            share.backward()
            loss[name] += float(share.detach())
        gradient[name] = gradients(model)
    assert loss["whole"] == pytest.approx(loss["micro-steps"], rel=1e-12)
    assert relative(gradient["whole"], gradient["micro-steps"]) < 1e-10
    assert relative(gradient["whole"], gradient["own means"]) > 0.01


def test_without_gradients_nobody_takes_their_mean(monkeypatch):
    """An evaluation on several ranks is the mean over its tokens, and not that times the ranks."""
    model, batch = make_model("llama"), packed("llama", ROWS)
    own = float(mmdp.loss(model, batch, label_tokens=batch.label_tokens).detach())
    monkeypatch.setattr(objective, "_ranks_of_mean", lambda _model: 4)
    monkeypatch.setattr(objective, "_checked", lambda ranks, _model: ranks)
    assert 4 * own == pytest.approx(float(mmdp.loss(model, batch, label_tokens=batch.label_tokens).detach()))
    with torch.no_grad():
        assert own == pytest.approx(float(mmdp.loss(model, batch, label_tokens=batch.label_tokens)))


def test_a_step_over_ranks_is_what_it_divides_by():
    """The measured label tokens of the step, not those of the batch; an argument goes before both."""
    model, batch = make_model("llama"), packed("llama", ROWS)
    own = float(mmdp.loss(model, batch).detach())
    assert own / 2 == pytest.approx(
        float(mmdp.loss(model, replace(batch, step_label_tokens=2 * batch.label_tokens)).detach())
    )
    in_step = replace(batch, step_label_tokens=7 * batch.label_tokens)
    assert own / 3 == pytest.approx(float(mmdp.loss(model, in_step, label_tokens=3 * batch.label_tokens).detach()))
    assert 4 * own / 7 == pytest.approx(float(mmdp.loss(model, in_step, world_size=4).detach()))


def test_flattened_rows_give_the_same():
    """Flash takes all rows as one; logits are (1, B * L, V) then."""
    batch = packed("smolvlm", ROWS, tail=3)
    model = make_model("smolvlm", "flash")
    assert (1, batch.input_ids.numel()) == tuple(mmdp.adapt(batch, model)["labels"].shape)
    with flash_kernels():
        found = [float(mmdp.loss(model, batch, labelled_only=only).detach()) for only in (False, True)]
    wanted = float(mmdp.loss(make_model("smolvlm"), batch).detach())
    assert [wanted, wanted] == pytest.approx(found, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_summed_in_float32(dtype):
    """Or finer: a sum over thousands of tokens in bfloat16 would keep two digits."""
    model = make_model("llama", dtype=dtype)
    assert mmdp.loss(model, packed("llama", ROWS)).dtype == torch.float32


@pytest.mark.parametrize("family", ATTENTIONS)
def test_the_vision_tower_can_be_made_to_run(family):
    """WRK-10: without an image, `always_vision` gives each parameter of it a gradient, of zero, and changes no loss."""
    batch = packed(family, [[1], [4]], tail=2)
    assert not len(batch.images)
    model = make_model(family)
    plain = mmdp.loss(model, batch)
    plain.backward()
    idle = [name for name, one in model.named_parameters() if one.grad is None]
    assert any("vis" in name for name in idle), "the case did not arise"
    seen = mmdp.loss(model, batch, always_vision=True)
    seen.backward()
    assert float(plain.detach()) == pytest.approx(float(seen.detach()), rel=1e-12)
    grads = {name: one.grad for name, one in model.named_parameters()}
    assert not any(grads[name].count_nonzero() for name in idle if grads[name] is not None)
    assert any(grads[name] is not None for name in idle)


# What is refused


def test_numbers_that_can_not_be():
    """With the value, the limit and the remedy."""
    model, batch = make_model("llama"), packed("llama", ROWS)
    with pytest.raises(ValueError, match=f"label_tokens is 1, and this batch alone has {batch.label_tokens}"):
        mmdp.loss(model, batch, label_tokens=1)
    with pytest.raises(ValueError, match="belongs to no step"):
        mmdp.loss(model, batch, world_size=2)
    with pytest.raises(ValueError, match="DataParallel cuts every tensor"):
        mmdp.loss(torch.nn.DataParallel(model), batch)
