"""Laws of trainer_forms.py, and of the mask it gives: other trainers keep samples apart by it, and shift no labels."""

import pytest
import tiny_models as tiny
import torch

from mmdp.adapters import adapt
from mmdp.masks import block_mask

ROWS = [[0, 1, 2], [3, 4]]  # samples of 1, 0, 2, 1, 0 images; the second row has a tail


def test_nanovlm_gets_shifted_labels_and_a_mask_that_keeps_samples_apart():
    """Its mask, given to a model that knows no other borders: positions run on, and the samples are as alone."""
    batch, net = tiny.packed("llama", ROWS), tiny.make_model("llama")
    form = adapt(batch, "nanovlm")
    assert ["input_ids", "images", "attention_mask", "targets"] == list(form)
    assert [] == form["images"]
    running = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    with torch.no_grad():
        logits = net(input_ids=form["input_ids"], attention_mask=form["attention_mask"], position_ids=running).logits
        one = net(input_ids=tiny.packed("llama", [[1]]).input_ids).logits[0]
        expected = net(**adapt(batch, net)).loss
    assert float((logits[0, batch.segments[0] == 2] - one).abs().max()) < 1e-4
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), form["targets"].flatten())
    assert float(expected) == pytest.approx(float(loss), abs=1e-4)


def test_nanovlm_gets_images_from_0_to_1_and_of_one_size():
    batch = tiny.packed("gemma3", ROWS)
    images = adapt(batch, "nanovlm")["images"]
    assert (len(batch.images), 3, 28, 28) == tuple(images.shape)
    assert torch.equal(batch.images[1].float() / 255, images[1])
    with pytest.raises(ValueError, match=r"nanoVLM takes images of one size, these have \[\(28, 56\)"):
        adapt(tiny.packed("qwen2_vl", ROWS), "nanovlm")


def test_megatron_gets_all_rows_as_one_with_boundaries():
    batch = tiny.packed("gemma3", ROWS)
    form = adapt(batch, "thd")
    total = batch.input_ids.numel()
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert (1, total) == tuple(form[name].shape)
    assert ("thd", batch.max_seqlen) == (form["qkv_format"], form["max_seqlen_q"])
    assert batch.cu_seqlens.tolist() == form["cu_seqlens_q"].tolist() == form["cu_seqlens_kv"].tolist()
    assert batch.label_tokens == int(form["loss_mask"].sum())
    assert torch.equal(batch.shifted_labels().flatten(), form["labels"][0])
    assert 4 == len(form["images"])


def test_packed_documents_do_not_see_each_other(case_script):
    """PACK-10, by the judge that was handed to us: our positions, segments and mask."""
    judge, batch = case_script("isolation"), tiny.packed("llama", ROWS, tail=4)
    for row in range(2):
        given = {
            "input_ids": batch.input_ids[row],
            "position_ids": batch.position_ids[row],
            "doc_ids": batch.segments[row],
        }
        for mask in (None, block_mask(batch.segments)[row, 0]):
            assert judge.leak(given | {"mask": mask}) < 1e-5
            assert judge.alone(given | {"mask": mask}) < 1e-4
    assert judge.leak(given, torch.ones_like(batch.input_ids[1])) > 0.01
