"""The documents' format on disk: Arrow IPC shards beside a manifest, written whole or not at all.

A document is two lists of equal length, `input_ids` and `loss_mask` (1 where the token is
supervised). Arrow's IPC *file* format is used because it can be memory-mapped and read at any row.
Beside the lists stand three numbers a training run needs before it reads any list, so that a
million rows start in seconds: `content_id` and `answer_id` (hashes of the whole document and of
its supervised tokens; order, anchors and the held-out split derive from them, never from a row's
place in a file) and `first_label` (the first supervised position that has a token before it).

A folder gets its name when everything is on disk (`fresh_folder.py`).
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cattrs
import numpy as np
import orjson
import pyarrow as pa

from engine import __version__
from engine.data.fresh_folder import INCOMPLETE, fresh_folder
from engine.data.manifest import FORMAT, MANIFEST, Manifest, Shard, documents_fingerprint, summarise_lengths
from engine.errors import DataError, DiskError

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("content_id", pa.int64()),
        ("answer_id", pa.int64()),
        ("first_label", pa.int32()),
    ]
)
# A record batch is flushed at either bound: what a writer holds in memory, about 40 MB.
_BATCH_ROWS = 8192
_BATCH_TOKENS = 1 << 22

IntegerRow = Sequence[int] | np.ndarray


def hash63(*parts: bytes | memoryview) -> int:
    """63-bit blake2b of the bytes, one part after the other."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1


def content_id(input_ids: IntegerRow, loss_mask: IntegerRow) -> int:
    """63-bit hash of a document's tokens and mask: the document's identity wherever it is stored."""
    ids = np.ascontiguousarray(input_ids, dtype="<i4")
    return hash63(ids.data, np.ascontiguousarray(loss_mask, dtype=np.uint8).data)


def answer_id(input_ids: IntegerRow, loss_mask: IntegerRow) -> int:
    """63-bit hash of the supervised tokens alone: equal answers to different prompts share it."""
    ids = np.ascontiguousarray(input_ids, dtype="<i4")
    return hash63(ids[np.asarray(loss_mask, dtype=bool)].data)


def first_label(loss_mask: IntegerRow) -> int:
    """First supervised position from 1 on, or -1. No anchor precedes position 0, so it can't be learnt."""
    supervised = np.asarray(loss_mask[1:], dtype=bool)
    return int(supervised.argmax()) + 1 if supervised.any() else -1


def row_complaint(input_ids: np.ndarray, loss_mask: np.ndarray, vocab_size: int | None) -> str | None:
    """What is wrong with a document, in words, or None. Any integer width will do."""
    if len(input_ids) != len(loss_mask):
        return f"input_ids has {len(input_ids)} entries and loss_mask {len(loss_mask)}"
    if len(input_ids) == 0:
        return "the document has no tokens"
    if input_ids.dtype.kind not in "iu" or loss_mask.dtype.kind not in "iub":
        return f"input_ids are {input_ids.dtype} and loss_mask {loss_mask.dtype}: both must be integers"
    limit = 1 << 31 if vocab_size is None else vocab_size
    outside = (input_ids < 0) | (input_ids >= limit)
    if outside.any():
        at = int(outside.argmax())
        return f"input_ids[{at}] = {input_ids[at]}: ids lie in [0, {limit})"
    strange = (loss_mask != 0) & (loss_mask != 1)
    if strange.any():
        at = int(strange.argmax())
        return f"loss_mask[{at}] = {loss_mask[at]}: a mask holds 0 and 1"
    return None


