"""Attention of blocks to context and to themselves, on two backends that agree.

`dense` runs on any device: a document's blocks are scored against that document alone, some at a
time, so that its cost grows with documents and not with the packed row. `flex` is compiled
FlexAttention over the whole row, for GPUs. Which one runs is settled once per run.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.dflash.anchors import Anchors
from engine.dflash.attention_mask import TILE, VisibleRuns, block_mask, dense_mask, visible_runs
from engine.dflash.configuration import DrafterConfig
from engine.dflash.packing import sent
from engine.errors import InputError

Backend = Literal["dense", "flex"]

BLOCKS_PER_PIECE = 32
"""Blocks scored together by the dense backend; their mutual scores are computed and masked."""

MASKS_KEPT = 1 << 26
"""Elements of the dense backend's masks, a byte each, that are kept for all layers of a micro-batch. Where a
long document makes more of them, each layer makes them anew, a piece at a time, and sliding layers leave out
what is behind their windows."""

EAGER_FLEX_SCORES = 1 << 24
"""Uncompiled FlexAttention holds every score; above this many per head it is refused."""

Attention = Callable[[str, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(layer_type, q [Q, heads, d], context k and v [T, kv, d], block k and v [Q, kv, d]) → [Q, heads, d]"""


def prepare_attention(
    backend: Backend,
    anchors: Anchors,
    starts: Tensor,
    context_length: int,
    config: DrafterConfig,
    device: torch.device,
) -> Attention:
    """Build the masks of one micro-batch and return the function that attends with them.

    Args:
        starts: int64 [documents] on the CPU, as in `PackedRow`.
        context_length: T.
        device: where queries and keys will lie.
    """
    prepare = _prepare_dense if backend == "dense" else _prepare_flex
    return prepare(anchors, starts, context_length, config, device)


@attrs.frozen
class _Piece:
    """Some blocks of one document, and the part of the context that any of them sees."""

    queries: slice
    context: slice
    keys: Tensor
    """int64 [context + queries]: their numbers in a mask."""

    @property
    def scores(self) -> int:
        return (self.queries.stop - self.queries.start) * self.keys.numel()

    def seen(self, run: VisibleRuns) -> "_Piece":
        """The same without the keys in front of all that its queries see."""
        first = max(self.context.start, int(run.context_begin[self.queries].min()))
        keys = self.keys[first - self.context.start :]
        return _Piece(self.queries, slice(first, self.context.stop), keys)


