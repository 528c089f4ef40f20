"""Laws of adapters.py and what it stands on: loss, gradients, positions, boundaries, labels, and what is refused.

Tiny models with random weights, real classes of every family. That packed samples are the same as alone is shown in
test_isolation.py, that their pixels are those of the released processors in test_vision_inputs.py.
"""

import functools
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import tiny_models as tiny
import torch
import transformers as hf
from small import MARKS
from transformers.loss.loss_utils import ForCausalLMLoss

import mmdp
from mmdp.adapters import adapt
from mmdp.families import ATTENTIONS, MROPE, TEXT_ONLY, attention_kind, resolve
from mmdp.leaks import LEAKS, refuse_leaks
from mmdp.mrope import mrope_positions
from mmdp.records import IGNORE
from mmdp.tokenizer import load_tokenizer
from mmdp.vision_inputs import NORMAL

pytestmark = pytest.mark.usefixtures("one_thread")

VISION = list(tiny.SPECS)
ROWS = [[0, 1, 2], [3, 4]]  # samples of 1, 0, 2, 1, 0 images; the second row has a tail
model = functools.cache(tiny.make_model)


def alone(family, index):
    return tiny.packed(family, [[index]])


@pytest.mark.parametrize("family", [*VISION, "llama"])
def test_the_loss_of_packed_rows_is_the_token_weighted_loss_of_the_samples(family):
    """Law 6: also the mean of the samples' own means is another number, so that the weights matter."""
    batch = tiny.packed(family, ROWS)
    with torch.no_grad():
        packed = float(model(family)(**adapt(batch, model(family))).loss)
        ones = [alone(family, index) for index in itertools.chain(*ROWS)]
        losses = [float(model(family)(**adapt(one, model(family))).loss) for one in ones]
    counts = [one.label_tokens for one in ones]
    assert batch.label_tokens == sum(counts)
    assert np.average(losses, weights=counts) == pytest.approx(packed, abs=1e-5)
    assert abs(np.mean(losses) - packed) > 1e-3


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_gradients_of_packed_rows_are_those_of_the_samples(family):
    """Every parameter, those of the vision tower too; with the cache left on they are far off."""
    net, batch = model(family), tiny.packed(family, ROWS)
    ones = [alone(family, index) for index in itertools.chain(*ROWS)]

    def gradient(inputs_and_weights):
        net.zero_grad()
        for inputs, weight in inputs_and_weights:
            (net(**inputs).loss * weight).backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    expected = gradient([(adapt(one, net), one.label_tokens / batch.label_tokens) for one in ones])
    packed = gradient([(adapt(batch, net), 1.0)])
    leaking = gradient([(adapt(batch, net) | {"use_cache": True}, 1.0)])
    assert float((packed - expected).norm() / expected.norm()) < 1e-6
    assert float((leaking - expected).norm() / expected.norm()) > 0.1


@pytest.mark.parametrize("family", MROPE)
def test_positions_are_those_of_the_models_own_method_on_each_sample_alone(family):
    """400 random samples, packed by fours; images of all grids, also first and last in their sample."""
    draw, net = np.random.default_rng(0), model(family).model
    token, merge = net.config.image_token_id, net.config.vision_config.spatial_merge_size
    for _ in range(100):
        rows, grids, expected = [], [], []
        for _ in range(4):
            ids = []
            for _ in range(draw.integers(0, 4)):
                lines, columns = (int(side) for side in draw.integers(1, 6, 2))
                grids.append((lines, columns))
                ids += [3] * draw.integers(1, 5) + [token] * (lines * columns)
            ids += [3] * draw.integers(0 if ids else 1, 5)
            rows.append(np.array(ids))
            own = grids[len(grids) - sum(a != token and b == token for a, b in itertools.pairwise(ids)) :]
            types = (torch.from_numpy(rows[-1]) == token).int()[None]
            thw = torch.tensor([[1, lines * merge, columns * merge] for lines, columns in own]) if own else None
            expected.append(net.get_rope_index(torch.from_numpy(rows[-1])[None], types, image_grid_thw=thw)[0][:, 0])
        positions = np.concatenate([np.arange(len(ids)) for ids in rows])[None]
        made = mrope_positions(positions, np.concatenate(rows)[None] == token, np.array(grids).reshape(-1, 2))
        assert torch.equal(torch.cat(expected, dim=1), torch.from_numpy(made[:, 0]))


