"""The command line: looks at repositories, checks them, and decides what stays.

Data goes to stdout, messages to stderr; with `--json` stdout holds one object that names its schema.
No command imports torch; numpy is imported by `diff` where tensors differ, rich where something is drawn
on a terminal.
"""

from __future__ import annotations

import io
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the command line of this process, and ends it with the exit code of the contract."""
    from varvite.cli.application import application

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the console can't show must not end the command.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(application.main(prog_name="varvite", standalone_mode=False))
