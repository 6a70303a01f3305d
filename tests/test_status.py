"""`status`: what it says of runs that live, end, die, hang, or never were."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from engine.cli import app
from engine.errors import InputError
from engine.heartbeat import Heartbeat
from engine.live_status import GpuMemory, LaneActivity, LastCheckpoint, LiveStatus
from engine.process_identity import process_start, this_machine
from engine.run_folder import RunFolder
from engine.run_lock import RunLock
from engine.status import SILENT_S, find_run, judge, picture, show_status

ON_LINUX = pytest.mark.skipif(this_machine() is None, reason="no /proc here")


def status(**changes: object) -> LiveStatus:
    """Of this process, running."""
    now = time.time()
    running = LiveStatus(
        state="running",
        pid=os.getpid(),
        machine=this_machine(),
        process_start=process_start(os.getpid()),
        started=now - 7300,
        time=now,
        step=1200,
        last_step=2000,
        loss=3.25,
        tokens_per_s=12345.6,
        eta_s=400.0,
        lanes={
            "target.0@cuda:0": LaneActivity(
                stage="target-forward", micro_batch=2401, step=1201, since=now - 2, busy=0.93
            ),
            "drafter.0@cuda:1": LaneActivity(
                stage="waiting for transfer", micro_batch=None, step=1201, since=now - 1, busy=None
            ),
        },
        gpu_memory={"cuda:0": GpuMemory(used_gb=70.25, total_gb=150.1, peak_allocated_gb=61.0)},
        checkpoint=LastCheckpoint(name="step_001200", step=1200, time=now - 65),
        resumed_from="step_000400",
        error=None,
        exit_code=None,
    )
    return attrs.evolve(running, **changes)  # type: ignore[arg-type]


def folder_of(status: LiveStatus, path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    RunFolder(path).write_status(attrs.asdict(status))
    return path


def shown(path: Path, **options: bool) -> tuple[int, str]:
    output = io.StringIO()
    code = show_status(path, output=output, **({"watch": False, "as_json": False} | options))
    return code, output.getvalue()


def printed(status: LiveStatus, path: Path) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(judge(folder_of(status, path))))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@contextmanager
def beating_child(folder: Path) -> Iterator[int]:
    """Another process with a heartbeat; whoever uses it may kill it."""
    folder.mkdir(parents=True)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with Heartbeat(RunFolder(folder), print, 0.01):
            os.write(writer, b".")
            time.sleep(60)
        os._exit(0)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"."
        yield pid
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# What it shows


def test_everything_that_is_known_is_shown(tmp_path: Path) -> None:
    text = printed(status(), tmp_path)
    for expected in (
        f"{tmp_path}: running",
        "step 1,200/2,000  loss 3.2500  tokens/s 12,346  ETA 6 min 40 s",
        "heartbeat 0.0 s ago",
        f"from process {os.getpid()}, which began 2 h 01 min ago",
        "last checkpoint step_001200, 1 min 05 s ago",
        "resumed from step_000400",
        "target-forward, micro-batch 2401, step 1201",
        "2.0 s",
        "93%",
        "waiting for transfer, step 1201",
        "70.2 GB",
        "150.1 GB",
        "61.0 GB",
    ):
        assert expected in text, text


def test_a_run_that_only_begins_shows_dashes(tmp_path: Path) -> None:
    unknown = dict.fromkeys(
        ("step", "last_step", "loss", "tokens_per_s", "eta_s", "checkpoint", "resumed_from")
    )
    text = printed(status(state="starting", lanes={}, gpu_memory={}, **unknown), tmp_path)
    assert "starting" in text and "step –/–  loss –  tokens/s –  ETA –" in text
    assert "checkpoint" not in text and "lane" not in text and "GPU" not in text


def test_a_failure_is_shown_with_its_error_and_exit_code(tmp_path: Path) -> None:
    failed = status(state="failed", exit_code=3, error="OutOfMemory: [cuda:1] is full")
    text = printed(failed, tmp_path)
    assert "failed, exit code 3" in text and "OutOfMemory: [cuda:1] is full" in text and "ETA" not in text


def test_json_is_one_object_with_what_it_was_judged_by(tmp_path: Path) -> None:
    code, text = shown(folder_of(status(), tmp_path), as_json=True)
    values = orjson.loads(text)
    assert code == 0 and text.count("\n") == 1
    assert {
        "state": "running",
        "said": "running",
        "reason": None,
        "folder": str(tmp_path),
    }.items() <= values.items()
    assert {field.name for field in attrs.fields(LiveStatus)} < set(values) and 0 <= values["age_s"] < 5
    assert values["lanes"]["target.0@cuda:0"]["busy"] == 0.93


# Exit codes


@pytest.mark.parametrize(
    "state, its_own, code",
    [
        ("starting", None, 0),
        ("warming-up", None, 0),
        ("running", None, 0),
        ("evaluating", None, 0),
        ("saving", None, 0),
        ("done", 0, 0),
        ("failed", 6, 1),
        ("stopped", 143, 143),
        ("stopped", 130, 130),
        ("stopped", 0, 0),
    ],
)
def test_the_exit_code_follows_the_state(tmp_path: Path, state: str, its_own: int | None, code: int) -> None:
    assert shown(folder_of(status(state=state, exit_code=its_own), tmp_path))[0] == code


# Dead


@ON_LINUX
def test_a_killed_run_is_dead_at_once_even_while_nobody_collects_it(tmp_path: Path) -> None:
    with beating_child(tmp_path / "run") as pid:
        assert judge(tmp_path / "run").state == "starting"
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while process_start(pid) is not None:  # its parent, this test, has not collected it
            assert time.monotonic() < deadline
        judged = judge(tmp_path / "run")
    assert (judged.state, judged.exit_code, judged.status.state) == ("dead", 5, "starting")
    assert judged.reason == f"process {pid} is gone, without a word"
    code, text = shown(tmp_path / "run")
    assert code == 5 and "dead" in text and f"process {pid} is gone, without a word" in text


@ON_LINUX
def test_a_process_number_that_was_used_again_does_not_pass_for_the_run(tmp_path: Path) -> None:
    started = process_start(os.getpid())
    assert started is not None
    judged = judge(folder_of(status(process_start=started - 1), tmp_path))
    assert judged.state == "dead" and "another one has its number" in (judged.reason or "")


def test_a_run_that_gives_no_heartbeat_is_dead_though_its_process_is_there(tmp_path: Path) -> None:
    folder = folder_of(status(), tmp_path)
    assert judge(folder, time.time() + SILENT_S - 5).state == "running"
    judged = judge(folder, time.time() + SILENT_S + 5)
    assert judged.state == "dead" and "no heartbeat for 1 min 35 s" in (judged.reason or "")


@pytest.mark.parametrize("machine", ["another", None])
def test_on_another_host_silence_alone_decides(tmp_path: Path, machine: str | None) -> None:
    folder = folder_of(status(machine=machine, pid=2**30, process_start=None), tmp_path)
    assert judge(folder).state == "running", "the process number means nothing here"
    assert judge(folder, time.time() - 3600).age_s == 0, "clocks differ"
    judged = judge(folder, time.time() + SILENT_S + 5)
    assert judged.state == "dead" and "another host" in (judged.reason or "")


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_a_run_that_ended_in_words_is_not_dead(tmp_path: Path, state: str) -> None:
    folder = folder_of(status(state=state, pid=2**30, exit_code=0), tmp_path)
    assert judge(folder, time.time() + 1e6).state == state


# Which run


def test_a_folder_of_runs_means_its_latest(tmp_path: Path) -> None:
    run = folder_of(status(), tmp_path / "runs/small-2")
    (tmp_path / "runs/latest").symlink_to("small-2")
    for path in (run, tmp_path / "runs", tmp_path / "runs/latest"):
        assert find_run(path) == run


@pytest.mark.parametrize(
    "made, named",
    [
        ("nothing", "no such folder; give a run's folder"),
        ("a file", "no such folder"),
        ("an empty folder", "holds neither status.json nor `latest`"),
        ("a latest that names nothing", "`latest` beside the runs names a folder that is gone"),
    ],
)
def test_where_no_run_is_the_error_says_what_was_found(tmp_path: Path, made: str, named: str) -> None:
    path = tmp_path / "runs"
    if made == "a file":
        path.touch()
    if made == "an empty folder":
        path.mkdir()
    if made == "a latest that names nothing":
        path.mkdir()
        (path / "latest").symlink_to("gone-1")
    with pytest.raises(InputError, match=named) as caught:
        shown(path)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "content, named",
    [
        (b"", "an empty file"),
        (b'{"state": "runn', "15 bytes that are no JSON"),
        (b"[1, 2]", "expected an object"),
        (
            b'{"state": "running", "pid": 1, "time": 1.5, "last_step": 6}',
            "lacks machine, process_start, started",
        ),
        ({"state": "sleeping"}, "no status that this version reads: .*state"),
        ({"pid": "many"}, "no status that this version reads: .*pid"),
        ({"lanes": {"target.0@cpu": {"at": "home"}}}, "no status that this version reads: .*stage"),
    ],
)
def test_a_status_that_is_torn_old_or_foreign_is_named(
    tmp_path: Path, content: bytes | dict[str, object], named: str
) -> None:
    if isinstance(content, dict):
        content = orjson.dumps(attrs.asdict(status()) | content)
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(InputError, match=named) as caught:
        shown(tmp_path)
    assert caught.value.exit_code == 2 and str(tmp_path / "status.json") in str(caught.value)


def test_a_later_versions_further_facts_are_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(orjson.dumps(attrs.asdict(status()) | {"mood": "good"}))
    assert shown(tmp_path)[0] == 0


# Watching


def test_watching_goes_on_until_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.status.REFRESH_S", 0.01)
    with Heartbeat(RunFolder(tmp_path), print, 0.02) as heart:
        seen: list[tuple[int, str]] = []
        watching = threading.Thread(
            target=lambda: seen.append(shown(tmp_path, watch=True, as_json=True)), daemon=True
        )
        watching.start()
        time.sleep(0.15)
        heart.step({"step": 1})
        time.sleep(0.1)
        assert watching.is_alive()
        heart.end("stopped", 143)
        watching.join(5)
    code, text = seen[0]
    lines = [orjson.loads(line) for line in text.splitlines()]
    assert code == 143 and lines[0]["state"] == "starting" and lines[-1]["state"] == "stopped"
    assert 1 in [line["step"] for line in lines] and len({line["time"] for line in lines}) == len(lines)


def test_watching_sees_a_run_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.status.REFRESH_S", 0.01)
    monkeypatch.setattr("engine.status.SILENT_S", 0.3)  # where the kernel cannot be asked
    with beating_child(tmp_path / "run") as pid:
        killing = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
        killing.start()
        code, text = shown(tmp_path / "run", watch=True)
        killing.join()
    assert code == 5 and text.count("starting") > 2 and "dead" in text


# The command


def test_the_command_reads_while_the_run_holds_its_lock_and_takes_none(tmp_path: Path) -> None:
    with RunLock(print) as lock:
        lock.take(tmp_path)
        folder_of(status(), tmp_path)
        before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        result = CliRunner().invoke(app, ["status", str(tmp_path)])
        assert result.exit_code == 0 and "running" in result.stdout
        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_the_command_looks_at_the_newest_run_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(status(state="failed", exit_code=4), tmp_path / "runs/small-1")
    (tmp_path / "runs/latest").symlink_to("small-1")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["status", "--json"])
    assert result.exit_code == 1 and orjson.loads(result.stdout)["exit_code"] == 4


def test_the_command_starts_without_loading_a_gpu_library(tmp_path: Path) -> None:
    folder_of(status(), tmp_path)
    code = (
        "import sys, engine.status as s\n"
        f"code = s.show_status(s.Path({str(tmp_path)!r}), watch=False, as_json=True, output=sys.stdout)\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
