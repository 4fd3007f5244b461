"""The command line: `varvite ls`, `show`, `diff`, `verify`, `du`, `prune`, `pin`, `unpin`, `doctor`.

Data goes to stdout, messages to stderr; with `--json` stdout holds one object that names its schema.
No command imports torch; numpy is imported by `diff` where tensors differ, rich where something is drawn
on a terminal.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the command line of this process, and ends it with the exit code of the contract."""
    from varvite.cli.application import application

    application.main(prog_name="varvite")
