"""Varvite: a checkpoint engine for PyTorch training.

`import varvite` imports neither torch nor numpy and starts no thread; the public names are loaded when
they are first used.

Example:
    >>> import tempfile
    >>> from varvite import CheckpointManager
    >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
    ...     info = manager.save_sync(3, {"learning_rate": 1e-3, "seen": [1, 2]})
    ...     manager.load()
    {'learning_rate': 0.001, 'seen': [1, 2]}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varvite import errors, keep
    from varvite._native import __version__
    from varvite.manager import CheckpointManager, MergePolicy

__all__ = ["CheckpointManager", "MergePolicy", "__version__", "errors", "keep"]

_HOMES = {
    "CheckpointManager": "varvite.manager",
    "MergePolicy": "varvite.manager",
    "__version__": "varvite._native",
}
_MODULES = ("errors", "keep")


def __getattr__(name: str) -> Any:
    """Loads a public name on first use (PEP 562)."""
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"varvite.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module `varvite` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
