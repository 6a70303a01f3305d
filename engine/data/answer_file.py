"""Generated answers on disk, by prompt: what a killed regeneration goes on from.

An answer is a line, a batch ends with an empty one. Lines behind the last whole batch were cut off by
a kill and are dropped, so that a batch is answered anew in the company it had. Of an answer only its
place stays in memory: those of a large data set would not fit. The name holds a hash of everything
an answer depends on besides its prompt, so answers of two targets or temperatures never mix; the first
line holds the same in words, so that an attempt with other settings can say which those were.
"""

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import orjson

from engine.data.report import counted
from engine.data.shards import hash63
from engine.errors import DataError, DiskError

_BATCH_END = b"[]\n"
_SETTINGS = b'{"settings":'
_SHOWN = 40  # characters of a setting's value


class AnswerFile:
    """Answers by prompt in a hidden file beside the folder that is prepared from them."""

    def __init__(self, output: Path, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """
        Args:
            output: the folder to be prepared.
            settings: all that an answer depends on besides its prompt; small values that JSON keeps.
            say: takes a line when answers of an earlier attempt are found, or are kept for the next.
        """
        key = hash63(orjson.dumps(dict(settings), option=orjson.OPT_SORT_KEYS))
        output = Path(os.path.abspath(output))
        self._beginning = f".{output.name}.answers-"
        self.path = output.with_name(f"{self._beginning}{key:016x}.jsonl")
        self._settings = dict(settings)
        self._say = say
        self._places: dict[int, tuple[int, int]] = {}  # prompt → offset and bytes of its line
        self._file: FileIO | None = None

    def __enter__(self) -> Self:
        while (file := self._locked()) is None:
            pass  # another process ended in between: each turn is one process that got done
        self._file = file
        try:
            whole = self._find()
            file.truncate(whole)
            if not whole:
                file.write(_SETTINGS + orjson.dumps(self._settings, option=orjson.OPT_SORT_KEYS) + b"}\n")
        except OSError as error:
            file.close()
            raise DiskError(f"{self.path}: cannot be written ({error}); make room and try again") from error
        except BaseException:
            file.close()
            raise
        if self._places:
            self._say(f"{counted(len(self), 'answer')} of an earlier attempt, from {self.path}")
        self._tell_others()
        return self

    def _tell_others(self) -> None:
        """Name the files of attempts with other settings: nobody would look for hidden ones."""
        for path in sorted(self.path.parent.iterdir()):
            if not path.name.startswith(self._beginning) or path == self.path or path.suffix != ".jsonl":
                continue
            try:
                with path.open("rb") as file:
                    first = file.readline()
                    answers = first.startswith(b"[") + sum(line != _BATCH_END for line in file)
            except OSError:  # its process is done with it by now
                continue
            if answers:
                self._say(
                    f"another attempt ({self._differing(first)}) left {counted(answers, 'answer')} in "
                    f"{path}; its own settings go on from there, or delete it"
                )

    def _differing(self, line: bytes) -> str:
        """How the settings in a file's first line differ from these."""
        try:
            settings = orjson.loads(line)["settings"]
        except (orjson.JSONDecodeError, TypeError, KeyError):
            return "its settings are not known"
        names = [name for name in settings if settings[name] != self._settings.get(name)]
        return (
            ", ".join(f"{name} {str(settings[name])[:_SHOWN]}" for name in names) or "settings left out since"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep the answers after a failure; after success the documents hold them, and the file goes."""
        if kind is None or not self._places:
            self.path.unlink(missing_ok=True)
        else:
            self._say(
                f"{counted(len(self), 'answer')} kept in {self.path}; the same command goes on from there"
            )
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    def get(self, prompt: Sequence[int]) -> list[int] | None:
        """The answer to a prompt, by its ids; None where there is none yet."""
        place = self._places.get(_key(prompt))
        if place is None or self._file is None:
            return None
        answer: list[int] = orjson.loads(os.pread(self._file.fileno(), place[1], place[0]))[1]
        return answer

    def add(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Keep a batch; it is on the disk when this returns.

        Raises:
            DiskError: it cannot be written; the file then ends with the batch before.
        """
        assert self._file is not None
        size = os.fstat(self._file.fileno()).st_size
        places: dict[int, tuple[int, int]] = {}
        content = b""
        for prompt, answer in zip(prompts, answers, strict=True):
            line = orjson.dumps([_key(prompt), list(answer)]) + b"\n"
            places[_key(prompt)] = (size + len(content), len(line))
            content += line
        try:
            rest = memoryview(content + _BATCH_END)
            while rest:  # a disk that fills up takes a part
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(size)
            raise DiskError(f"{self.path}: cannot be written ({error}); make room and try again") from error
        self._places.update(places)

    def _locked(self) -> FileIO | None:
        """The file, for this process alone; None where its last owner removed it before it was locked.

        Such a file has no name any more: a lock on it would keep nobody out, and what is written into it
        would be lost.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(str(self.path), "a+b")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written ({error}); name an --output that can") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            file.close()
            raise DataError(
                f"{self.path}: another process is writing these answers; wait for it or name another --output"
            ) from None
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _find(self) -> int:
        """Take in the batches that are whole; returns the bytes they are."""
        whole = offset = 0
        batch: dict[int, tuple[int, int]] = {}
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                if number == 1 and line.startswith(_SETTINGS):
                    whole = offset = len(line)
                    continue
                try:
                    entry = orjson.loads(line)
                    if entry:
                        batch[int(entry[0])] = (offset, len(line))
                except (orjson.JSONDecodeError, TypeError, ValueError, KeyError) as error:
                    raise DataError(
                        f"{self.path}: line {number} is no answer ({error}); remove the file to begin anew"
                    ) from error
                offset += len(line)
                if not entry:
                    self._places.update(batch)
                    batch, whole = {}, offset
        return whole


def _key(prompt: Sequence[int]) -> int:
    return hash63(np.asarray(prompt, dtype="<i4").data)
