"""The group of all commands, and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from varvite.cli import exits
from varvite.cli.comparing import diff
from varvite.cli.checking import verify
from varvite.cli.examining import doctor
from varvite.cli.listing import ls
from varvite.cli.retaining import pin, prune, unpin
from varvite.cli.showing import show
from varvite.cli.usage import du
from varvite.errors import CheckpointError

__all__ = ["application"]


class _Application(click.Group):
    """A group whose commands return exit codes and whose errors have one form."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command line; ends the process with its exit code unless `standalone_mode` is off."""
        run = super().main
        code = _guarded(lambda: run(*args, standalone_mode=False, **extra))
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, context: click.Context) -> Any:
        """Runs the command of a parsed line."""
        try:
            return super().invoke(context)
        except BrokenPipeError:
            # The reader has seen enough. What is still buffered must not raise again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return exits.PIPE_CLOSED

    def list_commands(self, context: click.Context) -> list[str]:
        """Names the commands in the order they were added, which is the order they are needed in."""
        return list(self.commands)


def _guarded(run: Callable[[], Any]) -> int:
    try:
        code = run()
    except click.Abort:
        return exits.INTERRUPTED
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "varvite"
        exits.show_error(_sentence(error.format_message()), f"`{path} --help` shows what is legal")
        return exits.USAGE
    except click.ClickException as error:
        exits.show_error(_sentence(error.format_message()))
        return error.exit_code
    except CheckpointError as error:
        exits.show_error(error.message, error.hint)
        return exits.exit_code(error)
    except OSError as error:
        exits.show_error(f"cannot use `{error.filename}`: {error.strerror}" if error.filename else str(error))
        return exits.FAILED
    return code if isinstance(code, int) else exits.OK


def _sentence(text: str) -> str:
    """Gives a message of click the form of ours: it starts in lower case and has no full stop."""
    first, _, rest = text.strip().removesuffix(".").partition(" ")
    return f"{first if first.isupper() else first.lower()} {rest}".strip()


@click.group(cls=_Application, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="varvite", prog_name="varvite")
def application() -> None:
    """Looks at repositories of training snapshots, checks them, and decides what stays.

    RUN is the folder of a repository. REF names a snapshot: a step (`1000`), `latest`, `latest~2`,
    `healthy`, `best:METRIC`, `step:N`, `seq:N` or `tag:NAME`.

    \b
    Exit codes: 0 ok, 1 failed, 2 usage, 3 findings (damage, differences),
    4 not found, 10 no repository, 11 locked, 13 no space.
    """


for _command in (ls, show, diff, verify, du, prune, pin, unpin, doctor):
    application.add_command(_command)
