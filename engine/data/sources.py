"""Finding and mapping the files behind a path: Arrow IPC files and streams, Parquet.

Arrow files are memory-mapped, so opening costs the list offsets and nothing of the lists. What
can't be mapped (Parquet, compressed Arrow) is converted once to this engine's shards in the user's
cache folder. Not beside the source: data folders are often read-only or shared, and a converted
copy there would be read as more data by the next who opens the folder.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from attrs import frozen

from engine.data.fresh_folder import fresh_folder
from engine.data.manifest import FORMAT, MANIFEST
from engine.data.shards import ShardWriter
from engine.errors import DataError

SUFFIXES = (".arrow", ".feather", ".ipc", ".parquet")
COLUMNS = ("input_ids", "loss_mask")


@frozen(eq=False)
class Part:
    """A record batch of a file: rows as offsets into flat value arrays, all of it memory-mapped."""

    path: Path
    first_row: int  # of the batch, counted within its file
    ids: pa.Array  # integers, flat
    id_offsets: np.ndarray  # [rows + 1]
    mask: pa.Array  # integers or booleans, flat
    mask_offsets: np.ndarray  # [rows + 1]

    @property
    def rows(self) -> int:
        return len(self.id_offsets) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and mask of one row; null entries are a DataError."""
        lists = []
        for name, values, offsets in zip(
            COLUMNS, (self.ids, self.mask), (self.id_offsets, self.mask_offsets), strict=True
        ):
            start, end = int(offsets[index]), int(offsets[index + 1])
            entries = values.slice(start, end - start)
            if entries.null_count:
                raise DataError(f"{self.path}, row {self.first_row + index}: {name} holds null entries")
            array = entries.to_numpy(zero_copy_only=False)
            lists.append(array.view(np.uint8) if array.dtype == bool else array)
        return lists[0], lists[1]

    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All rows at once: ids int32 [tokens], mask uint8 [tokens] and row starts int64 [rows + 1]."""
        lists = []
        for name, values, offsets in zip(
            COLUMNS, (self.ids, self.mask), (self.id_offsets, self.mask_offsets), strict=True
        ):
            entries = values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
            if entries.null_count:
                raise DataError(f"{self.path}: {name} holds null entries from row {self.first_row} on")
            lists.append(entries.to_numpy(zero_copy_only=False))
        starts = self.id_offsets.astype(np.int64) - int(self.id_offsets[0])
        return lists[0].astype("<i4", copy=False), lists[1].astype(np.uint8, copy=False), starts


def list_files(path: Path) -> list[Path]:
    """The document files at a path, sorted by name. DataError where there is none."""
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files:
        inside = sorted(folder.name for folder in path.iterdir() if (folder / MANIFEST).is_file())
        hint = f"; name one of the folders in it: {', '.join(inside)}" if inside else ""
        raise DataError(f"{path}: holds no {', '.join(SUFFIXES)} file{hint}")
    return files


def corrupt(path: Path, error: Exception) -> DataError:
    """The error for a file that its format's reader rejects."""
    return DataError(f"{path}: corrupt, truncated, or neither Arrow nor Parquet ({error}); copy it again")


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(6)


def _record_batches(path: Path, source: Any, magic: bytes) -> Iterator[pa.RecordBatch]:
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
    else:
        yield from pa.ipc.open_stream(source)


def _as_parts(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[Part]:
    first_row = 0
    for batch in batches:
        batch.validate()
        part = _as_part(path, batch, first_row)
        if part.rows:
            yield part
        first_row += batch.num_rows


def _as_part(path: Path, batch: pa.RecordBatch, first_row: int) -> Part:
    columns, offsets = [], []
    for name in COLUMNS:
        if name not in batch.schema.names:
            raise DataError(f"{path}: has no column {name}; its columns are {', '.join(batch.schema.names)}")
        column = batch.column(name)
        kind = column.type
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        boolean = listed and name == "loss_mask" and pa.types.is_boolean(kind.value_type)
        if not (boolean or (listed and pa.types.is_integer(kind.value_type))):
            raise DataError(f"{path}: column {name} is {kind}; a list of integers is needed")
        if column.null_count:
            raise DataError(f"{path}: {column.null_count} rows have no {name}")
        borders = column.offsets.to_numpy()
        if (np.diff(borders) < 0).any() or not 0 <= borders[0] <= borders[-1] <= len(column.values):
            raise corrupt(path, ValueError(f"list offsets of {name} don't increase"))
        columns.append(column.values)
        offsets.append(borders)
    lengths, mask_lengths = np.diff(offsets[0]), np.diff(offsets[1])
    wrong = (lengths != mask_lengths) | (lengths == 0)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{path}, row {first_row + row}: input_ids has {lengths[row]} entries and loss_mask "
            f"{mask_lengths[row]}; both need the same number, at least one"
        )
    return Part(path, first_row, columns[0], offsets[0], columns[1], offsets[1])


def map_parts(path: Path) -> list[Part] | None:
    """Memory-map an Arrow file's record batches; None when the file must be converted first."""
    try:
        magic = _magic(path)
        if magic.startswith(b"PAR1"):
            return None
        buffer = pa.memory_map(str(path)).read_buffer()
        parts = list(_as_parts(path, _record_batches(path, buffer, magic)))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise corrupt(path, error) from error
    end = buffer.address + buffer.size
    # A compressed batch was unpacked into memory of its own: its values lie outside the mapping.
    mapped = all(
        values is None or values.size == 0 or buffer.address <= values.address < end
        for part in parts
        for values in (part.ids.buffers()[-1], part.mask.buffers()[-1])
    )
    return parts if mapped else None


def stream_parts(path: Path) -> Iterator[Part]:
    """Read a file's record batches one after the other, without mapping: memory holds one at a time."""
    try:
        magic = _magic(path)
        if magic.startswith(b"PAR1"):
            table = pq.ParquetFile(path)
            names = [name for name in COLUMNS if name in table.schema_arrow.names]
            yield from _as_parts(path, table.iter_batches(batch_size=1024, columns=names))
        else:
            with pa.OSFile(str(path)) as file:
                yield from _as_parts(path, _record_batches(path, file, magic))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise corrupt(path, error) from error


def convert(path: Path, files: list[Path]) -> Path:
    """Write the files' documents as shards in the user's cache folder, unless they are there, and return it.

    The folder's name derives from the files' paths, sizes and times, so changed files convert anew.
    """
    states = [(os.path.abspath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.blake2b(orjson.dumps([FORMAT, states]), digest_size=8).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-engine" / "documents"
    folder = base / f"{path.stem}-{key}"
    if (folder / MANIFEST).is_file():
        return folder
    print(
        f"{path}: cannot be memory-mapped as it is; converting once to {folder} (move with XDG_CACHE_HOME)",
        file=sys.stderr,
    )
    with fresh_folder(folder) as partial:
        source = {"converted_from": [state[0] for state in states]}
        writer = ShardWriter(partial, source=source, shown_as=path)
        try:
            for file in files:
                for part in stream_parts(file):
                    for index in range(part.rows):
                        _add(writer, part, index)
            writer.finish()
        finally:
            writer.close()
    return folder


def _add(writer: ShardWriter, part: Part, index: int) -> None:
    ids, mask = part.row(index)
    try:
        writer.add(ids, mask)
    except DataError as error:
        raise DataError(f"{part.path}, row {part.first_row + index}: {error}") from error
