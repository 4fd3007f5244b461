"""The public contract: names, signatures, what wrong arguments say, and what an import costs."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from typing import Any

import pytest
from support import clean_environment, run_child

import varvite
from varvite import CheckpointManager, MergePolicy, errors, keep
from varvite.errors import InvalidInputError

EMPTY = inspect.Parameter.empty

CONSTRUCTOR = {
    "path": EMPTY,
    "keep": None,
    "save_dtype": None,
    "compression": "auto",
    "delta": True,
    "staging": "copy",
    "async_save": True,
    "merge": None,
    "remote": None,
    "sync_every": 1,
    "remote_options": None,
    "rank": None,
    "world_size": None,
    "process_group": None,
    "threads": None,
    "chunk_bytes": 1 << 20,
    "fsync": True,
    "read_only": False,
    "on_error": "raise",
    "encryption": None,
}

SAVE = [
    "step!",
    "state!=None",
    "*metrics=None",
    "*metadata=None",
    "*rng=True",
    "*rank_local=()",
    "**objects",
]

METHODS = {
    "save": SAVE,
    "save_sync": SAVE,
    "save_final": SAVE,
    "resume": [
        "ref='latest'",
        "*strict=True",
        "*require=False",
        "*override=None",
        "*rank_local='derive'",
        "**objects",
    ],
    "create_snapshot": ["step", "*world_size=None", "*metrics=None", "*metadata=None"],
    "save_rank": ["session_id", "rank", "state=None", "*rng=True", "*rank_local=()", "**objects"],
    "finalize_snapshot": ["session_id"],
    "load": ["ref='latest'", "*names=None", "*objects=None", "*device=None", "*mmap=False"],
    "load_latest": ["*names=None", "*device=None", "*mmap=False"],
    "load_into": ["state_dict", "ref='latest'", "*prefix=''"],
    "snapshots": [],
    "info": ["ref='latest'"],
    "entries": ["ref='latest'"],
    "verify": ["ref=None", "*sample=1.0"],
    "prune": ["*dry_run=False"],
    "merge_now": [],
    "sync_now": [],
    "pin": ["ref", "name"],
    "unpin": ["name"],
    "delete": ["ref"],
    "flush": ["timeout=None"],
    "stats": [],
    "print_stats": [],
    "close": [],
}

RECORDS = {
    "SaveTimings": "blocked copy queue encode write sync commit",
    "SnapshotInfo": "seq step parent created_at world_size metrics metadata kind raw_bytes stored_bytes "
    "healthy "
    "nonfinite tags digest",
    "ResumeReport": "step next_step fresh snapshot restored matched missing unexpected mismatched defaulted "
    "never_stepped skipped_snapshots rng loader verified_bytes digest",
    "LoadReport": "matched missing unexpected mismatched defaulted",
    "RetentionPlan": "kept removed freed_bytes",
    "VerifyReport": "ok checked_bytes findings",
    "MergeReport": "merged_packs written_bytes freed_bytes stood_down",
    "SyncReport": "pushed_objects pushed_bytes removed_objects pending_objects",
    "EntryInfo": "name dtype stored_dtype shape raw_bytes stored_bytes nonfinite abs_max l2_norm",
}

ERRORS = {
    "CheckpointError": Exception,
    "InvalidInputError": ValueError,
    "MismatchError": ValueError,
    "SnapshotNotFoundError": FileNotFoundError,
    "TensorNotFoundError": KeyError,
    "CommitConflictError": Exception,
    "IncompleteSaveError": Exception,
    "UnsupportedFormatError": NotImplementedError,
    "CorruptionError": Exception,
    "StoreError": OSError,
    "RepositoryLockedError": Exception,
    "SessionPoisonedError": RuntimeError,
    "InternalError": RuntimeError,
}


def shown(parameter: inspect.Parameter) -> str:
    marks = {
        parameter.POSITIONAL_ONLY: ("", "!"),
        parameter.POSITIONAL_OR_KEYWORD: ("", ""),
        parameter.KEYWORD_ONLY: ("*", ""),
        parameter.VAR_KEYWORD: ("**", ""),
    }
    before, after = marks[parameter.kind]
    default = "" if parameter.default is EMPTY else f"={parameter.default!r}"
    return f"{before}{parameter.name}{after}{default}"


def test_the_public_names_of_the_package():
    assert varvite.__all__ == ["CheckpointManager", "MergePolicy", "__version__", "errors", "keep"]
    assert set(varvite.__all__) <= set(dir(varvite))
    assert varvite.errors is errors
    assert varvite.keep is keep
    assert varvite.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="module `varvite` has no attribute `Manager`"):
        varvite.Manager  # noqa: B018 - the access is the test


def test_the_constructor_takes_everything_but_the_path_by_keyword():
    parameters = dict(inspect.signature(CheckpointManager).parameters)
    assert {name: parameter.default for name, parameter in parameters.items()} == CONSTRUCTOR
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    assert kinds.pop("path") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", METHODS)
def test_the_signature_of_every_method(name: str):
    parameters = list(inspect.signature(getattr(CheckpointManager, name)).parameters.values())[1:]
    assert [shown(parameter) for parameter in parameters] == METHODS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_the_fields_of_every_record(name: str):
    from varvite import records

    kind = getattr(records, name)
    assert set(RECORDS[name].split()) <= {field.name for field in fields(kind)}
    with pytest.raises(AttributeError):
        object.__getattribute__(kind, "no_such_field")


def test_the_members_of_a_save_handle():
    from varvite.handles import SaveHandle

    assert [shown(one) for one in inspect.signature(SaveHandle.wait).parameters.values()][1:] == [
        "timeout=None"
    ]
    for name in ("done", "durable", "timings"):
        assert isinstance(inspect.getattr_static(SaveHandle, name), property)


def test_every_public_name_has_a_docstring():
    public = [CheckpointManager, MergePolicy, errors, keep, varvite]
    public += [value for name, value in vars(CheckpointManager).items() if not name.startswith("_")]
    assert [value for value in public if not (value.__doc__ or "").strip()] == []


@pytest.mark.parametrize("name", ERRORS)
def test_the_tree_of_errors(name: str):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.CheckpointError)
    assert issubclass(kind, ERRORS[name])
    error = kind("cannot go on: 3", hint="go back", step=3)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.message, again.hint, again.step) == (kind, "cannot go on: 3", "go back", 3)
    assert str(again) == "cannot go on: 3\nhint: go back"


def test_an_import_brings_in_no_library_and_starts_no_thread(run_python):
    program = (
        "import os, sys, threading\n"
        "import varvite\n"
        "from varvite import CheckpointManager, MergePolicy, keep, errors\n"
        "heavy = {'torch', 'numpy', 'rich', 'click', 'logging'} & set(sys.modules)\n"
        "print(sorted(heavy), threading.active_count(), len(os.listdir('/proc/self/task')))\n"
    )
    assert run_python(program) == "[] 1 1"


def test_a_state_without_tensors_needs_no_library(tmp_path):
    done = run_child("plain_state", tmp_path / "run")
    assert done.stderr == ""
    assert done.stdout == "{'epoch': 3, 'seen': [1, 2]} []\n"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"compression": "zip"}, "compression", "`none`, `fast`, `max`, `auto`"),
    ({"compression": None}, "compression", "`none`, `fast`, `max`, `auto`"),
    ({"staging": "fork"}, "staging", "`copy`, `cow`, `overlap`"),
    ({"on_error": "ignore"}, "on_error", "`raise`, `warn`"),
    ({"save_dtype": "bfloat"}, "save_dtype", "`fp64`, `fp32`, `fp16`, `bf16`, `fp8_e4m3`, `fp8_e5m2`"),
    ({"save_dtype": {"optimizer.**": "half"}}, "save_dtype", "`fp64`, `fp32`, `fp16`, `bf16`"),
    ({"save_dtype": 16}, "save_dtype", "`bf16`"),
    ({"keep": 3}, "keep", "keep.last(3)"),
    ({"keep": "last"}, "keep", "keep.last(3)"),
    ({"merge": {"stride": 4}}, "merge", "a MergePolicy"),
    ({"async_save": 1}, "async_save", "True or False"),
    ({"fsync": "no"}, "fsync", "True or False"),
    ({"read_only": None}, "read_only", "True or False"),
    ({"delta": "yes"}, "delta", "True or False"),
    ({"sync_every": 0}, "sync_every", "a whole number from 1"),
    ({"sync_every": True}, "sync_every", "a whole number from 1"),
    ({"threads": 0}, "threads", "a whole number from 1 to 1024"),
    ({"threads": 2.0}, "threads", "a whole number from 1 to 1024"),
    ({"chunk_bytes": 4095}, "chunk_bytes", "a power of two from 4096 to 67108864"),
    ({"chunk_bytes": 2048}, "chunk_bytes", "a power of two from 4096 to 67108864"),
    ({"chunk_bytes": 128 << 20}, "chunk_bytes", "a power of two from 4096 to 67108864"),
    ({"chunk_bytes": "1MB"}, "chunk_bytes", "a power of two from 4096 to 67108864"),
    ({"rank": -1}, "rank", "a whole number, `auto`, or None"),
    ({"rank": "first"}, "rank", "a whole number, `auto`, or None"),
    ({"world_size": "all"}, "world_size", "a whole number, `auto`, or None"),
    ({"rank": 1, "world_size": 1}, "rank", "below the world size: 1"),
    ({"rank": 0, "world_size": 0}, "rank", "below the world size: 0"),
]


@pytest.mark.parametrize(("arguments", "what", "legal"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_by_name_with_what_is_legal(tmp_path, arguments, what, legal):
    with pytest.raises(InvalidInputError) as caught:
        CheckpointManager(tmp_path / "run", **arguments)
    assert caught.value.what == what
    assert legal in caught.value.message
    assert f"invalid {what} `" in caught.value.message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "path", [None, 3, b"/x", "", "a\0b", "ftp://host/x", "http://host/x", "file://runs/x", "file://"]
)
def test_a_wrong_path_is_refused(path):
    with pytest.raises(InvalidInputError) as caught:
        CheckpointManager(path)
    assert caught.value.what == "path"
    assert "file://" in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"remote": "bucket/run"}, "remote"),
        ({"remote": "https://host/bucket"}, "remote"),
        ({"remote": "s3://"}, "remote"),
        ({"remote": 3}, "remote"),
        ({"remote_options": {"endpoint": "http://127.0.0.1:1"}}, "remote_options"),
        ({"remote": "s3://bucket/run", "remote_options": 3}, "remote_options"),
        ({"remote": "s3://bucket/run", "remote_options": {"endpont": "x"}}, "remote_options"),
    ],
    ids=str,
)
def test_a_wrong_remote_is_refused(tmp_path, arguments, what):
    with pytest.raises(InvalidInputError) as caught:
        CheckpointManager(tmp_path / "run", **arguments)
    assert caught.value.what == what
    assert not (tmp_path / "run").exists()


def test_a_push_without_a_bucket_is_refused(tmp_path):
    with CheckpointManager(tmp_path) as manager, pytest.raises(InvalidInputError) as caught:
        manager.sync_now()
    assert caught.value.what == "remote"
    assert "remote=" in caught.value.hint


@pytest.mark.parametrize(
    "policy",
    [
        {"stride": -1},
        {"stride": 1.5},
        {"max_packs": 0},
        {"max_packs": True},
        {"dead_ratio": 0},
        {"dead_ratio": 1.5},
    ],
)
def test_a_merge_policy_refuses_values_that_mean_nothing(policy):
    with pytest.raises(InvalidInputError, match="`stride` from 0, `max_packs` from 1"):
        MergePolicy(**policy)


def test_a_file_url_is_a_folder_and_its_escapes_are_undone(tmp_path):
    with CheckpointManager(f"file://{tmp_path}/a%20run") as manager:
        manager.save_sync(0, {"epoch": 1})
    with CheckpointManager(tmp_path / "a run", read_only=True) as manager:
        assert manager.load() == {"epoch": 1}


def test_under_a_launcher_nothing_said_about_ranks_is_an_error_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InvalidInputError) as caught:
        CheckpointManager(tmp_path / "run")
    assert "launched as rank 1 of 2" in caught.value.message
    assert 'rank="auto"' in caught.value.hint
    assert "world_size=1" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_ranks_by_hand_and_by_the_launcher(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path / "alone", rank="auto", world_size="auto") as manager:
        assert manager.save_sync(0, {}).world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with CheckpointManager(tmp_path / "by_hand", rank=0, world_size=1) as manager:
        assert manager.save_sync(0, {}).world_size == 1
    with (
        CheckpointManager(tmp_path / "auto", rank="auto", world_size="auto") as manager,
        pytest.raises(InvalidInputError, match="rank 1 of 2, and nothing connects it"),
    ):
        manager.save_sync(0, {})
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with CheckpointManager(tmp_path / "one") as manager:
        assert manager.save_sync(0, {}).world_size == 1


def test_the_number_of_threads_from_the_environment(tmp_path, monkeypatch):
    from varvite.settings import read_settings

    def threads(**more: Any) -> int:
        arguments = {**CONSTRUCTOR, **more}
        del arguments["path"]
        return read_settings(tmp_path, arguments).threads

    monkeypatch.setenv("VARVITE_THREADS", "3")
    assert threads() == 3
    assert threads(threads=5) == 5
    monkeypatch.setenv("VARVITE_THREADS", "many")
    with pytest.raises(InvalidInputError, match="invalid VARVITE_THREADS `many`: must be a whole number"):
        threads()
    monkeypatch.delenv("VARVITE_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert threads() == 1


WRONG_SAVES: list[tuple[dict[str, Any], str]] = [
    ({"step": -1}, "invalid step: must be a whole number from 0"),
    ({"step": 1.0}, "invalid step: must be a whole number from 0"),
    ({"step": True}, "invalid step: must be a whole number from 0"),
    ({"step": 1 << 63}, "invalid step: must be a whole number from 0"),
    ({"state": [1]}, "invalid state: must be a dict"),
    ({"metrics": [("loss", 1)]}, "invalid metrics: must be a dict of numbers by name"),
    ({"metrics": {"loss": "1"}}, "invalid metric `loss`: must be a number, not str"),
    ({"metrics": {"loss": [1.0, 2.0]}}, "invalid metric `loss`: must be a number, not list"),
    ({"metrics": {"loss": 10**400}}, "invalid metric `loss`: must be a number, not int"),
    ({"metrics": {3: 1.0}}, "invalid metric name `3`"),
    ({"metadata": [1]}, "invalid metadata: must be a dict of plain values"),
    ({"state": {"model": 1}, "model": {}}, "it is both a key of the state and a keyword argument"),
    ({"state": {"f": lambda: 0}}, "`f`"),
    ({"a": {"b": [object()]}}, "`a.b.0`"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_SAVES, ids=[message for _, message in WRONG_SAVES])
@pytest.mark.parametrize("method", ["save", "save_sync", "save_final"])
def test_a_wrong_argument_of_a_save_is_refused_and_saves_nothing(tmp_path, method, arguments, message):
    arguments = {"step": 0, "state": None, **arguments}
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(InvalidInputError) as caught:
            getattr(manager, method)(arguments.pop("step"), arguments.pop("state"), **arguments)
        assert message in caught.value.message
        manager.flush()
        assert manager.snapshots() == []
        assert manager.save_sync(0, {"epoch": 1}).seq == 1


def test_metrics_of_tensors_and_arrays(tmp_path):
    import numpy as np
    import torch

    metrics = {
        "a": torch.tensor(0.5),
        "b": np.float32(0.25),
        "c": 3,
        "d": torch.tensor([2.0], requires_grad=True),
    }
    with CheckpointManager(tmp_path) as manager:
        assert manager.save_sync(0, metrics=metrics).metrics == {"a": 0.5, "b": 0.25, "c": 3.0, "d": 2.0}
        for wrong in (torch.zeros(2), np.zeros(2)):
            with pytest.raises(InvalidInputError, match="invalid metric `e`: must be a number"):
                manager.save_sync(1, metrics={"e": wrong})


@pytest.mark.parametrize(
    "ref", ["newest", "latest~", "latest~x", "best:", "step:", "seq:-1", "tag:", "", -1, 1.5, None, True]
)
def test_a_wrong_reference_lists_the_legal_forms(tmp_path, ref):
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(0, {"epoch": 1})
        with pytest.raises(InvalidInputError) as caught:
            manager.load(ref)
    assert "latest" in caught.value.message


def test_a_closed_manager_refuses_everything_and_closes_again(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(0, {"epoch": 1})
    manager.close()
    manager.close()
    for call in (lambda: manager.save(1, {}), manager.load, manager.resume, manager.snapshots, manager.flush):
        with pytest.raises(InvalidInputError, match="the manager is closed"):
            call()
    assert manager.stats().save_count == 1
    assert repr(manager) == f"CheckpointManager('{tmp_path}')"


def test_the_environment_of_child_tests_is_clean():
    assert [name for name in clean_environment() if name.startswith("VARVITE")] == []
