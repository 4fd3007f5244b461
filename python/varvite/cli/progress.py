"""Progress bars on stderr; rich is imported only where one is drawn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Bar", "bytes_read", "terminal_bar"]

_POLL_SECONDS: Final = 0.1


class Bar:
    """A bar that nobody sees: what a command drives where there is no terminal."""

    def advance(self, amount: int) -> None:
        """Moves the bar on."""

    def reach(self, amount: int) -> None:
        """Moves the bar to a place."""

    @contextmanager
    def following(self, read: Callable[[], int], total: Callable[[], int] | None = None) -> Iterator[None]:
        """Moves the bar to what `read` returns, again and again while the block runs.

        Args:
            read: Tells how far it is.
            total: Tells where it ends, where that becomes known only on the way.
        """
        del read, total
        yield


class _TerminalBar(Bar):
    def __init__(self, progress: Progress, task: TaskID, total: int) -> None:
        self._progress = progress
        self._task = task
        self._total = total

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)

    def reach(self, amount: int) -> None:
        self._progress.update(self._task, completed=min(amount, self._total))

    def _aim_at(self, total: int) -> None:
        # rich forgets the rate at each change, so small ones are left out.
        if abs(total - self._total) > self._total // 50:
            self._total = total
            self._progress.update(self._task, total=total)

    @contextmanager
    def following(self, read: Callable[[], int], total: Callable[[], int] | None = None) -> Iterator[None]:
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(_POLL_SECONDS):
                if total is not None:
                    self._aim_at(total())
                self.reach(read())

        thread = threading.Thread(target=follow, name="varvite-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def terminal_bar(description: str, total: int, *, is_bytes: bool, color: bool) -> Iterator[Bar]:
    """Draws a bar on stderr while the block runs, and removes it at the end; bytes with their rate."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if is_bytes else [MofNCompleteColumn()]
    )
    console = Console(stderr=True, no_color=not color, markup=False, emoji=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _TerminalBar(progress, progress.add_task(description, total=total), total)


def bytes_read() -> int:
    """Returns the bytes that this process has asked the kernel to read since it began.

    The engine reads packs with `pread` while it holds no Python lock; the kernel's count is how far it is.
    """
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text("ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "rchar":
                return int(value)
    return 0
