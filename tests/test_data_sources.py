"""Files of other origin: the same documents whatever their format, and errors that name the file."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from engine.data.documents import (
    open_documents,
    write_documents,
)
from engine.errors import DataError

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


def table_of(rows: Rows, *, wide: bool = False) -> pa.Table:
    ids, mask = (pa.int64(), pa.bool_()) if wide else (pa.int32(), pa.uint8())
    masks = [[bool(entry) for entry in row[1]] if wide else row[1] for row in rows]
    return pa.table(
        {
            "input_ids": pa.array([row[0] for row in rows], pa.list_(ids)),
            "loss_mask": pa.array(masks, pa.list_(mask)),
        }
    )


def write_file(path: Path, table: pa.Table, batch_rows: int = 7) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.mark.parametrize("kind", ["file", "stream", "lz4", "parquet", "wide", "sliced", "two files"])
def test_files_of_other_origin_open_as_the_same_documents(tmp_path: Path, cache: Path, kind: str) -> None:
    rows = some_rows(40)
    rows[7] = (rows[7][0], [1] * len(rows[7][0]))
    rows[8] = (rows[8][0], [1] + [0] * (len(rows[8][0]) - 1))
    write_documents(tmp_path / "ours", rows)
    folder = tmp_path / "theirs"
    folder.mkdir()
    table = table_of(rows)
    if kind == "file":
        write_file(folder / "a.arrow", table)
    elif kind == "stream":
        with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    elif kind == "lz4":
        feather.write_feather(table, folder / "a.feather", compression="lz4", chunksize=7)
    elif kind == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=9)
    elif kind == "wide":
        schema = pa.schema(
            [("input_ids", pa.large_list(pa.int64())), ("loss_mask", pa.large_list(pa.bool_()))]
        )
        write_file(folder / "a.arrow", table_of(rows, wide=True).cast(schema))
    elif kind == "sliced":
        padded = table_of([*some_rows(5, seed=1), *rows, *some_rows(5, seed=2)])
        write_file(folder / "a.arrow", padded.slice(5, len(rows)))
    else:
        write_file(folder / "a.arrow", table.slice(0, 17))
        pq.write_table(table.slice(17), folder / "b.parquet")
    ours, theirs = open_documents(tmp_path / "ours"), open_documents(folder)
    assert cache.exists() == (kind in ("lz4", "parquet", "two files")), "what can be mapped is not copied"
    assert theirs.fingerprint == ours.fingerprint
    for name in ("lengths", "content_ids", "answer_ids", "first_labels"):
        assert np.array_equal(getattr(theirs, name), getattr(ours, name)), name
        assert getattr(theirs, name).dtype == np.int64
    for index in range(len(rows)):
        assert theirs.document(index).input_ids.tolist() == rows[index][0]
        assert theirs.document(index).loss_mask.tolist() == [bool(entry) for entry in rows[index][1]]
    if kind == "file":
        assert open_documents(folder / "a.arrow").fingerprint == ours.fingerprint


def test_parquet_is_converted_once_into_the_cache_and_anew_when_it_changes(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table_of(some_rows(5)), path)
    open_documents(path)
    assert f"converting once to {cache}" in capsys.readouterr().err
    assert len(open_documents(path)) == 5
    assert capsys.readouterr().err == ""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.parquet", "cache"]
    pq.write_table(table_of(some_rows(6)), path)
    assert len(open_documents(path)) == 6


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet", "a.feather"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_corrupt_file_of_other_origin_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table_of(some_rows(40)), path)
    elif name == "a.feather":
        feather.write_feather(table_of(some_rows(40)), path)
    else:
        write_file(path, table_of(some_rows(40)))
    whole = path.read_bytes()
    path.write_bytes(
        {"truncated": whole[: len(whole) * 2 // 3], "garbage": b"\x7f" * 500, "empty": b""}[damage]
    )
    with pytest.raises(DataError, match=name):
        open_documents(path)


def test_missing_and_empty_places_say_what_to_name_instead(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        open_documents(tmp_path / "nowhere")
    write_documents(tmp_path / "data" / "train", [([1, 2], [0, 1])])
    with pytest.raises(DataError, match=r"holds no .*; name one of the folders in it: train"):
        open_documents(tmp_path / "data")


@pytest.mark.parametrize("suffix", ["arrow", "stream.arrow", "parquet"])
@pytest.mark.parametrize(
    ("rows", "complaint"), [([], "(zero rows|no documents)"), ([([1, 2], [0, 0])], "mask")]
)
def test_zero_rows_and_all_zero_masks_are_named(
    tmp_path: Path, suffix: str, rows: Rows, complaint: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "arrow":
        write_file(path, table_of(rows))
    elif suffix == "parquet":
        pq.write_table(table_of(rows), path)
    else:
        with pa.ipc.new_stream(path, table_of(rows).schema) as writer:
            writer.write_table(table_of(rows))
    with pytest.raises(DataError, match=f"a.{suffix}.*{complaint}"):
        open_documents(path)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"input_ids": [[1, 2]]}, "no column loss_mask"),
        ({"text": ["a"]}, "no column input_ids; its columns are text"),
        ({"input_ids": ["a"], "loss_mask": [[1]]}, "input_ids is string"),
        ({"input_ids": [[0.5]], "loss_mask": [[1]]}, "input_ids is list<"),
        (
            {"input_ids": [[1, 2], [1, 2, 3]], "loss_mask": [[0, 1], [0, 1]]},
            "row 1: .* loss_mask 2",
        ),
        ({"input_ids": [[1, 2], None], "loss_mask": [[0, 1], [0]]}, "1 rows have no input_ids"),
        ({"input_ids": [[1, None]], "loss_mask": [[0, 1]]}, "null entries"),
    ],
)
def test_columns_that_do_not_fit_are_refused_at_opening(
    tmp_path: Path, columns: dict[str, list[object]], complaint: str
) -> None:
    write_file(tmp_path / "a.arrow", pa.table(columns))
    with pytest.raises(DataError, match=f"a.arrow.*{complaint}"):
        open_documents(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (([1, 99], [0, 1]), r"row 8: input_ids\[1\] = 99: ids lie in \[0, 50\)"),
        (([1, -1], [0, 1]), r"row 8: input_ids\[1\] = -1"),
        (([1, 2], [0, 7]), r"row 8: loss_mask\[1\] = 7"),
        (([1, 49], [0, 1]), "row 8: mask_token_id 49 occurs"),
    ],
)
def test_values_are_checked_as_documents_are_read(
    tmp_path: Path, row: tuple[list[int], list[int]], complaint: str
) -> None:
    good: Rows = [([1, 2, 3], [0, 1, 1])]
    write_file(tmp_path / "a.arrow", table_of(good * 8 + [row] + good))
    documents = open_documents(tmp_path / "a.arrow", vocab_size=50, mask_token_id=49)
    documents.document(7)
    documents.document(9)
    with pytest.raises(DataError, match=f"a.arrow, {complaint}"):
        documents.document(8)
