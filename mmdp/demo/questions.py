"""What the questions of all families share: near misses for wrong choices, and an order in which kinds take turns.

Adds: `numbers_near`, `yes_or_no`, `by_turns`.
Leaves out: the questions themselves (`diagram_questions`, `chart_questions`, `text_questions`), and drawing the choices
of a turn (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from mmdp.demo.records import Question


def numbers_near(value: int, step: int = 1) -> list[str]:
    """Numbers near a value, none of them negative."""
    return [f"{value + step * off}" for off in (-3, -2, -1, 1, 2, 3, 4) if value + step * off >= 0]


def yes_or_no(true: bool) -> tuple[list[str], list[str]]:
    """The right and the wrong choices of a question that is answered so."""
    return (["yes"], ["no"]) if true else (["no"], ["yes"])


def by_turns(questions: Iterable[Question], random: Random) -> list[Question]:
    """The questions in random order, no wording twice, kinds taking turns: none crowds the others out."""
    kinds: dict[Any, dict[str, Question]] = {}
    for question in questions:
        if question.right and question.wrong:
            kinds.setdefault(question.ask[0], {})[question.wording] = question
    ordered: list[tuple[int, float, Question]] = []
    for group in kinds.values():
        ordered += [(n, random.random(), q) for n, q in enumerate(random.sample(list(group.values()), len(group)))]
    return [question for _, _, question in sorted(ordered, key=lambda entry: entry[:2])]
