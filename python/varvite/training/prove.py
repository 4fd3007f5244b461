"""The proof of a resume: do some steps again in a fresh process, and compare with what was recorded."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError, SnapshotNotFoundError
from varvite.training.run.job import Job

if TYPE_CHECKING:
    from varvite.records import SnapshotInfo
    from varvite.training.loader import ResumableLoader
    from varvite.training.run.context import Run
    from varvite.training.run.phases import Phases

__all__ = ["Proof", "prove_resume"]

_NAMES_LIMIT = 20
"""How many names of what differs a proof lists."""
_NEVER = 1 << 62

Digests = dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What came of doing steps again.

    Attributes:
        from_step: Step of the snapshot that the fresh process resumed from.
        to_step: The last step that it did.
        compared_with: `recorded` where the state after that step had been saved; `second run` where it had
            not, so that two fresh processes were compared.
        expected: State digest that was recorded, or that of the second run.
        found: State digest of the state that the fresh process came to.
        different: Names of the tensors that differ, `structure` for plain values; some of them.
    """

    from_step: int
    to_step: int
    compared_with: str
    expected: str
    found: str
    different: list[str]

    @property
    def equal(self) -> bool:
        """True where every bit of the state is the same."""
        return self.expected == self.found

    def __str__(self) -> str:
        """Returns one line."""
        steps = f"steps {self.from_step + 1} to {self.to_step} done again in a fresh process"
        with_what = "the recorded state" if self.compared_with == "recorded" else "a second such process"
        if self.equal:
            return f"{steps}: equal to {with_what}, digest: {self.found}"
        return f"{steps}: differs from {with_what} in: {', '.join(self.different)}"


def prove_resume(job: Job, *, steps: int | None = None, phases: Phases | None = None) -> Proof:
    """Does the last `steps` steps again in a fresh process, and compares states bit for bit.

    The fresh process resumes from the snapshot that is `steps` steps older than the newest one, trains, and
    comes to the step of the newest, whose state digest was recorded when it was saved. Where there is no
    such pair of snapshots, two fresh processes do the steps after the newest one, and are compared with each
    other: that proves a repeatable step, and not that the run before was one.

    The repository is only read, so that the run may go on meanwhile. Nothing is drawn from this process's
    generators. Called by one rank.

    Args:
        job: The job, of functions that a fresh process can import.
        steps: How many steps; `None` for those between the two newest snapshots.
        phases: Functions instead of those of `varvite.training.run.phases`.

    Returns:
        The proof; `proof.equal` is the answer.

    Raises:
        SnapshotNotFoundError: There is no snapshot, or with `steps=None` only one.
        InvalidInputError: The job can't be sent to another process, or `steps` is below 1.

    Example:
        >>> prove_resume(job)                                       # doctest: +SKIP
        Proof(from_step=79, to_step=99, compared_with='recorded', ...)
    """
    if steps is not None and (isinstance(steps, bool) or steps < 1):
        reason = "must be a whole number of at least 1"
        raise InvalidInputError(f"invalid steps: {reason}, not: {steps!r}", what="steps", reason=reason)
    _check_portable(job, phases)
    start, end = _choose(job, steps)
    count = steps if steps is not None else _gap(start, end)
    with tempfile.TemporaryDirectory(prefix="varvite-proof-") as scratch:
        found, found_parts = _in_fresh_process(job, phases, start.seq, count, os.path.join(scratch, "first"))
        if end is not None:
            expected, expected_parts = end.digest, _parts(job, end.seq)
        else:
            second = os.path.join(scratch, "second")
            expected, expected_parts = _in_fresh_process(job, phases, start.seq, count, second)
    names = found_parts.keys() | expected_parts.keys()
    different = sorted(name for name in names if found_parts.get(name) != expected_parts.get(name))
    return Proof(
        from_step=start.step,
        to_step=start.step + count,
        compared_with="recorded" if end is not None else "second run",
        expected=expected,
        found=found,
        different=different[:_NAMES_LIMIT],
    )


