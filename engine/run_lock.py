"""One process at a time in a run's folder.

A second run there would mix its rows with the first one's, and, failing before its first step, would
remove the first one's files as its own. So a run holds a lock on a file in its folder. The kernel lets
go of it when the process ends, however it ends: there is no stale lock to remove by hand, and the
file that a killed run leaves is simply taken over.

The file holds number and host of the process, for the message that the second run gets. It goes when
the run ends, so that a finished folder says nothing about the host.
"""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from engine.errors import EngineError, InputError

LOCK_FILE = "run.lock"

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


class RunLock:
    """Holds one folder at most; as a context it lets go at the end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """
        Args:
            say: takes a line where the file system has no locks.
        """
        self._say = say
        self._path: Path | None = None
        self._descriptor = -1
        self._made: list[Path] = []

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def made(self) -> tuple[Path, ...]:
        """Folders that were made in order to lock one of them, outermost first."""
        return tuple(self._made)

    def take(self, folder: str | Path) -> None:
        """Lock a folder, which is made where there is none; the same one again is nothing.

        Raises:
            InputError: another process holds it, which is named; or it cannot be made or written.
        """
        folder = Path(folder).resolve()
        if self._path == folder / LOCK_FILE:
            return
        if self._path is not None:
            raise EngineError(f"{folder}: this lock holds {self._path.parent} already")
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; give a folder for the run")
        try:
            for path in (*reversed(folder.parents), folder):
                if not path.exists():
                    path.mkdir(exist_ok=True)
                    self._made.append(path)
            self._descriptor = self._lock(folder / LOCK_FILE)
        except OSError as error:
            self.release()
            raise InputError(
                f"{folder}: the run's folder cannot be written: {error.strerror}; choose another place with "
                "run.output_dir or --output"
            ) from error
        self._path = folder / LOCK_FILE

    def release(self) -> None:
        """Let go, and remove the folders that were made for it and stayed empty."""
        if self._path is not None:
            # Removed while it is held: whoever opened it meanwhile sees that it is gone and opens anew.
            # It may be gone already, with all of a run that was discarded, and another's stand there.
            # A disk that fails by now must not stand in for how the run ended; closing lets go anyway.
            with contextlib.suppress(OSError):
                if _is_at(self._descriptor, self._path):
                    self._path.unlink()
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._path = None
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:  # in use: the run's files are in it
                break
        self._made = []

    def _lock(self, path: Path) -> int:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise InputError(_in_use(path)) from None
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    self._say(
                        f"{path.parent}: its file system has no locks ({error.strerror}), so nothing keeps a "
                        "second run out of this folder: start none there"
                    )
                if _is_at(descriptor, path):
                    owner = {"pid": os.getpid(), "host": socket.gethostname()}
                    os.truncate(descriptor, 0)
                    os.pwrite(descriptor, orjson.dumps(owner), 0)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still stands at a path, and not another one or none."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _in_use(path: Path) -> str:
    try:
        owner: Any = orjson.loads(path.read_bytes())
        who = f"process {owner['pid']} on {owner['host']}"
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):  # it locked and has not written yet
        who = "another process"
    return (
        f"{path.parent}: {who} is at work there; wait until it ends or stop it, or give another folder "
        "(see `python -m engine status`)"
    )
