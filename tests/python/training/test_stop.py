"""What asks a run to stop, in one process."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import threading

import pytest

from varvite.errors import InvalidInputError
from varvite.training import stop as module
from varvite.training.exits import ExitCode
from varvite.training.reasons import StopKind, StopReason
from varvite.training.spot import SpotNotice, SpotPoller
from varvite.training.stop import StopSignal

NOW = 1_700_000_000.0


class Clock:
    """The clocks that the module reads."""

    def __init__(self) -> None:
        self.wall, self.running = NOW, 1000.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.running

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.running += seconds


class Timer:
    """Stands for `Watchdog`: nothing ends."""

    made: list[Timer]

    def __init__(self, seconds: float, exit_code: int, message: str) -> None:
        self.seconds, self.exit_code, self.message, self.cancelled = seconds, exit_code, message, False
        self.made.append(self)

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def timers(monkeypatch):
    Timer.made = []
    monkeypatch.setattr(module, "Watchdog", Timer)
    return Timer.made


@pytest.fixture(autouse=True)
def handlers():
    """Fails a test that leaves a handler behind."""
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in watched]
    yield
    assert [signal.getsignal(number) for number in watched] == before


# ---- handlers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_stops_at_the_next_boundary(name):
    with StopSignal(slurm=False) as stop:
        assert (stop.check(0), stop.requested) == (None, False)
        signal.raise_signal(signal.Signals[name])
        assert stop.requested
        reason = stop.check(1)
        assert reason == StopReason(kind=StopKind.SIGNAL, signal=name)
        assert stop.check(2) is reason
        assert stop.requested


def test_signals_that_are_not_named_are_left_alone():
    earlier = signal.getsignal(signal.SIGUSR1)
    with StopSignal(["SIGUSR2"], slurm=False) as stop:
        assert signal.getsignal(signal.SIGUSR1) is earlier
        signal.raise_signal(signal.SIGUSR2)
        assert stop.check(0).signal == "SIGUSR2"


def test_an_earlier_handler_is_called_too_and_comes_back(monkeypatch):
    told = []

    def earlier(number, frame):
        told.append((number, frame is not None))

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        with StopSignal(slurm=False) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert told == [(signal.SIGTERM, True)]
            assert stop.requested
        assert signal.getsignal(signal.SIGTERM) is earlier
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_earlier_handler_that_raises_does_so_after_the_flag_is_set():
    def earlier(number, frame):
        raise LookupError("of the program")

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        with StopSignal(slurm=False) as stop:
            with pytest.raises(LookupError):
                signal.raise_signal(signal.SIGTERM)
            assert stop.requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_second_ctrl_c_interrupts():
    with StopSignal(slurm=False) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.check(0).signal == "SIGINT"


def test_a_ctrl_c_after_sigterm_is_the_first_one():
    with StopSignal(slurm=False) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.check(0).signal == "SIGTERM"


def test_nested_stop_signals_all_learn_of_it():
    with StopSignal(slurm=False) as outer:
        with StopSignal(slurm=False) as inner:
            signal.raise_signal(signal.SIGINT)
            assert (outer.requested, inner.requested) == (True, True)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) == outer._handle
        signal.raise_signal(signal.SIGTERM)
        assert outer.requested


def test_a_handler_that_was_installed_over_ours_stays_and_ours_passes_on():
    told = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append("first"))
    try:
        with StopSignal(slurm=False) as stop:
            ours = signal.getsignal(signal.SIGUSR1)

            def later(number, frame):
                told.append("later")
                ours(number, frame)

            signal.signal(signal.SIGUSR1, later)
        assert signal.getsignal(signal.SIGUSR1) is later
        signal.raise_signal(signal.SIGUSR1)
        assert told == ["later", "first"]
        assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_stays_ignored_where_the_shell_had_it_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal(slurm=False) as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_come_back_when_the_loop_raises():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopSignal(slurm=False):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before


def test_only_the_main_thread_can_install_them():
    seen = []

    def enter():
        try:
            StopSignal(slurm=False).__enter__()
        except InvalidInputError as error:
            seen.append(str(error))
        with StopSignal((), slurm=False) as stop:
            seen.append(stop.check(0))

    thread = threading.Thread(target=enter, name="trainer")
    thread.start()
    thread.join()
    refused, checked = seen
    assert refused.splitlines() == [
        "cannot install signal handlers in thread `trainer`: only the main thread can install them",
        "hint: enter the stop signal in the main thread, or pass signals=()",
    ]
    assert checked is None


def test_entering_twice_is_refused():
    with StopSignal(slurm=False) as stop, pytest.raises(InvalidInputError, match="entered already"):
        stop.__enter__()


def test_a_forked_child_ends_by_sigterm_and_takes_no_other_signal(timers):
    """It starts no timer and calls no earlier handler, which would do the parent's work twice."""
    told = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with StopSignal(slurm=False) as stop:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    signal.raise_signal(signal.SIGUSR1)
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGINT)
                    os.write(writer, f"{stop.requested} {len(timers)}".encode())
                    signal.raise_signal(signal.SIGTERM)
                    os.write(writer, b" not ended")
                finally:
                    os._exit(1)
            os.close(writer)
            _, status = os.waitpid(child, 0)
            with open(reader, "rb") as pipe:
                assert pipe.read() == b"False 0"
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
            assert told == []
            signal.raise_signal(signal.SIGTERM)
            assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- the hard timer ------------------------------------------------------------------------------


