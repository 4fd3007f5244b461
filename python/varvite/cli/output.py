"""Where a command writes: one JSON object, or tables and lines for people.

Data goes to stdout and messages to stderr. On a terminal tables are drawn with rich; into a pipe they
are plain columns, never cut, so that they can be searched and need no rich.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

import click

from varvite.cli.progress import Bar, terminal_bar

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Cell", "Column", "Output", "bad", "damaged_row", "dim", "doubtful", "good"]

_STYLES: Final = {"good": "green", "doubtful": "yellow", "bad": "bold red", "dim": "dim", "": ""}


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: Its heading.
        is_number: Whether it is aligned to the right and never wrapped.
    """

    title: str
    is_number: bool = False


class Cell(NamedTuple):
    """A text with a meaning, which a terminal shows as a colour beside the words.

    Attributes:
        text: What is read.
        meaning: `good`, `doubtful`, `bad`, `dim`, or nothing.
    """

    text: str
    meaning: str = ""


def good(text: str) -> Cell:
    """Marks a text as verified or sound."""
    return Cell(text, "good")


def doubtful(text: str) -> Cell:
    """Marks a text as worth a look."""
    return Cell(text, "doubtful")


def bad(text: str) -> Cell:
    """Marks a text as damage or failure."""
    return Cell(text, "bad")


def dim(text: str) -> Cell:
    """Marks a text as of less weight."""
    return Cell(text, "dim")


def damaged_row(number: int, column_count: int) -> list[Cell | str]:
    """Returns the row of a snapshot or receipt that can't be read: its number, and that it is damaged."""
    return [str(number), "?", bad("damaged"), *("" for _ in range(column_count - 3))]


Row = Sequence[Cell | str]


class Output:
    """What the options `--json`, `--quiet` and `--color` make of stdout and stderr.

    Attributes:
        is_json: Whether stdout gets one JSON object and nothing else.
        quiet: Whether messages, progress and all but the essential lines are left out.
    """

    def __init__(
        self, command: str, *, is_json: bool = False, quiet: bool = False, color: str = "auto"
    ) -> None:
        """Made by `with_output` for each command.

        Args:
            command: Name of the command: its schema is `varvite.<command>/1`.
            is_json: As the attribute.
            quiet: As the attribute.
            color: `auto`, `always` or `never`.
        """
        self.command = command
        self.is_json = is_json
        self.quiet = quiet
        self._color = color
        self._console: Console | None = None

    def document(self, **facts: Any) -> None:
        """Writes the JSON object of the command."""
        document = {"schema": f"varvite.{self.command}/1", **facts}
        click.echo(json.dumps(_json_value(document), indent=2, allow_nan=False))

    def line(self, text: str = "", meaning: str = "") -> None:
        """Writes a line of data."""
        if meaning and self._is_colored(sys.stdout):
            self._drawn().print(self._styled(Cell(text, meaning)), soft_wrap=True)
            return
        click.echo(text)

    def message(self, text: str) -> None:
        """Writes a line to stderr, unless it is to be quiet."""
        if not self.quiet:
            click.echo(text, err=True)

    def warning(self, text: str) -> None:
        """Writes what the reader should know and did not ask for to stderr, unless it is to be quiet."""
        self.message(f"warning: {text}")

    def table(self, columns: Sequence[Column], rows: Iterable[Row]) -> None:
        """Writes a table of data."""
        filled = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
        if sys.stdout.isatty() or self._is_colored(sys.stdout):
            self._draw_table(columns, filled)
        else:
            _write_columns(columns, filled)

    def facts(self, pairs: Iterable[tuple[str, Cell | str]]) -> None:
        """Writes names and values, one pair a line."""
        filled = [(name, cell if isinstance(cell, Cell) else Cell(cell)) for name, cell in pairs]
        width = max((len(name) for name, _ in filled), default=0)
        for name, cell in filled:
            self.line(f"{name:<{width}}  {cell.text}", cell.meaning)

    @contextmanager
    def bar(self, description: str, total: Callable[[], int], *, is_bytes: bool = False) -> Iterator[Bar]:
        """Shows progress on stderr while the block runs, where that is a terminal.

        Args:
            description: What is done, as a verb.
            total: Tells where the bar ends; asked only where one is drawn.
            is_bytes: Whether it counts bytes.
        """
        if self.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            yield Bar()
            return
        color = self._is_colored(sys.stderr)
        with terminal_bar(description, total(), is_bytes=is_bytes, color=color) as bar:
            yield bar

    def _is_colored(self, stream: TextIO) -> bool:
        if self._color != "auto":
            return self._color == "always"
        if os.environ.get("NO_COLOR"):
            return False
        if os.environ.get("FORCE_COLOR"):
            return True
        return stream.isatty() and os.environ.get("TERM") != "dumb"

    def _drawn(self) -> Console:
        if self._console is None:
            from rich.console import Console

            colored = self._is_colored(sys.stdout)
            self._console = Console(
                file=sys.stdout,
                force_terminal=True if colored else None,
                no_color=not colored,
                highlight=False,
                markup=False,
                emoji=False,
            )
        return self._console

    def _styled(self, cell: Cell) -> Any:
        from rich.text import Text

        return Text(cell.text, style=_STYLES[cell.meaning])

    def _draw_table(self, columns: Sequence[Column], rows: list[list[Cell]]) -> None:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.is_number else "left",
                no_wrap=column.is_number,
                overflow="fold",
            )
        for row in rows:
            table.add_row(*map(self._styled, row))
        self._drawn().print(table)


def _write_columns(columns: Sequence[Column], rows: list[list[Cell]]) -> None:
    titles = [Cell(column.title) for column in columns]
    widths = [max(len(row[place].text) for row in [titles, *rows]) for place in range(len(columns))]
    for row in [titles, *rows]:
        cells = [
            cell.text.rjust(width) if column.is_number else cell.text.ljust(width)
            for cell, column, width in zip(row, columns, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _json_value(value: Any) -> Any:
    """Gives numbers that JSON lacks the names that protocol buffers give them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return value
