"""Copies of the target's weights that some trainers store beside a drafter, held against the target's own.

A drafter of another target loads and trains without a word, from what is noise here; the copies in its
file are what can tell. Embedding and head are at hand in any run. The final norm is not, since a target
is cut behind its last tap, so it is read from the target's files; where these cannot say which tensor it
is, or the weights were drawn, the copy is told as not compared and never as equal.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import CheckpointError, TargetError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.dflash.training import SharedWeights

SHARED = {
    "embed_tokens.weight": "embed_tokens",
    "lm_head.weight": "lm_head",
    "verifier_lm_head.weight": "lm_head",
}
"""Copies of what a drafter reads, by the names in `SharedWeights`."""

FINAL_NORM = "verifier_norm.weight"

OF_THE_TARGET = frozenset({*SHARED, FINAL_NORM})
"""All of the names under which trainers keep copies."""

EMBEDDING = re.compile(r"(|.*\.)(embed_tokens|embed_in|wte|word_embeddings)\.weight")
"""The embedding of a checkpoint; what precedes its name precedes the final norm's too."""

NORM = re.compile(r"(\w*norm\w*|ln_f)\.weight")

ROUNDING = 2.0**-7
"""Largest difference, of a number's size, between two copies of it that were rounded to 16 bits or not."""

SMALLEST_HALF = 2.0**-24
"""float16 rounds numbers below 6e-5 to multiples of this."""

ROWS = 4096
"""Of a vocabulary's matrix, compared at a time."""


def compare_copy(name: str, stored: Tensor, shared: SharedWeights, target: Path | None, path: Path) -> str:
    """Hold one copy against the target's own; says in words how it went.

    Args:
        name: one of `OF_THE_TARGET`.
        target: the folder that the target's weights are read from; None where they are drawn.
        path: the drafter's file, for the message.

    Raises:
        CheckpointError: it is another target's.
        TargetError: the target's files cannot be read.
    """
    if name == FINAL_NORM:
        if target is None:
            return "not compared: the target's weights are drawn, and no file has its final norm"
        found = final_norm(target)
        if found is None:
            return f"not compared: which tensor in {target} is the final norm is not clear"
        own = found
    else:
        own = getattr(shared, SHARED[name])
    if not _same(stored, own):
        raise CheckpointError(
            f"{path}: its {name} is not the target's, so it was trained for another one; "
            "point target.path at that target, or start afresh"
        )
    return "the target's own, and equal to it"


def final_norm(folder: Path) -> Tensor | None:
    """The weight [H] of a checkpoint's final norm; None where there is not just one that it can be.

    Raises:
        TargetError: the files cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    from engine.target.weights import find_tensors

    files = find_tensors(folder)
    bases = {match[1] for name in files if (match := EMBEDDING.fullmatch(name))}
    # Layers that predict further tokens may keep an embedding of their own below the model's.
    outer = [base for base in bases if not any(other != base and base.startswith(other) for other in bases)]
    names = [
        name
        for name in files
        for base in outer
        if name.startswith(base) and NORM.fullmatch(name.removeprefix(base))
    ]
    if len(names) != 1:
        return None
    path = files[names[0]]
    try:
        with safe_open(path, framework="pt") as file:
            weight: Tensor = file.get_tensor(names[0])
    except (SafetensorError, OSError) as error:
        raise TargetError(
            f"{path}: not readable as safetensors ({error}); corrupt or cut short, download it again"
        ) from error
    return weight


def _same(stored: Tensor, own: Tensor) -> bool:
    import torch

    tiny = SMALLEST_HALF if torch.float16 in (stored.dtype, own.dtype) else 0.0
    return stored.shape == own.shape and all(
        bool(((a.to(b.device).float() - b.float()).abs() <= ROUNDING * b.float().abs() + tiny).all())
        for a, b in zip(stored.split(ROWS), own.split(ROWS), strict=True)
    )
