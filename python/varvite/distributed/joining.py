"""How ranks find each other in a store that still holds what ranks before a restart have left.

A launcher that restarts its ranks, as `torchrun --max-restarts` does, may keep its store: then an address or
a name that is read there can be that of a process that is dead. Ranks that name their keys by a token that
only the living know never read it.

Example:
    >>> import torch.distributed as distributed
    >>> token = fresh_token(distributed.HashStore(), "demo", rank=0, size=1, timeout_seconds=1.0)
    >>> len(token)
    16
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

__all__ = ["fresh_token", "join_ranks"]

_POLL_SECONDS = (0.001, 0.05)
"""The first and the longest pause between two looks into the store."""


def join_ranks(backend: str | None = None, *, timeout_seconds: float = 600.0) -> None:
    """Sets up `torch.distributed` for the ranks of the launcher, as `init_process_group()` does.

    The ranks of a restart never meet what those before it have left in the launcher's store. With
    `init_process_group` they may, and gloo then can't connect.

    Args:
        backend: As for `init_process_group`.
        timeout_seconds: How long to wait for ranks, here and in collectives of gloo.

    Raises:
        TimeoutError: Ranks did not come in time; names them where they are known.
    """
    from datetime import timedelta

    import torch.distributed as distributed

    timeout = timedelta(seconds=timeout_seconds)
    store, rank, size = next(distributed.rendezvous("env://", timeout=timeout))
    token = fresh_token(store, "varvite/launch", rank, size, timeout_seconds=timeout_seconds)
    distributed.init_process_group(
        backend, store=distributed.PrefixStore(token, store), rank=rank, world_size=size
    )


def fresh_token(store: Any, name: str, rank: int, size: int, *, timeout_seconds: float) -> str:
    """Returns a token that is the same on all ranks, and that no earlier ranks have had.

    The first rank calls with a token of its own, the others answer to it with one of theirs, and the first
    says whom it has heard: a rank that finds its own answer there knows that the call was not an old one.

    Args:
        store: The store of the launcher.
        name: What keys begin with, alike on all ranks and unlike anything else.
        rank: This process, from 0.
        size: How many ranks there are; each calls this.
        timeout_seconds: How long to wait for the others.

    Returns:
        16 hex digits.

    Raises:
        TimeoutError: Ranks did not come in time; the first rank names them.
        RuntimeError: The store is lost.
    """
    until = time.monotonic() + timeout_seconds
    own = secrets.token_hex(8)
    if rank:
        return _answer(store, name, rank, own, until)
    store.set(f"{name}/call", own)
    keys = {other: f"{name}/answer/{own}/{other}" for other in range(1, size)}
    pause = _POLL_SECONDS[0]
    while keys and not store.check([*keys.values()]):
        if time.monotonic() > until:
            missing = [str(other) for other, key in keys.items() if not store.check([key])]
            raise TimeoutError(f"ranks did not come to `{name}`: {', '.join(missing)}")
        pause = _wait(pause)
    heard = {str(other): store.get(key).decode() for other, key in keys.items()}
    store.set(f"{name}/heard/{own}", json.dumps(heard))
    return own


def _answer(store: Any, name: str, rank: int, own: str, until: float) -> str:
    """Answers to each call there is, until one has heard it."""
    answered = ""
    pause = _POLL_SECONDS[0]
    while time.monotonic() < until:
        call = store.get(f"{name}/call").decode() if store.check([f"{name}/call"]) else ""
        if call != answered:
            store.set(f"{name}/answer/{call}/{rank}", own)
            answered = call
        if call and store.check([f"{name}/heard/{call}"]):
            heard = json.loads(store.get(f"{name}/heard/{call}"))
            if heard.get(str(rank)) == own:
                return call
        pause = _wait(pause)
    raise TimeoutError(f"the first rank did not come to `{name}`")


def _wait(pause: float) -> float:
    time.sleep(pause)
    return min(pause * 1.5, _POLL_SECONDS[1])
