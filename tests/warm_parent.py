"""Runs forked from a process that has imported everything, so that 20 kills cost 20 runs.

A run can be made to pause at a named point, for a kill that is to hit just there; it then touches a
file and sleeps.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forking import Forked, Forker, serve

REACHED = "paused"


class Child(Forked):
    """A run in a process of its own."""

    def wait(self) -> int:
        """Its exit code; minus the signal's number where one killed it."""
        return self.ended()[0]

    def kill_at_pause(self) -> None:
        marker = self.output.with_name(f"{self.output.name}.{REACHED}")
        self.wait_for(marker.exists)
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, self.said()
        marker.unlink()


class WarmParent(Forker):
    """Starts runs; close it when done."""

    def __init__(self) -> None:
        super().__init__(__file__)

    def run(self, schedule: Path, output: Path, *overrides: str, pause: str = "", **options: Any) -> Child:
        """Begin a run; `options` are those of `engine.run.run`."""
        question = {
            "schedule": str(schedule),
            "output": str(output),
            "overrides": overrides,
            "pause": pause,
            "options": options,
        }
        return Child(self, self.fork(question, output), output)


def be_a_run(question: dict[str, Any]) -> int:
    import traceback

    from engine.errors import EngineError
    from engine.run import run
    from engine.schedule import load_schedule

    output = Path(question["output"])
    marker = output.with_name(f"{output.name}.{REACHED}")
    if question["pause"]:
        PAUSES[question["pause"]](lambda: pause(marker))
    try:
        run(load_schedule(question["schedule"], question["overrides"]), output=output, **question["options"])
        return 0
    except EngineError as error:
        traceback.print_exc()
        return error.exit_code


def pause(marker: Path) -> None:
    marker.touch()
    time.sleep(600)


# Where a run can be made to pause


def in_a_checkpoint_write(stop_here: Callable[[], None]) -> None:
    import engine.checkpoint as module

    write = module.write_tensors

    def slow(path: Path, tensors: Any, *, between: Callable[[], None], **rest: Any) -> None:
        seen = []

        def halfway() -> None:
            between()
            seen.append(1)
            if len(seen) == len(tensors) // 2:
                stop_here()

        write(path, tensors, between=halfway, **rest)

    module.write_tensors = slow


def before_latest_moves(stop_here: Callable[[], None]) -> None:
    from engine.run_folder import RunFolder

    mark_latest = RunFolder.mark_latest

    def slow(self: RunFolder, step: int) -> None:
        if step == 4:
            stop_here()
        mark_latest(self, step)

    RunFolder.mark_latest = slow  # type: ignore[method-assign]


def while_one_is_replaced(stop_here: Callable[[], None]) -> None:
    rename = Path.rename

    def slow(self: Path, target: Any) -> Path:
        if self.name.endswith(".partial") and self.name.startswith(".step_"):
            replaced = self.with_name(self.name.replace(".partial", ".replaced"))
            if replaced.exists():
                stop_here()
        return rename(self, target)

    Path.rename = slow  # type: ignore[method-assign]


def while_one_is_removed(stop_here: Callable[[], None]) -> None:
    import engine.checkpoint_folder as module

    rmtree = module.shutil.rmtree

    def slow(path: Path, **rest: Any) -> None:
        if str(path).endswith(".removed"):
            (Path(path) / "model.safetensors").unlink()
            stop_here()
        rmtree(path, **rest)

    module.shutil.rmtree = slow  # type: ignore[assignment]


def in_a_row_of_metrics(stop_here: Callable[[], None]) -> None:
    from engine.run_folder import RunFolder

    append = RunFolder._append

    def torn(self: RunFolder, name: str, line: bytes) -> None:
        if name == "metrics.jsonl" and b'"step":4' in line:
            append(self, name, line[: len(line) // 2])
            stop_here()
        append(self, name, line)

    RunFolder._append = torn  # type: ignore[method-assign]


def while_rows_are_cut(stop_here: Callable[[], None]) -> None:
    import engine.run_rows as module

    put_in_place = module.put_in_place

    def slow(partial: Path, path: Path) -> None:
        if path.name == "timings.jsonl":
            stop_here()
        put_in_place(partial, path)

    module.put_in_place = slow


PAUSES = {
    function.__name__: function
    for function in (
        in_a_checkpoint_write,
        before_latest_moves,
        while_one_is_replaced,
        while_one_is_removed,
        in_a_row_of_metrics,
        while_rows_are_cut,
    )
}


if __name__ == "__main__":
    serve(be_a_run)
