"""Generated answers on disk, by prompt: what a killed regeneration goes on from.

An answer is a line, a batch ends with an empty one. Lines behind the last whole batch were cut off by
a kill and are dropped, so that a batch is answered anew in the company it had. Of an answer only its
place stays in memory: those of a large data set would not fit. The name holds a hash of everything
an answer depends on besides its prompt, so answers of two targets or temperatures never mix; the first
line holds the same in words, so that an attempt with other settings can say which those were.

Parts of the prompts (`asked_rows.Part`) have a file each, so that processes can write them at once, and
so does what is answered without a part. Each reads those of the others that answer some of its rows: with
another number of parts, nothing is answered twice. A file goes when all its answers are in the documents.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import orjson

from engine.data.asked_rows import Part
from engine.data.report import counted
from engine.data.shards import hash63
from engine.errors import DataError, DiskError

_BATCH_END = b"[]\n"
_SETTINGS = b'{"settings":'
_SHOWN = 40  # characters of a setting's value


class AnswerFile:
    """Answers by prompt in a hidden file beside the folder that is prepared from them."""

    def __init__(
        self,
        output: Path,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
        part: Part | None = None,
    ) -> None:
        """
        Args:
            output: the folder to be prepared.
            settings: all that an answer depends on besides its prompt; small values that JSON keeps.
            say: takes a line when answers of an earlier attempt are found, or are kept for the next.
            part: whose answers these are; None takes in those of all parts.
        """
        key = hash63(orjson.dumps(dict(settings), option=orjson.OPT_SORT_KEYS))
        output = Path(os.path.abspath(output))
        self._beginning = f".{output.name}.answers-"
        self._whole = output.with_name(f"{self._beginning}{key:016x}.jsonl")
        self._part = part
        self.path = self._path(part)
        self._output, self._settings, self._say = output, dict(settings), say
        self._places: dict[int, tuple[int, int]] = {}  # prompt → offset and bytes of its line
        self._file: FileIO | None = None
        self._others: list[tuple[FileIO, dict[int, tuple[int, int]]]] = []  # open files with their places
        self._parts: list[AnswerFile] = []  # taken in, and held
        self._expected = 0  # of the others' answers, those that are likely to be of this part
        self._asked: set[int] = set()  # prompts whose answers were given out or written here
        self._told_missing = False

    def __enter__(self) -> Self:
        self._refuse_other_parts()
        with contextlib.ExitStack() as opened:
            self._file = opened.enter_context(self._open())
            if self._places:
                self._say(f"{counted(len(self._places), 'answer')} of an earlier attempt, from {self.path}")
            if self._part is None:
                self._take_parts(opened)
            else:
                self._look_into_others(opened, self._part)
            self._tell_others()
            self._opened = opened.pop_all()
        return self

    def _path(self, part: Part | None) -> Path:
        return self._whole.with_suffix(f".part-{part.number}-of-{part.of}.jsonl" if part else ".jsonl")

    def _open(self) -> FileIO:
        """Lock the file, take in what is whole and drop the rest."""
        while (file := self._locked()) is None:
            pass  # another process ended in between: each turn is one process that got done
        try:
            self._places, whole = _whole_batches(self.path, self._settings)
            file.truncate(whole)
            if not whole:
                file.write(_first_line(self._settings))
        except OSError as error:
            file.close()
            raise DiskError(f"{self.path}: cannot be written ({error}); make room and try again") from error
        except BaseException:
            file.close()
            raise
        return file

    def _take_parts(self, opened: contextlib.ExitStack) -> None:
        """Open the files of all parts; one that is being written is refused: two would do its work."""
        for part in self._parts_beside():
            other = AnswerFile(self._output, self._settings, self._say, part)
            file = opened.enter_context(other._open())
            self._parts.append(other)
            self._others.append((file, other._places))
            self._say(f"part {part} gave {counted(len(other._places), 'answer')}, from {other.path}")

    def _look_into_others(self, opened: contextlib.ExitStack, part: Part) -> None:
        """Open what else may answer rows of a part: without a lock, since the owners may go on writing."""
        for other in (None, *self._parts_beside()):
            if not (share := part.share_of(other)):
                continue
            with contextlib.suppress(FileNotFoundError):  # none, or its answers became documents by now
                path = self._path(other)
                file = opened.enter_context(FileIO(str(path)))
                self._others.append((file, places := _whole_batches(path, self._settings)[0]))
                self._expected += round(len(places) * share)
                self._say(f"{counted(len(places), 'answer')} to be used where they fit, from {path}")

    def _parts_beside(self) -> list[Part]:
        """The parts that left a file with these settings, this one not."""
        mine = (path for path in self._beside() if path.name.startswith(self._whole.stem))
        found = (part for path in mine if (part := _part(path)) is not None and part != self._part)
        return sorted(found, key=lambda part: (part.of, part.number))

    def _tell_missing_parts(self) -> None:
        """Which parts would have had the answer that is missing; none where a number of parts is complete."""
        found = [file._part for file in self._parts]
        numbers = sorted({part.of for part in found if part is not None})
        missing = [[str(n) for n in range(1, of + 1) if Part(n, of) not in found] for of in numbers]
        if missing and all(missing):
            named = (f"of {of} parts, {', '.join(those)}" for of, those in zip(numbers, missing, strict=True))
            self._say(
                f"{'; '.join(named)} left no file: what is missing is answered now; a part's own command "
                "would be quicker, with full batches"
            )

    def _beside(self) -> list[Path]:
        """Files of answers for the same output, of whatever settings."""
        if not self.path.parent.is_dir():
            return []
        names = sorted(self.path.parent.iterdir())
        return [path for path in names if path.name.startswith(self._beginning) and path.suffix == ".jsonl"]

    def _refuse_other_parts(self) -> None:
        """Parts of other settings: going on beside them would write everything again.

        Raises:
            DataError: there are some; says how their settings differ.
        """
        for path in self._beside():
            if _part(path) is None or path.name.startswith(self._whole.stem):
                continue
            first, answers = _content(path)
            if answers:
                raise DataError(
                    f"{path}: {counted(answers, 'answer')} of a part with other settings "
                    f"({self._differing(first)}); give the settings of the parts, or remove their files"
                )

    def _tell_others(self) -> None:
        """Name the files of attempts with other settings: nobody would look for hidden ones."""
        for path in self._beside():
            if path.name.startswith(self._whole.stem):
                continue
            first, answers = _content(path)
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
        """Keep the answers after a failure, and a part's; else those go that the documents hold."""
        if kind is None and self._part is None:
            for file in (self, *self._parts):
                self._remove_where_asked(file)
        elif kind is None:
            others = len(self._asked - self._places.keys())
            beside = f", {others:,} in other files" if others else ""
            self._say(
                f"part {self._part}: {counted(len(self._places), 'answer')} in {self.path}{beside}; "
                "after all parts, the same command without --part makes the documents"
            )
        elif not self._places:
            self.path.unlink(missing_ok=True)
        else:
            self._say(
                f"{counted(len(self._places), 'answer')} kept in {self.path}; the same command goes on from "
                "there"
            )
        self._opened.close()

    def _remove_where_asked(self, file: "AnswerFile") -> None:
        """Remove a file, unless it answers what this input did not ask: that stands nowhere else."""
        if other := sum(prompt not in self._asked for prompt in file._places):
            self._say(
                f"{other:,} of {counted(len(file._places), 'answer')} in {file.path} were not asked for by "
                "this input; the file is kept for the one that asks for them: delete it if there is none"
            )
        else:
            file.path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._places) + sum(len(places) for _, places in self._others)

    @property
    def usable(self) -> int:
        """About how many of these answer a prompt of this part."""
        return len(self) if self._part is None else len(self._places) + self._expected

    def get(self, prompt: Sequence[int]) -> list[int] | None:
        """The answer to a prompt, by its ids; None where there is none yet."""
        assert self._file is not None
        key = _key(prompt)
        for file, places in ((self._file, self._places), *self._others):
            if (place := places.get(key)) is not None:
                self._asked.add(key)
                answer: list[int] = orjson.loads(os.pread(file.fileno(), place[1], place[0]))[1]
                return answer
        if self._part is None and not self._told_missing:
            self._told_missing = True
            self._tell_missing_parts()
        return None

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
        self._asked.update(places)

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


