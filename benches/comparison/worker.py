"""A measurement in a process of its own: ``python -m comparison.worker KIND ARGUMENTS RESULT``.

ARGUMENTS is JSON, RESULT the path of the JSON file to write; standard output stays free for
what the peers print.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BENCHES = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 900.0
SHOWN_LINES = 15


class MeasurementError(Exception):
    """A worker did not end well; the message is the end of what it printed."""


def run(
    kind: str,
    arguments: dict[str, Any],
    module: str = __name__,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Any:
    """Run one measurement in a fresh process and return its result; `module` is what knows the kind."""
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "result.json"
        command = [sys.executable, "-m", module, kind, json.dumps(arguments), str(result_path)]
        try:
            process = subprocess.run(
                command,
                cwd=BENCHES,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"measurement ran out of time: {error.timeout} s") from error
        if process.returncode != 0 or not result_path.exists():
            lines = process.stdout.strip().splitlines()[-SHOWN_LINES:]
            raise MeasurementError("\n".join([f"exit code: {process.returncode}", *lines]))
        return json.loads(result_path.read_text())


def _raw_limits(arguments: dict[str, Any]) -> dict[str, Any]:
    from comparison import raw_limits
    from comparison.workloads import WORKLOADS, payload_bytes

    state = WORKLOADS[arguments["workload"]].build(arguments["scale"])
    state.step()
    length_bytes = payload_bytes(state.flat())
    del state
    return raw_limits.measure(length_bytes, Path(arguments["folder"]), arguments["repeat"])


def _dispatch(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from comparison import loop, measure, ratios, repository, training

    kinds = {
        "raw_limits": _raw_limits,
        "save": measure.measure_saves,
        "load": measure.measure_loads,
        "steps": loop.measure_steps,
        "goodput": loop.measure_goodput,
        "ratios": ratios.measure,
        "training_steps": training.measure_steps,
        "training_saves": training.measure_saves,
        "many_snapshots": repository.measure_many_snapshots,
        "open": repository.measure_open,
    }
    return kinds[kind](arguments)


if __name__ == "__main__":
    result = _dispatch(sys.argv[1], json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(result))
