"""Rows of a run's files: cutting those that a resumed run will write again."""

from collections.abc import Sequence
from pathlib import Path

import orjson

from engine.errors import CheckpointError
from engine.whole_files import disk_errors, replace_file


def cut_rows(paths: Sequence[Path], step: int) -> int:
    """Drop the rows of JSON-lines files whose `step` is above `step`, and a last line left unfinished.

    Returns:
        How many lines were cut.

    Raises:
        CheckpointError: another line is damaged; names file and line. Nothing is cut then.
        DiskError: a file cannot be read or replaced.
    """
    kept = {}
    cut = 0
    for path in paths:
        if path.exists():
            with disk_errors(path, "read"):
                lines = path.read_bytes().splitlines(keepends=True)
            kept[path] = _rows_up_to(path, lines, step)
            cut += len(lines) - len(kept[path])
    for path, lines in kept.items():
        replace_file(path, b"".join(lines))
    return cut


def _rows_up_to(path: Path, lines: list[bytes], step: int) -> list[bytes]:
    kept = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith(b"\n"):
            break
        if not line.strip():
            continue
        try:
            row_step = int(orjson.loads(line)["step"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}: line {number} is no row with a step; mend or remove it before resuming"
            ) from None
        if row_step <= step:
            kept.append(line)
    return kept
