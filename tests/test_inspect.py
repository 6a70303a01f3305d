"""Inspection: figures that can be counted by hand, for prepared documents and for conversations."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from small_runs import small_project

from engine import cli
from engine.builtin import HELD_OUT, TINY_HYBRID, resolve
from engine.data.chat import load_tokenizer
from engine.data.documents import open_documents
from engine.data.inspection import distribution, inspect_documents, inspect_limits, sample
from engine.data.preparation import prepare
from engine.data.shards import write_documents
from engine.dflash.anchors import draw_anchors
from engine.dflash.packing import pack_row
from engine.errors import DataError, InputError
from engine.inspect_data import anchor_figures, inspect_data, look, show_tokens
from engine.planning import plan_run
from engine.schedule import load_schedule

LONG = list(range(30, 60))
ROWS: list[tuple[list[int], list[int]]] = [
    ([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]),
    ([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]),  # whole duplicate
    ([1, 9, 3, 4, 5], [0, 0, 1, 1, 1]),  # the answer again
    ([1, 2, 7, 7, 7, 7], [0, 0, 1, 1, 1, 1]),  # the prompt again
    ([8, *LONG, 10], [0] + [1] * 31),
    ([8, *LONG, 11], [0] + [1] * 31),  # the prompt, and alike at first
    ([8, 6, 8, 6, 8, 6], [0, 1, 0, 1, 1, 0]),  # two answers
    ([5, 5], [0, 0]),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_documents(tmp_path / "data", ROWS, vocab_size=96)
    return tmp_path / "data"


def test_figures_are_what_one_counts_by_hand(folder: Path) -> None:
    documents = open_documents(folder)
    found = inspect_documents(documents, sample(documents))
    assert (found.documents, found.read, found.tokens) == (8, 8, 5 * 3 + 6 + 64 + 6 + 2)
    assert (found.lengths.min, found.lengths.median, found.lengths.max) == (2, 5, 32)
    assert found.supervised_share == (9 + 4 + 62 + 3) / found.tokens
    assert (found.answers.min, found.answers.max) == (0, 2)
    assert found.answer_lengths is not None
    assert (found.answer_lengths.min, found.answer_lengths.max) == (1, 31)
    assert found.nothing_to_learn == 1
    duplicates = found.duplicates
    assert (duplicates.whole, duplicates.same_answer) == (1, 2)
    # [1, 2] occurs three times and [8] three times; once each with an answer that begins alike
    assert (duplicates.same_prompt, duplicates.near) == (4, 2)


def test_limits_tell_what_is_cut_left_out_and_too_short(folder: Path) -> None:
    documents = open_documents(folder)
    found = inspect_limits(documents, sample(documents), max_length=5, block_size=5)
    assert (found.cut, found.cut_tokens) == (4, 1 + 27 + 27 + 1)
    assert found.skipped == 1
    assert found.short == 6  # within five tokens only the long answers have four labels
    assert inspect_limits(documents, sample(documents), max_length=2, block_size=2).skipped == 5


def test_a_sample_is_a_function_of_the_content(folder: Path, tmp_path: Path) -> None:
    write_documents(tmp_path / "other", ROWS[::-1], vocab_size=96)
    ids = [
        [row.content_id for row in sample(open_documents(path), 3)] for path in (folder, tmp_path / "other")
    ]
    assert ids[0] == ids[1] and len(ids[0]) == 3


def test_a_histogram_covers_every_value_once() -> None:
    values = np.random.default_rng(0).integers(3, 400, 1000)
    found = distribution(values)
    assert found is not None
    assert sum(count for _, _, count in found.histogram) == 1000
    for low, high, count in found.histogram:
        assert count == int(((values >= low) & (values <= high)).sum())
    assert found.histogram[0][0] == values.min() and found.histogram[-1][1] == values.max()
    assert distribution(np.zeros(0, dtype=np.int64)) is None
    same = distribution(np.full(9, 4))
    assert same is not None and same.histogram == [(4, 4, 9)]


def test_anchors_are_those_that_a_run_draws(tmp_path: Path) -> None:
    schedule = load_schedule(small_project(tmp_path))
    found = anchor_figures(open_documents(tmp_path / "train"), schedule)
    batches = plan_run(schedule).train
    given: list[int] = []
    for index in range(batches.per_epoch):
        batch = batches.micro_batch(index)
        row = pack_row(batch.input_ids, batch.loss_mask, batch.lengths, batch.document_ids)
        anchors = draw_anchors(row, seed=3, epoch=0, max_anchors=schedule.data.max_anchors)
        counts = anchors.document[: anchors.used].bincount(minlength=len(batch.lengths))
        given += counts.tolist()
    assert found.micro_batches == batches.per_epoch
    assert (found.given.min, found.given.max) == (min(given), max(given))
    assert found.given.mean == pytest.approx(sum(given) / len(given))
    assert found.unused == pytest.approx(1 - sum(given) / (12 * batches.per_epoch))


def printed(data: Path | str, *arguments: Any, **options: Any) -> str:
    screen = io.StringIO()
    inspect_data(str(data), *(arguments or (None,)), output=screen, **options)
    return screen.getvalue()


def test_conversations_are_inspected_as_prepare_would_make_them(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "four"}]
    rows: list[Any] = [{"messages": turns}, {"messages": turns}, {"messages": []}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in (tmp_path / "chats.jsonl", tmp_path):
        text = printed(path, tokenizer=TINY_HYBRID)
        assert "3 rows read" in text and "duplicate of an earlier row" in text
        assert "conversation is no list" in text
        assert "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[four<|im_end|>]]" in text
        assert "\x1b" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl"]
    with pytest.raises(InputError, match="--tokenizer"):
        printed(tmp_path / "chats.jsonl")


def test_what_prepare_split_is_shown_part_by_part(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": []}]
    for number in range(40):
        turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": f"answer {number}"}]
        rows.append({"messages": turns})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = prepare(
        [tmp_path / "chats.jsonl"],
        resolve(TINY_HYBRID),
        tmp_path / "data",
        held_out=0.3,
        max_bad=1.0,
        console=Console(file=io.StringIO()),
    )
    assert (tmp_path / "data" / "skipped.jsonl").stat().st_size
    counts = {part: manifest.documents for part, manifest in made.manifests.items()}
    text = printed(tmp_path / "data", samples=1)
    for part, count in counts.items():
        assert f"{tmp_path}/data/{part}\n" in text and f"{count} documents" in text
    found = json.loads(printed(tmp_path / "data", as_json=True))
    assert {part: one["documents"] for part, one in found["parts"].items()} == counts


def test_raw_parquet_is_inspected_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ids, masks = zip(*ROWS, strict=True)
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": masks}), tmp_path / "rows.parquet")
    text = printed(tmp_path / "rows.parquet", samples=8)
    assert "8 documents, 93 tokens" in text
    assert " 1 2[[ 3 4 5]]" in text and " 8[[ 6]] 8[[ 6 8]] 6" in text


def test_special_tokens_and_answers_stand_out_in_colour_on_a_terminal() -> None:
    documents = open_documents(resolve(HELD_OUT))
    tokenizer = load_tokenizer(resolve(TINY_HYBRID))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=100)
    show_tokens(documents.document(0), 1, tokenizer, console)
    text = screen.getvalue()
    assert "\x1b[7;39m<|im_start|>\x1b[0m" in text and "\x1b[7;32m<|im_end|>\x1b[0m" in text
    assert "\x1b[32m" in text and "[[" not in text


def test_the_builtin_tokenizer_is_found_by_its_fingerprint_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    assert "<|im_start|>user" in printed(HELD_OUT, samples=1)
    tokenizer = load_tokenizer(resolve(TINY_HYBRID))
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(DataError, match="another tokenizer"):
        printed(HELD_OUT, tokenizer=str(tmp_path / "other"))


def test_the_command_gives_tables_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = small_project(tmp_path)

    def command(*given: object) -> str:
        monkeypatch.setattr(sys, "argv", ["engine", "inspect", *map(str, given)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        text = capsys.readouterr()
        assert left.value.code == 0, text.err
        return text.out

    text = command(tmp_path / "train", "--schedule", project, "--set", "data.max_length=40")
    assert "data.max_length = 40" in text and "anchors per epoch" in text and "document 2:" in text
    found = json.loads(command(tmp_path / "train", "--schedule", project, "--json"))
    looked = look(str(tmp_path / "train"), load_schedule(project), tokenizer=None, samples=0)
    assert found["documents"] == 40 and found["lengths"]["max"] == looked.figures.lengths.max
    assert found["limits"]["max_length"] == 96 and found["anchors"]["max_anchors"] == 12
    assert found["rows"] is None


def test_a_mask_token_in_the_data_is_refused_as_in_a_run(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    with pytest.raises(DataError, match="mask_token_id 5 occurs"):
        printed(tmp_path / "train", load_schedule(project, ["drafter.mask_token_id=5"]))
