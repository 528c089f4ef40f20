"""A sample as tokens, and its pixels when a row is built.

Adds: `Encoder`, which joins a tokenizer, a chat template and a vision family. `encode` needs the headers of the images
only; `pixels` decodes them, later, to the size that was promised.
Leaves out: running over a data set (`measuring.py`), joining samples (`batching.py`).
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdp.chat import Chat
from mmdp.config import Config
from mmdp.image_sizes import check_pixels, image_size, read_size
from mmdp.images import decode
from mmdp.records import Encoded, ImageLayout, Sample
from mmdp.refusals import DataError, Reason, counted, shorten
from mmdp.sample_checks import check_sample
from mmdp.spans import span
from mmdp.store import read, reader
from mmdp.tokenizer import load_tokenizer
from mmdp.vision import vision_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_VERSION = 4
"""Goes up when the same sample would be encoded to other ids, labels or layouts; token caches are made anew then."""

_IMAGE_TOKENS = ("<|image|>", "<image>", "<|image_pad|>", "<image_soft_token>")
"""Image tokens of released tokenizers, in the order in which `fixed:N` looks for one."""


_making_chat = threading.Lock()


class Encoder:
    """Samples to ids, labels and image layouts, and their images to pixels.

    Args:
        tokenizer: `demo`, a local folder, a name on the Hub, or a loaded fast tokenizer (which is not changed).
        vision: a family of `vision.py`; `spec_of` there reads it off a processor. `fixed:N` takes the tokenizer's
            own image token; where it has none, `<|image|>` is added, and the model's embedding needs a row more.
        chat_template: instead of the tokenizer's own; `chatml` for plain ChatML.
        max_pixels: an image with more is refused from its header.
        cache: where the demo tokenizer lies; by default `config.cache_folder()`.

    Attributes:
        family: the vision family.
        image_id: id of the token that stands for a piece of an image.
        pad_id: id that fills the tail of a row; it may equal the end mark, since padding is known by its place.

    Raises:
        ValueError: the tokenizer or family is unknown, the tokenizer lacks a mark of the family, or this is none.
    """

    def __init__(
        self,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerFast = "demo",
        vision: str = "fixed:64",
        *,
        chat_template: str | None = None,
        max_pixels: int = Config.max_pixels,
        cache: Path | None = None,
    ) -> None:
        if isinstance(tokenizer, str | os.PathLike):
            loaded = load_tokenizer(os.fspath(tokenizer), cache=cache)
        else:
            loaded = _copy_of(tokenizer)
        if not isinstance(vision, str):
            raise ValueError(
                f"vision is of the type {type(vision).__name__}, and is to be text: give a family, such as `qwen3_vl`, "
                "or mmdp.vision.spec_of(processor)"
            )
        if vision.startswith("fixed:") and "image_token=" not in vision:
            token = _image_token(loaded)
            vision += f",image_token={token}" if "=" in vision else f":image_token={token}"
        self._vision = vision
        self.family = vision_family(vision)
        id_of = loaded.backend_tokenizer.token_to_id  # the whole vocabulary as a dict takes 50 ms
        if missing := [mark for mark in self.family.marks if id_of(mark) is None]:
            raise ValueError(
                f"the tokenizer lacks {counted(len(missing), 'mark')} of the vision family {self.family.name}, such as "
                f"{missing[0]}: use that model's own tokenizer, or `--vision fixed:64`, which goes with any"
            )
        self.max_pixels = max_pixels
        image_id = id_of(self.family.image_token)
        assert image_id is not None, "the image token is one of the marks"
        self.image_id: int = image_id
        self.pad_id = _pad_id(loaded)
        self._pickled: bytes | None = None
        self._chat: Chat | None = Chat(
            loaded, placeholder=self.family.placeholder, marks=self.family.marks, chat_template=chat_template
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pickled is None:
            self._pickled = pickle.dumps(self.chat)
        return _at_rest, (self._vision, self.max_pixels, self.image_id, self.pad_id, self.fingerprint, self._pickled)

    @property
    def chat(self) -> Chat:
        """Turns to ids and labels. In another process it is made when it is first needed.

        That takes some seconds of imports, and a worker that builds rows from measured sizes never needs it.
        """
        if self._chat is None:
            with _making_chat:
                if self._chat is None:
                    assert self._pickled is not None
                    self._chat = pickle.loads(self._pickled)  # noqa: S301 - from `__reduce__`
        return self._chat

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """With the image token added, if one was."""
        return self.chat.tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all that decides ids, labels and layouts; the same on every machine."""
        text = f"{_VERSION} {self.chat.fingerprint} {self.family!r} {self.max_pixels}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def encode(self, sample: Sample, image_sizes: Sequence[tuple[int, int]] | None = None) -> Encoded:
        """Ids, labels and image layouts, from text and image headers; no pixel is decoded.

        Args:
            sample: as it was read.
            image_sizes: what `image_sizes` says of it, where that was asked before.

        Raises:
            DataError: with the sample's place, where its turns, its text or an image can't be used.
            ValueError: it is no `Sample`.
        """
        check_sample(sample)
        layouts = tuple(self._layouts(sample, self.image_sizes(sample) if image_sizes is None else image_sizes))
        marks = [self.family.before + self.family.text(layout) + self.family.after for layout in layouts]
        try:
            with span("encode"):
                ids, labels = self.chat.encode(sample.turns, marks)
        except DataError as error:
            raise error.at(source=sample.source, id=sample.id) from error
        return Encoded(ids, labels, layouts)

    def pixels(self, sample: Sample, encoded: Encoded) -> list[np.ndarray]:
        """The images of a sample, each (3, H, W) uint8 of the size its layout promised.

        Raises:
            DataError: with the image's place, where it can't be read or decoded.
        """
        images = []
        for number, (ref, layout) in enumerate(zip(sample.images, encoded.layouts, strict=True)):
            try:
                with span("fetch") as work:
                    data = read(ref)
                    work.add(num_bytes=len(data))
                # A family that may use a draft makes squares of all sizes: nothing of it can change.
                if not self.family.draft and self.family.layout(*image_size(data), len(sample.images)) != layout:
                    raise DataError(
                        Reason.CHANGED_IMAGE,
                        "another size than when it was measured: delete the token cache, and measure again",
                    )
                with span("decode"):
                    image = self._decoded(data, layout)
            except DataError as error:
                raise _at_image(error, sample, number) from error
            except OSError as error:
                error.add_note(f"while reading images[{number}] of {sample.source}")
                raise
            images.append(image)
        return images

    def _decoded(self, data: bytes, layout: ImageLayout) -> np.ndarray:
        """(3, H, W) uint8, of the height and width of the layout."""
        family = self.family
        if family.draft:
            size = (layout.height, layout.width)
            return decode(data, size=size, filter=family.filter, max_pixels=self.max_pixels, draft=True)
        return decode(data, fit=partial(family.fit, layout=layout), max_pixels=self.max_pixels)

    def image_sizes(self, sample: Sample) -> list[tuple[int, int]]:
        """(width, height) of each image of a sample, upright, from its header.

        Raises:
            DataError: with the image's place, where it can't be read, is no image, or is over `max_pixels`; with the
                sample's, where its turns can't be used.
            ValueError: it is no `Sample`.
        """
        check_sample(sample)
        sizes = []
        for number, ref in enumerate(sample.images):
            try:
                with span("fetch"):
                    width, height = read_size(reader(ref))
                check_pixels(width, height, self.max_pixels)
            except DataError as error:
                raise _at_image(error, sample, number) from error
            except OSError as error:
                error.add_note(f"while reading images[{number}] of {sample.source}")
                raise
            sizes.append((width, height))
        return sizes

    def _layouts(self, sample: Sample, image_sizes: Sequence[tuple[int, int]]) -> Iterator[ImageLayout]:
        for number, (width, height) in enumerate(image_sizes):
            try:
                yield self.family.layout(width, height, len(sample.images))
            except DataError as error:
                raise _at_image(error, sample, number) from error


