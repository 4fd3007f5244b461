"""How the demo shows itself: bars on a terminal, one line an event elsewhere, tables at the end.

rich is used where it is installed; nothing here needs it.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Shown(Protocol):
    """What a display has to know of a run."""

    name: str
    steps: int
    next_step: int
    restarts: int


class Display:
    """Progress for a log file or a pipe: one line an event."""

    def __init__(self, *, verbose: bool) -> None:
        self.verbose = verbose

    def update(self, runs: Sequence[Shown]) -> None:
        """Show how far the runs are."""

    def note(self, text: str) -> None:
        """Say what just happened."""
        print(text, flush=True)

    def close(self) -> None:
        """Leave the screen as what follows needs it."""


class PlainDisplay(Display):
    """Progress on a terminal without rich: one line that is written over."""

    def update(self, runs: Sequence[Shown]) -> None:
        """Write the line again."""
        texts = []
        for run in runs:
            done = 20 * run.next_step // run.steps
            bar = "#" * done + "." * (20 - done)
            texts.append(f"{run.name} [{bar}] {run.next_step:>4} kills {run.restarts}")
        print("\r" + "  ".join(texts), end="", flush=True)

    def note(self, text: str) -> None:
        """Put the event above the line, if asked for."""
        if self.verbose:
            print(f"\r\x1b[K{text}")

    def close(self) -> None:
        """End the line."""
        print()


class RichDisplay(Display):
    """Progress on a terminal with rich: one bar a run."""

    def __init__(self, *, verbose: bool) -> None:
        super().__init__(verbose=verbose)
        from rich import progress

        self.progress = progress.Progress(
            progress.TextColumn("{task.description:<10}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("killed {task.fields[kills]} times"),
            progress.TimeElapsedColumn(),
        )
        self.tasks: dict[str, Any] = {}
        self.progress.start()

    def update(self, runs: Sequence[Shown]) -> None:
        """Move the bars; after a kill, back."""
        for run in runs:
            if run.name not in self.tasks:
                self.tasks[run.name] = self.progress.add_task(run.name, total=run.steps, kills=0)
            task = self.tasks[run.name]
            self.progress.update(task, completed=run.next_step, kills=run.restarts)

    def note(self, text: str) -> None:
        """Put the event above the bars, if asked for."""
        if self.verbose:
            self.progress.console.print(text, highlight=False)

    def close(self) -> None:
        """Stop drawing; the bars stay."""
        self.progress.stop()


def open_display(*, verbose: bool) -> Display:
    """Return the best display for where the output goes."""
    if not sys.stdout.isatty():
        return Display(verbose=verbose)
    rich = importlib.util.find_spec("rich")
    return RichDisplay(verbose=verbose) if rich else PlainDisplay(verbose=verbose)


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print a table: with rich on a terminal, else as aligned text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich import console, table

        drawing = table.Table(*header)
        for row in rows:
            drawing.add_row(*row)
        console.Console().print(drawing)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
