"""What every vision family refuses: options out of range, an image without pixels, a shape that it can't take.

Adds: `FILTERS`, the names of the filters that pixels are resized with, and four checks with their messages. Leaves out:
the families (`vision_resized.py`, `vision_tiled.py`).
"""

from __future__ import annotations

from typing import Protocol

from mmdp.refusals import DataError, Reason, shorten

FILTERS = ("bilinear", "bicubic", "lanczos")
"""By Pillow's names for them, in small letters; all are antialiased."""


class Named(Protocol):
    """A family as its messages name it."""

    @property
    def name(self) -> str:
        """The word a user writes for it."""


def check_options(family: Named, **bounds: int) -> None:
    """Refuses a family with an option below its bound.

    Args:
        family: has each option as an attribute.
        bounds: the least value of each option, by its name.

    Raises:
        ValueError: the first option that is too small.
    """
    for name, bound in bounds.items():
        if getattr(family, name) < bound:
            raise ValueError(f"{family.name}: {name} is {getattr(family, name)}: it must be at least {bound}")


def check_filter(family: Named, filter: str) -> None:
    """Refuses a filter that pixels can't be resized with.

    Raises:
        ValueError: the message lists what exists.
    """
    if filter not in FILTERS:
        raise ValueError(f"{family.name}: filter is {shorten(filter)}: the filters are {', '.join(FILTERS)}")


def check_size(width: int, height: int, num_images: int) -> None:
    """Refuses an image without pixels, and a sample without images.

    Raises:
        ValueError: one of the three is under 1.
    """
    if min(width, height, num_images) < 1:
        raise ValueError(f"an image of {width} x {height}, one of {num_images}: each must be at least 1")


def refused_aspect(name: str, width: int, height: int, limit: str) -> DataError:
    """The refusal of an image that is too long for its width, to be raised.

    Args:
        name: the family.
        width: pixels.
        height: pixels.
        limit: what the family takes, or what would become of the image.
    """
    ratio = max(width, height) / min(width, height)
    message = f"{name} {limit}, this image is {width} x {height}, ratio {ratio:.1f}: crop it or leave it out"
    return DataError(Reason.IMAGE_ASPECT, message)
