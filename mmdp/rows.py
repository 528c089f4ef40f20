r"""One row of a data set, in any of three forms, becomes a `Sample`.

Adds: `parse_row`, a pure function. In: the row as JSON or Arrow gives it. Out: a `Sample`, or the one `DataError` that
says what is wrong with it. Leaves out: what may stand in one field (`row_fields.py`), where rows come from
(`sources.py`), and whether an image exists (`store.py`).

The form is told by which one of three keys the row has; a key whose value is null counts as absent, as in a table.

| key | a turn | where images go |
|---|---|---|
| `texts` (the_cauldron's) | `{user, assistant}` | in front of the first user turn |
| `conversations` (LLaVA, ShareGPT) | `{from, value}` | at each `<image>` of a value |
| `messages` (chat) | `{role, content}` | at each part of type `image` or `image_url` |

Rules of all forms:

- `system` beside the turns is a system turn before the first one.
- An answer with `weight` 0, or `loss` or `train` false, is read and not learnt.
- Images stand in `images` or `image`: one or a list, each a file name, the file's bytes (in JSON as a `data:` URL), or
  `{bytes, path}` as image columns store it.
  Null, missing and an empty list mean a row of text alone.
- Images and no place at all: they go in front of the first user turn. Else places and images must agree in number.
- Text is kept character by character. An answer of blanks alone is empty, and one empty answer refuses the row.
- What would be lost is refused: calls and declarations of tools, thoughts beside the text. Other keys are ignored.

Roles: `texts` has its two; `messages` takes `system`, `user`, `assistant`; `conversations` these and `human`, `gpt`.

Marks: `<image>` is a mark in `conversations`, and in `messages` where the content is a string, the row has images and
no part is an image. Anywhere else it is text. The newline that joins a mark to its text belongs to the mark: the one
after it, and the one before marks that end the value. So `<image>\nWhy?`, `Why?\n<image>` and a part of type `image`
beside `Why?` give the same text, and the chat template decides what stands between.

A part of type `image` stands for the row's next image, or for the one its `index` names, or carries one of its own in
`image`, `path` or `url` (`image_url` for that type), where the row has none.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from mmdp.records import Sample, Turn
from mmdp.refusals import DataError, Reason, shorten
from mmdp.row_fields import (
    TOOLS,
    kind_of,
    read_answer,
    read_id,
    read_image,
    read_images,
    read_learnt,
    read_role,
    read_system,
    read_text,
    read_turns,
    refuse,
    refuse_calls,
    refuse_tools,
)
from mmdp.row_places import Draft, Part, number_places, place_images, split_marks
from mmdp.sample_checks import ROLES

FORMS = ("texts", "conversations", "messages")
"""The keys that tell a row's form."""

KEYS = ("id", "images", "image", "system", *TOOLS, *FORMS)
"""All keys of a row that are read."""

_ROLES = {role: role for role in ROLES}
_CONVERSATION_ROLES = _ROLES | {"human": "user", "gpt": "assistant"}
_INLINE_KEYS = {"image": ("image", "path", "url"), "image_url": ("image_url", "url")}


def parse_row(row: object, *, root: str, source: str, number: int) -> Sample:
    r"""One row as a `Sample`.

    Args:
        row: what stands in the row; anything but an object is refused.
        root: the folder that image names are relative to; empty where images travel as bytes.
        source: where the row stands, such as `train.jsonl:17`.
        number: the row's index, which is its id where it has none of its own (a text or a number).

    Raises:
        DataError: the row can't be read, with source, id and field.

    >>> turns = [{"from": "human", "value": "<image>\nWhy?"}, {"from": "gpt", "value": "So."}]
    >>> row = {"image": "a.png", "conversations": turns}
    >>> for turn in parse_row(row, root="data", source="train.jsonl:1", number=0).turns:
    ...     print(turn.role, turn.parts)
    user (0, 'Why?')
    assistant ('So.',)
    """
    if not isinstance(row, Mapping):
        raise DataError(
            Reason.INVALID_JSON, f"the row is {kind_of(row)}, and must be one object: {{...}}", source=source
        )
    row_id = ""
    try:
        row_id = read_id(row)
        images = read_images(row, root)
        images, drafts = place_images(images, _drafts(row, root, has_images=bool(images)), keys=row)
        turns = tuple(_turn(*numbered) for numbered in number_places(drafts))
    except DataError as error:
        raise error.at(source=source, id=row_id) from None
    if not any(turn.role == "assistant" for turn in turns):
        raise DataError(
            Reason.NO_ANSWER,
            "no turn is the assistant's, so nothing can be learnt: give one, or remove the row",
            source=source,
            id=row_id,
        )
    return Sample(id=row_id or str(number), images=images, turns=turns, source=source)


def row_number(index: int, length: int) -> int:
    """The number of a row from 0, for an index as a list takes it.

    >>> row_number(-1, 10)
    9
    """
    number = operator.index(index)
    if not -length <= number < length:
        raise IndexError(f"row {number} of {length}")
    return number % length


