"""Tokenizers: loaded as their files say, and copied so that what a person spells stays text.

Adds: `load_tokenizer`, by name; `plain_tokenizers`, the copies that encode text between marks.
Leaves out: which text stands where, and what is learnt of it (`chat.py`).
"""

from __future__ import annotations

import copy
import json
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mmdp.refusals import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(name: str, *, cache: Path | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer `demo`, of a local folder, or of that name on the Hub.

    `tokenizer.json` is loaded by the generic class, whatever class its config names: transformers 5 rebuilds the
    pre-tokenizer of some classes, and with it SmolLM2's one-digit rule is lost.

    Args:
        name: `demo`, a folder, or a Hub name.
        cache: where the demo tokenizer lies; by default `config.cache_folder()`.

    Raises:
        ValueError: no `tokenizer.json` under that name.
    """
    from huggingface_hub import hf_hub_download
    from transformers import PreTrainedTokenizerFast

    if name == "demo":
        from mmdp.config import cache_folder
        from mmdp.demo import demo_tokenizer

        name = str(demo_tokenizer(cache or cache_folder()))
    folder = Path(name).expanduser()
    is_local = name.startswith((".", "/", "~")) or folder.exists()
    if is_local and not (folder / "tokenizer.json").is_file():
        found = "no tokenizer.json in there" if folder.is_dir() else "no such folder"
        raise ValueError(
            f"tokenizer {shorten(name)}: {found}. Save one with "
            "`tokenizer.save_pretrained(FOLDER)`, or give 'demo' or a name on the Hub"
        )
    try:
        if not is_local:
            hf_hub_download(
                name, "tokenizer.json", etag_timeout=10
            )  # one question, before the library asks for ten files
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(folder) if is_local else name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {shorten(name)}: neither 'demo', nor a folder with a tokenizer.json, nor a name that the Hub "
            f"gives us. Without a network, download it elsewhere, `tokenizer.save_pretrained(FOLDER)`, and "
            f"give that folder. ({type(error).__name__}: {shorten(str(error), 160)})"
        ) from error
    return tokenizer


def plain_tokenizers(tokenizer: PreTrainedTokenizerFast) -> tuple[Tokenizer, Tokenizer]:
    """Copies of the backend that read special tokens as plain text: for a text that starts, and for one inside.

    Some tokenizers put a space before a text that starts, and none inside of one. A piece between two marks starts for
    most of them; an answer apart from its header never does. Where that makes no difference, both are one copy.
    """
    backend = tokenizer.backend_tokenizer
    parts = {kind: getattr(backend, kind) for kind in ("pre_tokenizer", "normalizer")}
    states = {kind: json.loads(part.__getstate__()) for kind, part in parts.items() if part is not None}
    starting, inside = ({kind: _without_space(state, at) for kind, state in states.items()} for at in (False, True))
    plain = _read_plain(backend, starting if starting != states else {})
    return plain, plain if inside == starting else _read_plain(backend, inside)


def _without_space(state: dict[str, Any], inside: bool) -> dict[str, Any]:
    """The state of a pre-tokenizer or normalizer that puts no space before a text where none belongs."""
    state = copy.deepcopy(state)
    for part in [state, *state.get("pretokenizers", []), *state.get("normalizers", [])]:
        if part.get("type") == "Metaspace" and (inside or part.get("prepend_scheme") == "first"):
            part["prepend_scheme"] = "never"
        if part.get("type") == "ByteLevel" and inside:
            part["add_prefix_space"] = False
        if part.get("type") == "Prepend" and inside:
            part["prepend"] = ""
    return state


def _read_plain(backend: Tokenizer, changed: dict[str, Any]) -> Tokenizer:
    plain = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | changed)) if changed else _with_model(backend)
    plain.no_padding()
    plain.no_truncation()
    plain.encode_special_tokens = True
    return plain


def _with_model(backend: Tokenizer) -> Tokenizer:
    """A copy that shares the vocabulary: reading a large one anew takes as long as loading the tokenizer."""
    shared = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(shared, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    for special, tokens in groupby((added[number] for number in sorted(added)), key=attrgetter("special")):
        (shared.add_special_tokens if special else shared.add_tokens)(list(tokens))
    if shared.get_added_tokens_decoder() != added:
        raise ValueError(
            "the tokenizer's added tokens do not lie right behind its vocabulary, as where its model was exchanged "
            "after they were added: save it with `save_pretrained`, load it again, and check the ids"
        )
    return shared
