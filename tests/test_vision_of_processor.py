"""Laws of vision_of_processor.py: the family and options read off a processor are those that it runs with."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from PIL import Image
from small import MARKS, tokenizer
from test_vision import CASES, UNEVEN, make_processor

import mmdp
from mmdp.tiny_model import tiny_vlm
from mmdp.vision import filter_of, spec_of, vision_family

pytestmark = pytest.mark.usefixtures("one_thread")


def whole(spec, **more):
    """The released processor for a spec, which test_vision.py runs; here it makes floats, as released."""
    processor = make_processor(spec, **more)
    processor.image_processor.do_rescale = processor.image_processor.do_normalize = True
    return processor


@pytest.mark.parametrize("spec", [*CASES, *UNEVEN])
def test_a_processor_gives_back_its_family_with_every_option(spec):
    """test_vision.py shows that this family's layouts are the sizes of that processor."""
    found = vision_family(spec_of(whole(spec)))
    assert vision_family(spec) == found
    assert repr(vision_family(spec)) == repr(found)


def test_newlines_are_counted_by_its_tokenizer():
    for fuses, tokens in ((True, 1), (False, 2)):
        assert vision_family(spec_of(whole("idefics3", fuses_newlines=fuses))).newline_pair == tokens


@pytest.mark.parametrize("name", ["lanczos", "bicubic", "bilinear"])
def test_the_filter_is_known_in_each_of_its_forms(name):
    """Pillow's enum, the number in preprocessor_config.json, and torchvision's enum."""
    from torchvision.transforms.v2 import InterpolationMode

    resample = Image.Resampling[name.upper()]
    for form in (resample, int(resample), InterpolationMode(name)):
        processor = hf.Qwen2VLImageProcessor(resample=form)
        assert name == filter_of(processor)
        assert spec_of(processor).endswith(f",filter={name}")
    for pillow in (hf.Qwen2VLImageProcessorPil(resample=resample), hf.Qwen2VLImageProcessor(resample=resample)):
        assert vision_family(spec_of(pillow)) == vision_family(f"qwen2_5_vl:filter={name}")


def test_an_image_processor_alone_will_do_for_qwen():
    large = hf.Qwen2VLImageProcessor(min_pixels=3136, max_pixels=12845056)
    assert spec_of(large) == "qwen2_5_vl:min_pixels=3136,max_pixels=12845056,filter=bicubic"
    small = hf.Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 1024, "longest_edge": 65536})
    assert vision_family(spec_of(small)) == vision_family("qwen3_vl:min_pixels=1024,max_pixels=65536")
    for kind, name in (
        (hf.SmolVLMImageProcessor, "image_seq_len"),
        (hf.Idefics3ImageProcessor, "image_seq_len"),
        (hf.LlavaOnevisionImageProcessor, "num_image_tokens"),
        (hf.Gemma3ImageProcessor, "image_seq_length"),
    ):
        with pytest.raises(ValueError, match=f"has no `{name}`.*give the whole processor"):
            spec_of(kind())


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        ("qwen2_vl", {"do_resize": False}, "do_resize False: only True"),
        ("qwen2_vl", {"do_normalize": False}, "do_normalize False"),
        ("qwen2_vl", {"rescale_factor": 1 / 127.5}, "only 1 / 255"),
        ("qwen2_vl", {"merge_size": 1}, "merge_size 1: only 2"),
        ("qwen2_vl", {"patch_size": 18}, "patch_size 18: only 14 or 16"),
        ("qwen2_vl", {"resample": Image.Resampling.BOX}, "only bilinear or bicubic or lanczos"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan True: only False"),
        ("gemma3", {"size": {"height": 896, "width": 448}}, "a height and as large a width"),
        ("llava_onevision", {"image_grid_pinpoints": [[384, 768]]}, "all canvases up to a grid"),
        ("llava_onevision", {"do_center_crop": True}, "do_center_crop True"),
    ],
)
def test_what_no_family_does_is_refused(spec, changes, message):
    processor = whole(spec)
    for name, value in changes.items():
        setattr(processor.image_processor, name, value)
    with pytest.raises(ValueError, match=message):
        spec_of(processor)


def test_what_the_processor_around_it_says_is_looked_at_too():
    for name, value in (
        ("vision_feature_select_strategy", "default"),
        ("num_image_tokens", 700),
        ("vision_aspect_ratio", "square"),
    ):
        processor = whole("llava_onevision")
        setattr(processor, name, value)
        with pytest.raises(ValueError, match=f"LlavaOnevisionProcessor has {name} .*{value}"):
            spec_of(processor)
    with pytest.raises(ValueError, match="no vision family is known for CLIPImageProcessor: the image processors are"):
        spec_of(hf.CLIPImageProcessor())


TEMPLATE = (
    "{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


@pytest.mark.parametrize(
    "spec", ["qwen2_5_vl:max_pixels=200704,min_pixels=3136", "idefics3", "llava_onevision", "gemma3"]
)
def test_the_comparison_that_the_guide_shows_works(spec, tmp_path, monkeypatch, capsys):
    """docs/own_data.md: its code as it stands there, on a checkpoint's folder; and it does tell a difference."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "own_data.md").read_text()
    code = text.split("## Is it the same as my processor?")[1].split("```python\n")[1].split("```")[0]
    family, processor, folder = vision_family(spec), whole(spec), tmp_path / "my" / "checkpoint"
    marks = [mark for mark in (*family.marks, "<|video_pad|>", "<video>") if mark not in MARKS]
    own = tokenizer(TEMPLATE % family.placeholder, marks=[*MARKS, *marks])
    if spec == "gemma3":  # its processor asks the tokenizer for the marks
        extra = dict(zip(("boi_token", "image_token", "eoi_token"), family.marks, strict=True))
        ends = {"eos_token": own.eos_token, "pad_token": own.pad_token, "chat_template": own.chat_template}
        own = hf.PreTrainedTokenizerFast(tokenizer_object=own.backend_tokenizer, extra_special_tokens=extra, **ends)
    processor.tokenizer, processor.chat_template = own, own.chat_template
    config = tiny_vlm(mmdp.Encoder(own, spec)).config
    config.dtype = torch.bfloat16  # as checkpoints are released; it would round the pixels
    processor.save_pretrained(folder)
    config.save_pretrained(folder)
    lines = []
    for number, sizes in enumerate([[(300, 200)], [], [(90, 400), (64, 64)], [(500, 375)], [(40, 30)]]):
        names = [f"{number}-{image}.png" for image in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            Image.effect_noise(size, 90).save(tmp_path / "my" / name)
        question = "what is <|im_end|> it" if number == 4 else "what is it"
        parts = [{"type": "image"}] * len(names) + [{"type": "text", "text": question}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Answer: B"}]
        lines.append(json.dumps({"images": names, "messages": turns}) + "\n")
    (tmp_path / "my" / "train.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    line = r"train.jsonl:(\d): (the same ids|OTHER IDS)(?:, .* most ([\d.]+) .* apart, ([\d.]+) on average)?"
    printed = capsys.readouterr().out
    assert re.search(r"OTHER IDS, at token [1-9]\d* first: '<\|im_end\|>' of the processor, '<' of mmdp", printed)
    said = re.findall(line, printed)
    assert [*"12345"] == [number for number, *_ in said]
    assert ["the same ids"] * 4 + ["OTHER IDS"] == [ids for _, ids, *_ in said]  # the last text spells a mark
    assert [True, False, True, True, True] == [bool(most) for *_, most, _ in said]
    assert all(float(most or 0) <= 3 and float(mean or 0) <= 0.05 for *_, most, mean in said)
