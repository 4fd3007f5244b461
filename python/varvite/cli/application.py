"""The group of all commands, and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from varvite.cli import exits
from varvite.errors import CheckpointError

__all__ = ["application"]

_COMMANDS: Final = {
    "ls": ("listing", "List snapshots."),
    "show": ("showing", "Show one snapshot and its tensors."),
    "diff": ("comparing", "Compare two snapshots."),
    "verify": ("checking", "Check bytes against their digests."),
    "receipts": ("resuming", "List what was restored, and how it went on."),
    "du": ("usage", "Show what takes the space."),
    "prune": ("retaining", "Remove what no policy keeps."),
    "merge": ("merging", "Rewrite old packs, so that they can go."),
    "pin": ("retaining", "Name a snapshot, and so keep it."),
    "unpin": ("retaining", "Take a name away again."),
    "push": ("moving", "Copy to a bucket what it lacks."),
    "pull": ("moving", "Copy snapshots of a bucket to a folder."),
    "doctor": ("examining", "Probe a folder or a bucket, and the repository in it."),
}
"""File and summary of each command, in the order in which a reader needs them."""


class _Application(click.Group):
    """A group whose commands return exit codes and whose errors have one form."""

    def main(  # type: ignore[override]  # click overloads it by the mode
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Runs a command line; ends the process with its exit code, or returns it."""
        run = super().main
        code = _guarded(lambda: run(args, standalone_mode=False, **extra))
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command of a parsed line."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader has seen enough. What is still buffered must not raise again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return exits.PIPE_CLOSED

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names the commands."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the file of a command: the one that runs, and no other."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"varvite.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the summaries without an import of the commands."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


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


@click.group(
    "varvite",
    cls=_Application,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="varvite", prog_name="varvite")
def application() -> None:
    """Look at repositories of training snapshots, check them, and decide what stays.

    RUN is the folder of a repository, or the url of a bucket, such as s3://bucket/run. REF names a
    snapshot: a step (`1000`), `latest`, `latest~2`, `healthy`, `best:METRIC`, `step:N`, `seq:N` or
    `tag:NAME`.
    Credentials of a bucket come from where its own tools find them, or from `--option`.

    \b
    Exit codes: 0 ok, 1 failed, 2 usage, 3 findings (damage, differences),
    4 not found, 10 no repository, 11 locked, 13 no space.
    """  # noqa: D301 - the backspace keeps click from filling the paragraph
