"""The demo set and its tokenizer: shaped as said, made whole or not at all, and the same everywhere."""

import collections
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from mmdp import demo
from mmdp.demo.files import make_once
from mmdp.demo.rows import CONTINUE
from mmdp.demo.tokenizer import CONTROL

ROWS = 500
SOURCES = {"food_web", "cycle", "bar_chart", "labelled_parts", "two_charts", "text"}


@pytest.fixture(scope="module")
def jsonl(own_cache: Path) -> Path:
    return demo.demo_jsonl(own_cache)


@pytest.fixture(scope="module")
def rows(jsonl: Path) -> list[dict]:
    return [json.loads(line) for line in jsonl.read_text(encoding="ascii").splitlines()]


@pytest.fixture(scope="module")
def tokenizer(own_cache: Path):
    return AutoTokenizer.from_pretrained(demo.demo_tokenizer(own_cache))


@pytest.fixture(scope="module")
def lengths(rows: list[dict], tokenizer) -> np.ndarray:
    """Tokens of each row, 64 an image."""
    return np.array([len(_encode(row, tokenizer)["input_ids"]) + 63 * len(row["images"]) for row in rows])


def _encode(row: dict, tokenizer) -> dict:
    messages = []
    for number, turn in enumerate(row["texts"]):
        marks = [{"type": "image"}] * (len(row["images"]) if number == 0 else 0)
        messages.append({"role": "user", "content": [*marks, {"type": "text", "text": turn["user"]}]})
        messages.append({"role": "assistant", "content": turn["assistant"]})
    return tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)


def _child(code: str, *arguments: object) -> subprocess.Popen:
    """A process of its own, with another hash seed, that runs code on `demo`."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; from pathlib import Path; from mmdp import demo\n{code}",
            *map(str, arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )


# How the set looks.


def test_turns_follow_the_geometric_law(rows):
    """Law: turns are 1 + geometric, cut at 15, with a mean of about 3.07."""
    turns = [len(row["texts"]) for row in rows]
    assert pytest.approx(3.07, abs=0.15) == np.mean(turns)
    assert (1, 15) == (min(turns), max(turns))
    assert pytest.approx(1 - CONTINUE, abs=0.06) == np.mean([count == 1 for count in turns])


def test_images_have_the_sizes_of_ai2d(rows, jsonl):
    """Law: widths are lognormal around 560, cut to 180..1500; aspects 0.75..1.9; a tenth is JPEG; files are as said."""
    names = [name for row in rows for name in row["images"]]
    facts = [picture for row in rows for picture in row["facts"]["pictures"]]
    widths = np.array([picture["width"] for picture in facts])
    aspects = np.array([picture["width"] / picture["height"] for picture in facts])
    assert pytest.approx(560, rel=0.08) == np.median(widths)
    assert 180 <= widths.min() < 260
    assert 1200 < widths.max() <= 1500
    assert 0.745 <= aspects.min() < 0.85
    assert 1.75 < aspects.max() <= 1.91
    assert pytest.approx(0.1, abs=0.05) == np.mean([name.endswith(".jpg") for name in names])
    for name, picture in zip(names, facts, strict=True):
        with Image.open(jsonl.parent / name) as image:
            assert (picture["width"], picture["height"]) == image.size
            assert ("JPEG" if name.endswith(".jpg") else "PNG") == image.format


def test_all_kinds_of_rows_appear(rows):
    """Law: four families of diagram, a few rows with two images, a few with none."""
    counts = collections.Counter(row["source"] for row in rows)
    assert set(counts) == SOURCES
    for family in SOURCES - {"two_charts", "text"}:
        assert counts[family] > 80
    images = collections.Counter(len(row["images"]) for row in rows)
    assert {0, 1, 2} == set(images)
    assert 5 <= images[0] <= 25
    assert 5 <= images[2] <= 25


def test_set_is_small_and_whole(rows, jsonl):
    """Law: under 10 MB in all, every named image is there, and nothing else."""
    files = [path for path in jsonl.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    named = {jsonl.parent / name for row in rows for name in row["images"]}
    assert {jsonl, *named} == set(files)
    assert ROWS == len(rows) == len({row["id"] for row in rows})


def test_no_row_asks_twice(rows):
    """Law: the questions of one row all differ."""
    assert any(len(row["texts"]) == 15 for row in rows)
    for row in rows:
        questions = [turn["user"].split("\n")[0] for turn in row["texts"]]
        assert len(questions) == len(set(questions)), row["id"]


# Made once, the same everywhere, whole or not at all.


def _fingerprint(jsonl: Path) -> tuple[bytes, list[bytes]]:
    images = sorted((jsonl.parent / "images").iterdir())
    return jsonl.read_bytes(), [Image.open(path).convert("RGB").tobytes() for path in images]


def test_another_process_makes_the_same_set(tmp_path):
    """Law: the same bytes of JSONL and the same pixels, in another process with another hash seed; silent."""
    here = demo.demo_jsonl(tmp_path / "a", rows=30)
    child = _child("print(demo.demo_jsonl(Path(sys.argv[1]), rows=30))", tmp_path / "b")
    out, err = child.communicate(timeout=60)
    assert (0, "") == (child.returncode, err)
    assert _fingerprint(here) == _fingerprint(Path(out.strip()))


def test_a_row_is_the_same_in_a_set_of_any_size(rows):
    """Law: row 7 does not depend on how many rows there are; another seed gives another row."""
    for index in (0, 7, 499):
        made = json.loads(json.dumps(demo.make_row(index, 0)))
        assert (made["texts"], made["images"]) == (rows[index]["texts"], rows[index]["images"])
    assert demo.make_row(7, 0)["texts"] != demo.make_row(7, 1)["texts"]


def test_random_state_of_others_is_left_alone(tmp_path):
    """Law: making the set neither reads nor moves the global random states."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  the state that must not move
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    demo.demo_jsonl(tmp_path, rows=5)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


