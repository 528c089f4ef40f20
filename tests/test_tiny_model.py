"""Laws of tiny_model.py: each vision family has a tiny model that fits its encoder, keeps samples apart, and learns."""

import pytest
import torch
from small import MARKS, tokenizer
from tiny_models import SPECS, encoder, packed

import mmdp
from mmdp.records import ImageBuffer
from mmdp.tiny_model import tiny_vlm
from mmdp.vision import vision_family
from mmdp.vision_inputs import num_image_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

DEFAULTS = (
    *SPECS,
    "smolvlm:longest_edge=1536,tile=384,image_seq_len=81",  # those of 2B: no patch divides the tile
    "fixed:64",
    "fixed:1:side=20",
    "gemma3:tokens=64",
)


def marked_encoder(spec):
    """The small tokenizer with all marks of a family."""
    more = [mark for mark in vision_family(spec).marks if mark not in MARKS]
    return mmdp.Encoder(tokenizer(marks=[*MARKS, *more]), spec)


@pytest.mark.parametrize("family", SPECS)
def test_it_is_of_its_family_and_keeps_samples_apart(family):
    """A model of the encoder's family, whose packed samples are the same as alone; a known leak shows in it."""
    model, batch = tiny_vlm(encoder(family)), packed(family, [[0, 1, 2], [3, 4]], tail=5)
    assert family == model.config.model_type
    report = mmdp.check_isolation(model, batch)
    assert report.passed, str(report)
    assert 0.5 < mmdp.check_isolation(model, batch, layout="mask_of_ones").error


@pytest.mark.parametrize("family", SPECS)
def test_it_learns(family):
    """Some steps on one batch lower the loss, and every part that the loss depends on has a gradient."""
    model, batch = tiny_vlm(encoder(family), hidden=32), packed(family, [[0, 1, 2], [3, 4]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        value = mmdp.loss(model, batch)
        value.backward()
        losses.append(value.item())
        without = {name for name, weight in model.named_parameters() if weight.grad is None}
        optimizer.step()
        optimizer.zero_grad()
    unused = [f"model.vision_tower.post_layernorm.{part}" for part in ("bias", "weight")]  # LLaVA ends before it
    assert (unused if family == "llava_onevision" else []) == sorted(without)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("spec", DEFAULTS)
def test_an_image_gives_as_many_features_as_the_encoder_says(spec):
    """Also with the options of the released checkpoints: placeholders and features of an image are as many."""
    encode = marked_encoder(spec)
    config = tiny_vlm(encode).config
    layout = encode.family.layout(640, 480, 1)
    wanted = encode.family.text(layout).count(encode.family.image_token)
    one = torch.tensor([1])
    image = ImageBuffer(
        pixels=torch.zeros(3 * layout.height * layout.width, dtype=torch.uint8),
        offsets=torch.tensor([0, 3 * layout.height * layout.width]),
        heights=one * layout.height,
        widths=one * layout.width,
        rows=one * 0,
        samples=one * 0,
        segments=one,
        originals=torch.tensor([[480, 640]]),
    )
    assert [wanted] == num_image_tokens(image, config).tolist()


def test_weights_come_from_the_seed_alone():
    """The same seed gives the same weights, another one others, and nobody else's random numbers change."""
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    first, same, other = (tiny_vlm(encoder("smolvlm"), seed=seed).state_dict() for seed in (1, 1, 2))
    assert wanted.tolist() == torch.rand(3).tolist()
    assert all(torch.equal(weight, same[name]) for name, weight in first.items())
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("fixed:50", {}, "50 tokens for 256 x 256 pixels make no square grid"),
        ("fixed:64:side=7", {}, "64 tokens for 7 x 7 pixels make no square grid"),
        ("fixed:64", {"hidden": 40}, "hidden is 40 and layers 2: hidden must be a multiple of 16"),
        ("fixed:64", {"layers": 0}, "layers at least 1"),
    ],
)
def test_what_can_not_be_is_refused(spec, options, message):
    """With the value, the limit and what to choose."""
    with pytest.raises(ValueError, match=message):
        tiny_vlm(marked_encoder(spec), **options)


def test_a_family_of_ones_own_has_no_tiny_model():
    """It says so, and where one is entered; the encoder itself takes any family."""

    class Mine:
        name = "mine"
        start = ""

    encode = marked_encoder("fixed:64")
    encode.family = Mine()
    with pytest.raises(ValueError, match=r"no tiny model for the vision family mine: enter one in `_family`"):
        tiny_vlm(encode)
