"""The proof of a resume: do some steps again in a fresh process, and compare with what was recorded."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from varvite.errors import CheckpointError, InvalidInputError, SnapshotNotFoundError
from varvite.training.checks import check_count
from varvite.training.run.job import Job

if TYPE_CHECKING:
    from varvite.records import SnapshotInfo
    from varvite.training.loader import ResumableLoader
    from varvite.training.run.context import Run, StepFunction
    from varvite.training.run.phases import Phases

__all__ = ["Proof", "prove_resume"]

_NAMES_LIMIT = 20
"""How many names of what differs a proof lists."""
_NEVER = 1 << 62
_OF_BUCKET = ("remote", "remote_options", "sync_every")
"""Arguments of a manager that say where a run is pushed."""

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
        narrowed: Whether the first snapshot holds values that `save_dtype` rounded. No resume from such a one
            is exact, so states differ by choice.
    """

    from_step: int
    to_step: int
    compared_with: str
    expected: str
    found: str
    different: list[str]
    narrowed: bool = False

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
        why = ", as it must after `save_dtype` has rounded what it began with" if self.narrowed else ""
        return f"{steps}: differs from {with_what}{why} in: {', '.join(self.different)}"


def prove_resume(
    job: Job,
    *,
    steps: int | None = None,
    step_fn: StepFunction | None = None,
    phases: Phases | None = None,
) -> Proof:
    """Does the last `steps` steps again in a fresh process, and compares states bit for bit.

    The fresh process resumes from the snapshot that is `steps` steps older than the newest one, trains, and
    comes to the step of the newest, whose state digest was recorded when it was saved. Where there is no
    such pair of snapshots, two fresh processes do the steps after the newest one, and are compared with each
    other: that proves a repeatable step, and not that the run before was one.

    The repository is only read, so that the run may go on meanwhile. Nothing is drawn from this process's
    generators. Hooks are not called, and no tracker is opened. Called by one rank.

    Args:
        job: The job, of functions that a fresh process can import. A script that calls this does so under
            `if __name__ == "__main__":`, as with any process that `multiprocessing` spawns.
        steps: How many steps; `None` for those between the two newest snapshots.
        step_fn: The one that the job was run with.
        phases: Functions instead of those of `varvite.training.run.phases`.

    Returns:
        The proof; `proof.equal` is the answer.

    Raises:
        SnapshotNotFoundError: There is no snapshot, or with `steps=None` only one.
        InvalidInputError: The job can't be sent to another process, or `steps` is below 1.
        CheckpointError: The fresh process ended, or stopped at a loss that is not finite. What else fails in
            it is raised here as it is.

    Example:
        >>> prove_resume(job)                                       # doctest: +SKIP
        Proof(from_step=79, to_step=99, compared_with='recorded', ...)
    """
    if steps is not None:
        check_count("steps", steps, least=1)
    _check_portable(job, step_fn, phases)
    start, end = _choose(job, steps)
    count = steps if steps is not None else _gap(start, end)
    # Read before the steps are done: the run may go on meanwhile, and give up its older snapshots.
    recorded = None if end is None else (end.digest, _parts(job, end.seq))
    narrowed = _is_narrowed(job, start.seq)
    with tempfile.TemporaryDirectory(prefix="varvite-proof-") as scratch:

        def do_again(name: str) -> tuple[str, Digests]:
            folder = os.path.join(scratch, name)
            return _in_fresh_process(scratch, (job, step_fn, phases, start.seq, count, folder))

        found, found_parts = do_again("first")
        expected, expected_parts = do_again("second") if recorded is None else recorded
    names = found_parts.keys() | expected_parts.keys()
    different = sorted(name for name in names if found_parts.get(name) != expected_parts.get(name))
    return Proof(
        from_step=start.step,
        to_step=start.step + count,
        compared_with="recorded" if end is not None else "second run",
        expected=expected,
        found=found,
        different=different[:_NAMES_LIMIT],
        narrowed=narrowed,
    )


def _check_portable(job: Job, step_fn: StepFunction | None, phases: Phases | None) -> None:
    """Refuses what a fresh process can't import, before one is started."""
    for name, value in [*vars(job).items(), ("step_fn", step_fn), ("phases", phases)]:
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
        later = end
        # What a rollback saved did not come from the snapshot before it by doing steps.
        while not _is_rolled_back(later) and later.parent in by_seq:
            start = by_seq[later.parent]
            # A resume from an older snapshot, or a step saved twice, makes no pair.
            if start.step < end.step and (steps is None or start.step + steps == end.step):
                return start, end
            later = start
    if steps is None:
        raise SnapshotNotFoundError(
            "no two snapshots of one line to compare",
            hint="give steps=, to compare two fresh processes with each other",
            reference="latest",
        )
    return infos[-1], None


def _is_rolled_back(info: SnapshotInfo) -> bool:
    return "rolled_back_to" in info.metadata


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


def _is_narrowed(job: Job, seq: int) -> bool:
    """True where a snapshot stores values in a narrower dtype than they had."""
    from varvite.reading import entries_of

    with _reader(job) as manager:
        rows = entries_of(manager._engine.open(seq))  # noqa: SLF001 - as in `state_parts`
    return any(row.stored_dtype != row.dtype for row in rows)


def _in_fresh_process(scratch: str, task: tuple[Any, ...]) -> tuple[str, Digests]:
    """Does the task in a process of its own, started anew and not forked, which ends with this one."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(
            1, mp_context=context, initializer=_end_with, initargs=(scratch,)
        ) as executor:
            return executor.submit(_do_again, *task).result()
    except BrokenProcessPool as error:
        raise CheckpointError(
            "cannot do steps again: the fresh process ended before it was done",
            hint="its error output says why; the functions of the job must lie in a module or script file, "
            'and a script must start its work under `if __name__ == "__main__":`',
        ) from error


def _end_with(scratch: str) -> None:
    """In the fresh process: ends it when its parent is killed, which could then not do so."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _do_again(
    job: Job,
    step_fn: StepFunction | None,
    phases: Phases | None,
    seq: int,
    steps: int,
    folder: str,
) -> tuple[str, Digests]:
    """In the fresh process: resumes read-only, does the steps, and saves to a repository of its own."""
    from varvite import CheckpointManager
    from varvite.training.run.entry import run_training
    from varvite.training.run.phases import Phases

    phases = Phases() if phases is None else phases
    alone = {"keep": None, "merge": None, "fsync": False, "compression": "none", "async_save": False}
    settings = {**job.manager, **alone}
    # What is done again belongs to this process: the run's bucket is read and never written.
    local = {name: value for name, value in settings.items() if name not in _OF_BUCKET}

    def make_data(run: Run) -> ResumableLoader:
        run.manager.close()
        run.manager = CheckpointManager(folder, **local)
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
    result = run_training(again, step_fn=step_fn, phases=dataclasses.replace(phases, make_data=make_data))
    if result.snapshot is None:
        raise CheckpointError(f"steps done again stopped after step {result.step}: {result.reason}")
    with CheckpointManager(folder, **{**local, "read_only": True}) as manager:
        return result.snapshot.digest, state_parts(manager, result.snapshot.seq)