def _drafts(row: Mapping[str, object], root: str, *, has_images: bool) -> list[Draft]:
    """The turns of whichever form the row has."""
    forms = [form for form in FORMS if row.get(form) is not None]
    if len(forms) != 1:
        keys = f"the keys {shorten(', '.join(map(str, row)))}" if row else "no keys"
        found = " and ".join(forms) or f"{keys}, and neither {', '.join(FORMS[:-1])} nor {FORMS[-1]}"
        refuse(
            Reason.WRONG_FORM,
            forms[0] if forms else "",
            f"the row has {found}, wanted exactly one of the three row forms (docs/own_data.md): correct the row",
        )
    form = forms[0]
    refuse_tools(row)
    turns = read_turns(row[form], form)
    if form == "texts":
        drafts = _from_texts(turns)
    elif form == "conversations":
        drafts = _from_conversations(turns)
    else:
        drafts = _from_messages(turns, root, has_images=has_images)
    if system := read_system(row):
        if drafts[0][1] == "system":
            refuse(Reason.WRONG_FORM, "system", "the row has a system text, and its first turn is one: remove either")
        drafts.insert(0, ("system", "system", [system], True))
    return drafts


def _from_texts(turns: Sequence[Mapping[str, object]]) -> list[Draft]:
    drafts: list[Draft] = []
    for index, turn in enumerate(turns):
        field = f"texts[{index}]"
        refuse_calls(turn, field)
        drafts.append((f"{field}.user", "user", [read_text(turn.get("user"), f"{field}.user")], True))
        answer = read_answer(turn.get("assistant"), f"{field}.assistant")
        drafts.append((f"{field}.assistant", "assistant", [answer], read_learnt(turn, field, "assistant")))
    return drafts


def _from_conversations(turns: Sequence[Mapping[str, object]]) -> list[Draft]:
    drafts: list[Draft] = []
    for index, turn in enumerate(turns):
        field = f"conversations[{index}]"
        role = read_role(turn.get("from"), f"{field}.from", _CONVERSATION_ROLES)
        refuse_calls(turn, field)
        read = read_answer if role == "assistant" else read_text
        parts = split_marks(read(turn.get("value"), f"{field}.value"))
        drafts.append((f"{field}.value", role, parts, read_learnt(turn, field, role)))
    return drafts


def _from_messages(turns: Sequence[Mapping[str, object]], root: str, *, has_images: bool) -> list[Draft]:
    drafts: list[Draft] = []
    for index, turn in enumerate(turns):
        field = f"messages[{index}]"
        refuse_calls(turn, field)
        role = read_role(turn.get("role"), f"{field}.role", _ROLES)
        is_learnt = read_learnt(turn, field, role)
        content, field = turn.get("content"), f"{field}.content"
        if isinstance(content, list):
            parts = [_part(part, f"{field}[{k}]", root) for k, part in enumerate(content)]
        else:
            parts = [(read_answer if role == "assistant" else read_text)(content, field)]
        drafts.append((field, role, parts, is_learnt))
    typed_places = any(not isinstance(part, str) for _, _, parts, _ in drafts for part in parts)
    if not has_images or typed_places:
        return drafts
    return [
        (field, role, split_marks(turn["content"]) if isinstance(turn["content"], str) else parts, is_learnt)
        for turn, (field, role, parts, is_learnt) in zip(turns, drafts, strict=True)
    ]


def _part(part: object, field: str, root: str) -> Part:
    """One part of a message's content: text, a place, or an image that stands in the part itself."""
    if not isinstance(part, Mapping):
        refuse(
            Reason.WRONG_FORM, field, f'found {kind_of(part)}, wanted an object such as {{"type": "text", "text": ...}}'
        )
    kind = part.get("type")
    if kind == "text":
        return read_text(part.get("text"), f"{field}.text")
    if not isinstance(kind, str) or kind not in _INLINE_KEYS:
        refuse(
            Reason.WRONG_FORM,
            f"{field}.type",
            f"found {kind_of(kind)}, wanted text, image or image_url: remove the part or the row",
        )
    keys = [key for key in (*_INLINE_KEYS[kind], "index") if part.get(key) is not None]
    if len(keys) > 1:
        refuse(Reason.WRONG_FORM, field, f"one place names its image twice, in {' and '.join(keys)}: remove one")
    if not keys:
        return None
    key, value = keys[0], part[keys[0]]
    if key == "index":
        if type(value) is not int:
            refuse(
                Reason.WRONG_FORM, f"{field}.index", f"found {kind_of(value)}, wanted the number of an image, from 0"
            )
        return value
    if kind == "image_url" and isinstance(value, Mapping):
        key, value = f"{key}.url", value.get("url")
    return read_image(value, f"{field}.{key}", root)


def _turn(field: str, role: str, parts: tuple[str | int, ...], is_learnt: bool) -> Turn:
    turn = Turn(role, parts, is_learnt)
    if role == "assistant" and not turn.text.strip():
        refuse(Reason.NO_ANSWER, field, "the answer is empty, so nothing can be learnt: give it, or remove the row")
    return turn
