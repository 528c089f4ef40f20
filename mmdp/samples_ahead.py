"""Samples with the bytes of their images in them, many read at a time on an event loop.

Adds: `fetch_samples`, the waiting half of building a row; an executor with an event loop runs it before the other half.
Leaves out: what is made of them (`batching`), how a store is asked (`store`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mmdp.records import ImageRef, Sample
from mmdp.refusals import DataError
from mmdp.remote import FetchError
from mmdp.spans import span
from mmdp.store import aread

if TYPE_CHECKING:
    from mmdp.sources import Source


async def fetch_samples(source: Source, indices: Sequence[int], *, images: bool = True) -> dict[int, Sample]:
    """The samples, their images read side by side.

    Nothing fails here. An image that a store does not give carries the failure with it, and a file that can't be read
    is left as it was; so whoever builds the row meets the error in its place, and no store is asked again in vain.

    Args:
        source: the samples.
        indices: which of them.
        images: read their images too.
    """
    found = await asyncio.gather(*(_fetch(source, index, images) for index in indices))
    return {index: sample for index, sample in zip(indices, found, strict=True) if sample is not None}


async def _fetch(source: Source, index: int, images: bool) -> Sample | None:
    try:
        sample = await asyncio.to_thread(source.__getitem__, index)
    except (DataError, OSError):
        return None
    if not images:
        return sample
    return replace(sample, images=tuple(await asyncio.gather(*map(_with_bytes, sample.images))))


async def _with_bytes(ref: ImageRef) -> ImageRef:
    if ref.data is not None:
        return ref
    try:
        with span("fetch") as work:
            data = await aread(ref)
            work.add(num_bytes=len(data))
    except (DataError, FetchError) as error:
        return replace(ref, failure=error)
    except OSError:
        return ref
    return replace(ref, data=data)