def test_rows_of_positions_for_each_family():
    """Qwen-VL: four rows, the packed positions first; all others the packed positions alone."""
    for family in [*VISION, "llama"]:
        batch = tiny.packed(family, ROWS)
        positions = adapt(batch, model(family))["position_ids"]
        own = positions[0] if family in MROPE else positions
        assert torch.equal(batch.position_ids, own)
        assert positions.ndim == (3 if family in MROPE else 2)
        if family in MROPE:
            assert len(positions) == 4
            assert not torch.equal(positions[1], positions[2])


def test_boundaries_of_a_batch():
    """Each segment and each tail is a stretch of the flattened batch, whatever device it was moved to."""
    batch = tiny.packed("llama", ROWS, tail=3)
    lengths = [int((batch.segments[0] == 1).sum()), int((batch.segments[0] == 2).sum())]
    assert [0, lengths[0], sum(lengths)] == batch.cu_seqlens[:3].tolist()
    assert batch.input_ids.numel() == batch.cu_seqlens[-1]
    assert len(batch.cu_seqlens) == 1 + 3 + 1 + 2 + 1  # and two tails
    restarts = (batch.position_ids.flatten() == 0).nonzero()[:, 0]
    assert restarts.tolist() == batch.cu_seqlens[:-1].tolist()
    assert np.diff(batch.cu_seqlens).max() == batch.max_seqlen
    assert np.int32 == batch.cu_seqlens.dtype
    assert batch.to("cpu").host is None  # nothing that a later `replace` would leave behind
    moved = batch.to("meta")
    assert batch.cu_seqlens.tolist() == moved.cu_seqlens.tolist()
    assert batch.max_seqlen == moved.to("meta").max_seqlen


@pytest.mark.parametrize("flatten", [None, False])
def test_flash_gets_boundaries_and_one_row_or_the_rows_it_asks_for(flatten):
    batch = tiny.packed("llama", ROWS)
    inputs = adapt(batch, model("llama", "flash"), flatten=flatten)
    assert ((1, batch.input_ids.numel()) if flatten is None else batch.input_ids.shape) == inputs["input_ids"].shape
    assert torch.int32 == inputs["cu_seq_lens_q"].dtype == inputs["cu_seq_lens_k"].dtype
    assert batch.cu_seqlens.tolist() == inputs["cu_seq_lens_q"].tolist()
    assert (batch.max_seqlen, int) == (inputs["max_length_q"], type(inputs["max_length_k"]))


def test_no_batch_has_a_mask_of_two_dimensions_or_a_cache():
    for family in [*VISION, "llama"]:
        for attention in set(ATTENTIONS.get(family, ("sdpa", "eager", "flash"))) - {"flex"}:
            net = model(family, attention)
            inputs = adapt(tiny.packed(family, ROWS), net)
            assert inputs["use_cache"] is False
            assert ("attention_mask" in inputs) == (family == "gemma3")
            refuse_leaks(inputs, net)


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("rows", [[[1, 4]], [[1, 4, 1, 4, 1, 4, 1, 4], [1]]])
def test_a_batch_without_images_still_runs_the_vision_tower(family, rows):
    """The same parameters get a gradient as with an image, those of the tower zero; the loss is what it was."""
    net = model(family)
    batch, seen = tiny.packed(family, rows), tiny.packed(family, [[0, 1]])

    def trained(inputs):
        net.zero_grad()
        loss = net(**inputs).loss
        loss.backward()
        return float(loss.detach()), {
            name: p.grad.abs().max() for name, p in net.named_parameters() if p.grad is not None
        }

    _, with_images = trained(adapt(seen, net))
    plain, without = trained(adapt(batch, net))
    inputs = adapt(batch, net, always_vision=True)
    loss, blank = trained(inputs)
    assert plain == pytest.approx(loss, abs=1e-6)
    assert set(with_images) == set(blank)
    tower = set(with_images) - set(without)
    assert len(tower) > 10
    assert not any(blank[name] for name in tower)
    assert all(without[name] == pytest.approx(float(blank[name]), abs=1e-6) for name in without)
    assert (len(rows) == 1) == (inputs["input_ids"].shape[1] > batch.input_ids.shape[1])  # the second has a long tail
    refuse_leaks(inputs, net)
    moved = batch.to("meta")
    assert (
        adapt(replace(batch, host=moved.host), net, always_vision=True)["input_ids"].shape == inputs["input_ids"].shape
    )


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "gemma3"])
def test_filler_rows_alone_run_the_tower_too(family):
    """The last step of a rank may have no sample at all."""
    filler = mmdp.batch([mmdp.join([], [], [])] * 2, pad_id=0, length=20)
    inputs = adapt(filler, model(family), always_vision=True)
    logits = model(family)(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    assert bool(logits.isfinite().all())
    assert "pixel_values" in inputs
    assert (inputs["labels"] == IGNORE).all()


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "gemma3"])
def test_a_batch_with_images_gets_no_blank_one(family):
    batch, net = tiny.packed(family, ROWS), model(family)
    plain, forced = adapt(batch, net), adapt(batch, net, always_vision=True)
    assert torch.equal(plain["pixel_values"], forced["pixel_values"])
    assert torch.equal(plain["input_ids"], forced["input_ids"])


