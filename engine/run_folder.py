"""A run's folder: where it stands, what is in it, what a resumed run may cut.

    runs/<schedule>-<n>/   schedule.toml  environment.json  metrics.jsonl  timings.jsonl
                           status.json    run.log           checkpoints/step_000100/, latest
    runs/latest            symbolic link to the newest run

The folder is made and probed by writing before anything expensive happens, and a failed start
leaves nothing behind. Rows are appended by opening, writing one line and closing: a step takes
long enough for that, and no open file can hold back a row when the process is killed. An explicit
folder is never emptied of what no run wrote.
"""

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
import orjson

from engine.errors import CheckpointError, DiskError, InputError, ScheduleError
from engine.run_lock import LOCK_FILE
from engine.run_rows import cut_rows
from engine.whole_files import disk_errors, flush, partial_path, replace_file, replace_link

RUN_FILES = ("schedule.toml", "environment.json", "metrics.jsonl", "timings.jsonl", "status.json", "run.log")
ROWS = ("metrics.jsonl", "timings.jsonl")
CHECKPOINTS = "checkpoints"
LATEST = "latest"


@attrs.frozen
class RunFolder:
    """One run's files. Every method that writes raises `DiskError` when the disk will not."""

    path: Path
    made: tuple[Path, ...] = ()
    """Folders that creating this run made, outermost first."""
    fresh: bool = False
    """Whether this process began the run, so that it may also discard it."""
    latest_before: str | None = None
    """What `latest` beside this folder named before this run."""

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl; `step` is the number of optimizer steps done with it."""
        self._append("metrics.jsonl", _json(row) + b"\n")

    def append_timings(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to timings.jsonl."""
        if rows:
            self._append("timings.jsonl", b"".join(_json(row) + b"\n" for row in rows))

    def log(self, line: str) -> None:
        """Append a line to run.log, with the local time before it."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._append("run.log", f"{now} {line}\n".encode())

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json; a reader never sees half of one."""
        replace_file(self.path / "status.json", _json(status, indent=True), flush_to_disk=False)

    def write_schedule(self, text: str) -> None:
        """Replace schedule.toml, the effective configuration."""
        replace_file(self.path / "schedule.toml", text.encode())

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Replace environment.json; see `engine.environment`."""
        replace_file(self.path / "environment.json", _json(facts, indent=True))

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints; it may not be there yet."""
        return self.path / CHECKPOINTS

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after `step` optimizer steps stands; write it with `write_whole`."""
        return self.checkpoints / f"step_{step:06d}"

    def mark_latest(self, step: int) -> None:
        """Point checkpoints/latest at a checkpoint that is whole.

        Raises:
            CheckpointError: there is none of that step.
        """
        checkpoint = self.checkpoint_path(step)
        if not checkpoint.is_dir():
            raise CheckpointError(f"{checkpoint}: no checkpoint there, so it cannot be the latest")
        replace_link(checkpoint.with_name(LATEST), checkpoint.name)

    def latest_checkpoint(self) -> Path | None:
        """The checkpoint that checkpoints/latest names; None where none was ever written.

        Raises:
            CheckpointError: `latest` is missing or names what is not there, but others are.
        """
        folder = self.checkpoints
        latest = folder / LATEST
        steps = sorted(path.name for path in folder.glob("step_*") if path.is_dir())
        if latest.is_symlink() and latest.is_dir():
            return latest.resolve()
        if not steps and not latest.is_symlink():
            return None
        named = f"names {os.readlink(latest)}, which is gone" if latest.is_symlink() else "is missing"
        there = f"point it at one of {', '.join(steps)}" if steps else "no other is there"
        raise CheckpointError(f"{latest}: {named}; {there}")

    def cut_metrics_after(self, step: int) -> int:
        """Drop the rows of metrics.jsonl and timings.jsonl whose `step` is above `step`.

        A last line that a killed run left unfinished goes too.

        Returns:
            How many lines were cut.

        Raises:
            CheckpointError: another line is damaged; names file and line. Nothing is cut then.
        """
        return cut_rows([self.path / name for name in ROWS], step)

    def flush_rows(self) -> None:
        """Wait until the rows appended so far are on the disk, as a checkpoint after them will rely on."""
        for name in ROWS:
            path = self.path / name
            if path.exists():
                flush(path)

    def discard(self) -> None:
        """Remove a run that failed before it began: its files, and every folder made for it.

        A resumed run is left as it is.
        """
        if not self.fresh:
            return
        _remove_run(self.path)
        (self.path / LOCK_FILE).unlink(missing_ok=True)  # of this process, or it would not be here
        link = self.path.parent / LATEST
        if link.is_symlink() and os.readlink(link) == self.path.name:
            if self.latest_before is None:
                link.unlink()
            else:
                replace_link(link, self.latest_before)
        _unmake(self.made)

    def _append(self, name: str, line: bytes) -> None:
        path = self.path / name
        with disk_errors(path), path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                rest = memoryview(line)
                while rest:  # a disk that fills up takes a part
                    rest = rest[file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)  # half a line would stand in the way of a resume
                raise


def create_run_folder(
    output_dir: str | Path,
    schedule_name: str,
    output: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RunFolder:
    """Make a run's folder and write to it once, as a proof that one can.

    Args:
        output_dir: a schedule's `run.output_dir`; the run gets a new folder in it and `latest`.
        schedule_name: the first part of that folder's name.
        output: a folder to use instead; `output_dir` and its `latest` are left alone then.
        resume: go on in `output`, which must hold a run.
        overwrite: remove the run that `output` holds.

    Raises:
        ScheduleError: `output` holds another run, or files that no run wrote.
        InputError: the place cannot be written (nothing is left behind), or the flags make no sense.
    """
    check_run_folder(output, resume=resume, overwrite=overwrite)
    try:
        if output is None:
            return _create_numbered(Path(output_dir).resolve(), schedule_name)
        path = Path(output).resolve()
        made = _make_and_probe(path)
        if overwrite:
            _remove_run(path)
        return RunFolder(path, made, fresh=not resume)
    except OSError as error:
        raise InputError(
            f"{output or output_dir}: the run's folder cannot be written: {error.strerror}; choose another "
            "place with run.output_dir or --output"
        ) from error


def check_run_folder(output: str | Path | None, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse what `create_run_folder` would, before anything else is looked at; nothing is written.

    Raises:
        ScheduleError: `output` holds another run, or files that no run wrote.
        InputError: the flags make no sense, or `output` is a file.
    """
    if resume and overwrite:
        raise InputError("--resume goes on with a run and --overwrite removes it: give one of the two")
    if output is None and (resume or overwrite):
        flag = "resume" if resume else "overwrite"
        raise InputError(
            f"--{flag} without --output: give --output FOLDER, the folder of the run that is meant"
        )
    if output is None:
        return
    path = Path(output).resolve()
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; give a folder for the run")
    holds_run = any((path / name).exists() for name in (*RUN_FILES, CHECKPOINTS))
    if resume and not holds_run:
        raise InputError(f"{path}: holds no run to resume; leave --resume out to start one there")
    if not resume:
        if foreign := _foreign_files(path):
            raise ScheduleError(
                f"{path}: holds files that no run wrote ({', '.join(foreign[:5])}), which are never "
                "removed; give another folder"
            )
        if holds_run and not overwrite:
            raise ScheduleError(f"{path}: holds another run; give another folder, --resume or --overwrite")


