"""Kept answers are whole batches of one setting, and progress is told at the pace of what is new."""

import fcntl
import io
import os
from io import FileIO
from pathlib import Path

import pytest
from rich.console import Console

from engine.data.answer_file import AnswerFile
from engine.data.answer_progress import AnswerProgress
from engine.data.asked_rows import Part
from engine.errors import DataError, DiskError

END = 2


def test_answers_of_other_settings_are_not_taken_up(tmp_path: Path) -> None:
    says: list[str] = []
    with (
        pytest.raises(RuntimeError),
        AnswerFile(tmp_path / "out", {"temperature": 0.0}, says.append) as file,
    ):
        file.add([[1, 2]], [[3, END]])
        raise RuntimeError
    with AnswerFile(tmp_path / "out", {"temperature": 1.0}, says.append) as file:
        assert len(file) == 0 and file.get([1, 2]) is None
    with AnswerFile(tmp_path / "out", {"temperature": 0.0}, says.append) as file:
        assert file.get([1, 2]) == [3, END] and file.get([1]) is None


def test_answers_of_another_attempt_are_told_with_what_was_asked_of_it(tmp_path: Path) -> None:
    def left(output: str, **settings: object) -> Path:
        file = AnswerFile(tmp_path / output, settings, lambda line: None)
        with pytest.raises(RuntimeError), file:
            file.add([[1], [2]], [[3, END], [4, END]])
            file.add([[5]], [[6, END]])
            raise RuntimeError
        return file.path

    other = left("out", temperature=0.7, seed=1, most=64)
    left("output", temperature=0.7)
    says: list[str] = []
    with AnswerFile(tmp_path / "out", {"temperature": 0.0, "seed": 1, "most": 32}, says.append):
        pass
    assert len(says) == 1
    assert says[0].startswith(f"another attempt (most 64, temperature 0.7) left 3 answers in {other};")
    assert other.exists()
    first, *rest = other.read_bytes().splitlines(keepends=True)
    other.write_bytes(b"".join(rest))
    says.clear()
    with AnswerFile(tmp_path / "out", {"temperature": 0.0}, says.append):
        pass
    assert "another attempt (its settings are not known) left 3 answers" in says[0]


def test_a_first_line_that_a_kill_cut_off_is_written_again(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "out", {"seed": 1}, lambda line: None)
    file.path.write_bytes(b'{"settings":{"se')
    with pytest.raises(RuntimeError), file:
        file.add([[1]], [[3, END]])
        raise RuntimeError
    assert file.path.read_bytes().startswith(b'{"settings":{"seed":1}}\n[')
    says: list[str] = []
    with AnswerFile(tmp_path / "out", {"seed": 1}, says.append) as again:
        assert again.get([1]) == [3, END]
    assert says == [f"1 answer of an earlier attempt, from {file.path}"]


def test_what_a_kill_left_of_a_batch_is_gone_before_the_next_is_written(tmp_path: Path) -> None:
    def keep(prompt: list[int], answer: list[int]) -> AnswerFile:
        file = AnswerFile(tmp_path / "out", {}, lambda line: None)
        with pytest.raises(RuntimeError), file:
            file.add([prompt], [answer])
            raise RuntimeError
        return file

    with keep([1], [3, END]).path.open("ab") as torn:
        torn.write(b"[5,[6,2]]\n[7,[8")
    keep([2], [4, END])
    with AnswerFile(tmp_path / "out", {}, lambda line: None) as file:
        assert (len(file), file.get([1]), file.get([2])) == (2, [3, END], [4, END])


