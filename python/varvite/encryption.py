"""Where the key of an encrypted repository comes from; it is asked for when a repository is opened."""

from __future__ import annotations

import base64
import binascii
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from varvite.errors import InvalidInputError, build

__all__ = ["KEY_VARIABLE", "KeySource", "read_encryption"]

KEY_VARIABLE = "VARVITE_KEY"
_COMMAND_VARIABLE = "VARVITE_KEY_COMMAND"
_KEY_BYTES = 32
_COMMAND_SECONDS = 60
_LEGAL = 'True, a dict with one of `env`, `command` and `key`, as {"command": ["pass", "show", "k"]}, or None'


@dataclass(frozen=True)
class KeySource:
    """Where a key comes from.

    Attributes:
        is_required: Whether a new repository is made an encrypted one, and one that is not is refused.
        variable: The variable of the environment that holds the key, if one was named.
        command: The command whose output is the key, if one was given.
        key: The key, if it was given.
    """

    is_required: bool = False
    variable: str | None = None
    command: tuple[str, ...] | None = None
    key: bytes | None = field(default=None, repr=False)

    def fetch(self, root: str) -> bytes | None:
        """Gets the key; `None` where nothing was said of one, and the environment has none.

        Args:
            root: The repository it is for, for messages.

        Raises:
            EncryptionKeyError: There is none where one was said to be, or the command fails.
            InvalidInputError: What is there is no key. No message shows any of it.
        """
        if self.key is not None:
            return self.key
        if self.command is not None:
            return _from_command(self.command, root)
        variable = self.variable or KEY_VARIABLE
        if os.environ.get(variable):
            return _parse(os.environ[variable], f"the variable `{variable}`")
        if self.variable is None and os.environ.get(_COMMAND_VARIABLE):
            return _from_command(tuple(shlex.split(os.environ[_COMMAND_VARIABLE])), root)
        if self.is_required:
            raise _unavailable(root, f"the variable `{variable}` is not set")
        return None


def read_encryption(value: Any) -> KeySource:
    """Checks the argument `encryption` of a manager.

    Raises:
        InvalidInputError: It is not legal; the message never shows it.

    Example:
        >>> read_encryption({"command": ["pass", "show", "run"]}).command
        ('pass', 'show', 'run')
        >>> read_encryption(None)
        KeySource(is_required=False, variable=None, command=None)
    """
    if value is None or value is False:
        return KeySource()
    if value is True:
        return KeySource(is_required=True)
    if isinstance(value, KeySource):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise _refuse(_LEGAL)
    [(name, given)] = value.items()
    if name == "env" and isinstance(given, str) and given:
        return KeySource(is_required=True, variable=given)
    is_command = isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given) > 0
    if name == "command" and is_command and all(isinstance(word, str) for word in given):
        return KeySource(is_required=True, command=tuple(given))
    if name == "key" and isinstance(given, bytes) and len(given) == _KEY_BYTES:
        return KeySource(is_required=True, key=given)
    forms = {
        "env": "the name of a variable",
        "command": "a list of words, the first of them the program",
        "key": f"{_KEY_BYTES} bytes",
    }
    raise _refuse(f"with `{name}` {forms[name]}" if name in forms else _LEGAL)


def _refuse(reason: str) -> InvalidInputError:
    message = f"invalid encryption: must be {reason}"
    return InvalidInputError(message, what="encryption", reason=f"must be {reason}")


def _parse(text: str, source: str) -> bytes:
    """Reads a key as hex digits or base64."""
    text = text.strip()
    key = b""
    try:
        if len(text) == 2 * _KEY_BYTES:
            key = bytes.fromhex(text)
        else:
            padded = text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)
            key = base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)
    except (ValueError, binascii.Error):
        pass
    if len(key) != _KEY_BYTES:
        reason = f"{source} must hold {_KEY_BYTES} bytes as 64 hex digits or base64"
        raise InvalidInputError(
            f"invalid encryption key: {reason}",
            hint='make one with `python -c "import secrets; print(secrets.token_hex(32))"`',
            what="encryption key",
            reason=reason,
        )
    return key


def _from_command(command: tuple[str, ...], root: str) -> bytes:
    """Runs a command, without a shell, and reads the key from its output, which nothing else gets to see."""
    program = command[0] if command else ""
    try:
        done = subprocess.run(  # noqa: S603 - the caller's own command
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise _unavailable(root, f"`{program}` did not end within {_COMMAND_SECONDS} seconds") from None
    except (OSError, IndexError) as error:
        raise _unavailable(root, f"`{program}` can't be run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = f": {said[-1]}" if said else ""
        raise _unavailable(root, f"`{program}` ended with status {done.returncode}{why}")
    return _parse(done.stdout.decode(errors="replace"), f"the output of `{program}`")


def _unavailable(root: str, reason: str) -> Exception:
    message = f"cannot open `{root}`: there is no encryption key: {reason}"
    return build("Key", message, {"root": root, "problem": "unavailable", "reason": reason})
