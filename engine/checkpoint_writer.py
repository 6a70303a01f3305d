"""Checkpoints beside the training: lanes wait for a copy in host memory, not for the disk.

While all lanes are idle between two stretches of steps, masters and moments are copied to host memory;
then the next stretch begins, and a background thread writes the copy beside its place, flushes it,
reads it back, renames it, points `latest` at it and removes what the schedule no longer keeps. The
checkpoint before stays the latest until then, so a kill at any moment leaves a whole one. A second
save waits for the first: two at once would only share the disk, and need two copies.

Where host memory has no room for the copy, lanes wait for the write instead, and the run says so.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from engine.checkpoint import Contents, contents, write_checkpoint
from engine.checkpoint_folder import prune
from engine.disk_space import check_room, saved_bytes
from engine.memory_free import available_ram
from engine.memory_plan import in_gb
from engine.run_folder import RunFolder
from engine.runtime.background import Background
from engine.runtime.host_copy import HostCopy, room_for
from engine.runtime.inbox import Stop
from engine.training_parts import TrainingParts
from engine.whole_files import write_whole

SPARE_SHARE = 0.1  # of the host memory that is available, for whatever else the machine does


@attrs.frozen(kw_only=True)
class Written:
    """A checkpoint that is whole and in its place."""

    step: int
    path: Path
    waited_s: float
    """For the one before to be written; lanes were idle."""
    copied_s: float
    """Lanes were idle."""
    written_s: float
    """Until it had its name; lanes were idle only where there was no room for a copy."""
    nbytes: int
    removed: list[str]
    """Names of older ones that the schedule did not want any more."""

    def __str__(self) -> str:
        text = (
            f"checkpoint {self.path.name}: {self.nbytes / 1e6:,.1f} MB, copied in {self.copied_s:.2f} s, "
            f"written in {self.written_s:.2f} s"
        )
        if self.waited_s > 0.1:
            text += f", after {self.waited_s:.1f} s of waiting for the one before"
        return text + (f"; removed {', '.join(self.removed)}" if self.removed else "")


class CheckpointWriter:
    """Writes a run's checkpoints. Its methods belong to the thread that runs the stretches.

    As a context manager it ends with the run: the last write is waited for where the run ends well,
    and dropped where it fails, since whatever failed may go on failing.
    """

    def __init__(
        self,
        folder: RunFolder,
        parts: TrainingParts,
        *,
        facts: Mapping[str, Any],
        drift: list[dict[str, Any]],
        told: Callable[[Written], None],
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            facts: what a resumed run must share, see `engine.drift`.
            drift: what differed at resumes that were told to go on.
            told: takes each checkpoint that is written, in the thread that calls the methods here.
            say: takes a line for the log.
        """
        self._folder, self._parts = folder, parts
        self._facts, self._drift = facts, drift
        self._told, self._say = told, say
        self._background = Background("checkpoint-writer")
        self._copy = HostCopy()
        self._written: list[Written] = []
        self._has_room: bool | None = None

    def prepare(self) -> None:
        """Take host memory for copies while lanes work; call it after a step that updated the masters.

        Before one, the optimizer has no state to measure; in the middle of the first one, half of it.

        Raises:
            DiskError: as `check`.
        """
        if self._has_room is None:
            self._make_room(room_for(contents(self._parts, 0, {}, []).tensors))

    def check(self) -> None:
        """Tell of what was written since the last call.

        Raises:
            DiskError: a checkpoint could not be written; the one before it is still the latest.
        """
        self._background.check()
        while self._written:
            self._told(self._written.pop(0))

    def save(self, step: int, *, wait: bool = False) -> Path:
        """Copy the state after `step` steps and begin to write it; all lanes are idle meanwhile.

        Args:
            wait: until it is written and told.

        Returns:
            Where it will stand.

        Raises:
            DiskError: this one does not fit, or could not be written where it is waited for, or the one
                before could not.
            EngineError: the optimizer keeps something that no checkpoint can hold.
        """
        waited = self._background.wait()
        self.check()
        whole = contents(self._parts, step, self._facts, self._drift)
        served = self._parts.drafters[0].masters.parameters.values()
        check_room(self._folder.checkpoints, saved_bytes(whole.tensors.values(), served))
        self._make_room(room_for(whole.tensors))
        self._background.wait()
        begin = time.perf_counter()
        if self._has_room:
            whole = attrs.evolve(whole, tensors=self._copy.take(whole.tensors))
        copied = time.perf_counter() - begin
        self._background.start(lambda stop: self._write(whole, waited, copied, stop))
        if wait or not self._has_room:
            self._background.wait()
            self.check()
        return self._folder.checkpoint_path(step)

    def close(self) -> None:
        """Wait until the last checkpoint is written; host memory is given back.

        Raises:
            DiskError: it could not be written.
        """
        try:
            self._background.wait()
            self.check()
        finally:
            self._copy.close()

    def abandon(self) -> bool:
        """Drop the write that is under way; the checkpoint before it stands.

        Returns:
            Whether it has ended. Otherwise it sits in a call to the disk, which no exit should wait for.
        """
        ended = self._background.drop()
        if ended:
            self._copy.close()
        return ended

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self.abandon():
            # The command leaves past threads that cannot end; see `engine.cli`.
            stuck = (*getattr(error, "stuck", ()), self._background.name)
            error.stuck = stuck  # type: ignore[attr-defined]

    def _make_room(self, nbytes: int) -> None:
        if self._has_room is False or nbytes <= self._copy.nbytes:
            return
        available = available_ram()
        self._has_room = available is None or nbytes <= available * (1 - SPARE_SHARE)
        if self._has_room:
            # In the background also because a refusal to pin memory is an error of the thread that asked.
            self._background.start(lambda stop: self._copy.reserve(nbytes))
        else:
            self._say(
                f"checkpoints are written while the lanes wait: a copy needs {in_gb(nbytes)} GB of host "
                f"memory, and {in_gb(available or 0)} GB are available"
            )

    def _write(self, whole: Contents, waited: float, copied: float, stop: Stop) -> None:
        folder, run = self._folder, self._parts.plan.schedule.run
        step = int(whole.cursor["step"])
        path = folder.checkpoint_path(step)
        begin = time.perf_counter()

        def fill(partial: Path) -> None:
            write_checkpoint(partial, whole, stop.check)
            folder.flush_rows()
            stop.check()

        write_whole(path, fill)
        folder.mark_latest(step)
        seconds = time.perf_counter() - begin
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        removed = prune(folder, step, run.keep_last, run.keep_every)
        self._written.append(
            Written(
                step=step,
                path=path,
                waited_s=waited,
                copied_s=copied,
                written_s=seconds,
                nbytes=nbytes,
                removed=removed,
            )
        )
