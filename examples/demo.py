"""Kill a training run at random moments; show that it ends bit-equal to one left alone.

Two runs of `train_gpt.py` with the same seed go side by side. One is left alone. The other is
killed with SIGKILL in the middle of steps, saves and resumes, and started again each time. At the
end every saved value and every logged loss of the two is compared, bit for bit.

    python examples/demo.py

Exit code 0 means that every kill hit and that nothing differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from display import Display, open_display, print_table

from varvite import CheckpointManager
from varvite.training import prove_resume

if TYPE_CHECKING:
    from collections.abc import Iterator

    from varvite.manager import SnapshotInfo

TRAIN_SCRIPT = Path(__file__).with_name("train_gpt.py")
TRAIN_SEED = 1
# What a final snapshot must hold, so that two empty ones don't count as equal.
PARTS = {"data", "health", "model", "optimizer", "progress", "rng", "scheduler"}
# A folder with this file in it was made by the demo, so the demo may empty it.
MARKER = ".varvite-demo"
POLL_SECONDS = 0.004
STALL_SECONDS = 180.0
# How long after its cue a kill comes, at most: about as long as what it is to hit.
MAX_DELAY_SECONDS = {"step": 0.15, "save": 0.06, "resume": 0.1}


class DemoError(Exception):
    """The demo could not be carried out, so it says nothing about equality."""


@dataclass
class Aim:
    """One planned kill: `delay_seconds` after the first line of its kind at or after `step`."""

    kind: str
    step: int
    delay_seconds: float

    def is_cue(self, line: dict[str, Any]) -> bool:
        """Tell whether this log line starts the countdown."""
        if self.kind == "resume":
            return line.get("event") == "start"
        wanted = "save" if self.kind == "save" else None
        return line.get("event") == wanted and line["step"] >= self.step


def plan_kills(kills: int, steps: int, rng: random.Random) -> list[Aim]:
    """Draw the kills: one in each equal part of the run, the kinds in random order."""
    kinds = [("step", "save", "resume")[number % 3] for number in range(kills)]
    rng.shuffle(kinds)
    aims = []
    for number, kind in enumerate(kinds):
        start, end = number * steps // kills, (number + 1) * steps // kills
        # The last step is left out: after it little remains to be killed.
        step = rng.randrange(start, max(start + 1, min(end, steps - 1)))
        aims.append(Aim(kind, step, rng.uniform(0.0, MAX_DELAY_SECONDS[kind])))
    return aims


@dataclass
class Kill:
    """One kill that hit, and how the run went on after it.

    The receipt is the number of that of the resume, `None` where there was nothing to resume from, and 0
    where the next kill came before there was one.
    """

    what: str
    receipt: int | None = 0


@dataclass
class Run:
    """One training run over all its processes, as its log tells it."""

    name: str
    folder: Path
    steps: int
    process: subprocess.Popen[bytes] = field(init=False)
    losses: dict[int, list[str]] = field(default_factory=dict)
    snapshots: dict[int, SnapshotInfo] = field(default_factory=dict)
    blocked_seconds: list[float] = field(default_factory=list)
    restarts: int = 0
    saves_cut: int = 0
    next_step: int = 0
    resuming: bool = False
    save_step: int | None = None
    finished: bool = False
    log_offset_bytes: int = 0
    last_line_at: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.monotonic)
    wall_seconds: float = 0.0

    @property
    def repository(self) -> Path:
        """The folder that the run saves to."""
        return self.folder / "checkpoints"

    @property
    def steps_redone(self) -> int:
        """How many steps were done more than once, each time counted."""
        return sum(len(losses) - 1 for losses in self.losses.values())

    def reader(self) -> CheckpointManager:
        """Open what the run has saved, to read."""
        return CheckpointManager(self.repository, read_only=True)

    def command(self) -> list[str]:
        """Return the command that goes on with the run."""
        command = [sys.executable, str(TRAIN_SCRIPT), str(self.folder)]
        return [*command, "--steps", str(self.steps), "--seed", str(TRAIN_SEED)]

    def start(self) -> None:
        """Start a process that goes on with the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(self.command(), stdout=output, stderr=subprocess.STDOUT)
        self.last_line_at = time.monotonic()

    def kill(self) -> int:
        """Send SIGKILL, wait for the end, and return the exit code."""
        self.process.kill()
        return self.process.wait()

    def stop(self) -> None:
        """Kill the process if it is still there."""
        if self.process.poll() is None:
            self.kill()

    def read_log(self) -> list[dict[str, Any]]:
        """Take in the lines that are whole and new, and return them."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self.log_offset_bytes)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.log_offset_bytes += len(text)
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            self.take(line)
            self.last_line_at = time.monotonic()
        return lines

    def take(self, line: dict[str, Any]) -> None:
        """Change the record by one log line."""
        match line.get("event"):
            case None:
                self.losses.setdefault(line["step"], []).append(line["loss"])
                self.next_step = line["step"] + 1
            case "start":
                self.resuming, self.save_step = True, None
            case "resume":
                self.resuming, self.next_step = False, line["step"]
            case "save":
                self.save_step = line["step"]
            case "staged":
                # The save before this one is committed by now, and not yet removed by retention.
                self.blocked_seconds.append(line["blocked_seconds"])
                self.read_snapshots()

    def read_snapshots(self) -> None:
        """Note the snapshots that are new; retention removes them later."""
        with self.reader() as manager:
            self.snapshots.update({info.seq: info for info in manager.snapshots()})

    def check_alive(self) -> None:
        """Note a regular end; raise DemoError if the process failed or hangs."""
        code = self.process.poll()
        if code == 0:
            self.finished = True
            self.wall_seconds = time.monotonic() - self.began_at
            self.read_snapshots()
        elif code is not None:
            output = (self.folder / "output.txt").read_text(errors="replace").splitlines()
            raise DemoError("\n".join([f"{self.name} run ended with code {code}:", *output[-15:]]))
        elif time.monotonic() - self.last_line_at > STALL_SECONDS:
            raise DemoError(f"{self.name} run logged nothing for {STALL_SECONDS:.0f} s")

    def describe_death(self) -> str:
        """Say what the run, just killed, was doing, and count the save that was cut."""
        if self.resuming:
            return "while resuming"
        text = f"in step {self.next_step}" if self.next_step < self.steps else "after the last step"
        if self.save_step is not None:
            self.read_snapshots()
            if self.save_step not in {info.step for info in self.snapshots.values()}:
                self.saves_cut += 1
                text += f", during the save of step {self.save_step}"
        return text


class Killer:
    """Carries out the planned kills on one run, and starts it again after each."""

    def __init__(self, run: Run, aims: list[Aim], display: Display) -> None:
        self.run, self.aims, self.display = run, aims, display
        self.kills: list[Kill] = []
        self.kill_at: float | None = None

    def watch(self, lines: list[dict[str, Any]]) -> None:
        """Look for the cue of the next kill among new lines, and kill when it is time."""
        for line in lines:
            if line.get("event") == "resume" and self.run.restarts:
                self.note_resume(line)
            if self.aims and self.kill_at is None and self.aims[0].is_cue(line):
                self.kill_at = time.monotonic() + self.aims[0].delay_seconds
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.strike()

    def strike(self) -> None:
        """Kill the run, say what it was doing, and start it again."""
        code = self.run.kill()
        self.run.read_log()
        aim, self.kill_at = self.aims.pop(0), None
        if code != -signal.SIGKILL:
            raise DemoError(f"run ended before the kill planned for step {aim.step}, code: {code}")
        self.kills.append(Kill(self.run.describe_death()))
        self.display.note(f"kill {len(self.kills)}: {self.kills[-1].what}")
        self.run.restarts += 1
        self.run.start()

    def note_resume(self, line: dict[str, Any]) -> None:
        """Say where the run goes on."""
        next_step = line["step"]
        self.kills[-1].receipt = line["receipt"]
        redo = max(self.run.losses, default=-1) + 1 - next_step
        start = f"from the snapshot of step {next_step - 1}" if next_step else "from the beginning"
        skipped = f", skipped as damaged: {line['skipped']}" if line["skipped"] else ""
        self.display.note(f"  goes on {start}{skipped}, steps to redo: {redo}")


def train_both(reference: Run, killed: Run, aims: list[Aim], display: Display) -> list[Kill]:
    """Train the two runs side by side to their ends; return the kills that hit."""
    killer = Killer(killed, aims, display)
    runs = [reference, killed]
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        for run in runs:
            run.start()
            stack.callback(run.stop)
        while not all(run.finished for run in runs):
            for run in runs:
                if run.finished:
                    continue
                # Asked before the log is read: what a process wrote before its end is then seen.
                run.check_alive()
                lines = run.read_log()
                if run.finished:
                    display.note(f"{run.name} run finished")
                elif run is killed:
                    killer.watch(lines)
            display.update(runs)
            time.sleep(POLL_SECONDS)
    return killer.kills


@dataclass
class Finding:
    """What one part of the comparison covered, and the names of what differs."""

    part: str
    extent: str
    different: list[str]

    def row(self) -> list[str]:
        """Return the finding as a row of the table."""
        count = len(self.different)
        return [
            self.part,
            self.extent,
            f"{count} DIFFER, first: {self.different[0]}" if count else "equal",
        ]


def leaves(nest: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield path and value of everything in a nest that is not itself a container."""
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from leaves(value, (*path, key))
    elif isinstance(nest, list | tuple):
        for index, value in enumerate(nest):
            yield from leaves(value, (*path, index))
    else:
        yield path, nest


