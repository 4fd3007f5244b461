"""What a run was made of: versions, machine, source, and the settings that decide about bits.

Nothing is read that may hold a secret: no command line, and of the environment only the few variables by
which launchers name a job. No library is imported for it.

Example:
    >>> from varvite.training.environment import describe_environment
    >>> sorted(describe_environment())
    ['git', 'host', 'launcher', 'platform', 'torch', 'versions']
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from varvite._native import __version__
from varvite.plain import loaded

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["describe_environment"]

_GIT_SECONDS: Final = 5.0
_TEXT_LIMIT: Final = 200
"""Longest text that is kept, in characters."""
_LAUNCHER_VARIABLES: Final = (
    "SLURM_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def describe_environment() -> dict[str, Any]:
    """Returns what this process runs, and where, as plain data.

    The state of the source is read once a process; everything else each time. Any rank may call it.

    Returns:
        `versions`: of Varvite and Python, and of torch, NumPy and CUDA where the program uses them.
        `platform`, `host`: system and machine.
        `git`: `commit`, and `dirty`, true where a tracked file differs from it, of the folder of the
        program; `None` without a repository or without git.
        `torch`: settings on which bits of results depend, and names of the devices in use; `None` where the
        program does not use torch.
        `launcher`: the variables by which Slurm and torchrun name the job, where they are set.

    Example:
        >>> import platform
        >>> describe_environment()["versions"]["python"] == platform.python_version()
        True
    """
    torch = loaded("torch")
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "versions": _versions(torch),
        "platform": platform.platform()[:_TEXT_LIMIT],
        "host": platform.node()[:_TEXT_LIMIT],
        "git": None if program is None else _git(Path(program).absolute().parent),
        "torch": None if torch is None else _torch_settings(torch),
        "launcher": {
            name: os.environ[name][:_TEXT_LIMIT] for name in _LAUNCHER_VARIABLES if name in os.environ
        },
    }


def _versions(torch: ModuleType | None) -> dict[str, str]:
    versions = {"varvite": __version__, "python": platform.python_version()}
    numpy = loaded("numpy")
    if numpy is not None:
        versions["numpy"] = str(numpy.__version__)
    if torch is not None:
        versions["torch"] = str(torch.__version__)
        if torch.version.cuda is not None:
            versions["cuda"] = str(torch.version.cuda)
    return versions


def _torch_settings(torch: ModuleType) -> dict[str, Any]:
    cuda = torch.cuda
    # Names only of what is in use: asking earlier would set up a device, and forbid a fork.
    device_count = cuda.device_count() if cuda.is_initialized() else 0
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")[:_TEXT_LIMIT] or None,
        "cuda_matmul_precision": _matmul_precision(torch, torch.backends.cuda),
        "cpu_matmul_precision": _matmul_precision(torch, torch.backends.mkldnn),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "devices": sorted({cuda.get_device_name(index) for index in range(device_count)}),
    }


def _matmul_precision(torch: ModuleType, backend: Any) -> str:
    """Returns how products of float32 are computed: `none` and `highest` are in full.

    The older of torch's two ways to ask raises once a program has used the newer one to set it.
    """
    newer = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    return str(torch.get_float32_matmul_precision() if newer is None else newer)


@functools.cache
def _git(folder: Path) -> dict[str, Any] | None:
    """Returns commit and state of the source in a folder; `None` where there is none or it takes too long."""
    # The repository may be another person's: it must not start a program, and is not written to.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)]
    command += ["status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            check=False,
            env={**environment, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    commit, dirty = None, False
    for line in done.stdout.decode("ascii", "replace").splitlines():
        if line.startswith("# branch.oid "):
            commit = line.removeprefix("# branch.oid ")
        elif not line.startswith("#"):
            dirty = True
    if done.returncode != 0 or commit is None or not commit.isalnum():
        return None  # no repository, or one without a commit
    return {"commit": commit, "dirty": dirty}