def _at_image(error: DataError, sample: Sample, number: int) -> DataError:
    field = f"images[{number}] = {shorten(sample.images[number].name)}"
    return error.at(source=sample.source, id=sample.id, field=field)


def _image_token(tokenizer: PreTrainedTokenizerFast) -> str:
    for token in _IMAGE_TOKENS:
        if tokenizer.backend_tokenizer.token_to_id(token) is not None:
            return token
    tokenizer.add_tokens([_IMAGE_TOKENS[0]], special_tokens=True)
    return _IMAGE_TOKENS[0]


def _copy_of(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A loaded tokenizer, to be changed here; what is none is refused with the way out."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        kind = type(tokenizer).__name__
        way = "its `.tokenizer`" if hasattr(tokenizer, "tokenizer") else "a fast one of transformers, or a name"
        raise ValueError(f"the tokenizer is of the type {kind}, which is no fast tokenizer: give {way}")
    return copy.deepcopy(tokenizer)


def _pad_id(tokenizer: PreTrainedTokenizerFast) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0  # any id will do: padding is masked by place, never by value


def _at_rest(vision: str, max_pixels: int, image_id: int, pad_id: int, fingerprint: str, pickled: bytes) -> Encoder:
    """The encoder as it comes to another process, its tokenizer not made yet."""
    encoder = object.__new__(Encoder)
    encoder._vision = vision
    encoder.family = vision_family(vision)
    encoder.max_pixels, encoder.image_id, encoder.pad_id = max_pixels, image_id, pad_id
    encoder.fingerprint = fingerprint
    encoder._chat, encoder._pickled = None, pickled
    return encoder
