"""Documents for training: opened memory-mapped, checked as they are read, split by answer.

Opening reads a folder's small columns and nothing of its lists, so it takes seconds for a million
rows whatever their length. Files without a manifest are streamed through once, since a document's
identity derives from its content. A document's tokens are checked when it is read, which costs
microseconds then and would cost minutes at the start.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from attrs import evolve, frozen

from engine.data.fresh_folder import INCOMPLETE
from engine.data.manifest import MANIFEST, Manifest, documents_fingerprint, read_manifest
from engine.data.shards import answer_id, content_id, hash63, row_complaint, write_documents
from engine.data.sources import Part, convert, corrupt, list_files, map_parts, stream_parts
from engine.errors import DataError
from engine.randomness import stateless_hash

__all__ = [
    "Document",
    "Documents",
    "Manifest",
    "answer_id",
    "assert_disjoint",
    "content_id",
    "in_held_out",
    "open_documents",
    "split_by_answer",
    "write_documents",
]


@frozen(eq=False)
class Document:
    """One document, uncut: `input_ids` int64 [L], `loss_mask` bool [L], True where supervised."""

    content_id: int
    input_ids: np.ndarray
    loss_mask: np.ndarray


@frozen(eq=False)
class Documents:
    """A sequence of documents on disk.

    `lengths`, `content_ids`, `answer_ids` and `first_labels` are int64 [n] and in memory: 32 bytes
    a document. `first_labels` is the first supervised position from 1 on, -1 where there is none.
    `manifest` is that of the folder, None for files of other origin and for a selection.
    """

    path: Path
    lengths: np.ndarray
    content_ids: np.ndarray
    answer_ids: np.ndarray
    first_labels: np.ndarray
    manifest: Manifest | None
    vocab_size: int | None
    mask_token_id: int | None
    _parts: list[Part]
    _starts: np.ndarray  # [parts]: number of rows before each part
    _rows: np.ndarray  # [n]: the row behind each document, counted over all parts

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """Hash of the documents' ids, lengths and order; equals the manifest's for a whole folder."""
        return documents_fingerprint(self.content_ids, self.lengths)

    def document(self, index: int) -> Document:
        """Read and check document `index`; DataError names file and row when it is damaged or unfit."""
        row = int(self._rows[index])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        part, local = self._parts[number], row - int(self._starts[number])
        ids, mask = part.row(local)
        where = f"{part.path}, row {part.first_row + local}"
        complaint = row_complaint(ids, mask, self.vocab_size)
        if complaint:
            raise DataError(f"{where}: {complaint}")
        if self.mask_token_id is not None and (ids == self.mask_token_id).any():
            raise DataError(f"{where}: {_mask_token_occurs(self.mask_token_id)}")
        identity = int(self.content_ids[index])
        if content_id(ids, mask) != identity:
            raise DataError(f"{where}: tokens don't match the content id; the file is damaged or was changed")
        return Document(identity, ids.astype(np.int64), mask.astype(bool))

    def select(self, indexes: Sequence[int] | np.ndarray) -> "Documents":
        """A view of the documents at `indexes` (integers, or booleans as long as this), in that order."""
        chosen = np.asarray(indexes)
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        return evolve(
            self,
            lengths=self.lengths[chosen],
            content_ids=self.content_ids[chosen],
            answer_ids=self.answer_ids[chosen],
            first_labels=self.first_labels[chosen],
            rows=self._rows[chosen],
            manifest=None,
        )


def _mask_token_occurs(mask_token_id: int) -> str:
    return (
        f"mask_token_id {mask_token_id} occurs in the data, where the drafter could not tell it "
        "from a masked slot; choose an id that is never used"
    )


def open_documents(
    path: Path | str, *, vocab_size: int | None = None, mask_token_id: int | None = None
) -> Documents:
    """Open a folder of documents, or any folder or file of Arrow or Parquet with `input_ids` and `loss_mask`.

    Args:
        path: a folder that `write_documents` wrote; or `.arrow`, `.feather`, `.ipc` and `.parquet`
            files with a list column each for tokens (integers) and mask (integers or booleans).
        vocab_size: ids must lie below it. Checked here where a manifest knows, else when read.
        mask_token_id: must not occur; checked likewise.

    Raises:
        DataError: nothing there, nothing to learn, a torn folder, a corrupt file (named) or unfit columns.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder of documents")
    if (path / INCOMPLETE).exists():
        raise DataError(f"{path}: its writing was cut off or is still going on; prepare the data again")
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is None:
        files = list_files(path)
        mapped = [map_parts(file) for file in files]
        if any(parts is None for parts in mapped):
            path = convert(path, files)
            manifest = read_manifest(path)
        else:
            parts = [part for file_parts in mapped if file_parts for part in file_parts]
            index = _compute_index(files)
    if manifest is not None:
        parts, index = _open_shards(path, manifest)
        _check_manifest(path, manifest, vocab_size, mask_token_id)
    if not parts:
        raise DataError(f"{path}: holds no documents (zero rows)")
    counts = np.array([part.rows for part in parts], dtype=np.int64)
    documents = Documents(
        path=path,
        lengths=np.concatenate([np.diff(part.id_offsets) for part in parts]).astype(np.int64),
        content_ids=index[0],
        answer_ids=index[1],
        first_labels=index[2],
        manifest=manifest,
        vocab_size=vocab_size,
        mask_token_id=mask_token_id,
        parts=parts,
        starts=counts.cumsum() - counts,
        rows=np.arange(counts.sum(), dtype=np.int64),
    )
    if manifest is not None and documents.fingerprint != manifest.fingerprint:
        raise DataError(f"{path}: the shards don't match {path / MANIFEST}; prepare the data again")
    if not (documents.first_labels > 0).any():
        raise DataError(
            f"{path}: loss_mask is 0 at every position that could be learnt, in all {len(documents)} "
            "documents; it must be 1 on the answers"
        )
    return documents


