"""The demo set: made whole or not at all, the same everywhere, shaped as said, and every answer true to its drawing."""

import calendar
import collections
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from mmdp import demo, demo_drawings

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
    assert pytest.approx(1 - demo.CONTINUE, abs=0.06) == np.mean([count == 1 for count in turns])


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


def test_right_letters_are_spread_evenly(rows):
    """Law: no letter is right more often than chance; choices are A to D in order, all different."""
    right: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    for row in rows:
        for turn in row["texts"]:
            options, letter = _read(turn)
            assert len(set(options.values())) == len(options)
            assert "ABCD"[: len(options)] == "".join(options)
            right[len(options)][letter] += 1
    assert sum(right[4].values()) > 800
    for count, letters in right.items():
        total = sum(letters.values())
        for letter in "ABCD"[:count]:
            spread = (total / count * (1 - 1 / count)) ** 0.5
            assert abs(letters[letter] - total / count) < 4 * spread


def test_no_row_asks_twice(rows):
    """Law: the questions of one row all differ."""
    assert any(len(row["texts"]) == 15 for row in rows)
    for row in rows:
        questions = [turn["user"].split("\n")[0] for turn in row["texts"]]
        assert len(questions) == len(set(questions)), row["id"]


# Answers against facts. The checker knows the facts and what is asked, not how the set was made.


def _read(turn: dict) -> tuple[dict[str, str], str]:
    head, *choices, _ = turn["user"].split("\n")
    assert head.startswith("Question: ")
    assert choices[0] == "Choices:"
    assert turn["assistant"].startswith("Answer: ")
    return dict(choice.split(". ", 1) for choice in choices[1:]), turn["assistant"].removeprefix("Answer: ")


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def _web(facts: dict, kind: str, *of) -> set[str] | object:
    living = {name for level in facts["levels"] for name in level}
    eats = {(eater, food) for eater, food in facts["eats"]}
    assert len(eats) == len(facts["eats"])
    foods = {x: {food for eater, food in eats if eater == x} for x in living}
    eaters = {x: {eater for eater, food in eats if food == x} for x in living}
    x = of[0] if of else ""
    match kind:
        case "eaters":
            return eaters[x]
        case "strangers":
            return living - eaters[x] - {x}
        case "foods":
            return foods[x]
        case "num_foods":
            return {str(len(foods[x]))}
        case "num_eaters":
            return {str(len(eaters[x]))}
        case "rivals":
            return {y for y in living - {x} if foods[y] & foods[x]}
        case "starving":
            return {y for y in living if foods[y] == {x}}
        case "eats":
            return {_yes((x, of[1]) in eats)}
        case "producers":
            return {y for y in living if not foods[y]}
        case "tops":
            return {y for y in living if not eaters[y]}
        case "num_arrows":
            return {str(len(eats))}
        case "num_living":
            return {str(len(living))}
        case "num_producers":
            return {str(sum(not foods[y] for y in living))}
        case "chains":
            return {f"{x}, {y}, {z}" for y in eaters[x] for z in eaters[y]}
    raise KeyError(kind)


def _cycle(facts: dict, kind: str, *of) -> set[str]:
    stages = facts["stages"]
    count = len(stages)
    following = {stage: stages[(k + 1) % count] for k, stage in enumerate(stages)}
    match kind:
        case "after":
            return {following[of[0]]}
        case "before":
            return {stage for stage in stages if following[stage] == of[0]}
        case "at":
            return {stages[of[0] - 1]}
        case "number":
            return {str(stages.index(of[0]) + 1)}
        case "follow":
            here = of[0]
            for _ in range(of[1]):
                here = following[here]
            return {here}
        case "arrows":
            here, steps = following[of[0]], 1
            while here != of[1]:
                here, steps = following[here], steps + 1
            return {str(steps)}
        case "follows":
            return {_yes(following[of[1]] == of[0])}
        case "order":
            runs = [(stage, following[stage], following[following[stage]]) for stage in stages]
            return {", then ".join(run) for run in runs if of[0] in run}
        case "num_stages":
            return {str(count)}
        case "turning":
            return {"clockwise" if facts["clockwise"] else "anticlockwise"}
    raise KeyError(kind)