@pytest.mark.parametrize("name", ["tiny", "smollm2", "qwen"])
def test_what_the_model_learns_is_the_answers_and_their_end_marks(name, request):
    """Through encode, join, batch and adapt: decoded targets of the very labels that the model gets."""
    if name == "tiny":
        encoder = tiny.encoder("llama")
    else:
        encoder = mmdp.Encoder(load_tokenizer(str(request.getfixturevalue("shared") / "tokenizers" / name)), "fixed:4")
    source = mmdp.open_source(tiny.folder_of((0,) * 6) / "rows.jsonl")
    build = mmdp.RowBuilder(source, encoder)
    batch = mmdp.batch([build([0, 1, 2]), build([3, 4])], pad_id=encoder.pad_id)
    inputs = adapt(batch, "text", "sdpa")
    answers = [source[index].turns[-1].text + "<|im_end|>" for index in range(5)]
    for labels in (inputs["labels"], adapt(batch, "text", "flash")["labels"]):
        kept = labels[labels != IGNORE]
        assert "".join(answers) == encoder.tokenizer.decode(kept, skip_special_tokens=False)
        assert batch.label_tokens == len(kept)
    flat_ids, shifted = batch.input_ids.flatten(), batch.shifted_labels().flatten()
    at = (shifted != IGNORE).nonzero()[:, 0]
    assert torch.equal(flat_ids[at + 1], shifted[at])
    assert torch.equal(batch.segments.flatten()[at + 1], batch.segments.flatten()[at])


def test_shifted_labels_give_the_loss_that_the_model_makes_of_unshifted_ones():
    batch, draw = tiny.packed("llama", ROWS), torch.Generator().manual_seed(0)
    logits = torch.randn(*batch.input_ids.shape, 500, generator=draw)
    expected = ForCausalLMLoss(logits, batch.labels, 500)
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.shifted_labels().flatten())
    assert float(expected) == pytest.approx(float(ours), abs=1e-6)
    assert batch.labels[0, 0] == IGNORE


@pytest.mark.parametrize(
    ("family", "attention", "message"),
    [
        ("gemma3", "flash", "the kernel knows no mask, so that the tokens of an image no longer see each other both"),
        ("qwen3_vl", "flex", "qwen3_vl with flex attention: its class does not allow it. Load the model with sdpa"),
        ("qwen2_5_vl", "flex_attention", "its class does not allow it"),
        ("smolvlm", "xformers", "unknown attention 'xformers': the attentions are sdpa, eager, flash"),
        ("smolvlm", "paged|flash_attention_2", "unknown attention"),
        ("smolvlm", None, "this config does not say which attention its model runs: give attention='sdpa'"),
    ],
)
def test_a_pair_that_leaks_or_is_unknown_is_refused_from_the_config_alone(family, attention, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        adapt(tiny.packed(family, ROWS), tiny.make_config(family), attention)


def test_an_unknown_family_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"unknown model family 'gpt2': the families are smolvlm, .*, smollm3\. Give"):
        adapt(tiny.packed("llama", ROWS), hf.GPT2Config(), "sdpa")
    with pytest.raises(ValueError, match="is no model of transformers and no config of one"):
        adapt(tiny.packed("llama", ROWS), torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="is no model of transformers and no config of one"):
        adapt(tiny.packed("llama", ROWS), "nanoVLM")


