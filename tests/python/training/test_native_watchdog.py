"""The engine's watchdog: it ends a process that can't be reached any more, and no other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import clean_environment

from varvite._native import Watchdog
from varvite.errors import InvalidInputError

FAR = 3_600.0


def run(program: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a program that would take a minute if nobody ended it."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env=clean_environment(PYTHONUNBUFFERED=""),
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize(
    "hang",
    [
        "ctypes.PyDLL(None).sleep(60)",  # unlike CDLL it keeps the interpreter's lock
        "re.match(r'(a+)+$', 'a' * 40 + 'b')",
        "time.sleep(60)",
    ],
)
def test_it_ends_a_process_whatever_that_waits_for(hang: str) -> None:
    program = f"""
import atexit, ctypes, re, time
from varvite._native import Watchdog
atexit.register(print, "an exit handler ran")
print("started", flush=True)
print("lost", end="")
Watchdog(0.05, 77, "the save was not durable in time")
{hang}
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (77, "started\n")
    assert done.stderr == "the save was not durable in time\n"


def test_it_leaves_a_process_alone_that_cancelled_it_or_ended_before() -> None:
    program = f"""
import time
from varvite._native import Watchdog
watchdog = Watchdog(0.05, 77, "too late")
watchdog.cancel()
watchdog.cancel()
Watchdog({FAR}, 77, "never")
deadline = time.monotonic() + 0.2
while time.monotonic() < deadline:
    pass
print("alive")
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_it_does_not_end_a_forked_child() -> None:
    program = """
import os, time
from varvite._native import Watchdog
read, write = os.pipe()
watchdog = Watchdog(0.3, 77, "the parent ends")
child = os.fork()
if child == 0:
    watchdog.cancel()  # has no effect on the parent, and does not wait for a thread that is not here
    os.close(write)
    os.read(read, 1)  # returns when the parent has ended
    os.write(1, b"the child lives on")
    os._exit(0)
time.sleep(60)
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (77, "the child lives on", "the parent ends\n")


def test_a_stderr_that_nobody_reads_does_not_keep_it() -> None:
    program = """
import os, re
from varvite._native import Watchdog
read, write = os.pipe()
os.set_blocking(write, False)
try:
    while True:
        os.write(write, bytes(4096))
except BlockingIOError:
    pass
os.set_blocking(write, True)
os.dup2(write, 2)
Watchdog(0.05, 77, "never read")
re.match(r"(a+)+$", "a" * 40 + "b")
"""
    assert run(program).returncode == 77


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_seconds_that_no_clock_counts_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidInputError, match="invalid seconds"):
        Watchdog(seconds, 1, "never")


def test_an_exit_code_that_means_success_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="exit code 0"):
        Watchdog(FAR, 0, "never")
    for code in (-1, 256):
        with pytest.raises(OverflowError):
            Watchdog(FAR, code, "never")


def test_its_thread_ends_with_it() -> None:
    before = len(os.listdir("/proc/self/task"))
    dogs = [Watchdog(FAR, 1, "never") for _ in range(8)]
    assert len(os.listdir("/proc/self/task")) >= before + 8
    for dog in dogs:
        dog.cancel()
    for _ in range(1_000_000):
        if len(os.listdir("/proc/self/task")) <= before:
            break
    else:
        pytest.fail("threads are left")
