"""Files and folders that are either whole or not there.

A run is killed at any moment, and a disk fills up at the worst one. So what is rewritten is
written beside, flushed to the disk, and renamed into place; whatever bears its final name can be
read. A failing disk ends in `DiskError` with the path, never in a half-written checkpoint that is
chosen at the next resume.
"""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from engine.errors import DiskError


@contextmanager
def disk_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn an operating system's error (disk full, no permission, I/O) into a `DiskError`.

    safetensors reports a full disk with an error class of its own, which counts too.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        free = _free_space(path)
        raise DiskError(f"{path}: could not {action} it: {reason} ({free}); mend that and resume") from error


def _free_space(path: Path) -> str:
    for folder in (path, *path.parents):
        if folder.is_dir():
            return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free there"
    return "no folder there"


def partial_path(path: Path) -> Path:
    """Where `path` is written before it is whole; hidden, so that nobody takes it for a result."""
    return path.with_name(f".{path.name}.partial")


def replace_file(path: Path, data: bytes, *, flush_to_disk: bool = True) -> None:
    """Replace a file's content so that a reader sees the old or the new one, never a part.

    Args:
        flush_to_disk: wait for the disk. Without it a power cut may leave an empty file, which is
            fine for a status that is rewritten every second.

    Raises:
        DiskError: it cannot be written; the old content stays.
    """
    partial = partial_path(path)
    with disk_errors(path):
        try:
            with partial.open("wb") as file:
                file.write(data)
                if flush_to_disk:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def write_whole(path: Path, writer: Callable[[Path], None]) -> None:
    """Write a folder beside its place, flush it to the disk and rename it into place.

    Args:
        path: where the folder is to stand; one that stands there is replaced.
        writer: fills the empty folder that it is given. If it raises, that folder is removed and
            `path` is as before.

    Raises:
        DiskError: the disk is full or failing.
    """
    partial, replaced = partial_path(path), path.with_name(f".{path.name}.replaced")
    with disk_errors(path):
        for leftover in (partial, replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)
        try:
            writer(partial)
            _flush_tree(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        flush(path.parent)
        if replaced.exists():
            shutil.rmtree(replaced)


def replace_link(path: Path, target: str) -> None:
    """Point a symbolic link somewhere else, without a moment in which it points nowhere."""
    # Runs that start together share `latest`, so each makes a link of its own name first.
    partial = partial_path(path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}"))
    with disk_errors(path):
        partial.symlink_to(target)
        try:
            partial.replace(path)
        except OSError:
            partial.unlink()
            raise


def flush(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on the disk.

    Raises:
        DiskError: the disk reports that they are not.
    """
    with disk_errors(path, "flush"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _flush_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            flush(Path(parent) / name)
        flush(Path(parent))
