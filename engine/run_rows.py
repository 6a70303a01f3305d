"""Rows of a run's files: cutting those that a resumed run will write again.

A long run's timings take gigabytes. Rows stand in the order in which their spans ended, lanes run ahead
of each other, and a device may be through with a later step's work first: so the rows to drop are near
the end but nowhere in one piece, and a damaged line may be anywhere. Hence every line is looked at,
one at a time, and a file that loses rows is written anew from the first of them on, behind a copy of
what precedes it; one that loses none is left as it is.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import orjson

from engine.errors import CheckpointError
from engine.whole_files import disk_errors, partial_path

PIECE = 1 << 20  # bytes copied at a time


def cut_rows(paths: Sequence[Path], step: int) -> int:
    """Drop the rows of JSON-lines files whose `step` is above `step`, and a last line left unfinished.

    Returns:
        How many lines were cut.

    Raises:
        CheckpointError: another line is damaged; names file and line. Nothing is cut then.
        DiskError: a file cannot be read or replaced.
    """
    there = [path for path in paths if path.exists()]
    try:
        counts = {path: _write_kept(path, step) for path in there}
    except BaseException:
        for path in there:
            with contextlib.suppress(OSError):
                partial_path(path).unlink(missing_ok=True)
        raise
    for path, count in counts.items():
        if count:
            put_in_place(partial_path(path), path)
    return sum(counts.values())


def put_in_place(partial: Path, path: Path) -> None:
    """Give a file that is whole its name, in place of what has it.

    Raises:
        DiskError: the disk will not; the old content stays.
    """
    with disk_errors(path):
        try:
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def _write_kept(path: Path, step: int) -> int:
    """Write the rows that stay beside `path`, flushed to the disk; returns how many lines do not stay.

    Where all stay, nothing is left beside it.
    """
    cut = read = 0
    with disk_errors(path, "cut"), path.open("rb") as file, contextlib.ExitStack() as stack:
        partial_path(path).unlink(missing_ok=True)  # of a run that was killed at this
        kept: BinaryIO | None = None
        for number, line in enumerate(file, start=1):
            if not _stays(path, number, line, step):
                cut += 1
                if kept is None:
                    kept = stack.enter_context(partial_path(path).open("wb"))
                    _copy_head(path, kept, read)
            elif kept is not None:
                kept.write(line)
            read += len(line)
        if kept is not None:
            kept.flush()
            os.fsync(kept.fileno())
    return cut


def _copy_head(path: Path, to: BinaryIO, size: int) -> None:
    with path.open("rb") as file:
        while size and (piece := file.read(min(size, PIECE))):
            to.write(piece)
            size -= len(piece)


def _stays(path: Path, number: int, line: bytes, step: int) -> bool:
    # Only a last line can be without its end; a power cut leaves zeros.
    if not line.endswith(b"\n") or not line.strip(b"\0 \t\r\n"):
        return False
    try:
        return int(orjson.loads(line)["step"]) <= step
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: line {number} is no row with a step; mend or remove it before resuming"
        ) from None
