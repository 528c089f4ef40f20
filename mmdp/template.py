r"""A chat template taken apart: the marks and headers it writes, and the slots where texts go.

Adds: `Template`, which renders a chat template once for each pattern of roles, with a slot in place of each text, and
gives back the pieces: marks, plain text, slots. What stands between the slots is the frame; a conversation is its frame
with its texts put in:

    <|im_start|> user\n [slot 0] <|im_end|> \n <|im_start|> assistant\n [slot 1, learnt] <|im_end|, learnt> \n

All that a model must write is learnt: from the end of the generation prompt to the end mark, that mark included.
Leaves out: encoding the texts (`chat.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from mmdp.records import Turn
from mmdp.refusals import DataError, Reason, counted, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Plain ChatML without a default system turn: the way out for a tokenizer that has no template."""

PROBE = tuple(Turn(role, ("text",)) for role in ("user", "assistant", "user", "assistant"))
"""The conversation from which a template's habits are read."""

_PAD = "\t \t"  # white space around a slot shows whether the template strips what it is given
_SLOT = re.compile(rf"(?P<left>{_PAD})?mmdp-slot-(?P<number>\d+)-(?P<right>{_PAD})?")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_REWRITES = re.compile(r"\.r?(split|partition|replace)\(|\|\s*(replace|upper|lower|title|capitalize)\b")

