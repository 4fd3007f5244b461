"""Training state: what makes a resumed run equal to one that never stopped.

The public names are loaded when they are first used; `import varvite.training` imports neither torch nor
numpy and starts no thread.

Example:
    >>> from varvite import training
    >>> "rng" in dir(training)
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varvite.training import rng

__all__ = ["rng"]

_HOMES: dict[str, str] = {}
_MODULES = ("rng",)


def __getattr__(name: str) -> Any:
    """Loads a public name on first use (PEP 562)."""
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"varvite.training.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"varvite.training.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module `varvite.training` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
