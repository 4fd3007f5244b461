"""Metrics go on where the run does: new, appended or forked, and never one for another."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError, StoreError
from varvite.records import ResumeReport
from varvite.training.identity import Origin, RunIdentity
from varvite.training.tracking import (
    JsonLinesTracker,
    NullTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    mode_after,
    open_tracker,
    read_rows,
)


def resumed(run: RunIdentity) -> RunIdentity:
    """Returns the identity after a restart of its run."""
    other = RunIdentity()
    other.load_state_dict(run.state_dict())
    return other


def forked(run: RunIdentity) -> RunIdentity:
    """Returns the identity of a fork of a run."""
    other = RunIdentity()
    facts: dict[str, Any] = {"verb": "fork", "path": "p", "repository_id": "a" * 32, "digest": "b"}
    other.begin(Origin(seq=1, step=1, run_id=run.run_id, trackers=run.trackers, **facts))
    return other


# JSON lines


def test_lines_are_json_and_come_back_with_numbers_of_every_kind(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.log(0, {"loss": 2.5, "count": 3})
    tracker.log(np.int64(1), {"loss": torch.tensor(math.nan), "norm": np.float32(math.inf), "low": -math.inf})
    tracker.close()
    tracker.close()
    assert path.read_text().splitlines()[0] == '{"step":0,"loss":2.5,"count":3}'
    assert all(json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    first, second = read_rows(path)
    assert first == {"step": 0, "loss": 2.5, "count": 3}
    assert (math.isnan(second["loss"]), second["norm"], second["low"]) == (True, math.inf, -math.inf)


def test_appending_cuts_off_what_is_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    for step in range(6):
        tracker.log(step, {"loss": step})
    tracker.close()
    again = JsonLinesTracker(path, mode="append", next_step=3)
    assert again.record()["last_step"] == 2
    again.log(3, {"loss": 30})
    again.close()
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_lines_need_not_lie_in_the_order_of_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    for step in (0, 4, 1, 5, 2):
        tracker.log(step, {"loss": step})
    tracker.close()
    assert JsonLinesTracker(path, mode="append", next_step=4).record()["last_step"] == 2
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2]


@pytest.mark.parametrize("torn", ["", "{", '{"step":2,"loss":1.5}', '{"step":2,"lo'])
def test_a_line_without_an_end_was_never_logged(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0,"loss":1}\n' + torn)
    assert [row["step"] for row in read_rows(path)] == [0]
    tracker = JsonLinesTracker(path, mode="append", next_step=9)
    tracker.log(9, {"loss": 2})
    tracker.close()
    assert [row["step"] for row in read_rows(path)] == [0, 9]


@pytest.mark.parametrize("line", ["", "torn{", "[1]", '{"loss":1}', '{"step":"1"}', '{"step":true}'])
def test_a_foreign_line_is_damage_and_the_file_is_left_alone(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step":0}}\n{line}\n{{"step":1}}\n')
    before = path.read_bytes()
    with pytest.raises(CorruptionError, match="byte 11") as caught:
        JsonLinesTracker(path, mode="append", next_step=5)
    assert caught.value.offset_bytes == 11
    assert path.read_bytes() == before
    with pytest.raises(CorruptionError):
        list(read_rows(path))


def test_a_new_run_overwrites_no_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for value in range(3):
        tracker = JsonLinesTracker(path)
        tracker.log(0, {"loss": value})
        tracker.close()
    found = {one.name: next(read_rows(one))["loss"] for one in tmp_path.iterdir()}
    assert found == {"metrics.1.jsonl": 0, "metrics.2.jsonl": 1, "metrics.jsonl": 2}


def test_a_fork_begins_with_the_lines_of_its_parent(tmp_path):
    parent, child = tmp_path / "parent.jsonl", tmp_path / "child.jsonl"
    run = RunIdentity()
    tracker = open_tracker("jsonl", run, "new", path=parent)
    for step in range(5):
        tracker.log(step, {"loss": step})
    tracker.close()
    before = parent.read_bytes()
    other = open_tracker("jsonl", forked(run), "fork", next_step=2, path=child)
    other.log(2, {"loss": 20})
    other.close()
    assert [row["loss"] for row in read_rows(child)] == [0, 1, 20]
    assert parent.read_bytes() == before
    with pytest.raises(InvalidInputError, match="it is the file to fork from"):
        open_tracker("jsonl", forked(run), "fork", next_step=2, path=parent)


def test_a_killed_process_leaves_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - it ends by a signal
        tracker = JsonLinesTracker(path)
        for step in range(1000):
            tracker.log(step, {"loss": step / 7})
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert [row["loss"] for row in read_rows(path)] == [step / 7 for step in range(1000)]


def test_what_can_not_be_logged_is_refused_and_writes_nothing(tmp_path):
    tracker = JsonLinesTracker(tmp_path / "metrics.jsonl")
    for step, metrics in [
        (-1, {}),
        (True, {}),
        (1.0, {}),
        (0, {"a": "text"}),
        (0, {"a": None}),
        (0, {"step": 1}),
    ]:
        with pytest.raises(InvalidInputError):
            tracker.log(step, metrics)
    with pytest.raises(InvalidInputError, match="`a`: must be a number"):
        tracker.log(0, {"a": torch.zeros(2)})
    tracker.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    with pytest.raises(InvalidInputError, match="the tracker is closed"):
        tracker.log(0, {})


def test_a_file_that_is_not_there_is_no_record(tmp_path):
    with pytest.raises(InvalidInputError, match="there is no file to append to"):
        JsonLinesTracker(tmp_path / "metrics.jsonl", mode="append")
    with pytest.raises(InvalidInputError, match="there is no file to fork from"):
        JsonLinesTracker(tmp_path / "metrics.jsonl", mode="fork", parent=tmp_path / "other")
    with pytest.raises(InvalidInputError, match="needs the file to branch off from"):
        JsonLinesTracker(tmp_path / "metrics.jsonl", mode="fork")
    with pytest.raises(InvalidInputError, match="must be one of"):
        JsonLinesTracker(tmp_path / "metrics.jsonl", mode="resume")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_is_a_store_error_with_its_code(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        JsonLinesTracker(tmp_path / "file" / "metrics.jsonl")
    assert caught.value.errno is not None
    if os.path.exists("/dev/full"):
        tracker = JsonLinesTracker(tmp_path / "metrics.jsonl")
        os.dup2(os.open("/dev/full", os.O_WRONLY), tracker._file)
        with pytest.raises(StoreError, match="No space left"):
            tracker.log(0, {"loss": 1})
        os.close(tracker._file)


# Modes


def test_the_mode_after_each_verb():
    facts: dict[str, Any] = {"step": 1, "next_step": 2, "fresh": False}
    assert mode_after(ResumeReport(**facts)) == "append"
    assert mode_after(ResumeReport(verb="warm_start", **facts)) == "new"
    assert mode_after(ResumeReport(verb="fork", **facts)) == "new"
    assert mode_after(ResumeReport(step=None, next_step=0, fresh=True)) == "new"


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard", "wandb"])
def test_to_append_or_to_fork_without_a_record_is_an_error(tmp_path, kind):
    run = RunIdentity()
    with pytest.raises(InvalidInputError, match=f"cannot append to a `{kind}` tracker: no record"):
        open_tracker(kind, run, "append", next_step=4)
    with pytest.raises(InvalidInputError, match=f"cannot fork a `{kind}` tracker: no record"):
        open_tracker(kind, run, "fork", next_step=4)
    # A record of the run itself is none to fork from, nor that of another backend one to append to.
    open_tracker("null", run, "new")
    with pytest.raises(InvalidInputError, match="no record"):
        open_tracker(kind, resumed(run), "append", next_step=4)
    assert kind not in run.trackers


def test_kinds_and_modes_are_checked_by_name():
    with pytest.raises(InvalidInputError, match=r"`csv`.*`null`, `jsonl`, `tensorboard`, `wandb`"):
        open_tracker("csv", RunIdentity(), "new")
    with pytest.raises(InvalidInputError, match=r"`resume`.*`new`, `append`, `fork`"):
        open_tracker("null", RunIdentity(), "resume")


def test_the_null_tracker_goes_on_without_a_record():
    tracker = open_tracker("null", RunIdentity(), "append", next_step=3)
    tracker.log(3, {"loss": 1.0})
    tracker.close()
    assert isinstance(tracker, NullTracker)


def test_a_restarted_run_goes_on_with_its_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for last_step in (4, 7):  # each time killed two steps after its last save
        with CheckpointManager(tmp_path / "run") as manager:
            run = RunIdentity()
            report = manager.resume(run=run)
            tracker = open_tracker("jsonl", run, mode_after(report), next_step=report.next_step, path=path)
            for step in range(report, last_step):
                tracker.log(step, {"loss": step, "restart": run.restart_count})
                if step < last_step - 2:
                    manager.save_sync(step, run=run)
    assert [(row["step"], row["restart"]) for row in read_rows(path)] == [
        *((step, 0) for step in range(2)),
        *((step, 1) for step in range(2, 7)),
    ]


# TensorBoard


class FakeWriter:
    """Notes what a SummaryWriter is told."""

    made: ClassVar[list[FakeWriter]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.calls: list[Any] = [(folder, purge_step)]
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_tensorboard_hides_the_steps_that_are_done_again():
    run = RunIdentity()
    tracker = open_tracker("tensorboard", run, "new", folder="runs", make_writer=FakeWriter)
    tracker.log(0, {"loss": torch.tensor(1.5), "lr": 0.1})
    assert run.state_dict()["trackers"]["tensorboard"] == {
        "backend": "tensorboard",
        "folder": "runs",
        "last_step": 0,
    }
    tracker.log(1, {"loss": 2})
    tracker.close()
    tracker.close()
    expected = [("runs", 0), ("loss", 1.5, 0), ("lr", 0.1, 0), "flush", ("loss", 2, 1), "close"]
    assert FakeWriter.made[-1].calls == expected
    again = open_tracker(
        "tensorboard", resumed(run), "append", next_step=1, folder="runs", make_writer=FakeWriter
    )
    assert FakeWriter.made[-1].calls == [("runs", 1)]
    assert again.record()["last_step"] == 0
    with pytest.raises(InvalidInputError, match="the tracker is closed"):
        tracker.log(2, {})


def test_event_files_can_not_be_forked():
    run = RunIdentity()
    open_tracker("tensorboard", run, "new", folder="runs", make_writer=FakeWriter)
    with pytest.raises(InvalidInputError, match="event files can't branch off"):
        open_tracker("tensorboard", forked(run), "fork", next_step=1, folder="x", make_writer=FakeWriter)


def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch, tmp_path):
    for name, kind, options in [
        ("torch.utils.tensorboard", "tensorboard", {"folder": tmp_path}),
        ("wandb", "wandb", {"project": "p"}),
    ]:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(InvalidInputError, match="a library is missing") as caught:
            open_tracker(kind, RunIdentity(), "new", **options)
        assert caught.value.hint.startswith("install it: pip install")


def test_with_tensorboard_itself(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(0, {"loss": 1.0})
    tracker.record()
    tracker.close()
    assert any(one.stat().st_size for one in tmp_path.iterdir())


# Weights & Biases


class FakeWandb:
    """A service that knows its runs, as far as `wandb.init` is concerned."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}
        self.inits: list[dict[str, Any]] = []

    def init(self, **given: Any) -> Any:
        random.random()
        np.random.rand()
        torch.rand(1)
        self.inits.append(given)
        run_id = given["id"]
        assert given.get("resume") != "must" or run_id in self.runs
        assert given.get("resume") != "never" or run_id not in self.runs
        rows = self.runs.setdefault(run_id, {})
        if "fork_from" in given:
            parent, _, step = given["fork_from"].partition("?_step=")
            assert parent != run_id
            rows.update({at: row for at, row in self.runs[parent].items() if at <= int(step)})

        def log(row: dict[str, float], *, step: int, commit: bool) -> None:
            assert commit
            if step > max(rows, default=-1):
                rows[step] = row

        finished: list[str] = []
        return SimpleNamespace(
            id=run_id, name=given.get("name", "calm-sea"), log=log, finish=lambda: finished.append(run_id)
        )