def _create_numbered(parent: Path, schedule_name: str) -> RunFolder:
    link = parent / LATEST
    if link.exists() and not link.is_symlink():
        raise InputError(f"{link}: is no symbolic link, so it cannot point at the newest run; move it away")
    prefix = f"{schedule_name}-"
    taken = [path.name.removeprefix(prefix) for path in parent.glob("*") if path.name.startswith(prefix)]
    number = 1 + max((int(text) for text in taken if text.isdecimal()), default=0)
    while True:
        path = parent / f"{prefix}{number}"
        try:
            made = _make_and_probe(path, must_be_new=True)
            break
        except FileExistsError:
            # Another run that starts at this moment took the number.
            if not (path.exists() or path.is_symlink()):
                raise
            number += 1
    latest_before = os.readlink(link) if link.is_symlink() else None
    try:
        replace_link(link, path.name)
    except DiskError:
        _unmake(made)
        raise
    return RunFolder(path, made, fresh=True, latest_before=latest_before)


def _make_and_probe(path: Path, *, must_be_new: bool = False) -> tuple[Path, ...]:
    """Make a folder and its parents, write to it, and return those that were made.

    Raises:
        OSError: it cannot be made or written; what was made is removed again.
    """
    made: list[Path] = []
    try:
        for folder in (*reversed(path.parents), path):
            if (must_be_new and folder == path) or not folder.exists():
                folder.mkdir(exist_ok=not must_be_new or folder != path)
                made.append(folder)
        _probe(path)
    except OSError:
        _unmake(tuple(made))
        raise
    return tuple(made)


def _probe(path: Path) -> None:
    probe = partial_path(path / "probe")
    try:
        probe.write_bytes(b"probe")
    finally:
        probe.unlink(missing_ok=True)


def _unmake(folders: tuple[Path, ...]) -> None:
    """Remove folders that were made, innermost first; one that others use by now stays."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            return


def _foreign_files(path: Path) -> list[str]:
    """Names in a folder that no run wrote, those among its checkpoints included."""
    if not path.is_dir():
        return []
    own = {
        *RUN_FILES,
        CHECKPOINTS,
        LOCK_FILE,
        *(partial_path(path / name).name for name in (*RUN_FILES, "probe")),
    }
    foreign = [entry.name for entry in path.iterdir() if entry.name not in own]
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink():
        return sorted([*foreign, CHECKPOINTS])
    if checkpoints.is_dir():
        foreign += [f"{CHECKPOINTS}/{e.name}" for e in checkpoints.iterdir() if not _is_checkpoint_entry(e)]
    return sorted(foreign)


def _is_checkpoint_entry(path: Path) -> bool:
    if path.is_symlink():
        return path.name == LATEST or path.name.startswith(f".{LATEST}.")
    return path.is_dir() and path.name.removeprefix(".").startswith("step_")


def _remove_run(path: Path) -> None:
    with disk_errors(path, "remove"):
        for name in RUN_FILES:
            (path / name).unlink(missing_ok=True)
            partial_path(path / name).unlink(missing_ok=True)
        if (path / CHECKPOINTS).is_dir():
            shutil.rmtree(path / CHECKPOINTS)


def _json(value: Mapping[str, Any], *, indent: bool = False) -> bytes:
    option = orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_INDENT_2 if indent else 0)
    return orjson.dumps(dict(value), option=option)


def resolve_checkpoint(path: str | Path) -> Path:
    """The checkpoint that is meant by a checkpoint's folder or a run's folder (its latest).

    Raises:
        CheckpointError: neither is there; says what was found.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a checkpoint or a run's folder")
    if (path / CHECKPOINTS).is_dir() or (path / "schedule.toml").exists():
        latest = RunFolder(path).latest_checkpoint()
        if latest is None:
            raise CheckpointError(f"{path}: this run has written no checkpoint")
        path = latest
    missing = [name for name in ("config.json", "model.safetensors") if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: no checkpoint, it lacks {' and '.join(missing)}; give a checkpoint or a run's folder"
        )
    return path
