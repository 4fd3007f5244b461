"""Metrics in a file of one JSON object a line, which any tool reads and a killed run can go on with.

A line is written in one call, so a process that is killed leaves whole lines, and at most one torn one at
the end. Lines go to the page cache: only a power cut takes those that were written since `close`.

Each step stands in the file as often as it was logged by the run as it is: what a resumed run does again,
or left behind by going back, is cut off when the file is appended to.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from varvite.errors import CorruptionError, StoreError
from varvite.training.tracking.base import check_step, number, refuse, unknown_mode

if TYPE_CHECKING:
    from varvite.training.identity import RunIdentity, TrackerRecord

__all__ = ["JsonLinesTracker", "read_rows"]


class JsonLinesTracker:
    """Appends metrics to a file, one JSON object a line: `{"step": 3, "loss": 2.5}`.

    NaN and infinities, which JSON does not have, are the texts `nan`, `inf` and `-inf`; `read_rows` gives
    them back as numbers.

    Args:
        path: The file.
        mode: `new`: a file that lies there is moved aside, to `metrics.1.jsonl` and so on, never
            overwritten. `append`: lines of `next_step` and later are cut off, and a torn last one.
            `fork`: begins with the lines of `parent` before `next_step`.
        next_step: First step that will be logged.
        parent: The file to fork from.

    Raises:
        InvalidInputError: An argument is not legal, or there is no file to append to or to fork from.
        CorruptionError: A line before the last one is none of this tracker.
        StoreError: The file can't be read or written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> tracker = JsonLinesTracker(path)
        >>> for step in range(3):
        ...     tracker.log(step, {"loss": 3.0 - step})
        >>> tracker.close()
        >>> JsonLinesTracker(path, mode="append", next_step=2).close()
        >>> list(read_rows(path))
        [{'step': 0, 'loss': 3.0}, {'step': 1, 'loss': 2.0}]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "new",
        next_step: int = 0,
        parent: str | os.PathLike[str] | None = None,
    ) -> None:
        """Opens the file, as the mode says."""
        self._path = Path(path)
        self._last_step: int | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if mode == "new":
                _move_aside(self._path)
            elif mode == "append":
                _must_be_there(self._path, "append to")
                self._last_step = _keep_before(self._path, self._path, next_step)
            elif mode == "fork":
                if parent is None:
                    raise refuse("parent", parent, "a fork needs the file to branch off from")
                _must_be_there(Path(parent), "fork from")
                if Path(parent).absolute() == self._path.absolute():
                    raise refuse("path", path, "it is the file to fork from")
                _move_aside(self._path)
                self._last_step = _keep_before(Path(parent), self._path, next_step)
            else:
                raise unknown_mode(mode)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            self._file: int | None = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise _store_error("open", self._path, error) from error

    @classmethod
    def open(
        cls,
        identity: RunIdentity,  # noqa: ARG003 - other trackers need it
        mode: str,
        record: TrackerRecord | None,
        next_step: int,
        *,
        path: str | os.PathLike[str],
    ) -> Self:
        """Opens the tracker of a run; `open_tracker` calls it."""
        parent = record.get("path") if record is not None and mode == "fork" else None
        return cls(path, mode=mode, next_step=next_step, parent=parent)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line.

        Raises:
            InvalidInputError: The step or a metric is not legal, a metric is called `step`, or the tracker
                is closed.
            StoreError: The line can't be written.
        """
        step = check_step(step)
        if self._file is None:
            raise refuse("path", self._path, "the tracker is closed")
        if "step" in metrics:
            raise refuse("metric", "step", "the step itself has this name")
        row = {"step": step, **{name: _shown(number(name, value)) for name, value in metrics.items()}}
        line = json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise _store_error("write", self._path, error) from error
        if written != len(line):
            raise StoreError(
                f"cannot write a whole line of `{self._path}`: wrote {written} of {len(line)} bytes",
                hint="free some space; a resumed run cuts the torn line off",
                operation="write",
                object=str(self._path),
            )
        self._last_step = step

    def close(self) -> None:
        """Makes the lines durable and closes the file."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            os.fsync(file)
        except OSError as error:
            raise _store_error("sync", self._path, error) from error
        finally:
            os.close(file)

    def record(self) -> TrackerRecord:
        """Returns the file and the last step."""
        return {"backend": "jsonl", "path": str(self._path), "last_step": self._last_step}


def read_rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    r"""Yields the lines of a file as dicts; a torn last line is left out.

    Raises:
        CorruptionError: A line before the last one is no object with a whole `step`.
        StoreError: The file can't be read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> size = path.write_text('{"step":0,"loss":"nan"}\n{"step":1,"lo')
        >>> list(read_rows(path))
        [{'step': 0, 'loss': nan}]
    """
    try:
        with Path(path).open("rb") as file:
            for row, _ in _rows(file, Path(path)):
                yield {key: _read_back(value) for key, value in row.items()}
    except OSError as error:
        raise _store_error("read", Path(path), error) from error


def _rows(lines: Any, path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields the whole lines of an open file, decoded and as they are."""
    offset_bytes = 0
    for line in lines:
        # A killed process leaves no more than one line without an end; it was never logged.
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise CorruptionError(
                f"corrupt line of `{path}` at byte {offset_bytes}: expected an object with a `step`, "
                f"found: {line[:60]!r}",
                hint="move the file away, and begin a new one",
                object=str(path),
                offset_bytes=offset_bytes,
                what="line",
                expected="an object with a `step`",
                found=repr(line[:60]),
            )
        yield row, line
        offset_bytes += len(line)


def _keep_before(source: Path, target: Path, next_step: int) -> int | None:
    """Leaves in `target` the lines of `source` before a step, in one move; returns the last step there is."""
    last_step: int | None = None
    temporary = target.with_name(f".{target.name}.part")
    with source.open("rb") as lines, temporary.open("wb") as kept:
        for row, line in _rows(lines, source):
            if row["step"] < next_step:
                kept.write(line)
                last_step = row["step"] if last_step is None else max(last_step, row["step"])
        kept.flush()
        os.fsync(kept.fileno())
    temporary.replace(target)
    return last_step


def _move_aside(path: Path) -> None:
    """Gives a file that is there the next free number, so that a new run overwrites nobody's."""
    if not path.exists():
        return
    count = 1
    while (other := path.with_name(f"{path.stem}.{count}{path.suffix}")).exists():
        count += 1
    path.rename(other)


def _must_be_there(path: Path, doing: str) -> None:
    if not path.is_file():
        raise refuse("path", path, f"there is no file to {doing}", 'to begin a new one, pass mode="new"')


def _shown(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _read_back(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _store_error(operation: str, path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot {operation} `{path}`: {error.strerror}",
        operation=operation,
        object=str(path),
        errno=error.errno,
        filename=str(path),
    )
