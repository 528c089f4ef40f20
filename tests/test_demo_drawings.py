"""Facts against pixels: a drawing shows what its facts say, where they say, and at any size all of it."""

import collections
import json
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from mmdp import demo
from mmdp.demo import rows as demo_rows
from mmdp.demo.colours import COLOURS
from mmdp.demo.drawings import draw
from mmdp.demo.questions import by_turns


@pytest.fixture(scope="module")
def jsonl(own_cache: Path) -> Path:
    return demo.demo_jsonl(own_cache)


@pytest.fixture(scope="module")
def rows(jsonl: Path) -> list[dict]:
    return [json.loads(line) for line in jsonl.read_text(encoding="ascii").splitlines()]


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
            colour = _rgb(COLOURS[facts["colours"][number % len(facts["colours"])]])
            values.append(value)
            counted.append(int((line == colour).all(axis=-1).sum()))
        scale = max(counted) / max(values)
        assert scale > 0
        assert np.abs(np.array(counted) - scale * np.array(values)).max() <= 2, facts
    assert seen[True] > 20
    assert seen[False] > 20


def _changed(facts: dict, without: dict) -> np.ndarray:
    """The box (left, top, right, bottom) of the pixels that differ between two drawings."""
    one, two = (np.asarray(draw(f)[0].convert("RGB")).astype(int) for f in (facts, without))
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
        image = np.asarray(draw({**facts, "eats": [[eater, food]]})[0].convert("L")).astype(int)
        empty = np.asarray(draw({**facts, "eats": []})[0].convert("L")).astype(int)
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
    one, two = (draw(f) for f in (facts, mirrored))
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
        alone = draw({**facts, "labels": [label]})[1][label["letter"]]
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
@pytest.mark.parametrize("family", ["bar_chart", "cycle", "food_web", "labelled_parts", "two_charts"])
def test_any_size_holds_its_text_and_fifteen_questions(family, size, monkeypatch):
    """Law: at any size no ink reaches the border, all text fits (else drawing fails), and a row finds 15 questions."""
    monkeypatch.setattr(demo_rows, "picture_size", lambda _: size)
    for seed in range(5 if size[0] < 1000 else 1):
        random = Random(f"{family} {seed}")
        pictures, questions = demo_rows._picture(random, family)
        assert len(by_turns(questions, random)) >= 15
        for facts in pictures:
            pixels = np.asarray(draw(facts)[0].convert("L"))
            border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            assert border.min() > 250
