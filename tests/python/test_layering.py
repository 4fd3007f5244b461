"""The table in `docs/architecture.md` is the truth: a module imports from its own row or from those below."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "python"
LINE_LIMIT = 600
"""Longer files are split by what they do."""


def read_rows() -> dict[str, int]:
    """Returns the row of each module or package of the table; the first row is the highest."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("| layer | modules below `varvite` |\n")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([^`]+)`", line) for line in table.splitlines()[1:]]
    return {f"varvite.{name}": number for number, names in enumerate(rows) for name in names}


ROWS = read_rows()
PATHS = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "varvite").rglob("*.py"))
}
HOMES = {"CheckpointManager": "varvite.manager", "MergePolicy": "varvite.manager"}
"""Where the lazy names of `varvite` come from."""


def row_of(module: str) -> int | None:
    """Returns the row of a module: its own, or that of the nearest package around it."""
    while module not in ROWS and "." in module:
        module = module.rpartition(".")[0]
    return ROWS.get(module)


def imports(node: ast.AST, *, in_functions: bool) -> Iterator[str]:
    """Yields the modules of Varvite that code imports, but for types."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.If) and ast.unparse(inner.test) == "TYPE_CHECKING":
            continue
        if isinstance(inner, ast.FunctionDef) and not in_functions:
            continue
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").partition(".")[0] == "varvite":
            for alias in inner.names:
                full = f"{inner.module}.{alias.name}"
                named = HOMES.get(alias.name) if inner.module == "varvite" else None
                yield named or (full if full in PATHS else str(inner.module))
        yield from imports(inner, in_functions=in_functions)


def test_every_module_has_a_row_and_every_row_its_modules():
    assert [name for name in PATHS if name != "varvite" and row_of(name) is None] == []
    assert [name for name in ROWS if name not in PATHS and name != "varvite._native"] == []


def test_imports_go_down():
    upward = [
        f"{name} imports {imported}"
        for name, path in PATHS.items()
        for imported in imports(ast.parse(path.read_text()), in_functions=True)
        if imported != "varvite" and row_of(name) is not None and row_of(imported) < row_of(name)
    ]
    assert upward == []


def test_modules_that_are_imported_together_form_no_circle():
    graph = {
        name: set(imports(ast.parse(path.read_text()), in_functions=False)) - {name}
        for name, path in PATHS.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_files_are_short():
    assert [name for name, path in PATHS.items() if path.read_text().count("\n") > LINE_LIMIT] == []
