"""What ships with the engine: a tiny trained target, conversations that it wrote, a large shape.

A schedule names these as `builtin:…` wherever it would name a folder.
"""

from pathlib import Path

from engine.errors import InputError

PREFIX = "builtin:"

FOLDERS = {
    "tiny-hybrid": "tiny_hybrid",
    "conversations/train": "conversations/train",
    "conversations/held_out": "conversations/held_out",
    "qwen3.6-27b": "qwen3_6_27b",
}
"""Names and their folders. `qwen3.6-27b` is a configuration alone, for `target.init = "random"`."""


def resolve(path: str) -> Path:
    """The folder that a schedule's path means.

    Raises:
        InputError: a `builtin:` name that there is not; names those there are.
    """
    if not path.startswith(PREFIX):
        return Path(path)
    name = path.removeprefix(PREFIX)
    if name not in FOLDERS:
        known = ", ".join(PREFIX + known for known in FOLDERS)
        raise InputError(f"{path}: nothing built in has that name; there are {known}")
    return Path(__file__).parent / FOLDERS[name]
