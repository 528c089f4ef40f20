"""What passes between the files of the demo set: the facts of a picture, and a question about them.

Adds: `Facts`, `Question`. Leaves out: making them (`facts`, `*_questions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Facts = dict[str, Any]
"""What a picture shows: `family`, `width`, `height`, `title`, and what the family needs. Ends up in the JSONL file."""


class Question(NamedTuple):
    """A question about facts, before its choices are drawn.

    Attributes:
        ask: what is asked, and of what: all that a checker needs to find the answer in the facts again.
        wording: the question as read.
        right: choices any of which is right.
        wrong: choices none of which is right.
    """

    ask: tuple[Any, ...]
    wording: str
    right: Sequence[str]
    wrong: Sequence[str]
