"""Answers of the target's own: in their context, resumable, the same whatever stands beside them."""

import contextlib
import io
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from rich.console import Console

from engine import cli
from engine.builtin import TINY_HYBRID, resolve
from engine.builtin.text import conversation
from engine.data.chat import BadRow, Tokens, load_tokenizer
from engine.data.chat import decode as decode_text
from engine.data.documents import Documents, open_documents
from engine.data.manifest import read_manifest
from engine.data.preparation import DUPLICATE, _keep, prepare
from engine.data.regeneration import AnswerWriter, settings_of
from engine.data.report import Report
from engine.errors import InputError
from engine.regenerate import answer_writer, check_tokenizer
from engine.target.configuration import read_target_config
from engine.target.loading import Target, load_target
from tools.write_builtin_conversations import greedy

FOLDER = resolve(TINY_HYBRID)
END = 2
LIMIT = 64


@cache
def target() -> Target:
    return load_target(
        FOLDER,
        target_layer_ids=[0],
        dtype=torch.float32,
        device=torch.device("cpu"),
        keep_head=True,
    )


def of_target(*, temperature: float = 0.0, batch: int = 8, seed: int = 0, most: int = LIMIT) -> AnswerWriter:
    return answer_writer(
        target(),
        {"target": "tiny", "temperature": temperature},
        temperature=temperature,
        max_new_tokens=most,
        batch=batch,
        seed=seed,
    )


def scripted(answer: Callable[[list[int]], list[int]], **changes: Any) -> AnswerWriter:
    """Answers that are a function of the prompt: where it matters only what becomes of them."""
    values: dict[str, Any] = {
        "decode": lambda prompts, most: [answer(prompt)[:most] for prompt in prompts],
        "stop": frozenset({END}),
        "positions": 2048,
        "max_new_tokens": LIMIT,
        "batch": 4,
        "facts": {"target": "scripted"},
        "agreement": lambda documents: (1, 2),
    }
    return AnswerWriter(**values | changes)


def echo(prompt: list[int]) -> list[int]:
    return [100 + len(prompt) % 50, 200, END]


def questions(count: int) -> list[dict[str, Any]]:
    """Conversations of one question, every third of two; every fourth lacks its last answer."""
    rows = []
    for number in range(count):
        turns = []
        for further in range(2 if number % 3 == 0 else 1):
            prompt = conversation(5, 3_000_000 + 1000 * further + number).prompt
            turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": "never read"}]
        rows.append({"messages": turns[:-1] if number % 4 == 0 else turns})
    return rows


def run(
    folder: Path, rows: Sequence[Any], writer: AnswerWriter, tokenizer: Path = FOLDER, **options: Any
) -> tuple[Report, str]:
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    screen = io.StringIO()
    report = prepare(
        [folder / "in.jsonl"],
        tokenizer,
        folder / "out",
        answer_writer=writer,
        console=Console(file=screen, width=200),
        **options,
    )
    return report, screen.getvalue()


def answers(documents: Documents) -> Iterator[tuple[list[int], list[int]]]:
    """Every supervised run with all ids before it."""
    for index in range(len(documents)):
        document = documents.document(index)
        ids, mask = document.input_ids.tolist(), [*document.loss_mask.tolist(), False]
        begin = None
        for at, supervised in enumerate(mask):
            if supervised and begin is None:
                begin = at
            elif not supervised and begin is not None:
                yield ids[:begin], ids[begin:at]
                begin = None


def test_every_answer_is_what_the_target_says_in_its_context(tmp_path: Path) -> None:
    rows = questions(4)
    report, printed = run(tmp_path, rows, of_target())
    documents = open_documents(tmp_path / "out")
    found = list(answers(documents))
    assert (report.kept, len(found)) == (4, 6)
    for before, answer in found:
        assert greedy(target().model, torch.tensor([before]), LIMIT, END) == [answer]
    tokenizer = load_tokenizer(FOLDER)
    for index, row in enumerate(rows):
        text = decode_text(tokenizer, documents.document(index).input_ids.tolist())
        asked = [turn["content"] for turn in row["messages"] if turn["role"] == "user"]
        assert all(question in text for question in asked) and "never read" not in text
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    facts = manifest.source["answers"]
    assert facts["agreement"] == 1.0 and facts["answers"] == 6 and facts["temperature"] == 0.0
    assert facts["tokens"] == manifest.supervised_tokens and facts["stop"] == [END]
    assert "6 answers" in printed and "target agreement 1.000" in printed


