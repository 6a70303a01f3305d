"""Answers shared out among processes are those of one process, and how many come together changes none."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console
from test_regeneration import FOLDER, command, echo, of_target, questions, run, scripted, target

from engine.builtin import TINY_HYBRID
from engine.data.asked_rows import Part, parse_asked
from engine.data.documents import open_documents
from engine.data.manifest import read_manifest
from engine.data.preparation import answer_part
from engine.data.regeneration import AnswerCounts, AnswerWriter
from engine.decoding_batch import TOGETHER_ON_CPU
from engine.errors import DataError, InputError
from engine.regenerate import rows_with_room


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "in.jsonl"


def answer(folder: Path, writer: AnswerWriter, part: Part, **options: Any) -> tuple[AnswerCounts, str]:
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    counts = answer_part(
        [folder / "in.jsonl"], FOLDER, folder / "out", part, answer_writer=writer, console=console, **options
    )
    return counts, screen.getvalue()


def content(folder: Path) -> tuple[str, Any]:
    manifest = read_manifest(folder / "out")
    assert manifest is not None
    return open_documents(folder / "out").fingerprint, manifest.source["answers"]


def never(prompts: list[list[int]], most: int) -> list[list[int]]:
    raise AssertionError(f"{len(prompts)} prompts that need no answer")


def test_every_row_falls_to_one_part_and_rows_that_begin_alike_to_the_same() -> None:
    rows = [*questions(60), {"prompt_ids": [5, 6, 7]}]
    talks = [parse_asked("", json.dumps(row).encode(), 1024) for row in rows]
    shares = [[Part(number, 3).has(talk) for talk in talks] for number in (1, 2, 3)]
    assert all(sum(has) == 1 for has in zip(*shares, strict=True))
    assert all(10 <= sum(share) <= 31 for share in shares)
    turns = rows[1]["messages"]
    longer = {
        "messages": [turns[0], {"role": "assistant", "content": "-"}, {"role": "user", "content": "so"}]
    }
    assert parse_asked("", json.dumps(longer).encode(), 1024).identity == talks[1].identity


def test_rows_that_give_ids_are_spread_over_the_parts(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [5 + number, 6, 7]} for number in range(60)]
    talks = [parse_asked("", json.dumps(row).encode(), 1024) for row in rows]
    assert all(10 <= sum(map(Part(number, 3).has, talks)) <= 30 for number in (1, 2, 3))
    again = {"prompt_ids": rows[7]["prompt_ids"], "answer_ids": [9, 2]}
    assert parse_asked("", json.dumps(again).encode(), 1024).identity == talks[7].identity
    write(tmp_path, rows)
    counts = [answer(tmp_path, scripted(echo), Part(number, 3))[0].answers for number in (1, 2, 3)]
    assert sum(counts) == 60 and min(counts) >= 10
    run(tmp_path, rows, scripted(echo, decode=never))
    assert content(tmp_path)[1]["answers"] == 60


def test_parts_give_the_documents_of_one_process_bit_for_bit(tmp_path: Path) -> None:
    rows = questions(9)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, rows, of_target(temperature=1.0, most=16))
    write(parts, rows)
    counts = []
    for number, batch in ((2, 1), (1, 5)):
        found, printed = answer(parts, of_target(temperature=1.0, most=16, batch=batch), Part(number, 2))
        counts.append(found.answers)
        assert "9 rows to give 12 answers, " in printed and f" of them in part {number}/2; 0 are" in printed
    assert sum(counts) == content(whole)[1]["answers"] and min(counts) > 0

    _, printed = run(parts, rows, attrs.evolve(of_target(temperature=1.0, most=16), decode=never))
    assert f"part 2/2 gave {counts[0]} answers" in printed
    assert content(parts) == content(whole)
    assert sorted(path.name for path in parts.iterdir()) == ["in.jsonl", "out"]


KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from test_answer_parts import answer
from test_regeneration import echo, scripted
from engine.data.asked_rows import Part

batches = []
def decode(prompts, most):
    batches.append(prompts)
    if len(batches) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return [echo(prompt) for prompt in prompts]

answer(Path(sys.argv[1]), scripted(echo, decode=decode, batch=2), Part(1, 3))
"""


