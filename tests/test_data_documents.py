"""Documents on disk: what is written is what is read, and what is damaged is named."""

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.documents import (
    answer_id,
    assert_disjoint,
    content_id,
    open_documents,
    split_by_answer,
    write_documents,
)
from engine.data.fresh_folder import INCOMPLETE
from engine.data.manifest import MANIFEST, read_manifest
from engine.errors import DataError, DiskError

Rows = list[tuple[list[int], list[int]]]


def some_rows(count: int, seed: int = 0) -> Rows:
    """Rows of 2 to 30 tokens below 100, the last third of each supervised."""
    generator = np.random.default_rng(seed)
    rows: Rows = []
    for length in generator.integers(2, 31, count).tolist():
        supervised = max(1, length // 3)
        ids = generator.integers(0, 100, length).tolist()
        rows.append((ids, [0] * (length - supervised) + [1] * supervised))
    return rows


row_lists = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), min_size=1, max_size=20),
    min_size=1,
    max_size=20,
).filter(lambda rows: any(mask for row in rows for _, mask in row[1:]))


@settings(max_examples=25, deadline=None)
@given(rows=row_lists, rows_per_shard=st.integers(1, 8))
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[int, int]]], rows_per_shard: int
) -> None:
    folder = tmp_path_factory.mktemp("documents") / "out"
    pairs: Rows = [([entry[0] for entry in row], [entry[1] for entry in row]) for row in rows]
    manifest = write_documents(folder, pairs, rows_per_shard=rows_per_shard)
    documents = open_documents(folder)
    assert len(documents) == len(pairs) == manifest.documents
    assert documents.lengths.tolist() == [len(ids) for ids, _ in pairs]
    for index, (ids, mask) in enumerate(pairs):
        document = documents.document(index)
        assert document.input_ids.dtype == np.int64 and document.loss_mask.dtype == bool
        assert document.input_ids.tolist() == ids and document.loss_mask.tolist() == [bool(m) for m in mask]
        assert document.content_id == content_id(ids, mask) == documents.content_ids[index]
        assert documents.answer_ids[index] == answer_id(ids, mask)
        learnable = [place for place, entry in enumerate(mask) if entry and place > 0]
        assert documents.first_labels[index] == (learnable[0] if learnable else -1)
    assert len(manifest.shards) == -(-len(pairs) // rows_per_shard)


def test_the_manifest_counts_what_the_rows_hold(tmp_path: Path) -> None:
    rows: Rows = [([5, 6, 7], [0, 1, 1]), ([9, 5], [0, 1]), ([5, 6, 7], [0, 1, 1])]
    manifest = write_documents(
        tmp_path / "out", rows, tokenizer_fingerprint="abc", vocab_size=10, source={"a": 1}
    )
    assert (manifest.documents, manifest.tokens, manifest.supervised_tokens) == (3, 8, 5)
    assert manifest.duplicates == 1
    assert manifest.ids == [5, 6, 7, 9]
    assert (manifest.lengths.min, manifest.lengths.max, manifest.lengths.median) == (2, 3, 3)
    assert manifest.lengths.histogram == [(2, 1), (4, 2)]
    assert (manifest.tokenizer_fingerprint, manifest.vocab_size, manifest.source) == ("abc", 10, {"a": 1})
    documents = open_documents(tmp_path / "out")
    assert documents.manifest == manifest == read_manifest(tmp_path / "out")
    assert documents.fingerprint == manifest.fingerprint


def test_ids_are_a_blake2b_of_content_below_63_bits() -> None:
    payload = np.array([3, 4, 5], "<i4").tobytes() + bytes([0, 1, 1])
    expected = int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little") >> 1
    assert content_id([3, 4, 5], [0, 1, 1]) == expected
    assert 0 <= expected < 2**63
    assert content_id([3, 4, 5], [0, 0, 1]) != expected
    assert content_id([3, 5, 4], [0, 1, 1]) != expected


def test_equal_answers_to_different_prompts_share_an_answer_id() -> None:
    assert answer_id([1, 2, 8, 9], [0, 0, 1, 1]) == answer_id([7, 8, 9], [0, 1, 1])
    assert answer_id([1, 2, 8, 9], [0, 0, 1, 1]) != answer_id([1, 2, 9, 8], [0, 0, 1, 1])


def test_a_failure_while_writing_leaves_no_folder(tmp_path: Path) -> None:
    def rows() -> Iterator[tuple[list[int], list[int]]]:
        yield [1, 2], [0, 1]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_documents(tmp_path / "out", rows())
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writing_is_never_taken_for_documents(tmp_path: Path) -> None:
    program = (
        "import os, sys; from engine.data.documents import write_documents\n"
        "def rows():\n"
        "    for _ in range(9): yield [1, 2], [0, 1]\n"
        "    os._exit(9)\n"
        f"write_documents({str(tmp_path / 'out')!r}, rows(), rows_per_shard=3)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.iterdir()
    assert list(left.glob("*.arrow"))
    with pytest.raises(DataError, match="cut off"):
        open_documents(left)


def test_an_unwritable_place_is_found_before_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked: list[bool] = []

    def rows() -> Iterator[tuple[list[int], list[int]]]:
        asked.append(True)
        yield [1, 1], [0, 1]

    for folder in (tmp_path / "file" / "out", tmp_path / "file", Path("/proc/out")):
        with pytest.raises(DataError, match=str(folder)):
            write_documents(folder, rows())
    assert not asked


def test_a_missing_parent_folder_is_created(tmp_path: Path) -> None:
    write_documents(tmp_path / "a" / "b" / "out", [([1, 2], [0, 1])])
    assert len(open_documents(tmp_path / "a" / "b" / "out")) == 1


def test_a_full_disk_is_a_disk_error_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(DiskError, match="out"):
            write_documents(tmp_path / "out", (([1] * 1000, [1] * 1000) for _ in range(50)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_folder_is_replaced_only_when_asked_and_if_it_holds_documents(
    tmp_path: Path,
) -> None:
    write_documents(tmp_path / "out", [([1, 2], [0, 1])])
    with pytest.raises(DataError, match="holds files already"):
        write_documents(tmp_path / "out", [([3, 4], [0, 1])])
    write_documents(tmp_path / "out", [([3, 4], [0, 1])], overwrite=True)
    assert open_documents(tmp_path / "out").document(0).input_ids.tolist() == [3, 4]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="will not be overwritten"):
        write_documents(tmp_path / "thesis", [([3, 4], [0, 1])], overwrite=True)
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (([1, 2], [0]), "2 entries and loss_mask 1"),
        (([], []), "no tokens"),
        (([1, -2], [0, 1]), r"input_ids\[1\] = -2"),
        (([1, 50], [0, 1]), r"input_ids\[1\] = 50: ids lie in \[0, 50\)"),
        (([1, 2], [0, 2]), r"loss_mask\[1\] = 2"),
        (([1.5, 2.0], [0, 1]), "must be integers"),
    ],
)
def test_a_malformed_row_is_refused_with_its_number(
    tmp_path: Path, row: tuple[list[int], list[int]], complaint: str
) -> None:
    with pytest.raises(DataError, match=f"document 1 .*{complaint}"):
        write_documents(tmp_path / "out", [([1, 2], [0, 1]), row], vocab_size=50)


def test_nothing_to_write_and_nothing_to_learn_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"out: no documents"):
        write_documents(tmp_path / "out", [])
    with pytest.raises(DataError, match=r"out: no document has a supervised token"):
        write_documents(tmp_path / "out", [([1, 2], [0, 0]), ([1, 2], [1, 0])])
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_or_missing_shard_is_named(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", some_rows(30), rows_per_shard=10)
    shard = tmp_path / "out" / "shard-00001.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"shard-00001.arrow: corrupt or truncated"):
        open_documents(tmp_path / "out")
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00001.arrow: missing"):
        open_documents(tmp_path / "out")


def test_a_shard_of_the_right_size_with_other_tokens_is_found_when_read(tmp_path: Path) -> None:
    rows: Rows = [([17] * 64, [0] * 32 + [1] * 32), ([18] * 64, [0] * 32 + [1] * 32)]
    write_documents(tmp_path / "out", rows)
    shard = tmp_path / "out" / "shard-00000.arrow"
    whole = bytearray(shard.read_bytes())
    place = whole.index(np.full(64, 18, "<i4").tobytes())
    whole[place + 8] = 19
    shard.write_bytes(whole)
    documents = open_documents(tmp_path / "out")
    documents.document(0)
    with pytest.raises(DataError, match=r"shard-00000.arrow, row 1: tokens don't match"):
        documents.document(1)


def test_shards_that_were_exchanged_are_found_when_opened(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [([1, 2], [0, 1])])
    write_documents(tmp_path / "b", [([3, 4], [0, 1])])
    name = "shard-00000.arrow"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(DataError, match="don't match"):
        open_documents(tmp_path / "a")


def test_a_corrupt_manifest_is_named(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", [([1, 2], [0, 1])])
    path = tmp_path / "out" / MANIFEST
    for text in (
        '{"format": ',
        '{"format": "something else"}',
        '{"format": "dflash-engine documents 1"}',
        "3",
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=MANIFEST):
            open_documents(tmp_path / "out")


def test_a_manifest_tells_at_opening_what_does_not_fit_the_target(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", [([1, 70], [0, 1])])
    open_documents(tmp_path / "out", vocab_size=71, mask_token_id=69)
    with pytest.raises(DataError, match="token id 70 and the target's vocabulary ends at 69"):
        open_documents(tmp_path / "out", vocab_size=70)
    with pytest.raises(DataError, match="mask_token_id 70 occurs"):
        open_documents(tmp_path / "out", mask_token_id=70)


def test_a_selection_is_a_view_in_the_order_asked_for(tmp_path: Path) -> None:
    rows = some_rows(20)
    write_documents(tmp_path / "out", rows, rows_per_shard=6)
    documents = open_documents(tmp_path / "out")
    chosen = documents.select([13, 2, 7]).select([2, 0])
    assert [chosen.document(index).input_ids.tolist() for index in range(2)] == [rows[7][0], rows[13][0]]
    assert chosen.lengths.tolist() == [len(rows[7][0]), len(rows[13][0])]
    assert chosen.manifest is None and chosen.fingerprint != documents.fingerprint
    assert len(documents.select([])) == 0


def test_the_split_puts_equal_answers_on_one_side_whatever_the_order(tmp_path: Path) -> None:
    # 60 answers, each given to five prompts.
    rows: Rows = [([prompt, 90, answer, answer], [0, 0, 1, 1]) for answer in range(60) for prompt in range(5)]
    write_documents(tmp_path / "out", rows)
    write_documents(tmp_path / "reversed", rows[::-1])
    train, held_out = split_by_answer(open_documents(tmp_path / "out"), 0.3)
    assert len(train) + len(held_out) == 300
    assert not set(train.answer_ids.tolist()) & set(held_out.answer_ids.tolist())
    assert 30 <= len(held_out) <= 150
    assert_disjoint(train, held_out)
    _, again = split_by_answer(open_documents(tmp_path / "reversed"), 0.3)
    assert set(again.content_ids.tolist()) == set(held_out.content_ids.tolist())
    smaller = split_by_answer(open_documents(tmp_path / "out"), 0.1)[1]
    assert set(smaller.answer_ids.tolist()) < set(held_out.answer_ids.tolist())


def test_a_split_with_an_empty_side_or_a_fraction_out_of_range_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", [([prompt, 2], [0, 1]) for prompt in range(9)])
    with pytest.raises(DataError, match=r"of 9 documents \(1 distinct answers\)"):
        split_by_answer(open_documents(tmp_path / "out"), 0.5)
    for fraction in (0.0, 1.0, -0.1, 2.0):
        with pytest.raises(DataError, match="between 0 and 1"):
            split_by_answer(open_documents(tmp_path / "out"), fraction)


def test_a_held_out_answer_that_occurs_in_training_is_counted(tmp_path: Path) -> None:
    write_documents(tmp_path / "train", [([1, 8, 9], [0, 1, 1]), ([1, 7], [0, 1])])
    held_out: Rows = [([2, 8, 9], [0, 1, 1]), ([3, 8, 9], [0, 1, 1]), ([1, 6], [0, 1])]
    write_documents(tmp_path / "held_out", held_out)
    with pytest.raises(DataError, match=r"2 of 3 held-out documents \(1 distinct answers\)"):
        assert_disjoint(open_documents(tmp_path / "train"), open_documents(tmp_path / "held_out"))


_OPEN_A_MILLION = """
import sys, time
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024
from engine.data.documents import open_documents
before, start = resident(), time.perf_counter()
documents = open_documents(sys.argv[1], vocab_size=100, mask_token_id=99)
for index in range(0, len(documents), len(documents) // 100): documents.document(index)
print(len(documents), time.perf_counter() - start, resident() - before)
"""


@pytest.mark.slow
def test_a_million_rows_open_in_seconds_and_under_a_gigabyte(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pool = generator.integers(0, 99, 100_000, dtype=np.int32)
    starts = generator.integers(0, 99_000, 1_000_000).tolist()
    lengths = generator.integers(20, 200, 1_000_000).tolist()
    mask = np.array([0] * 15 + [1] * 200, dtype=np.uint8)
    rows = ((pool[at : at + n], mask[:n]) for at, n in zip(starts, lengths, strict=True))
    write_documents(tmp_path / "ours", rows, vocab_size=99)
    (tmp_path / "theirs").mkdir()
    for shard in (tmp_path / "ours").glob("*.arrow"):
        os.link(shard, tmp_path / "theirs" / shard.name)
    for folder, seconds in (("ours", 5.0), ("theirs", 30.0)):
        command = [sys.executable, "-c", _OPEN_A_MILLION, str(tmp_path / folder)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        count, took, grown = (float(number) for number in result.stdout.split())
        print(f"{folder}: {count:.0f} rows in {took:.2f} s, {grown:.0f} MB more resident")
        assert count == 1_000_000
        assert took < seconds
        assert grown < 1000


def test_a_folder_marked_incomplete_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", [([1, 2], [0, 1])])
    (tmp_path / "out" / INCOMPLETE).touch()
    with pytest.raises(DataError, match="cut off"):
        open_documents(tmp_path / "out")