def test_an_answer_does_not_depend_on_its_batch_or_its_place_in_the_file(tmp_path: Path) -> None:
    found = []
    rows = questions(4)[1:]
    for name, batch, order in (("one", 1, rows), ("three", 3, rows[::-1])):
        run(tmp_path / name, order, of_target(temperature=1.0, batch=batch, most=32))
        found.append(sorted(open_documents(tmp_path / name / "out").content_ids.tolist()))
    assert found[0] == found[1]


def test_other_seeds_and_temperatures_draw_other_answers(tmp_path: Path) -> None:
    rows = questions(1)
    found = []
    for name, temperature, seed in (("a", 3.0, 0), ("b", 3.0, 1), ("c", 0.0, 0)):
        run(tmp_path / name, rows, of_target(temperature=temperature, seed=seed, most=16))
        found.append(open_documents(tmp_path / name / "out").fingerprint)
    assert len(set(found)) == 3


KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[3]]
from pathlib import Path
from test_regeneration import echo, scripted
from engine.data.preparation import prepare

batches = []
def decode(prompts, most):
    batches.append(prompts)
    if len(batches) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return [echo(prompt) for prompt in prompts]

prepare([Path(sys.argv[1])], sys.argv[2], Path(sys.argv[1]).parent / "out",
        answer_writer=scripted(echo, decode=decode))
