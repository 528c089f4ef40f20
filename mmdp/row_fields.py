"""One field of a row: what stands in it, or the `DataError` that says what is wrong there.

Adds: a reader for each kind of field that the forms of `rows.py` share: id, system text, turns, role, text, answer,
whether it is learnt, images. In: the
value as JSON or Arrow gives it, and the field's name for messages, such as `texts[0].user`. Every reader raises a
`DataError` that names the field, what was found and what was wanted; `parse_row` adds source and id to it.
Leaves out: the forms themselves, marks, and which image belongs to which place (`rows.py`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import NoReturn

from mmdp.records import ImageRef
from mmdp.refusals import DataError, Reason, shorten

TOOLS = ("tools", "functions")
"""The keys of a row that declare them."""


def refuse(reason: Reason, field: str, message: str) -> NoReturn:
    """Raises the `DataError` of a field."""
    raise DataError(reason, message, field=field)


def kind_of(value: object) -> str:
    """A value in the words of JSON: what it is, and how it begins."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    name = names.get(type(value), f"a value of type {type(value).__name__}")
    size = f" of {len(value)}" if isinstance(value, dict | list) else f" {shorten(value)}"
    return name + size


def read_id(row: Mapping[str, object]) -> str:
    """The row's own id as text; empty where it has none that is a text or a number."""
    value = row.get("id")
    return encodable(str(value), "id") if isinstance(value, str | int | float) else ""


def read_system(row: Mapping[str, object]) -> str:
    """The system text beside the turns, as ShareGPT has it; empty where there is none."""
    value = row.get("system")
    return "" if value is None else read_text(value, "system")


def refuse_tools(row: Mapping[str, object]) -> None:
    """Refuses a row that declares tools: they would be missing from the prompt."""
    for key in TOOLS:
        if row.get(key) and row[key] != "[]":
            refuse(
                Reason.WRONG_FORM,
                key,
                "declarations of tools are not put into the prompt here: remove the key, or the row",
            )


def refuse_calls(turn: Mapping[str, object], field: str) -> None:
    """Refuses a turn whose answer is not all in its text."""
    for key in ("tool_calls", "function_call"):
        if turn.get(key):
            refuse(Reason.WRONG_FORM, f"{field}.{key}", "calls of tools are not learnt here: remove the row")
    for key in ("reasoning_content", "reasoning", "thinking"):
        if turn.get(key):
            refuse(
                Reason.WRONG_FORM,
                f"{field}.{key}",
                "only the text of an answer is learnt: write it in there as your model wants it, or remove the key",
            )


def read_learnt(turn: Mapping[str, object], field: str, role: str) -> bool:
    """Whether an answer is learnt: not where the turn has `weight` 0 (OpenAI's), or `loss` or `train` false."""
    is_learnt = True
    for key in ("weight", "loss", "train"):
        value = turn.get(key)
        if value is None or value != value:  # a NaN is how tables of numbers leave one out
            continue
        if value not in (0, 1):
            refuse(
                Reason.WRONG_FORM,
                f"{field}.{key}",
                f"found {kind_of(value)}, wanted 0 or 1, or false or true: an answer is learnt, or it is not",
            )
        if value and role != "assistant" and key != "weight":
            refuse(Reason.WRONG_FORM, f"{field}.{key}", f"only answers are learnt, no turn of the {role}: remove it")
        is_learnt = is_learnt and bool(value)
    return is_learnt


