"""The norm of all gradients together, also of sharded ones, and clipping by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["clip_gradients"]


def clip_gradients(model: torch.nn.Module, limit: float | None) -> torch.Tensor:
    """Clips all gradients together, and returns their norm before that.

    Args:
        model: The model. Where gradients are sharded (`DTensor`), every rank of their meshes calls this.
        limit: Largest norm; `None` leaves the gradients alone.

    Returns:
        The norm of the whole gradients, the same on all ranks that share them: a tensor without a dimension.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> model(torch.tensor([[4.0]])).sum().backward()
        >>> clip_gradients(model, 1.0).item(), round(model.weight.grad.item(), 3)
        (4.0, 1.0)
    """
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            # Tensors of several meshes, or sharded and whole ones, take part in no operation together.
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [
        _whole(get_total_norm([one.grad for one in group if one.grad is not None]))
        for group in groups.values()
    ]
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    if limit is not None:
        for group in groups.values():
            clip_grads_with_norm_(group, limit, norm)
    return norm


def _whole(norm: Any) -> torch.Tensor:
    """Returns the norm over all shards."""
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
