"""Commands as a shell would start them, each forked from a process that has imported everything.

What is tested is a process's end: its exit code, how soon it comes, what it leaves. A fresh process
would spend four seconds on imports first.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import orjson


@attrs.define
class Command:
    """One that runs."""

    server: "CommandServer"
    pid: int
    output: Path
    begun: float

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> tuple[int, float]:
        """Exit code, and when (`time.monotonic`)."""
        answer = self.server.ask({"wait": self.pid})
        return int(answer["code"]), float(answer["at"])

    def said(self) -> str:
        return Path(f"{self.output}.said").read_text()

    def log(self) -> str:
        path = self.output / "run.log"
        return path.read_text() if path.exists() else ""

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = orjson.loads((self.output / "status.json").read_bytes())
        return status

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.output / name
        return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def wait_for(self, ready: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, f"not there in time:\n{self.said()}"
            time.sleep(0.01)


class CommandServer:
    """Starts `python -m engine run …`."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def run(self, schedule: Path, output: Path, *arguments: str, before: str = "") -> Command:
        """Begin a run.

        Args:
            before: Python statements for the process to execute first.
        """
        argv = ["engine", "run", str(schedule), "--output", str(output), *arguments]
        answer = self.ask({"argv": argv, "said": f"{output}.said", "before": before})
        return Command(self, answer["pid"], output, time.monotonic())


@functools.cache
def shared_server() -> CommandServer:
    """One for all tests; it ends with their process, when nothing more can come from that."""
    return CommandServer()


def serve() -> None:
    import torch

    import engine.run  # noqa: F401  the import is what is to be warm

    torch.set_num_threads(1)
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status), "at": time.monotonic()}
        else:
            pid = os.fork()
            if not pid:
                become(question)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def become(question: dict[str, Any]) -> None:
    from engine.cli import main

    said = os.open(question["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    exec(question["before"], {})
    sys.argv = question["argv"]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
