"""What is checked once, when ranks begin to work together: one program, one folder.

Example:
    >>> from varvite.distributed.coordination import Coordination
    >>> check_alike(Coordination.join(), {"version": "0.1"})
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping

from varvite.distributed.coordination import Coordination
from varvite.errors import MismatchError, StoreError
from varvite.plain import Json

__all__ = ["check_alike", "check_shared_folder"]

_LOOK_SECONDS = 0.05


def check_alike(coordination: Coordination, facts: Mapping[str, Json]) -> None:
    """Raises on every rank if a fact is not the same on all. Every rank calls.

    Args:
        coordination: The ranks.
        facts: Values by name: versions, sizes, names of classes.

    Raises:
        MismatchError: A fact differs; `mismatched` has for each such fact its name, and the ranks by value.
    """

    def compare(given: list[bytes]) -> bytes:
        by_rank = [json.loads(one) for one in given]
        names = {name: None for one in by_rank for name in one}
        differing = {name: _ranks_by_value(by_rank, name) for name in names}
        differing = {name: ranks for name, ranks in differing.items() if len(ranks) > 1}
        return json.dumps(differing).encode()

    mine = json.dumps(dict(facts)).encode()
    differing = json.loads(coordination.round("check that ranks are alike", mine, compare))
    if differing:
        raise _differ(differing)


def check_shared_folder(
    coordination: Coordination,
    folder: str,
    *,
    put: Callable[[str], None],
    see: Callable[[str], bool],
    remove: Callable[[str], None],
    seconds: float = 30.0,
) -> None:
    """Raises on every rank if one looks at another folder than the coordinator. Every rank calls.

    The coordinator leaves a mark, and every rank must see it. A network file system may show it late, so each
    rank looks again and again; the name is new, so that no rank remembers that it was not there. All input
    and output is the caller's. In a repository the mark belongs into `tmp/`, which is swept and never listed.

    Args:
        coordination: The ranks.
        folder: What the caller calls the folder, for the message.
        put: Called at the coordinator: makes a file of this name, which is new.
        see: Called at the others: returns whether the file is there, by its own look and not from a cache.
        remove: Called at the coordinator at the end, also after a failure.
        seconds: How long a rank looks.

    Raises:
        StoreError: Ranks do not see the mark; `ranks` and `hosts` say which. Or what `put` or `see` raised.
    """
    if coordination.world_size == 1:
        return
    name = f"varvite-mark-{secrets.token_hex(8)}"
    put_here = False

    def leave() -> bytes:
        nonlocal put_here
        put(name)
        put_here = True
        return name.encode()

    try:
        mark = coordination.broadcast("leave a mark in the folder", leave).decode()
        mine: bytes | Exception
        try:
            is_seen = coordination.is_coordinator or _sees(mark, see, seconds)
            mine = b"seen" if is_seen else b""
        except Exception as error:  # noqa: BLE001 - every rank raises it
            mine = error
        answer = coordination.round("see the mark in the folder", mine, _unseen)
    finally:
        if put_here:
            remove(name)
    blind = json.loads(answer)
    if blind:
        raise _not_shared(coordination, folder, blind, seconds)


def _sees(mark: str, see: Callable[[str], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not see(mark):
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _unseen(seen: list[bytes]) -> bytes:
    return json.dumps([rank for rank, one in enumerate(seen) if not one]).encode()


def _not_shared(coordination: Coordination, folder: str, blind: list[int], seconds: float) -> StoreError:
    hosts = [coordination.hosts[rank] for rank in blind]
    which = ", ".join(f"{rank} on `{host}`" for rank, host in zip(blind, hosts, strict=True))
    return StoreError(
        f"cannot share `{folder}`: a file of rank 0 on `{coordination.hosts[0]}` is not seen within "
        f"{seconds:g} s by ranks: {which}",
        hint="choose a folder on a file system that all machines share; this one seems to be local to each",
        operation="share",
        object=folder,
        ranks=blind,
        hosts=hosts,
    )


def _ranks_by_value(by_rank: list[dict[str, Json]], name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(by_rank):
        text = json.dumps(facts[name], sort_keys=True) if name in facts else "nothing"
        found.setdefault(text, []).append(rank)
    return found


def _differ(differing: dict[str, dict[str, list[int]]]) -> MismatchError:
    lines = []
    for name, ranks_of in differing.items():
        values = [f"{value} on ranks {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items()]
        lines.append(f"`{name}` is {'; '.join(values)}")
    first = next(iter(differing))
    return MismatchError(
        f"ranks do not run the same: {', and '.join(lines)}",
        hint="start all ranks with one version of the program and its packages, and with the same arguments",
        name=first,
        field="value",
        mismatched=[(name, "value", *list(ranks_of)[:2]) for name, ranks_of in differing.items()],
        values=differing,
    )
