"""Laws of isolation.py: packed samples are the same as alone for every family and attention, and each known leak shows.

Flash kernels are stood in for by plain torch behind the dispatch of transformers (`flash_stand_in.py`): this shows
which inputs reach them with which boundaries, not the kernels.
"""

import functools
import math
import os

import pytest
import tiny_models as tiny
import torch
import transformers
from flash_stand_in import flash_kernels

import mmdp
from mmdp.adapters import adapt
from mmdp.families import ATTENTIONS, TEXT_ONLY, resolve
from mmdp.isolation import LIMITS, check_isolation
from mmdp.leaks import LEAKS

ROWS = [[0, 1, 2], [3, 4]]  # samples of 1, 0, 2, 1, 0 images; no row is as long as another
SHAPES = {"one row": (ROWS[:1], 0), "one row with a tail": (ROWS[:1], 9), "two rows": (ROWS, 0)}
PAIRS = [
    (family, attention)
    for family in [*tiny.SPECS, "llama"]
    for attention in ATTENTIONS.get(family, ("sdpa", "eager", "flash", "flex"))
    if attention != "flex"
]
SHOWS = 0.5  # standard deviations of the logits; the least known leak gives 1.8


@functools.cache
def model(family, attention):
    """Eager attention computes its softmax in float32: float64 would only make NaN of its least numbers."""
    return tiny.make_model(family, attention, torch.float32 if attention == "eager" else torch.float64)


@pytest.fixture(scope="module", autouse=True)
def stage():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with flash_kernels():
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_packed_samples_are_the_same_as_alone(family, attention, shape):
    """Law 6, at the logits: <= 1e-5 in float64, 1e-4 in float32 (eager); images of 0, 1 and 2 in one row."""
    rows, tail = SHAPES[shape]
    batch = tiny.packed(family, rows, tail=tail)
    report = check_isolation(model(family, attention), batch)
    assert report.passed, str(report)
    assert report.error <= (1e-4 if attention == "eager" else 1e-5) == report.limit
    assert (family, attention) == (report.family, report.attention)
    images = {one.images for one in report.samples}
    assert images == ({0, 1, 2} if family in tiny.SPECS else {0})
    assert [index for row in rows for index in row] == [one.sample for one in report.samples]
    assert batch.num_tokens == sum(one.tokens for one in report.samples)


@pytest.mark.parametrize("family", [family for family, attention in PAIRS if attention == "flash"])
def test_flash_is_right_for_several_rows_too(family):
    """The boundaries hold whether the rows are made one or not."""
    net = model(family, "flash")
    report = check_isolation(net, tiny.packed(family, ROWS), layout=lambda batch: adapt(batch, net, flatten=False))
    assert report.passed, str(report)


@pytest.mark.parametrize("family", TEXT_ONLY)
def test_every_text_only_model_that_is_listed_passes(family):
    """Sliding windows (of 7 tokens), layers without positions, and plain ones."""
    report = check_isolation(model(family, "sdpa"), tiny.packed(family, ROWS, tail=5))
    assert report.passed, str(report)
    assert check_isolation(model(family, "sdpa"), tiny.packed(family, ROWS), layout="cache").error > SHOWS


@pytest.mark.parametrize(("family", "attention"), [pair for pair in PAIRS if pair[1] != "flash"])
def test_every_known_leak_shows(family, attention):
    """So that the tests above can fail; sample 0 of each row has nothing before it and stays what it is."""
    net, batch = model(family, attention), tiny.packed(family, ROWS, tail=9)
    seen = 0
    for name, leak in LEAKS.items():
        if not leak.applies(resolve(net)):
            continue
        report = check_isolation(net, batch, layout=name)
        assert not report.passed
        assert report.error > SHOWS, name
        assert report.traps, name
        if name not in ("flat_positions", "no_positions"):
            assert report.samples[0].error <= report.limit
        seen += 1
    assert seen == {"gemma3": 5}.get(family, 7 if family.startswith("qwen") else 5)


@pytest.mark.parametrize("family", [family for family, attention in PAIRS if attention == "flash"])
def test_with_flash_what_leaks_depends_on_rows_and_tails(family):
    """One row: positions alone do, until a mask with a 0 comes. Several rows: only boundaries do."""
    net = model(family, "flash")
    target = resolve(net)

    def error(name, rows, tail, flatten):
        batch = tiny.packed(family, rows, tail=tail)
        make = functools.partial(adapt, model_or_config=net, flatten=flatten)
        return check_isolation(net, batch, layout=lambda one: LEAKS[name].spoil(make(one), one, target)).error

    for name in ("no_positions", "mask_of_ones"):
        assert error(name, ROWS[:1], 0, True) > SHOWS
    for name in ("positions_and_mask", "cache", "no_boundaries"):
        assert error(name, ROWS[:1], 9, True) <= 1e-5
        assert error(name, ROWS, 0, False) > SHOWS
    assert error("positions_and_padding_mask", ROWS[:1], 0, True) <= 1e-5
    assert error("positions_and_padding_mask", ROWS[:1], 9, True) > SHOWS
    if family.startswith("qwen"):
        assert error("three_row_positions", ROWS[:1], 0, True) > SHOWS
        assert error("flat_positions", ROWS[:1], 0, True) > SHOWS


