"""Examples in documents run: those of every docstring, and the Python blocks of README and `docs/`."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import varvite

ROOT = Path(__file__).parents[2]
MODULES = ["varvite", *(module.name for module in pkgutil.walk_packages(varvite.__path__, "varvite."))]
MODULES = [name for name in MODULES if name not in ("varvite._native", "varvite.__main__")]
DOCUMENTS = [
    path
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    )
    if path.exists()
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Returns the Python blocks of all documents with where each one starts."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            found.append((f"{path.relative_to(ROOT)}:{line}", match.group(1)))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    examples = sum(len(test.examples) for module in modules for test in finder.find(module, module.__name__))
    assert examples > 50
    assert len(blocks()) >= 1


@pytest.mark.parametrize(("where", "source"), blocks(), ids=[where for where, _ in blocks()])
def test_the_python_blocks_of_documents(tmp_path, where, source):
    """Each runs alone, in an empty folder, as a reader would try it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, f"{where}\n{done.stderr}"
