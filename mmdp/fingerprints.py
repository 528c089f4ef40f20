"""What decides the rows of a plan, as digests in parts: whoever holds a state of another plan learns what differs.

Adds: `fingerprint_of`, of source and encoder; `plan_fingerprint`, of all that decides the rows; `differences`, told.
Leaves out: the digest of the rows themselves (`row_hashes.py`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from mmdp.sample_checks import check_source

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.sources import Source

_PARTS = (
    "the data (source, its rows, or how many samples)",
    "the encoder (tokenizer, chat template, vision family or max_pixels)",
    "the budget",
    "the order (seed, window, block, buffer, or the packer of mmdp)",
)


def fingerprint_of(source: Source, encoder: Encoder) -> str:
    """Of what decides every size: a digest of the content of the source, and one of the encoder; 16 hex digits each.

    Raises:
        ValueError: this is no source.
    """
    check_source(source)
    return f"{_digest(source.fingerprint, 8)}-{_digest(encoder.fingerprint, 8)}"


def plan_fingerprint(data: str, encoder: str, budget: str, order: str) -> str:
    """A digest of each, of 8 hex digits.

    >>> plan_fingerprint("train.jsonl", "qwen", "1024", "seed 0").count("-")
    3
    """
    return "-".join(_digest(part, 4) for part in (data, encoder, budget, order))


def differences(theirs: object, mine: str) -> str:
    """What differs between the plan of a state and this one, for a message.

    >>> differences(plan_fingerprint("a", "b", "c", "d"), plan_fingerprint("a", "b", "9", "d"))
    'the budget'
    """
    parts = str(theirs).split("-")
    if len(parts) != len(_PARTS):
        return "all of it, or the version of mmdp that saved it"
    return ", ".join(name for name, a, b in zip(_PARTS, parts, mine.split("-"), strict=True) if a != b)


def _digest(text: str, size: int) -> str:
    return blake2b(text.encode(), digest_size=size).hexdigest()
