"""Questions without a picture: small sums, the calendar, the alphabet, and words.

Adds: `text_questions`. Leaves out: all that is asked about a picture (`diagram_questions`, `chart_questions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from mmdp.demo.questions import numbers_near
from mmdp.demo.records import Question
from mmdp.demo.words import GROUPS, split


def text_questions(random: Random) -> Iterator[Question]:
    """Questions that need no picture, each with its numbers or words drawn at random."""
    words = sorted(
        {
            word
            for group in ("fruits", "tools", "clothes", "birds", "sports")
            for word in split(GROUPS[group])
            if " " not in word
        }
    )
    alphabet, days, months = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", split(GROUPS["weekdays"]), split(GROUPS["months"])
    for _ in range(2):
        a, b, c, d = random.randint(12, 98), random.randint(2, 9), random.randrange(25), random.randint(2, 6)
        for kind, wording, value in (
            ("sum", f"What is {a} plus {b * 7}?", a + b * 7),
            ("difference", f"What is {a + b * 5} minus {b * 5}?", a),
            ("product", f"What is {a} times {b}?", a * b),
            ("half", f"What is half of {2 * a}?", a),
            ("minutes", f"How many minutes are {b} hours?", b * 60),
            ("centimetres", f"How many centimetres are {a} metres?", a * 100),
        ):
            numbers = [int(word) for word in wording.replace("?", "").split() if word.isdigit()]
            yield Question(
                (kind, *numbers),
                wording,
                [f"{value}"],
                numbers_near(value, 100 if kind == "centimetres" else random.choice((1, 10))),
            )
        wording = f"Which letter follows {alphabet[c]} in the alphabet?"
        yield Question(
            ("next_letter", alphabet[c]), wording, [alphabet[c + 1]], [x for x in alphabet if x != alphabet[c + 1]]
        )
        day, month = random.randrange(7), random.randrange(12)
        due = days[(day + d) % 7]
        wording = f"Today is {days[day]}. Which day of the week is it in {d} days?"
        yield Question(("weekday", days[day], d), wording, [due], [x for x in days if x != due])
        due = months[(month + d) % 12]
        wording = f"A letter sent in {months[month]} arrives {d} months later. In which month?"
        yield Question(("month", months[month], d), wording, [due], [x for x in months if x != due])
        four = random.sample(words, 4)
        yield Question(
            ("dictionary", *four),
            f"Which word stands first in a dictionary: {', '.join(four)}?",
            [min(four)],
            sorted(four)[1:],
        )
        word = random.choice(words)
        yield Question(
            ("letters", word), f"How many letters has the word '{word}'?", [f"{len(word)}"], numbers_near(len(word))
        )
        wording = f"Which word is '{word}' read from the back?"
        shuffled = {"".join(random.sample(word, len(word))) for _ in range(9)} - {word[::-1]}
        yield Question(("backwards", word), wording, [word[::-1]], sorted(shuffled))
    for shape, sides in (("triangle", 3), ("square", 4), ("pentagon", 5), ("hexagon", 6), ("octagon", 8)):
        yield Question(
            ("sides", shape),
            f"How many sides has a {shape}?".replace("a octagon", "an octagon"),
            [f"{sides}"],
            numbers_near(sides),
        )
