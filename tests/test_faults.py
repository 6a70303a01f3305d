"""Every planted fault ends a run with its exit code, in its time, with its name, and nothing lost."""

import io
import time
from pathlib import Path

import pytest
from forked_commands import Command, CommandServer, shared_server
from rich.console import Console
from small_runs import small_project

from engine.run import run
from engine.run_folder import resolve_checkpoint
from engine.schedule import load_schedule

LANES = 'devices={targets = ["cpu"], drafters = ["cpu", "cpu"]}'
SETTINGS = tuple(
    text
    for setting in (LANES, "run.save_every=2", "run.eval_every=0", "run.steps=40", "train.warmup=0")
    for text in ("--set", setting)
)


@pytest.fixture
def server() -> CommandServer:
    return shared_server()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = small_project(tmp_path_factory.mktemp("project"))
    path.write_text(path.read_text().replace(f'held_out = "{path.parent}/held_out"\n', ""))
    return path


def with_fault(project: Path, folder: Path, **options: object) -> Path:
    """The schedule with the plugin, its options written as TOML values."""
    path = folder / "faulty.toml"
    plugin = Path(__file__).with_name("fault_plugin.py")
    lines = [f"{key} = {value!r}" for key, value in options.items()]
    path.write_text(project.read_text() + f'[[plugin]]\nuse = "{plugin}"\n' + "\n".join(lines) + "\n")
    return path


def ends(command: Command, code: int, *words: str, step: int, state: str = "failed") -> float:
    """Check what a run leaves; returns the seconds from its last row of metrics to its end."""
    found, at = command.wait()
    assert found == code, command.said()
    for word in words:
        assert word in command.said() + command.log(), (word, command.said())
    status = command.status()
    assert (status["state"], status["exit_code"]) == (state, code)
    assert resolve_checkpoint(command.output).name == f"step_{step:06d}"
    last_row = (command.output / "metrics.jsonl").stat().st_mtime
    return at - time.monotonic() + time.time() - last_row


def test_an_exception_names_stage_lane_micro_batch_and_documents(
    server: CommandServer, project: Path, tmp_path: Path
) -> None:
    schedule = with_fault(project, tmp_path, fault="exception", at=7)
    command = server.run(schedule, tmp_path / "run", *SETTINGS)
    words = (
        "target-forward, micro-batch 7, step 4 on target.0@cpu",
        "ValueError: planted",
        "its documents: ",
    )
    assert ends(command, 1, *words, step=2) < 5


def test_a_hang_is_found_told_with_every_stack_and_left(
    server: CommandServer, project: Path, tmp_path: Path
) -> None:
    schedule = with_fault(project, tmp_path, fault="hang", at=7)
    command = server.run(schedule, tmp_path / "run", *SETTINGS, "--set", "run.stall_seconds=1")
    words = (
        "target-forward, micro-batch 7, step 4 on target.0@cpu: Stalled: no progress for",
        "stalled: target.0@cpu at target-forward, micro-batch 7, step 4",
        "  drafter.1@cpu at waiting for transfer, step 4",
        "thread target.0@cpu:",
        "fault_plugin.py",
        "thread MainThread:",
        "thread drafter.1@cpu:",
    )
    assert ends(command, 5, *words, step=2) < 10


def test_a_hang_of_the_main_thread_is_left_from_outside(
    server: CommandServer, project: Path, tmp_path: Path
) -> None:
    schedule = with_fault(project, tmp_path, fault="slow-report", at=3)
    command = server.run(schedule, tmp_path / "run", *SETTINGS, "--set", "run.stall_seconds=1")
    assert ends(command, 5, "reporting a step", "thread MainThread:", "in step_finished", step=2) < 8


