"""The checks of a repository: who holds it, what a crash has left, and what can't be read."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from varvite.doctor.checks import Check
from varvite.doctor.probes import lock_state
from varvite.records import format_bytes
from varvite.training.receipts import scan_receipts

if TYPE_CHECKING:
    from varvite._native import Engine

__all__ = ["examine_repository"]

_HOLDER: Final = re.compile(r"(process [0-9]+ on \S+) since ([0-9]{1,15}) \(unix milliseconds\)")


def examine_repository(engine: Engine, *, is_folder: bool = True) -> list[Check]:
    """Runs all checks of a repository that is open for reading; it changes nothing.

    Args:
        engine: The repository.
        is_folder: Whether it lies in a folder, which has a lock and staged files.
    """
    checks = [_snapshots(engine), _receipts(engine)]
    if not is_folder:
        return checks
    root = Path(engine.root)
    is_held, text = lock_state(root / "writer.lock")
    return [*checks, _lock(is_held, text), _staged(root / "tmp", is_held=is_held)]


def _snapshots(engine: Engine) -> Check:
    headers, damaged = engine.snapshots()
    facts = {
        "repository_id": engine.repository_id,
        "snapshot_count": len(headers),
        "damaged": [{"seq": seq, "why": why} for seq, why in damaged],
    }
    if not damaged:
        return Check("snapshots", f"{len(headers)}, all manifests readable", facts=facts)
    first_seq, why = damaged[0]
    value = f"{len(headers)} readable, {len(damaged)} damaged"
    return Check("snapshots", value, "bad", f"snapshot {first_seq}: {why}", facts)


def _receipts(engine: Engine) -> Check:
    found, damaged = scan_receipts(engine)
    facts = {"count": len(found), "damaged": [{"number": number, "why": why} for number, why in damaged]}
    if not damaged:
        return Check("receipts", f"{len(found)}, all readable" if found else "none", facts=facts)
    number, why = damaged[0]
    value = f"{len(found)} readable, {len(damaged)} damaged"
    return Check("receipts", value, "warn", f"receipt {number}: {why}; no snapshot needs it", facts)


def _lock(is_held: bool, text: str) -> Check:
    facts = {"is_held": is_held, "holder": text or None}
    if is_held:
        return Check("writer", _holder(text), meaning="a run is saving here", facts=facts)
    if text:
        meaning = "it was killed; what it had committed is whole"
        return Check("writer", f"none; the last was {_holder(text)}", meaning=meaning, facts=facts)
    return Check("writer", "none", facts=facts)


def _holder(text: str) -> str:
    match = _HOLDER.fullmatch(text)
    if match is None:
        return text
    since = datetime.fromtimestamp(int(match[2]) / 1000, tz=UTC)
    return f"{match[1]} since {since:%Y-%m-%dT%H:%M:%SZ}"


def _staged(folder: Path, *, is_held: bool) -> Check:
    lengths = []
    if folder.is_dir():
        for path in folder.iterdir():
            try:
                lengths.append(path.lstat().st_size)
            except FileNotFoundError:
                continue  # a save published it meanwhile
    facts = {"count": len(lengths), "length_bytes": sum(lengths)}
    if not lengths:
        return Check("staged files", "none", facts=facts)
    value = f"{len(lengths)}, {format_bytes(sum(lengths))}"
    if is_held:
        return Check("staged files", value, meaning="of the run that is saving", facts=facts)
    return Check("staged files", value, "warn", "left by a crash; the next writer removes them", facts)
