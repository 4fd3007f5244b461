"""`CheckpointManager`: the walks of a save and of a resume, and the life of a manager."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from varvite.background import BackgroundSave
from varvite.errors import CheckpointError, MismatchError
from varvite.facts import all_damaged, choices, falling_back, info_reader
from varvite.figures import Stats
from varvite.handles import SaveHandle
from varvite.lifecycle import close_unheard, track
from varvite.loading import load_rng
from varvite.merging import BackgroundMerge
from varvite.objects import RNG_KEYWORD
from varvite.ranks import Alone, in_step
from varvite.reading import SnapshotView
from varvite.records import ResumeReport, SaveTimings, SnapshotInfo
from varvite.repository import Ref
from varvite.restore import restore_objects
from varvite.saving import Payload, describe_save
from varvite.sessions import Sessions
from varvite.settings import MergePolicy, Settings, open_engine, read_settings
from varvite.staging import make_staging
from varvite.syncing import BackgroundSync
from varvite.training import rng as rng_state
from varvite.visibility import VISIBLE_SECONDS, when_visible

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.keep import Keep

__all__ = ["CheckpointManager", "MergePolicy"]


class CheckpointManager(Sessions):
    """Saves and restores the state of one training run in one folder, and a bucket behind it.

    One process at a time writes to a folder; others read it with `read_only=True`. A manager is used
    from one thread. Under several ranks each rank makes its own.

    Args:
        path: Folder, or `file://` url. It is made, with a repository in it, if it is absent or empty. Or the
            url of a bucket and a prefix, `s3://`, `gs://` or `az://`: saves then go to a folder in the cache
            first (`spool` of the options) and are pushed from there; `read_only=True` needs no folder.
        keep: What to keep (`varvite.keep`); `None` keeps everything. Applied after each commit.
        save_dtype: A narrower dtype to store floats in (`fp64`, `fp32`, `fp16`, `bf16`, `fp8_e4m3`,
            `fp8_e5m2`), or a dict of such by name or glob, of which the first that matches decides
            (`{"optimizer.*": "bf16"}`). Values are rounded to nearest even; a load gives them back in
            their own dtype. Integers and tensors without a dimension are never cast.
        compression: How chunks are coded, always without loss: `none`, `fast`, `max`, or `auto`, which
            codes as `fast` where coding is clearly faster than the store, and else stores as it is.
        delta: Whether a coded chunk may be stored as its difference to an older one.
        staging: How `save` makes sure that it commits what the tensors held when it was called.
            `copy`: it returns after a copy at memory speed.
            `cow`: large tensors of the CPU are copied in the background, from clones that torch makes
            without copying. Writes by torch are seen, and a tensor that is written before its turn is
            copied then. Not seen are writes through a NumPy array or a raw pointer taken from a tensor
            before the save: they reach the snapshot. Tensors with memory that torch did not allocate
            (`from_numpy`, shared, mapped) are copied at once.
            `overlap`: parameters and state of the optimizers that are saved are copied in the background,
            and the next `step` of these waits for it; everything else is copied at once. Between `save`
            and that step nothing else may write them, and the step must not be compiled, or its hooks may
            not run. A write that torch counts fails the save.
            Device tensors go to pinned memory on a side stream; with `overlap` only the device waits.
        async_save: Whether `save` returns before the snapshot is durable.
        merge: When old packs are rewritten in the background after a save; `None` for only by `merge_now`.
        remote: Url of a bucket that snapshots are pushed to behind the training loop, and read from where the
            folder lacks them. A bucket that is slow or away fails no save: `stats` tells, and `sync_now`,
            `save_final` and `close` raise it.
        sync_every: Push after every so many commits everything that the bucket lacks.
        remote_options: Options of the bucket, as the guide "Buckets" lists them: `endpoint`, `region`,
            `credentials`, `bandwidth`, `lease_seconds`, ...
        rank: This process's rank, or `auto` for the launcher's.
        world_size: Number of ranks, or `auto`.
        process_group: A `torch.distributed` group to agree over.
        threads: Threads that copy, digest and read; by default the cores of this process divided by the
            processes of this machine (`VARVITE_THREADS` overrides).
        chunk_bytes: Unit of reuse and verification in raw bytes, a power of two.
        fsync: `False` gives up durability against power loss, for tests.
        read_only: Changes nothing, not even leftovers of a crash, and needs no lock.
        encryption: Encrypts what is written, and refuses a repository that is not encrypted: it is so from
            its making on, or never. The key, 32 random bytes, comes from the variable `VARVITE_KEY` (64 hex
            digits or base64) or the output of the command in `VARVITE_KEY_COMMAND` with `True`; from another
            variable with `{"env": "NAME"}`; from a command with `{"command": [...]}`; or it is given,
            `{"key": bytes}`. By default an encrypted repository opens by the key of the environment. Without
            the key nothing can be read: keep it apart from the snapshots, and keep it.
        on_error: What the next call does with a failed background save: `raise` it, or `warn`.

    Raises:
        InvalidInputError: An argument is not legal.
        NotARepositoryError: The folder holds something else, or nothing and `read_only` is set.
        RepositoryLockedError: Another process writes here, or to the bucket.
        UnsupportedFormatError: A newer version wrote here.
        StoreError: The bucket can't be reached, and the folder is empty: whether this is a fresh start can't
            be known.
        CommitConflictError: The folder holds snapshots whose numbers the bucket has from another writer.
        EncryptionKeyError: It is encrypted, and the key is missing or another; or it is not, and was to be.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
        ...     start = manager.resume(model=model, optimizer=optimizer)
        ...     for step in range(start, 3):
        ...         handle = manager.save(step, model=model, optimizer=optimizer)
        ...     manager.flush()
        ...     [info.step for info in manager.snapshots()]
        [0, 1, 2]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: Keep | None = None,
        save_dtype: str | dict[str, str] | None = None,
        compression: str = "auto",
        delta: bool = True,
        staging: str = "copy",
        async_save: bool = True,
        merge: MergePolicy | None = None,
        remote: str | None = None,
        sync_every: int = 1,
        remote_options: dict[str, Any] | None = None,
        rank: int | str | None = None,
        world_size: int | str | None = None,
        process_group: Any = None,
        threads: int | None = None,
        chunk_bytes: int = 1 << 20,
        fsync: bool = True,
        read_only: bool = False,
        on_error: str = "raise",
        encryption: bool | dict[str, Any] | None = None,
    ) -> None:
        """Opens or makes the repository."""
        arguments = {name: value for name, value in locals().items() if name not in ("self", "path")}
        self._settings = read_settings(path, arguments)
        self._staging = make_staging(self._settings.staging)
        self._ranks = _ranks_of(self._settings)
        self._ranks.open(lambda: self._open(self._settings.access))
        self._process = os.getpid()
        self._background = BackgroundSave(on_error=self._settings.on_error, profile=self._settings.profile)
        self._closed = False
        track(self)
        self._syncing.warn_of_discarded()

    def _open(self, access: str) -> Engine:
        settings = self._settings
        self._engine = open_engine(settings, access)
        self._merging = BackgroundMerge(self._engine, on_error=settings.on_error)
        self._syncing = BackgroundSync(self._engine)
        return self._engine

    # ---- save ----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: dict[Any, Any] | None = None,
        /,
        *,
        metrics: dict[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
        rng: bool = True,
        rank_local: Collection[str] = (),
        **objects: Any,
    ) -> SaveHandle:
        """Copies the state and commits it in the background.

        When it returns, everything is copied, tensors and plain values alike: the caller may change
        anything at once (with `staging="cow"` and `"overlap"`, as the class says). It waits for the
        save before it, if one is still running.

        Args:
            step: The training step just finished, from 0.
            state: A dict that holds a nest of dicts, lists, tuples, tensors, arrays and plain values.
            metrics: Numbers to choose snapshots by; NaN and infinities are allowed.
            metadata: A small dict of plain values, read with the header.
            rng: Whether the state of this process's random number generators is saved too.
            rank_local: Keywords of objects that each rank has for itself, such as a cache. All others belong
                to all ranks: what several of them hold must be equal, and is written once.
            **objects: Modules, optimizers, anything with `state_dict()` and `load_state_dict()`, or plain
                nests, each saved under its keyword.

        Returns:
            A handle to wait on; its `timings.blocked` is what this call cost.

        Raises:
            InvalidInputError: An argument or a value of the state can't be saved; names its path.
            CheckpointError: An earlier background save failed; this one was not started.
            CommitConflictError: Another writer has taken the bucket over.
        """
        given = (step, state, metrics, metadata, objects)
        in_background = self._settings.async_save
        return self._save(*given, rng=rng, rank_local=rank_local, in_background=in_background)

    def save_sync(
        self,
        step: int,
        state: dict[Any, Any] | None = None,
        /,
        *,
        metrics: dict[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
        rng: bool = True,
        rank_local: Collection[str] = (),
        **objects: Any,
    ) -> SnapshotInfo:
        """Saves and returns when the snapshot is durable; arguments and errors as `save`.

        The bytes go straight from the tensors, without a copy of the state. No other thread may change
        them meanwhile. Ctrl-C ends it without a snapshot.
        """
        given = (step, state, metrics, metadata, objects)
        return self._save(*given, rng=rng, rank_local=rank_local, in_background=False).wait()

    def _save(
        self,
        step: int,
        state: dict[Any, Any] | None,
        metrics: dict[str, float] | None,
        metadata: dict[str, Any] | None,
        objects: dict[str, Any],
        *,
        rng: bool,
        rank_local: Collection[str],
        in_background: bool,
    ) -> SaveHandle:
        """Waits for the save before this one, raises what failed, and starts or does this one."""
        started = time.perf_counter()
        self._must_be_open("save")
        queue_seconds = self._background.wait()
        self._syncing.warn_once()
        settings = self._settings
        staging = self._staging if in_background else None

        def describe() -> Payload:
            self._background.raise_failure()
            return describe_save(
                step,
                state,
                metrics,
                metadata,
                objects,
                rng=rng,
                rank=settings.rank,
                rank_local=rank_local,
                casts=settings.casts,
                staging=staging,
            )

        job, report = self._ranks.start(self._engine, describe, staging)
        timings = SaveTimings(blocked=time.perf_counter() - started, queue=queue_seconds)
        handle = SaveHandle(int(step), job, timings, info_reader(self._engine), report)
        self._background.started(handle)
        return handle

    def save_final(
        self,
        step: int,
        state: dict[Any, Any] | None = None,
        /,
        *,
        metrics: dict[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
        rng: bool = True,
        rank_local: Collection[str] = (),
        **objects: Any,
    ) -> SnapshotInfo:
        """Saves for the last time, merges if the manager has a policy, and pushes; arguments as `save`.

        The snapshot is durable when it returns, and whole in the bucket if there is one. Where only the
        merge or the push failed, the snapshot is here.

        Raises:
            StoreError: The bucket can't be reached, or refuses.
        """
        given: dict[str, Any] = {
            "metrics": metrics,
            "metadata": metadata,
            "rng": rng,
            "rank_local": rank_local,
        }
        info = self.save_sync(step, state, **given, **objects)
        if self._ranks.decide("merge", lambda: self._settings.merge != "null"):
            with in_step(self._peers(), "merge"):
                if self._ranks.is_coordinator:
                    self.merge_now()
                    info = self._info(self._engine.header(info.seq))
        if self._settings.remote is not None:
            self._push()
        return info

    # ---- resume --------------------------------------------------------------------------------

    def resume(
        self,
        ref: Ref = "latest",
        *,
        strict: bool = True,
        require: bool = False,
        override: dict[str, Any] | None = None,
        rank_local: str = "derive",
        **objects: Any,
    ) -> ResumeReport:
        """Restores the run: objects in place, random number generators last.

        Everything is validated before anything changes. What was restored is written into the repository as
        a receipt, unless it is read-only. With `latest`, a damaged snapshot is passed over with a warning and
        the next older one is taken; any other reference never falls back.

        Args:
            ref: Which snapshot: a step, or a reference such as `latest`, `best:val_loss`, `tag:NAME`.
            strict: Names, shapes and dtypes must match both ways. Otherwise what matches is restored,
                what does not keeps its value, and the report lists it; nothing matching at all is an
                error even then.
            require: An empty repository is an error instead of a fresh start, and nothing is written then.
                An absent folder was made when the manager was opened; `read_only=True` makes none.
            override: Hyper-parameters to set in every optimizer after the restore, such as
                `{"lr": 1e-5}`, which schedulers beside it follow; `{"allow_narrowing": True}` lets values be
                rounded to a narrower dtype.
            rank_local: What becomes of state that belongs to one rank where another number of ranks has
                saved it. `derive`: generators get streams derived from the snapshot, its step and the rank,
                and the report says so; an object with a method `load_rank_states(states, rank=,
                world_size=)` is given those of all ranks; any other is an error. `exact`: an error.
            **objects: The live objects, under the keywords they were saved under.

        Returns:
            A report that works as an int: the next step, 0 on a fresh start.

        Raises:
            SnapshotNotFoundError: The reference names none, or there is none and `require` is set.
            MismatchError: Names, shapes or dtypes differ; lists all of them.
            CorruptionError: The snapshot, or with `latest` every snapshot, is damaged. Tensors that were
                filled before the damage was met hold values of that snapshot: don't train on.
        """
        return self._resume(
            ref, objects, strict=strict, require=require, override=override, rank_local=rank_local
        )

    def _resume(
        self,
        ref: Ref,
        objects: Mapping[str, Any],
        *,
        strict: bool = True,
        require: bool = False,
        override: Mapping[str, Any] | None = None,
        rank_local: str = "derive",
        verb: str = "resume",
    ) -> ResumeReport:
        self._must_be_open(verb)
        self._settle()
        self._receipt = None
        candidates = self._candidates(ref, require=require)
        if not candidates:
            return ResumeReport(step=None, next_step=0, fresh=True)
        skipped: list[tuple[int, str]] = []
        settings: dict[str, Any] = {
            "strict": strict,
            "override": override or {},
            "rank_local": rank_local,
            "skipped": skipped,
        }
        for seq in candidates:
            with falling_back(ref, seq, skipped):
                view = self._open_together(seq)
                return self._with_receipt(self._restore(view, objects, verb=verb, **settings), objects)
        raise all_damaged(skipped)

    def _candidates(self, ref: Ref, *, require: bool) -> list[int]:
        """Returns the numbers that a reference allows, best first, as the coordinator sees them."""

        def find() -> list[int]:
            if ref == "latest" and not require and not self._engine.candidates():
                return []
            return choices(self._engine, ref)

        found: list[int] = self._ranks.decide("choose a snapshot", find)
        return found

    def _open_together(self, seq: int) -> SnapshotView:
        """Opens a snapshot on every rank, or raises on every rank."""
        # What the coordinator has seen is there.
        seconds = 0.0 if self._ranks.is_coordinator else VISIBLE_SECONDS
        with in_step(self._peers(), "open the snapshot"):
            return when_visible(lambda: self._open_view(seq), seconds)

    def _restore(
        self,
        view: SnapshotView,
        objects: Mapping[str, Any],
        *,
        verb: str,
        strict: bool,
        override: Mapping[str, Any],
        rank_local: str,
        skipped: list[tuple[int, str]],
    ) -> ResumeReport:
        settings = self._settings
        peers = self._peers()
        with in_step(peers, "read the generators"):
            self._refuse_derived(view, rank_local)
            generators = load_rng(view, settings.rank) if self._is_own(view) else None
        restored = restore_objects(
            view,
            objects,
            strict=strict,
            override=override,
            peers=peers,
            world_size=settings.world_size,
            rank_local=rank_local,
        )
        with in_step(peers, "go on from the snapshot"):
            self._engine.adopt(view.reader, restored.is_whole)
            info = self._info(view.header)
            rng, rng_skipped = self._restore_rng(view, info, generators)
        return ResumeReport(
            step=info.step,
            next_step=info.step + 1,
            fresh=False,
            verb=verb,
            snapshot=info,
            skipped_snapshots=skipped,
            rng=rng,
            rng_skipped=rng_skipped,
            verified_bytes=view.verified_bytes,
            digest=info.digest,
            **restored.fields(),
        )

    def _refuse_derived(self, view: SnapshotView, rank_local: str) -> None:
        """Refuses a restore whose generators would not be those that were saved; alike on all ranks."""
        saved, here = view.header["world_size"], self._settings.world_size
        if rank_local == "exact" and saved != here and _has_generators(view):
            raise MismatchError(
                f"cannot restore the random number generators of each rank: {here} ranks restore, but the "
                f"snapshot was saved by: {saved}",
                hint='resume on as many ranks, or pass rank_local="derive" for new streams',
                name=RNG_KEYWORD,
                field="world_size",
                expected=here,
                found=saved,
            )

    def _is_own(self, view: SnapshotView) -> bool:
        """Whether as many ranks have saved: only then what one rank has for itself is this rank's."""
        return int(view.header["world_size"]) == self._settings.world_size

    def _restore_rng(
        self, view: SnapshotView, info: SnapshotInfo, generators: dict[str, Any] | None
    ) -> tuple[str, list[str]]:
        """Restores the generators, last of all; returns what became of them, and of which not."""
        settings = self._settings
        if self._is_own(view):
            return ("absent", []) if generators is None else ("restored", rng_state.restore(generators))
        if not _has_generators(view):
            return "absent", []
        # Saved by another number of ranks: each gets a stream of its own, the same at each resume from here.
        rng_state.derive(int(info.digest[:16], 16), settings.rank, info.step)
        return "derived", []

    # ---- waiting and the end -------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all saves are durable; a merge may go on.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            TimeoutError: A save is still running.
            CheckpointError: A save or a merge failed and no call has raised it yet.
        """
        self._must_be_open("flush")
        self._background.wait(timeout)
        self._syncing.warn_once()
        self._background.raise_failure()
        self._merging.raise_failure()

    def close(self) -> None:
        """Waits for saves, ends a merge, pushes, releases the lock, and raises what no call has raised yet.

        What an ended merge has done stays done; the next one goes on. What the bucket lacks is pushed; if the
        last push has failed it isn't tried again, but raised. Closing again does nothing.
        """
        if self._closed or os.getpid() != self._process:
            return
        # Ctrl-C here leaves the manager open: a lock let go of now would let another process sweep the
        # files of the save that still runs.
        self._background.wait()
        self._merging.stop()
        with contextlib.ExitStack() as failures:
            failures.callback(self._background.raise_failure)
            failures.callback(self._merging.raise_failure)
            failures.callback(self._end)
            self._syncing.finish()

    def _end(self) -> None:
        self._syncing.stop()
        self._closed = True
        self._staging.close()
        self._engine.close()
        self._ranks.close()

    def __del__(self) -> None:
        """Waits for the save that runs: a manager that goes out of scope must not lose it."""
        close_unheard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failure:
            error.add_note(f"a save failed as well: {type(failure).__name__}: {failure}")

    def __repr__(self) -> str:
        return f"CheckpointManager({self._settings.place!r})"

    def stats(self) -> Stats:
        """Returns figures of all saves of this manager that have ended."""
        stats = self._background.stats()
        errors = stats.errors + self._merging.errors()
        return dataclasses.replace(stats, errors=errors, sync=self._syncing.state())

    def print_stats(self) -> None:
        """Prints the figures of `stats`. Never raises, whatever the console."""
        text = self.stats().summary()
        with contextlib.suppress(OSError, ValueError):
            try:
                print(text, flush=True)  # noqa: T201 - printing is what it is for
            except UnicodeError:
                print(text.encode("ascii", "replace").decode("ascii"), flush=True)  # noqa: T201

    def _abandon(self) -> None:
        """In a forked child: forgets the parent's save and lock."""
        self._engine.abandon()
        self._closed = True


def _has_generators(view: SnapshotView) -> bool:
    return any(RNG_KEYWORD in view.rank_objects(rank) for rank in view.reader.rank_structures())


def _ranks_of(settings: Settings) -> Alone:
    """Returns what connects this rank with the others, if something does."""
    if not settings.together:
        return Alone(settings)
    from varvite.distributed.together import Together

    return Together(settings)


def open_for_tags(
    path: str | os.PathLike[str], remote_options: Mapping[str, Any] | None = None
) -> CheckpointManager:
    """Opens a repository only to read, and to add and remove names.

    It needs no lock, so that a person can pin beside a run that saves. For the command line and forks.

    Args:
        path: Folder, or url of a bucket.
        remote_options: Options of the bucket.

    Raises:
        NotARepositoryError: There is no repository here.
    """
    options = None if remote_options is None else dict(remote_options)
    manager = CheckpointManager(path, read_only=True, remote_options=options, rank=0, world_size=1)
    manager._open("tag")  # noqa: SLF001 - the other way to open one, in the file of its class
    return manager