def _chart(facts: dict, kind: str, *of) -> set[str]:
    value, unit = dict(facts["bars"]), facts["unit"]
    falling = sorted(value, key=lambda name: value[name], reverse=True)
    match kind:
        case "most":
            return {falling[0]}
        case "second":
            return {falling[1]}
        case "least":
            return {falling[-1]}
        case "value":
            return {f"{value[of[0]]} {unit}"}
        case "holder":
            return {name for name in value if value[name] == of[0]}
        case "longer":
            return {_yes(value[of[0]] > value[of[1]])}
        case "gap":
            return {f"{value[of[0]] - value[of[1]]} {unit}"}
        case "both":
            return {f"{value[of[0]] + value[of[1]]} {unit}"}
        case "num_above":
            return {str(sum(number > of[0] for number in value.values()))}
        case "above":
            return {name for name in value if value[name] > of[0]}
        case "up_to":
            return {name for name in value if value[name] <= of[0]}
        case "order":
            return {", ".join(name for name in falling if name in of)}
        case "total":
            return {f"{sum(value.values())} {unit}"}
        case "span":
            return {f"{max(value.values()) - min(value.values())} {unit}"}
        case "num_bars":
            return {str(len(value))}
    raise KeyError(kind)


def _parts(facts: dict, kind: str, *of) -> set[str]:
    labels = facts["labels"]
    match kind:
        case "part":
            return {label["name"] for label in labels if label["letter"] == of[0]}
        case "letter" | "actor":
            return {label["letter"] for label in labels if label["name"] == of[0]}
        case "role":
            return {f"It {label['role']}." for label in labels if label["letter"] == of[0]}
        case "marks":
            return {_yes(any(label["letter"] == of[0] and label["name"] == of[1] for label in labels))}
        case "num_letters":
            return {str(len(labels))}
        case "unmarked":
            return {part.name for part in demo_drawings.OBJECTS[facts["object"]][2]} - {
                label["name"] for label in labels
            }
        case "absent":
            return set("ABCDEFGHIJKLMNOPQRSTUVWXYZ") - {label["letter"] for label in labels}
        case "highest":
            return {min(labels, key=lambda label: label["point"][1])["name"]}
        case "lowest":
            return {max(labels, key=lambda label: label["point"][1])["name"]}
    raise KeyError(kind)


def _two_charts(pictures: list[dict], kind: str, *of) -> set[str]:
    one, two = (dict(picture["bars"]) for picture in pictures)
    unit, names = pictures[0]["unit"], ("the first picture", "the second picture")
    match kind:
        case "larger_in":
            return {names[one[of[0]] < two[of[0]]]}
        case "gap_of":
            return {f"{abs(one[of[0]] - two[of[0]])} {unit}"}
        case "both_of":
            return {f"{one[of[0]] + two[of[0]]} {unit}"}
        case "larger_total":
            return {names[sum(one.values()) < sum(two.values())]}
        case "same_most":
            return {_yes(max(one, key=one.__getitem__) == max(two, key=two.__getitem__))}
        case "first" | "second":
            return _chart(pictures[kind == "second"], *of)
    raise KeyError(kind)


