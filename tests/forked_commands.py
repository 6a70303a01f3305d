"""Commands as a shell would start them, each forked from a process that has imported everything.

What is tested is a process's end: its exit code, how soon it comes, what it leaves. A fresh process
would spend four seconds on imports first.
"""

import functools
import sys
import time
from pathlib import Path
from typing import Any

import orjson
from forking import Forked, Forker, serve


class Command(Forked):
    """One that runs."""

    def __init__(self, server: "CommandServer", pid: int, output: Path) -> None:
        super().__init__(server, pid, output)
        self.begun = time.monotonic()

    def wait(self) -> tuple[int, float]:
        """Exit code, and when (`time.monotonic`)."""
        return self.ended()

    def log(self) -> str:
        path = self.output / "run.log"
        return path.read_text() if path.exists() else ""

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = orjson.loads((self.output / "status.json").read_bytes())
        return status

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.output / name
        return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


class CommandServer(Forker):
    """Starts `python -m engine run …`."""

    def __init__(self) -> None:
        super().__init__(__file__)

    def run(self, schedule: Path, output: Path, *arguments: str, before: str = "") -> Command:
        """Begin a run.

        Args:
            before: Python statements for the process to execute first.
        """
        argv = ["engine", "run", str(schedule), "--output", str(output), *arguments]
        return Command(self, self.fork({"argv": argv, "before": before}, output), output)


@functools.cache
def shared_server() -> CommandServer:
    """One for all tests; it ends with their process, when nothing more can come from that."""
    return CommandServer()


def become(question: dict[str, Any]) -> int:
    from engine.cli import main

    exec(question["before"], {})
    sys.argv = question["argv"]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    serve(become)
