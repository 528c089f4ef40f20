"""Whether what a source gave is a sample, and keeps what the rest counts on.

Adds: `check_source` and `check_sample`, for what was made outside of this package; `table_remedy`, for tables in
memory. What `parse_row` made passes.
Leaves out: rows as they are read (`rows.py`), whether the images exist (`store.py`).
"""

from __future__ import annotations

from mmdp.records import ImageRef, Sample
from mmdp.refusals import DataError, Reason, counted, shorten

ROLES = ("system", "user", "assistant")


def check_source(source: object) -> None:
    """Refuses what can't be measured.

    Raises:
        ValueError: it lacks something of the protocol `sources.Source`; the message says what.
    """
    needed = ("__len__", "__getitem__", "name", "fingerprint")
    if missing := [name for name in needed if not hasattr(source, name)]:
        remedy = table_remedy(source)
        raise ValueError(
            f"{f'this {type(source).__name__}' if remedy else shorten(source)} is no source, it lacks "
            f"{', '.join(missing)}: {remedy or 'open one with mmdp.open_source'}; or give an object of your own that "
            "has them (the protocol mmdp.sources.Source)"
        )


def table_remedy(given: object) -> str:
    """How to open a table that is in memory, such as a `datasets.Dataset`; empty where it is none.

    >>> table_remedy(["a row"])
    ''
    """
    rest = "to_parquet('x.parquet'), and open that with mmdp.open_source('x.parquet')"
    if hasattr(given, "save_to_disk"):  # to_parquet writes the paths of images that are named by one
        rest += "; where it names images by path, save_to_disk takes the files in: write what load_from_disk then gives"
    if hasattr(given, "to_parquet"):
        stream = "" if hasattr(given, "__len__") else ", or give its rows to mmdp.StreamLoader (docs/own_data.md)"
        return f"write it once with .{rest}{stream}"
    if isinstance(given, dict) and given and all(hasattr(split, "to_parquet") for split in given.values()):
        return f"write one of its splits once with [{shorten(next(iter(given)), 40)}].{rest}"  # a DatasetDict
    return ""


def check_sample(sample: object, giver: str = "the source") -> None:
    """Refuses a sample that would be encoded to something else than it is.

    Args:
        sample: what was given.
        giver: who gave it, for the message.

    Raises:
        ValueError: it is no `Sample` at all.
        DataError: WRONG_FORM, UNKNOWN_ROLE, NO_ANSWER or IMAGE_PLACES, with source, id and field.

    >>> check_sample({"id": "7"}, "mine")
    Traceback (most recent call last):
    ValueError: mine gave {'id': '7'}, wanted a Sample: make one of a row with mmdp.rows.parse_row
    """
    if not isinstance(sample, Sample):
        raise ValueError(f"{giver} gave {shorten(sample)}, wanted a Sample: make one of a row with mmdp.rows.parse_row")
    places: list[int] = []
    answers = 0
    for number, turn in enumerate(sample.turns):
        if turn.role not in ROLES:
            _refuse(
                sample, Reason.UNKNOWN_ROLE, f"turns[{number}].role",
                f"found {shorten(turn.role)}, wanted one of {', '.join(ROLES)}",
            )  # fmt: skip
        for part in turn.parts:
            if isinstance(part, str):
                continue
            if not isinstance(part, int) or isinstance(part, bool):
                _refuse(
                    sample, Reason.WRONG_FORM, f"turns[{number}].parts",
                    f"found {shorten(part)}, wanted text, or the index of an image",
                )  # fmt: skip
            places.append(part)
        if turn.role == "assistant":
            answers += 1
            if not turn.text.strip():
                _refuse(
                    sample,
                    Reason.NO_ANSWER,
                    f"turns[{number}]",
                    "the answer is blank: give it, or leave the sample out",
                )
    if not answers:
        _refuse(sample, Reason.NO_ANSWER, "turns", "no turn is the assistant's, so nothing can be learnt")
    if places != list(range(len(sample.images))):
        _refuse(
            sample, Reason.IMAGE_PLACES, "turns",
            f"the image places are {shorten(places)}, wanted each of {counted(len(sample.images), 'image')} once, "
            "in order",
        )  # fmt: skip
    images: tuple[object, ...] = sample.images
    for number, image in enumerate(images):
        if not isinstance(image, ImageRef):
            _refuse(sample, Reason.WRONG_FORM, f"images[{number}]", f"found {shorten(image)}, wanted an ImageRef")


def _refuse(sample: Sample, reason: Reason, field: str, message: str) -> None:
    raise DataError(reason, message, source=sample.source, id=sample.id, field=field)