def _text(kind: str, *of) -> set[str]:
    days = list(calendar.day_name)
    months = list(calendar.month_name)[1:]
    match kind:
        case "sum":
            return {str(of[0] + of[1])}
        case "difference":
            return {str(of[0] - of[1])}
        case "product":
            return {str(of[0] * of[1])}
        case "half":
            return {str(of[0] // 2)} if of[0] % 2 == 0 else set()
        case "minutes":
            return {str(of[0] * 60)}
        case "centimetres":
            return {str(of[0] * 100)}
        case "next_letter":
            return {chr(ord(of[0]) + 1)}
        case "weekday":
            return {days[(days.index(of[0]) + of[1]) % 7]}
        case "month":
            return {months[(months.index(of[0]) + of[1]) % 12]}
        case "dictionary":
            return {sorted(of)[0]}
        case "letters":
            return {str(len(of[0]))}
        case "backwards":
            return {"".join(reversed(of[0]))}
        case "sides":
            return {str({"triangle": 3, "square": 4, "pentagon": 5, "hexagon": 6, "octagon": 8}[of[0]])}
    raise KeyError(kind)


def _right(row: dict, ask: list, options: list[str]) -> set[str]:
    """The options that are right, by the facts of the row alone."""
    pictures, kind = row["facts"]["pictures"], ask[0]
    match row["source"]:
        case "text":
            right = _text(*ask)
        case "two_charts":
            right = _two_charts(pictures, *ask)
        case "cycle" if kind == "missing":
            right = set(options) - set(pictures[0]["stages"])
        case source:
            right = {"food_web": _web, "cycle": _cycle, "bar_chart": _chart, "labelled_parts": _parts}[source](
                pictures[0], *ask
            )
    return right & set(options)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_answer_is_right_and_the_only_right_one(seed):
    """Law: of the choices exactly one fits the facts, and it is the one the answer names."""
    kinds = set()
    for index in range(ROWS):
        row = demo.make_row(index, seed)
        asks = row["facts"]["asks"]
        assert len(row["texts"]) == len(asks)
        for ask, turn in zip(asks, row["texts"], strict=True):
            options, letter = _read(turn)
            assert {options[letter]} == _right(row, ask, list(options.values())), (row["id"], ask, turn)
            kinds.add((row["source"], *ask[:1]))
    assert len(kinds) > 60, "too few kinds of question came up to say that all are right"


def test_questions_name_what_they_ask_about():
    """Law: what a question is about stands in its words, so the facts checked are the facts asked for."""
    for index in range(ROWS):
        row = demo.make_row(index, 3)
        for ask, turn in zip(row["facts"]["asks"], row["texts"], strict=True):
            wording = turn["user"].split("\n")[0]
            if ask[0] == "actor":
                ask = [label["role"] for label in row["facts"]["pictures"][0]["labels"] if label["name"] == ask[1]]
                assert ask[0] in wording
            for word in ask[1:]:
                if not isinstance(word, str) or "_" not in word:
                    assert str(word) in wording or word in SINGLE_WORDS, (ask, wording)


SINGLE_WORDS = {  # kinds of question behind "first" and "second"
    "most", "least", "second", "value", "holder", "longer", "gap", "both", "above", "order", "total", "span",
}  # fmt: skip


# Facts against pixels.


def _pictures(rows: list[dict], family: str, jsonl: Path, suffix: str = ".png"):
    for row in rows:
        for name, facts in zip(row["images"], row["facts"]["pictures"], strict=True):
            if facts["family"] == family and name.endswith(suffix):
                yield facts, np.asarray(Image.open(jsonl.parent / name).convert("RGB")).astype(int)


def _rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def test_bars_are_as_long_as_their_values(rows, jsonl):
    """Law: pixels of a bar are proportional to its value, counted in the file."""
    seen = {True: 0, False: 0}
    for facts, pixels in _pictures(rows, "bar_chart", jsonl):
        places = [facts["places"][name] for name, _ in facts["bars"]]
        upright = len({place[3] for place in places}) == 1
        seen[upright] += 1
        values, counted = [], []
        for number, (name, value) in enumerate(facts["bars"]):
            left, top, right, bottom = facts["places"][name]
            line = pixels[:, (left + right) // 2] if upright else pixels[(top + bottom) // 2]
            colour = _rgb(demo_drawings.COLOURS[facts["colours"][number % len(facts["colours"])]])
            values.append(value)
            counted.append(int((line == colour).all(axis=-1).sum()))
        scale = max(counted) / max(values)
        assert scale > 0
        assert np.abs(np.array(counted) - scale * np.array(values)).max() <= 2, facts
    assert seen[True] > 20
    assert seen[False] > 20


def _changed(facts: dict, without: dict) -> np.ndarray:
    """The box (left, top, right, bottom) of the pixels that differ between two drawings."""
    one, two = (np.asarray(demo_drawings.draw(f)[0].convert("RGB")).astype(int) for f in (facts, without))
    ys, xs = np.nonzero(np.abs(one - two).sum(axis=-1))
    assert len(xs), "nothing changed"
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def test_each_arrow_runs_from_the_food_to_its_eater(rows):
    """Law: a web of this one arrow and one of none differ between the two cards, and nowhere else."""
    webs = [row["facts"]["pictures"][0] for row in rows if row["source"] == "food_web"][:25]
    for facts in webs:
        eater, food = facts["eats"][len(facts["eats"]) // 2]
        box = _changed({**facts, "eats": [[eater, food]]}, {**facts, "eats": []})
        a, b = np.array(facts["places"][food]), np.array(facts["places"][eater])
        axis = 0 if facts["width"] > 1.15 * facts["height"] else 1
        near, far = (a[axis + 2], b[axis]) if axis == 0 else (b[axis + 2], a[axis])
        assert abs(box[axis] - near) <= 4
        assert abs(box[axis + 2] - far) <= 4


def test_the_arrowhead_stands_at_the_eater(rows):
    """Law: the dark ink of an arrow lies at the eater's end."""
    webs = [row["facts"]["pictures"][0] for row in rows if row["source"] == "food_web"][:25]
    for facts in webs:
        eater, food = facts["eats"][0]
        image = np.asarray(demo_drawings.draw({**facts, "eats": [[eater, food]]})[0].convert("L")).astype(int)
        empty = np.asarray(demo_drawings.draw({**facts, "eats": []})[0].convert("L")).astype(int)
        ys, xs = np.nonzero((image < 60) & (empty > 200))
        assert len(xs) > 3

        def distance(name: str, x: float = xs.mean(), y: float = ys.mean(), facts: dict = facts) -> float:
            left, top, right, bottom = facts["places"][name]
            return float(np.hypot(max(left - x, 0, x - right), max(top - y, 0, y - bottom)))

        assert distance(eater) < distance(food)


def test_stages_go_round_as_said(rows):
    """Law: seen from the middle, the stages follow one another in the direction of the facts."""
    turnings = collections.Counter()
    for row in rows:
        if row["source"] != "cycle":
            continue
        facts = row["facts"]["pictures"][0]
        centres = np.array([np.add.reduce(np.reshape(facts["places"][s], (2, 2))) / 2 for s in facts["stages"]])
        around = centres - (centres.min(axis=0) + centres.max(axis=0)) / 2
        ring = [*around, around[0]]
        # On a screen y grows downwards: a positive cross product turns clockwise.
        turns = {bool(a[0] * b[1] - a[1] * b[0] > 0) for a, b in pairwise(ring)}
        assert {facts["clockwise"]} == turns
        turnings[facts["clockwise"]] += 1
    assert min(turnings.values()) > 10


def test_arrowheads_of_a_cycle_show_its_direction(rows):
    """Law: the same stages in the same places, turned the other way, look different between the cards."""
    facts = next(row["facts"]["pictures"][0] for row in rows if row["source"] == "cycle")
    first, *others = facts["stages"]
    mirrored = {**facts, "stages": [first, *others[::-1]], "clockwise": not facts["clockwise"]}
    one, two = (demo_drawings.draw(f) for f in (facts, mirrored))
    assert one[1] == two[1]
    different = np.abs(np.asarray(one[0].convert("L")).astype(int) - np.asarray(two[0].convert("L")))
    for left, top, right, bottom in one[1].values():
        different[top - 1 : bottom + 1, left - 1 : right + 1] = 0  # the cards: only their numbers differ
    assert (different > 60).sum() > 10 * len(facts["stages"])


def test_a_letter_has_a_line_to_its_part(rows):
    """Law: a letter and its line are drawn, and the line ends at the part's point."""
    seen = 0
    for row in rows:
        if row["source"] != "labelled_parts" or seen == 25:
            continue
        seen += 1
        facts = row["facts"]["pictures"][0]
        label = facts["labels"][0]
        box = _changed({**facts, "labels": [label]}, {**facts, "labels": []})
        alone = demo_drawings.draw({**facts, "labels": [label]})[1][label["letter"]]
        badge = (alone[0] + alone[2]) / 2, (alone[1] + alone[3]) / 2
        assert box[0] - 1 <= badge[0] <= box[2] + 1
        assert box[1] - 1 <= badge[1] <= box[3] + 1
        assert max(box[2] - box[0], box[3] - box[1]) > 1.3 * (alone[2] - alone[0])
    assert seen == 25


def test_every_name_stands_where_the_row_says(rows, jsonl):
    """Law: the place of each living thing, stage and letter lies in the picture and holds ink."""
    seen = 0
    for family in ("food_web", "cycle", "labelled_parts"):
        for facts, pixels in _pictures(rows, family, jsonl, suffix=""):
            for name, (left, top, right, bottom) in facts["places"].items():
                assert 0 <= left < right <= facts["width"]
                assert 0 <= top < bottom <= facts["height"]
                assert pixels[top:bottom, left:right].min() < 110, (name, facts["title"])
                seen += 1
    assert seen > 1500


SIZES = [(180, 95), (180, 240), (220, 293), (300, 158), (440, 232), (479, 300), (1500, 790), (1500, 2000)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", sorted(SOURCES - {"text"}))
def test_any_size_holds_its_text_and_fifteen_questions(family, size, monkeypatch):
    """Law: at any size no ink reaches the border, all text fits (else drawing fails), and a row finds 15 questions."""
    monkeypatch.setattr(demo, "_size", lambda _: size)
    for seed in range(5 if size[0] < 1000 else 1):
        random = Random(f"{family} {seed}")
        pictures, questions = demo._picture(random, family)
        assert len(demo._by_turns(questions, random)) >= 15
        for facts in pictures:
            pixels = np.asarray(demo_drawings.draw(facts)[0].convert("L"))
            border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            assert border.min() > 250


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
        demo._make_once(tmp_path / "set", fill)
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
        demo._make_once(tmp_path / "set", fail)
    assert [] == list(tmp_path.iterdir())


# The tokenizer.


def test_tokenizer_has_its_marks_and_about_4k_entries(tokenizer):
    """Law: about 4k entries; each mark is one token; `<|endoftext|>` pads, `<|im_end|>` ends."""
    assert 3500 <= len(tokenizer) <= 4500
    assert list(range(4)) == [tokenizer.convert_tokens_to_ids(mark) for mark in demo.CONTROL]
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
