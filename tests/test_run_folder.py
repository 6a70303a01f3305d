"""A run's folder: where it is made, what it refuses, what survives a full disk and a kill."""

import os
import resource
import signal
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import orjson
import pytest
from safetensors.numpy import save_file

from engine.environment import environment
from engine.errors import CheckpointError, DiskError, InputError, ScheduleError
from engine.run_folder import RunFolder, create_run_folder, resolve_checkpoint
from engine.whole_files import write_whole

needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write_checkpoint(run: RunFolder, step: int, content: str = "weights") -> Path:
    def writer(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(content)

    write_whole(run.checkpoint_path(step), writer)
    run.mark_latest(step)
    return run.checkpoint_path(step)


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """The operating system refuses to let a file grow past `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere, so it becomes nobody for a while; others stay who they are."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


# Where it is made


def test_runs_are_numbered_and_latest_points_at_the_newest(tmp_path: Path) -> None:
    runs = tmp_path / "deep" / "runs"
    paths = [create_run_folder(runs, "small").path for _ in range(3)]
    assert [path.name for path in paths] == ["small-1", "small-2", "small-3"]
    assert (runs / "latest").is_symlink() and (runs / "latest").resolve() == paths[-1]
    assert os.readlink(runs / "latest") == "small-3"
    (runs / "small-10").mkdir()
    (runs / "small-notes").mkdir()
    assert create_run_folder(runs, "small").path.name == "small-11"
    assert create_run_folder(runs, "other").path.name == "other-1"
    assert files_below(paths[0]) == []


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def start(_: int) -> list[Path]:
        together.wait()
        return [create_run_folder(tmp_path / "runs", "small").path for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        paths = {path for made in pool.map(start, range(8)) for path in made}
    assert sorted(int(path.name.removeprefix("small-")) for path in paths) == list(range(1, 81))
    assert (tmp_path / "runs" / "latest").resolve() in paths


def test_an_explicit_folder_is_used_as_it_is_and_leaves_latest_alone(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "runs", "small", tmp_path / "mine")
    assert run.path == tmp_path / "mine" and run.path.is_dir()
    assert not (tmp_path / "runs").exists()
    assert create_run_folder("runs", "small", run.path).path == run.path, "an empty folder can be used"


def test_a_folder_that_holds_another_run_is_refused_unless_told(tmp_path: Path) -> None:
    run = create_run_folder("runs", "small", tmp_path / "mine")
    run.write_schedule("first")
    write_checkpoint(run, 5)
    before = files_below(run.path)
    with pytest.raises(
        ScheduleError, match="holds another run; give another folder, --resume or --overwrite"
    ):
        create_run_folder("runs", "small", run.path)
    resumed = create_run_folder("runs", "small", run.path, resume=True)
    assert files_below(resumed.path) == before
    create_run_folder("runs", "small", run.path, overwrite=True)
    assert files_below(run.path) == []


def test_a_run_can_be_resumed_through_latest(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path, "small")
    run.write_schedule("x")
    assert create_run_folder(tmp_path, "small", tmp_path / "latest", resume=True).path == run.path


def test_files_that_no_run_wrote_are_never_removed(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ScheduleError, match="holds files that no run wrote \\(thesis.tex\\)"):
            create_run_folder("runs", "small", tmp_path, overwrite=overwrite)
    run = create_run_folder("runs", "small", tmp_path / "mine")
    run.write_schedule("x")
    write_checkpoint(run, 5)
    (run.path / "checkpoints" / "notes.txt").write_text("precious")
    with pytest.raises(ScheduleError, match="checkpoints/notes.txt"):
        create_run_folder("runs", "small", run.path, overwrite=True)
    (run.path / "checkpoints" / "notes.txt").unlink()
    (run.path / "plot.png").write_text("precious")
    with pytest.raises(ScheduleError, match="plot.png"):
        create_run_folder("runs", "small", run.path, overwrite=True)
    assert create_run_folder("runs", "small", run.path, resume=True), "resuming removes nothing"
    assert (run.path / "plot.png").exists() and run.latest_checkpoint() and thesis.exists()


def test_checkpoints_that_stand_elsewhere_are_not_removed_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step_000001").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(ScheduleError, match="no run wrote"):
        create_run_folder("runs", "small", tmp_path / "mine", overwrite=True)
    assert (elsewhere / "step_000001").is_dir()


def test_flags_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one of the two"):
        create_run_folder("runs", "small", tmp_path, resume=True, overwrite=True)
    with pytest.raises(InputError, match="--resume without --output"):
        create_run_folder(tmp_path, "small", resume=True)
    with pytest.raises(InputError, match="holds no run to resume"):
        create_run_folder("runs", "small", tmp_path / "absent", resume=True)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("output", [None, "explicit"])
def test_a_place_that_cannot_be_written_leaves_no_folder_behind(tmp_path: Path, output: str | None) -> None:
    (tmp_path / "file").write_text("")
    # A file in the way, and a name longer than any file system takes below parents that can be made.
    for place in ("file/runs", "new/parents/" + "x" * 300):
        explicit = None if output is None else tmp_path / place / output
        with pytest.raises(InputError) as error:
            create_run_folder(tmp_path / place, "small", explicit)
        assert error.value.exit_code == 2
        assert "cannot be written" in str(error.value) and "--output" in str(error.value)
        assert files_below(tmp_path) == ["file"]
    with pytest.raises(InputError):
        create_run_folder("runs", "small", tmp_path / "file")


@pytest.mark.parametrize("output", [None, "explicit"])
def test_a_folder_that_takes_no_file_is_found_out_at_the_start(tmp_path: Path, output: str | None) -> None:
    with files_limited_to(0), pytest.raises(InputError, match="cannot be written"):
        create_run_folder(tmp_path / "a" / "runs", "small", output and tmp_path / "a" / "b" / output)
    assert files_below(tmp_path) == []


def test_a_folder_without_permission_is_refused() -> None:
    # Not below tmp_path, which is closed to the user that root becomes here.
    with tempfile.TemporaryDirectory() as name:
        closed = Path(name) / "closed"
        closed.mkdir()
        Path(name).chmod(0o755)
        closed.chmod(0o555)
        with without_privileges(), pytest.raises(InputError, match="Permission denied"):
            create_run_folder(closed / "runs", "small")
        with without_privileges(), pytest.raises(InputError, match="Permission denied"):
            create_run_folder("runs", "small", closed)
        assert files_below(closed) == []


def test_latest_that_is_a_real_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(InputError, match="is no symbolic link"):
        create_run_folder(tmp_path, "small")
    assert files_below(tmp_path) == ["latest"]


def test_a_discarded_start_leaves_everything_as_it_was(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "a" / "runs", "small")
    run.write_schedule("x")
    run.log("started")
    write_checkpoint(run, 1)
    run.discard()
    assert files_below(tmp_path) == []
    kept = create_run_folder(tmp_path / "runs", "small")
    kept.write_schedule("x")
    create_run_folder(tmp_path / "runs", "small").discard()
    assert files_below(tmp_path) == ["runs", "runs/latest", "runs/small-1", "runs/small-1/schedule.toml"]
    assert (tmp_path / "runs" / "latest").resolve() == kept.path
    create_run_folder("runs", "small", kept.path, resume=True).discard()
    assert (kept.path / "schedule.toml").exists(), "a resumed run is never discarded"


# What is written


def test_rows_are_there_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2):
        run.append_metrics({"step": step, "loss": np.float32(0.5), "accuracy_by_slot": [0.1, 0.2]})
        run.append_timings([{"stage": "pack", "step": step}])
        rows = [orjson.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
        assert len(rows) == step and rows[-1]["step"] == step and rows[-1]["loss"] == 0.5
    assert len((tmp_path / "timings.jsonl").read_text().splitlines()) == 2
    run.log("one line")
    assert (tmp_path / "run.log").read_text().endswith(" one line\n")
    run.write_status({"step": 1})
    run.write_status({"step": 2})
    run.write_environment({"cpus": 2})
    assert orjson.loads((tmp_path / "status.json").read_bytes()) == {"step": 2}
    assert not [name for name in files_below(tmp_path) if "partial" in name]


@needs_full_device
def test_a_full_disk_is_a_disk_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"metrics\.jsonl: could not write it: No space left") as error:
        RunFolder(tmp_path).append_metrics({"step": 1})
    assert error.value.exit_code == 6


def test_a_status_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_status({"step": 1})
    with files_limited_to(10), pytest.raises(DiskError, match=r"status\.json"):
        run.write_status({"step": 2, "text": "longer than ten bytes"})
    assert orjson.loads((tmp_path / "status.json").read_bytes()) == {"step": 1}
    assert files_below(tmp_path) == ["status.json"]


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    path = run.checkpoint_path(100)
    assert path == tmp_path / "checkpoints" / "step_000100"
    weights = {"weight": np.zeros(10_000, dtype=np.float32)}

    def save(folder: Path) -> None:
        assert not path.exists(), "nothing bears the final name while it is written"
        save_file(weights, folder / "model.safetensors")

    with files_limited_to(1000), pytest.raises(DiskError, match="step_000100"):
        write_whole(path, save)
    assert files_below(tmp_path) == ["checkpoints"]
    write_whole(path, save)
    assert files_below(path) == ["model.safetensors"]


def test_a_writer_that_fails_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    path = write_checkpoint(run, 1, "first")

    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_text("second")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fail)
    assert (path / "model.safetensors").read_text() == "first"
    write_checkpoint(run, 1, "third")
    assert (path / "model.safetensors").read_text() == "third"
    assert files_below(path.parent) == [
        "latest",
        "step_000001",
        "step_000001/config.json",
        "step_000001/model.safetensors",
    ]


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path) -> None:
    run = create_run_folder("runs", "small", tmp_path / "mine")
    torn = run.path / "checkpoints" / ".step_000001.partial"
    torn.mkdir(parents=True)
    (torn / "old").write_text("torn")
    assert run.latest_checkpoint() is None
    assert files_below(write_checkpoint(run, 1)) == ["config.json", "model.safetensors"]
    assert not torn.exists()
    torn.mkdir()
    create_run_folder("runs", "small", run.path, overwrite=True)
    assert files_below(run.path) == []


# Resuming


def test_rows_after_the_checkpoint_and_a_torn_last_line_are_cut(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in range(1, 8):
        run.append_metrics({"step": step})
        run.append_timings([{"step": step}])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "lo')
    assert run.cut_metrics_after(5) == 2 + 1 + 2
    for name in ("metrics.jsonl", "timings.jsonl"):
        rows = [orjson.loads(line) for line in (tmp_path / name).read_bytes().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert run.cut_metrics_after(5) == 0
    assert RunFolder(tmp_path / "new").cut_metrics_after(0) == 0


def test_zeros_that_a_power_cut_left_are_cut(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step":1}\n' + bytes(300) + b"\n" + b'{"step":2}\n' + bytes(9)
    )
    assert RunFolder(tmp_path).cut_metrics_after(5) == 2
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_a_damaged_row_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    content = b'{"step": 1}\n{"step": \n{"step": 3}\n'
    (tmp_path / "timings.jsonl").write_bytes(content)
    run.append_metrics({"step": 9})
    with pytest.raises(CheckpointError, match=r"timings\.jsonl: line 2"):
        run.cut_metrics_after(1)
    assert (tmp_path / "timings.jsonl").read_bytes() == content
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":9}\n'
    assert files_below(tmp_path) == ["metrics.jsonl", "timings.jsonl"], "what was written beside is gone"


def test_rows_that_lanes_wrote_out_of_order_are_cut_where_they_stand(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    steps = [1, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4]
    run.append_timings([{"step": step, "number": number} for number, step in enumerate(steps)])
    (tmp_path / ".timings.jsonl.partial").write_bytes(b"of a run that was killed")
    assert run.cut_metrics_after(2) == 5
    rows = [orjson.loads(line) for line in (tmp_path / "timings.jsonl").read_bytes().splitlines()]
    assert [row["number"] for row in rows] == [0, 1, 2, 4, 5, 8]
    assert files_below(tmp_path) == ["timings.jsonl"]


def test_a_file_that_loses_nothing_is_not_written_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append_timings([{"step": 1}, {"step": 2}])
    before = (tmp_path / "timings.jsonl").stat()
    assert run.cut_metrics_after(2) == 0
    after = (tmp_path / "timings.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_cutting_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    with path.open("wb") as file:
        for step in range(200):
            file.write((orjson.dumps({"step": step, "stage": "x" * 200}) + b"\n") * 1000)
    size = path.stat().st_size
    tracemalloc.start()
    try:
        assert RunFolder(tmp_path).cut_metrics_after(149) == 50_000
        assert tracemalloc.get_traced_memory()[1] < size / 10
    finally:
        tracemalloc.stop()
    assert path.stat().st_size < size


def test_a_runs_folder_stands_for_its_latest_checkpoint(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path, "small")
    run.write_schedule("x")
    with pytest.raises(CheckpointError, match="has written no checkpoint"):
        resolve_checkpoint(run.path)
    first = write_checkpoint(run, 100)
    second = write_checkpoint(run, 20)
    assert run.latest_checkpoint() == second, "the newest, not the one of the highest number"
    for path in (run.path, tmp_path / "latest", run.path / "checkpoints" / "latest", str(second)):
        assert resolve_checkpoint(path).resolve() == second
    assert resolve_checkpoint(first) == first


def test_a_checkpoint_that_is_gone_torn_or_foreign_is_refused(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path, "small")
    path = write_checkpoint(run, 1)
    path.rename(run.checkpoint_path(2))
    with pytest.raises(
        CheckpointError, match="names step_000001, which is gone; point it at one of step_000002"
    ):
        run.latest_checkpoint()
    (path.parent / "latest").unlink()
    with pytest.raises(CheckpointError, match="is missing; point it at one of step_000002"):
        resolve_checkpoint(run.path)
    (run.checkpoint_path(2) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="it lacks model.safetensors"):
        resolve_checkpoint(run.checkpoint_path(2))
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="lacks config.json and model.safetensors"):
        resolve_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        run.mark_latest(7)


def test_the_environment_names_versions_and_devices_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    facts = environment()
    text = orjson.dumps(facts).decode()
    assert facts["versions"]["torch"] and facts["versions"]["python"].startswith("3.")
    assert set(facts["versions"]) >= {"torch", "triton", "transformers", "fla"}
    assert facts["devices"][0] == {"name": "cpu"}
    assert "secret" not in text and os.uname().nodename not in text


def test_a_row_that_a_full_disk_takes_half_of_is_taken_back(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "runs", "small")
    folder.append_metrics({"step": 1})
    before = (folder.path / "metrics.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(DiskError, match="metrics.jsonl"):
            folder.append_metrics({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (folder.path / "metrics.jsonl").read_bytes() == before