def encodable(text: str, field: str) -> str:
    """The text as it is; refused where no encoding can write it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        refuse(
            Reason.INVALID_TEXT,
            field,
            f"character {error.start} is the lone surrogate {text[error.start]!a}, which no encoding can write: "
            "write the character itself or both halves of the pair",
        )
    return text


def read_text(value: object, field: str) -> str:
    """A text, which may be empty."""
    if not isinstance(value, str):
        refuse(
            Reason.WRONG_FORM, field, f'found {kind_of(value)}, wanted a string (an empty one is ""): correct the row'
        )
    return encodable(value, field)


def read_answer(value: object, field: str) -> str:
    """The text of an assistant turn, which must not be missing."""
    if value is None:
        refuse(Reason.NO_ANSWER, field, "the answer is null or missing: give it, or remove the row")
    return read_text(value, field)


def read_role(value: object, field: str, roles: Mapping[str, str]) -> str:
    """The role of a turn, in our words.

    Args:
        value: what stands in the field.
        field: its name.
        roles: the words that the form may use, each with ours.
    """
    if value is None:
        refuse(Reason.WRONG_FORM, field, f"the role is null or missing: give one of {', '.join(roles)}")
    if not isinstance(value, str) or value not in roles:
        refuse(Reason.UNKNOWN_ROLE, field, f"found {kind_of(value)}, wanted one of {', '.join(roles)}: rename the role")
    return roles[value]


def read_turns(value: object, field: str) -> Sequence[Mapping[str, object]]:
    """The turns of a row: a list of objects, at least one."""
    if not isinstance(value, list):
        refuse(Reason.WRONG_FORM, field, f"found {kind_of(value)}, wanted a list of turns: correct the row")
    if not value:
        refuse(Reason.NO_ANSWER, field, "there are no turns, so nothing can be learnt: give some, or remove the row")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            refuse(Reason.WRONG_FORM, f"{field}[{index}]", f"found {kind_of(item)}, wanted one turn as an object")
    return value


def read_images(row: Mapping[str, object], root: str) -> tuple[ImageRef, ...]:
    """The images of the row's own `images` or `image`."""
    keys = [key for key in ("images", "image") if row.get(key) is not None]
    if len(keys) == 2:
        refuse(Reason.WRONG_FORM, "images", "the row has both images and image, and one must be the list: remove one")
    if not keys:
        return ()
    key, value = keys[0], row[keys[0]]
    if isinstance(value, list):
        return tuple(read_image(item, f"{key}[{index}]", root) for index, item in enumerate(value))
    return (read_image(value, key, root),)


def read_image(value: object, field: str, root: str) -> ImageRef:
    """One image: a file name, the file's bytes, also as a `data:` URL, or an object with bytes, name, or both."""
    data = None
    name = value
    if isinstance(value, bytes):  # a column of bytes, as tables have it
        return ImageRef("", root, value)
    if _is_decoded(value):
        _refuse_decoded(value, field)
    if isinstance(value, Mapping):
        data, name = value.get("bytes"), value.get("path")
        if data is not None and not isinstance(data, bytes):
            refuse(
                Reason.WRONG_FORM, f"{field}.bytes", f"found {kind_of(data)}, wanted bytes: name a file in path instead"
            )
        field += ".path"
        if name is None and data is not None:
            name = ""
        elif name is None:
            keys = ", ".join(shorten(key, 20) for key in list(value)[:5]) or "no keys"
            refuse(Reason.WRONG_FORM, field, f"found an object with {keys}, wanted bytes or a path: give one of them")
    if not isinstance(name, str):
        refuse(Reason.WRONG_FORM, field, f"found {kind_of(name)}, wanted the name of an image file: correct the row")
    if name[:5].lower() == "data:" and data is None:
        return ImageRef("", root, _inline(name, field))
    if not name and data is None:
        refuse(Reason.WRONG_FORM, field, "the name of the image is empty: name a file, or leave the image out")
    return ImageRef(encodable(name, field), root, data)


def _inline(url: str, field: str) -> bytes:
    """The bytes that stand in a `data:` URL."""
    head, comma, body = url.partition(",")
    try:
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("it does not begin as data:image/...;base64,")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        refuse(
            Reason.WRONG_FORM,
            field,
            f"{shorten(url, 40)} can't be read: {str(error).lower()}. Mend it, or name a file",
        )


def _is_decoded(value: object) -> bool:
    """Whether this is an image as pixels: a picture of Pillow, an array of NumPy, a tensor of torch."""
    of_type = type(value)  # not the value: Pillow makes an array of all pixels where its attribute is asked for
    is_array = hasattr(of_type, "__array_interface__") or hasattr(of_type, "__array__")
    return is_array and getattr(value, "shape", None) != ()  # a single number of NumPy has a shape too


def _refuse_decoded(value: object, field: str) -> NoReturn:
    """Says how to get the file that the pixels are of.

    Pixels are not taken. `datasets` has let go of the file by now, and turned the picture as its EXIF says: encoding it
    again takes time for each image, or changes its pixels, and the user can have the file for one line.
    """
    column, is_inside, _ = field.partition("[")
    feature = "datasets.Image(decode=False)"
    if column not in ("images", "image"):
        remedy = "`dataset.decode(False)`, where it is streamed, or open what `dataset.to_parquet` has written"
    else:
        feature = f"datasets.List({feature})" if is_inside else feature
        remedy = f'`dataset.cast_column("{column}", {feature})`, which gives the files'
    refuse(
        Reason.WRONG_FORM,
        field,
        f"found pixels (a {type(value).__name__}), wanted the image's file, as bytes or by its name: of a data set of "
        f"`datasets`, go over {remedy}; else give the bytes of the file",
    )