"""


def test_after_a_kill_the_same_command_writes_what_is_missing_and_ends_as_if_unbroken(tmp_path: Path) -> None:
    rows = questions(20)
    run(tmp_path / "whole", rows, scripted(echo))
    whole = open_documents(tmp_path / "whole" / "out").fingerprint

    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(folder / "in.jsonl"),
        str(FOLDER),
        str(Path(__file__).parent),
    ]
    assert subprocess.run(command, capture_output=True).returncode == -9
    assert not (folder / "out").exists()
    (kept,) = folder.glob(".out.answers-*.jsonl")
    settings, *lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 * (4 + 1) and b"scripted" in settings
    kept.write_bytes(settings + b"".join(lines) + lines[0] + lines[1][:9])  # a batch that was being written

    asked: list[list[int]] = []

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        asked.extend(prompts)
        return [echo(prompt) for prompt in prompts]

    report, printed = run(folder, rows, scripted(echo, decode=decode))
    assert "8 answers of an earlier attempt" in printed and "8 of them by an earlier attempt" in printed
    assert len(asked) == 27 - 8 and report.rows == 20
    assert open_documents(folder / "out").fingerprint == whole
    assert not kept.exists()


def test_an_interruption_keeps_the_answers_and_says_so(tmp_path: Path) -> None:
    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        if len(prompts[0]) > 25:
            raise KeyboardInterrupt
        return [echo(prompt) for prompt in prompts]

    rows = [{"prompt_ids": list(range(10, 10 + length))} for length in range(20, 30)]
    screen = io.StringIO()
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(KeyboardInterrupt):
        prepare(
            [tmp_path / "in.jsonl"],
            FOLDER,
            tmp_path / "out",
            answer_writer=scripted(echo, decode=decode),
            console=Console(file=screen),
        )
    assert "8 answers kept in" in screen.getvalue()
    assert not (tmp_path / "out").exists()


def test_whatever_an_answer_depends_on_decides_the_file_it_is_kept_in() -> None:
    writers = [
        scripted(echo),
        scripted(echo, facts={"target": "other"}),
        scripted(echo, max_new_tokens=LIMIT + 1),
        scripted(echo, stop=frozenset({END, 7})),
    ]
    settings = [settings_of(writer, None) for writer in writers] + [settings_of(writers[0], 40)]
    assert all(one != other for one, other in itertools.combinations(settings, 2))
    assert settings_of(scripted(echo, batch=1), None) == settings[0]


def test_answers_that_reach_the_limit_are_kept_without_an_end_and_end_their_conversation(
    tmp_path: Path,
) -> None:
    report, printed = run(tmp_path, questions(3), scripted(lambda prompt: [100] * 500))
    documents = open_documents(tmp_path / "out")
    assert [len(answer) for _, answer in answers(documents)] == [LIMIT] * 3
    assert "3 reached a limit" in printed and report.kept == 3
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest.source["answers"]["unfinished"] == 3


def test_no_answer_goes_beyond_the_longest_document(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [5] * length, "answer_ids": [9]} for length in (10, 38, 40, 41)]
    report, printed = run(tmp_path, rows, scripted(lambda prompt: [100] * 29 + [END]), max_length=40)
    assert report.kept == 2 and "1 reached a limit" in printed
    assert report.dropped == {"no supervised token within max_length": 2}
    assert open_documents(tmp_path / "out").lengths.tolist() == [40, 40]


def test_a_prompt_that_the_target_cannot_hold_is_a_bad_row(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [5] * length} for length in (8, 9, 10)]
    report, _ = run(tmp_path, rows, scripted(echo, positions=10), max_bad=0.5)
    assert report.kept == 2
    (bad,) = report.skipped
    assert (bad.where, bad.reason) == (f"{tmp_path / 'in.jsonl'}:3", "prompt longer than the target can hold")


def test_an_id_that_the_tokenizer_lacks_is_a_bad_row(tmp_path: Path) -> None:
    def strange(prompt: list[int]) -> list[int]:
        return [1024 if len(prompt) == 9 else 100, END]

    rows = [{"prompt_ids": [5] * length} for length in (8, 9, 10)]
    report, _ = run(tmp_path, rows, scripted(strange), max_bad=0.5)
    assert report.kept == 2 and report.skipped[0].detail == "1024"


def test_bad_rows_keep_their_reasons_and_what_old_answers_were_does_not_matter(tmp_path: Path) -> None:
    ask = {"role": "user", "content": "hi"}
    rows: list[Any] = [
        {"messages": [ask, {"role": "assistant", "content": ""}]},  # to be answered anyway
        {"conversations": json.dumps([{"from": "human", "value": "hello"}])},
        {"messages": [ask | {"content": "so"}, {"role": "assistant", "content": "x", "tool_calls": [1]}]},
        {"messages": [{"role": "wizard", "content": "x"}, ask]},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": "nothing"},
        {"text": "x"},
        {"prompt_ids": []},
    ]
    report, _ = run(tmp_path, rows, scripted(echo), max_bad=0.9)
    assert report.kept == 3 and report.rows == 8
    assert sum(report.dropped.values()) == 5
    reasons = {bad.reason for bad in report.skipped}
    expected = {"unknown role", "no answer", "conversation is no list", "no conversation", "empty prompt"}
    assert reasons == expected


def test_a_template_that_rewrites_what_was_said_gives_a_document_per_turn(tmp_path: Path) -> None:
    thinking = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] }}"
        "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_tokenizer(FOLDER)
    tokenizer.chat_template = thinking
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    thought = tokenizer("hm</think>yes", add_special_tokens=False)["input_ids"]
    turns = [{"role": "user", "content": word} for word in ("one", "two", "three")]
    rows = [
        {"messages": [turns[0], {"role": "assistant", "content": "-"}, turns[1]]},
        {"messages": turns[2:]},
    ]
    report, printed = run(tmp_path, rows, scripted(lambda prompt: [*thought, END]), tmp_path / "tokenizer")
    assert (report.rows, report.kept) == (2, 3)
    assert "3 answers of" in printed and "1 turn began another document" in printed
    found = list(answers(open_documents(tmp_path / "out")))
    assert [answer for _, answer in found] == [[*thought, END]] * 3
    again = [turns[0], {"role": "assistant", "content": "hm</think>yes"}, turns[1]]
    text = tokenizer.apply_chat_template(again, tokenize=False, add_generation_prompt=True)
    assert "hm" not in text
    assert found[1][0] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_rows_kept_and_dropped_are_all_rows_where_turns_become_documents(tmp_path: Path) -> None:
    def kept_apart(turns: list[str]) -> tuple[str, list[Tokens | BadRow]]:
        ids = [(np.array([1, *map(ord, turn)]), np.array([False] + [True] * len(turn))) for turn in turns]
        return "".join(turns), [Tokens(*one) for one in ids]

    rows = [kept_apart(turns) for turns in (["a", "b"], ["b", "c"], ["a", "c"], ["d"])]
    report = Report(tmp_path)
    given = [(where, document) for where, documents in rows for document in documents]
    kept = _keep([*given, ("bad", BadRow("no good"))], None, set(), report)
    report.kept = len(kept)
    assert (report.rows, report.rows_kept, report.kept) == (5, 3, 4)
    assert report.rows_kept + sum(report.dropped.values()) == report.rows
    assert report.dropped == {DUPLICATE: 1, "no good": 1} and report.left_out == {DUPLICATE: 1}
    assert len(report.skipped) == 1
    screen = io.StringIO()
    Console(file=screen, width=100).print(report.tables()[0])
    words = " ".join(screen.getvalue().split())
    assert "kept │ 3" in words and "documents these gave │ 4" in words
    assert f"documents left out of them: {DUPLICATE} │ 1" in words


def test_equal_prompts_are_answered_once(tmp_path: Path) -> None:
    asked = 0

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        nonlocal asked
        asked += len(prompts)
        return [echo(prompt) for prompt in prompts]

    rows = [{"prompt_ids": [5] * 9}] * 300  # more than are read at once
    report, _ = run(tmp_path, rows, scripted(echo, decode=decode))
    assert (asked, report.kept, report.dropped["duplicate of an earlier row"]) == (1, 1, 299)


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: object
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["engine", "prepare", *map(str, given)])
    try:
        cli.main()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_the_command_writes_documents_that_name_their_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions(2)))
    flags = ["--target", TINY_HYBRID, "--max-new-tokens", 8, "--dtype", "float32", "--device", "cpu"]
    code, printed = command(
        monkeypatch,
        capsys,
        tmp_path / "in.jsonl",
        "--answers",
        "target",
        *flags,
        "--output",
        tmp_path / "out",
    )
    assert code == 0, printed
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    facts = manifest.source["answers"]
    assert facts["target"] == "tiny_hybrid" and len(facts["weights"]) == 32
    assert (facts["max_new_tokens"], facts["dtype"], facts["seed"]) == (8, "float32", None)
    assert str(tmp_path) not in json.dumps(manifest.source)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--answers", "target"], "--target"),
        (["--tokenizer", TINY_HYBRID, "--temperature", "1"], "--temperature: only with --answers target"),
        (["--target", TINY_HYBRID, "--batch", "2"], "--target, --batch: only with"),
        (["--tokenizer", TINY_HYBRID, "--trust-remote-code"], "--trust-remote-code: only with"),
        ([], "--tokenizer: needed"),
        (["--answers", "target", "--target", TINY_HYBRID, "--device", "cuda:77"], "cuda:77"),
        (["--answers", "target", "--target", "nowhere"], "nowhere"),
        (  # said before a target is looked for
            ["--answers", "target", "--target", "nowhere", "--temperature", "1e-5"],
            "temperature = 1e-05",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    words: str,
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(questions(1)[0]) + "\n")
    code, printed = command(monkeypatch, capsys, tmp_path / "in.jsonl", "--output", tmp_path / "out", *flags)
    assert code == 2 and words in printed, printed
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_not_the_targets_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(questions(1)[0]) + "\n")
    tokenizer = load_tokenizer(FOLDER)
    tokenizer.save_pretrained(tmp_path / "same")
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path / "other")
    flags = ["--answers", "target", "--target", TINY_HYBRID, "--max-new-tokens", 2, "--device", "cpu"]
    given = [tmp_path / "in.jsonl", "--output", tmp_path / "out", *flags, "--tokenizer"]
    with monkeypatch.context() as nothing:
        nothing.setattr("engine.regenerate.load_target", None)
        code, printed = command(monkeypatch, capsys, *given, tmp_path / "other")
    assert code == 2 and f"--tokenizer {tmp_path / 'other'}" in printed and "leave --tokenizer out" in printed
    assert not (tmp_path / "out").exists()
    assert command(monkeypatch, capsys, *given, tmp_path / "same")[0] == 0


def test_beside_a_target_without_a_tokenizer_ids_must_fit_its_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(FOLDER)
    tokenizer.save_pretrained(tmp_path / "fits")
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path / "larger")
    bare = attrs.evolve(read_target_config(FOLDER), folder=tmp_path)
    check_tokenizer(tmp_path / "fits", bare)
    with pytest.raises(InputError, match="has 1025 ids.* ends at 1023"):
        check_tokenizer(tmp_path / "larger", bare)


@pytest.mark.parametrize("trust", [False, True])
def test_code_in_the_targets_folder_runs_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trust: bool
) -> None:
    def load(folder: Path, *, trust_remote_code: bool, **settings: Any) -> None:
        raise InputError(f"code trusted: {trust_remote_code}")

    monkeypatch.setattr("engine.regenerate.load_target", load)
    (tmp_path / "in.jsonl").write_text(json.dumps(questions(1)[0]) + "\n")
    flags = ["--answers", "target", "--target", TINY_HYBRID, "--device", "cpu", "--output", tmp_path / "out"]
    code, printed = command(
        monkeypatch, capsys, tmp_path / "in.jsonl", *flags, *["--trust-remote-code"] * trust
    )
    assert code == 2 and f"code trusted: {trust}" in printed, printed


def test_tuning_is_taken_up_and_kept_while_the_target_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def tuning(device: str, say: Callable[[str], None]) -> Iterator[None]:
        events.append(f"tuning on {device}")
        yield
        events.append("tuning kept")

    def loaded(folder: Path, **settings: Any) -> AnswerWriter:
        events.append("loaded")
        return scripted(echo, decode=decode)

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        events.append("answered")
        return [echo(prompt) for prompt in prompts]

    monkeypatch.setattr("engine.regenerate.earlier_tuning", tuning)
    monkeypatch.setattr("engine.regenerate.load_answer_writer", loaded)
    (tmp_path / "in.jsonl").write_text(json.dumps(questions(2)[1]) + "\n")
    flags = ["--answers", "target", "--target", TINY_HYBRID, "--device", "cpu", "--output", tmp_path / "out"]
    code, printed = command(monkeypatch, capsys, tmp_path / "in.jsonl", *flags)
    assert code == 0, printed
    assert events == ["tuning on cpu", "loaded", "answered", "tuning kept"]


@pytest.mark.gpu
def test_on_a_gpu_answers_agree_with_the_target_and_a_resumed_run_repeats_them(tmp_path: Path) -> None:
    gpu = load_target(
        FOLDER,
        target_layer_ids=[0],
        dtype=torch.bfloat16,
        device=torch.device("cuda:0"),
        keep_head=True,
    )
    writer = answer_writer(gpu, {"target": "tiny"}, temperature=0.0, max_new_tokens=LIMIT, batch=8, seed=0)
    rows = questions(40)
    run(tmp_path / "whole", rows, writer)
    manifest = read_manifest(tmp_path / "whole" / "out")
    assert manifest is not None and manifest.source["answers"]["agreement"] > 0.97
    calls = 0

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return writer.decode(prompts, most)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", rows, attrs.evolve(writer, decode=decode))
    run(tmp_path / "broken", rows, writer)
    whole, broken = (open_documents(tmp_path / name / "out") for name in ("whole", "broken"))
    assert whole.fingerprint == broken.fingerprint