def test_a_killed_part_goes_on_and_a_missing_one_is_answered_at_the_end(tmp_path: Path) -> None:
    rows = questions(40)
    run(tmp_path / "whole", rows, scripted(echo))
    folder = tmp_path / "parts"
    write(folder, rows)
    killed = [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent)]
    assert subprocess.run(killed, capture_output=True).returncode == -9
    written = 0

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        nonlocal written
        written += len(prompts)
        return [echo(prompt) for prompt in prompts]

    first, printed = answer(folder, scripted(echo, decode=decode), Part(1, 3))
    assert (
        first.resumed == 4 and written == first.answers - 4 and "4 answers of an earlier attempt" in printed
    )
    third, _ = answer(folder, scripted(echo, decode=decode), Part(3, 3))
    written = 0
    _, printed = run(folder, rows, scripted(echo, decode=decode))
    total = content(folder)[1]["answers"]
    assert written == total - first.answers - third.answers > 0
    assert f"part 1/3 gave {first.answers} answers" in printed and "of 3 parts, 2 left no file" in printed
    assert content(folder) == content(tmp_path / "whole")


def test_documents_of_fewer_rows_leave_the_answers_of_the_others(tmp_path: Path) -> None:
    rows = questions(30)
    write(tmp_path, rows)
    parts = [answer(tmp_path, scripted(echo), Part(number, 2))[0].answers for number in (1, 2)]
    assert sum(parts) == 40
    _, printed = run(tmp_path, rows[:3], scripted(echo))
    kept = sorted(path.name for path in tmp_path.glob(".out.answers-*"))
    assert len(kept) == 2 and printed.count("were not asked for by this input") == 2

    run(tmp_path, rows, scripted(echo, decode=never), overwrite=True)
    assert content(tmp_path)[1]["answers"] == 40 and not list(tmp_path.glob(".out.answers-*"))


def test_another_number_of_parts_answers_only_what_is_missing(tmp_path: Path) -> None:
    rows = questions(30)
    write(tmp_path, rows)
    written = 0

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        nonlocal written
        written += len(prompts)
        return [echo(prompt) for prompt in prompts]

    writer = scripted(echo, decode=decode)
    half, _ = answer(tmp_path, writer, Part(1, 2))
    assert 0 < half.answers == written < 40
    for number in (1, 2, 3, 4):
        quarter, printed = answer(tmp_path, writer, Part(number, 4))
        assert quarter.resumed == (quarter.answers if number in (1, 3) else 0)
        assert (f"{half.answers} answers to be used where they fit" in printed) == (number in (1, 3))
    assert written == 40
    _, printed = run(tmp_path, rows, writer)
    assert written == 40 and "left no file" not in printed and "not asked for" not in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_the_share_that_two_parts_have_in_common_is_that_of_their_rows() -> None:
    rows = [parse_asked("", json.dumps(row).encode(), 1024) for row in questions(400)]
    for part, other in ((Part(1, 4), Part(1, 2)), (Part(4, 6), Part(2, 4)), (Part(2, 3), Part(1, 2))):
        theirs = [part.has(row) for row in rows if other.has(row)]
        assert abs(sum(theirs) / len(theirs) - part.share_of(other)) < 0.1
    assert [Part(1, 4).share_of(Part(number, 2)) for number in (1, 2)] == [0.5, 0.0]
    assert [Part(2, 2).share_of(Part(number, 4)) for number in (1, 2, 3, 4)] == [0.0, 1.0, 0.0, 1.0]
    assert Part(2, 4).share_of(Part(1, 4)) == 0.0 and Part(2, 4).share_of(None) == 0.25


def test_begun_with_4_together_and_resumed_with_7_the_documents_are_the_same(tmp_path: Path) -> None:
    rows = questions(9)
    run(tmp_path / "whole", rows, of_target(temperature=1.0, most=16))
    writer = of_target(temperature=1.0, most=16, batch=4)
    calls = 0

    def interrupted(prompts: list[list[int]], most: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return writer.decode(prompts, most)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed", rows, attrs.evolve(writer, decode=interrupted))
    _, printed = run(tmp_path / "resumed", rows, of_target(temperature=1.0, most=16, batch=7))
    assert "4 of them by an earlier attempt" in printed
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")


def test_batches_have_room_beside_their_longest_text(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [5] * length} for length in (*range(2, 12), 100)]
    batches: list[list[int]] = []

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        batches.append(sorted(map(len, prompts)))
        return [echo(prompt) for prompt in prompts]

    def room(prompt: list[int], length: int) -> int:
        assert length == min(len(prompt) + 20, 110)
        return max(1, 120 // length)

    writer = scripted(echo, decode=decode, batch=8, room=room, max_new_tokens=20)
    run(tmp_path, rows, writer, max_length=110)
    assert batches == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11], [100]]
    for batch in batches:
        assert len(batch) <= room([5] * batch[-1], min(batch[-1] + 20, 110))