def _check_manifest(
    path: Path, manifest: Manifest, vocab_size: int | None, mask_token_id: int | None
) -> None:
    highest = manifest.ids[-1] if manifest.ids else 0
    if vocab_size is not None and highest >= vocab_size:
        raise DataError(
            f"{path}: holds token id {highest} and the target's vocabulary ends at {vocab_size - 1}; "
            "prepare the data with the target's tokenizer"
        )
    if mask_token_id is not None and mask_token_id in manifest.ids:
        raise DataError(f"{path}: {_mask_token_occurs(mask_token_id)}")


def _open_shards(path: Path, manifest: Manifest) -> tuple[list[Part], np.ndarray]:
    """Map the shards and read their id columns: int64 [3, n]."""
    parts: list[Part] = []
    columns: list[np.ndarray] = []
    for shard in manifest.shards:
        file = path / shard.name
        if not file.is_file():
            raise DataError(f"{file}: missing, and {path / MANIFEST} lists it; copy the folder again")
        if file.stat().st_size != shard.bytes:
            raise DataError(
                f"{file}: corrupt or truncated: {file.stat().st_size} bytes, {shard.bytes} in the manifest; "
                "copy the folder again"
            )
        mapped = map_parts(file)
        if mapped is None or sum(part.rows for part in mapped) != shard.rows:
            raise DataError(f"{file}: corrupt: its rows are not the {shard.rows} of the manifest")
        parts.extend(mapped)
        try:
            with pa.memory_map(str(file)) as source:
                reader = pa.ipc.open_file(source)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    stored = [batch.column(name) for name in ("content_id", "answer_id", "first_label")]
                    columns.append(np.stack([column.to_numpy().astype(np.int64) for column in stored]))
        except (pa.ArrowException, OSError, KeyError) as error:
            raise corrupt(file, error) from error
    return parts, np.concatenate(columns, axis=1)


def _compute_index(files: list[Path]) -> np.ndarray:
    """Content id, answer id and first label of every row, int64 [3, n], in one streaming pass."""
    columns = [_index_part(part) for file in files for part in stream_parts(file)]
    return np.concatenate(columns, axis=1) if columns else np.empty((3, 0), dtype=np.int64)


def _index_part(part: Part) -> np.ndarray:
    ids, mask, starts = part.flat()  # [tokens], [tokens], [rows + 1]
    supervised = mask.astype(bool)
    answers = ids[supervised]
    answer_starts = np.concatenate([[0], supervised.cumsum()])[starts]
    first_places = starts[:-1]
    learnable = supervised.copy()
    learnable[first_places] = False
    places = np.append(np.flatnonzero(learnable), len(ids))
    nearest = places[np.searchsorted(places, first_places)]
    labels = np.where(nearest < starts[1:], nearest - first_places, -1)
    borders, answer_borders = starts.tolist(), answer_starts.tolist()
    found = [
        (
            content_id(ids[borders[row] : borders[row + 1]], mask[borders[row] : borders[row + 1]]),
            hash63(answers[answer_borders[row] : answer_borders[row + 1]].data),
        )
        for row in range(part.rows)
    ]
    return np.concatenate([np.array(found, dtype=np.int64).T, labels[None]])


def in_held_out(answer_ids: np.ndarray, fraction: float) -> np.ndarray:
    """Which answers (int64 [n]) are held out: bool [n], those whose hash lies below an integer border.

    A function of the answer alone: equal answers fall on one side, whatever else is in the data.
    """
    if not 0.0 < fraction < 1.0:
        raise DataError(f"held_out = {fraction}: a fraction lies between 0 and 1, both excluded")
    hashed = stateless_hash(torch.from_numpy(np.ascontiguousarray(answer_ids, dtype=np.int64))).numpy()
    return hashed < int(fraction * 2**63)


def split_by_answer(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """Split into training and held-out documents so that no held-out answer occurs in training.

    Raises:
        DataError: the fraction is out of range, or one side would be empty.
    """
    held_out = in_held_out(documents.answer_ids, fraction)
    count = int(held_out.sum())
    if count in (0, len(documents)):
        raise DataError(
            f"{documents.path}: held_out = {fraction} puts {count} of {len(documents)} documents "
            f"({len(np.unique(documents.answer_ids))} distinct answers) aside; choose another fraction "
            "or give more distinct answers"
        )
    return documents.select(~held_out), documents.select(held_out)


def assert_disjoint(train: Documents, held_out: Documents) -> None:
    """DataError, with the counts, when an answer of the held-out documents occurs in training."""
    shared = np.isin(held_out.answer_ids, train.answer_ids)
    if shared.any():
        answers = len(np.unique(held_out.answer_ids[shared]))
        raise DataError(
            f"{held_out.path}: {int(shared.sum())} of {len(held_out)} held-out documents ({answers} distinct "
            f"answers) have an answer that occurs in {train.path}; split by answer (held_out as a fraction)"
        )