def _prepare_dense(
    anchors: Anchors, starts: Tensor, context_length: int, config: DrafterConfig, device: torch.device
) -> Attention:
    size = config.block_size
    runs = {
        kind: visible_runs(anchors, starts, context_length, config, kind) for kind in set(config.layer_types)
    }
    begins = starts[anchors.document.clamp(min=0)].tolist()
    slots, documents = anchors.slot.tolist(), anchors.document.tolist()
    pieces = []
    first = 0
    while first < anchors.count:
        last = first + 1
        while (
            last < anchors.count and documents[last] == documents[first] and last - first < BLOCKS_PER_PIECE
        ):
            last += 1
        queries = slice(first * size, last * size)
        used = documents[first] >= 0
        context = slice(begins[first], slots[last - 1]) if used else slice(0, 0)
        keys = torch.cat(
            [
                torch.arange(context.start, context.stop, device=device),
                torch.arange(queries.start, queries.stop, device=device) + context_length,
            ]
        )
        pieces.append(_Piece(queries, context, keys))
        first = last

    keeps = sum(piece.scores for piece in pieces) * len(runs) <= MASKS_KEPT
    of_kind = {kind: pieces if keeps else [piece.seen(run) for piece in pieces] for kind, run in runs.items()}
    runs = {kind: run.to(device) for kind, run in runs.items()}

    def visible(piece: _Piece, kind: str) -> Tensor:  # bool [1, queries, context + queries]
        return dense_mask(runs[kind], piece.queries, piece.keys)[None]

    kept = {kind: [visible(piece, kind) for piece in pieces] for kind in runs} if keeps else None

    def attend(
        layer_type: str, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor
    ) -> Tensor:
        out = []
        for number, piece in enumerate(of_kind[layer_type]):
            k = torch.cat([context_k[piece.context], block_k[piece.queries]])  # [keys, kv, d]
            v = torch.cat([context_v[piece.context], block_v[piece.queries]])
            mask = kept[layer_type][number] if kept else visible(piece, layer_type)
            out.append(_scaled_dot_product(q[piece.queries], k, v, mask))
        return torch.cat(out)

    return attend


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [Q, heads, d], k and v [K, kv, d], visible bool [1, Q, K] → [Q, heads, d]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=visible[None],
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _prepare_flex(
    anchors: Anchors, starts: Tensor, context_length: int, config: DrafterConfig, device: torch.device
) -> Attention:
    slots = flex_slots(context_length)
    # The masks are made on the device, of no more than where the blocks and the documents begin.
    slot, document, starts = sent([anchors.slot, anchors.document, starts], device)
    anchors = attrs.evolve(anchors, slot=slot, document=document)
    make = _mask_maker(device)
    masks = {kind: make(anchors, starts, slots, config, kind) for kind in dict.fromkeys(config.layer_types)}
    queries = anchors.count * config.block_size
    padding = -queries % TILE
    attention = flex_on(device, queries, slots)

    def attend(
        layer_type: str, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor
    ) -> Tensor:
        if padding:  # block sizes that do not divide the tile
            q, block_k, block_v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, block_k, block_v))
        if slots > context_length:
            tail = (0, 0, 0, 0, 0, slots - context_length)
            context_k, context_v = F.pad(context_k, tail), F.pad(context_v, tail)
        k = torch.cat([context_k, block_k]).transpose(0, 1)[None]  # [1, kv, T + Q, d]
        v = torch.cat([context_v, block_v]).transpose(0, 1)[None]
        out = attention(q.transpose(0, 1)[None], k, v, block_mask=masks[layer_type], enable_gqa=True)
        return out[0].transpose(0, 1)[:queries]

    return attend


def _mask_maker(device: torch.device) -> Callable[[Anchors, Tensor, int, DrafterConfig, str], BlockMask]:
    if device.type == "cuda":
        from engine.dflash.mask_kernel import fused_block_mask

        return fused_block_mask
    return lambda *arguments: block_mask(visible_runs(*arguments))


def flex_slots(context_length: int) -> int:
    """Slots that the context takes in FlexAttention: a power of two, for each length is compiled anew.

    Tiles that no query sees are skipped, so the slots behind the context cost their memory alone.
    """
    return max(TILE, 1 << (context_length - 1).bit_length())


def flex_on(device: torch.device, queries: int, context_length: int) -> Callable[..., Any]:
    """FlexAttention for a device: compiled on a GPU; uncompiled, and only for small cases, on a CPU.

    Raises:
        InputError: the uncompiled form would hold more than `EAGER_FLEX_SCORES` scores per head.
    """
    if flex_compiles(device):
        return _compiled_flex()
    scores = queries * (context_length + queries)
    if scores > EAGER_FLEX_SCORES:
        raise InputError(
            f"FlexAttention {_not_compiled(device)} and would hold {scores:,} scores per head "
            f'(at most {EAGER_FLEX_SCORES:,} are allowed); use attention = "dense" there'
        )
    return flex_attention


def flex_compiles(device: torch.device) -> bool:
    """Whether FlexAttention runs compiled there, as anything large has to."""
    off = torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    return device.type == "cuda" and not off


def _not_compiled(device: torch.device) -> str:
    if device.type == "cuda":
        return "is not compiled where TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set,"
    return f"cannot be compiled on {device}"


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Compiled at the first call, not at import, for each context length that `flex_slots` gives.

    Devices and passes without gradient have code of their own, so that there may be more than the
    compiler's default limit allows. With `fullgraph`, passing the limit is an error rather than a
    fall back to the uncompiled form and its memory.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
