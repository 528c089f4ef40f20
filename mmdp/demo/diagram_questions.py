"""All that can be asked about a food web, a cycle or a drawing with marked parts.

Adds: `web_questions`, `cycle_questions`, `parts_questions`; facts in, questions out.
Leaves out: charts (`chart_questions`); which questions a row gets (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from mmdp.demo.questions import numbers_near, yes_or_no
from mmdp.demo.records import Facts, Question
from mmdp.demo.shapes import OBJECTS
from mmdp.demo.words import CYCLES, LETTERS, split


def web_questions(facts: Facts, random: Random) -> Iterator[Question]:
    """Questions about who eats whom."""
    say = random.choice
    living = [name for level in facts["levels"] for name in level]
    foods = {x: [food for eater, food in facts["eats"] if eater == x] for x in living}
    eaters = {x: [eater for eater, food in facts["eats"] if food == x] for x in living}
    for x in living:
        spare = [n for n in living if n != x]
        if eaters[x]:
            who = (
                f"Which of these eats the {x}?",
                f"Who feeds on the {x} in the diagram?",
                f"Where does energy from the {x} go next?",
            )
            yield Question(("eaters", x), say(who), eaters[x], [n for n in spare if n not in eaters[x]])
            whom = (f"Which of these does not eat the {x}?", f"The {x} has nothing to fear from which of these?")
            yield Question(("strangers", x), say(whom), [n for n in spare if n not in eaters[x]], eaters[x])
        if foods[x]:
            what = (
                f"What does the {x} eat?",
                f"Which of these is food for the {x}?",
                f"From which of these does an arrow lead to the {x}?",
            )
            yield Question(("foods", x), say(what), foods[x], [n for n in spare if n not in foods[x]])
            wording = f"On how many kinds of food does the {x} live, according to the arrows?"
            yield Question(("num_foods", x), wording, [f"{len(foods[x])}"], numbers_near(len(foods[x])))
            rivals = [n for n in spare if set(foods[n]) & set(foods[x])]
            if rivals:
                wording = f"Which of these competes with the {x} because both eat the same thing?"
                yield Question(("rivals", x), wording, rivals, [n for n in spare if n not in rivals])
        starving = [n for n in eaters[x] if foods[n] == [x]]
        if starving:
            wording = f"Suppose a disease kills every {x}. Which living thing would lose its only food in this web?"
            yield Question(("starving", x), wording, starving, [n for n in spare if n not in starving])
        wording = f"How many living things in the picture feed directly on the {x}?"
        yield Question(("num_eaters", x), wording, [f"{len(eaters[x])}"], numbers_near(len(eaters[x])))
        for y in spare:
            wording = say((f"Does the {x} eat the {y}?", f"Does an arrow run from the {y} to the {x}?"))
            yield Question(("eats", x, y), wording, *yes_or_no(y in foods[x]))
    makers = [x for x in living if not foods[x]]
    tops = [x for x in living if not eaters[x]]
    yield Question(
        ("producers",), "Which of these makes its own food from light?", makers, [x for x in living if foods[x]]
    )
    yield Question(("tops",), "Which of these is eaten by nobody here?", tops, [x for x in living if eaters[x]])
    yield Question(
        ("num_arrows",),
        "How many arrows does the diagram have?",
        [f"{len(facts['eats'])}"],
        numbers_near(len(facts["eats"])),
    )
    yield Question(("num_living",), "How many living things are shown?", [f"{len(living)}"], numbers_near(len(living)))
    wording = "How many producers stand at the beginning of this food web?"
    yield Question(("num_producers",), wording, [f"{len(makers)}"], numbers_near(len(makers)))
    chains = [(a, b, c) for a in living for b in eaters[a] for c in eaters[b]]
    for start in sorted({chain[0] for chain in chains}):
        right = [", ".join(chain) for chain in chains if chain[0] == start]
        tries = [tuple(random.sample(living, 3)) for _ in range(9)] + [chain[::-1] for chain in chains[:3]]
        wrong = sorted({", ".join(three) for three in tries if three not in chains})
        yield Question(("chains", start), f"Which food chain can be read from the arrows, {start} first?", right, wrong)


def cycle_questions(facts: Facts, random: Random) -> Iterator[Question]:
    """Questions about the stages and their order."""
    say = random.choice
    stages = facts["stages"]
    count = len(stages)
    for k, x in enumerate(stages):
        spare = [n for n in stages if n != x]
        after, before = stages[(k + 1) % count], stages[k - 1]
        wording = say(
            (
                f"Which stage comes right after '{x}'?",
                f"What does '{x}' turn into next?",
                f"Where does the arrow from '{x}' lead?",
            )
        )
        yield Question(("after", x), wording, [after], [n for n in spare if n != after])
        wording = say((f"Which stage comes just before '{x}'?", f"What leads directly to '{x}'?"))
        yield Question(("before", x), wording, [before], [n for n in spare if n != before])
        wording = say((f"Which stage carries the number {k + 1}?", f"What stands at place {k + 1} of the cycle?"))
        yield Question(("at", k + 1), wording, [x], spare)
        wording = say((f"Which number does the stage '{x}' carry?", f"At which place of the cycle is '{x}'?"))
        yield Question(("number", x), wording, [f"{k + 1}"], [f"{n + 1}" for n in range(count) if n != k])
        for jump in range(2, count):
            y = stages[(k + jump) % count]
            wording = f"Start at '{x}' and follow {jump} arrows. Which stage do you reach?"
            yield Question(("follow", x, jump), wording, [y], [n for n in stages if n != y])
            wording = f"How many arrows lie on the way from '{x}' to '{y}'?"
            yield Question(("arrows", x, y), wording, [f"{jump}"], [f"{n}" for n in range(1, count + 2) if n != jump])
        for y in spare:
            yield Question(("follows", y, x), f"Does '{y}' follow directly on '{x}'?", *yes_or_no(y == after))
        three = [stages[(k + step) % count] for step in range(3)]
        order = [[three[i] for i in places] for places in ((0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))]
        good = [[stages[(j + step) % count] for step in range(3)] for j in range(count)]
        wording = f"Which three stages follow one another in this order, '{three[1]}' among them?"
        yield Question(
            ("order", three[1]), wording, [", then ".join(three)], [", then ".join(o) for o in order if o not in good]
        )
    yield Question(("num_stages",), "How many stages does the cycle have?", [f"{count}"], numbers_near(count))
    strangers = [n for title, listed in CYCLES.items() for n in split(listed) if n not in stages]
    yield Question(("missing",), "Which of these is not a stage in the picture?", random.sample(strangers, 3), stages)
    turning = ["clockwise", "anticlockwise"] if facts["clockwise"] else ["anticlockwise", "clockwise"]
    yield Question(("turning",), "In which direction do the arrows run?", turning[:1], turning[1:])


def parts_questions(facts: Facts, random: Random) -> Iterator[Question]:
    """Questions about the letters, and the parts they mark."""
    say = random.choice
    labels = facts["labels"]
    names, letters = [label["name"] for label in labels], [label["letter"] for label in labels]
    for k, label in enumerate(labels):
        name, letter, role = label["name"], label["letter"], label["role"]
        other = labels[:k] + labels[k + 1 :]
        wording = say(
            (
                f"Which part is marked {letter}?",
                f"What does the line from {letter} point at?",
                f"Name the part labelled {letter}.",
            )
        )
        yield Question(("part", letter), wording, [name], [o["name"] for o in other])
        wording = say((f"Which letter marks the {name}?", f"Where is the {name} in the drawing?"))
        yield Question(("letter", name), wording, [letter], [o["letter"] for o in other])
        wording = say(
            (f"What is true of the part marked {letter}?", f"Which task has the part with the letter {letter}?")
        )
        yield Question(("role", letter), wording, [f"It {role}."], [f"It {o['role']}." for o in other])
        yield Question(
            ("actor", name), f"Which letter belongs to the part that {role}?", [letter], [o["letter"] for o in other]
        )
        for o in labels:
            yield Question(("marks", o["letter"], name), f"Does {o['letter']} mark the {name}?", *yes_or_no(o is label))
    yield Question(("num_letters",), "How many parts carry a letter?", [f"{len(labels)}"], numbers_near(len(labels)))
    unmarked = [part.name for part in OBJECTS[facts["object"]][2] if part.name not in names]
    if unmarked:
        yield Question(("unmarked",), "Which part of the object has no letter here?", unmarked, names)
    strange = [letter for letter in LETTERS if letter not in letters]
    yield Question(("absent",), "Which of these letters is missing in the drawing?", random.sample(strange, 4), letters)
    for end, word in ((0, "highest"), (-1, "lowest")):
        ordered = sorted(labels, key=lambda label: label["point"][1])
        ordered = ordered if end == 0 else ordered[::-1]
        if abs(ordered[0]["point"][1] - ordered[1]["point"][1]) >= 5:
            wording = f"Which of the marked points lies {word} in the drawing?"
            yield Question((word,), wording, [ordered[0]["name"]], [o["name"] for o in ordered[1:]])