@pytest.fixture
def service(monkeypatch):
    for name in [one for one in os.environ if one.startswith("WANDB")]:
        monkeypatch.delenv(name)
    return FakeWandb()


def test_wandb_makes_a_run_with_the_id_of_the_run(service):
    run = RunIdentity("baseline")
    tracker = open_tracker("wandb", run, "new", project="p", library=service, entity="me")
    expected = {"project": "p", "id": run.run_id, "resume": "never", "name": "baseline", "entity": "me"}
    assert service.inits == [expected]
    tracker.log(0, {"loss": 1})
    assert run.trackers["wandb"] == {
        "backend": "wandb",
        "project": "p",
        "run_id": run.run_id,
        "name": "baseline",
        "last_step": 0,
    }
    tracker.close()
    tracker.close()


def test_wandb_goes_on_with_the_run_it_had(service):
    run = RunIdentity()
    tracker = open_tracker("wandb", run, "new", project="p", library=service)
    for step in range(5):
        tracker.log(step, {"loss": step})
    again = open_tracker("wandb", resumed(run), "append", next_step=3, library=service)
    assert service.inits[-1] == {"project": "p", "id": run.run_id, "resume": "must"}
    assert again.record()["last_step"] == 2
    for step in range(3, 7):
        again.log(step, {"loss": step})
    assert service.runs == {run.run_id: {step: {"loss": step} for step in range(7)}}
    with pytest.raises(InvalidInputError, match="the recorded run is in another one: p"):
        open_tracker("wandb", resumed(run), "append", next_step=3, project="q", library=service)


