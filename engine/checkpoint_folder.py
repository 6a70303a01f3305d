"""A run's checkpoints on the disk: which one to go on from, which to remove, what a kill left behind.

Names that begin with a dot are under way: written, replaced or removed at the moment somebody pulled
the plug. What bears its final name was whole when it got it; it is looked at nevertheless, since disks
fail, copies are cut short, and people put folders where they like.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint import CURSOR, Cursor, read_checkpoint
from engine.errors import CheckpointError
from engine.run_folder import LATEST, RUN_FILES, RunFolder
from engine.whole_files import disk_errors, partial_path

UNDER_WAY = re.compile(r"\.(step_\d+)\.(partial|replaced|removed)")


def clear_leftovers(folder: RunFolder) -> list[str]:
    """Remove what a killed run left half-done; returns a line for each.

    A checkpoint that was moved aside for its successor comes back where the successor did not arrive.

    Raises:
        DiskError: it cannot be removed.
    """
    lines = []
    checkpoints = folder.checkpoints
    with disk_errors(checkpoints, "clear"):
        for path in sorted(checkpoints.glob(".*")) if checkpoints.is_dir() else ():
            found = UNDER_WAY.fullmatch(path.name)
            if found and found[2] == "replaced" and not path.with_name(found[1]).exists():
                path.rename(path.with_name(found[1]))
                lines.append(f"{found[1]} is back: a kill came while it was being replaced")
            elif found:
                shutil.rmtree(path)
                lines.append(f"removed {path.name}, which a killed run left unfinished")
            elif path.is_symlink() and path.name.startswith(f".{LATEST}."):
                path.unlink()
        for name in RUN_FILES:
            partial_path(folder.path / name).unlink(missing_ok=True)
    return lines


def find_whole(folder: RunFolder, warn: Callable[[str], None]) -> tuple[Path, Cursor] | None:
    """The checkpoint to go on from: the one that `latest` names, or else the nearest before it that is whole.

    Args:
        warn: takes a line for each that is torn or foreign.

    Returns:
        Its folder and its cursor; None where no checkpoint was ever written.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    latest = folder.checkpoints / LATEST
    named = latest.readlink().name if latest.is_symlink() else None
    steps = sorted(_steps(folder), reverse=True)
    border = _number(named)
    # Steps after the one named belong to a part of the run that somebody has gone back from.
    order = [step for step in steps if step <= border] + [step for step in steps if step > border]
    names = [folder.checkpoint_path(step).name for step in order]
    if named is not None and named not in names:
        names.insert(0, named)
    torn = []
    for name in names:
        path = folder.checkpoints / name
        try:
            if not path.is_dir():
                raise CheckpointError(f"{path}: is gone, though {LATEST} names it")
            return path, read_checkpoint(path)
        except CheckpointError as error:
            torn.append(f"not resumed from {name}: {error}")
            warn(torn[-1])
    if torn:
        raise CheckpointError(
            f"{folder.checkpoints}: no checkpoint is whole, so there is nothing to resume from:\n  "
            + "\n  ".join(torn)
        )
    return None


def prune(folder: RunFolder, step: int, keep_last: int, keep_every: int) -> list[str]:
    """Remove checkpoints that a schedule no longer wants; returns the names of those removed.

    Args:
        step: of the newest one; those after it, and folders that no run wrote, are left alone.
        keep_last: how many to keep; 0: all.
        keep_every: multiples of it are kept besides; 0: none.

    Raises:
        DiskError: one cannot be removed.
    """
    own = [
        number
        for number in _steps(folder)
        if number <= step and (folder.checkpoint_path(number) / CURSOR).is_file()
    ]
    superfluous = sorted(own)[:-keep_last] if keep_last else []
    removed = []
    for number in superfluous:
        if keep_every and number % keep_every == 0:
            continue
        path = folder.checkpoint_path(number)
        with disk_errors(path, "remove"):
            # First the name: half of a checkpoint must never bear it.
            doomed = path.rename(path.with_name(f".{path.name}.removed"))
            shutil.rmtree(doomed)
        removed.append(path.name)
    return removed


def _steps(folder: RunFolder) -> list[int]:
    """The steps of all folders that bear a checkpoint's name."""
    numbers = (_number(path.name) for path in folder.checkpoints.glob("step_*") if path.is_dir())
    return [step for step in numbers if folder.checkpoint_path(step).is_dir()]


def _number(name: str | None) -> int:
    """The step in a checkpoint's name; beyond all steps where there is none."""
    text = (name or "").removeprefix("step_")
    return int(text) if text.isdecimal() else 1 << 62