def _check_portable(job: Job, phases: Phases | None) -> None:
    """Refuses what a fresh process can't import, before one is started."""
    for name, value in [*vars(job).items(), ("phases", phases)]:
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reason = f"a fresh process can't import it ({error})"
            raise InvalidInputError(
                f"invalid {name} of the job: {reason}",
                hint="use functions of a module, or functools.partial of them, instead of lambdas",
                what=name,
                reason=reason,
            ) from error


def _choose(job: Job, steps: int | None) -> tuple[SnapshotInfo, SnapshotInfo | None]:
    """Returns the snapshot to start from and the one to compare with, the newest pair that fits."""
    with _reader(job) as manager:
        infos = manager.snapshots()
    by_seq = {info.seq: info for info in infos}
    if not infos:
        raise SnapshotNotFoundError(
            "no snapshot to resume from", hint="run the job first", reference="latest"
        )
    for end in reversed(infos):
        start = by_seq.get(end.parent) if end.parent is not None else None
        while start is not None:
            # A resume from an older snapshot, or a step saved twice, makes no pair.
            if start.step < end.step and (steps is None or start.step + steps == end.step):
                return start, end
            start = by_seq.get(start.parent) if start.parent is not None else None
    if steps is None:
        raise SnapshotNotFoundError(
            "no two snapshots of one line to compare",
            hint="give steps=, to compare two fresh processes with each other",
            reference="latest",
        )
    return infos[-1], None


def _gap(start: SnapshotInfo, end: SnapshotInfo | None) -> int:
    return 0 if end is None else end.step - start.step


def _reader(job: Job) -> Any:
    from varvite import CheckpointManager

    return CheckpointManager(job.folder, **{**job.manager, "read_only": True, "keep": None, "merge": None})


def _parts(job: Job, seq: int) -> Digests:
    with _reader(job) as manager:
        return state_parts(manager, seq)


def state_parts(manager: Any, seq: int) -> Digests:
    """Returns what a state digest is made of: the digests of each tensor by name, and the plain values."""
    from varvite.reading import entries_of

    reader = manager._engine.open(seq)  # noqa: SLF001 - manifests are not the concern of a manager's callers
    parts = {"structure": reader.structure()}
    parts.update((f"structure of rank {rank}", text) for rank, text in reader.rank_structures().items())
    for index, entry in enumerate(entries_of(reader)):
        owner = "" if entry.rank is None else f" of rank {entry.rank}"
        form = f"{entry.stored_dtype} {entry.shape} {entry.tied_to}"
        parts[f"{entry.name}{owner}"] = f"{form} {reader.chunk_digests(index)}"
    return parts


def _in_fresh_process(
    job: Job, phases: Phases | None, seq: int, steps: int, scratch: str
) -> tuple[str, Digests]:
    """Resumes and trains in a process of its own, started anew and not forked."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(_do_again, job, phases, seq, steps, scratch).result()


def _do_again(job: Job, phases: Phases | None, seq: int, steps: int, scratch: str) -> tuple[str, Digests]:
    """In the fresh process: resumes read-only, does the steps, and saves to a repository of its own."""
    from varvite import CheckpointManager
    from varvite.training.run.entry import run_training
    from varvite.training.run.phases import Phases

    phases = Phases() if phases is None else phases
    alone = {"keep": None, "merge": None, "fsync": False, "compression": "none", "async_save": False}
    settings = {**job.manager, **alone}

    def make_data(run: Run) -> ResumableLoader:
        run.manager.close()
        run.manager = CheckpointManager(scratch, **settings)
        run.until = run.report.next_step + steps
        return phases.make_data(run)

    again = dataclasses.replace(
        job,
        manager={**settings, "read_only": True},
        resume={**job.resume, "ref": f"seq:{seq}"},
        stop={"signals": (), "slurm": False},
        autosave={"every_steps": _NEVER},
        tracker=None,
        begin=None,
    )
    result = run_training(again, phases=dataclasses.replace(phases, make_data=make_data))
    if result.snapshot is None:
        raise SnapshotNotFoundError("steps done again left no snapshot", reference="latest")
    with CheckpointManager(scratch, **{**settings, "read_only": True}) as manager:
        return result.snapshot.digest, state_parts(manager, result.snapshot.seq)