def test_what_a_device_has_room_for_is_found_once_for_like_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_with_room(target())([1], 300) == TOGETHER_ON_CPU
    lengths: list[int] = []

    def together(target: object, prompt: list[int], length: int) -> int:
        lengths.append(length)
        return 4096 // length

    monkeypatch.setattr("engine.regenerate.rows_together", together)
    room = rows_with_room(target())
    assert [room([1], length) for length in (1, 256, 257, 500)] == [16, 16, 8, 8] and lengths == [256, 512]


def test_rows_that_ask_nothing_are_refused_before_any_answer(tmp_path: Path) -> None:
    rows = [*questions(4), {"text": "x"}]
    write(tmp_path, rows)

    with pytest.raises(DataError, match="1 of 5 rows are bad"):
        answer(tmp_path, scripted(echo, decode=never), Part(1, 2))
    with pytest.raises(DataError, match="1 of 5 rows are bad"):
        run(tmp_path, rows, scripted(echo, decode=never))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_no_part_is_answered_for_documents_that_are_there(tmp_path: Path) -> None:
    run(tmp_path, questions(3), scripted(echo))
    with pytest.raises(DataError, match="holds files already"):
        answer(tmp_path, scripted(echo, decode=never), Part(1, 2))
    assert answer(tmp_path, scripted(echo), Part(1, 1), overwrite=True)[0].answers == 4


@pytest.mark.parametrize(
    "there, options",
    [
        ("nothing", {"held_out": 1.5}),
        ("nothing", {"held_out": 0.0}),
        ("nothing", {"max_bad": 2.0}),
        ("nothing", {"max_length": 1}),
        ("file", {}),
        ("file", {"overwrite": True}),
        ("other", {}),
        ("other", {"overwrite": True}),
    ],
    ids=str,
)
def test_what_the_documents_would_be_refused_for_refuses_a_part(
    tmp_path: Path, there: str, options: dict[str, Any]
) -> None:
    write(tmp_path, questions(3))
    if there == "file":
        (tmp_path / "out").write_text("mine")
    elif there == "other":
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("")
    refused = []
    for part in (True, False):
        with pytest.raises(DataError) as error:
            if part:
                answer(tmp_path, scripted(echo, decode=never), Part(1, 2), **options)
            else:
                run(tmp_path, questions(3), scripted(echo, decode=never), **options)
        refused.append(str(error.value))
    assert refused[0] == refused[1] and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/2/3", "-1/2"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="I-th of N"):
        Part.parse(text)


def test_the_command_answers_parts_and_then_makes_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path, questions(6))
    flags = ["--answers", "target", "--target", TINY_HYBRID, "--max-new-tokens", 4, "--dtype", "float32"]
    given = [rows, *flags, "--device", "cpu", "--output", tmp_path / "out", "--held-out", "0.3"]
    for part in ("1/2", "2/2"):
        code, printed = command(monkeypatch, capsys, *given, "--part", part)
        assert code == 0 and f"part {part}:" in printed, printed
    code, printed = command(monkeypatch, capsys, *given, "--part", "1/2", "--held-out", "1.5")
    assert code == 2 and "held_out = 1.5" in printed, printed
    code, printed = command(monkeypatch, capsys, *given, "--max-new-tokens", 5)
    assert code == 2 and "max_new_tokens 4" in printed, printed
    code, printed = command(monkeypatch, capsys, *given)
    assert code == 0 and "part 1/2 gave" in printed and (tmp_path / "out" / "held_out").is_dir(), printed
    code, printed = command(monkeypatch, capsys, rows, "--output", tmp_path / "b", "--part", "1/2")
    assert code == 2 and "--part: only with --answers target" in printed
