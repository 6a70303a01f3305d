"""The manifest beside the shards: what a folder of documents holds, known without reading a row.

Its presence is what makes a folder whole. Sizes and the fingerprint find a damaged copy at opening;
the set of ids finds a mask token that occurs in the data before a GPU is touched.
"""

import hashlib
from pathlib import Path
from typing import Any

import cattrs
import numpy as np
import orjson
from attrs import field, frozen

from engine.errors import DataError

FORMAT = "dflash-engine documents 1"
MANIFEST = "manifest.json"


@frozen
class Shard:
    """One file of a folder, with what it must measure."""

    name: str
    rows: int
    bytes: int


@frozen
class LengthSummary:
    """Document lengths in tokens. `histogram` pairs an inclusive upper edge (a power of two) with a count."""

    min: int
    mean: float
    median: int
    p95: int
    max: int
    histogram: list[tuple[int, int]]


@frozen
class Manifest:
    """What a folder of documents holds.

    `ids` is the sorted list of every token id that occurs; `duplicates` counts documents whose
    content had occurred before; `fingerprint` is that of `documents_fingerprint`.
    """

    format: str
    engine_version: str
    documents: int
    tokens: int
    supervised_tokens: int
    duplicates: int
    lengths: LengthSummary
    fingerprint: str
    tokenizer_fingerprint: str | None
    vocab_size: int | None
    shards: list[Shard]
    ids: list[int]
    source: dict[str, Any] = field(factory=dict)


def documents_fingerprint(content_ids: np.ndarray, lengths: np.ndarray) -> str:
    """Hash of the documents and their order, from their ids (int64 [n]) and lengths (int64 [n])."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(content_ids, dtype="<i8").data)
    digest.update(np.ascontiguousarray(lengths, dtype="<i8").data)
    return digest.hexdigest()


def summarise_lengths(lengths: np.ndarray) -> LengthSummary:
    """Summary of lengths (int64 [n], n > 0) in tokens."""
    edges, counts = np.unique(np.ceil(np.log2(lengths)).astype(np.int64), return_counts=True)
    return LengthSummary(
        min=int(lengths.min()),
        mean=float(lengths.mean()),
        median=int(np.median(lengths)),
        p95=int(np.percentile(lengths, 95)),
        max=int(lengths.max()),
        histogram=[(1 << edge, count) for edge, count in zip(edges.tolist(), counts.tolist(), strict=True)],
    )


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder that this module wrote, or None where there is none of this kind."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        values = orjson.loads(path.read_bytes())
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise DataError(f"{path}: not a manifest of the format {FORMAT!r}; prepare the data again")
        return cattrs.structure(values, Manifest)
    except (orjson.JSONDecodeError, cattrs.BaseValidationError) as error:
        raise DataError(f"{path}: the manifest cannot be read ({error}); prepare the data again") from error