class ShardWriter:
    """Writes documents one at a time into a folder; `finish` adds the manifest that makes it whole."""

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer_fingerprint: str | None = None,
        vocab_size: int | None = None,
        source: dict[str, Any] | None = None,
        rows_per_shard: int = 100_000,
        shown_as: Path | None = None,
    ) -> None:
        self.folder = folder
        self._shown_as = shown_as or folder  # the name in messages: the folder's final one
        self.rows = 0
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._vocab_size = vocab_size
        self._source = source or {}
        self._rows_per_shard = rows_per_shard
        self._shards: list[Shard] = []
        self._shard_rows = 0
        self._sink: pa.NativeFile | None = None
        self._stream: pa.ipc.RecordBatchFileWriter | None = None
        self._pending: list[tuple[np.ndarray, np.ndarray, int, int, int]] = []
        self._pending_tokens = 0
        self._lengths: list[np.ndarray] = []
        self._content_ids: list[np.ndarray] = []
        self._seen = np.zeros(0, dtype=np.int64)
        self._supervised = 0
        self._has_label = False
        with self._disk():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / INCOMPLETE).touch()

    def add(self, input_ids: IntegerRow, loss_mask: IntegerRow) -> None:
        """Append a document; DataError names the row when it is none."""
        ids, mask = np.asarray(input_ids), np.asarray(loss_mask)
        complaint = row_complaint(ids, mask, self._vocab_size)
        if complaint:
            raise DataError(f"document {self.rows} to be written to {self._shown_as}: {complaint}")
        ids, mask = ids.astype("<i4"), mask.astype(np.uint8)
        self._pending.append((ids, mask, content_id(ids, mask), answer_id(ids, mask), first_label(mask)))
        self._pending_tokens += len(ids)
        self.rows += 1
        full = self._shard_rows + len(self._pending) >= self._rows_per_shard
        if full or len(self._pending) >= _BATCH_ROWS or self._pending_tokens >= _BATCH_TOKENS:
            self._flush()
        if full:
            self._close_shard()

    def finish(self) -> Manifest:
        """Close the last shard, write the manifest and return it; DataError when nothing can be learnt."""
        self._flush()
        self._close_shard()
        if self.rows == 0:
            raise DataError(f"{self._shown_as}: no documents to write; look at why every row was left out")
        if not self._has_label:
            raise DataError(
                f"{self._shown_as}: no document has a supervised token after its first position; "
                "loss_mask must be 1 on the answers"
            )
        lengths, content_ids = np.concatenate(self._lengths), np.concatenate(self._content_ids)
        manifest = Manifest(
            format=FORMAT,
            engine_version=__version__,
            documents=self.rows,
            tokens=int(lengths.sum()),
            supervised_tokens=self._supervised,
            duplicates=self.rows - len(np.unique(content_ids)),
            lengths=summarise_lengths(lengths),
            fingerprint=documents_fingerprint(content_ids, lengths),
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            vocab_size=self._vocab_size,
            shards=self._shards,
            ids=self._seen.tolist(),
            source=self._source,
        )
        with self._disk():
            with (self.folder / MANIFEST).open("wb") as file:
                file.write(orjson.dumps(cattrs.unstructure(manifest)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            (self.folder / INCOMPLETE).unlink()
        return manifest

    def close(self) -> None:
        """Let go of the open shard, whatever its state; needed only when `finish` isn't reached."""
        for handle in (self._stream, self._sink):
            if handle is not None:
                with contextlib.suppress(OSError, pa.ArrowException):
                    handle.close()
        self._stream = self._sink = None

    def _flush(self) -> None:
        if not self._pending:
            return
        ids, masks, contents, answers, labels = zip(*self._pending, strict=True)
        lengths = np.array([len(row) for row in ids], dtype=np.int64)
        offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
        flat_ids, flat_masks = np.concatenate(ids), np.concatenate(masks)
        batch = pa.record_batch(
            [
                pa.ListArray.from_arrays(offsets, pa.array(flat_ids)),
                pa.ListArray.from_arrays(offsets, pa.array(flat_masks)),
                pa.array(contents, pa.int64()),
                pa.array(answers, pa.int64()),
                pa.array(labels, pa.int32()),
            ],
            schema=SCHEMA,
        )
        with self._disk():
            if self._stream is None:
                self._sink = pa.OSFile(str(self.folder / f"shard-{len(self._shards):05d}.arrow"), "wb")
                self._stream = pa.ipc.new_file(self._sink, SCHEMA)
            self._stream.write_batch(batch)
        self._lengths.append(lengths)
        self._content_ids.append(np.array(contents, dtype=np.int64))
        self._seen = np.union1d(self._seen, flat_ids)
        self._supervised += int(flat_masks.sum(dtype=np.int64))
        self._has_label = self._has_label or max(labels) > 0
        self._shard_rows += len(lengths)
        self._pending, self._pending_tokens = [], 0

    def _close_shard(self) -> None:
        if self._stream is None or self._sink is None:
            return
        path = self.folder / f"shard-{len(self._shards):05d}.arrow"
        with self._disk():
            self._stream.close()
            self._sink.close()
            with path.open("rb") as file:
                os.fsync(file.fileno())
            self._shards.append(Shard(path.name, self._shard_rows, path.stat().st_size))
        self._stream, self._sink, self._shard_rows = None, None, 0

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(f"{self._shown_as}: writing failed after row {self.rows} ({error})") from error


def write_documents(
    folder: Path | str,
    rows: Iterable[tuple[IntegerRow, IntegerRow]],
    *,
    tokenizer_fingerprint: str | None = None,
    vocab_size: int | None = None,
    source: dict[str, Any] | None = None,
    rows_per_shard: int = 100_000,
    overwrite: bool = False,
) -> Manifest:
    """Write `(input_ids, loss_mask)` pairs as a folder of documents and return its manifest.

    Args:
        rows: pairs of equal length; ids in [0, vocab_size), mask 0 or 1. Consumed once, streamed.
        source: anything JSON can hold about where the rows came from; stored in the manifest.
        overwrite: replace a folder of documents that is already there.

    Raises:
        DataError: the folder can't be written or is occupied, a row is malformed, there is no row,
            or no row has anything to learn.
        DiskError: writing fails under way. In every case no folder is left behind.
    """
    with fresh_folder(Path(folder), overwrite) as partial:
        writer = ShardWriter(
            partial,
            tokenizer_fingerprint=tokenizer_fingerprint,
            vocab_size=vocab_size,
            source=source,
            rows_per_shard=rows_per_shard,
            shown_as=Path(folder),
        )
        try:
            for input_ids, loss_mask in rows:
                writer.add(input_ids, loss_mask)
            return writer.finish()
        finally:
            writer.close()