def test_a_failure_is_not_held_up_by_a_main_thread_that_hangs(
    server: CommandServer, project: Path, tmp_path: Path
) -> None:
    schedule = with_fault(project, tmp_path, fault="slow-report", at=3)
    second = tmp_path / "second.py"
    second.write_text(Path(__file__).with_name("fault_plugin.py").read_text())
    schedule.write_text(f'{schedule.read_text()}[[plugin]]\nuse = "{second}"\nfault = "exception"\nat = 7\n')
    command = server.run(schedule, tmp_path / "run", *SETTINGS)
    assert ends(command, 1, "micro-batch 7, step 4", "ValueError: planted", step=2) < 6


@pytest.mark.slow
def test_a_slow_lane_is_no_fault(server: CommandServer, project: Path, tmp_path: Path) -> None:
    schedule = with_fault(project, tmp_path, fault="slow", at=2, times=2, seconds=0.7)
    arguments = (*SETTINGS, "--steps", "4", "--set", "run.stall_seconds=1.5")
    ends(server.run(schedule, tmp_path / "run", *arguments), 0, step=4, state="done")


@pytest.mark.slow
def test_bad_taps_skip_a_step_and_are_named(server: CommandServer, project: Path, tmp_path: Path) -> None:
    schedule = with_fault(project, tmp_path, fault="nan-taps", at=3, times=1)
    command = server.run(schedule, tmp_path / "run", *SETTINGS, "--steps", "4")
    words = ("step 2 was skipped: tap 1 (target layer 1) of micro-batch 3 is not finite", "its documents: ")
    ends(command, 0, *words, step=4, state="done")
    assert [row["bad_steps"] for row in command.rows()] == [0, 1, 0, 0]


@pytest.mark.parametrize("fault", ["nan-taps", pytest.param("nan-gradient", marks=pytest.mark.slow)])
def test_bad_steps_in_a_row_end_the_run_with_the_last_good_state(
    server: CommandServer, project: Path, tmp_path: Path, fault: str
) -> None:
    at = 6 if fault == "nan-taps" else 3  # a target sees all micro-batches, a drafter one a step
    schedule = with_fault(project, tmp_path, fault=fault, at=at, times=100)
    command = server.run(schedule, tmp_path / "run", *SETTINGS, "--set", "run.save_every=100")
    named = "tap 1" if fault == "nan-taps" else "gradient of layers.1.mlp.up_proj.weight is not finite"
    words = (named, "train.max_bad_steps = 3; weights are those after step 3")
    ends(command, 4, *words, step=3)
    assert [row["bad_steps"] for row in command.rows()] == [0, 0, 0, 1, 1]
    # Mended, the run goes on from there as if nothing had been.
    quiet = Console(file=io.StringIO())
    settings = [one for one in SETTINGS if one != "--set"]
    run(load_schedule(project, settings), output=command.output, resume=True, steps=5, console=quiet)
    whole = tmp_path / "whole"
    run(load_schedule(project, settings), output=whole, steps=5, console=quiet)
    files = (resolve_checkpoint(path) / "model.safetensors" for path in (command.output, whole))
    assert next(files).read_bytes() == next(files).read_bytes()


def test_a_full_disk_keeps_the_last_checkpoint(server: CommandServer, project: Path, tmp_path: Path) -> None:
    schedule = with_fault(project, tmp_path, fault="disk-full", at=3)
    command = server.run(schedule, tmp_path / "run", *SETTINGS)
    assert ends(command, 6, "DiskError", "step_000004: could not write it: File too large", step=2) < 5
    assert not list((command.output / "checkpoints").glob(".step_*"))


def test_an_unreadable_shard_half_way_is_a_disk_error(
    server: CommandServer, project: Path, tmp_path: Path
) -> None:
    schedule = with_fault(project, tmp_path, fault="unreadable", at=30, times=1000)
    command = server.run(schedule, tmp_path / "run", *SETTINGS)
    found, _ = command.wait()
    assert found == 6, command.said()
    assert "Input/output error" in command.said() and "target-forward, micro-batch" in command.said()
    assert command.status()["exit_code"] == 6
