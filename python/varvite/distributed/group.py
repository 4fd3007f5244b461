"""A gloo group of our own, beside those of training: made in one place, and lost ranks named in one way.

Nothing of ours mixes with the collectives of training, and no device is waited for. The group needs only the
store of the launcher, so that it can stand beside a default group of any backend.
"""

from __future__ import annotations

import contextlib
import time
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

from varvite.distributed.joining import fresh_token
from varvite.errors import CheckpointError, InvalidInputError

__all__ = ["RankGroup", "store_lost"]

_GRACE_SECONDS = 5.0
"""How long after a failure a rank waits for the others to say that they were there."""

_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()
"""Groups that this process has made in each default group: in a new one all ranks begin to count again."""


class RankGroup:
    """The ranks that work together, and gloo between them.

    Ranks are counted within the group, from 0. A group of one has no gloo.

    Attributes:
        world: The default group when this was made: another one later says that it is of no use any more.
        ranks: Numbers of the ranks among all, by rank of this group.
        rank: This process.
        gloo: PyTorch's connections between these ranks, or `None`.
        store: The store of the launcher.
        name: Name that keys in that store begin with, alike on all ranks.
    """

    def __init__(self, distributed: Any, process_group: Any, *, timeout_seconds: float) -> None:
        """Makes the group; every rank of it calls.

        Args:
            distributed: The module `torch.distributed`, set up.
            process_group: The group whose ranks take part; `None` for all.
            timeout_seconds: How long to wait for a rank, here and in what is done with the group.

        Raises:
            InvalidInputError: This process is not in the group.
            CheckpointError: Ranks did not come in time; `missing_ranks` names them.
        """
        if process_group is not None and distributed.get_rank(process_group) < 0:
            reason = "this process is not in it"
            raise InvalidInputError(f"invalid process_group: {reason}", what="process_group", reason=reason)
        self.world = distributed.group.WORLD
        self.ranks: list[int] = list(distributed.get_process_group_ranks(process_group or self.world))
        self.rank: int = distributed.get_rank(process_group)
        self.timeout_seconds = timeout_seconds
        self.store: Any = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
        self.name = _next_name(self.world, self.ranks)
        self.gloo: Any = None
        if self.size > 1:
            self._connect(distributed)

    def _connect(self, distributed: Any) -> None:
        """Makes gloo's connections by themselves, and no group that `torch.distributed` knows of.

        IMPORTANT: `new_group` for a part of the ranks lets torch count a group that the other ranks don't.
        Then the program's next group of all ranks hangs: each side looks for it under another name.
        """
        from datetime import timedelta

        timeout = timedelta(seconds=self.timeout_seconds)
        try:
            # Ranks before a restart may have left theirs under the same name.
            token = fresh_token(
                self.store, self.name, self.rank, self.size, timeout_seconds=self.timeout_seconds
            )
            self.name = f"{self.name}/{token}"
            store = distributed.PrefixStore(f"{self.name}/gloo", self.store)
            self.gloo = distributed.ProcessGroupGloo(store, self.rank, self.size, timeout=timeout)
        except (RuntimeError, TimeoutError) as error:
            problem = f"cannot set up a group of {self.size} ranks within {self.timeout_seconds:g} s"
            raise self.lost(problem, self.missing_ranks("join")) from error

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def missing_ranks(self, call: str) -> list[int] | None:
        """Returns the ranks that never came to a call that has failed here; `None` where that can't be told.

        A rank whose call failed says so in the store of the launcher; one that never called can't.

        Args:
            call: Names the call, alike on all ranks and unlike any other.
        """
        try:
            keys = [f"{self.name}/{call}/{rank}" for rank in range(self.size)]
            self.store.set(keys[self.rank], "here")
            until = time.monotonic() + _GRACE_SECONDS
            while True:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                if not missing or time.monotonic() > until:
                    return missing
                time.sleep(0.05)
        except RuntimeError:  # the store went with its rank
            return None

    def write(self, name: str, value: bytes) -> None:
        """Leaves a note for the others in the store of the launcher; nothing if that is gone."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{self.name}/{name}", value)

    def read(self, name: str) -> bytes | None:
        """Returns the note that a rank left, or `None`; does not wait."""
        key = f"{self.name}/{name}"
        try:
            return bytes(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError:  # the store went with its rank
            return None

    def own_store(self, word: str) -> Any:
        """Returns the store of the launcher over a connection of its own, for a thread in the background.

        Args:
            word: What all keys begin with, beside the name of the group.

        Raises:
            CheckpointError: The store is lost.
        """
        import torch.distributed as distributed

        try:
            # Older torch has no `clone`. Nothing of ours waits in the store, so that one connection will do.
            store = self.store.clone() if hasattr(self.store, "clone") else self.store
        except RuntimeError as error:
            raise store_lost("meeting", error) from error
        return distributed.PrefixStore(f"{self.name}/{word}", store)

    def lost(self, problem: str, missing: Sequence[int] | None, hosts: Sequence[str] = ()) -> CheckpointError:
        """Returns the error for ranks that are lost or did not come.

        Args:
            problem: What could not be done.
            missing: The ranks; `None` where they are not known.
            hosts: The machine of each rank, named where there are several.
        """
        if missing is None:
            who = "not known which"
        else:
            names = [self.called(rank) for rank in missing]
            if len(set(hosts)) > 1:
                names = [f"{name} on `{hosts[rank]}`" for name, rank in zip(names, missing, strict=True)]
            who = ", ".join(names) or "none, but one was lost"
        return CheckpointError(
            f"{problem}; missing ranks: {who}",
            hint="look at the log of the missing rank: it ended, hangs, or does not call this at each step",
            missing_ranks=None if missing is None else list(missing),
        )

    def called(self, rank: int) -> str:
        """Returns what a rank is called in messages: with its number among all, where that is another."""
        among_all = self.ranks[rank]
        return str(rank) if among_all == rank else f"{rank} (rank {among_all} of all)"

    def close(self) -> None:
        """Closes the sockets to the others, who hear of it in their next call at the latest."""
        self.gloo = None


def store_lost(what: str, error: RuntimeError) -> CheckpointError:
    """Returns the error for a store of the launcher that does not answer any more.

    Args:
        what: The call in which it was needed.
        error: What the store raised.
    """
    cause = str(error).partition("\n")[0]
    return CheckpointError(
        f"lost the store of the launcher in `{what}`: {cause}",
        hint="the process that holds the store has ended: look at its log, or at that of rank 0",
    )


def _next_name(world: Any, ranks: list[int]) -> str:
    """Returns the name of another group of these ranks, which make theirs in the same order."""
    made = _made.setdefault(world, {})
    made[tuple(ranks)] = count = made.get(tuple(ranks), 0) + 1
    # Two parts of the ranks may begin alike.
    return f"varvite/{zlib.crc32(repr(ranks).encode()):08x}-{len(ranks)}/{count}"
