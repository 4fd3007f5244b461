"""Objects that belong to one rank each, such as a loader's place in its own part of the data.

With as many ranks as saved them each gets back its own. With another number there is no own any more: an
object may say itself what to make of the states of all ranks, and any other is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError, MismatchError
from varvite.objects import BUILT_IN_KEYWORDS, SavedObject
from varvite.plans import ObjectPlan, Problems
from varvite.state import structure_names, unflatten

if TYPE_CHECKING:
    from varvite.reading import SnapshotView

__all__ = ["RankLocal"]

MODES = ("derive", "exact")


class RankLocal:
    """The objects of a snapshot that belong to single ranks, as one rank sees them that restores."""

    def __init__(self, view: SnapshotView, *, world_size: int | None, mode: str) -> None:
        """Reads what there is, but no tensors.

        Args:
            view: The snapshot.
            world_size: How many ranks restore; `None` for as many as have saved.
            mode: `derive` or `exact`, as `CheckpointManager.resume` says.

        Raises:
            InvalidInputError: There is no such mode.
        """
        if mode not in MODES:
            reason = "must be `derive` or `exact`"
            raise InvalidInputError(
                f"invalid rank_local `{mode}`: {reason}", what="rank_local", reason=reason
            )
        self._view = view
        self._mode = mode
        self._saved_size: int = view.header["world_size"]
        self._world_size = self._saved_size if world_size is None else world_size
        self._by_rank = {
            rank: {
                keyword: saved
                for keyword, saved in view.rank_objects(rank).items()
                if keyword not in BUILT_IN_KEYWORDS
            }
            for rank in sorted(view.reader.rank_structures())
        }
        self.keywords = {keyword for objects in self._by_rank.values() for keyword in objects}

    def own(self, keyword: str) -> SavedObject | None:
        """Returns what this rank itself has saved under a keyword, where as many ranks restore."""
        if self._world_size != self._saved_size:
            return None
        return self._by_rank.get(self._view.rank, {}).get(keyword)

    def plan_all(self, keyword: str, value: Any) -> tuple[ObjectPlan | None, list[tuple[SnapshotView, Any]]]:
        """Plans to give an object the states of all ranks that saved it.

        Returns:
            The plan, without destinations, or `None` where this rank alone saved no such object; and what to
            read before it is carried out.

        Raises:
            MismatchError: Another number of ranks saved it, and the object can't divide it anew.
        """
        if self._world_size == self._saved_size:
            return None, []
        if self._mode == "exact" or not callable(getattr(value, "load_rank_states", None)):
            can = "give it a method `load_rank_states(states, rank=, world_size=)`, or "
            raise MismatchError(
                f"`{keyword}` belongs to one rank each, and is restored on {self._world_size} ranks, but "
                f"was saved by: {self._saved_size}",
                hint=f"{'' if self._mode == 'exact' else can}resume on as many ranks, or without it",
                name=keyword,
                field="world_size",
                expected=self._world_size,
                found=self._saved_size,
            )
        reads = []
        states = []
        matched: list[str] = []
        for rank, objects in self._by_rank.items():
            if keyword not in objects:
                continue
            structure = objects[keyword].structure
            own_view = self._view.of_rank(rank)
            buffers = own_view.allocate_for(structure)
            reads.append((own_view, own_view.unique(buffers)))
            states.append((structure, buffers))
            matched = structure_names(structure)

        def commit() -> None:
            value.load_rank_states(
                [unflatten(structure, buffers.__getitem__) for structure, buffers in states],
                rank=self._view.rank,
                world_size=self._world_size,
            )

        return ObjectPlan({}, Problems(matched=matched or [keyword]), commit), reads
