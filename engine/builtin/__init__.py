"""What ships inside the package: a tiny trained target and conversations it wrote itself.

A path that starts with `builtin:` in a schedule or on the command line names one of these. Nothing
here imports torch, so looking a name up costs nothing.
"""

from pathlib import Path

from engine.errors import InputError

PREFIX = "builtin:"
TINY_HYBRID = "builtin:tiny-hybrid"
TRAIN = "builtin:conversations/train"
HELD_OUT = "builtin:conversations/held_out"
QWEN3_6_27B = "builtin:qwen3.6-27b"
"""A configuration without weights, to measure with `target.init = "random"`."""

_FOLDERS = {
    TINY_HYBRID: "tiny_hybrid",
    TRAIN: "conversations/train",
    HELD_OUT: "conversations/held_out",
    QWEN3_6_27B: "qwen3_6_27b",
}


def resolve(path: str) -> Path:
    """The folder that `path` names: a built-in one, or `path` itself where it has no `builtin:`.

    Raises:
        InputError: there is no such built-in name; the message lists those there are.
    """
    if not path.startswith(PREFIX):
        return Path(path)
    if path not in _FOLDERS:
        raise InputError(f"{path}: no such built-in; there are {', '.join(_FOLDERS)}")
    return Path(__file__).parent / _FOLDERS[path]
