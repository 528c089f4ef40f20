"""All that can be asked about one bar chart, and about two side by side.

Adds: `chart_questions`, `pair_questions`; facts in, questions out.
Leaves out: other pictures (`diagram_questions`); which questions a row gets (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from random import Random

from mmdp.demo.chart_drawing import axis_ticks
from mmdp.demo.questions import by_turns, numbers_near, yes_or_no
from mmdp.demo.records import Facts, Question


def chart_questions(facts: Facts, random: Random) -> Iterator[Question]:
    """Questions about the bars of one chart."""
    say, unit = random.choice, facts["unit"]
    value: dict[str, int] = dict(facts["bars"])
    names = list(value)
    ranked = sorted(names, key=lambda name: -value[name])
    step = max(1, max(value.values()) // 20)
    for wording, kind, place in (
        (say(("Which bar is the longest?", "Where is the value highest?")), "most", 0),
        (say(("Which bar is the shortest?", "Where is the value lowest?")), "least", -1),
        ("Which one has the second largest value?", "second", 1),
    ):
        yield Question((kind,), wording, [ranked[place]], [n for n in names if n != ranked[place]])
    for x in names:
        others = [f"{value[n]} {unit}" for n in names if n != x]
        wording = say(
            (
                f"What is the value of {x}?",
                f"How much does the chart show for {x}?",
                f"Read the bar of {x}. Which figure belongs to it?",
            )
        )
        yield Question(("value", x), wording, [f"{value[x]} {unit}"], others)
        wording = say(
            (f"To which bar does the value {value[x]} belong?", f"Which one reaches exactly {value[x]} {unit}?")
        )
        yield Question(("holder", value[x]), wording, [x], [n for n in names if n != x])
        for y in names:
            if x == y:
                continue
            yield Question(
                ("longer", x, y), f"Is the bar of {x} longer than the bar of {y}?", *yes_or_no(value[x] > value[y])
            )
            if value[x] > value[y]:
                gap, both = value[x] - value[y], value[x] + value[y]
                wording = say((f"By how much does {x} exceed {y}?", f"What is the difference between {x} and {y}?"))
                yield Question(
                    ("gap", x, y), wording, [f"{gap} {unit}"], [f"{n} {unit}" for n in numbers_near(gap, step)]
                )
                wording = f"How much do {x} and {y} make together?"
                yield Question(
                    ("both", x, y), wording, [f"{both} {unit}"], [f"{n} {unit}" for n in numbers_near(both, step)]
                )
    for limit in axis_ticks(max(value.values()))[1:-1]:
        above, below = [n for n in names if value[n] > limit], [n for n in names if value[n] <= limit]
        yield Question(
            ("num_above", limit),
            f"How many bars rise above {limit} {unit}?",
            [f"{len(above)}"],
            numbers_near(len(above)),
        )
        if above and below:
            yield Question(("above", limit), f"Which of these has a value of more than {limit} {unit}?", above, below)
            yield Question(("up_to", limit), f"Which of these stays at or below {limit} {unit}?", below, above)
    for _ in range(4):
        three = random.sample(names, 3)
        falling = sorted(three, key=lambda name: -value[name])
        wrong = [", ".join(order) for order in permutations(three) if list(order) != falling]
        wording = (
            f"Sort {three[0]}, {three[1]} and {three[2]} from the longest bar to the shortest. Which list is right?"
        )
        yield Question(("order", *three), wording, [", ".join(falling)], wrong)
    total, span = sum(value.values()), value[ranked[0]] - value[ranked[-1]]
    yield Question(
        ("total",),
        "What do all bars add up to?",
        [f"{total} {unit}"],
        [f"{n} {unit}" for n in numbers_near(total, step)],
    )
    wording = "How far apart are the largest and the smallest value?"
    yield Question(("span",), wording, [f"{span} {unit}"], [f"{n} {unit}" for n in numbers_near(span, step)])
    yield Question(("num_bars",), "How many bars does the chart have?", [f"{len(names)}"], numbers_near(len(names)))


def pair_questions(first: Facts, second: Facts, random: Random) -> Iterator[Question]:
    """Questions about two charts of the same things, and some about each of them."""
    one, two = dict(first["bars"]), dict(second["bars"])
    unit, pictures = first["unit"], ["the first picture", "the second picture"]
    step = max(1, max(*one.values(), *two.values()) // 20)
    for x in one:
        if one[x] != two[x]:
            ranked = pictures if one[x] > two[x] else pictures[::-1]
            yield Question(("larger_in", x), f"In which picture is the value of {x} larger?", ranked[:1], ranked[1:])
        gap, both = abs(one[x] - two[x]), one[x] + two[x]
        wording = f"How far apart are the two values of {x}?"
        yield Question(("gap_of", x), wording, [f"{gap} {unit}"], [f"{n} {unit}" for n in numbers_near(gap, step)])
        wording = f"What do both pictures together show for {x}?"
        yield Question(("both_of", x), wording, [f"{both} {unit}"], [f"{n} {unit}" for n in numbers_near(both, step)])
    if sum(one.values()) != sum(two.values()):
        ranked = pictures if sum(one.values()) > sum(two.values()) else pictures[::-1]
        yield Question(("larger_total",), "In which picture do the bars add up to more?", ranked[:1], ranked[1:])
    same = max(one, key=lambda n: one[n]) == max(two, key=lambda n: two[n])
    yield Question(("same_most",), "Is the longest bar the same one in both pictures?", *yes_or_no(same))
    for which, facts in zip(("first", "second"), (first, second), strict=True):
        for question in by_turns(chart_questions(facts, random), random)[:6]:
            wording = f"Look at the {which} picture. {question.wording}"
            yield Question((which, *question.ask), wording, question.right, question.wrong)
