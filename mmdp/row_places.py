"""Where the images of a row stand among its texts.

Adds: `Draft`, a turn on its way to a `Turn`; `split_marks`, `place_images` and `number_places`, which the forms of
`rows.py` go through, in this order.
Leaves out: the forms and their fields (`rows.py`, `row_fields.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from mmdp.records import ImageRef
from mmdp.refusals import Reason, counted, shorten
from mmdp.row_fields import refuse

MARK = "<image>"

# A turn on its way to a `Turn`: its field, role and parts, and whether it is learnt. A part is text or a place; a place
# holds an image of its own, the index of one of the row's images, or None for the row's next one.
Part = str | ImageRef | int | None
Draft = tuple[str, str, Sequence[Part], bool]


def split_marks(text: str) -> list[Part]:
    """Text with its marks as places, and without the newline that joins a mark to its text."""
    first, *others = text.split(MARK)
    pieces = [first, *(other.removeprefix("\n") for other in others)]
    last = max((index for index, piece in enumerate(pieces) if piece), default=0)
    if last < len(pieces) - 1:  # marks end the value
        pieces[last] = pieces[last].removesuffix("\n")
    parts: list[Part] = [pieces[0]]
    for piece in pieces[1:]:
        parts += [None, piece]
    return parts


def place_images(
    images: tuple[ImageRef, ...], drafts: list[Draft], *, keys: Iterable[str]
) -> tuple[tuple[ImageRef, ...], list[Draft]]:
    """The row's images in reading order, and the turns with as many places as there are images.

    Args:
        images: that the row names.
        drafts: its turns.
        keys: of the row, for errors.
    """
    places = [(field, part) for field, _, parts, _ in drafts for part in parts if not isinstance(part, str)]
    if images and not places:
        user = next((index for index, (_, role, *_) in enumerate(drafts) if role == "user"), None)
        if user is None:
            refuse(
                Reason.IMAGE_PLACES,
                "",
                f"{counted(len(images), 'image')}, 0 places and no user turn to put them in front of: add marks, or a "
                "user turn",
            )
        field, role, parts, is_learnt = drafts[user]
        placed = (field, role, [*[None] * len(images), *parts], is_learnt)
        return images, [*drafts[:user], placed, *drafts[user + 1 :]]
    own = tuple(part for _, part in places if isinstance(part, ImageRef))
    if own and images:
        refuse(
            Reason.WRONG_FORM,
            next(field for field, part in places if isinstance(part, ImageRef)),
            f"{len(own)} places have an image of their own and the row has {len(images)} besides: name each image once",
        )
    images = images or own
    if not images and places and not {"image", "images"} & set(keys):
        refuse(
            Reason.IMAGE_PLACES,
            places[-1][0],
            f"{counted(len(places), 'place')} for images, and the row has neither images nor image; it has "
            f"{shorten(', '.join(map(str, keys)), 100)}: name the images in one of these two",
        )
    if len(images) != len(places):
        refuse(
            Reason.IMAGE_PLACES,
            places[-1][0] if places else "",
            f"{counted(len(images), 'image')} and {counted(len(places), 'place')} for them: they must be equal, so "
            "mend one or the other",
        )
    order = [part for _, part in places if isinstance(part, int)]
    if order and sorted(order) != list(range(len(images))):
        refuse(
            Reason.IMAGE_PLACES,
            places[0][0],
            f"the places name the images {shorten(order)}, wanted each of 0 to {len(images) - 1} once: mend index",
        )
    return tuple(images[index] for index in order) if order else images, drafts


def number_places(drafts: Sequence[Draft]) -> Iterator[tuple[str, str, tuple[str | int, ...], bool]]:
    """The turns with their places numbered through, texts beside each other joined, and empty ones dropped."""
    numbers = itertools.count()
    for field, role, draft, is_learnt in drafts:
        parts: list[str | int] = []
        if len(draft) == 1 and isinstance(draft[0], str) and draft[0]:
            yield field, role, (draft[0],), is_learnt  # the usual turn, and most of the time spent here
            continue
        for is_text, run in itertools.groupby(draft, key=lambda part: isinstance(part, str)):
            if not is_text:
                parts += [next(numbers) for _ in run]
            elif text := "".join(part for part in run if isinstance(part, str)):
                parts.append(text)
        yield field, role, tuple(parts), is_learnt
