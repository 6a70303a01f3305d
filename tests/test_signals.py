"""Asked to end, a run finishes its step and saves; asked again, it leaves; before a step, nothing stays."""

import io
import os
import pty
import signal
import threading
import time
from pathlib import Path

import pytest
from forked_commands import Command, CommandServer, shared_server
from rich.console import Console
from small_runs import small_project

from engine.interrupts import Asked, Interrupted, Interrupts
from engine.run import run
from engine.run_folder import resolve_checkpoint
from engine.schedule import load_schedule

SETTINGS = tuple(
    text
    for setting in ("run.save_every=0", "run.eval_every=0", "run.steps=400")
    for text in ("--set", setting)
)
SLOWLY = """
import engine.stages.pack as stage, time
before = stage.Pack.__call__
def slow(self, *arguments):
    time.sleep(0.05)
    return before(self, *arguments)
stage.Pack.__call__ = slow
"""
STUCK_AT_LOADING = """
import engine.run as module, pathlib, time
def slow(*arguments, **named):
    pathlib.Path({marker!r}).touch()
    time.sleep(60)
module.load_parts = slow
"""


@pytest.fixture
def server() -> CommandServer:
    return shared_server()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = small_project(tmp_path_factory.mktemp("project"))
    path.write_text(path.read_text().replace(f'held_out = "{path.parent}/held_out"\n', ""))
    return path


def begun(server: CommandServer, project: Path, output: Path, *arguments: str) -> Command:
    command = server.run(project, output, *SETTINGS, *arguments, before=SLOWLY)
    command.wait_for(lambda: len(command.rows()) >= 2)
    return command


def stopped(command: Command, code: int) -> int:
    """Check what an orderly end leaves; returns the step that it came after."""
    found, _ = command.wait()
    assert found == code, command.said()
    status = command.status()
    assert (status["state"], status["exit_code"]) == ("stopped", code)
    step = command.rows()[-1]["step"]
    assert resolve_checkpoint(command.output).name == f"step_{step:06d}"
    assert f"step {step} of 400 is done and saved" in command.log()
    return int(step)


@pytest.mark.parametrize(
    "number, code", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_finishes_the_step_saves_and_the_resumed_run_goes_on(
    server: CommandServer, project: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = begun(server, project, tmp_path / "run")
    command.send(number)
    step = stopped(command, code)
    assert 2 <= step < 400
    quiet = Console(file=io.StringIO())
    schedule = load_schedule(project, [one for one in SETTINGS if one != "--set"])
    run(schedule, output=command.output, resume=True, steps=step + 2, console=quiet)
    run(schedule, output=tmp_path / "whole", steps=step + 2, console=quiet)
    files = [resolve_checkpoint(path) / "model.safetensors" for path in (command.output, tmp_path / "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_max_hours_ends_the_same_way_with_exit_code_0(
    server: CommandServer, project: Path, tmp_path: Path
) -> None:
    clock = ("--max-hours", str(2.5 / 3600))
    command = server.run(project, tmp_path / "run", *SETTINGS, *clock, before=SLOWLY)
    stopped(command, 0)
    assert "--max-hours" in command.log()


def test_hours_that_are_over_before_the_first_step_leave_time_for_one(project: Path, tmp_path: Path) -> None:
    schedule = load_schedule(project, ["run.eval_every=0"])
    result = run(schedule, output=tmp_path / "run", max_hours=0.0, console=Console(file=io.StringIO()))
    assert result.steps == 1 and result.checkpoint.name == "step_000001"


def test_a_second_signal_leaves_at_once(server: CommandServer, project: Path, tmp_path: Path) -> None:
    command = server.run(
        project,
        tmp_path / "run",
        *SETTINGS,
        before=SLOWLY.replace("0.05", "0.05 if arguments[1] < 8 else 30"),
    )
    command.wait_for(lambda: len(command.rows()) >= 3)
    time.sleep(0.3)
    command.send(signal.SIGINT)
    command.wait_for(lambda: "the same again leaves at once" in command.said())
    begin = time.monotonic()
    command.send(signal.SIGTERM)
    code, at = command.wait()
    assert code == 143 and at - begin < 1.5, command.said()
    assert command.status()["state"] == "stopped"


def test_a_signal_while_loading_leaves_no_folder(
    server: CommandServer, project: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "loading"
    before = STUCK_AT_LOADING.format(marker=str(marker))
    command = server.run(project, tmp_path / "run", *SETTINGS, before=before)
    command.wait_for(marker.exists)
    begin = time.monotonic()
    command.send(signal.SIGINT)
    code, at = command.wait()
    assert code == 130 and at - begin < 2, command.said()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_hanging_up_ends_nothing(server: CommandServer, project: Path, tmp_path: Path) -> None:
    command = begun(server, project, tmp_path / "run", "--steps", "6")
    command.send(signal.SIGHUP)
    code, _ = command.wait()
    assert code == 0 and command.status()["state"] == "done"


def test_what_goes_to_a_terminal_that_has_gone_goes_nowhere() -> None:
    keeper, terminal = pty.openpty()
    saved = os.dup(2)
    # Whoever started the tests may have had hanging up ignored already, as nohup does.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        os.dup2(terminal, 2)
        os.close(terminal)
        with Interrupts(tell=print, last_words=print):
            os.close(keeper)
            with pytest.raises(OSError):
                os.write(2, b"to nobody")
            os.kill(os.getpid(), signal.SIGHUP)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                try:
                    os.write(2, b"to nobody")
                    break
                except OSError:
                    time.sleep(0.01)
            else:
                pytest.fail("the terminal was not let go")
    finally:
        signal.signal(signal.SIGHUP, before)
        os.dup2(saved, 2)
        os.close(saved)


def test_handlers_are_as_before_afterwards_and_other_threads_need_none() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    first = [signal.signal(number, lambda number, frame: None) for number in numbers]
    before = [signal.getsignal(number) for number in numbers]
    with Interrupts(tell=print, last_words=print):
        assert signal.getsignal(signal.SIGTERM) is not before[1]
        raised: list[BaseException] = []

        def elsewhere() -> None:
            try:
                with Interrupts(tell=print, last_words=print):
                    pass
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert not raised
    after = [signal.signal(number, handler) for number, handler in zip(numbers, first, strict=True)]
    assert after == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_before_the_first_step_is_raised_and_one_between_stretches_is_kept() -> None:
    left: list[Asked] = []
    with pytest.raises(Interrupted) as caught, Interrupts(tell=print, last_words=left.append):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert caught.value.exit_code == 143 and not left
    stops: list[str] = []
    with Interrupts(tell=print, last_words=left.append) as interrupts:
        with interrupts.stepping(lambda: stops.append("first")):
            pass
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while interrupts.asked is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with interrupts.stepping(lambda: stops.append("second")):
            pass
        with pytest.raises(Interrupted):
            interrupts.check()
    assert stops == ["second"]
