"""One row of the demo set: how many pictures of which size, their facts, and its turns.

Adds: `make_row`, a pure function of index and seed; `VERSION`.
Leaves out: pixels and files (`files`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

from mmdp.demo.chart_questions import chart_questions, pair_questions
from mmdp.demo.diagram_questions import cycle_questions, parts_questions, web_questions
from mmdp.demo.facts import chart_facts, cycle_facts, parts_facts, web_facts
from mmdp.demo.questions import by_turns
from mmdp.demo.records import Facts, Question
from mmdp.demo.text_questions import text_questions
from mmdp.demo.words import INSTRUCTIONS

VERSION = 1
"""Names the folders; raise it with every change of a text, a picture or the tokenizer."""

WIDTHS = (180, 1500)
MEDIAN_WIDTH, WIDTH_SPREAD = 560, 0.42  # of the lognormal that AI2D's widths follow
ASPECTS = (0.75, 1.9)
JPEG_SHARE = 0.1
FAMILIES = ("food_web", "cycle", "bar_chart", "labelled_parts")
CONTINUE, MOST_TURNS = 0.675, 15  # 1 + geometric, mean about 3.07 as in AI2D of the_cauldron
TWO_IMAGES, NO_IMAGE = 0.03, 0.03


def picture_size(random: Random) -> tuple[int, int]:
    """Width and height in pixels, spread as in AI2D."""
    width = round(min(max(MEDIAN_WIDTH * math.exp(random.gauss(0, WIDTH_SPREAD)), WIDTHS[0]), WIDTHS[1]))
    return width, round(width / random.uniform(*ASPECTS))


def _picture(random: Random, family: str) -> tuple[list[Facts], Iterator[Question]]:
    """The facts of a row's pictures, none to two, and all that can be asked about them."""
    sizes = [picture_size(random) for _ in range({"text": 0, "two_charts": 2}.get(family, 1))]
    match family:
        case "food_web":
            facts = [web_facts(random, *sizes[0])]
            questions = web_questions(facts[0], random)
        case "cycle":
            facts = [cycle_facts(random, *sizes[0])]
            questions = cycle_questions(facts[0], random)
        case "labelled_parts":
            facts = [parts_facts(random, *sizes[0])]
            questions = parts_questions(facts[0], random)
        case "bar_chart":
            facts = chart_facts(random, *sizes)
            questions = chart_questions(facts[0], random)
        case "two_charts":
            facts = chart_facts(random, *sizes)
            questions = pair_questions(facts[0], facts[1], random)
        case _:
            facts, questions = [], text_questions(random)
    drawn = "bar_chart" if family == "two_charts" else family
    sized = [{"family": drawn, "width": w, "height": h, **fact} for (w, h), fact in zip(sizes, facts, strict=True)]
    return sized, questions


def make_row(index: int, seed: int) -> dict[str, Any]:
    """One row of the set, all but its pixels.

    Returns:
        `id`, `images`, `texts` and `source` as every reader of our row form knows them, and `facts`: those of the
        pictures, and for each turn what it asks.
    """
    # A text seeds alike on every machine: Python hashes it with SHA-512.
    random = Random(f"mmdp demo {VERSION}, seed {seed}, row {index}")  # noqa: S311  no secret hangs on it
    kind = random.random()
    family = random.choice(FAMILIES)
    if kind < NO_IMAGE + TWO_IMAGES:
        family = "text" if kind < NO_IMAGE else "two_charts"
    pictures, questions = _picture(random, family)
    turns = 1
    while turns < MOST_TURNS and random.random() < CONTINUE:
        turns += 1
    chosen = by_turns(questions, random)[:turns]
    assert len(chosen) == turns, f"{family} {pictures} yields {len(chosen)} questions, wanted {turns}"
    instruction = random.choice(INSTRUCTIONS)
    names = []
    for number in range(len(pictures)):
        suffix = "jpg" if random.random() < JPEG_SHARE else "png"
        names.append(f"images/{index:05}-{number}.{suffix}")
    return {
        "id": f"demo-{seed}-{index}",
        "images": names,
        "texts": [_turn(question, instruction, random) for question in chosen],
        "source": family,
        "facts": {"pictures": pictures, "asks": [list(question.ask) for question in chosen]},
    }


def _turn(question: Question, instruction: str, random: Random) -> dict[str, str]:
    options = random.sample(question.wrong, min(3, len(question.wrong)))
    place = random.randrange(len(options) + 1)
    options.insert(place, random.choice(question.right))
    choices = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=False))
    user = f"Question: {question.wording}\nChoices:\n{choices}\n{instruction}"
    return {"user": user, "assistant": f"Answer: {'ABCD'[place]}"}