def test_two_processes_do_not_write_the_same_answers(tmp_path: Path) -> None:
    with (
        AnswerFile(tmp_path / "out", {}, lambda line: None),
        pytest.raises(DataError, match="another process"),
        AnswerFile(tmp_path / "out", {}, lambda line: None),
    ):
        pass


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_file_removed_between_opening_and_locking_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun_anew: bool
) -> None:
    lock, calls = fcntl.flock, 0

    def late(file: FileIO, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # the process before this one ends here
            path.unlink()
            if begun_anew:
                path.write_bytes(b"")
        lock(file, operation)

    path = AnswerFile(tmp_path / "out", {}, lambda line: None).path
    monkeypatch.setattr("engine.data.answer_file.fcntl.flock", late)
    with AnswerFile(tmp_path / "out", {}, lambda line: None) as file:
        file.add([[1]], [[3, END]])
        assert file.path.read_bytes() and file.get([1]) == [3, END]
        with pytest.raises(DataError, match="another process"), AnswerFile(tmp_path / "out", {}, print):
            pass
    assert calls == 3 and not os.listdir(tmp_path)


def test_a_damaged_answer_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "out", {}, lambda line: None)
    file.path.write_bytes(b'[7,[1,2]]\n[]\n{"a": 1}\n')
    with pytest.raises(DataError, match="line 3 is no answer"), file:
        pass
    assert file.path.exists()


def test_a_full_disk_leaves_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(DiskError, match="No space left"),
        AnswerFile(tmp_path / "out", {}, lambda line: None) as file,
    ):
        file.add([[1]], [[3, END]])
        monkeypatch.setattr("engine.data.answer_file.os.fsync", full)
        file.add([[2]], [[4, END]])
    monkeypatch.undo()
    with AnswerFile(tmp_path / "out", {}, lambda line: None) as file:
        assert (file.get([1]), file.get([2])) == ([3, END], None)


def test_the_remaining_time_is_told_at_the_pace_of_what_is_written_now() -> None:
    now = 0.0
    screen = io.StringIO()
    progress = AnswerProgress(100, 40, Console(file=screen, width=120), lambda: now)
    progress.passed(20)
    progress.tell(0, 20, 0)
    now = 30.0
    progress.passed(20)
    progress.tell(20, 0, 600)
    now = 31.0  # too soon for another line
    progress.passed(1)
    progress.tell(1, 0, 30)
    # 60 are left, of which 20 are there; 20 took 30 seconds
    assert screen.getvalue() == "40 of 100 answers; 600 tokens written, 20 tokens/s; 0:01:00 left\n"


def test_while_nothing_is_written_the_time_left_is_that_of_what_was_written_before() -> None:
    now = 0.0
    screen = io.StringIO()
    progress = AnswerProgress(100, 100, Console(file=screen, width=120), lambda: now)
    progress.passed(25)
    now = 10.0
    progress.tell(0, 25, 0)
    assert screen.getvalue() == "25 of 100 answers; 0 tokens written, 0 tokens/s; 0:00:30 left\n"


def test_answers_of_parts_are_taken_in_and_go_when_the_documents_hold_them(tmp_path: Path) -> None:
    says: list[str] = []
    for number in (1, 3):
        with AnswerFile(tmp_path / "out", {"seed": 1}, says.append, Part(number, 3)) as part:
            part.add([[number]], [[10 + number, END]])
    assert len(list(tmp_path.iterdir())) == 2 and "without --part" in says[-1]
    says.clear()
    with pytest.raises(RuntimeError), AnswerFile(tmp_path / "out", {"seed": 1}, says.append) as whole:
        assert whole.get([1]) == [11, END] and whole.get([2]) is None and len(whole) == 2
        whole.add([[2]], [[12, END]])
        raise RuntimeError
    told = " ".join(says)
    assert "part 1/3 gave 1 answer" in told and "part 3/3 gave 1 answer" in told
    assert "of 3 parts, 2 left no file" in told
    with AnswerFile(tmp_path / "out", {"seed": 1}, says.append, Part(2, 3)) as part:
        assert part.get([2]) == [12, END]  # what was answered without parts is not answered again
    with AnswerFile(tmp_path / "out", {"seed": 1}, says.append) as whole:
        assert [whole.get([number]) for number in (1, 2, 3)] == [[11, END], [12, END], [13, END]]
    assert not list(tmp_path.iterdir())


