"""One decision for all ranks: made at the coordinator, of what every rank brings, and told to all.

A file system or a clock shows ranks different things, and one rank's failure must not leave the others
waiting. So every collective step of Varvite is one *round*: each rank brings its bytes or its failure, and
all go on with the coordinator's answer, or all raise.

Example:
    >>> coordination = Coordination.join()
    >>> coordination.round("count", b"3", lambda counts: b"%d in all" % sum(map(int, counts)))
    b'3 in all'
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from varvite.distributed import failures
from varvite.distributed.group import RankGroup
from varvite.distributed.meeting import LocalStore, Meeting
from varvite.distributed.star import MESSAGE_LIMIT_BYTES, Star
from varvite.errors import CheckpointError, InternalError, InvalidInputError, MismatchError
from varvite.settings import joined_distributed
from varvite.training.checks import check_positive

__all__ = ["Coordination"]

_HEAD = struct.Struct("<BH")
_GIVEN, _FAILED, _LOST = 0, 1, 2
_TELL_SECONDS = 10.0
"""How long the coordinator tries to tell the others that a rank is lost."""

_Decide = Callable[[list[bytes]], list[bytes] | bytes]


class Coordination:
    """The ranks of a run, and how they decide together.

    Call each method on every rank, in the same order, from one thread at a time.

    Attributes:
        rank: This process's place among those that work together, from 0.
        world_size: Number of processes that work together.
        hosts: Name of the machine of each rank.
    """

    def __init__(self, group: RankGroup | None) -> None:
        """Takes the group over, `None` for a single rank; use `join`."""
        self.rank: int = 0 if group is None else group.rank
        self.world_size: int = 1 if group is None else group.size
        self.hosts: list[str] = [os.uname().nodename]
        self._group = group
        self._star = None if group is None else Star(group)
        self._store: Any = None
        self._token = ""
        self._count = 0
        self._broken: CheckpointError | None = None

    @classmethod
    def join(cls, process_group: Any = None, *, timeout_seconds: float = 600.0) -> Coordination:
        """Makes the gloo group of our own; without `torch.distributed`, or with one rank, there is none.

        Args:
            process_group: The `torch.distributed` group whose ranks work together, which alone call this;
                `None` for all ranks.
            timeout_seconds: How long a round waits for a rank that lives and does not come. A coordinator
                that does not come is given up after twice as long: it may itself be waiting for another.

        Raises:
            InvalidInputError: The timeout is no time, or this process is not in the group.
            CheckpointError: Ranks did not come in time; `missing_ranks` names them.
        """
        check_positive("timeout_seconds", timeout_seconds)
        distributed = joined_distributed()
        if distributed is None:
            return cls(None)
        group = RankGroup(distributed, process_group, timeout_seconds=timeout_seconds)
        joined = cls(group if group.size > 1 else None)
        host = joined.hosts[0].encode()
        joined._token, joined.hosts = json.loads(joined.round("join", host, _welcome))
        return joined

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides: the first does."""
        return self.rank == 0

    def round(self, what: str, mine: bytes | BaseException, decide: _Decide) -> bytes:
        """Brings what each rank has to the coordinator, and back what it decides. Every rank calls.

        Args:
            what: Names the call in messages; alike on all ranks.
            mine: What this rank brings, at most 64 MiB, or the exception that kept it from that.
            decide: Called at the coordinator alone, and only if no rank has failed, with what each rank
                brought. Returns one answer for all, or one for each rank.

        Returns:
            The answer for this rank.

        Raises:
            MismatchError: Ranks are in different calls.
            CheckpointError: A rank failed, or `decide` did: the failing rank raises its own exception, all
                others one of the same class of Varvite (`CheckpointError` for foreign ones), with `rank`. Or
                ranks are lost, and `missing_ranks` names them; then every later call raises that again.
        """
        if self._broken is not None:
            raise self._broken
        if isinstance(mine, bytes) and len(mine) > MESSAGE_LIMIT_BYTES:
            mine = _too_long(len(mine))
        own = mine if isinstance(mine, BaseException) else None
        if isinstance(mine, BaseException):
            message = _Message(_FAILED, what, failures.encode(mine, rank=self.rank))
        else:
            message = _Message(_GIVEN, what, mine)
        self._count += 1
        try:
            if self._star is None:
                (answer,), own = self._decide([message], own, decide)
            elif self.is_coordinator:
                answer, own = self._lead(self._star, message, own, decide)
            else:
                answer = _Message.unpack(self._star.ask(message.pack()))
        except RuntimeError as error:
            self._broken = self._lost(what, None)
            self._close(error)
            raise self._broken from error
        except BaseException as error:
            self._interrupted(what, error)
            raise
        if answer.kind == _GIVEN:
            return answer.body
        failure = failures.decode(answer.body, what)
        if answer.kind == _LOST:
            self._broken = failure
            self.close()
        raise failure if own is None else own

    def broadcast(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Returns what the coordinator alone makes. Every rank calls.

        Args:
            what: Names the call.
            make: Called at the coordinator alone.

        Raises:
            CheckpointError: As `round`.
        """
        return self.round(what, b"", lambda _: make())

    def together(self, what: str, error: BaseException | None) -> None:
        """Raises on every rank if one has failed. Every rank calls.

        Args:
            what: Names the call.
            error: This rank's failure, or `None`.

        Raises:
            CheckpointError: As `round`.
        """
        self.round(what, b"" if error is None else error, lambda _: b"")

    def meeting(self, name: str) -> Meeting:
        """Returns a meeting of all ranks, for work in the background that uses no collective.

        Not collective itself: each rank asks for it when it has something to do.

        Args:
            name: Names the work, alike on all ranks; none that was used before.

        Raises:
            CheckpointError: The store of the launcher is lost.
        """
        if self._group is None:
            return Meeting(name, LocalStore(), rank=0, hosts=self.hosts)
        if self._store is None:
            self._store = self._group.own_store(self._token)
        return Meeting(name, self._store, rank=self.rank, hosts=self.hosts)

    def close(self) -> None:
        """Closes the connections of this rank; others that wait for it hear that it is gone."""
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        if self._broken is None:
            self._broken = CheckpointError("cannot go on: the connections to the other ranks are closed")
        if self._star is not None:
            self._star.close(error)

    def _lead(
        self, star: Star, mine: _Message, own: BaseException | None, decide: _Decide
    ) -> tuple[_Message, BaseException | None]:
        """Gathers, decides, answers. Returns the coordinator's answer, and its own failure if it has one."""
        gathered, lost = star.gather(mine.pack())
        if lost:
            error = self._lost(mine.what, lost)
            answer = _Message(_LOST, mine.what, failures.encode(error))
            with contextlib.suppress(RuntimeError):
                star.scatter([answer.pack()] * self.world_size, seconds=_TELL_SECONDS)
            return answer, own
        answers, own = self._decide([_Message.unpack(one) for one in gathered], own, decide)
        # Who died since is found by the next round.
        packed = {id(one): one.pack() for one in answers}
        star.scatter([packed[id(one)] for one in answers])
        return answers[0], own

    def _decide(
        self, messages: list[_Message], own: BaseException | None, decide: _Decide
    ) -> tuple[list[_Message], BaseException | None]:
        """Returns the answers by rank, and the coordinator's failure: its own, or that of the decision."""
        what = messages[0].what
        calls: dict[str, list[int]] = {}
        for rank, message in enumerate(messages):
            calls.setdefault(message.what, []).append(rank)
        failed = [message.body for message in messages if message.kind == _FAILED]
        try:
            _check_same(calls)
            if not failed:
                decided = decide([message.body for message in messages])
                if isinstance(decided, bytes):
                    return [_Message(_GIVEN, what, _checked(decided))] * len(messages), None
                return [_Message(_GIVEN, what, one) for one in _by_rank(decided, len(messages))], None
            failure = failures.joined(failed)
        except BaseException as error:  # noqa: BLE001 - every rank raises it
            is_of_all = len(calls) > 1
            failure = failures.encode(error, rank=None if is_of_all else self.rank, verb="refused")
            own = own or error
        return [_Message(_FAILED, what, failure)] * len(messages), own

    def _lost(self, what: str, missing: Sequence[int] | None) -> CheckpointError:
        """Returns the error for a lost round: what an interrupted rank said of it, or who is missing."""
        assert self._group is not None  # noqa: S101 - a single rank loses nobody
        note = self._group.read(self._note)
        if note is not None:
            return failures.decode(note, what)
        if missing is None:
            missing = self._group.missing_ranks(f"{self._token}/{self._count}")
        return self._group.lost(f"cannot go on with `{what}` without all ranks", missing, self.hosts)

    @property
    def _note(self) -> str:
        return f"{self._token}/interrupted"

    def _interrupted(self, what: str, error: BaseException) -> None:
        """Half a round is no state to go on from: leaves, and says why for those that notice."""
        self._broken = failures.decode(failures.encode(error, rank=self.rank), what)
        if self._group is not None:
            self._group.write(self._note, failures.encode(self._broken))
        self._close(error)


class _Message(NamedTuple):
    """What goes up or down in a round."""

    kind: int
    what: str
    body: bytes

    def pack(self) -> bytes:
        what = self.what.encode()
        return b"".join((_HEAD.pack(self.kind, len(what)), what, self.body))

    @classmethod
    def unpack(cls, packed: bytes) -> _Message:
        kind, length_bytes = _HEAD.unpack_from(packed)
        end = _HEAD.size + length_bytes
        return cls(kind, packed[_HEAD.size : end].decode(), packed[end:])


def _welcome(hosts: list[bytes]) -> bytes:
    """Returns what all ranks have in common: a word of this group alone, and where each of them is."""
    return json.dumps([secrets.token_hex(8), [host.decode() for host in hosts]]).encode()


def _by_rank(answers: list[bytes], size: int) -> list[bytes]:
    if len(answers) != size:
        message = f"a decision has answers for another number of ranks, of {size}: {len(answers)}"
        raise InternalError(message, what="answers")
    return [_checked(one) for one in answers]


def _checked(message: bytes) -> bytes:
    if len(message) > MESSAGE_LIMIT_BYTES:
        raise _too_long(len(message))
    return message


def _too_long(length_bytes: int) -> InvalidInputError:
    reason = f"at most {MESSAGE_LIMIT_BYTES} bytes"
    message = f"cannot send a message of more than {MESSAGE_LIMIT_BYTES} bytes: {length_bytes}"
    return InvalidInputError(message, what="message", reason=reason)


def _check_same(calls: dict[str, list[int]]) -> None:
    if len(calls) == 1:
        return
    which = "; ".join(f"`{what}` on ranks {', '.join(map(str, ranks))}" for what, ranks in calls.items())
    raise MismatchError(
        f"ranks are in different calls: {which}",
        hint="call the same methods in the same order on every rank",
        name="call",
        field="what",
        calls=calls,
    )
