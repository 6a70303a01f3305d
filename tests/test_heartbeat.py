"""The heartbeat of a run, and the lock that keeps a second run out of its folder."""

import fcntl
import io
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
import torch
from rich.console import Console
from small_runs import small_project

from engine.errors import CheckpointError, DiskError, InputError, NonFinite, OutOfMemory
from engine.heartbeat import INTERVAL_S, Heartbeat
from engine.interrupts import Interrupted
from engine.live_status import LiveStatus, read_live_status
from engine.run_folder import RunFolder, create_run_folder
from engine.run_lock import LOCK_FILE, RunLock
from engine.runtime.failure import Place
from engine.runtime.ticker import Ticker

FAST = 0.02


def unheard(line: str) -> None:
    pytest.fail(f"said {line!r}")


def beating(folder: Path, say: Callable[[str], None] = unheard, interval: float = FAST) -> Heartbeat:
    return Heartbeat(RunFolder(folder), say, interval)


def written(folder: Path) -> LiveStatus:
    return read_live_status(folder / "status.json")


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


# Beats


def test_the_first_status_is_there_before_anything_is_loaded(tmp_path: Path) -> None:
    with beating(tmp_path, interval=60):
        status = written(tmp_path)
    assert status.state == "starting" and status.pid == os.getpid() and status.step is None
    assert abs(status.time - time.time()) < 5 and status.started <= status.time


def test_it_beats_while_the_main_thread_is_busy(tmp_path: Path) -> None:
    with beating(tmp_path):
        first = written(tmp_path).time
        begin = time.monotonic()
        while time.monotonic() - begin < 0.4:  # never gives the interpreter away by itself
            sum(range(1000))
        assert written(tmp_path).time > first + 0.1


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    with beating(tmp_path, interval=0.0005) as heart:
        for state in ("running", "evaluating", "saving") * 100:
            heart.state(state)  # type: ignore[arg-type]
            assert written(tmp_path).pid == os.getpid()