def test_the_timer_runs_from_the_signal_until_done(timers):
    with StopSignal(slurm=False, hard_timeout_seconds=90) as stop:
        assert timers == []
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.check(0)
        (timer,) = timers
        assert (timer.seconds, timer.exit_code, timer.cancelled) == (90, ExitCode.TIMED_OUT, False)
        assert "not durable within 90 s" in timer.message
        stop.done()
        assert timer.cancelled
        signal.raise_signal(signal.SIGTERM)
        assert len(timers) == 1


def test_the_timer_starts_on_ranks_that_got_no_signal(timers):
    stop = StopSignal(slurm=False)
    stop.settle(StopReason(kind=StopKind.SIGNAL, rank=3, signal="SIGTERM").to_code())
    assert [timer.seconds for timer in timers] == [600]


def test_leaving_ends_the_timer(timers):
    with StopSignal(slurm=False):
        signal.raise_signal(signal.SIGTERM)
    assert [timer.cancelled for timer in timers] == [True]


def test_a_signal_between_the_lines_leaves_no_timer_behind(timers, monkeypatch):
    """The signal comes when the main thread is about to start the timer itself: both end at `done`."""
    with StopSignal(slurm=False) as stop:

        class Interrupted(Timer):
            def __init__(self, *arguments):
                monkeypatch.setattr(module, "Watchdog", Timer)
                signal.raise_signal(signal.SIGTERM)
                super().__init__(*arguments)

        monkeypatch.setattr(module, "Watchdog", Interrupted)
        stop.settle(StopReason(kind=StopKind.FILE).to_code())
        stop.done()
    assert [timer.cancelled for timer in timers] == [True, True]


def test_without_a_timer(timers):
    with StopSignal(slurm=False, hard_timeout_seconds=None) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.check(0)
    assert timers == []


@pytest.mark.parametrize(("left", "seconds"), [(300, 300), (900, 600), (20, 60), (-5, 60)])
def test_the_timer_ends_before_the_scheduler_ends_the_job(clock, timers, monkeypatch, left, seconds):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW) + 1000))
    with StopSignal(margin_seconds=60):
        clock.passes(1000 - left)
        signal.raise_signal(signal.SIGUSR1)
    assert [timer.seconds for timer in timers] == [seconds]


# ---- deadlines -----------------------------------------------------------------------------------


def test_slurms_time_limit(clock, timers, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW) + 1000))
    stop = StopSignal((), margin_seconds=60)
    clock.passes(939)
    assert stop.check(0) is None
    clock.passes(1)
    assert stop.check(1) == StopReason(kind=StopKind.TIME_LIMIT)


