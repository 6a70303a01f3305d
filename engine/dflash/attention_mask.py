"""What each slot of each block may see, and the two forms in which attention wants to hear it.

Keys are laid out as `[context of T slots ; blocks of N·B slots]`. Because anchors are sorted and
documents are contiguous, a query sees exactly two runs of keys: the context of its own document
before its anchor (from the window's edge on, in a sliding layer), and its own block (up to its
own slot, where the layer is causal in the block). So a mask is four numbers per query, and both
the dense mask and FlexAttention's tile table follow from them without scoring a pair twice.

An unused block sees itself and nothing else: a fully masked row would be NaN on some backends.
"""

import attrs
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from engine.dflash.anchors import Anchors
from engine.dflash.configuration import SLIDING, DrafterConfig
from engine.dflash.packing import sent

TILE = 128
"""FlexAttention's tile: this many queries by this many keys are scored or skipped together."""


@attrs.frozen
class VisibleRuns:
    """The two runs of keys, begin inclusive and end exclusive, of every query; int64 [N·B] each."""

    context_begin: Tensor
    context_end: Tensor
    block_begin: Tensor
    block_end: Tensor
    context_length: int
    """T: block keys are numbered from here."""

    def to(self, device: torch.device) -> "VisibleRuns":
        """The same on another device, by one copy."""
        runs = [self.context_begin, self.context_end, self.block_begin, self.block_end]
        begin, end, own_begin, own_end = sent(runs, device)
        return VisibleRuns(begin, end, own_begin, own_end, self.context_length)


def visible_runs(
    anchors: Anchors, starts: Tensor, context_length: int, config: DrafterConfig, layer_type: str
) -> VisibleRuns:
    """The runs of keys that a layer of `layer_type` sees.

    Args:
        anchors: their tensors lie where the runs are wanted, and so does `starts`.
        starts: int64 [documents], slot of each document's first token in the packed row.
        context_length: T, slots of the packed row.
    """
    size, device = config.block_size, starts.device
    slot = torch.arange(size, device=device)
    used = anchors.document >= 0
    begin = torch.where(used, starts[anchors.document.clamp(min=0)], 0)
    end = torch.where(used, anchors.slot, 0)  # strictly before the anchor
    context_begin = begin[:, None].expand(-1, size)  # [N, B]
    own = (context_length + torch.arange(anchors.count, device=device) * size)[
        :, None
    ]  # key of each block's slot 0
    block_begin = own.expand(-1, size)
    block_end = own + (slot + 1 if config.causal_in_block(layer_type) else torch.full_like(slot, size))
    if layer_type == SLIDING:
        window = config.sliding_window or 0
        # q_pos - k_pos < W per query: within a document, slots and positions differ by a constant.
        context_begin = torch.maximum(context_begin, anchors.slot[:, None] + slot - window + 1)
        block_begin = torch.maximum(block_begin, own + slot - window + 1)
    context_end = end[:, None].expand(-1, size)
    context_begin = torch.minimum(context_begin, context_end)
    return VisibleRuns(
        context_begin.reshape(-1).contiguous(),
        context_end.reshape(-1).contiguous(),
        block_begin.reshape(-1).contiguous(),
        block_end.reshape(-1).contiguous(),
        context_length,
    )


def dense_mask(runs: VisibleRuns, queries: slice, keys: Tensor) -> Tensor:
    """Whether each of some queries sees each of some keys, bool [queries, keys]; True: visible."""
    keys = keys[None]
    begin, end = runs.context_begin[queries, None], runs.context_end[queries, None]
    own_begin, own_end = runs.block_begin[queries, None], runs.block_end[queries, None]
    return ((keys >= begin) & (keys < end)) | ((keys >= own_begin) & (keys < own_end))


def block_mask(runs: VisibleRuns) -> BlockMask:
    """FlexAttention's mask over `[N·B queries, T + N·B keys]`, both rounded up to whole tiles.

    A tile of keys is skipped when no query of the tile of queries sees any of it, and needs no
    mask function when every query sees all of it. Both are decided from the runs.
    """
    queries = runs.context_begin.numel()
    padded = padded_queries(queries, runs.context_length)
    keys = runs.context_length + padded
    device = runs.context_begin.device

    def rows(run: Tensor, filler: Tensor) -> Tensor:  # queries past the last block see their own key
        return torch.cat([run, filler]) if filler.numel() else run

    tail = torch.arange(queries, padded, device=device)
    empty = torch.zeros_like(tail)
    begin, end = rows(runs.context_begin, empty), rows(runs.context_end, empty)
    own_begin = rows(runs.block_begin, runs.context_length + tail)
    own_end = rows(runs.block_end, runs.context_length + tail + 1)

    low = torch.arange(0, keys, TILE, device=device)  # [key tiles]
    high = low + TILE

    def touches(run_begin: Tensor, run_end: Tensor) -> Tensor:  # [padded, key tiles]
        some = run_begin < run_end
        return (run_begin[:, None] < high) & (run_end[:, None] > low) & some[:, None]

    def covers(run_begin: Tensor, run_end: Tensor) -> Tensor:
        return (run_begin[:, None] <= low) & (run_end[:, None] >= high)

    tiles = padded // TILE
    seen = (touches(begin, end) | touches(own_begin, own_end)).view(tiles, TILE, -1).any(1)
    full = (covers(begin, end) | covers(own_begin, own_end)).view(tiles, TILE, -1).all(1)
    kinds = torch.stack([seen & ~full, full])[:, None, None]  # [2, 1, 1, query tiles, key tiles]
    four_runs = torch.stack([begin, end, own_begin, own_end]).to(torch.int32)
    return ordered_mask(four_runs, *_ordered(kinds), *_ordered(kinds.mT))


def padded_queries(queries: int, context_length: int) -> int:
    """The queries rounded up to whole tiles.

    Raises:
        ValueError: the context is no multiple of a tile.
    """
    if context_length % TILE:
        raise ValueError(f"context of {context_length} slots: not a multiple of the tile, {TILE}")
    return -(-queries // TILE) * TILE


def ordered_mask(
    runs: Tensor, key_counts: Tensor, key_indices: Tensor, query_counts: Tensor, query_indices: Tensor
) -> BlockMask:
    """FlexAttention's mask of a tile table given by rows and by columns, int32 all.

    Of a leading 2, the first are the tiles that are seen in part, the second those seen in full.

    Args:
        runs: [4, padded queries]: begin and end of each query's context, then of its block.
        key_counts: [2, 1, 1, query tiles], how many tiles of keys each tile of queries sees.
        key_indices: [2, 1, 1, query tiles, key tiles], which ones: ascending, then the rest in any order.
        query_counts, query_indices: the same of the transposed table.
    """
    begin, end, own_begin, own_end = runs.unbind()

    # The kernels compare these for every pair of a tile that is seen in part: int32 is half as wide.
    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= begin[query]) & (key < end[query])
        in_block = (key >= own_begin[query]) & (key < own_end[query])
        return in_context | in_block

    rows, tiles = key_indices.shape[-2:]
    return BlockMask(
        seq_lengths=(rows * TILE, tiles * TILE),
        kv_num_blocks=key_counts[0],
        kv_indices=key_indices[0],
        full_kv_num_blocks=key_counts[1],
        full_kv_indices=key_indices[1],
        q_num_blocks=query_counts[0],
        q_indices=query_indices[0],
        full_q_num_blocks=query_counts[1],
        full_q_indices=query_indices[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of a table bool [..., rows, columns]: how many are set; the indices, of set ones first."""
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1).to(torch.int32), order.to(torch.int32).contiguous()
