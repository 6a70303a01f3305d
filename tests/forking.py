"""A process that has imported everything and forks a child at a word, so that a child costs no imports.

Importing takes four seconds; a test that ends twenty processes can pay that once. The process has no
thread and has touched no GPU, which is what makes forking it safe; the one of the tests may have both.
It is a script of tests that calls `serve`, and `Forker` talks to it line by line.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Forker:
    """Starts the process of a script; `close` ends it, and so does the end of the tests' own."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def fork(self, question: dict[str, Any], output: Path) -> int:
        """The number of a child that works on the question; what it says goes beside `output`."""
        return int(self.ask(question | {"said": str(_said(output))})["pid"])

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Forked:
    """A child and the folder that it writes to."""

    def __init__(self, forker: Forker, pid: int, output: Path) -> None:
        self.forker, self.pid, self.output = forker, pid, output

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> tuple[int, float]:
        """Its exit code, minus the signal's number where one killed it, and when (`time.monotonic`)."""
        answer = self.forker.ask({"wait": self.pid})
        return int(answer["code"]), float(answer["at"])

    def wait_for(self, ready: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, f"not there in time:\n{self.said()}"
            time.sleep(0.005)

    def said(self) -> str:
        return _said(self.output).read_text()


def serve(become: Callable[[dict[str, Any]], int]) -> None:
    """Answer until the other side closes; a child calls `become` and ends with the code it returns."""
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
                _be(become, question)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _be(become: Callable[[dict[str, Any]], int], question: dict[str, Any]) -> None:
    code = 1
    try:
        said = os.open(question["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        code = become(question)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _said(output: Path) -> Path:
    return output.with_name(f"{output.name}.said")