@pytest.mark.parametrize("jump", [-5000.0, 5000.0])
def test_a_clock_that_is_set_changes_nothing(clock, timers, monkeypatch, jump):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW) + 1000))
    stop = StopSignal((), margin_seconds=60, budget_seconds=5000)
    clock.wall += jump
    clock.passes(939)
    assert stop.check(0) is None
    clock.passes(1)
    assert stop.check(1) == StopReason(kind=StopKind.TIME_LIMIT)


def test_slurm_is_left_alone_where_it_is_not_wanted(clock, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "nonsense")
    assert StopSignal((), slurm=False).check(0) is None
    with pytest.raises(InvalidInputError):
        StopSignal(())


def test_an_end_that_has_passed_is_another_jobs(clock, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW) - 1))
    with pytest.warns(RuntimeWarning, match="has passed already and is not used"):
        stop = StopSignal(())
    assert stop.check(0) is None


def test_a_budget(clock, timers):
    stop = StopSignal((), slurm=False, budget_seconds=100, margin_seconds=10)
    clock.passes(89)
    assert stop.check(0) is None
    clock.passes(1)
    reason = stop.check(1)
    assert (reason.kind, str(reason)) == (StopKind.BUDGET, "the time budget is used up (rank 0)")


def test_a_slow_save_and_long_steps_stop_earlier(clock, timers):
    stop = StopSignal((), slurm=False, budget_seconds=1000, margin_seconds=10)
    stop.saved_in(100)
    for step in range(12):
        assert stop.check(step) is None
        clock.passes(50)
    # At 600 s there would be room for the save, but not for it after one more step.
    assert stop.check(12) is None
    clock.passes(50)
    assert stop.check(13).kind is StopKind.BUDGET


def test_one_long_step_does_not_stop_a_run_that_has_time_left(clock, timers):
    stop = StopSignal((), slurm=False, budget_seconds=1000, margin_seconds=10)
    for step, seconds in enumerate([1, 1, 600, 1, 1]):
        assert stop.check(step) is None
        clock.passes(seconds)
    assert stop.check(5) is None


def test_evaluations_that_come_again_and_again_count(clock, timers):
    stop = StopSignal((), slurm=False, budget_seconds=1000, margin_seconds=10)
    for step, seconds in enumerate([200, 1, 1, 200, 1, 1, 200, 1, 1, 190]):
        assert stop.check(step) is None
        clock.passes(seconds)
    # 204 s are left: enough for the save, but not after another evaluation.
    assert stop.check(10).kind is StopKind.BUDGET


def test_long_steps_of_long_ago_are_forgotten(clock, timers):
    stop = StopSignal((), slurm=False, budget_seconds=1000, margin_seconds=10)
    for seconds in (200, 200, *[1] * 64):
        assert stop.check(0) is None
        clock.passes(seconds)
    clock.passes(430)
    assert stop.check(1) is None


# ---- file and spot notices -----------------------------------------------------------------------


def test_a_stop_file_is_looked_for_once_a_second(clock, timers, tmp_path, monkeypatch):
    path = tmp_path / "stop"
    looks = []
    monkeypatch.setattr(
        module.os.path, "lexists", lambda path: looks.append(path) or os.access(path, os.F_OK)
    )
    stop = StopSignal((), slurm=False, stop_file=path)
    for step in range(10):
        assert stop.check(step) is None
        clock.passes(0.25)
    assert len(looks) == 3
    path.touch()
    assert stop.check(10) is None
    clock.passes(0.5)
    assert stop.check(11).kind is StopKind.FILE


def test_a_stop_file_that_is_there_from_the_start_is_told(timers, tmp_path):
    path = tmp_path / "stop"
    path.touch()
    stop = StopSignal((), slurm=False, stop_file=path)
    with pytest.warns(RuntimeWarning, match="is there from the start"):
        assert stop.check(0).kind is StopKind.FILE


def test_a_spot_notice(clock, timers):
    poller = SpotPoller("aws", endpoint="http://127.0.0.1:9")
    stop = StopSignal((), slurm=False, spot=poller)
    assert stop.check(0) is None
    poller._notice = SpotNotice(provider="aws", action="terminate", at_seconds=clock.running + 110)
    assert stop.requested
    assert str(stop.check(1)) == "the cloud takes the machine away (rank 0)"
    assert [timer.seconds for timer in timers] == [110]