Pattern = tuple[tuple[str, tuple[str, ...]], ...]
"""Roles in order, and for each which of its parts are "text" and "image"."""


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, in which no special token is recognised.

    Attributes:
        text: it.
        learnt: the model is to write it.
        is_ours: an image writes it, not the row: no template strips it.
    """

    text: str
    learnt: bool = False
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Marks:
    """Special tokens, by id."""

    ids: tuple[int, ...]
    learnt: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """Where text `number` of the conversation goes, and whether the template strips its ends."""

    number: int
    strip_left: bool
    strip_right: bool
    learnt: bool


@dataclass(frozen=True, slots=True)
class ImageSlot:
    """Where the template itself puts the next image."""


Piece = Text | Marks | Slot | ImageSlot


class Template:
    """One chat template, and the special tokens it may write.

    Args:
        tokenizer: it renders the template, and its added tokens are the marks.
        text: the template, Jinja.
        placeholder: what the template writes for an image part, such as `<image>`; "" where it takes none.

    Attributes:
        takes_parts: the template wants a turn as a list of parts, not as one string.
        marked: the template has `{% generation %}` marks.
        may_rewrite: the template has the means to change a text, as those that cut a reasoning model's thoughts do.

    Raises:
        ValueError: the template shows no user text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, placeholder: str = "") -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.placeholder = placeholder
        added = tokenizer.added_tokens_decoder
        self._id_of = {str(token): number for number, token in added.items()}
        self._strips = {str(token): (token.lstrip, token.rstrip) for token in added.values()}
        longest_first = sorted(self._id_of, key=len, reverse=True)
        self.mark = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._finds = re.compile(f"{_SLOT.pattern}|(?P<image>{re.escape(placeholder) or '(?!)'})")
        self.frame = lru_cache(maxsize=4096)(self._frame)
        self._with_slots = lru_cache(maxsize=4096)(self._render_slots)
        self.marked = _GENERATION.search(text) is not None
        self.may_rewrite = _REWRITES.search(text) is not None
        self.takes_parts = self._needs_parts()
        self._prompt = self._generation_prompt()

    def pattern(self, turns: Sequence[Turn]) -> Pattern:
        """What `frame` is asked with: a turn is one text, unless the template wants its parts."""
        if not self.takes_parts:
            return tuple((turn.role, ("text",)) for turn in turns)
        kinds = {str: "text", int: "image"}
        return tuple((turn.role, tuple(kinds[type(part)] for part in turn.parts)) for turn in turns)

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """The conversation as the template writes it.

        Raises:
            DataError: TEMPLATE, where the template refuses these roles in this order.
        """
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, chat_template=self.text, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is no valid Jinja, line {error.lineno}: {error.message}") from error
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                Reason.TEMPLATE,
                f"the chat template refuses the roles ({shorten(roles, 120)}): {shorten(str(error), 120)}; "
                "mend the row, or give a template that takes them",
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def split(self, text: str, *, learnt: bool = False) -> list[Piece]:
        """What a template or an image writes, as marks and plain text.

        White space that a mark swallows (the `lstrip` and `rstrip` of its added token) is left out.
        """
        pieces: list[Piece] = []
        run: list[int] = []
        end, swallow = 0, False
        for mark in (*self.mark.finditer(text), None):
            plain = text[end : mark.start() if mark else len(text)]
            plain = plain.lstrip() if swallow else plain
            plain = plain.rstrip() if mark and self._strips[mark[0]][0] else plain
            if plain:
                if run:
                    pieces.append(Marks(tuple(run), learnt))
                    run = []
                pieces.append(Text(plain, learnt))
            if mark:
                run.append(self._id_of[mark[0]])
                end, swallow = mark.end(), self._strips[mark[0]][1]
        if run:
            pieces.append(Marks(tuple(run), learnt))
        return pieces

    def check_verbatim(self, pattern: Pattern, texts: Sequence[str]) -> None:
        """Renders the texts themselves, and compares: a frame holds only where they are shown as they are.

        Raises:
            DataError: TEMPLATE, where the template rewrites a text.
        """

        def shown(slot: re.Match[str]) -> str:
            text = texts[int(slot["number"])]
            text = text.lstrip() if slot["left"] is None else text
            return text.rstrip() if slot["right"] is None else text

        if self.render(self._messages(pattern, texts=texts)) != _SLOT.sub(shown, self._with_slots(pattern)):
            raise DataError(
                Reason.TEMPLATE,
                "the chat template rewrites a text of this row instead of showing it: mend the row, or give a template "
                "that shows texts as they are",
            )

    def is_chatml(self) -> bool:
        """Whether turns look like ChatML, whatever stands before the first one."""
        chatml = "".join(
            f"<|im_start|>{turn.role}\n{_slot(number)}<|im_end|>\n" for number, turn in enumerate(PROBE)
        ).rstrip()
        known = {"<|im_start|>", "<|im_end|>"} <= self._id_of.keys()
        return known and self.render(self._messages(self.pattern(PROBE))).rstrip().endswith(chatml)

    def ends_answers(self) -> bool:
        """Whether a special token follows each answer, so that a model can learn to stop."""
        pieces = self.frame(self.pattern(PROBE))
        ends = [
            isinstance(after, Text | Marks) and after.learnt
            for piece, after in pairwise(pieces)
            if isinstance(piece, Slot) and piece.learnt
        ]
        return ends == [True, True]

    def _render_slots(self, pattern: Pattern) -> str:
        return self.render(self._messages(pattern))

    def _messages(
        self, pattern: Pattern, *, parts: bool | None = None, texts: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        parts = self.takes_parts if parts is None else parts
        messages: list[dict[str, Any]] = []
        number = 0
        for role, kinds in pattern:
            content: list[dict[str, str]] = []
            for kind in kinds:
                if kind == "text":
                    content.append({"type": "text", "text": _slot(number) if texts is None else texts[number]})
                    number += 1
                else:
                    content.append({"type": "image"})
            messages.append({"role": role, "content": content if parts else content[0]["text"]})
        return messages

    def _frame(self, pattern: Pattern) -> tuple[Piece, ...]:
        """The pieces of a conversation with these roles.

        Raises:
            DataError: TEMPLATE, where the template refuses the roles, or does not show each text and image once.
        """
        rendered = self._with_slots(pattern)
        roles = [(role, number) for number, (role, kinds) in enumerate(pattern) for kind in kinds if kind == "text"]
        is_answer_end = [
            role == "assistant" and (number + 1 == len(roles) or roles[number + 1][1] != turn)
            for number, (role, turn) in enumerate(roles)
        ]
        num_images = sum(kind == "image" for _, kinds in pattern for kind in kinds)
        pieces: list[Piece] = []
        order: list[int] = []
        images, end, in_answer = 0, 0, False
        for found in self._finds.finditer(rendered):
            if found["image"] is not None and not num_images:
                continue  # spelled by the template itself, as in a default system turn
            literal, end = rendered[end : found.start()], found.end()
            if in_answer:
                literal = self._end_mark(pieces, literal)
            if found["image"] is not None:
                pieces += [*self.split(literal), ImageSlot()]
                images += 1
                in_answer = False
                continue
            number = int(found["number"])
            learnt = roles[number][0] == "assistant"
            pieces += self._header(literal) if learnt else self.split(literal)
            pieces.append(Slot(number, found["left"] is None, found["right"] is None, learnt))
            order.append(number)
            in_answer = is_answer_end[number]
        literal = rendered[end:]
        pieces += self.split(self._end_mark(pieces, literal) if in_answer else literal)
        if order != list(range(len(roles))) or images != num_images:
            raise DataError(
                Reason.TEMPLATE,
                f"the chat template shows texts {order} of {len(roles)} and {images} of {counted(num_images, 'image')} "
                f"for the roles ({', '.join(role for role, _ in pattern)}): mend the row, or give a template that "
                "shows each",
            )
        return tuple(pieces)

    def _header(self, literal: str) -> list[Piece]:
        """What stands before an answer; all behind the generation prompt is the model's to write, so it is learnt."""
        cut = literal.rfind(self._prompt) + len(self._prompt) if self._prompt in literal else len(literal)
        return [*self.split(literal[:cut]), *self.split(literal[cut:], learnt=True)]

    def _end_mark(self, pieces: list[Piece], literal: str) -> str:
        """Adds the end mark of an answer, learnt, and gives back what follows it."""
        mark = self.mark.match(literal, len(literal) - len(literal.lstrip()))
        if not mark:
            return literal
        pieces += self.split(literal[: mark.end()], learnt=True)
        rest = literal[mark.end() :]
        return rest.lstrip() if self._strips[mark[0]][1] else rest

    def _needs_parts(self) -> bool:
        """Whether a turn is handed over as a list of parts: the template puts images itself, or takes no string."""
        if self.placeholder and self._shows((("user", ("image", "text")),), parts=True) == (1, 1):
            return True
        for parts in (False, True):
            if self._shows((("user", ("text",)),), parts=parts)[0] == 1:
                return parts
        raise ValueError("the chat template shows no user text, neither from a string nor from a list of parts")

    def _shows(self, pattern: Pattern, *, parts: bool) -> tuple[int, int]:
        """How many texts and images of this pattern it writes."""
        try:
            rendered = self.render(self._messages(pattern, parts=parts))
        except (DataError, TypeError):
            return 0, 0  # a template that takes the other form stumbles over this one
        return len(_SLOT.findall(rendered)), rendered.count(self.placeholder) if self.placeholder else 0

    def _generation_prompt(self) -> str:
        messages = self._messages((("user", ("text",)),))
        without, prompted = self.render(messages), self.render(messages, add_generation_prompt=True)
        return prompted[len(without) :] if prompted.startswith(without) else ""


def _slot(number: int) -> str:
    return f"{_PAD}mmdp-slot-{number}-{_PAD}"