def test_parts_are_written_side_by_side_and_not_taken_in_while_they_are(tmp_path: Path) -> None:
    first, second, again = (
        AnswerFile(tmp_path / "out", {}, lambda line: None, Part(number, 2)) for number in (1, 2, 2)
    )
    with first, second:
        first.add([[1]], [[3, END]])
        second.add([[2]], [[4, END]])
        for other in (again, AnswerFile(tmp_path / "out", {}, lambda line: None)):
            with pytest.raises(DataError, match="another process is writing"), other:
                pass
    with AnswerFile(tmp_path / "out", {}, lambda line: None) as whole:
        assert (whole.get([1]), whole.get([2])) == ([3, END], [4, END])


@pytest.mark.parametrize("part", [None, Part(1, 2), Part(2, 2)], ids=str)
def test_parts_of_other_settings_are_refused(tmp_path: Path, part: Part | None) -> None:
    with AnswerFile(tmp_path / "out", {"temperature": 0.7}, lambda line: None, Part(1, 2)) as file:
        file.add([[1]], [[3, END]])
    other = AnswerFile(tmp_path / "out", {"temperature": 0.0}, lambda line: None, part)
    with pytest.raises(DataError, match=r"part with other settings \(temperature 0.7\)"), other:
        pass
    assert list(tmp_path.iterdir()) == [file.path]
    file.path.rename(other.path)
    with pytest.raises(DataError, match="names other settings than its name"), other:
        pass
    assert other.path.exists()


@pytest.mark.parametrize("part", [None, Part(1, 2)], ids=str)
def test_a_file_with_answers_that_were_not_asked_for_is_kept_and_named(
    tmp_path: Path, part: Part | None
) -> None:
    left = AnswerFile(tmp_path / "out", {}, lambda line: None, part)
    with pytest.raises(RuntimeError), left:
        left.add([[1], [2], [3]], [[11, END], [12, END], [13, END]])
        raise RuntimeError
    says: list[str] = []
    with AnswerFile(tmp_path / "out", {}, says.append) as whole:
        assert whole.get([1]) == [11, END]
        whole.add([[4]], [[14, END]])
    count = "2 of 4 answers" if part is None else "2 of 3 answers"
    assert says[-1].startswith(f"{count} in {left.path} were not asked for by this input")
    assert list(tmp_path.iterdir()) == [left.path]
    with AnswerFile(tmp_path / "out", {}, says.append) as whole:
        assert [whole.get([number]) for number in (1, 2, 3)] == [[11, END], [12, END], [13, END]]
        assert whole.get([4]) == (None if part else [14, END])
    assert not list(tmp_path.iterdir())


def test_a_part_reads_whole_batches_of_other_parts_while_they_are_written(tmp_path: Path) -> None:
    half, other, quarter = (
        AnswerFile(tmp_path / "out", {}, lambda line: None, part)
        for part in (Part(1, 2), Part(2, 2), Part(3, 4))
    )
    with half, other:
        half.add([[1], [2], [3]], [[11, END], [12, END], [13, END]])
        other.add([[4]], [[14, END]])
        with half.path.open("ab") as torn:
            torn.write(b"[5,[6,2]]\n[7,[8")
        size = half.path.stat().st_size
        with quarter:
            assert quarter.get([1]) == [11, END] and (len(quarter), quarter.usable) == (3, 2)
            assert quarter.get([4]) is None  # no row falls to both
            quarter.add([[9]], [[19, END]])
        assert half.path.stat().st_size == size


def test_parts_without_a_file_are_told_only_when_an_answer_is_missing(tmp_path: Path) -> None:
    def left(part: Part) -> None:
        with AnswerFile(tmp_path / "out", {}, lambda line: None, part) as file:
            file.add([[part.of, part.number]], [[9, END]])

    def told() -> str:
        says: list[str] = []
        with pytest.raises(RuntimeError), AnswerFile(tmp_path / "out", {}, says.append) as whole:
            assert whole.get([2, 1]) == [9, END]
            assert not any("left no file" in line for line in says)
            assert whole.get([0]) is None and whole.get([0, 0]) is None
            raise RuntimeError
        return " ".join(says)

    left(Part(1, 2))
    left(Part(2, 3))
    assert told().count("of 2 parts, 2; of 3 parts, 1, 3 left no file") == 1
    left(Part(1, 3))
    left(Part(3, 3))
    assert "left no file" not in told()
