"""The verbs that begin a run from the snapshot of another one: `warm_start` and `fork`.

They are methods of `CheckpointManager`; `varvite.training.starting` does the work.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from varvite.records import ResumeReport
from varvite.repository import Ref, Repository
from varvite.training import starting

if TYPE_CHECKING:
    from varvite.weights.rules import KeyRules

__all__ = ["Beginnings"]


class Beginnings(Repository):
    """A repository in which a run can begin from another's state."""

    def warm_start(
        self,
        source: str | os.PathLike[str] | Repository,
        ref: Ref = "latest",
        *,
        rules: KeyRules | None = None,
        strict: bool = True,
        skip_shape_mismatches: bool = False,
        allow_narrowing: bool = False,
        over_snapshots: bool = False,
        **objects: Any,
    ) -> ResumeReport:
        """Begins a new run at step 0 with the weights of another: no optimizer state, no counters.

        Everything is decided and checked before anything changes; `varvite.training.starting.plan_warm_start`
        shows the decision. Random number generators are untouched. The other repository is read without its
        lock. Call it on every rank, after a `resume` whose report is fresh: the snapshot is the same for all.

        Args:
            source: Folder or url of the other repository, or an open manager of it.
            ref: Which snapshot of it. None falls back here, `latest` included: a damaged one is an error.
            rules: Prefixes of saved names, the keyword first, and what stands in their place; `None` leaves
                those names out. `{"ema.module": "model", "model": None}` loads averaged weights.
            strict: Names must match both ways, within the modules given, and no rule may be idle.
            skip_shape_mismatches: What has another shape keeps its value, and the report lists it.
            allow_narrowing: Values may be rounded to a narrower dtype.
            over_snapshots: Begin anew although this repository holds snapshots; they stay.
            **objects: The live modules, under the keywords that names start with after the rules, and
                perhaps a `RunIdentity`, which begins anew.

        Returns:
            A report that works as an int: 0.

        Raises:
            InvalidInputError: This repository holds snapshots, or is the source; or an object is no module.
            MismatchError: Names, shapes or dtypes differ and that is not allowed, two names go to one place,
                or a module would get nothing at all.
            SnapshotNotFoundError: The reference names none.
            CorruptionError: The snapshot is damaged. Tensors that were filled before the damage was met hold
                its values.

        Example:
            >>> import tempfile, torch
            >>> from varvite import CheckpointManager
            >>> with CheckpointManager(tempfile.mkdtemp()) as parent:
            ...     info = parent.save_sync(9, model=torch.nn.Linear(2, 1))
            ...     with CheckpointManager(tempfile.mkdtemp()) as manager:
            ...         report = manager.warm_start(parent, model=torch.nn.Linear(2, 1))
            >>> report.next_step, report.matched
            (0, ['model.weight', 'model.bias'])
        """
        self._must_be_open("warm start")
        self._settle()
        report = starting.start_warm(
            self._engine,
            source,
            ref,
            objects,
            rank=self._settings.rank,
            ranks=self._peers(),
            rules=rules,
            strict=strict,
            skip_shape_mismatches=skip_shape_mismatches,
            allow_narrowing=allow_narrowing,
            over_snapshots=over_snapshots,
        )
        return self._with_receipt(report, objects)

    def fork(
        self,
        parent: str | os.PathLike[str] | Repository,
        ref: Ref = "latest",
        *,
        name: str | None = None,
        pin: bool = True,
        strict: bool = True,
        allow_narrowing: bool = False,
        over_snapshots: bool = False,
        **objects: Any,
    ) -> ResumeReport:
        """Begins a new run from the state of another, with the settings of this program.

        Weights, optimizer state and whatever else is given are restored, the rest of the snapshot is left
        out. Optimizers keep the hyper-parameters their program set, and a scheduler that is not given stays
        as it was built. Random number generators are untouched. The snapshot is pinned in the parent's
        repository, so that it stays for as long as somebody wants to know where this run came from. Call it
        on every rank, after a `resume` whose report is fresh.

        Args:
            parent: Folder or url of the other repository, or an open manager of it.
            ref: Which snapshot of it. None falls back here, `latest` included: a damaged one is an error.
            name: Name of this run, for its identity and the pin.
            pin: `False` writes nothing to the parent's repository.
            strict: Names, shapes and dtypes must match both ways, in the objects given.
            allow_narrowing: Values may be rounded to a narrower dtype.
            over_snapshots: Begin anew although this repository holds snapshots; they stay.
            **objects: The live objects, under the keywords they were saved under, and perhaps a
                `RunIdentity`, which begins anew and notes the parent.

        Returns:
            A report that works as an int: the step after the parent's. `overridden` lists the
            hyper-parameters that differ from the parent's.

        Raises:
            InvalidInputError: This repository holds snapshots, or is the parent's.
            MismatchError: Names, shapes, dtypes or the groups of an optimizer differ.
            StoreError: The parent's repository can't be written to, and `pin` is set.
            SnapshotNotFoundError: The reference names none.
            CorruptionError: The snapshot is damaged. Tensors that were filled before the damage was met hold
                its values.

        Example:
            >>> import tempfile, torch
            >>> from varvite import CheckpointManager
            >>> model = torch.nn.Linear(2, 1)
            >>> with CheckpointManager(tempfile.mkdtemp()) as parent:
            ...     slow = torch.optim.SGD(model.parameters(), lr=0.1)
            ...     info = parent.save_sync(9, model=model, optimizer=slow)
            ...     with CheckpointManager(tempfile.mkdtemp()) as manager:
            ...         fast = torch.optim.SGD(model.parameters(), lr=0.5)
            ...         report = manager.fork(parent, model=model, optimizer=fast)
            >>> report.next_step, report.overridden
            (10, ['optimizer.param_groups.0.lr: 0.1 -> 0.5'])
        """
        self._must_be_open("fork")
        self._settle()
        report = starting.fork_run(
            self._engine,
            parent,
            ref,
            objects,
            rank=self._settings.rank,
            ranks=self._peers(),
            world_size=self._settings.world_size,
            default_name=PurePosixPath(self._settings.place).name,
            name=name,
            pin=pin,
            strict=strict,
            allow_narrowing=allow_narrowing,
            over_snapshots=over_snapshots,
        )
        return self._with_receipt(report, objects)