@pytest.mark.parametrize(("local_rank", "asks"), [(None, True), ("0", True), ("1", False)])
def test_one_process_of_a_machine_asks_for_notices(monkeypatch, local_rank, asks):
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    calls = []
    poller = SpotPoller("gcp", endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(poller, "start", lambda: calls.append("start"))
    with StopSignal((), slurm=False, spot=poller):
        assert calls == (["start"] if asks else [])


# ---- reasons and arguments -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(StopKind))
@pytest.mark.parametrize("rank", [0, 7, 2**32 - 1])
def test_a_reason_as_a_number_and_back(kind, rank):
    reason = StopReason(kind=kind, rank=rank, signal="SIGTERM" if kind is StopKind.SIGNAL else None)
    assert 0 < reason.to_code() < 2**63
    assert StopReason.from_code(reason.to_code()) == reason
    assert pickle.loads(pickle.dumps(reason)) == reason
    assert str(reason)
    assert reason.exit_code == 75


def test_of_several_reasons_all_ranks_take_the_same():
    ordered = [
        StopReason(kind=StopKind.FILE),
        StopReason(kind=StopKind.SPOT),
        StopReason(kind=StopKind.SIGNAL, rank=0, signal="SIGINT"),
        StopReason(kind=StopKind.SIGNAL, rank=9, signal="SIGTERM"),
        StopReason(kind=StopKind.SIGNAL, rank=1, signal="SIGTERM"),
    ]
    assert sorted(ordered, key=StopReason.to_code) == ordered


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"signals": "SIGTERM"}, "signals"),
        ({"signals": ["SIGTREM"]}, "signals"),
        ({"signals": ["SIGKILL"]}, "signals"),
        ({"signals": [15]}, "signals"),
        ({"signals": ["__class__"]}, "signals"),
        ({"budget_seconds": 0}, "budget_seconds"),
        ({"budget_seconds": 60}, "budget_seconds"),
        ({"margin_seconds": -1}, "margin_seconds"),
        ({"hard_timeout_seconds": 0}, "hard_timeout_seconds"),
        ({"spot": "ibm"}, "spot"),
    ],
)
def test_arguments_that_are_not_legal(arguments, what):
    with pytest.raises(InvalidInputError) as caught:
        StopSignal(slurm=False, **arguments)
    assert caught.value.what == what


def test_a_signal_alone_is_no_sequence_of_signals_and_is_told_so():
    with pytest.raises(InvalidInputError, match="must be a sequence of names, not one") as caught:
        StopSignal("SIGTERM", slurm=False)
    assert caught.value.hint == 'pass signals=("SIGTERM",)'


def test_one_that_was_never_entered_does_not_pretend_to_listen():
    stop = StopSignal(slurm=False)
    with pytest.raises(InvalidInputError, match="it was not entered, and would hear no signal"):
        stop.check(0)
    assert StopSignal((), slurm=False).check(0) is None
    with stop:
        pass
    assert stop.check(0) is None


# ---- signals that a thread of a library takes ----------------------------------------------------


@pytest.mark.parametrize("look", ["check", "requested"])
def test_a_signal_that_a_thread_of_a_library_took_is_heard(look):
    """The kernel may give a signal to any thread, and CPython before 3.13 then looks for it late or never.

    A loop that is Python alone, without a call that gives up the interpreter's lock, would not hear of it.
    """
    library = ctypes.PyDLL(None)  # calls by it keep the lock
    thread = ctypes.c_void_p()
    library.pthread_create(ctypes.byref(thread), None, ctypes.cast(library.pause, ctypes.c_void_p), None)
    with StopSignal(slurm=False) as stop:
        library.pthread_kill(thread, signal.SIGUSR1)
        for step in range(200_000):
            if stop.check(step) if look == "check" else stop.requested:
                break
        assert stop.check(step).signal == "SIGUSR1"
        assert step < 199_999
        # The first signal may have come before the thread paused, and then it waits for another one.
        while library.pthread_tryjoin_np(thread, None) != 0:
            library.pthread_kill(thread, signal.SIGUSR1)