def test_the_report_names_the_leak_and_the_way_out():
    batch, net = tiny.packed("qwen3_vl", ROWS), model("qwen3_vl", "sdpa")
    report = check_isolation(net, batch, layout=lambda one: adapt(one, net) | {"use_cache": True})
    assert ("cache",) == report.traps
    text = str(report)
    assert "qwen3_vl, sdpa: packed samples are NOT the same as alone" in text
    assert "likely reason, cache: with a cache, which models make by default" in text
    assert 3 == text.count("<-- differs")  # the first of each row has nothing before it
    good = str(check_isolation(net, batch))
    assert "packed samples are the same as alone, within 1e-05" in good
    assert "differs" not in good
    assert 2 + 5 == len(good.splitlines())


def test_where_the_inputs_are_right_the_leaks_with_the_same_logits_are_named(monkeypatch):
    """A model that does not look for samples in positions: transformers so patched stands for an old or odd one."""
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    report = check_isolation(model("llama", "sdpa"), tiny.packed("llama", ROWS))
    assert {"cache", "positions_and_mask"} <= set(report.traps)
    assert "no_positions" not in report.traps
    assert report.error > SHOWS


def test_a_reason_that_is_not_known_is_not_made_up():
    net = model("llama", "sdpa")
    report = check_isolation(
        net, tiny.packed("llama", ROWS), layout=lambda one: adapt(one, net) | {"input_ids": one.input_ids.flip(0)}
    )
    assert not report.passed
    assert () == report.traps
    assert "none of the known reasons" in str(report)


def test_a_nan_does_not_pass():
    """`max(0.0, nan)` is 0.0: the check must not be built on it."""
    net = tiny.make_model("llama", "sdpa", torch.float32)
    with torch.no_grad():
        net.model.norm.weight[3] = math.nan
    report = check_isolation(net, tiny.packed("llama", ROWS))
    assert not report.passed
    assert math.isnan(report.error)
    assert "NOT the same" in str(report)


def test_the_model_is_left_as_it_was():
    """Its mode, part by part, its gradients, and the mode of gradients; dropout does not disturb the check."""
    net = tiny.make_model("smolvlm")
    net.train()
    net.model.text_model.layers[0].eval()
    net.model.text_model.layers[1].self_attn.attention_dropout = 0.5
    report = check_isolation(net, tiny.packed("smolvlm", ROWS))
    assert report.passed
    assert net.training
    assert net.model.text_model.layers[1].training
    assert not net.model.text_model.layers[0].training
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.is_grad_enabled()


def test_half_precision_passes_within_its_own_limit_and_a_leak_is_beyond_it():
    for dtype in (torch.bfloat16, torch.float16):
        net = tiny.make_model("qwen3_vl", dtype=dtype)
        batch = tiny.packed("qwen3_vl", ROWS)
        assert check_isolation(net, batch).passed
        assert check_isolation(net, batch, layout="cache").error > 5 * LIMITS[dtype]
        assert not check_isolation(net, batch, limit=1e-9).passed


def test_below_autocast_the_limit_is_that_of_its_dtype():
    """Whether the caller begins it, or the model's own forward does, as one that accelerate has prepared."""
    net, batch = tiny.make_model("qwen2_5_vl", dtype=torch.float32), tiny.packed("qwen2_5_vl", ROWS)
    assert LIMITS[torch.float32] == check_isolation(net, batch).limit
    with torch.autocast("cpu", torch.bfloat16):
        below = check_isolation(net, batch)
        leak = check_isolation(net, batch, layout="positions_and_mask")
    assert below.passed
    assert below.error > LIMITS[torch.float32], "the case did not arise"
    assert not leak.passed
    assert LIMITS[torch.bfloat16] == below.limit == leak.limit
    net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)
    assert check_isolation(net, batch).passed
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_what_shows_nothing_is_refused():
    with pytest.raises(ValueError, match="a batch of 1 sample shows nothing: give one with at least two, packed"):
        check_isolation(model("llama", "sdpa"), tiny.packed("llama", [[0]]))
    with pytest.raises(ValueError, match=r"unknown layout 'no_masks' for llama: the known leaks are no_positions"):
        check_isolation(model("llama", "sdpa"), tiny.packed("llama", ROWS), layout="no_masks")
    net, batch = model("llama", "sdpa"), tiny.packed("llama", ROWS, tail=3)
    with pytest.raises(ValueError, match=r"the layout's inputs have \d+ tokens, the batch has \d+: a layout must keep"):
        check_isolation(net, batch, layout=lambda one: {"input_ids": one.input_ids[:, :-3]})
    assert mmdp.check_isolation is check_isolation


@pytest.mark.skipif("MMDP_TEST_FLEX" not in os.environ, reason="flex compiles for minutes: set MMDP_TEST_FLEX=1")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["smolvlm", "idefics3", "llava_onevision", "gemma3", "llama"])
def test_flex_keeps_samples_apart(family):
    """The same logits as with sdpa, which are those of each sample alone; the vision tower stays with sdpa."""
    torch._dynamo.reset()
    batch, net = tiny.packed(family, ROWS[:1]), tiny.make_model(family, "sdpa", torch.float32)
    with torch.no_grad():
        expected = net(**adapt(batch, net)).logits
        net.set_attn_implementation("flex_attention" if family == "llama" else {"text_config": "flex_attention"})
        assert "flex" == resolve(net).attention
        packed = net(**adapt(batch, net)).logits
    assert float((packed - expected).abs().max() / expected.std()) < 1e-4