def _whole_batches(path: Path, settings: Mapping[str, Any]) -> tuple[dict[int, tuple[int, int]], int]:
    """Where the answers of whole batches stand in a file, and the bytes that these are."""
    whole = offset = 0
    places: dict[int, tuple[int, int]] = {}
    batch: dict[int, tuple[int, int]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            if number == 1 and line.startswith(_SETTINGS):
                if line != _first_line(settings):
                    raise DataError(
                        f"{path}: its first line names other settings than its name; it was renamed or "
                        "edited: move it away"
                    )
                whole = offset = len(line)
                continue
            try:
                entry = orjson.loads(line)
                if entry:
                    batch[int(entry[0])] = (offset, len(line))
            except (orjson.JSONDecodeError, TypeError, ValueError, KeyError) as error:
                raise DataError(
                    f"{path}: line {number} is no answer ({error}); remove the file to begin anew"
                ) from error
            offset += len(line)
            if not entry:
                places.update(batch)
                batch, whole = {}, offset
    return places, whole


def _first_line(settings: Mapping[str, Any]) -> bytes:
    return _SETTINGS + orjson.dumps(dict(settings), option=orjson.OPT_SORT_KEYS) + b"}\n"


def _content(path: Path) -> tuple[bytes, int]:
    """The first line of a file, and how many answers are in it; none where its process is done with it."""
    try:
        with path.open("rb") as file:
            first = file.readline()
            return first, first.startswith(b"[") + sum(line != _BATCH_END for line in file)
    except OSError:
        return b"", 0


def _part(path: Path) -> Part | None:
    """Whose answers a file holds; None where they are of no part."""
    found = re.search(r"\.part-(\d+)-of-(\d+)\.jsonl$", path.name)
    return Part(int(found[1]), int(found[2])) if found else None


def _key(prompt: Sequence[int]) -> int:
    return hash63(np.asarray(prompt, dtype="<i4").data)
