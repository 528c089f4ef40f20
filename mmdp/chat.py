"""A conversation as token ids, and labels that fall on the answers alone.

Adds: `Chat`, which turns the turns of a sample and the marks of its images into ids and labels.
Leaves out: the tokenizer (`tokenizer.py`), what an image costs (`vision.py`), and reading samples (`sources.py`).
Nothing is cut here: how long a sample may be is the planner's business.

- Marks come from the template (`template.py`) and from images only. Text is encoded with the special tokens switched
  off, so that what a person spells never becomes a turn or an image.
- An answer is encoded apart from its header, because a model starts to write after the header's last token. The end
  mark is learnt with it, also where it is the pad token.
- A template that is no ChatML and has `{% generation %}` marks decides by its own marks; there, text that spells a
  special token is refused, since the template gives no way to write it as plain text.

The two rules agree wherever no token straddles header and answer. `{% generation %}` is transformers' own extension:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdp.records import IGNORE, Turn
from mmdp.refusals import DataError, Reason, counted, shorten
from mmdp.template import CHATML, PROBE, ImageSlot, Marks, Piece, Slot, Template, Text
from mmdp.tokenizer import plain_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SHORT = 24
"""Characters; headers and answers of a word or two come again and again, so their ids are kept."""


class Chat:
    """Turns of a sample to ids and labels, for one tokenizer.

    Args:
        tokenizer: a fast tokenizer, with a chat template unless one is given.
        placeholder: what the template writes for an image part, such as `<image>`.
        marks: the special tokens that images write; none may come from text.
        chat_template: used instead of the tokenizer's own; `chatml` is short for `template.CHATML`.

    Attributes:
        rule: "frame" or "generation": who says what is learnt.

    Raises:
        ValueError: no template, one that does not tell what is learnt, or a mark that the tokenizer lacks.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        placeholder: str = "",
        marks: Sequence[str] = (),
        chat_template: str | None = None,
    ) -> None:
        text = CHATML if chat_template == "chatml" else chat_template or tokenizer.chat_template
        if not isinstance(text, str):
            raise ValueError(
                "the tokenizer has no single chat template: give one, as `--chat-template chatml` or as Jinja text"
            )
        added = tokenizer.added_tokens_decoder
        id_of = {str(token): number for number, token in added.items()}
        needed = (*marks, *(("<|im_start|>", "<|im_end|>") if text == CHATML else ()))
        if missing := [mark for mark in needed if mark not in id_of]:
            raise ValueError(
                f"the tokenizer lacks the special tokens {', '.join(missing)}: add them with "
                "`tokenizer.add_special_tokens`, or use the model's own tokenizer"
            )
        self.tokenizer = tokenizer
        self.marks = tuple(marks)
        self.template = Template(tokenizer, text, placeholder)
        control = {number for number, token in added.items() if token.special} | {id_of[mark] for mark in marks}
        self._control = frozenset(control - {tokenizer.unk_token_id})
        self._plain, self._inside = plain_tokenizers(tokenizer)
        self._image_pieces = lru_cache(maxsize=512)(self._split_image)
        self._encode_short = lru_cache(maxsize=1 << 16)(self._encode)
        self.rule = self._choose_rule()

    def __reduce__(self) -> tuple[Any, ...]:
        # Caches do not travel; a worker fills its own.
        return _rebuild_chat, (self.tokenizer, self.template.placeholder, self.marks, self.template.text)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all that decides ids and labels: vocabulary, template, marks."""
        digest = blake2b(digest_size=16)
        for text in (self._plain.to_str(), self.template.text, self.template.placeholder, *self.marks):
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()

    def encode(self, turns: Sequence[Turn], images: Sequence[str] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of a conversation.

        Args:
            turns: with the places of the images among their parts.
            images: for each image the text of its marks, as its vision family writes them.

        Returns:
            ids (T,) int32 and labels (T,) int32, unshifted: the id where a token is learnt, else -100. The first label
            is -100, since nothing predicts it.

        Raises:
            DataError: TEMPLATE, CONTROL_TEXT, INVALID_TEXT, or NO_ANSWER.
        """
        encode = self._encode_by_frame if self.rule == "frame" else self._encode_by_generation
        turns = [turn if turn.parts else Turn(turn.role, ("",)) for turn in turns]
        ids, labels = encode(turns, images)
        if not all(turn.learnt for turn in turns):
            _leave_unlearnt(labels, turns)
        if all(label == IGNORE for label in labels[1:]):
            raise DataError(
                Reason.NO_ANSWER,
                "no token to learn from: check the answers, their weights, and that the template shows assistant turns",
            )
        labels[0] = IGNORE
        return np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)

    def _choose_rule(self) -> str:
        if self.template.is_chatml():
            return "frame"
        ends = self.template.ends_answers()
        if self.template.marked and any(label != IGNORE for label in self._encode_by_generation(PROBE, ())[1]):
            # Marks that leave the end mark out would make a model that never stops, and images are put where the
            # template puts them by its frame alone. Else the marks are its author's word.
            misses = not self._learns_ends() or (self.template.takes_parts and bool(self.template.placeholder))
            return "frame" if ends and misses else "generation"
        if not self.template.marked and ends:
            return "frame"
        raise ValueError(
            "the chat template does not tell what is learnt: put {% generation %} and {% endgeneration %} around the "
            "assistant's text and its end mark, or give another one (`--chat-template chatml`)"
        )

    def _learns_ends(self) -> bool:
        """Whether the template's own marks take in the special token behind each answer."""
        ids, labels = self._encode_by_generation(PROBE, ())
        behind = [place for place in range(1, len(ids)) if labels[place - 1] != IGNORE == labels[place]]
        return not any(ids[place] in self._control and ids[place - 1] not in self._control for place in behind)

    def _split_image(self, text: str) -> list[Piece]:
        """What an image writes."""
        pieces = self.template.split(text)
        return [replace(piece, is_ours=True) if isinstance(piece, Text) else piece for piece in pieces]

    def _encode_by_frame(self, turns: Sequence[Turn], images: Sequence[str]) -> tuple[list[int], list[int]]:
        if self.template.takes_parts:
            texts: list[list[Piece]] = [[Text(part)] for turn in turns for part in turn.parts if isinstance(part, str)]
        else:
            texts = [list(self._turn_pieces(turn, images)) for turn in turns]
        pattern = self.template.pattern(turns)
        if self.template.may_rewrite:
            plain = ["".join(piece.text for piece in text if isinstance(piece, Text)) for text in texts]
            self.template.check_verbatim(pattern, plain)
        next_image = iter(images)
        pieces: list[Piece] = []
        for piece in self.template.frame(pattern):
            if isinstance(piece, Slot):
                pieces += _fill(piece, texts[piece.number])
            elif isinstance(piece, ImageSlot):
                pieces += self._image_pieces(next(next_image))
            else:
                pieces.append(piece)
        return self._assemble(pieces)

    def _turn_pieces(self, turn: Turn, images: Sequence[str]) -> Iterable[Piece]:
        for part in turn.parts:
            if isinstance(part, str):
                yield Text(part)
            else:
                yield from self._image_pieces(images[part])

    def _assemble(self, pieces: Iterable[Piece]) -> tuple[list[int], list[int]]:
        """Neighbouring texts that are both learnt, or both not, are encoded as one."""
        ids: list[int] = []
        labels: list[int] = []
        text, learnt, after_text = "", False, False

        def flush() -> None:
            nonlocal text
            if text:
                encode = self._encode_short if len(text) <= _SHORT else self._encode
                tokens = encode(text, inside=after_text)
                ids.extend(tokens)
                labels.extend(tokens if learnt else [IGNORE] * len(tokens))
                text = ""

        for piece in pieces:
            if isinstance(piece, Text):
                if text and piece.learnt != learnt:
                    flush()
                    after_text = True
                learnt = piece.learnt
                text += piece.text
            elif isinstance(piece, Marks):
                flush()
                after_text = False
                ids.extend(piece.ids)
                labels.extend(piece.ids if piece.learnt else [IGNORE] * len(piece.ids))
        flush()
        return ids, labels

    def _encode(self, text: str, *, inside: bool) -> list[int]:
        tokenizer = self._inside if inside else self._plain
        try:
            # A batch of one: `encode` would hold the interpreter's lock all the while, and find offsets as well.
            tokens: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeError, TypeError) as error:
            raise DataError(
                Reason.INVALID_TEXT, f"the text {shorten(text)} can't be encoded as UTF-8: mend or drop the row"
            ) from error
        if not self._control.isdisjoint(tokens):
            raise DataError(
                Reason.CONTROL_TEXT,
                f"the text {shorten(text)} holds a control token that this tokenizer can't write as plain text",
            )
        return tokens

    def _encode_by_generation(self, turns: Sequence[Turn], images: Sequence[str]) -> tuple[list[int], list[int]]:
        messages: list[dict[str, Any]] = []
        for turn in turns:
            if found := self.template.mark.search(turn.text):
                raise DataError(
                    Reason.CONTROL_TEXT,
                    f"the text {shorten(turn.text)} spells the special token {found[0]}, which this chat template "
                    "can't write as plain text: mend the row, or use a ChatML template",
                )
            text = "".join(part if isinstance(part, str) else images[part] for part in turn.parts)
            parts = self.template.takes_parts
            messages.append({"role": turn.role, "content": [{"type": "text", "text": text}] if parts else text})
        self.template.render(messages)  # a refusal of the roles gets its reason here
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template.text,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except (UnicodeError, TypeError) as error:
            raise DataError(Reason.INVALID_TEXT, f"a text can't be encoded: {shorten(str(error))}") from error
        ids = list(encoded["input_ids"])
        return ids, [token if on else IGNORE for token, on in zip(ids, encoded["assistant_masks"], strict=True)]