def test_what_is_there_is_not_made_again(tmp_path):
    """Law: a second call draws nothing; the folder's name holds version, rows and seed."""
    path = demo.demo_jsonl(tmp_path, rows=3, seed=5)
    assert tmp_path / f"demo-{demo.VERSION}-3-5" / "train.jsonl" == path
    path.write_text("kept")
    assert "kept" == demo.demo_jsonl(tmp_path, rows=3, seed=5).read_text()


def _wait_for_images(cache: Path, count: int, child: subprocess.Popen) -> None:
    until = time.monotonic() + 60
    while len(list(cache.glob(".demo-*/images/*"))) < count:
        assert child.poll() is None, "the child ended before it could be interrupted"
        assert time.monotonic() < until, "the child drew nothing"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_set_is_no_set(tmp_path, kind):
    """Law: Ctrl-C leaves nothing behind; a kill leaves no set; the next call makes a whole one."""
    child = _child("demo.demo_jsonl(Path(sys.argv[1]), rows=2000)", tmp_path)
    _wait_for_images(tmp_path, 10, child)
    child.send_signal(kind)
    child.communicate(timeout=60)
    assert child.returncode != 0
    left = [path.name for path in tmp_path.iterdir()]
    assert [] == [name for name in left if not name.startswith(".") or kind == signal.SIGINT]
    path = demo.demo_jsonl(tmp_path, rows=6)
    assert 6 == len(path.read_text().splitlines())


def test_two_processes_at_once_make_one_whole_set(tmp_path):
    """Law: both get the same path to a whole set, and nothing half made stays."""
    children = [_child("print(demo.demo_jsonl(Path(sys.argv[1]), rows=40))", tmp_path) for _ in range(2)]
    answers = [child.communicate(timeout=120) for child in children]
    assert [0, 0] == [child.returncode for child in children], answers
    assert answers[0][0] == answers[1][0]
    assert [f"demo-{demo.VERSION}-40-0"] == [path.name for path in tmp_path.iterdir()]
    assert _fingerprint(demo.demo_jsonl(tmp_path, rows=40)) == _fingerprint(demo.demo_jsonl(tmp_path / "c", rows=40))


