"""Every class of the error tree: parents, facts, text, pickling, hints."""

from __future__ import annotations

import copy
import errno
import os
import pickle

import pytest

from varvite import errors
from varvite.errors import (
    BY_KIND,
    CheckpointError,
    InvalidInputError,
    NotARepositoryError,
    SnapshotNotFoundError,
    StoreError,
    TensorNotFoundError,
    build,
    hint_for,
)

BUILTIN_PARENTS = {
    "InvalidInput": ValueError,
    "Mismatch": ValueError,
    "Disagreement": ValueError,
    "NotARepository": FileNotFoundError,
    "SnapshotNotFound": FileNotFoundError,
    "TensorNotFound": KeyError,
    "Conflict": Exception,
    "Locked": Exception,
    "Key": PermissionError,
    "Unsupported": NotImplementedError,
    "Corrupt": Exception,
    "Incomplete": Exception,
    "Store": OSError,
    "Poisoned": RuntimeError,
    "Internal": RuntimeError,
}
CLASSES = sorted(set(BY_KIND.values()), key=lambda kind: kind.__name__)


def facts_of(kind: type[CheckpointError]) -> dict[str, object]:
    facts: dict[str, object] = {name: f"the {name}" for name in kind.FACTS}
    if "errno" in facts:
        facts["errno"] = errno.ENOSPC
    return facts


@pytest.mark.parametrize("kind", BY_KIND)
def test_engine_kind_has_a_class_under_the_root_and_a_builtin_parent(kind: str) -> None:
    error = build(kind, "cannot do it: this", {})
    assert isinstance(error, CheckpointError)
    assert isinstance(error, BUILTIN_PARENTS[kind])
    assert type(error).__name__ in errors.__all__


def test_table_names_every_kind_once() -> None:
    assert BY_KIND.keys() == BUILTIN_PARENTS.keys()
    # What a caller does about both is the same: make both sides alike.
    same = {"Mismatch", "Disagreement"}
    assert len(set(BY_KIND.values())) == len(BY_KIND) - len(same) + 1


@pytest.mark.parametrize("kind", CLASSES)
def test_facts_are_documented_attributes_and_none_when_unknown(kind: type[CheckpointError]) -> None:
    error = kind("cannot do it: this", hint="do that", **facts_of(kind))
    for name, value in facts_of(kind).items():
        assert getattr(error, name) == value
        assert f"        {name}:" in (kind.__doc__ or "")
    assert all(getattr(kind("x"), name) is None for name in kind.FACTS)
    assert error.facts == facts_of(kind)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_error_survives_pickling_with_everything(kind: type[CheckpointError], duplicate: object) -> None:
    error = kind("cannot do it: this", hint="do that", **facts_of(kind))
    error.add_note("on rank 3")
    again = duplicate(error)  # type: ignore[operator]
    assert type(again) is kind
    assert str(again) == str(error) == "cannot do it: this\nhint: do that"
    assert again.args == error.args == ("cannot do it: this",)
    assert {name: getattr(again, name) for name in kind.FACTS} == facts_of(kind)
    assert again.__notes__ == ["on rank 3"]


@pytest.mark.parametrize("kind", CLASSES)
def test_text_is_the_message_alone_without_a_hint(kind: type[CheckpointError]) -> None:
    assert str(kind("no tensor `w` in snapshot 3")) == "no tensor `w` in snapshot 3"


def test_message_of_a_missing_tensor_is_not_quoted_as_key_errors_are() -> None:
    assert str(KeyError("no tensor")) == "'no tensor'"
    assert str(TensorNotFoundError("no tensor", name="w")) == "no tensor"


def test_no_repository_is_both_a_missing_snapshot_and_wrong_input() -> None:
    for handler in (SnapshotNotFoundError, InvalidInputError, FileNotFoundError, ValueError):
        with pytest.raises(handler) as caught:
            raise NotARepositoryError("no repository in `/data`: empty", root="/data", reason="empty")
        assert caught.value.root == "/data"
        assert caught.value.errno == errno.ENOENT


def test_store_error_is_read_like_an_os_error() -> None:
    error = StoreError(
        "cannot write `a.pack`", errno=errno.ENOSPC, filename="/data/a.pack", operation="write"
    )
    assert (error.errno, error.strerror, error.filename) == (
        errno.ENOSPC,
        os.strerror(errno.ENOSPC),
        "/data/a.pack",
    )
    assert (error.operation, error.object) == ("write", None)
    assert (StoreError("cannot list").errno, StoreError("cannot list").strerror) == (None, None)
    assert StoreError("x", errno=errno.EIO, strerror="the medium").strerror == "the medium"


def test_errors_are_ordinary_exceptions() -> None:
    # F10: an error that derives from BaseException skips a trainer's `except Exception`.
    assert all(issubclass(kind, Exception) for kind in CLASSES)


@pytest.mark.parametrize(
    ("kind", "facts", "hint"),
    [
        ("TensorNotFound", {"nearest": ["a", "b", "c", "d"]}, "did you mean `a` or `b` or `c`?"),
        ("TensorNotFound", {"nearest": []}, "list the names with `varvite show` or `manager.entries()`"),
        (
            "Mismatch",
            {"field": "dtype"},
            'to round the values on load, pass override={"allow_narrowing": True}',
        ),
        ("Mismatch", {"field": "shape"}, "build the object as it was saved, or load only the names that fit"),
        ("Locked", {}, "wait until the other process ends, or open with read_only=True"),
        (
            "Locked",
            {"holder": f"process {os.getpid()} on {os.uname().nodename} since 5 (unix milliseconds)"},
            "this process has a manager open here: use or close that one, or open with read_only=True",
        ),
        (
            "Store",
            {"errno": errno.EROFS},
            "the file system is read-only: choose another folder, or pass read_only=True",
        ),
        ("Store", {"errno": None}, None),
        ("Store", {}, None),
        ("InvalidInput", {"what": "x"}, None),
    ],
)
def test_hint_says_what_to_do(kind: str, facts: dict[str, object], hint: str | None) -> None:
    assert hint_for(kind, facts) == hint
    assert build(kind, "m", facts).hint == hint


def test_every_kind_but_wrong_input_and_unknown_store_errors_has_a_hint() -> None:
    without = {kind for kind in BY_KIND if hint_for(kind, {}) is None}
    assert without == {"InvalidInput", "Store"}
    assert hint_for("no such kind", {}) is None
