"""A safetensors file, written piece by piece, and its header read back.

A checkpoint of a large drafter is 24 GB and takes a disk half a minute. So it is written so that other
threads go on (every call here lets go of Python's lock), that it can be left off between two pieces,
and that what has been written is on the disk soon: the last flush would otherwise wait for all of it.
The format is the library's: a little-endian length, a JSON header, the tensors' bytes without gaps.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch
from torch import Tensor

from engine.errors import CheckpointError, EngineError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names."""

SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}

PIECE = 16 << 20  # bytes handed to the operating system at a time
FLUSH_EVERY = 256 << 20  # bytes; a disk of 1 GB/s then ends a flush, or a dropped write, in a quarter second
LONGEST_HEADER = 100_000_000  # bytes; the library's own limit


@attrs.frozen
class TensorEntry:
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset from the end of the header, bytes."""
    end: int


def entry_of(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a tensor as a header names them.

    Raises:
        EngineError: the format has no such dtype.
    """
    if tensor.dtype not in DTYPES:
        raise EngineError(f"a tensor of {tensor.dtype} cannot be stored; known are {', '.join(SIZES)}")
    return DTYPES[tensor.dtype], tuple(tensor.shape)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Write tensors of any device, one after another.

    Args:
        between: called between two pieces; what it raises leaves the file torn.

    Raises:
        OSError: as the disk reports it.
        EngineError: a dtype that the format does not have.
    """
    # Largest elements first, as the library writes them: every tensor is then aligned to its own.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        dtype, shape = entry_of(tensors[name])
        end = offset + tensors[name].nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    unflushed = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            stored = memoryview(
                tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            )
            for begin in range(0, len(stored), PIECE):
                between()
                unflushed += file.write(stored[begin : begin + PIECE])
                if unflushed >= FLUSH_EVERY:
                    file.flush()
                    os.fsync(file.fileno())
                    unflushed = 0
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name, without reading them; the file is as long as they say.

    Raises:
        CheckpointError: there is no such file, it is no safetensors file, or it is cut short.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                raise CheckpointError(f"{path}: no safetensors file, or one cut short")
            header = orjson.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = {
            name: TensorEntry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
        }
        expected = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            there = entry.end - entry.begin
            if entry.begin != expected or there != math.prod(entry.shape) * SIZES.get(entry.dtype, there):
                raise CheckpointError(f"{path}: the header puts {name} at bytes that cannot be its own")
            expected = entry.end
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path}: its header cannot be read: {error}") from error
    if 8 + length + expected != size:
        raise CheckpointError(f"{path}: holds {size:,} bytes, and its header says {8 + length + expected:,}")
    return entries
