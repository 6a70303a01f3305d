"""The fused mask against the reference's, in Triton's interpreter here and compiled on a GPU."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import torch
from blocks import row_of, small_config
from torch import Tensor

from engine.dflash.anchors import anchors_at, draw_anchors
from engine.dflash.attention import flex_slots
from engine.dflash.attention_mask import TILE, block_mask, visible_runs
from engine.dflash.configuration import FULL, SLIDING

INTERPRETED = """
import contextlib, sys, torch
sys.path.insert(0, "tests")
from test_mask_kernel import AT_BORDERS, CASES, compare
import engine.dflash.mask_kernel as kernel
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
kernel.PIECE = 4  # the tables take more than one piece
for case in CASES + AT_BORDERS:
    compare(*case, device="cpu")
"""

CASES = [
    (((290, 2), (300, 3), (1, 1), (170, 0)), 40, block_size, window, causal)
    for block_size in (5, 8, 16)
    for window, causal in ((None, None), (1, None), (20, None), (150, None), (20, False), (4096, None))
] + [
    (((1, 1),), 4, 8, None, None),  # no anchor at all
    (((700, 1), (9, 1)), 60, 16, 100, None),  # more tiles of queries than a piece
    (((1600, 1400),), 80, 16, None, None),  # and more tiles of keys that are seen in full
]
"""Documents, anchors at most, slots of a block, window of a sliding layer (None: full), causal."""

BORDERS = [127, 128, 129, 255, 256, 257, 384, 511, 512, 513, 640]
TILES_OF_QUERIES = [*range(256, 264), *range(384, 392)]
AT_BORDERS = [
    (documents, count, block_size, window, causal, BORDERS)
    for documents in (((700, 600),), ((128, 120), (128, 100), (256, 200), (200, 190)))
    for count, block_size in ((16, 8), (16, 16), (13, 16))
    for window, causal in ((None, None), (1, None), (128, None), (129, None), (20, False), (4096, None))
] + [(((700, 600),), 24, 16, window, None, TILES_OF_QUERIES) for window in (None, 4096)]
"""The same with anchors at given slots, where runs and documents begin and end with tiles of keys."""


def compare(
    documents: tuple,
    max_anchors: int,
    block_size: int,
    window: int | None,
    causal: bool | None,
    at: Sequence[int] | None = None,
    *,
    device: str,
) -> None:
    """Every table, every run and every index that counts; the rest of the indices is a permutation's."""
    from engine.dflash.mask_kernel import fused_block_mask

    kind = FULL if window is None else SLIDING
    config = small_config(
        block_size=block_size, layer_types=(kind,), sliding_window=window or 20, is_causal=causal
    )
    row = row_of(*documents)
    if at is None:
        anchors = draw_anchors(row, seed=1, epoch=0, max_anchors=max_anchors)
    else:
        anchors = anchors_at(row, torch.tensor(at), max_anchors)
    there = attrs.evolve(anchors, slot=anchors.slot.to(device), document=anchors.document.to(device))
    slots = flex_slots(row.length)
    found = fused_block_mask(there, row.starts.to(device), slots, config, kind)
    expected = block_mask(visible_runs(anchors, row.starts, slots, config, kind))
    assert found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE == (TILE, TILE)
    for side in ("kv", "full_kv", "q", "full_q"):
        counts, wanted = (getattr(mask, f"{side}_num_blocks").cpu() for mask in (found, expected))
        assert counts.dtype == torch.int32 and torch.equal(counts, wanted), side
        indices, order = (getattr(mask, f"{side}_indices").cpu() for mask in (found, expected))
        used = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[used], order[used]), side
        assert torch.equal(indices.sort(-1).values, order.sort(-1).values), side
    queries = torch.arange(expected.seq_lengths[0])[:, None]
    keys = torch.arange(expected.seq_lengths[1])[None]

    def pairs(mask: object, where: str) -> Tensor:
        nothing = torch.zeros((), dtype=torch.int64, device=where)
        return mask.mask_mod(nothing, nothing, queries.to(where), keys.to(where)).cpu()  # type: ignore[attr-defined]

    assert torch.equal(pairs(found, device), pairs(expected, "cpu"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_make_the_references_mask() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_the_compiled_kernels_make_the_references_mask(device: str) -> None:
    if torch.device(device).index >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    for case in CASES + AT_BORDERS:
        compare(*case, device=device)


@pytest.mark.gpu
def test_a_large_micro_batchs_mask_is_the_references() -> None:
    documents = tuple((1024, 100) for _ in range(8))
    for window in (None, 2048):
        compare(documents, 512, 16, window, None, device="cuda")
