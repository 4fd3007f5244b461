"""Forks the ranks of tests, with torch imported once. `tests/python/ranks.py` starts it and talks to it.

A request is a pickle over a socket of Unix; those that start ranks bring one socket for each of them, over
which that rank then talks to the test by itself. Nothing here starts a thread: what has threads can't be
forked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

REQUEST_LIMIT_BYTES = 1 << 20
RANK_LIMIT = 64


class Rank:
    """One end of the talk between a rank and the test; the other is `ranks.Group`."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.connection = connection

    def at(self, place: str) -> None:
        """Says where this rank is, and goes on when the test says so."""
        self.connection.send(("at", place))
        self.hear("go")

    def hear(self, word: str) -> Any:
        said, value = self.connection.recv()
        assert said == word, (said, word)
        return value


def live(rank: Rank, job: dict[str, Any], errors: int) -> None:
    """The whole life of a rank; it ends when the test closes its end of the talk."""
    # In sessions of their own: a test that signals a group of processes does not reach the server.
    os.setsid()
    os.dup2(errors, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - it lives as long as the process
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    os.environ.update(job["environment"])
    sys.path[:] = job["path"]
    try:
        rank.connection.send(("done", work(rank, job), None, ""))
    except BaseException as error:  # noqa: BLE001 - the test gets it
        rank.connection.send(("done", None, travelling(error), traceback.format_exc()))
    # Others may not be done: the sockets of this rank stay open until the test has heard of all.
    with contextlib.suppress(EOFError):
        rank.connection.recv()


def work(rank: Rank, job: dict[str, Any]) -> Any:
    import ranks

    ranks.here = rank
    if rank.number < 0:
        return serve_store(rank)
    if job["backend"] is not None:
        join(rank, job)
    module, name = job["function"]
    return getattr(importlib.import_module(module), name)(*job["arguments"])


def serve_store(rank: Rank) -> None:
    """The launcher: it holds the store and is no rank, as with `torchrun`."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank.connection.send(("port", store.port))
    with contextlib.suppress(EOFError):
        rank.connection.recv()
    os._exit(0)


def join(rank: Rank, job: dict[str, Any]) -> None:
    import torch.distributed as dist

    size, timeout = job["size"], timedelta(seconds=job["group_seconds"])
    if job["store"] == "file":
        store = dist.FileStore(job["store_path"], size)
    elif job["store"] == "rank 0" and rank.number == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        rank.connection.send(("port", store.port))
    else:
        port = rank.hear("port")
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group(job["backend"], store=store, rank=rank.number, world_size=size, timeout=timeout)


def travelling(error: BaseException) -> BaseException:
    """Returns the exception, or where it does not pickle one of the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def start(job: dict[str, Any], descriptors: list[int]) -> list[int]:
    """Forks a process for each descriptor but the last, which is that of their error output."""
    *talks, errors = descriptors
    processes = []
    for number, talk in zip(job["numbers"], talks, strict=True):
        process = os.fork()
        if process == 0:
            try:
                for other in talks:
                    if other != talk:
                        os.close(other)
                SERVER.close()
                environment = {"RANK": str(number), "LOCAL_RANK": str(number)} if number >= 0 else {}
                job["environment"] = {**environment, **job["environment"]}
                live(Rank(number, Connection(talk)), job, errors)
            finally:
                sys.stderr.flush()
                os._exit(0)
        processes.append(process)
    for descriptor in descriptors:
        os.close(descriptor)
    return processes


def end(processes: list[int]) -> list[int]:
    """Kills what still runs; returns the exit codes, minus the signal where one ended it.

    Until then an ended process is not waited for, so that its number can't become another's.
    """
    codes = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    return codes


def preload(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)


def main() -> None:
    import numpy  # noqa: F401, ICN001 - for the forks
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    SERVER.sendall(b"ready")
    while True:
        request, descriptors, _, _ = socket.recv_fds(SERVER, REQUEST_LIMIT_BYTES, RANK_LIMIT + 2)
        if not request:
            return
        what, value = pickle.loads(request)
        if what == "start":
            answer: Any = start(value, descriptors)
        else:
            answer = {"end": end, "preload": preload}[what](value)
        SERVER.sendall(pickle.dumps(answer))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as SERVER:
        main()
