"""What a drafter keeps of the committed text while a server decodes: its context's keys and values.

Training computes a document's context at once; a server meets it piece by piece, and each layer's
keys and values of a position never change again, so they are computed when the target's states of
a token are known and kept. The block itself goes through the trained module's own forward: only
the attention that it is given is another one, which looks into this cache.

Rows of a batch differ in length. A row's slots are its positions; those behind its end hold
anything and are masked. The slots behind the longest row's end are spare: a block's own keys and values
are put there while it is filled, so that nothing of the context is copied to attend to both.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.dflash.configuration import SLIDING, DrafterConfig
from engine.dflash.drafter import Drafter, DrafterLayer, rotary
from engine.target.decoding_kernels import any_shape_attention


class ContextCache:
    """Keys and values of every layer for the context of several sequences."""

    def __init__(self, drafter: Drafter, rows: int) -> None:
        config = drafter.config
        self.drafter = drafter
        self.lengths = [0] * rows
        """Context positions of each row: a block's anchor stands at this position."""
        empty = drafter.fc.weight.new_empty(rows, config.kv_heads, 0, config.head_dim)
        self.keys = [empty for _ in drafter.layers]  # [rows, kv_heads, slots, head_dim] each
        self.values = [empty for _ in drafter.layers]

    @torch.no_grad()
    def extend(self, taps: Sequence[Tensor]) -> None:
        """Append to each row the states of its newly committed tokens.

        Args:
            taps: per row [new tokens, taps·H], side by side in the order of the layers; may be empty.
        """
        counts = [len(new) for new in taps]
        total = sum(counts)
        if not total:
            return
        new, held = torch.tensor([counts, self.lengths], device=taps[0].device).unbind(0)  # [rows] each
        rows = torch.arange(len(counts), device=new.device)
        row = rows.repeat_interleave(new, output_size=total)  # [T]
        slot = torch.arange(total, device=new.device) + (held - (new.cumsum(0) - new))[row]  # [T]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._reserve(max(self.lengths) + self.drafter.config.block_size)
        context = self.drafter.context(torch.cat(list(taps)).to(self.keys[0].dtype))  # [T, H]
        position = rotary(slot, self.drafter.config)
        for layer, keys, values in zip(self.drafter.layers, self.keys, self.values, strict=True):
            attention = cast(DrafterLayer, layer).self_attn
            k, v = attention.keys_values(context, position)  # [T, kv_heads, head_dim]
            keys[row, :, slot], values[row, :, slot] = k, v

    def _reserve(self, slots: int) -> None:
        """Have room for so many; grows in strides, or every verification would copy everything."""
        missing = slots - self.keys[0].shape[2]
        if missing > 0:
            room = (0, 0, 0, missing + max(64, slots // 4))
            self.keys = [F.pad(keys, room) for keys in self.keys]
            self.values = [F.pad(values, room) for values in self.values]

    def select(self, chosen: Sequence[int]) -> None:
        """Keep these rows, in this order, and forget the others."""
        at = torch.tensor(list(chosen), dtype=torch.int64, device=self.keys[0].device)
        self.lengths = [self.lengths[row] for row in chosen]
        self.keys = [keys[at] for keys in self.keys]
        self.values = [values[at] for values in self.values]

    @torch.no_grad()
    def fill_blocks(self, block_embeddings: Tensor) -> Tensor:
        """Fill one block per row, anchored right behind the row's context.

        Args:
            block_embeddings: [rows, B, H]: the anchor's token, then mask tokens.

        Returns:
            [rows, B, H] after the final norm; slot k predicts the token at anchor + k.
        """
        config = self.drafter.config
        rows, size, width = block_embeddings.shape
        device = block_embeddings.device
        slots = max(self.lengths)
        self._reserve(slots + size)
        own = slice(slots, slots + size)
        anchor = torch.tensor(self.lengths, device=device)
        visible = {kind: _visible(config, kind, anchor, slots) for kind in set(config.layer_types)}
        layers = iter(zip(self.keys, self.values, strict=True))

        def attend(kind: str, q: Tensor, _k: Tensor, _v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
            keys, values = next(layers)  # a drafter's layers ask in their order
            q, block_k, block_v = (
                x.unflatten(0, (rows, size)).transpose(1, 2) for x in (q, block_k, block_v)
            )
            keys[:, :, own], values[:, :, own] = block_k, block_v
            out = F.scaled_dot_product_attention(  # [rows, heads, B, head_dim]
                q,
                keys[:, :, : own.stop],
                values[:, :, : own.stop],
                attn_mask=visible[kind],
                enable_gqa=config.heads != config.kv_heads,
            )
            return out.transpose(1, 2).flatten(0, 1)

        positions = anchor[:, None] + torch.arange(size, device=device)
        with any_shape_attention(device):
            hidden: Tensor = self.drafter(
                block_embeddings.flatten(0, 1),
                block_embeddings.new_empty(0, width),  # the context is here already
                positions.flatten(),
                positions.new_empty(0),
                attend,
            )
        return hidden.unflatten(0, (rows, size))


def _visible(config: DrafterConfig, kind: str, anchor: Tensor, slots: int) -> Tensor:
    """What each slot of each row's block sees, bool [rows, 1, B, slots + B]; True: visible.

    Args:
        anchor: int64 [rows], also the number of context positions that a row has.
        slots: context slots in front of the blocks' own.
    """
    slot = torch.arange(config.block_size, device=anchor.device)
    held = torch.arange(slots, device=anchor.device)
    before = held < anchor[:, None]  # [rows, slots]: strictly before the anchor
    context = before[:, None].expand(-1, config.block_size, -1)
    own = torch.ones(config.block_size, config.block_size, dtype=torch.bool, device=anchor.device)
    if config.causal_in_block(kind):
        own = own.tril()
    if kind == SLIDING and config.sliding_window:
        query = anchor[:, None] + slot  # [rows, B]
        context = context & (query[..., None] - held < config.sliding_window)
        own = own & (slot[:, None] - slot < config.sliding_window)
    return torch.cat([context, own.expand(len(anchor), -1, -1)], -1)[:, None]