def test_inputs_for_another_attention_than_the_models_are_refused():
    with pytest.raises(ValueError, match=r"inputs for 'flash' were asked for, but this llama runs 'sdpa'"):
        adapt(tiny.packed("llama", ROWS), model("llama"), "flash")
    assert "flash" == resolve(model("llama", "flash"), "flash_attention_3").attention


def test_images_that_do_not_fit_the_text_are_refused():
    """Pixels left out, another model's token, another family's size, a sample without its image."""
    batch, net = tiny.packed("qwen2_vl", ROWS), model("qwen2_vl")
    none = replace(batch, images=tiny.packed("qwen2_vl", [[1]]).images)
    with pytest.raises(
        ValueError, match=r"row 0, segment 1 has \d+ image placeholders \(token \d+\), its images give 0"
    ):
        adapt(none, net)
    with pytest.raises(
        ValueError, match=r"has 0 image placeholders \(token \d+\), its images give \d+ features: encode"
    ):
        adapt(replace(batch, input_ids=torch.full_like(batch.input_ids, 3)), net)
    with pytest.raises(ValueError, match=r"pixels for qwen3_vl, which takes multiples of its cell, 32 pixels: encode"):
        adapt(batch, model("qwen3_vl"))
    with pytest.raises(ValueError, match=r"for gemma3, which takes squares of 28 pixels"):
        adapt(batch, model("gemma3"))
    with pytest.raises(ValueError, match=r"4 images for llama, a text-only model"):
        adapt(batch, model("llama"))
    with pytest.raises(ValueError, match=r"always_vision=True for llama"):
        adapt(tiny.packed("llama", ROWS), model("llama"), always_vision=True)
    with pytest.raises(ValueError, match=r"always_vision needs to know the model, and 'thd' is but a form"):
        adapt(batch, "thd", always_vision=True)


@pytest.mark.parametrize("family", [*VISION, "llama"])
@pytest.mark.parametrize("leak", LEAKS)
def test_inputs_that_leak_are_refused_before_the_model_runs(family, leak):
    """Each known leak, made of right inputs; for flash with rows as they are."""
    attention = "flash" if leak == "no_boundaries" and "flash" in ATTENTIONS.get(family, ("flash",)) else "sdpa"
    net, batch = model(family, attention), tiny.packed(family, ROWS)
    target, inputs = resolve(net), adapt(batch, net, flatten=False)
    refuse_leaks(inputs, net)
    if not LEAKS[leak].applies(target):
        return
    with pytest.raises(ValueError, match=rf"for {family} with {attention} attention: .*"):
        refuse_leaks(LEAKS[leak].spoil(inputs, batch, target), net)


def test_an_explicit_cache_is_refused():
    inputs = adapt(tiny.packed("llama", ROWS), model("llama"))
    with pytest.raises(ValueError, match="cache for llama with sdpa attention: with a cache"):
        refuse_leaks(inputs | {"past_key_values": hf.DynamicCache()}, model("llama"))
    with pytest.raises(ValueError, match="cache for llama"):
        refuse_leaks({name: value for name, value in inputs.items() if name != "use_cache"}, model("llama"))


def test_a_wrapped_model_is_found():
    net, batch = model("smolvlm"), tiny.packed("smolvlm", ROWS)
    expected = adapt(batch, net)
    for wrapped in (torch.nn.DataParallel(net), torch.nn.DataParallel(torch.nn.DataParallel(net)), net.config):
        made = adapt(batch, wrapped)
        assert expected.keys() == made.keys()
        assert torch.equal(expected["input_ids"], made["input_ids"])


@pytest.mark.parametrize("kind", ["sdpa", "eager", "flash", "flex"])
def test_names_of_attentions(kind):
    names = {
        "flash": ["flash", "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"],
        "flex": ["flex", "flex_attention"],
    }.get(kind, [kind])
    assert {kind} == {attention_kind(name) for name in names}


def test_the_public_names():
    assert mmdp.adapt is adapt
    assert set(VISION) == set(ATTENTIONS) == set(NORMAL)
    assert not set(TEXT_ONLY) & set(ATTENTIONS)
    assert "<image>" in MARKS