def _leave_unlearnt(labels: list[int], turns: Sequence[Turn]) -> None:
    """Takes the labels of answers that are not learnt.

    Raises:
        DataError: TEMPLATE, where labels do not come in one piece for each answer.
    """
    answers = [turn.learnt for turn in turns if turn.role == "assistant"]
    before = [IGNORE, *labels[:-1]]
    starts = [place for place, label in enumerate(labels) if label != IGNORE == before[place]]
    if len(starts) != len(answers):
        raise DataError(
            Reason.TEMPLATE,
            f"an answer of this row is not to be learnt, and with this chat template {counted(len(answers), 'answer')} "
            f"are learnt in {counted(len(starts), 'piece')}: remove that turn's weight, or the row",
        )
    for start, end, is_learnt in zip(starts, [*starts[1:], len(labels)], answers, strict=True):
        if not is_learnt:
            labels[start:end] = [IGNORE] * (end - start)


def _fill(slot: Slot, pieces: list[Piece]) -> list[Piece]:
    """The pieces of a text, stripped as the template strips it, learnt if the slot is."""
    filled: list[Piece] = []
    for number, piece in enumerate(pieces):
        if isinstance(piece, Text):
            text = piece.text
            text = text.lstrip() if slot.strip_left and number == 0 and not piece.is_ours else text
            text = text.rstrip() if slot.strip_right and number == len(pieces) - 1 and not piece.is_ours else text
            filled.append(Text(text, slot.learnt))
        else:
            filled.append(piece)
    return filled


def _rebuild_chat(tokenizer: PreTrainedTokenizerFast, placeholder: str, marks: Sequence[str], text: str) -> Chat:
    return Chat(tokenizer, placeholder=placeholder, marks=marks, chat_template=text)
