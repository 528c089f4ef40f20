"""Why a sample is refused, and the one error that says so.

Adds: `Reason`, the key under which it is counted; `DataError`, with the sample's place; `shorten`, for messages.
Leaves out: who refuses. Everything below imports this, and it imports nothing of ours.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """Why a sample is refused. The value is the key under which it is counted in every report."""

    # the row
    INVALID_JSON = "invalid_json"  # the line is not one JSON object in UTF-8
    ROW_TOO_LARGE = "row_too_large"  # more bytes than Config.max_row_bytes
    WRONG_FORM = "wrong_form"  # a field is missing, of the wrong type, or two row forms stand in one row
    UNKNOWN_ROLE = "unknown_role"  # a role outside system, user, assistant (and the documented aliases)
    TEMPLATE = "template"  # the chat template refuses these roles in this order
    NO_ANSWER = "no_answer"  # no turns, an empty answer, or nothing to learn from
    IMAGE_PLACES = "image_places"  # images and places for them differ in number
    CONTROL_TEXT = "control_text"  # text spells a control token that this tokenizer can't write as plain text
    INVALID_TEXT = "invalid_text"  # text that can't be encoded, such as a lone surrogate
    KILLED_WORKER = "killed_worker"  # building it ended the process, twice
    # the image
    UNSAFE_PATH = "unsafe_path"  # a name that leaves the data folder, a URL, or not a regular file
    MISSING_IMAGE = "missing_image"  # no such file or object
    EMPTY_IMAGE = "empty_image"  # zero bytes
    NOT_AN_IMAGE = "not_an_image"  # bytes of no known image format, such as a saved error page
    DAMAGED_IMAGE = "damaged_image"  # truncated, or fails while decoding
    IMAGE_TOO_LARGE = "image_too_large"  # more pixels than the encoder's max_pixels
    IMAGE_ASPECT = "image_aspect"  # a side ratio that the vision family can't take
    CHANGED_IMAGE = "changed_image"  # another size than when it was measured
    # the budget
    TOO_LONG = "too_long"  # more tokens than a row holds
    TOO_MANY_IMAGES = "too_many_images"  # more images than a row holds

    @property
    def may_pass(self) -> bool:
        """Whether the row may be good another time: once a file has come, or a limit was raised."""
        return self in _MAY_PASS


_MAY_PASS = frozenset(
    {
        Reason.ROW_TOO_LARGE,
        Reason.UNSAFE_PATH,
        Reason.MISSING_IMAGE,
        Reason.EMPTY_IMAGE,
        Reason.NOT_AN_IMAGE,
        Reason.DAMAGED_IMAGE,
        Reason.IMAGE_TOO_LARGE,
        Reason.IMAGE_ASPECT,
    }
)


def shorten(value: object, limit: int = 80) -> str:
    r"""The `repr` of a value in ASCII, at most `limit` characters, control characters escaped: safe to print.

    >>> print(shorten("a\x1b[2Jb"))
    'a\x1b[2Jb'
    """
    if isinstance(value, str | bytes) and len(value) > limit:
        return ascii(value[:limit])[: limit - 3] + "..."  # never build the repr of a megabyte only to cut it
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 image, 2 images."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class DataError(Exception):
    """One bad sample: what is wrong with it, where it stands, and under which reason it is counted.

    Args:
        reason: the key it is counted under.
        message: what was found, what was wanted, and the remedy.
        source: file and line, or data set and row.
        id: the sample's id, where the row gives one.
        field: the field of the row, such as `images[1]`.
    """

    says_all = True  # `wire` says of what

    def __init__(self, reason: Reason, message: str, *, source: str = "", id: str = "", field: str = "") -> None:
        super().__init__(reason, message)
        self.reason = Reason(reason)
        self.message = message
        self.source = source
        self.id = id
        self.field = field

    def at(self, *, source: str = "", id: str = "", field: str = "") -> DataError:
        """The same error with its place filled in; what was already known stays."""
        return DataError(
            self.reason,
            self.message,
            source=self.source or source,
            id=self.id or id,
            field=self.field or field,
        )

    def __str__(self) -> str:
        place = self.source or "row of unknown source"
        if self.id:
            place += f" (id {shorten(self.id, 60)})"
        if self.field:
            place += f", field {self.field}"
        return f"{place}: {self.reason}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by their positional arguments only; errors must cross process borders whole.
        return _rebuild_data_error, (self.reason, self.message, self.source, self.id, self.field)


def _rebuild_data_error(reason: Reason, message: str, source: str, id: str, field: str) -> DataError:
    return DataError(reason, message, source=source, id=id, field=field)
