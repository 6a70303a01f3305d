"""A run's heartbeat: status.json, rewritten every second by a thread of its own.

The thread begins before anything is loaded, so that a run that dies in its first minute is seen in its
first minute, and it beats through everything that keeps the main thread busy: loading, tuning,
compiling, evaluating. Whoever reports something only sets a fact; the next beat writes it. The last
state is written at once by whoever ends the run, and nothing is written after it.

A heartbeat that fails (a full disk, most likely) says so once and goes on trying: what watches a run
must not be what ends it.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from engine.errors import DiskError, exit_code_of, words
from engine.live_status import GpuMemory, LaneActivity, LastCheckpoint, LiveStatus, State
from engine.panel import RemainingTime
from engine.process_identity import process_start, this_machine
from engine.run_folder import RunFolder
from engine.runtime.failure import Place
from engine.runtime.ticker import Ticker

INTERVAL_S = 1.0

WAIT_S = 1.0  # for a beat that hangs when the run ends: a failure has five seconds in all

GB = 1e9

LANES_SHOWN = ("running", "failed")  # lanes are idle otherwise, and what they were at last says nothing


class Heartbeat:
    """Takes facts about a run from any thread, and writes them every second until `end`."""

    def __init__(self, folder: RunFolder, say: Callable[[str], None], interval: float = INTERVAL_S) -> None:
        """
        Args:
            say: takes a line when status.json cannot be written, and when it can again.
            interval: seconds between two beats.
        """
        self.folder = folder
        self._say = say
        # Threads set single items of it and a beat copies it whole; neither can be caught half-way.
        self._facts: dict[str, Any] = {
            "state": "starting",
            "pid": os.getpid(),
            "machine": this_machine(),
            "process_start": process_start(os.getpid()),
            "started": time.time(),
            "step": None,
            "last_step": None,
            "loss": None,
            "tokens_per_s": None,
            "checkpoint": None,
            "resumed_from": None,
            "error": None,
            "exit_code": None,
        }
        self._places: Callable[[], Mapping[str, Place]] = dict
        self._busy: Mapping[str, float] = {}
        self._seen: dict[str, tuple[Place, float]] = {}
        self._devices: tuple[str, ...] = ()
        self._gpu_memory: dict[str, GpuMemory] = {}
        self._peak_memory: Mapping[str, float] = {}
        self._remaining: RemainingTime | None = None
        self._done_at: float | None = None
        self._ended = False
        self._failing = False
        self._ticker = Ticker(self.beat, interval, name="heartbeat", on_error=self._failed)

    def __enter__(self) -> "Heartbeat":
        """Write the first status, and go on every second."""
        try:
            self.beat()
        except DiskError as error:
            self._failed(error)
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it as what the error was, or as done; unless it has ended already."""
        if error is None:
            self.end("done")
        else:
            self.end_with(error)

    def state(self, state: State) -> None:
        """What the run does from now on; `end` takes the states that nothing follows."""
        self._facts["state"] = state

    def watch(
        self, devices: Sequence[str], places: Callable[[], Mapping[str, Place]], busy: Mapping[str, float]
    ) -> None:
        """Where lanes and memory are looked up from now on.

        Args:
            devices: of the run; those that are GPUs have their memory reported.
            places: what each lane is at, by its name; called in the heartbeat's thread.
            busy: share of the last moments that each lane was at work; read, never changed.
        """
        self._places, self._busy = places, busy
        self._devices = tuple(device for device in devices if device.startswith("cuda"))

    def planned(self, first_step: int, last_step: int, resumed_from: Path | None = None) -> None:
        """The run does steps `first_step` + 1 to `last_step`.

        Args:
            resumed_from: the checkpoint that it goes on from.
        """
        self._remaining = RemainingTime(last_step, time.monotonic)
        self._facts["last_step"], self._facts["step"] = last_step, first_step
        if resumed_from is not None:
            self._facts["resumed_from"] = resumed_from.name
            self.checkpoint(first_step, resumed_from)

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done; `row` is its row of metrics.jsonl."""
        self._peak_memory = row.get("peak_memory") or {}
        for name in ("step", "loss", "tokens_per_s"):
            self._facts[name] = row.get(name)
        if self._remaining is not None:
            left = self._remaining.after(row["step"])
            self._done_at = None if left is None else time.monotonic() + left

    def checkpoint(self, step: int, path: Path) -> None:
        """A whole checkpoint lies at `path`."""
        written = path.stat().st_mtime if path.exists() else time.time()
        self._facts["checkpoint"] = LastCheckpoint(name=path.name, step=step, time=written)

    def end(self, state: State, exit_code: int = 0, error: str | None = None) -> None:
        """Write the last status; any thread may call it, and the first call counts.

        It waits a second at most for a beat that hangs, and says so if that was too short.
        """
        self._ticker.close(WAIT_S)
        with self._ticker.turn(WAIT_S) as mine:
            if not mine:
                self._say(f"status.json does not say that the run is {state}: writing it hangs")
                return
            if self._ended:
                return
            self._ended = True
            self._facts |= {"state": state, "exit_code": exit_code, "error": error}
            try:
                self.folder.write_status(attrs.asdict(self._gather()))
            except DiskError as trouble:
                self._failed(trouble)

    def end_with(self, error: BaseException) -> None:
        """The same for a run that failed or was interrupted, with the exit code of its command."""
        state: State = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        self.end(state, exit_code_of(error), f"{type(error).__name__}: {words(error)}")

    def beat(self) -> None:
        """Write the status now."""
        self._look_at_memory()
        with self._ticker.turn():
            if not self._ended:
                self.folder.write_status(attrs.asdict(self._gather()))
        if self._failing:
            self._failing = False
            self._say("status.json is written again")

    def _gather(self) -> LiveStatus:
        now, facts = time.time(), dict(self._facts)
        left = None if self._done_at is None else max(self._done_at - time.monotonic(), 0.0)
        lanes = self._look_at_lanes(now) if facts["state"] in LANES_SHOWN else {}
        return LiveStatus(time=now, eta_s=left, lanes=lanes, gpu_memory=self._gpu_memory, **facts)

    def _look_at_lanes(self, now: float) -> dict[str, LaneActivity]:
        places, busy = self._places(), dict(self._busy)
        before = self._seen
        self._seen = {
            name: before[name] if name in before and before[name][0] == place else (place, now)
            for name, place in places.items()
        }
        return {
            name: LaneActivity(
                stage=place.stage,
                micro_batch=place.micro_batch,
                step=place.step,
                since=since,
                busy=busy.get(name),
            )
            for name, (place, since) in sorted(self._seen.items())
        }

    def _look_at_memory(self) -> None:
        """Ask the driver, which no lane's allocation can hold up as PyTorch's allocator could."""
        torch = sys.modules.get("torch")
        if not self._devices or torch is None or not torch.cuda.is_initialized():
            return
        gpus = {}
        for device in self._devices:
            try:
                free, total = torch.cuda.mem_get_info(device)
            except RuntimeError as error:  # after a fault on it, a device answers nothing any more
                self._devices = ()
                self._say(f"GPU memory is no longer reported: {device}: {error}")
                return
            gpus[device] = GpuMemory(
                used_gb=(total - free) / GB,
                total_gb=total / GB,
                peak_allocated_gb=self._peak_memory.get(device),
            )
        self._gpu_memory = gpus

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            self._say(f"status.json is out of date, the run goes on: {type(error).__name__}: {error}")
