r"""Names of leaves: the path in the saved nest, as text that no other path has.

Parts are joined by dots. A string stands bare where nothing in it could be taken for something else,
and is quoted as in JSON otherwise; parts that are not strings have a form no bare string can have, or,
for numbers, `True` and `None`, make a string beside them in the same dict be quoted. Brackets and
quotes balance in every form, so a name can be split back in one way only.

Example:
    >>> show_path(("model", "layers", 0, "a.b", ("t", 1), 1.5))
    'model.layers.0."a.b".("t", 1).float(1.5)'
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from varvite.plain import (
    INT_LIMIT,
    UnsavableError,
    canonical_text,
    encode_hashable,
    equals_itself,
    open_tag,
    short,
)

__all__ = ["ROOT_NAME", "PathPart", "join", "show_keys", "show_part", "show_path", "state_dict_names"]

PathPart = Hashable
"""A dict key, or the index of a list or tuple."""

ROOT_NAME = "."
"""Name of a leaf that is the whole state; no path of parts is shown so."""

_SIMPLE_PATH = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_NOT_BARE = re.compile(r"[.\"'()\[\]{}`\\]")


def show_part(part: object) -> str:
    """Returns the form of one part that has no part beside it.

    Raises:
        UnsavableError: The part is a key that can't be saved.

    Example:
        >>> [show_part(part) for part in ("w", "", " w", 7, None, b"w")]
        ['w', '""', '" w"', '7', 'None', 'bytes("dw==")']
    """
    if type(part) is str:
        return part if _is_bare(part) else _quote(part)
    return _show_typed(part)


def show_keys(keys: Iterable[object]) -> list[str]:
    """Returns the forms of all keys of one dict, each another.

    Raises:
        UnsavableError: A key can't be saved.

    Example:
        >>> show_keys(["a", 7, "7", "8"])
        ['a', '7', '"7"', '8']
    """
    keys = list(keys)
    typed = {_show_typed(key) for key in keys if type(key) is not str}
    shown = []
    for key in keys:
        text = show_part(key)
        shown.append(_quote(key) if type(key) is str and text in typed else text)
    return shown


def show_path(path: Iterable[object]) -> str:
    """Returns the name of a path whose parts have no typed parts beside them."""
    return join(*map(show_part, path)) or ROOT_NAME


def join(*shown: str) -> str:
    """Joins forms of parts, leaving out an empty one: the name of the root on the way down."""
    return ".".join(text for text in shown if text)


def state_dict_names(mapping: Mapping[str, Any], is_container: Any) -> list[str]:
    """Returns the names of the keys of a module's state dict, in which a dot separates parts.

    A key of a container beside longer keys that start with it, such as `a` beside `a.b`, would give
    two leaves one name; it is shown as `key("a")`.

    Args:
        mapping: The state dict.
        is_container: Tells whether a value may hold leaves below it.

    Raises:
        UnsavableError: A key is not a string.

    Example:
        >>> state_dict_names({"layers.0.weight": 1, "odd..key": 2}, lambda value: False)
        ['layers.0.weight', 'odd."".key']
    """
    names = []
    containers = []
    for position, (key, value) in enumerate(mapping.items()):
        if type(key) is not str:
            raise UnsavableError(f"key `{short(key)}` of a state dict is not a string")
        if _SIMPLE_PATH.fullmatch(key):
            names.append(key)
        else:
            names.append(".".join(show_part(part) for part in key.split(".")))
        if is_container(value):
            containers.append((position, key))
    if containers:
        starts = _starts(mapping)
        for position, key in containers:
            if key in starts:
                names[position] = f"key({_quote(key)})"
    return names


def _starts(keys: Iterable[str]) -> set[str]:
    """Returns every key cut before each of its dots."""
    starts: set[str] = set()
    for key in keys:
        end = key.rfind(".")
        while end >= 0 and key[:end] not in starts:
            starts.add(key[:end])
            end = key.rfind(".", 0, end)
    return starts


def _is_bare(text: str) -> bool:
    if _SIMPLE_PATH.fullmatch(text):
        return "." not in text
    return (
        text != ""
        and text.isprintable()
        and text[0] != " "
        and text[-1] != " "
        and not _NOT_BARE.search(text)
    )


def _quote(text: str) -> str:
    encode_hashable(text)  # refuses what has no UTF-8 form
    return json.dumps(text, ensure_ascii=False)


def _show_typed(part: Any) -> str:
    """Returns the form of a part that is not a string, or of one inside a tuple."""
    kind = type(part)
    if kind is str:
        return _quote(str(part))
    if part is None or kind is bool or (kind is int and _is_short(part)):
        return str(part)
    if kind is float:
        return f"float({_equal_to_itself(part)!r})"
    if kind is tuple:
        items = [_show_typed(item) for item in part]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    tag, payload = open_tag(encode_hashable(_equal_to_itself(part)), "key")
    return f"{tag}({canonical_text(payload)})"


def _equal_to_itself(part: object) -> object:
    if not equals_itself(part):
        raise UnsavableError("a key that does not equal itself, such as NaN, can't be looked up")
    return part


def _is_short(part: object) -> bool:
    return isinstance(part, int) and -INT_LIMIT <= part < INT_LIMIT
