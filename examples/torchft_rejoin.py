"""Train two replicas with torchft, kill one, and have it rejoin while the other trains on; then start anew.

torchft brings a replica that comes back to the state of a living one. What it can't do is start when none
lives: that is Varvite's part. One replica saves weights, optimizer and torchft's own counters; a cold start
takes up the newest snapshot on all. Ends with a verdict. Needs `pip install torchft`.

    python examples/torchft_rejoin.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from varvite import CheckpointManager

REPLICAS, SAVER, VICTIM, SAVE_EVERY, STEP_SECONDS, LONG_SECONDS = 2, 0, 1, 5, 0.1, 100


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer, the same on all replicas."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def digest_of(model: nn.Module) -> str:
    """Return the digest of all weights."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]


def be_replica(folder: Path, replica: int, lighthouse: str) -> None:
    """Train until the file `stop` names a step that is reached; log each step."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    model, optimizer = build()
    log = (folder / f"replica{replica}.jsonl").open("a")

    def write(**fields: Any) -> None:
        log.write(json.dumps(fields) + "\n")
        log.flush()

    def load_state_dict(state: dict[str, Any]) -> None:  # from a replica that lives
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        write(healed=True)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=load_state_dict,
        replica_id=f"replica{replica}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    averaged, wrapped = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    # Each replica reads; the one that saves holds the lock.
    is_saver = replica == SAVER
    with CheckpointManager(folder / "checkpoints", read_only=not is_saver) as checkpoints:
        counters = manager.state_dict()
        report = checkpoints.resume(model=model, optimizer=optimizer, counters=counters)
        if not report.fresh:
            manager.load_state_dict(counters)
        write(began=manager.current_step(), digest=digest_of(model))
        while manager.current_step() < stop_at(folder):
            time.sleep(STEP_SECONDS)
            wrapped.zero_grad()  # asks who takes part in this step
            values = torch.randn(8, 16, generator=torch.Generator().manual_seed(manager.current_step()))
            (averaged(values) - values).square().mean().backward()
            wrapped.step()  # only if all who take part can
            step = manager.current_step()
            write(step=step, taking_part=manager.num_participants())
            if is_saver and step % SAVE_EVERY == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, counters=manager.state_dict())
    write(ended=manager.current_step(), digest=digest_of(model))
    manager.shutdown(wait=False)


def stop_at(folder: Path) -> int:
    """Return the step to stop at, once it is known."""
    path = folder / "stop"
    return int(path.read_text()) if path.exists() else sys.maxsize


def start(folder: Path, replica: int, lighthouse: str) -> subprocess.Popen[bytes]:
    """Start a replica."""
    command = [sys.executable, __file__, "--replica", str(replica), "--folder", str(folder)]
    errors = (folder / "errors").open("ab")
    return subprocess.Popen([*command, "--lighthouse", lighthouse], stderr=errors)


def lines_of(folder: Path, replica: int) -> list[dict[str, Any]]:
    """Return what a replica has logged, over all its lives."""
    path = folder / f"replica{replica}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(folder: Path, replica: int, what: Any) -> int:
    """Wait until a replica has logged a step of which something holds; return the step."""
    until = time.monotonic() + LONG_SECONDS
    while time.monotonic() < until:
        for number, line in enumerate(lines := lines_of(folder, replica)):
            if "step" in line and what(line, lines[:number]):
                return int(line["step"])
        time.sleep(0.05)
    raise SystemExit(f"replica {replica} is not there in time\n{(folder / 'errors').read_text()}")


def finish(folder: Path, lives: list[subprocess.Popen[bytes]], step: int) -> None:
    """Have all replicas stop at a step that none has reached."""
    partial = folder / "stop.partial"
    partial.write_text(str(step))
    partial.replace(folder / "stop")  # whole at once
    for life in lives:
        life.wait(LONG_SECONDS)


def has_company(line: dict[str, Any], _: Any) -> bool:
    """Return whether all replicas took part in a step."""
    return bool(line["step"] > SAVE_EVERY and line["taking_part"] == REPLICAS)


def is_back(line: dict[str, Any], before: list[dict[str, Any]]) -> bool:
    """Return whether a second life of a replica got its state from a living one, and takes part."""
    begins = [number for number, one in enumerate(before) if "began" in one]
    return has_company(line, before) and len(begins) > 1 and {"healed": True} in before[begins[1] :]


def main() -> int:
    """Train, kill, see it rejoin, start cold, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--replica", "--folder", "--lighthouse"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica is not None:
        be_replica(Path(options.folder), int(options.replica), options.lighthouse)
        os._exit(0)  # torchft's threads would keep the process
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        CheckpointManager(folder / "checkpoints").close()  # readers find a repository from the start
        server = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
        )
        lighthouse = server.address()
        lives = [start(folder, replica, lighthouse) for replica in range(REPLICAS)]
        killed_at = wait_for(folder, VICTIM, has_company)
        lives[VICTIM].kill()
        lives[VICTIM].wait()
        print(f"replica {VICTIM} was killed behind step {killed_at}")
        lives[VICTIM] = start(folder, VICTIM, lighthouse)
        back_at = wait_for(folder, VICTIM, is_back)
        alone = [one for one in lines_of(folder, SAVER) if one.get("taking_part") == 1 and "step" in one]
        print(f"replica {VICTIM} took part again in step {back_at}; the other did {len(alone)} steps alone")
        finish(folder, lives, back_at + 20)
        ends = [lines_of(folder, replica)[-1] for replica in range(REPLICAS)]
        (folder / "stop").unlink()

        lives = [start(folder, replica, lighthouse) for replica in range(REPLICAS)]
        with CheckpointManager(folder / "checkpoints", read_only=True) as checkpoints:
            newest = checkpoints.info().step
        reached = wait_for(
            folder, SAVER, lambda line, before: "ended" in str(before) and line["taking_part"] == REPLICAS
        )
        finish(folder, lives, reached + 20)
        begins = [[one for one in lines_of(folder, rank) if "began" in one][-1] for rank in range(REPLICAS)]
        began = ", ".join(str(one["began"]) for one in begins)
        print(
            f"all were started again where the newest snapshot was of step {newest}; they began at: {began}"
        )
        last = [lines_of(folder, replica)[-1] for replica in range(REPLICAS)]
        server.shutdown()
    facts = {
        "the other trained on alone": bool(alone) and back_at > killed_at + 1,
        "both ended with the same weights": ends[0] == ends[1] and "ended" in ends[0],
        # The other may come when the first has saved again.
        "both began again where a snapshot stands": begins[SAVER]["began"] == newest
        and all(one["began"] >= newest and one["began"] % SAVE_EVERY == 0 for one in begins),
        "and ended with the same weights": last[0] == last[1] and last[0].get("ended", 0) > newest,
    }
    for what, holds in facts.items():
        print(f"  {'yes' if holds else 'NO '} {what}")
    print("verdict: " + ("rejoined, and started again" if all(facts.values()) else "FAILED"))
    return 0 if all(facts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