def test_wandb_forks_from_the_step_before(service):
    run = RunIdentity()
    tracker = open_tracker("wandb", run, "new", project="p", library=service)
    for step in range(5):
        tracker.log(step, {"loss": step})
    child = forked(run)
    open_tracker("wandb", child, "fork", next_step=3, library=service)
    assert service.inits[-1] == {
        "project": "p",
        "id": child.run_id,
        "fork_from": f"{run.run_id}?_step=2",
    }
    assert list(service.runs[child.run_id]) == [0, 1, 2]
    with pytest.raises(InvalidInputError, match="a step to branch off from"):
        open_tracker("wandb", forked(run), "fork", next_step=0, library=service)


@pytest.mark.parametrize("mode", ["append", "fork"])
@pytest.mark.parametrize("how", ["offline", "disabled"])
def test_offline_nothing_can_be_appended_to(service, monkeypatch, mode, how):
    run = RunIdentity()
    tracker = WandbTracker("p", run_id=run.run_id, library=service)
    run.attach("wandb", tracker)
    other = resumed(run) if mode == "append" else forked(run)
    monkeypatch.setenv("WANDB_MODE", how)
    with pytest.raises(InvalidInputError, match=f"the library is `{how}`"):
        open_tracker("wandb", other, mode, next_step=3, library=service)
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(InvalidInputError, match=f"the library is `{how}`"):
        open_tracker("wandb", other, mode, next_step=3, library=service, wandb_mode=how)
    assert len(service.inits) == 1


