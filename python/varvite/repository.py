"""An open repository: what there is in it, loads, keeping and letting go, and receipts.

`Beginnings` adds the verbs that begin a run, and `CheckpointManager` the walks of a save and of a resume.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from varvite.errors import CheckpointError, InvalidInputError
from varvite.facts import all_damaged, choices, falling_back, make_info, open_first, read_tags, reference_text
from varvite.loading import fill_state_dict, load_nest, load_objects, load_rng, load_tensors
from varvite.notices import warn
from varvite.ranks import in_step
from varvite.reading import SnapshotView
from varvite.records import (
    EntryInfo,
    Finding,
    Kept,
    Loaded,
    LoadReport,
    MergeReport,
    Mismatched,
    Removed,
    ResumeReport,
    RetentionPlan,
    SnapshotInfo,
    SyncReport,
    VerifyReport,
)
from varvite.training.receipts import conclude, read_receipts, write_receipt

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.background import BackgroundSave
    from varvite.merging import BackgroundMerge
    from varvite.native_types import Header
    from varvite.ranks import Alone
    from varvite.settings import Settings
    from varvite.syncing import BackgroundSync
    from varvite.training.receipts import Receipt

__all__ = ["Ref", "Repository"]

Ref = int | str


class Repository:
    """What one can do with a repository beside saving and restoring.

    The parts are made by `CheckpointManager`.
    """

    _engine: Engine
    _settings: Settings
    _background: BackgroundSave
    _merging: BackgroundMerge
    _syncing: BackgroundSync
    _process: int
    _ranks: Alone
    _receipt: Receipt | None = None  # of what was restored last
    _closed = True  # until it is open: `__del__` runs for one that could not be made, too

    # ---- load ----------------------------------------------------------------------------------

    def load(
        self,
        ref: Ref = "latest",
        *,
        names: list[str] | None = None,
        objects: list[str] | None = None,
        device: Any = None,
        mmap: bool = False,
    ) -> Loaded:
        """Reads a snapshot into new tensors.

        Args:
            ref: Which snapshot. With `latest`, damaged ones are passed over with a warning.
            names: Names, or globs over names (`model.*`); then the result is flat, tensors by name.
            objects: Keywords, or keys of the positional state, to read alone: what a run must know before it
                builds its model, such as its settings, costs no read of the model.
            device: Where tensors go; by default CPU.
            mmap: Give tensors that are views of the file where chunks are stored raw: no copy is made,
                writing to them changes no file. Another program that truncates the pack ends this
                process with SIGBUS at the next read, so the default reads.

        Returns:
            The nest that was saved, objects under their keyword.

        Raises:
            SnapshotNotFoundError: There is no such snapshot.
            TensorNotFoundError: A name or glob matches nothing, or the snapshot has no such object.
            InvalidInputError: Both `names` and `objects` are given.
            CorruptionError: Bytes differ from what was written.

        Example:
            >>> import tempfile
            >>> from varvite import CheckpointManager
            >>> with CheckpointManager(tempfile.mkdtemp()) as manager:
            ...     info = manager.save_sync(7, settings={"width": 64}, weights=[1.0, 2.0])
            ...     manager.load(objects=["settings"])
            {'settings': {'width': 64}}
        """
        self._must_be_open("load")
        if names is not None and objects is not None:
            reason = "names are read flat and objects as nests: ask for one of them"
            raise InvalidInputError(f"invalid objects: {reason}", what="objects", reason=reason)
        self._settle()
        skipped: list[tuple[int, str]] = []
        for seq in choices(self._engine, ref):
            with falling_back(ref, seq, skipped):
                view = self._open_view(seq)
                info = self._info(view.header)
                if names is not None:
                    patterns = [names] if isinstance(names, str) else names
                    return Loaded(load_tensors(view, patterns, device=device, mmap=mmap), info)
                if objects is not None:
                    keywords = [objects] if isinstance(objects, str) else objects
                    return Loaded(load_objects(view, keywords, device=device, mmap=mmap), info)
                nest = load_nest(view, device=device, mmap=mmap)
                return Loaded(nest, info, load_rng(view, self._settings.rank))
        raise all_damaged(skipped)

    def load_latest(
        self, *, names: list[str] | None = None, device: Any = None, mmap: bool = False
    ) -> Loaded | None:
        """Reads the newest usable snapshot; `None` only if the repository holds none at all.

        Arguments, result and errors as `load`.
        """
        self._must_be_open("load")
        self._settle()
        if not self._engine.candidates():
            return None
        return self.load("latest", names=names, device=device, mmap=mmap)

    def load_into(self, state_dict: dict[str, Any], ref: Ref = "latest", *, prefix: str = "") -> LoadReport:
        """Fills the tensors of a state dict in place with the entries of the same names.

        Args:
            state_dict: A module's `state_dict()`, or a nest of dicts with tensors.
            ref: Which snapshot. With `latest`, damaged ones are passed over with a warning.
            prefix: What stands before each name in the snapshot, such as `model`.

        Returns:
            What was filled and what was not; a tensor whose shape or dtype differs is left alone.

        Raises:
            MismatchError: No name matched.
            CorruptionError: Bytes differ from what was written.
        """
        self._must_be_open("load")
        self._settle()
        skipped: list[tuple[int, str]] = []
        for seq in choices(self._engine, ref):
            with falling_back(ref, seq, skipped):
                view = self._open_view(seq)
                found = fill_state_dict(view, state_dict, prefix)
                return LoadReport(
                    matched=found.matched,
                    missing=found.missing,
                    unexpected=found.unexpected,
                    mismatched=[Mismatched(*row) for row in found.mismatched],
                )
        raise all_damaged(skipped)

    def _open_view(self, seq: int) -> SnapshotView:
        return SnapshotView(self._engine, seq, self._settings.rank)

    # ---- what there is -------------------------------------------------------------------------

    def snapshots(self) -> list[SnapshotInfo]:
        """Lists the snapshots in commit order, without those that a later one of the same step supersedes.

        Damaged ones are left out, with a warning.
        """
        self._must_be_open("list")
        self._settle()
        headers, damaged = self._engine.snapshots()
        for seq, why in damaged:
            warn(f"snapshot {seq} can't be listed: {why}")
        newest = {header["step"]: header["seq"] for header in headers}
        tags = read_tags(self._engine)
        return [make_info(header, tags) for header in headers if newest[header["step"]] == header["seq"]]

    def info(self, ref: Ref = "latest") -> SnapshotInfo:
        """Reads the facts of one snapshot.

        Raises:
            SnapshotNotFoundError: There is no such snapshot.
        """
        self._must_be_open("look")
        return self._info(self._view(ref).header)

    def entries(self, ref: Ref = "latest") -> list[EntryInfo]:
        """Lists the tensors of a snapshot, from its manifest alone.

        Raises:
            SnapshotNotFoundError: There is no such snapshot.
        """
        self._must_be_open("look")
        return [
            EntryInfo(
                name=row.name,
                dtype=row.dtype,
                stored_dtype=row.stored_dtype,
                shape=tuple(row.shape),
                raw_bytes=row.raw_bytes,
                stored_bytes=row.stored_bytes,
                nonfinite=row.nonfinite or 0,
                abs_max=row.abs_max,
                l2_norm=row.l2_norm,
                rank=row.rank,
            )
            for row in self._view(ref).rows
        ]

    def _view(self, ref: Ref) -> SnapshotView:
        self._settle()
        return open_first(self._engine, ref, self._settings.rank)

    def verify(self, ref: Ref | None = None, *, sample: float = 1.0) -> VerifyReport:
        """Reads what snapshots refer to and compares it with its digests.

        Args:
            ref: Which snapshot; `None` for all.
            sample: Share of the chunks to read, in (0, 1].

        Returns:
            Damage is a finding, not an error.
        """
        self._must_be_open("verify")
        if not 0 < sample <= 1:
            raise InvalidInputError(f"invalid sample `{sample}`: must be in (0, 1]", what="sample")
        self._settle()
        seq = None if ref is None else self._engine.resolve(reference_text(ref))
        found = self._engine.verify(seq, sample)
        findings = [Finding(*row) for row in found["findings"]]
        return VerifyReport(ok=not findings, checked_bytes=found["checked_bytes"], findings=findings)

    # ---- keeping and letting go ----------------------------------------------------------------

    def prune(self, *, dry_run: bool = False) -> RetentionPlan:
        """Removes what the policy does not keep, and says why each snapshot stays or goes.

        Args:
            dry_run: Only say it.
        """
        self._must_be_open("prune")
        self._settle()
        plan = self._engine.prune(dry_run)
        return RetentionPlan(
            kept=[Kept(*row) for row in plan["kept"]],
            removed=[Removed(*row) for row in plan["removed"]],
            freed_bytes=plan["freed_bytes"],
        )

    def pin(self, ref: Ref, name: str) -> None:
        """Names a snapshot, so that retention keeps it until `unpin`.

        Raises:
            InvalidInputError: The name is not legal, or names another snapshot.
        """
        self._must_be_open("pin")
        self._engine.pin(self._view(ref).header["seq"], name)

    def unpin(self, name: str) -> None:
        """Removes a name; the snapshot itself stays until retention takes it.

        Raises:
            SnapshotNotFoundError: There is no such name.
        """
        self._must_be_open("unpin")
        self._engine.unpin(name)

    def delete(self, ref: Ref) -> None:
        """Deletes a snapshot and the packs that only it refers to. A reader that holds it finishes.

        Raises:
            InvalidInputError: It is pinned.
            SnapshotNotFoundError: There is no such snapshot.
        """
        self._must_be_open("delete")
        self._settle()
        self._engine.delete(self._engine.resolve(reference_text(ref)))

    def merge_now(self) -> MergeReport:
        """Rewrites what is live in old packs, so that they can go; every snapshot stays as it is.

        It waits for the save and the merge that run, then merges everything of which something is gained:
        a second one has nothing to do. Loads and saves go on beside it. Ctrl-C ends it.

        Returns:
            What was done. Damage is a finding, not an error: the snapshots concerned are left alone.

        Raises:
            InvalidInputError: The manager is read-only.
            CheckpointError: It failed, or an earlier one in the background that no call has raised.
        """
        self._must_be_open("merge")
        self._settle()
        self._merging.wait()
        self._merging.raise_failure()
        return self._merging.now()

    def sync_now(self) -> SyncReport:
        """Waits for the save that runs, then pushes everything that the bucket lacks, and waits for that.

        Under several ranks all call it; the coordinator pushes. Ctrl-C ends it, and what was sent stays sent.

        Returns:
            What this push did; nothing is pending then.

        Raises:
            InvalidInputError: The manager has no bucket.
            StoreError: The bucket can't be reached, or refuses.
            CommitConflictError: Another writer has taken the bucket over; this manager writes nothing more.
            CheckpointError: A background save failed and no call has raised it yet.
        """
        self._must_be_open("push")
        self._settle()
        self._background.raise_failure()
        return self._push()

    def _push(self) -> SyncReport:
        report = SyncReport()
        with in_step(self._peers(), "push"):
            if self._ranks.is_coordinator:
                report = self._syncing.now()
        return report

    # ---- receipts ------------------------------------------------------------------------------

    def receipts(self, newest: int | None = None) -> list[Receipt]:
        """Lists what was restored from here or into here, oldest first.

        Damaged receipts are left out, with a warning.

        Args:
            newest: Only the last so many; `None` for all.

        Raises:
            InvalidInputError: `newest` is negative.
        """
        self._must_be_open("list receipts")
        if newest is not None and newest < 0:
            reason = "must be at least 0, or None"
            raise InvalidInputError(f"invalid newest `{newest}`: {reason}", what="newest", reason=reason)
        return read_receipts(self._engine, newest)

    @property
    def last_receipt(self) -> Receipt | None:
        """Receipt of what this manager has restored last, with its verdict once that is recorded.

        `None` where nothing was restored, or no receipt could be written.
        """
        return self._receipt

    def record_verdict(
        self, verdict: str, reason: str = "", evidence: Mapping[str, Any] | None = None
    ) -> Receipt:
        """Completes the receipt of the last resume: says whether the run went on as before.

        Durable when it returns. A later verdict replaces an earlier one. To be called on the coordinator.

        Args:
            verdict: `continuous`, `discontinuous` or `not evaluated`.
            reason: Why, in words.
            evidence: Figures behind it: a dict of plain values.

        Returns:
            The receipt with the verdict.

        Raises:
            InvalidInputError: This manager has written no receipt, there is no such verdict, or the evidence
                holds what is no plain data.
            StoreError: It can't be written; the receipt is as it was.

        Example:
            >>> import tempfile
            >>> from varvite import CheckpointManager
            >>> folder = tempfile.mkdtemp()
            >>> with CheckpointManager(folder) as manager:
            ...     info = manager.save_sync(7, {"epoch": 3})
            ...     report = manager.resume()
            ...     manager.record_verdict("not evaluated", "the run ended first").reason
            'the run ended first'
        """
        self._must_be_open("record a verdict")
        if self._receipt is None:
            reason = "this manager has restored nothing, or could not write a receipt of it"
            raise InvalidInputError(
                f"cannot record a verdict: {reason}",
                hint="call resume() first, on a manager that may write",
                what="verdict",
                reason=reason,
            )
        self._receipt = conclude(self._engine, self._receipt, verdict, reason, evidence)
        return self._receipt

    def _with_receipt(self, report: ResumeReport, objects: Mapping[str, Any]) -> ResumeReport:
        """Writes the receipt of a report; what was restored stands also where that fails."""
        settings, self._receipt = self._settings, None
        if settings.access != "write":
            return report
        try:
            self._receipt = write_receipt(
                self._engine, report, objects=objects, world_size=settings.world_size
            )
        except CheckpointError as error:
            warn(f"no receipt of the {report.verb} can be written: {error}")
        return dataclasses.replace(report, receipt=self._receipt)

    # ---- of every call -------------------------------------------------------------------------

    def _must_be_open(self, what: str) -> None:
        if os.getpid() != self._process:
            reason = f"it was opened by process {self._process}, and this is a fork of it"
            raise InvalidInputError(
                f"cannot {what}: {reason}", hint="make a new manager here", what="manager"
            )
        if self._closed:
            hint = "do it before close(), within the `with` block of the manager"
            raise InvalidInputError(f"cannot {what}: the manager is closed", hint=hint, what="manager")

    def _peers(self) -> Alone | None:
        """Returns the ranks that do everything together with this one; `None` where it does so alone."""
        return self._ranks if self._settings.together else None

    def _settle(self) -> None:
        """Waits for the running save, so that a read sees what this process has saved before."""
        self._background.wait()

    def _info(self, header: Header) -> SnapshotInfo:
        return make_info(header, read_tags(self._engine))
