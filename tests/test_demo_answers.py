"""Answers against facts: of the choices of each turn exactly one is right, and it is the one the answer names.

The checker knows the facts and what is asked, not how the set was made.
"""

import calendar
import collections
import json
from pathlib import Path

import pytest

from mmdp import demo
from mmdp.demo.shapes import OBJECTS

ROWS = 500


@pytest.fixture(scope="module")
def rows(own_cache: Path) -> list[dict]:
    return [json.loads(line) for line in demo.demo_jsonl(own_cache).read_text(encoding="ascii").splitlines()]


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
            return {part.name for part in OBJECTS[facts["object"]][2]} - {label["name"] for label in labels}
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
