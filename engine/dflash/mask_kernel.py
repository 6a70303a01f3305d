"""FlexAttention's mask of a micro-batch in two kernels, for GPUs.

Operation by operation a mask takes a hundred launches, and beside a target that fills the device each of
them waits for a place. Here a program owns a tile of queries, finds their runs of keys and its row of the
tile table; then a program per tile of keys reads its column. The numbers are those of `attention_mask`,
exactly; the indices of tiles that nothing is seen of stand behind the others in an order of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from engine.dflash.anchors import Anchors
from engine.dflash.attention_mask import TILE, ordered_mask, padded_queries
from engine.dflash.configuration import SLIDING, DrafterConfig

PIECE = 64
"""Tiles that a program looks at together; more in turn."""

PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)


@triton.jit
def _place(chosen, before, tile, tiles):  # type: ignore[no-untyped-def]
    """Where each tile's index belongs: chosen ones from the front on, the others from the back."""
    chosen = chosen.to(tl.int32)
    earlier = before + tl.cumsum(chosen, 0) - chosen
    return tl.where(chosen == 1, earlier, tiles - 1 - (tile - earlier))


@triton.jit
def _query_tiles_kernel(  # type: ignore[no-untyped-def]
    slots_pointer,
    documents_pointer,
    starts_pointer,
    runs_pointer,
    table_pointer,
    counts_pointer,
    indices_pointer,
    context_length,
    queries,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    row, rows = tl.program_id(0), tl.num_programs(0)
    query = row * TILE + tl.arange(0, TILE)
    inside = query < queries
    block, offset = query // BLOCK, query % BLOCK
    anchor = tl.load(slots_pointer + block, mask=inside, other=0).to(tl.int32)
    document = tl.load(documents_pointer + block, mask=inside, other=-1)
    used = document >= 0
    begin = tl.load(starts_pointer + document, mask=used, other=0).to(tl.int32)
    end = tl.where(used, anchor, 0)
    own_begin = context_length + block * BLOCK
    own_end = own_begin + BLOCK
    if CAUSAL:
        own_end = own_begin + offset + 1
    if WINDOW > 0:
        begin = tl.maximum(begin, anchor + offset - WINDOW + 1)
        own_begin = tl.maximum(own_begin, own_begin + offset - WINDOW + 1)
    own_begin = tl.where(inside, own_begin, context_length + query)
    own_end = tl.where(inside, own_end, context_length + query + 1)
    run = rows * TILE
    tl.store(runs_pointer + query, begin)
    tl.store(runs_pointer + run + query, end)
    tl.store(runs_pointer + 2 * run + query, own_begin)
    tl.store(runs_pointer + 3 * run + query, own_end)

    begin, end, some = begin[:, None], end[:, None], (begin < end)[:, None]
    own_begin, own_end = own_begin[:, None], own_end[:, None]
    tiles = context_length // TILE + rows
    partial_before = 0
    full_before = 0
    for first in range(0, tiles, PIECE):
        tile = first + tl.arange(0, PIECE)
        there = tile < tiles
        low = (tile * TILE)[None]
        high = low + TILE
        seen = (some & (begin < high) & (end > low)) | ((own_begin < high) & (own_end > low))
        whole = ((begin <= low) & (end >= high)) | ((own_begin <= low) & (own_end >= high))
        full = (tl.min(whole.to(tl.int32), 0) == 1) & there
        partial = (tl.max(seen.to(tl.int32), 0) == 1) & (full == 0) & there
        code = tl.where(full, FULL, tl.where(partial, PARTIAL, 0))
        tl.store(table_pointer + row * tiles + tile, code.to(tl.int8), mask=there)
        place = row * tiles + _place(partial, partial_before, tile, tiles)
        tl.store(indices_pointer + place, tile, mask=there)
        place = (rows + row) * tiles + _place(full, full_before, tile, tiles)
        tl.store(indices_pointer + place, tile, mask=there)
        partial_before += tl.sum(partial.to(tl.int32), 0)
        full_before += tl.sum(full.to(tl.int32), 0)
    tl.store(counts_pointer + row, partial_before)
    tl.store(counts_pointer + rows + row, full_before)


@triton.jit
def _key_tiles_kernel(  # type: ignore[no-untyped-def]
    table_pointer, counts_pointer, indices_pointer, rows, PIECE: tl.constexpr
):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    partial_before = 0
    full_before = 0
    for first in range(0, rows, PIECE):
        row = first + tl.arange(0, PIECE)
        there = row < rows
        code = tl.load(table_pointer + row * tiles + tile, mask=there, other=0)
        partial = code == PARTIAL
        full = code == FULL
        place = tile * rows + _place(partial, partial_before, row, rows)
        tl.store(indices_pointer + place, row, mask=there)
        place = (tiles + tile) * rows + _place(full, full_before, row, rows)
        tl.store(indices_pointer + place, row, mask=there)
        partial_before += tl.sum(partial.to(tl.int32), 0)
        full_before += tl.sum(full.to(tl.int32), 0)
    tl.store(counts_pointer + tile, partial_before)
    tl.store(counts_pointer + tiles + tile, full_before)


def fused_block_mask(
    anchors: Anchors, starts: Tensor, context_length: int, config: DrafterConfig, layer_type: str
) -> BlockMask:
    """`attention_mask.block_mask` of a layer's `visible_runs`; arguments as there, on a GPU."""
    device, queries = starts.device, anchors.count * config.block_size
    padded = padded_queries(queries, context_length)
    rows, tiles = padded // TILE, (context_length + padded) // TILE

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    runs, table = empty(4, padded), empty(rows, tiles, dtype=torch.int8)
    key_counts, key_indices = empty(2, 1, 1, rows), empty(2, 1, 1, rows, tiles)
    query_counts, query_indices = empty(2, 1, 1, tiles), empty(2, 1, 1, tiles, rows)
    with torch.cuda.device_of(starts):
        _query_tiles_kernel[(rows,)](
            anchors.slot,
            anchors.document,
            starts,
            runs,
            table,
            key_counts,
            key_indices,
            context_length,
            queries,
            BLOCK=config.block_size,
            WINDOW=(config.sliding_window or 0) if layer_type == SLIDING else 0,
            CAUSAL=config.causal_in_block(layer_type),
            TILE=TILE,
            PIECE=PIECE,
            num_warps=8,
        )
        _key_tiles_kernel[(tiles,)](table, query_counts, query_indices, rows, PIECE=PIECE, num_warps=1)
    return ordered_mask(runs, key_counts, key_indices, query_counts, query_indices)
