"""Real ranks for tests: forked processes that joined `torch.distributed` over gloo, on this machine.

A function of a test module runs on every rank; what it returns or raises comes back by rank::

    def largest(extra):                      # at module level: the ranks import it by its name
        values = torch.tensor([float(dist.get_rank() + extra)])
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.item()

    def test_all_see_the_largest():
        assert ranks.run(4, largest, 10) == [13.0] * 4

`run` raises what a rank raised (with all tracebacks); `outcomes` gives each rank's value or exception.

To do something to a rank at a certain place, the rank names the place and the test waits for it there::

    def saves(folder):
        ranks.at("before")                   # waits until the test says `go`, or asks for the outcomes
        ...

    def test_a_rank_is_killed():
        with ranks.start(3, saves, tmp_path) as group:
            group.wait_for("before")         # all ranks are there; `wait_for("before", 2)` for one
            group.kill(2)                    # or stop(2) and resume(2)
            outcomes = group.outcomes()      # lets the others go, and waits for their end
        assert [one.exit_code for one in outcomes] == [0, 0, -9]

No rank ends before all are done, so that an early end closes no sockets that others still need. What is
killed dies at once. A group that isn't done in `seconds` is killed, and the test fails with the stacks of
all ranks.

Starting a group costs some 0.1 s: put many small cases into one function, and return a list or dict. One
server holds torch, numpy and `torch.distributed` for all; name other large modules with
`preload("torch.distributed.fsdp")`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

SERVER = Path(__file__).parent / "processes" / "ranks_server.py"

here: Any = None
"""In a rank: its end of the talk with the test."""


def at(place: str) -> None:
    """In a rank: names the place where it is, and waits until the test lets it go on."""
    here.at(place)


@dataclass
class Outcome:
    """How a rank ended.

    `value` is what its function returned; `error` the exception it raised, with `traceback` its text.
    `exit_code` is 0, or minus the signal that ended it: then there is neither value nor error.
    """

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int = 0


class Group:
    """Ranks that run; made by `start`."""

    def __init__(
        self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...], **options: Any
    ) -> None:
        self.size = size
        self._until = time.monotonic() + options.pop("seconds")
        self._folder = tempfile.TemporaryDirectory()
        self._errors = open(Path(self._folder.name, "errors"), "w+b", 0)  # noqa: SIM115 - closed with the group
        self._outcomes: dict[int, Outcome] = {}
        self._dead: set[int] = set()
        self._places: dict[int, str | None] = dict.fromkeys(range(size))
        job = {
            "function": (function.__module__, function.__qualname__),
            "arguments": arguments,
            "size": size,
            "path": [str(Path(function.__code__.co_filename).parent), *sys.path],
            "store_path": str(Path(self._folder.name, "store")),
            **options,
        }
        has_launcher = job["store"] == "launcher" and job["backend"] is not None
        job["numbers"] = [*range(size), -1] if has_launcher else [*range(size)]
        self._talks: dict[int, Connection] = {}
        theirs = []
        for number in job["numbers"]:
            mine, other = socket.socketpair()
            self._talks[number] = Connection(mine.detach())
            theirs.append(other)
        descriptors = [*(one.fileno() for one in theirs), self._errors.fileno()]
        processes = _server().ask("start", job, descriptors)
        self.processes: dict[int, int] = dict(zip(job["numbers"], processes, strict=True))
        for one in theirs:
            one.close()

    def wait_for(self, place: str, *numbers: int) -> None:
        """Waits until ranks, by default all, are at a place; they wait there in turn."""
        wanted = set(numbers or range(self.size))
        while any(self._places[number] != place for number in wanted):
            for number in wanted & set(self._outcomes):
                self._fail(f"rank {number} ended and never came to `{place}`")
            for number in wanted:
                if self._places[number] not in (None, place):
                    self._fail(f"rank {number} is at `{self._places[number]}` and not at `{place}`")
            self._listen()

    def go(self, *numbers: int) -> None:
        """Lets ranks go on, by default all that wait at a place."""
        for number in numbers or [number for number, place in self._places.items() if place is not None]:
            self._places[number] = None
            with contextlib.suppress(BrokenPipeError):
                self._talks[number].send(("go", None))

    def kill(self, *numbers: int) -> None:
        """Ends ranks with SIGKILL; -1 is the launcher, which holds the store."""
        self._signal(signal.SIGKILL, numbers)

    def stop(self, *numbers: int) -> None:
        """Stops ranks: they keep their sockets and do nothing until `resume`."""
        self._signal(signal.SIGSTOP, numbers)

    def resume(self, *numbers: int) -> None:
        """Lets stopped ranks go on."""
        self._signal(signal.SIGCONT, numbers)

    def outcomes(self) -> list[Outcome]:
        """Lets ranks that wait at a place go, waits until all are done, and returns how each ended."""
        while len(self._outcomes.keys() - {-1}) < self.size:
            self.go()
            self._listen()
        return self._end()

    def results(self) -> list[Any]:
        """Returns what the ranks returned.

        Raises:
            AssertionError: One raised or died; the text has all tracebacks.
        """
        return [one.value for one in _well(dict(enumerate(self.outcomes())))]

    def results_of(self, *numbers: int) -> list[Any]:
        """Returns what some ranks returned, while others may stand still; as `results`."""
        while not set(numbers) <= set(self._outcomes):
            self._listen()
        return [one.value for one in _well({number: self._outcomes[number] for number in numbers})]

    def errors(self) -> str:
        """Returns what the ranks, and torch in them, have written to their error output."""
        return Path(self._folder.name, "errors").read_text(errors="replace")

    def close(self) -> None:
        """Kills what still runs."""
        self._end()
        for talk in self._talks.values():
            talk.close()
        self._errors.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, which: signal.Signals, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            os.kill(self.processes[number], which)

    def _listen(self) -> None:
        """Takes in what ranks have to say, and waits for it where nothing is there yet."""
        numbers = {self._talks[number]: number for number in self._talks if number not in self._outcomes}
        ready = wait(numbers, timeout=max(self._until - time.monotonic(), 0))
        if not ready:
            self._fail("the ranks are not done in time")
        for talk in ready:
            number = numbers[talk]
            try:
                self._take(number, *talk.recv())
            except (EOFError, ConnectionResetError):
                self._places[number] = None
                self._dead.add(number)
                self._outcomes[number] = Outcome()

    def _take(self, number: int, word: str, *values: Any) -> None:
        if word == "at":
            (self._places[number],) = values
        elif word == "port":
            for other, talk in self._talks.items():
                if other not in (number, -1):
                    talk.send(("port", *values))
        else:
            self._outcomes[number] = Outcome(*values)

    def _end(self) -> list[Outcome]:
        if self.processes:
            codes = dict(zip(self.processes, _server().ask("end", [*self.processes.values()]), strict=True))
            self.processes = {}
            for number in self._dead:
                self._outcomes[number].exit_code = codes[number]
        return [self._outcomes[number] for number in sorted(self._outcomes) if number >= 0]

    def _fail(self, reason: str) -> None:
        for number, process in self.processes.items():
            if number >= 0 and number not in self._outcomes:
                os.kill(process, signal.SIGCONT)
                os.kill(process, signal.SIGUSR2)
        time.sleep(0.5)  # for the stacks; this test has failed already
        raise AssertionError(f"{reason}; places: {self._places}\n{self.errors()[-20_000:]}")


def _well(outcomes: dict[int, Outcome]) -> list[Outcome]:
    failed = {
        number: one.traceback or f"ended with {one.exit_code}\n"
        for number, one in outcomes.items()
        if one.error is not None or one.exit_code
    }
    if failed:
        raise AssertionError("\n".join(f"rank {number}:\n{text}" for number, text in failed.items()))
    return [*outcomes.values()]


def start(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 60.0,
    backend: str | None = "gloo",
    store: str = "launcher",
    group_seconds: float = 60.0,
    environment: dict[str, str] | None = None,
) -> Group:
    """Starts ranks that call a function; use it with `with`.

    Args:
        size: Number of ranks.
        function: A function at module level.
        *arguments: What it is called with on every rank; pickled.
        seconds: When the group is killed.
        backend: What `init_process_group` gets; `None` to leave `torch.distributed` alone.
        store: Who holds the store of `torch.distributed`: "launcher" (a process of its own, as with
            `torchrun`), "rank 0", or "file".
        group_seconds: Timeout of the default group.
        environment: Variables for the ranks, beside `RANK`, `LOCAL_RANK` and `WORLD_SIZE`.
    """
    variables = {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size), **(environment or {})}
    options = {"backend": backend, "store": store, "group_seconds": group_seconds}
    return Group(size, function, arguments, seconds=seconds, environment=variables, **options)


def run(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Returns what a function returned, by rank; the options are those of `start`."""
    with start(size, function, *arguments, **options) as group:
        return group.results()


def outcomes(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Outcome]:
    """Returns how each rank ended; the options are those of `start`."""
    with start(size, function, *arguments, **options) as group:
        return group.outcomes()


def preload(*names: str) -> None:
    """Imports modules once, for the ranks started from now on; none that starts threads."""
    _server().ask("preload", list(names))


class _Server:
    def __init__(self) -> None:
        from support import clean_environment

        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SERVER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path)),
        )
        theirs.close()
        assert self.socket.recv(5) == b"ready"
        atexit.register(self.close)

    def ask(self, what: str, value: Any, descriptors: list[int] | None = None) -> Any:
        request = pickle.dumps((what, value))
        if descriptors:
            socket.send_fds(self.socket, [request], descriptors)
        else:
            self.socket.sendall(request)
        answer = self.socket.recv(1 << 20)
        assert answer, f"the server of ranks ended: {self.process.wait()}"
        return pickle.loads(answer)

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]
