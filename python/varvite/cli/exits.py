"""Exit codes, and errors as text on stderr."""

from __future__ import annotations

import errno
from typing import Final

import click

from varvite.errors import (
    CheckpointError,
    CorruptionError,
    InvalidInputError,
    NotARepositoryError,
    RepositoryLockedError,
    SnapshotNotFoundError,
    StoreError,
    TensorNotFoundError,
)

__all__ = [
    "FAILED",
    "FINDINGS",
    "INTERRUPTED",
    "LOCKED",
    "NOT_FOUND",
    "NO_REPOSITORY",
    "NO_SPACE",
    "OK",
    "PIPE_CLOSED",
    "USAGE",
    "exit_code",
    "show_error",
]

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
FINDINGS: Final = 3
NOT_FOUND: Final = 4
NO_REPOSITORY: Final = 10
LOCKED: Final = 11
NO_SPACE: Final = 13
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

# The first class that fits decides, so a class stands before its parents.
_BY_CLASS: Final = (
    (NotARepositoryError, NO_REPOSITORY),
    (SnapshotNotFoundError, NOT_FOUND),
    (TensorNotFoundError, NOT_FOUND),
    (RepositoryLockedError, LOCKED),
    (CorruptionError, FINDINGS),
    (InvalidInputError, USAGE),
)


def exit_code(error: CheckpointError) -> int:
    """Returns the code that a process ends with after an error.

    Example:
        >>> exit_code(CorruptionError("corrupt digest: 7"))
        3
    """
    if isinstance(error, StoreError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NO_SPACE
    return next((code for kind, code in _BY_CLASS if isinstance(error, kind)), FAILED)


def show_error(message: str, hint: str | None = None) -> None:
    """Writes an error, and what to do about it, to stderr."""
    click.echo(f"error: {message}", err=True)
    if hint is not None:
        click.echo(f"hint: {hint}", err=True)
