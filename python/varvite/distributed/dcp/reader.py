"""The reader for `torch.distributed.checkpoint`: only the ranges that a rank needs, verified, into place."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader

from varvite._native import describe_dense
from varvite.distributed.dcp import sessions
from varvite.distributed.dcp.catalog import Catalog, read_catalog
from varvite.distributed.dcp.identifiers import is_reference, reference_of
from varvite.errors import (
    InvalidInputError,
    MismatchError,
    TensorNotFoundError,
)
from varvite.facts import make_info, open_first, read_tags, reference_text
from varvite.plans import may_convert
from varvite.reading import EntryRow, SnapshotView
from varvite.settings import open_engine
from varvite.state import structure_leaves, unflatten
from varvite.tensors import allocate
from varvite.visibility import when_visible

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from varvite._native import Engine
    from varvite.records import SnapshotInfo

__all__ = ["VarviteReader"]

_BUFFER_BYTES = 256 << 20
"""Bytes that are read ahead for tensors whose memory can't be written directly, such as a device's."""


class _Choice(NamedTuple):
    """The snapshot that the coordinator reads, and so all ranks.

    Attributes:
        seq: Its commit number.
    """

    seq: int


class _Target(NamedTuple):
    """A region of an entry on its way to a tensor.

    Attributes:
        item: The item of the plan.
        row: The entry.
        region: Offsets and lengths in the entry, in elements.
        tensor: Where it goes, in the planner's hands.
        buffer: Dense memory of the CPU that is read into: the tensor itself where it can be.
    """

    item: ReadItem
    row: EntryRow
    region: tuple[list[int], list[int]]
    tensor: torch.Tensor
    buffer: torch.Tensor | None


class VarviteReader(StorageReader):  # type: ignore[misc]
    """Loads with `dcp.load` from a repository, on any number of ranks.

    Every rank makes its own; what all of them read is the coordinator's choice. It needs no lock and writes
    nothing. Every byte is verified before it reaches a tensor, and no pickle of the file is loaded, whoever
    wrote it. Snapshots of `CheckpointManager` are read too: by the names that PyTorch gives the same nest.

    Args:
        path: Folder, or `file://` url, of the repository.
        ref: Which snapshot: a step, `latest`, `latest~2`, `best:loss`, `tag:NAME`... With `latest`, snapshots
            with a damaged manifest are passed over with a warning.
        allow_pickle: Whether values that were saved with `allow_pickle=True` are given to the planner, which
            unpickles them. Only for files of people you trust.
        allow_narrowing: Whether values may be rounded to the narrower dtype of a live tensor.
        threads: Threads that read and decode; by default as for `VarviteWriter`.

    Raises:
        InvalidInputError: An argument is not legal.

    Attributes:
        checkpoint_id: The id of the load that comes or runs; `None` where none was given.
        snapshot: What the last load has read, or `None`.
        verified_bytes: Raw bytes that this rank has read for the last load, each verified.

    Example:
        >>> import tempfile, torch
        >>> import torch.distributed as dist
        >>> import torch.distributed.checkpoint as dcp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> from varvite import CheckpointManager
        >>> folder = tempfile.mkdtemp()
        >>> with CheckpointManager(folder) as manager:
        ...     info = manager.save_sync(7, {"weight": torch.arange(3)})
        >>> state = {"weight": torch.zeros(3, dtype=torch.int64)}
        >>> reader = VarviteReader(folder, "latest")
        >>> dcp.load(state, storage_reader=reader)
        >>> state["weight"].tolist(), reader.snapshot.step
        ([0, 1, 2], 7)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        ref: int | str = "latest",
        *,
        allow_pickle: bool = False,
        allow_narrowing: bool = False,
        threads: int | None = None,
    ) -> None:
        """Checks the arguments; nothing is opened before a load."""
        super().__init__()
        self._settings = sessions.read_options(path, threads=threads, read_only=True)
        self._ref = reference_text(ref)
        self._allow_pickle = allow_pickle
        self._allow_narrowing = allow_narrowing
        self._begin_load(None)
        self.verified_bytes = 0
        self.snapshot: SnapshotInfo | None = None

    def _begin_load(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        self.checkpoint_id = checkpoint_id
        self._load_id = uuid.uuid4().hex
        self._opened: tuple[Engine, SnapshotView, Catalog] | None = None

    # ---- what PyTorch calls, in this order -----------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another load.

        Args:
            checkpoint_id: Which snapshot, in place of `ref`: a step, as for `VarviteWriter.reset`, or a
                reference such as `latest`. The repository itself says nothing.

        Raises:
            InvalidInputError: It is something else.
        """
        if checkpoint_id is not None:
            self._ref = reference_of(checkpoint_id, self._settings.path) or self._ref
        self._begin_load(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Chooses and opens the snapshot, and describes what it holds.

        Args:
            *args: None are known.
            **kwargs: `rank`, where PyTorch looks for metadata of a rank's own, which there is none of.

        Raises:
            SnapshotNotFoundError: There is no such snapshot, or no repository.
            CorruptionError: Its manifest is damaged.
        """
        del args, kwargs
        engine = open_engine(self._settings, "read")
        view = open_first(engine, self._ref, 0)
        return self._open(engine, view).metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Has nothing to set up: `read_metadata` has opened the snapshot."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells all ranks which snapshot the coordinator reads; on the coordinator."""
        _engine, view, _catalog = self._must_be_open()
        choice = _Choice(view.header["seq"])
        return [dataclasses.replace(plan, storage_data=choice) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Reads the items of this rank's plan: those ranges of the stored chunks that they lie in.

        Args:
            plan: The final plan of this rank.
            planner: Gives the tensors that are filled, and takes the values.

        Returns:
            A future that is done.

        Raises:
            CorruptionError: Bytes differ from what was written. Tensors that were filled before hold them.
            MismatchError: A live tensor has a dtype that would change values. Nothing was read.
            InvalidInputError: A value is a pickle, and `allow_pickle` is not set.
            SnapshotNotFoundError: This rank does not see the snapshot that the coordinator reads.
        """
        engine, view, catalog = self._must_be_open()
        choice = plan.storage_data
        if isinstance(choice, _Choice) and choice.seq != view.header["seq"]:
            # Another was committed, or became visible here, between the looks of the two ranks.
            view = when_visible(lambda: SnapshotView(engine, choice.seq, 0))
            catalog = self._open(engine, view)
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        self._refuse_pickles(values, catalog)
        targets = self._targets(tensors, planner, view, catalog)
        for batch in _batches(targets):
            _read(batch, view, planner)
        for item in values:
            planner.load_bytes(item, _value_bytes(item, view, catalog))
        at = sessions.Position(engine.repository_id, view.header["seq"])
        sessions.note_position(self._settings.path, at)
        self.snapshot = make_info(view.header, read_tags(engine))
        self.verified_bytes = view.verified_bytes
        self._opened = None
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for an id that says a step or another reference.

        Example:
            >>> VarviteReader.validate_checkpoint_id("best:loss")
            True
        """
        return is_reference(os.fspath(checkpoint_id))

    # ---- which snapshot --------------------------------------------------------------------------

    def _open(self, engine: Engine, view: SnapshotView) -> Catalog:
        catalog = read_catalog(view)
        catalog.metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        self._opened = engine, view, catalog
        return catalog

    def _must_be_open(self) -> tuple[Engine, SnapshotView, Catalog]:
        if self._opened is None:
            reason = "read_metadata() comes first"
            raise InvalidInputError(f"cannot load: {reason}", what="reader", reason=reason)
        return self._opened

    # ---- what is read ----------------------------------------------------------------------------

    def _refuse_pickles(self, items: Sequence[ReadItem], catalog: Catalog) -> None:
        names = [item.storage_index.fqn for item in items if item.storage_index.fqn in catalog.pickled]
        if names and not self._allow_pickle:
            reason = "it was saved as a pickle, and loading that runs what the file says"
            raise InvalidInputError(
                f"cannot load `{names[0]}`: {reason}",
                hint="pass allow_pickle=True if you trust who wrote it",
                what=names[0],
                reason=reason,
            )

    def _targets(
        self, items: Sequence[ReadItem], planner: LoadPlanner, view: SnapshotView, catalog: Catalog
    ) -> list[_Target]:
        """Finds for each tensor what is read and where it goes; nothing is changed yet."""
        targets = []
        for item in items:
            name = item.storage_index.fqn
            row = catalog.tensors.get(name)
            if row is None:
                seq = view.header["seq"]
                raise TensorNotFoundError(
                    f"no tensor `{name}` in snapshot {seq}", name=name, seq=seq, nearest=[]
                )
            starts = item.storage_index.offset or [0] * len(row.shape)
            offsets = [start + offset for start, offset in zip(starts, item.storage_offsets, strict=True)]
            tensor = planner.resolve_tensor(item).detach()
            lengths = list(item.lengths)
            self._check(name, row, offsets, lengths, tensor)
            targets.append(_Target(item, row, (offsets, lengths), tensor, None))
        return _with_direct_memory(targets)

    def _check(
        self, name: str, row: EntryRow, offsets: list[int], lengths: list[int], tensor: torch.Tensor
    ) -> None:
        ends = [offset + length for offset, length in zip(offsets, lengths, strict=True)]
        if list(tensor.shape) != lengths or any(
            end > whole for end, whole in zip(ends, row.shape, strict=True)
        ):
            message = (
                f"cannot load `{name}` of shape `{row.shape}` to a region of shape: {list(tensor.shape)}"
            )
            raise MismatchError(
                message, name=name, field="shape", expected=list(tensor.shape), found=list(row.shape)
            )
        live = str(tensor.dtype).removeprefix("torch.")
        if live != row.dtype and not may_convert(row.dtype, live, allow_narrowing=self._allow_narrowing):
            hint = "to round the values on load, pass allow_narrowing=True to VarviteReader"
            raise MismatchError(
                f"cannot load `{name}` of dtype `{row.dtype}` to a tensor of dtype: {live}",
                hint=hint,
                name=name,
                field="dtype",
                expected=live,
                found=row.dtype,
            )


def _with_direct_memory(targets: Sequence[_Target]) -> list[_Target]:
    """Lets the engine write to the tensors that are dense memory of the CPU, each byte to one of them."""
    spans = []
    for index, target in enumerate(targets):
        dense = describe_dense(target.tensor)
        if dense is not None and dense[0] == target.row.dtype:
            spans.append((dense[2], dense[2] + target.tensor.nbytes, index))
    direct = set()
    end = 0
    for start, stop, index in sorted(spans):
        # A tie is filled through each of its names: all but one by a copy.
        if start >= end:
            direct.add(index)
            end = stop
    return [
        target._replace(buffer=target.tensor) if index in direct else target
        for index, target in enumerate(targets)
    ]


def _batches(targets: Sequence[_Target]) -> Iterator[list[_Target]]:
    """Splits targets so that the memory made for one batch is bounded; the first has all that need none."""
    batch = [target for target in targets if target.buffer is not None]
    made_bytes = 0
    for target in targets:
        if target.buffer is not None:
            continue
        length_bytes = target.tensor.numel() * target.tensor.element_size()
        if made_bytes and made_bytes + length_bytes > _BUFFER_BYTES:
            yield batch
            batch, made_bytes = [], 0
        batch.append(target)
        made_bytes += length_bytes
    if batch:
        yield batch


def _read(batch: Sequence[_Target], view: SnapshotView, planner: LoadPlanner) -> None:
    buffers = [
        allocate(target.row.dtype, target.region[1]) if target.buffer is None else target.buffer
        for target in batch
    ]
    view.verified_bytes += view.reader.read(
        [target.row.index for target in batch], buffers, [target.region for target in batch]
    )
    for target, buffer in zip(batch, buffers, strict=True):
        if target.buffer is None:
            with torch.no_grad():
                target.tensor.copy_(buffer)
        planner.commit_tensor(target.item, target.tensor)


def _value_bytes(item: ReadItem, view: SnapshotView, catalog: Catalog) -> io.BytesIO:
    """Returns what a planner unpickles: of a pickle its bytes, of a typed value a pickle made here."""
    name = item.storage_index.fqn
    node = catalog.values.get(name)
    if name not in catalog.values:
        seq = view.header["seq"]
        raise TensorNotFoundError(f"no value `{name}` in snapshot {seq}", name=name, seq=seq, nearest=[])
    buffers = view.allocate(structure_leaves(node))
    if buffers:
        view.read(view.unique(buffers))
    value = unflatten(node, buffers.__getitem__)
    if name in catalog.pickled:
        return io.BytesIO(value.numpy().tobytes())
    if name in catalog.files:
        value = io.BytesIO(value.numpy().tobytes())
        value.seek(catalog.files[name])
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    return made