def has_same_bits(left: Any, right: Any) -> bool:
    """Tell whether two saved values are the same in type, shape and every bit."""
    import torch  # takes seconds, and the runs need the cores first

    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
        return bool(torch.equal(*raw))
    if hasattr(left, "tobytes"):  # a NumPy array or scalar
        same_form = left.dtype == right.dtype and left.shape == right.shape
        return bool(same_form and left.tobytes() == right.tobytes())
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    return bool(left == right)


def compare_states(reference: Run, killed: Run) -> list[Finding]:
    """Compare the final snapshots, value by value and by their digests."""
    with reference.reader() as left, killed.reader() as right:
        loads = [manager.load() for manager in (left, right)]
        wanted, found = (dict(leaves({**loaded, "rng": loaded.rng})) for loaded in loads)
        infos = [manager.info() for manager in (left, right)]
    late = [f"step {info.step}" for info in infos if info.step != reference.steps - 1]
    findings = [Finding("last snapshot", f"step {reference.steps - 1}", late)]
    for part in sorted({path[0] for path in wanted.keys() | found.keys()} | PARTS):
        paths = [path for path in wanted.keys() | found.keys() if path[0] == part]
        different = sorted(
            ".".join(map(str, path))
            for path in paths
            if path not in wanted or path not in found or not has_same_bits(wanted[path], found[path])
        )
        different = different if paths else [f"`{part}` is in neither snapshot"]
        findings.append(Finding(part, f"{len(paths)} values", different))
    digests = [str(info.digest) for info in infos]
    different = [] if digests[0] == digests[1] else [f"{digests[1][:16]} in the killed run"]
    return [*findings, Finding("digest", digests[0][:16], different)]


