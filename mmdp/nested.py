"""The tensors of a batch, however it is nested.

Adds: `map_tensors`, the same batch with a function applied to each tensor; `tensors_of`, all of them.
Leaves out: what is done to a tensor (`device.py`).

A batch may be made of dicts and other mappings, lists, tuples, named tuples, dataclasses (our records among them), and
objects that hold a tensor among their attributes. All else (text, None, numbers, arrays of NumPy) stays what it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], whole: Callable[[Any], Any] | None = None
) -> Any:
    """The same nesting, each tensor replaced by what the function makes of it.

    Nothing given is written to: what holds a new tensor is copied, and what holds none is the very same object.

    Args:
        value: a batch, or a part of one.
        function: of a tensor.
        whole: of a record, that is a named tuple, a dataclass or an object with tensors. What it gives is taken in
            place of the record; with None, the record's parts are mapped like all else.

    >>> map_tensors({"ids": (torch.tensor(3), "text")}, lambda tensor: tensor + 1)
    {'ids': (tensor(4), 'text')}
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    names, parts = _parts(value)
    is_record = bool(names) and not isinstance(value, Mapping)
    if whole is not None and is_record and (taken := whole(value)) is not None:
        return taken
    mapped = [map_tensors(part, function, whole) for part in parts]
    if all(new is old for new, old in zip(mapped, parts, strict=True)):
        return value
    return _rebuilt(value, names, mapped)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor, in reading order.

    >>> [int(tensor) for tensor in tensors_of([torch.tensor(3), {"a": torch.tensor(4)}, None])]
    [3, 4]
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    for part in _parts(value)[1]:
        yield from tensors_of(part)


def _parts(value: Any) -> tuple[list[Any], list[Any]]:
    """Keys or names, where parts have such, and the parts; none where a value is no container."""
    if isinstance(value, Mapping):
        return list(value.keys()), list(value.values())
    if isinstance(value, (list, tuple)):
        return list(getattr(value, "_fields", ())), list(value)
    names = _attributes(value)
    return names, [getattr(value, name) for name in names]


def _attributes(value: Any) -> list[str]:
    if isinstance(value, type):
        return []
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    members = getattr(value, "__dict__", {})
    # Any object has attributes, a model and a tokenizer too: only one with a tensor at hand is a part of the batch.
    return list(members) if any(isinstance(member, torch.Tensor) for member in members.values()) else []


def _rebuilt(value: Any, names: list[Any], parts: Iterable[Any]) -> Any:
    if isinstance(value, tuple):
        make = getattr(value, "_make", type(value))  # `_make`: of a named tuple
        return make(parts)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return dict(zip(names, parts, strict=True))
    clone = copy.copy(value)
    if isinstance(value, list):
        clone[:] = parts
    elif isinstance(value, Mapping):
        for name, part in zip(names, parts, strict=True):
            clone[name] = part
    else:
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(clone, name, part)  # of a frozen dataclass too
    return clone
