"""What the pictures of the demo set show, made up at random: as much as fits a picture of the size given.

Adds: `web_facts`, `cycle_facts`, `chart_facts`, `parts_facts`; each takes a random stream and the size in pixels.
Leaves out: how large a picture is (`rows`), drawing it (`drawings`), asking about it (`*_questions`).
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from mmdp.demo.chart_drawing import chart_room
from mmdp.demo.colours import SERIES
from mmdp.demo.cycle_drawing import cycle_fits, cycle_room
from mmdp.demo.parts_drawing import parts_room
from mmdp.demo.records import Facts
from mmdp.demo.shapes import OBJECTS
from mmdp.demo.web_drawing import web_fits, web_room
from mmdp.demo.words import CHARTS, CYCLES, GROUPS, HABITATS, LETTERS, PLACES, split


def web_facts(random: Random, width: int, height: int) -> Facts:
    """Living things in levels, and who eats whom; everything but a producer eats, and nearly everything is eaten."""
    levels, most = web_room(width, height)
    while True:
        habitat, pools = random.choice(list(HABITATS.items()))
        title = f"Food web of {habitat}"
        fitting = [
            [n for n in split(pool) if web_fits(n, width, height, title, levels, most)]
            for pool in split(pools, "|")[:levels]
        ]
        if all(fitting):
            break
    chosen = [random.sample(names, min(len(names), random.randint(min(2, most), most))) for names in fitting]
    eats = []
    for lower, upper in pairwise(chosen):
        pairs = [
            (eater, food)
            for eater in upper
            for food in random.sample(lower, min(len(lower), random.choice((1, 1, 2, 2, 3))))
        ]
        left = [food for food in lower if all(food != eaten for _, eaten in pairs)]
        eats += pairs + [(random.choice(upper), food) for food in left]
    return {"title": title, "levels": chosen, "eats": [list(pair) for pair in eats]}


def cycle_facts(random: Random, width: int, height: int) -> Facts:
    """Stages in order, the first of them anywhere in the cycle, and the direction of the arrows."""
    most = cycle_room(width, height)
    while True:
        title, listed = random.choice(list(CYCLES.items()))
        stages = split(listed)
        if len(stages) <= most and cycle_fits(width, height, title, stages):
            break
    first = random.randrange(len(stages))
    return {
        "title": title,
        "stages": stages[first:] + stages[:first],
        "clockwise": random.random() < 0.7,
        "colour": random.choice(SERIES),
    }


def chart_facts(random: Random, *sizes: tuple[int, int]) -> list[Facts]:
    """One chart a size: the same things in each, other values and another place."""
    title, unit, group, span = random.choice(CHARTS.strip().splitlines()).split("|")
    least, most = (int(end) for end in span.split())
    names = split(GROUPS[group])
    count = random.randint(3, min(len(names), *(chart_room(*size) for size in sizes)))
    if group in ("months", "weekdays"):
        first = random.randrange(len(names) - count + 1)
        names = names[first : first + count]
    else:
        names = random.sample(names, count)
    colours = random.choice(([random.choice(SERIES)], list(SERIES)))
    return [
        {
            "title": title.format(place=place),
            "unit": unit,
            "bars": [list(bar) for bar in zip(names, random.sample(range(least, most + 1), count), strict=True)],
            "want_upright": random.random() < 0.6,
            "colours": colours,
        }
        for place in random.sample(PLACES, len(sizes))
    ]


def parts_facts(random: Random, width: int, height: int) -> Facts:
    """An object, and a letter for each of some of its parts."""
    key, (title, _, parts) = random.choice(list(OBJECTS.items()))
    most = min(len(parts), parts_room(width, height))
    chosen = random.sample(parts, random.randint(4, most))
    letters = random.sample(LETTERS, len(chosen))
    labels = [{"letter": letter, **part._asdict()} for letter, part in zip(letters, chosen, strict=True)]
    return {"title": f"Parts of {title}", "object": key, "labels": labels}