def compare_losses(reference: Run, killed: Run) -> Finding:
    """Compare the loss curves, the steps that were redone included."""
    different = [
        f"step {step}"
        for step in range(reference.steps)
        if len(reference.losses.get(step, [])) != 1
        or set(killed.losses.get(step, [])) != set(reference.losses[step])
    ]
    return Finding("loss curve", f"{reference.steps} steps", different)


def summarize(run: Run) -> dict[str, str]:
    """Return the figures of one run by their titles."""
    blocked_ms = [1000 * seconds for seconds in run.blocked_seconds]
    infos = run.snapshots.values()
    return {
        "saves": str(len(infos)),
        "saves cut by a kill": str(run.saves_cut),
        "raw": f"{sum(info.raw_bytes for info in infos) / 1e6:.1f} MB",
        "stored": f"{sum(info.stored_bytes for info in infos) / 1e6:.1f} MB",
        "blocked per save": f"{sum(blocked_ms) / max(1, len(blocked_ms)):.1f} ms",
        "restarts": str(run.restarts),
        "steps redone": str(run.steps_redone),
        "wall time": f"{run.wall_seconds:.0f} s",
    }


def show_receipts(killed: Run, kills: list[Kill]) -> bool:
    """Print what the receipt of each resume says; return whether none tells of a break."""
    with killed.reader() as manager:
        receipts = {receipt.number: receipt for receipt in manager.receipts()}
    rows, good = [], True
    for number, kill in enumerate(kills, 1):
        receipt = receipts.get(kill.receipt or 0)
        if receipt is None:
            how = "nothing to resume from" if kill.receipt is None else "killed before it had resumed"
            rows.append([str(number), kill.what, how, "", "", "", ""])
            continue
        verdict = receipt.verdict or "killed before it was known"
        good = good and receipt.verdict != "discontinuous"
        verified = f"{receipt.verified_bytes / 1e6:.1f} MB"
        resumed = f"step {receipt.next_step}"
        rows.append([str(number), kill.what, resumed, verified, receipt.rng, receipt.loader, verdict])
    print_table(["kill", "came", "goes on with", "verified", "generators", "data", "verdict"], rows)
    return good


