"""Examples in documents run: those of every docstring, and the Python blocks of README and `docs/`."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import servers

import varvite

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A server for documents that speak of a bucket."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


def bucket_environment(server: servers.Server, home: Path) -> dict[str, str]:
    """Makes the bucket of the documents, empty, and returns what a reader's environment says of it."""
    requests = (
        urllib.request.Request(f"{server.endpoint}/moto-api/reset", method="POST"),
        urllib.request.Request(f"{server.endpoint}/my-bucket", method="PUT"),
    )
    for request in requests:
        urllib.request.urlopen(request, timeout=20).close()
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "GOOGLE_", "AZURE_"))
    }
    return {
        **kept,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_REGION": servers.REGION,
        "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
    }


@pytest.mark.parametrize(("where", "source"), blocks(), ids=[where for where, _ in blocks()])
def test_the_python_blocks_of_documents(tmp_path, request, where, source):
    """Each runs alone, in an empty folder, as a reader would try it."""
    environment = None
    if re.search(r"s3://", source):
        environment = bucket_environment(request.getfixturevalue("s3_server"), tmp_path / "home")
    folder = tmp_path / "work"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=100,
    )
    assert done.returncode == 0, f"{where}\n{done.stderr}"
