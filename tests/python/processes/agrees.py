"""Ranks that decide together, as forked processes over gloo; prints as JSON what each rank saw, by case.

One process does all cases: importing torch is most of the time.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

from varvite.distributed import group as ranks_group
from varvite.errors import CheckpointError, InvalidInputError, MismatchError
from varvite.training.agreement import Agreement
from varvite.training.autosave import Autosave
from varvite.training.boundary import Boundary
from varvite.training.stop import StopSignal

LONG_SECONDS = 1 << 20


def largest_of_each(rank):
    agreement = Agreement()
    return [
        agreement.maximum([rank, -rank, 7]),
        agreement.from_first(100 + rank),
        agreement.maximum([]),
        [agreement.rank, agreement.world_size],
    ]


def signal_at_different_steps(rank):
    """The flag comes after step 2 on one rank and after step 3 on the other."""
    import torch

    with StopSignal(slurm=False, margin_seconds=0) as stop:
        for step in range(8):
            gradient = torch.ones(1)
            dist.all_reduce(gradient)
            if step == 2 + rank:
                signal.raise_signal(signal.SIGTERM if rank == 0 else signal.SIGUSR1)
            reason = stop.check(step)
            if reason is not None:
                stop.done()
                return [step, str(reason), int(reason.exit_code), str(stop.check(step + 1 + rank))]
    return "never stopped"


def one_rank_alone_sees_it(rank):
    autosave = Autosave(every_steps=1000)
    with StopSignal(slurm=False) as stop:
        boundary = Boundary(stop, autosave)
        decisions = []
        for step in range(4):
            if (step, rank) == (2, 1):
                signal.raise_signal(signal.SIGTERM)
            decision = boundary.decide(step, save=(step, rank) == (1, 0), votes=[step * rank])
            decisions.append([decision.save, str(decision.stop), list(decision.votes)])
            if decision.save:
                autosave.saved(step, 0.1)
    return decisions


def clocks_differ(rank):
    """Each rank measures another cost; a save is due where the first of them finds so."""
    autosave = Autosave(every_seconds=LONG_SECONDS if rank else 1e-9)
    return [Boundary(autosave=autosave).decide(step).save for step in range(3)]


def stop_file_is_the_first_ranks(rank):
    with tempfile.TemporaryDirectory() as folder:
        mine = os.path.join(folder, "stop")
        stop = StopSignal((), slurm=False, stop_file=mine)
        seen = [str(stop.check(0))]
        if rank == 1:
            open(mine, "w").close()
        stop._file_asked_at = -LONG_SECONDS
        seen.append(str(stop.check(1)))
        if rank == 0:
            open(mine, "w").close()
        stop._file_asked_at = -LONG_SECONDS
        seen.append(str(stop.check(2)))
        return seen


def steps_differ(rank):
    try:
        Boundary().decide(5 + rank)
    except MismatchError as error:
        return [error.expected, error.found, error.message]
    return "agreed"


def lengths_differ(rank):
    try:
        Agreement().maximum([1] * (1 + rank))
    except MismatchError as error:
        return [error.expected, error.found]
    return "agreed"


def training_group_is_not_used(rank):
    """A collective of training that is under way is not mixed up with ours."""
    import torch

    agreement = Agreement()
    agreement.maximum([0])
    values = torch.full((4,), float(rank))
    if rank == 0:
        agreed = agreement.maximum([5])
        dist.all_reduce(values)
    else:
        work = dist.all_reduce(values, async_op=True)
        agreed = agreement.maximum([6])
        work.wait()
    return [agreed, values.tolist()]


def part_of_the_ranks(rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        try:
            Agreement(group).maximum([9])
        except InvalidInputError as error:
            return error.what
    agreement = Agreement(group)
    return [agreement.maximum([rank]), agreement.rank, agreement.world_size, agreement.from_first(rank)]


def a_rank_is_missing(rank):
    ranks_group._GRACE_SECONDS = 0.5
    agreement = Agreement(timeout_seconds=0.5)
    agreement.maximum([0])
    if rank == 2:
        until = time.monotonic() + 30
        store = dist.distributed_c10d._get_default_store()
        while not store.check(["told/0"]) or not store.check(["told/1"]):
            assert time.monotonic() < until
            time.sleep(0.01)
        return "absent"
    told = []
    for _ in range(2):
        try:
            agreement.maximum([1])
        except CheckpointError as error:
            told.append([error.missing_ranks, error.message])
    dist.distributed_c10d._get_default_store().set(f"told/{rank}", "")
    return told


def set_up_anew(rank):
    agreement = Agreement()
    first = agreement.maximum([rank])
    dist.destroy_process_group()
    alone = agreement.maximum([rank])
    join(rank, 2, os.environ["AGREES_STORE"] + "-again")
    return [first, alone, agreement.maximum([10 + rank])]


CASES = {
    largest_of_each: 2,
    signal_at_different_steps: 2,
    one_rank_alone_sees_it: 2,
    clocks_differ: 2,
    stop_file_is_the_first_ranks: 2,
    steps_differ: 2,
    lengths_differ: 2,
    training_group_is_not_used: 2,
    part_of_the_ranks: 3,
    a_rank_is_missing: 3,
    set_up_anew: 2,
}


def join(rank, world_size, path):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )


def rank_of(case, rank, world_size, path, writer):
    os.environ["AGREES_STORE"] = path
    try:
        join(rank, world_size, path)
        seen = case(rank)
    except BaseException:  # noqa: BLE001 - the parent prints it
        seen = traceback.format_exc()
    os.write(writer, json.dumps(seen).encode())
    os._exit(0)


def run(case, world_size, folder):
    readers, children = [], []
    for rank in range(world_size):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            rank_of(case, rank, world_size, f"{folder}/{case.__name__}", writer)
        os.close(writer)
        readers.append(reader)
        children.append(child)
    seen = []
    for reader in readers:
        with open(reader, "rb") as pipe:
            seen.append(json.loads(pipe.read() or b'"ended"'))
    for child in children:
        os.waitpid(child, 0)
    return seen


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        json.dump({case.__name__: run(case, ranks, folder) for case, ranks in CASES.items()}, sys.stdout)