def prove(killed: Run) -> bool:
    """Do the last steps again in a fresh process, and say whether they come to the recorded state."""
    from train_gpt import make_job  # takes seconds, and the runs need the cores first

    proof = prove_resume(make_job(killed.folder, killed.steps, TRAIN_SEED))
    print(proof)
    return proof.equal


def report(reference: Run, killed: Run, kills: list[Kill], planned: int) -> bool:
    """Print what was done and found; return whether all of it is as it should be."""
    left, right = summarize(reference), summarize(killed)
    rows = [[title, left[title], right[title]] for title in left]
    print_table(["", reference.name, killed.name], rows)
    print()
    is_continuous = show_receipts(killed, kills)
    findings = [compare_losses(reference, killed), *compare_states(reference, killed)]
    print()
    print_table(["compared", "", "bits"], [finding.row() for finding in findings])
    print()
    is_proven = prove(killed)
    equal = not any(finding.different for finding in findings)
    print(f"kills that hit: {len(kills)} of {planned}")
    print("verdict:", "bit-equal" if equal else "NOT bit-equal")
    return equal and is_continuous and is_proven and len(kills) == planned


def prepare_folder(folder: Path) -> None:
    """Empty the folder of an earlier demo; raise DemoError if it holds anything else."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise DemoError(f"folder isn't empty and not from an earlier demo: {folder}")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def main() -> int:
    """Read the command line, run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("demo-run"))
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, help="of the moments to kill at; default: random")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--verbose", action="store_true", help="say what each kill hit")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"{options.steps} steps, {options.kills} kills, seed of the kills: {seed}", flush=True)
    try:
        prepare_folder(options.folder)
        reference = Run("reference", options.folder / "reference", options.steps)
        killed = Run("killed", options.folder / "killed", options.steps)
        aims = plan_kills(options.kills, options.steps, random.Random(seed))
        kills = train_both(reference, killed, aims, open_display(verbose=options.verbose))
        return 0 if report(reference, killed, kills, options.kills) else 1
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
