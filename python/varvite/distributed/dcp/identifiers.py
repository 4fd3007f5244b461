"""What `checkpoint_id` means to a repository: a step to save, a snapshot to load."""

from __future__ import annotations

import os
import re
from pathlib import Path

from varvite.errors import InvalidInputError
from varvite.facts import reference_text

__all__ = ["is_reference", "is_step", "reference_of", "step_of"]

_STEP = re.compile(r"[^0-9]*([0-9]+)")
_REFERENCE = re.compile(r"latest(~[0-9]+)?|healthy|(best|step|seq|tag):.+")
_LEGAL = "a step, such as 1000, `step-1000` or `PATH/step-1000` with the path of the repository"


def is_step(text: str) -> bool:
    """True for a text that `step_of` takes in any repository.

    Example:
        >>> is_step("step-7"), is_step("2026-11-30"), is_step("/runs/a/step-7")
        (True, False, False)
    """
    return os.sep not in text and _STEP.fullmatch(text) is not None


def is_reference(text: str) -> bool:
    """True for a text that `reference_of` takes in any repository.

    Example:
        >>> is_reference("latest~2"), is_reference("7"), is_reference("newest")
        (True, True, False)
    """
    return is_step(text) or _REFERENCE.fullmatch(text) is not None


def step_of(checkpoint_id: str | os.PathLike[str] | int, path: Path) -> int | None:
    """Returns the step that a `checkpoint_id` stands for.

    Args:
        checkpoint_id: A number; a text that ends with the only number in it; or such a text in the folder of
            the repository.
        path: The repository.

    Returns:
        The step; `None` where the id is the repository itself.

    Raises:
        InvalidInputError: It is something else.

    Example:
        >>> [step_of(text, Path("/runs/a")) for text in (7, "step-1000", "/runs/a/step_20", "/runs/a")]
        [7, 1000, 20, None]
    """
    name = _name_in(checkpoint_id, path)
    if name is None:
        return None
    found = _STEP.fullmatch(name)
    if found is None:
        raise _refuse(checkpoint_id, _LEGAL)
    return int(found[1])


def reference_of(checkpoint_id: str | os.PathLike[str] | int, path: Path) -> str | None:
    """Returns the reference that a `checkpoint_id` stands for.

    Args:
        checkpoint_id: As for `step_of`, or a reference such as `latest`, `best:loss` or `tag:NAME`.
        path: The repository.

    Returns:
        The reference; `None` where the id is the repository itself.

    Raises:
        InvalidInputError: It is something else.

    Example:
        >>> reference_of("step-1000", Path("/runs/a")), reference_of("latest~1", Path("/runs/a"))
        ('step:1000', 'latest~1')
    """
    if isinstance(checkpoint_id, str) and _REFERENCE.fullmatch(checkpoint_id):
        return checkpoint_id
    name = _name_in(checkpoint_id, path)
    if name is None:
        return None
    found = _STEP.fullmatch(name)
    if found is None:
        raise _refuse(checkpoint_id, f"{_LEGAL}, or a reference, such as `latest`")
    return reference_text(int(found[1]))


def _name_in(checkpoint_id: str | os.PathLike[str] | int, path: Path) -> str | None:
    """Returns what an id names in the repository; `None` for the repository itself."""
    if isinstance(checkpoint_id, int) and not isinstance(checkpoint_id, bool):
        return str(checkpoint_id)
    if not isinstance(checkpoint_id, str | os.PathLike):
        raise _refuse(checkpoint_id, _LEGAL)
    text = os.fspath(checkpoint_id)
    given = Path(text)
    if os.sep not in text and given.absolute() != path:
        return text
    if given.absolute() == path:
        return None
    if given.parent.absolute() != path:
        raise _refuse(checkpoint_id, f"in the repository that storage was made for, `{path}`")
    return given.name


def _refuse(checkpoint_id: object, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"invalid checkpoint_id `{checkpoint_id}`: must be {reason}",
        what="checkpoint_id",
        reason=f"must be {reason}",
    )