def test_facts_stand_in_the_next_beat(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints/step_000004"
    checkpoint.mkdir(parents=True)
    busy: dict[str, float] = {}
    places = {"target.0@cpu": Place(stage="target-forward", micro_batch=9, step=5)}
    with beating(tmp_path) as heart:
        heart.planned(4, 10, checkpoint)
        heart.watch(["cpu"], lambda: places, busy)
        heart.state("running")
        until(lambda: bool(written(tmp_path).lanes))
        resumed = written(tmp_path)
        heart.step({"step": 5, "loss": 3.5, "tokens_per_s": 100.0})
        busy["target.0@cpu"] = 0.75
        time.sleep(0.05)
        heart.step({"step": 6, "loss": float("nan"), "tokens_per_s": 200.0})
        until(lambda: written(tmp_path).step == 6)
        running = written(tmp_path)
    assert (resumed.step, resumed.last_step, resumed.resumed_from) == (4, 10, "step_000004")
    assert resumed.checkpoint is not None and resumed.checkpoint.step == 4 and resumed.eta_s is None
    assert resumed.lanes["target.0@cpu"].busy is None
    lane = running.lanes["target.0@cpu"]
    assert (lane.stage, lane.micro_batch, lane.step, lane.busy) == ("target-forward", 9, 5, 0.75)
    assert running.loss is None and running.tokens_per_s == 200.0 and running.gpu_memory == {}
    assert running.eta_s is not None and 0.1 < running.eta_s < 2, "four steps of 50 ms"


def test_a_lane_shows_since_when_it_is_where_it_is(tmp_path: Path) -> None:
    places = {name: Place(stage="transfer", micro_batch=0) for name in ("moves", "hangs")}
    with beating(tmp_path) as heart:
        heart.watch([], lambda: places, {})
        heart.state("running")
        until(lambda: bool(written(tmp_path).lanes))
        begun = written(tmp_path).lanes["hangs"].since
        for number in range(1, 6):
            places["moves"] = Place(stage="transfer", micro_batch=number)
            time.sleep(3 * FAST)
        until(lambda: written(tmp_path).lanes["moves"].micro_batch == 5)
        status = written(tmp_path)
    assert status.lanes["hangs"].since == begun
    assert status.lanes["moves"].since > begun + 3 * FAST


def test_lanes_that_are_idle_are_left_out(tmp_path: Path) -> None:
    with beating(tmp_path) as heart:
        heart.watch([], lambda: {"target.0@cpu": Place(stage="end of the run")}, {})
        heart.state("evaluating")
        until(lambda: written(tmp_path).state == "evaluating")
        assert written(tmp_path).lanes == {}


@pytest.mark.gpu
def test_memory_of_every_gpu_is_reported_and_a_device_that_answers_no_more_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    held = torch.empty(10**9, dtype=torch.uint8, device="cuda:0")
    with beating(tmp_path, said.append) as heart:
        heart.watch(["cpu", "cuda:0"], dict, {})
        heart.step({"step": 1, "peak_memory": {"cuda:0": 1.5}})
        until(lambda: bool(written(tmp_path).gpu_memory))
        memory = written(tmp_path).gpu_memory["cuda:0"]
        assert 1.0 <= memory.used_gb < memory.total_gb and memory.peak_allocated_gb == 1.5
        assert list(written(tmp_path).gpu_memory) == ["cuda:0"] and held.is_cuda

        def broken(device: str) -> tuple[int, int]:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr("torch.cuda.mem_get_info", broken)
        until(lambda: bool(said))
        before = written(tmp_path).time
        until(lambda: written(tmp_path).time > before + 2 * FAST)
    assert len(said) == 1 and "cuda:0: an illegal memory access" in said[0]


# Ends


@pytest.mark.parametrize(
    "error, code, text",
    [
        (NonFinite("taps of layer 3"), 4, "NonFinite: taps of layer 3"),
        (OutOfMemory("cuda:0"), 3, "OutOfMemory: cuda:0"),
        (MemoryError("no more"), 3, "MemoryError: no more"),
        (KeyError("a bug"), 1, "KeyError: 'a bug'"),
    ],
)
def test_a_failed_run_says_so_with_its_exit_code(
    tmp_path: Path, error: BaseException, code: int, text: str
) -> None:
    with pytest.raises(type(error)), beating(tmp_path):
        raise error
    status = written(tmp_path)
    assert (status.state, status.exit_code, status.error) == ("failed", code, text)


@pytest.mark.parametrize(
    "error, code", [(KeyboardInterrupt(), 130), (Interrupted("SIGTERM", 143), 143)], ids=["plain", "signal"]
)
def test_an_interrupted_run_is_stopped_with_the_code_of_its_signal(
    tmp_path: Path, error: KeyboardInterrupt, code: int
) -> None:
    with pytest.raises(KeyboardInterrupt), beating(tmp_path):
        raise error
    assert (written(tmp_path).state, written(tmp_path).exit_code) == ("stopped", code)


def test_a_run_that_came_to_its_end_is_done(tmp_path: Path) -> None:
    with beating(tmp_path):
        pass
    status = written(tmp_path)
    assert (status.state, status.exit_code, status.error) == ("done", 0, None)


def test_nothing_is_written_after_the_first_end(tmp_path: Path) -> None:
    with beating(tmp_path, interval=0.001) as heart:
        heart.end("stopped", 143)
        heart.state("running")
        heart.end("done")
        heart.beat()  # one that was held up on its way
        time.sleep(0.02)
    assert (written(tmp_path).state, written(tmp_path).exit_code) == ("stopped", 143)
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_any_thread_may_end_it(tmp_path: Path) -> None:
    with beating(tmp_path) as heart:
        thread = threading.Thread(target=heart.end_with, args=(NonFinite("by the watchdog"),))
        thread.start()
        thread.join()
        assert written(tmp_path).exit_code == 4


# Trouble


class FullDisk(RunFolder):
    """A run's folder on a disk that is full while `full` exists."""

    def write_status(self, status: object) -> None:
        if (self.path / "full").exists():
            raise DiskError("no space left on device")
        super().write_status(status)  # type: ignore[arg-type]


def test_a_disk_that_is_full_is_said_once_and_ends_no_run(tmp_path: Path) -> None:
    said: list[str] = []
    with Heartbeat(FullDisk(tmp_path), said.append, FAST):
        (tmp_path / "full").touch()
        until(lambda: bool(said))
        time.sleep(5 * FAST)
        assert said == ["status.json is out of date, the run goes on: DiskError: no space left on device"]
        (tmp_path / "full").unlink()
        until(lambda: len(said) == 2)
        assert said[1] == "status.json is written again"
    assert written(tmp_path).state == "done"


def test_a_beat_that_hangs_keeps_no_run_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.heartbeat.WAIT_S", 0.1)
    hangs, go_on = threading.Event(), threading.Event()

    class HungDisk(RunFolder):
        def write_status(self, status: object) -> None:
            if threading.current_thread().name == "heartbeat":
                hangs.set()
                go_on.wait(10)
            super().write_status(status)  # type: ignore[arg-type]

    said: list[str] = []
    heart = Heartbeat(HungDisk(tmp_path), said.append, FAST)
    with heart:
        assert hangs.wait(5)
        begin = time.monotonic()
        heart.end("done")
        assert time.monotonic() - begin < 1
        assert said == ["status.json does not say that the run is done: writing it hangs"]
        go_on.set()
    assert written(tmp_path).state == "done", "the end comes late, but it comes"


def test_what_a_tick_raises_is_handed_on_and_the_next_one_comes() -> None:
    errors: list[Exception] = []

    def work() -> None:
        raise ValueError(len(errors))

    ticker = Ticker(work, 0.001, name="test", on_error=errors.append)
    ticker.start()
    until(lambda: len(errors) > 2)
    assert ticker.close(1.0) and ticker.close(1.0)
    assert [error.args[0] for error in errors[:3]] == [0, 1, 2]


# What it costs


def test_it_costs_less_than_half_a_percent_of_the_processor(tmp_path: Path) -> None:
    places = {f"target.{i}@cpu": Place(stage="target-forward", micro_batch=i, step=1) for i in range(8)}
    heart = beating(tmp_path, interval=60)
    heart.watch([], lambda: places, dict.fromkeys(places, 0.5))
    heart.planned(0, 1000)
    with heart:
        heart.state("running")
        heart.step({"step": 1, "loss": 1.0, "tokens_per_s": 1.0})
        costs = []
        for _ in range(100):
            begin = time.thread_time()
            heart.beat()
            costs.append(time.thread_time() - begin)
    assert sorted(costs)[50] < 0.005 * INTERVAL_S


# The lock


def lock_of(folder: Path) -> RunLock:
    lock = RunLock(unheard)
    lock.take(folder)
    return lock


@contextmanager
def another_process(work: Callable[[], object]) -> Iterator[int]:
    """A child that does `work`, says so, and sleeps; killed at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = work()
            os.write(writer, b"ready")
            time.sleep(60)
            del kept
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 5) == b"ready", "the child failed; it says why on standard error"
        yield pid
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with another_process(lambda: lock_of(tmp_path)) as pid:
        with pytest.raises(InputError, match=rf"process {pid} on {os.uname().nodename} is at work") as caught:
            lock_of(tmp_path)
        assert caught.value.exit_code == 2


def test_a_killed_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    with another_process(lambda: lock_of(tmp_path)):
        pass
    assert (tmp_path / LOCK_FILE).exists(), "the file stays, and means nothing"
    lock = lock_of(tmp_path)
    assert orjson.loads((tmp_path / LOCK_FILE).read_bytes())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_folders_made_for_a_run_that_wrote_nothing_go_with_the_lock(tmp_path: Path) -> None:
    lock_of(tmp_path / "deep/er").release()
    assert list(tmp_path.iterdir()) == []
    lock = lock_of(tmp_path / "deep/er")
    (tmp_path / "deep/er/metrics.jsonl").touch()
    lock.release()
    assert (tmp_path / "deep/er/metrics.jsonl").exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = lock_of(tmp_path), RunLock(unheard)
    flock = fcntl.flock

    def flock_late(descriptor: int, operation: int) -> None:
        """Between opening the file and locking it, its owner goes and another one comes."""
        monkeypatch.setattr("fcntl.flock", flock)
        first.release()
        second.take(tmp_path)
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", flock_late)
    with pytest.raises(InputError, match="is at work"):
        lock_of(tmp_path)
    second.release()


def test_one_of_many_that_start_together_gets_the_folder(tmp_path: Path) -> None:
    rounds, together = 100, threading.Barrier(4, timeout=60)
    winners: list[int] = []

    def start() -> None:
        for number in range(rounds):
            lock = RunLock(unheard)
            together.wait()
            try:
                lock.take(tmp_path)
                winners.append(number)
            except InputError:
                lock = None
            together.wait()  # nobody gives it back while another still tries
            if lock is not None:
                lock.release()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert winners == list(range(rounds))


def test_a_run_that_is_discarded_takes_its_lock_along_and_nobody_elses(tmp_path: Path) -> None:
    lock = lock_of(tmp_path / "run")
    RunFolder(tmp_path / "run", lock.made, fresh=True).discard()  # as when the process is left at once
    assert list(tmp_path.iterdir()) == []
    another = lock_of(tmp_path / "run")
    lock.release()
    with pytest.raises(InputError, match="is at work"):
        lock_of(tmp_path / "run")
    another.release()


def test_a_lock_file_is_no_strangers_file(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    create_run_folder("runs", "small", tmp_path)
    lock.release()


# Whole runs


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


def trained(project: Path, output: Path, *overrides: str, **options: object) -> None:
    from engine.run import run
    from engine.schedule import load_schedule

    run(load_schedule(project, overrides), output=output, console=Console(file=io.StringIO()), **options)  # type: ignore[arg-type]


def test_a_start_that_fails_cannot_delete_the_files_of_the_run_that_is_there(
    project: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"

    def first_run() -> RunLock:
        lock = lock_of(output)
        folder = create_run_folder("runs", "small", output)
        folder.write_status({"state": "running"})
        folder.append_metrics({"step": 1})
        return lock

    with another_process(first_run) as pid:
        before = {path.name: path.read_bytes() for path in output.iterdir()}
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(InputError, match=f"process {pid} "):
                trained(project, output, "target.path=/nowhere", **options)
        assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_a_start_that_fails_by_itself_leaves_neither_folder_nor_heartbeat(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        assert written(tmp_path / "deep/run").state == "starting"
        raise NonFinite("zeros from layer 2")

    monkeypatch.setattr("engine.run._check_first_taps", broken)
    with pytest.raises(NonFinite):
        trained(project, tmp_path / "deep/run")
    assert not (tmp_path / "deep").exists()
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_a_run_says_what_it_does_and_how_it_ended(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    state = Heartbeat.state

    def noted(self: Heartbeat, new: str) -> None:
        states.append(new)
        state(self, new)  # type: ignore[arg-type]

    monkeypatch.setattr(Heartbeat, "state", noted)
    trained(project, tmp_path / "run", steps=4)
    assert states[0] == "warming-up" and {"evaluating", "running", "saving"} <= set(states[1:])
    status = written(tmp_path / "run")
    assert (status.state, status.step, status.last_step, status.exit_code) == ("done", 4, 4, 0)
    assert status.loss is not None and status.tokens_per_s is not None
    assert status.checkpoint is not None and status.checkpoint.name == "step_000004"
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    with pytest.raises(CheckpointError):
        trained(project, tmp_path / "run", "train.lr=1.0", resume=True)
    assert written(tmp_path / "run") == status, "a resume that is refused leaves everything as it was"
    trained(project, tmp_path / "run", resume=True)
    again = written(tmp_path / "run")
    assert (again.step, again.resumed_from) == (6, "step_000004")


def test_what_a_run_leaves_holds_no_secret_and_no_host(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_dontwritethisdown")
    monkeypatch.setattr("socket.gethostname", lambda: "the-box-in-the-cellar")
    trained(project, tmp_path / "run", "run.eval_every=0", steps=1)
    secrets = [b"hf_dontwritethisdown", b"the-box-in-the-cellar"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert not [secret for secret in secrets if secret in path.read_bytes()], path
