"""The engine's own list of promises of a store, on real servers: its test programs are run against them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import clean_environment

ROOT = Path(__file__).parents[3]
FEATURES = "kill-points,cloud,encryption"
"""As `make test-rust` builds them: then nothing is left to build here."""
MOTO_CANNOT = ["--skip", "an_upload_that_the_store_has_forgotten_is_not_found"]
"""moto 5.2.5 answers 500, without a word, to a part of an upload that it does not know."""
BUILD_SECONDS = 1_800
RUN_SECONDS = 300
RESULT = re.compile(r"^test result: (\w+)\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    """The paths of the programs of `tests/`, by name, built from the sources as they are now."""
    cargo = shutil.which("cargo")
    assert cargo is not None, "`cargo` is not installed: the promises of the store can't be checked"
    targets = ["--test", "store_conformance", "--test", "remote_conformance"]
    done = subprocess.run(
        [cargo, "test", "--locked", "--features", FEATURES, *targets, "--no-run", "--message-format=json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        message["target"]["name"]: message["executable"]
        for message in messages
        if message["reason"] == "compiler-artifact" and message["executable"] is not None
    }


@pytest.mark.timeout(BUILD_SECONDS + RUN_SECONDS)
@pytest.mark.parametrize("name", ["store_conformance", "remote_conformance"])
def test_the_promises_of_a_store_hold_on_a_server(bucket, built, name):
    options = bucket.options()
    cannot = MOTO_CANNOT if bucket.server.name == "moto" else []
    done = subprocess.run(
        [built[name], "bucket_on_a_server", "--ignored", "--test-threads=4", *cannot],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
        env={
            **clean_environment(),
            "VARVITE_TEST_BUCKET_URL": bucket.url,
            "VARVITE_TEST_BUCKET_OPTIONS": json.dumps({key: str(value) for key, value in options.items()}),
        },
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    found = RESULT.search(done.stdout)
    assert found is not None, output
    verdict, passed, failed, ignored = found.groups()
    assert (verdict, failed, ignored) == ("ok", "0", "0")
    # A filter that fits no test would pass as well.
    assert int(passed) >= 10, output
