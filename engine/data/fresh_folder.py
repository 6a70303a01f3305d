"""A folder of documents that is whole or not there.

It is written under another name and renamed when everything is on disk. Until then it holds a file
named INCOMPLETE, which doubles as the probe that the place can be written at all, and its process
holds a lock on it: a folder that nobody holds is a killed process's, and the next one that writes to
the same place removes it. A lock says that more surely than a process number, which another host or
a restarted machine gives out again.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.data.manifest import MANIFEST
from engine.errors import DataError, DiskError

INCOMPLETE = "INCOMPLETE"


@contextlib.contextmanager
def fresh_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `folder` that takes its place when the block ends well.

    Creating and probing happens at once, so a place that can't be written is known before any work.
    After an exception nothing is left behind and `folder` is as it was. What a killed process left
    behind goes at the next call for the same `folder`.

    Raises:
        DataError: `folder` is a file, cannot be written, or holds something that may not be replaced.
        DiskError: the finished folder cannot be moved into place.
    """
    folder = Path(os.path.abspath(folder))
    occupied = refuse_or_replace(folder, overwrite)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    held: int | None = None
    try:
        shutil.rmtree(partial, ignore_errors=True)
        held = _hold_new_folder(partial)
        _remove_abandoned(folder)
        (partial / INCOMPLETE).write_text("being written; safe to delete once no process writes it\n")
    except OSError as error:
        if held is not None:
            os.close(held)
        raise DataError(f"{folder}: cannot be written ({error}); name a folder that can") from error
    try:
        yield partial
        try:
            (partial / INCOMPLETE).unlink(missing_ok=True)
            old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
            if occupied:
                folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise DiskError(f"{folder}: cannot be moved into place ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(held)


def refuse_or_replace(folder: Path, overwrite: bool) -> bool:
    """Whether something is there that `fresh_folder` would replace.

    Raises:
        DataError: `folder` is a file, or holds something that may not be replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: a folder is to be written here and a file stands in its place")
    occupied = folder.is_dir() and any(folder.iterdir())
    if occupied and not overwrite:
        raise DataError(f"{folder}: holds files already; name another folder or ask to overwrite it")
    if occupied and not any((folder / part / MANIFEST).is_file() for part in ("", "train")):
        raise DataError(f"{folder}: holds files that are no documents, so it will not be overwritten")
    return occupied


def _hold_new_folder(folder: Path) -> int:
    """Make a folder and lock it for as long as this process lives; returns the open descriptor."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        # A file system that locks no folders locks them for no other process either: none is removed there.
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        # Between making and locking it, another process may have taken it for an abandoned one.
        if folder.exists() and os.path.samestat(os.fstat(held), os.stat(folder)):
            return held
        os.close(held)


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes that are gone were writing for `folder`."""
    beginning = f".{folder.name}.partial-"
    for path in sorted(folder.parent.iterdir()):
        if not path.name.startswith(beginning) or not path.name[len(beginning) :].isdigit():
            continue
        with contextlib.suppress(OSError):  # held by a living process, or gone by now
            held = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)