def test_offline_a_run_can_be_new(service):
    open_tracker("wandb", RunIdentity(), "new", project="p", library=service, wandb_mode="offline")
    assert service.inits[-1]["mode"] == "offline"


def test_wandb_options_that_the_mode_decides_are_refused(service):
    with pytest.raises(InvalidInputError, match="`resume`: the mode"):
        WandbTracker("p", run_id="a", library=service, resume="allow")
    with pytest.raises(InvalidInputError, match="a new run needs one"):
        open_tracker("wandb", RunIdentity(), "new", library=service)


def test_another_run_than_the_recorded_one_is_an_error(service):
    ended = []
    stranger = SimpleNamespace(id="other", name="x", log=None, finish=lambda: ended.append(True))
    library = SimpleNamespace(init=lambda **_: stranger)
    with pytest.raises(InvalidInputError, match="the service has opened another run: other"):
        WandbTracker("p", run_id="mine", mode="append", library=library)
    assert ended == [True]


def test_opening_a_tracker_draws_no_random_number(service):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    open_tracker("wandb", RunIdentity(), "new", project="p", library=service)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_every_tracker_is_one(tmp_path, service):
    made = [
        NullTracker(),
        JsonLinesTracker(tmp_path / "m.jsonl"),
        TensorBoardTracker("x", make_writer=FakeWriter),
        WandbTracker("p", run_id="a", library=service),
    ]
    assert all(isinstance(one, Tracker) for one in made)
    assert [one.record()["backend"] for one in made] == ["null", "jsonl", "tensorboard", "wandb"]
    for one in made:
        one.close()
