"""The plain values of a snapshot's structure by name, from its typed JSON alone.

Nothing is decoded to Python objects: a value of torch or NumPy would need that library.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Final

from varvite import names
from varvite.objects import read_tree
from varvite.plain import Json, canonical_text, check_decode_depth
from varvite.state import from_text

__all__ = ["kinds_of", "plain_json", "plain_values", "split_name", "value_text"]

_DICTS: Final = frozenset(["dict", "ordered_dict", "counter", "state_dict"])
_OPENING: Final = "([{"
_CLOSING: Final = ")]}"


def split_name(name: str) -> list[str]:
    """Splits a name into its parts, at the dots outside quotes and brackets.

    Example:
        >>> split_name('model."a.b".("t", 1.5).weight')
        ['model', '"a.b"', '("t", 1.5)', 'weight']
    """
    if not any(mark in name for mark in '"([{'):
        return name.split(".")
    parts, start, depth, quoted, escaped = [], 0, 0, False, False
    for place, character in enumerate(name):
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted, escaped = True, False
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "." and depth == 0:
            parts.append(name[start:place])
            start = place + 1
    return [*parts, name[start:]]


def kinds_of(structure: str) -> dict[str, str]:
    """Returns what each object was, by its keyword: `module`, `optimizer`, `stateful` or `nest`.

    Raises:
        CorruptionError: No save wrote this structure.
    """
    _, objects = read_tree(structure)
    return {keyword: saved.kind for keyword, saved in objects.items()}


def plain_values(structure: str, rank_structures: dict[int, str]) -> dict[str, Json]:
    """Returns everything but tensors and arrays: encoded values by name.

    A list or tuple of plain values is one value.

    Args:
        structure: The structure of the snapshot, as text.
        rank_structures: Those of each rank.

    Raises:
        CorruptionError: No save wrote one of them.
    """
    state, objects = read_tree(structure)
    found: dict[str, Json] = {}
    if state is not None:
        found.update(_values(state, "", 0))
    for keyword, saved in objects.items():
        found.update(_values(saved.structure, names.show_part(keyword), 0))
    for rank, text in rank_structures.items():
        local = _values(from_text(text), "", 0)
        found.update((f"{name} (rank {rank})", value) for name, value in local)
    return found


def _values(node: Json, name: str, depth: int) -> Iterator[tuple[str, Json]]:
    check_decode_depth(depth, "structure")
    start = f"{name}." if name else ""
    tag, payload = next(iter(node.items())) if isinstance(node, dict) and len(node) == 1 else ("", node)
    if tag in ("tensor", "ndarray"):
        return
    if tag in _DICTS and isinstance(payload, list) and payload:
        for pair in payload:
            if isinstance(pair, list) and len(pair) == 2:
                yield from _values(pair[1], start + _key_text(pair[0], tag), depth + 1)
    elif tag in ("", "tuple") and isinstance(payload, list) and any(map(_is_nested, payload)):
        for index, item in enumerate(payload):
            yield from _values(item, f"{start}{index}", depth + 1)
    else:
        yield name or names.ROOT_NAME, node


def _is_nested(node: Json) -> bool:
    """True for what has names below it: a dict, a tensor, or a list that holds such."""
    if isinstance(node, list):
        return any(isinstance(item, (list, dict)) for item in node)
    return isinstance(node, dict) and (not _DICTS.isdisjoint(node) or "tensor" in node or "ndarray" in node)


def _key_text(key: Json, tag: str) -> str:
    if isinstance(key, str):
        return ".".join(map(names.show_part, key.split("."))) if tag == "state_dict" else names.show_part(key)
    return value_text(key)


def value_text(node: Json, depth: int = 0) -> str:
    """Returns an encoded value, which lies in `depth` containers, as a line for people.

    Example:
        >>> value_text({"tuple": [0.9, None]}), value_text({"dtype": "float32"}), value_text("a")
        ('(0.9, None)', 'float32', '"a"')
    """
    check_decode_depth(depth, "structure")
    if isinstance(node, list):
        return f"[{', '.join(value_text(item, depth + 1) for item in node)}]"
    if isinstance(node, dict):
        return _tagged_text(node, depth)
    if isinstance(node, str):
        return json.dumps(node, ensure_ascii=False)
    return str(node)


def _tagged_text(node: dict[str, Json], depth: int) -> str:
    tag, payload = next(iter(node.items()), ("dict", []))
    if isinstance(payload, list):
        items = ", ".join(value_text(item, depth + 1) for item in payload)
        brackets = {"tuple": f"({items})", "set": f"{{{items}}}"}
        return brackets.get(tag, f"{tag}({items})")
    if tag == "bytes" and isinstance(payload, str):
        return f"{_length_bytes(payload)} bytes"
    if tag == "float" and isinstance(payload, str):
        return payload.partition(":")[0]
    return payload if isinstance(payload, str) else canonical_text(node)


def _length_bytes(text: str) -> int:
    try:
        return len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return 0


def plain_json(node: Json, depth: int = 0) -> Json:
    """Returns an encoded value, which lies in `depth` containers, as the JSON that looks most like it.

    Dicts become objects and tuples lists.

    What JSON has nothing for stays as it is encoded, under its tag.

    Example:
        >>> plain_json({"dict": [["a", {"tuple": [1, 2]}], ["b", {"dtype": "float32"}]]})
        {'a': [1, 2], 'b': {'dtype': 'float32'}}
    """
    check_decode_depth(depth, "structure")
    if isinstance(node, list):
        return [plain_json(item, depth + 1) for item in node]
    if not isinstance(node, dict) or len(node) != 1:
        return node
    tag, payload = next(iter(node.items()))
    if tag == "tuple" and isinstance(payload, list):
        return [plain_json(item, depth + 1) for item in payload]
    if tag in _DICTS and isinstance(payload, list):
        pairs = [pair for pair in payload if isinstance(pair, list) and len(pair) == 2]
        return {
            key if isinstance(key, str) else value_text(key): plain_json(value, depth + 1)
            for key, value in pairs
        }
    return node
