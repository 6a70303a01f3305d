"""Which target and which tokenizer a folder holds, told without reading all of it.

A resumed run must meet the target it began with. Hashing 54 GB takes minutes, names and sizes tell two
fine-tunes of one model from each other not at all. So the weights' fingerprint is over every header,
which has each tensor's name, shape and place, and over a page from the beginning, the middle and the
end of each tensor: training changes all of a tensor, and a tensor that was left out shows in the header.
It takes two or three thousand small reads for a model of 27 billion parameters.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from engine.errors import CheckpointError, TargetError
from engine.target.configuration import read_json
from engine.target.weights import INDEX_FILE
from engine.tensor_file import read_header

PAGE = 4096  # bytes; what one read costs a disk anyway
SAMPLES = 64  # of a weight file whose tensors cannot be told apart

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


def weights_fingerprint(folder: Path) -> str:
    """Hash of the headers and of samples of a checkpoint's weights; where files lie does not enter.

    Raises:
        TargetError: a weight file is missing or torn.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in _weight_files(folder):
        if not path.is_file():
            raise TargetError(f"{path}: not there, but {INDEX_FILE} puts tensors into it; download it")
        size = path.stat().st_size
        if path.suffix == ".safetensors":
            try:
                entries = read_header(path)
            except CheckpointError as error:
                raise TargetError(f"{error}; corrupt or cut short, download it again") from error
            start = size - max((entry.end for entry in entries.values()), default=0)
            for name, entry in sorted(entries.items()):
                digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
            spans = [(start + entry.begin, start + entry.end) for _, entry in sorted(entries.items())]
        else:
            digest.update(f"{path.name} {size}\n".encode())
            spans = [(size * part // SAMPLES, size * (part + 1) // SAMPLES) for part in range(SAMPLES)]
        with path.open("rb") as file:
            for begin, end in spans:
                length = min(PAGE, end - begin)
                for offset in sorted({begin, (begin + end - length) // 2, end - length}):
                    digest.update(os.pread(file.fileno(), length, offset))
    return digest.hexdigest()


def config_fingerprint(folder: Path) -> str:
    """Hash of a target's configuration, and of its own Python files, which may define the model."""
    return _hash(sorted([folder / "config.json", *folder.glob("*.py")]))


def vocabulary_fingerprint(folder: Path) -> str | None:
    """Hash of the files that give tokens their ids; None where the folder holds none."""
    files = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
    return _hash(files) if files else None


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """The files that a loader would read; every weight file of another kind, where it has its own loader."""
    index = folder / INDEX_FILE
    if index.is_file():
        return [folder / shard for shard in sorted(set(read_json(index).get("weight_map", {}).values()))]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    patterns = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth", "*.ckpt")
    return sorted(path for pattern in patterns for path in folder.glob(pattern))