def test_threads_that_race_get_one_whole_set(tmp_path):
    """Law: whoever loses the race for the name takes the winner's set, and clears its own away."""
    barrier, paths = threading.Barrier(2), []

    def fill(folder: Path) -> None:
        (folder / "file").write_text("whole")
        barrier.wait(timeout=10)  # both are filled before either is named

    def make() -> None:
        make_once(tmp_path / "set", fill)
        paths.append((tmp_path / "set" / "file").read_text())

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["whole", "whole"] == paths
    assert ["set"] == [path.name for path in tmp_path.iterdir()]


def test_a_failure_leaves_nothing(tmp_path):
    """Law: an error while making is raised, and nothing half made stays."""

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        make_once(tmp_path / "set", fail)
    assert [] == list(tmp_path.iterdir())


# The tokenizer.


def test_tokenizer_has_its_marks_and_about_4k_entries(tokenizer):
    """Law: about 4k entries; each mark is one token; `<|endoftext|>` pads, `<|im_end|>` ends."""
    assert 3500 <= len(tokenizer) <= 4500
    assert list(range(4)) == [tokenizer.convert_tokens_to_ids(mark) for mark in CONTROL]
    assert ("<|endoftext|>", "<|im_end|>") == (tokenizer.pad_token, tokenizer.eos_token)
    assert [3, 2] == tokenizer("<|image|><|im_end|>")["input_ids"]
    assert tokenizer.bos_token is None


def test_tokenizer_gives_any_text_back(tokenizer):
    """Law: byte level: every text comes back as it was, known or not."""
    for text in (
        "Which stage comes next?",
        " two  spaces\n\n",
        "中文 żółw \U0001f600 \x00",
        "user\nassistant",
        "isn't .",
    ):
        assert text == tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False)


def test_tokenizer_is_trained_alike_in_another_process(own_cache, tokenizer, tmp_path):
    """Law: the same bytes in another process with another hash seed."""
    child = _child("print(demo.demo_tokenizer(Path(sys.argv[1])))", tmp_path)
    out, err = child.communicate(timeout=120)
    assert (0, "") == (child.returncode, err)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (demo.demo_tokenizer(own_cache) / name).read_bytes() == (Path(out.strip()) / name).read_bytes()


def test_template_marks_answers_and_their_end(rows, tokenizer):
    """Law: the generation mask covers each answer and its `<|im_end|>`, and neither header nor newline."""
    row = next(row for row in rows if len(row["texts"]) == 4)
    encoded = _encode(row, tokenizer)
    marked = [i for i, on in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if on]
    assert "".join(turn["assistant"] + "<|im_end|>" for turn in row["texts"]) == tokenizer.decode(marked)
    text = tokenizer.decode(encoded["input_ids"])
    images = "<|image|>" * len(row["images"])
    assert text.startswith(f"<|im_start|>user\n{images}Question: ")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n" + row["texts"][-1]["assistant"] + "<|im_end|>\n")


def test_template_opens_an_answer(tokenizer):
    """Law: with a generation prompt the text ends where an answer begins."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert expected == text


# Lengths: what the stages show.


def _padded_to_longest(lengths: np.ndarray, batch_size: int) -> float:
    batches = [lengths[k : k + batch_size] for k in range(0, len(lengths), batch_size)]
    return 1 - lengths.sum() / sum(batch.max() * len(batch) for batch in batches)


def test_padding_looks_as_in_the_wild(lengths):
    """Law: half of a naive batch is padding; a fixed 320 wastes less and drops a fair share; 1024 wastes most."""
    kept = lengths[lengths <= 320]
    naive, fixed, wide = _padded_to_longest(lengths, 8), 1 - kept.mean() / 320, 1 - lengths.mean() / 1024
    assert 0.48 < naive < 0.65
    assert fixed < naive - 0.02
    assert wide > 0.7
    assert 0.1 < 1 - len(kept) / len(lengths) < 0.3
    assert (lengths > 700).any()
    assert lengths.max() <= 1024
    assert 150 <= np.median(lengths) <= 350
