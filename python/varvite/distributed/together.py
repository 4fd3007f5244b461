"""Saves and resumes of all ranks of `torch.distributed` together.

In the foreground the ranks agree in one round, on a group of their own. In the background each writes its
pack and tells the coordinator through the store of the launcher; no collective runs beside training.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from varvite._native import plan_writers
from varvite.casting import refuse_idle
from varvite.distributed.coordination import Coordination
from varvite.distributed.launch import check_alike, check_shared_folder
from varvite.distributed.leading import Leading, RankSave, take_back
from varvite.errors import InternalError, MismatchError
from varvite.ranks import Alone, Started, facts_of, in_step

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.plans import Problems
    from varvite.saving import Payload
    from varvite.settings import Settings
    from varvite.staging import Staging

__all__ = ["Together"]

_TIMEOUT_SECONDS = 1800.0
"""How long ranks wait for one that lives and does not come: a merge or an evaluation may take its time."""
_MARKS_FOLDER = "tmp"
"""Folder of a repository that nothing is read from, and that a writer sweeps when it opens it."""


class Together(Alone):
    """One rank of several that save and resume together; made on every rank at once."""

    def __init__(self, settings: Settings) -> None:
        """Joins the other ranks, and compares what must be the same on all."""
        from varvite import __version__

        super().__init__(settings)
        self._coordination = Coordination.join(settings.process_group, timeout_seconds=_TIMEOUT_SECONDS)
        self.is_coordinator = self._coordination.is_coordinator
        self._plan: tuple[str, bytes] | None = None
        check_alike(self._coordination, facts_of(settings, __version__))

    # ---- decisions -----------------------------------------------------------------------------

    def decide(self, what: str, make: Callable[[], Any]) -> Any:
        """Returns what the coordinator makes, on every rank."""
        return json.loads(self._coordination.broadcast(what, lambda: _encode(make())))

    def together(self, what: str, error: Exception | None = None) -> None:
        """Goes on only where every rank does."""
        self._coordination.together(what, error)

    def unite(self, problems: Problems) -> Problems:
        """Takes away what other ranks have: of a pipeline each holds a part of the names."""
        mine = _encode({"unexpected": problems.unexpected})

        def common(messages: list[bytes]) -> bytes:
            lists = [json.loads(message)["unexpected"] for message in messages]
            shared = set.intersection(*(set(names) for names in lists))
            return _encode([name for name in lists[0] if name in shared])

        problems.unexpected = json.loads(self._coordination.round("compare names", mine, common))
        return problems

    def open(self, make: Callable[[], Engine]) -> Engine:
        """Opens the engine on the coordinator first, which makes the repository; then on the others."""
        engine: Engine | None = None
        for turn in (True, False):
            with in_step(self, "open the repository"):
                engine = make() if turn == self.is_coordinator else engine
        assert engine is not None  # noqa: S101 - one of both turns was this rank's
        if self._settings.access == "read":
            check_alike(self._coordination, {"repository_id": engine.repository_id})
        else:
            self._check_folder()
        return engine

    def close(self) -> None:
        """Leaves the other ranks; they hear of it only if they go on."""
        self._coordination.close()

    def _check_folder(self) -> None:
        """Refuses folders of one name that are not one folder, as on the disks of several machines."""
        marks = self._settings.path / _MARKS_FOLDER
        check_shared_folder(
            self._coordination,
            str(self._settings.path),
            put=lambda name: (marks / name).touch(),
            # A look at the whole folder: one at a name is answered from a cache on some network file systems.
            see=lambda name: name in os.listdir(marks),
            remove=lambda name: (marks / name).unlink(missing_ok=True),
        )

    # ---- saves ---------------------------------------------------------------------------------

    def start(self, engine: Engine, describe: Callable[[], Payload], staging: Staging | None) -> Started:
        """Agrees on a save with all ranks, copies what this rank writes, and starts to write it.

        Raises:
            CheckpointError: This rank or another can't save; nothing was started then.
        """
        payload, ticket, mask = self._agree(engine, describe)
        job: RankSave | None = None
        try:
            meeting = self._coordination.meeting(session_key(ticket))
            kind = Leading if self.is_coordinator else RankSave
            job = kind(engine, meeting, ticket, self._settings.rank, payload.step)
            payload.tensors.write_only(mask)
            if staging is None:
                job.write_from(payload)
                return None, job.wait()
            staging.mark(payload.tensors)
            native = engine.save_part(ticket, self._settings.rank, payload.tensors, **payload.structures)
            staging.started(native)
            job.follow(native)
        except BaseException as error:
            if job is not None:
                job.give_up(error)
            elif self.is_coordinator:
                take_back(engine, ticket, error)
            raise
        return job, None

    def _agree(self, engine: Engine, describe: Callable[[], Payload]) -> tuple[Payload, str, bytes]:
        """Describes the state, and gets the ticket of a session and the mask of what this rank writes."""
        payload: Payload | None = None
        holdings, begun = b"", list[str]()
        mine: bytes | Exception
        try:
            payload = describe()
            holdings = payload.tensors.holdings()
            mine = _encode([payload.step, hashlib.sha256(holdings).hexdigest(), payload.idle_patterns])
        except Exception as error:  # noqa: BLE001 - raised on every rank, by the round
            mine = error

        def begin() -> str:
            assert payload is not None  # noqa: S101 - else the round has failed
            world_size = self._settings.world_size
            ticket = engine.begin_session(payload.step, world_size=world_size, **payload.labels)
            begun.append(ticket)
            return ticket

        def decide(messages: list[bytes]) -> bytes:
            rows = [json.loads(message) for message in messages]
            refuse_other_steps([row[0] for row in rows])
            assert payload is not None  # noqa: S101 - else the round has failed
            refuse_idle(sorted(set.intersection(*(set(row[2]) for row in rows))), payload.tensors)
            plan = hashlib.sha256("".join(row[1] for row in rows).encode()).hexdigest()
            is_known = self._plan is not None and self._plan[0] == plan
            return _encode([plan, begin() if is_known else None])

        try:
            plan, ticket = json.loads(self._coordination.round("save", mine, decide))
            if ticket is None:
                ticket, mask = self._share_out(holdings, begin)
                self._plan = (plan, mask)
        except BaseException as error:
            # It was begun, and not every rank has heard of it.
            for ticket in begun:
                take_back(engine, ticket, error)
            raise
        assert payload is not None  # noqa: S101 - else a round has failed
        if self._plan is None or self._plan[0] != plan:
            what = "all ranks have one plan of who writes what"
            raise InternalError(f"internal error: this rank knows another plan than: {plan}", what=what)
        if self._settings.casts is not None:
            self._settings.casts.settle()
        return payload, ticket, self._plan[1]

    def _share_out(self, holdings: bytes, begin: Callable[[], str]) -> tuple[str, bytes]:
        """Has the coordinator decide who writes what, from what all ranks hold; returns ticket and mask."""

        def decide(messages: list[bytes]) -> list[bytes]:
            masks = plan_writers([zlib.decompress(message) for message in messages])
            ticket = begin()
            return [_encode([ticket, mask.hex()]) for mask in masks]

        answer = self._coordination.round("share out", zlib.compress(holdings, 1), decide)
        ticket, mask = json.loads(answer)
        return ticket, bytes.fromhex(mask)


def refuse_other_steps(steps: list[int]) -> None:
    """Refuses ranks that are at different steps.

    Raises:
        MismatchError: They are; names the ranks.

    Example:
        >>> refuse_other_steps([7, 7, 8])
        Traceback (most recent call last):
            ...
        varvite.errors.MismatchError: ranks save different steps: rank 0 saves 7, but rank 2: 8
        hint: save at the same step on every rank
    """
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise MismatchError(
                f"ranks save different steps: rank 0 saves {steps[0]}, but rank {rank}: {step}",
                hint="save at the same step on every rank",
                name="step",
                field="value on two ranks",
                expected=steps[0],
                found=step,
            )


def session_key(ticket: str) -> str:
    """Returns what tells a session from others."""
    key: str = json.loads(ticket)["session_id"]
    return key


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
