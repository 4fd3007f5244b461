"""When the bytes of a background save are taken: before `save` returns, or by the thread of the save.

`copy` takes everything before. `cow` takes large tensors of the CPU later, from clones of torch that share
their memory until one of the two is written. `overlap` takes later what only the step of an optimizer
writes, and has that step wait for the copy.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from varvite._native import SaveTensors, describe_dense
from varvite.errors import InvalidInputError
from varvite.objects import kind_of
from varvite.plain import loaded
from varvite.transfers import Transfers, refuse_capture

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from varvite._native import SaveJob

__all__ = ["LEAST_LATER_BYTES", "CowStaging", "OverlapStaging", "Staging", "make_staging"]

LEAST_LATER_BYTES = 64 << 10
"""Smaller tensors are copied at once: that takes no longer than what would be needed to copy them later."""


def make_staging(mode: str) -> Staging:
    """Makes the staging of a manager.

    Args:
        mode: `copy`, `cow` or `overlap`.

    Raises:
        InvalidInputError: This torch can't do it; the message says what was found.
    """
    if mode == "cow":
        return CowStaging()
    return OverlapStaging() if mode == "overlap" else Staging()


class Staging:
    """`copy`: everything is taken before `save` returns."""

    def __init__(self, transfers: Transfers | None = None) -> None:
        """Makes one for the saves of one manager, which run one after the other."""
        self._transfers = transfers or Transfers()

    def begin(self, objects: Mapping[str, Any]) -> SaveTensors:
        """Starts a save.

        Args:
            objects: What is saved, by keyword.

        Raises:
            InvalidInputError: A save can't be made in this mode now.
        """
        del objects
        self._transfers.begin()
        return SaveTensors(self._transfers.describe, self._transfers.arrive)

    def mark(self, tensors: SaveTensors) -> None:
        """Marks what is taken later, once everything is described, and starts the copies of devices."""
        del tensors
        self._transfers.launch()
        self._transfers.arrive()

    def started(self, job: SaveJob) -> None:
        """Notes the save that now runs."""

    def close(self) -> None:
        """Leaves no trace in the objects that were saved. Whatever is still copied has been waited for."""


class CowStaging(Staging):
    """`cow`: large tensors of the CPU are taken later, from clones that a write leaves alone."""

    def __init__(self, transfers: Transfers | None = None) -> None:
        """Tries whether this torch makes such clones.

        Raises:
            InvalidInputError: It doesn't.
        """
        super().__init__(transfers)
        import torch

        reason = why_not_copy_on_write()
        if reason is not None:
            message = f"invalid staging `cow` with torch {torch.__version__}: {reason}"
            raise InvalidInputError(message, hint='use staging="copy"', what="staging", reason=reason)

    def begin(self, objects: Mapping[str, Any]) -> SaveTensors:
        """Starts a save, unless a CUDA graph is being captured."""
        _refuse_capture("cow")
        return super().begin(objects)

    def mark(self, tensors: SaveTensors) -> None:
        """Makes the clones."""
        torch = loaded("torch")
        if torch is not None:
            with torch.no_grad():
                tensors.clone_lazily(LEAST_LATER_BYTES)
        super().mark(tensors)


class OverlapStaging(Staging):
    """`overlap`: what only the step of an optimizer writes is taken later, and the step waits for that."""

    def __init__(self, transfers: Transfers | None = None) -> None:
        """Starts without hooks."""
        super().__init__(transfers)
        self._process = os.getpid()
        self._job: SaveJob | None = None
        self._promised: list[torch.Tensor] = []
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()

    def begin(self, objects: Mapping[str, Any]) -> SaveTensors:
        """Starts a save: what the optimizers among the objects write in their steps is promised."""
        _refuse_capture("overlap")
        optimizers = [
            value for value in objects.values() if kind_of(value) == "optimizer" and _calls_hooks(value)
        ]
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(_StepHook(self))
        self._promised = [
            tensor
            for optimizer in optimizers
            for tensor in _written_by_step(optimizer)
            if tensor.nbytes >= LEAST_LATER_BYTES
        ]
        self._transfers.begin(self._promised)
        return SaveTensors(self._transfers.describe, self._transfers.arrive)

    def mark(self, tensors: SaveTensors) -> None:
        """Marks what was promised, and starts the copies of devices without waiting for them."""
        promised, self._promised = self._promised, []
        if promised:
            tensors.promise(promised, LEAST_LATER_BYTES)
        self._transfers.launch()

    def started(self, job: SaveJob) -> None:
        """Notes the save that a step has to wait for."""
        self._job = job

    def join(self) -> None:
        """Waits until nothing is copied any more that a step writes. In a forked child nothing is."""
        if os.getpid() != self._process:
            return
        self._transfers.join()
        job = self._job
        if job is not None:
            job.wait_copied()
            self._job = None

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._job = None


class _StepHook:
    """Called before each step of an optimizer; does not keep the manager alive."""

    def __init__(self, staging: OverlapStaging) -> None:
        self._staging = weakref.ref(staging)

    def __call__(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        staging = self._staging()
        if staging is not None:
            staging.join()


def _calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True where a step surely calls its hooks: wrappers that only look like an optimizer may not."""
    step = getattr(type(optimizer), "step", None)
    return "_optimizer_step_pre_hooks" in vars(optimizer) and bool(getattr(step, "hooked", False))


def _written_by_step(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    import torch

    for group in optimizer.param_groups:
        yield from group["params"]
    for own in optimizer.state.values():
        if isinstance(own, dict):
            for value in own.values():
                if isinstance(value, torch.Tensor):
                    yield value


def _refuse_capture(mode: str) -> None:
    reason = refuse_capture(mode)
    if reason is not None:
        raise InvalidInputError(
            f"cannot save: {reason}", hint="save outside of the capture", what="staging", reason=reason
        )


def why_not_copy_on_write() -> str | None:
    """Tries the clones that `cow` rests on; they are no public interface of torch.

    Returns:
        `None` where they do what they should, else what they did not.

    Example:
        >>> why_not_copy_on_write() is None
        True
    """
    import torch

    private = [(torch, "_lazy_clone"), (torch._C, "_data_address")]  # noqa: SLF001 - there is no public way
    for place, name in private:
        if not hasattr(place, name):
            return f"it has no `{name}`"
    expected = torch.arange(LEAST_LATER_BYTES // 8, dtype=torch.int64)
    with torch.no_grad():
        try:
            return _try_clones(torch, expected.clone(), expected)
        except RuntimeError as error:
            return f"a clone failed: {error}"


def _try_clones(torch: Any, original: torch.Tensor, expected: torch.Tensor) -> str | None:
    def address(tensor: torch.Tensor) -> int | None:
        found = describe_dense(tensor)
        return None if found is None else found[2]

    start = address(original)
    clone = torch._lazy_clone(original)  # noqa: SLF001 - there is no public way
    if address(clone) != start:
        return "a clone does not share memory"
    original.add_(1)
    if address(clone) != start or not torch.equal(clone, expected):
        return "a write reaches the clone"
    if address(original) == start or not torch.equal(original, expected + 1):
        return "a write is lost"
    start = address(original)
    clone = torch._lazy_clone(original)  # noqa: SLF001 - there is no public way
    del clone
    original.add_(1)
    if address(original) != start:
        return "a write copies memory although the clone is gone"
    return None
