"""One micro-batch as one row: padding goes, documents stand one behind the other.

The target reads right-padded rows; the drafter reads a single row of real tokens, because its
attention is cheap only where no padding is scored. The row is padded at the end to a multiple of
1,024 so that compiled kernels meet few shapes. Everything but the context is small and stays on
the CPU, where anchors are drawn without waiting for a device.
"""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

ROW_MULTIPLE = 1024
TAIL = -1


@attrs.frozen
class PackedRow:
    """The documents of one micro-batch in a row of T slots; tensors on the CPU."""

    input_ids: Tensor
    """int64 [T]; 0 in the tail."""
    loss_mask: Tensor
    """bool [T]: the token is part of an answer."""
    document: Tensor
    """int64 [T]: the document's number within the micro-batch, -1 in the tail."""
    position: Tensor
    """int64 [T]: the token's place in its document, counted from 0; 0 in the tail."""
    document_ids: Tensor
    """int64 [documents]: content ids, which the stateless draws depend on."""
    starts: Tensor
    """int64 [documents]: slot of each document's first token."""
    source: Tensor
    """int64 [tokens]: where each real token stands in the flattened padded rows."""

    @property
    def tokens(self) -> int:
        return self.source.numel()

    @property
    def length(self) -> int:
        return self.input_ids.numel()


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """CPU tensors on a device, by one copy that the thread does not wait for.

    A copy from pageable memory would make the thread wait for all that the device still has to do, once
    per tensor. Through the allocator's pinned memory it waits for nothing.

    Args:
        tensors: int64 or bool, small; they keep shape and dtype.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1).long() for tensor in tensors]).pin_memory()
    pieces = flat.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape).to(tensor.dtype) for piece, tensor in zip(pieces, tensors, strict=True)]


def packed_length(tokens: int) -> int:
    """T: the slots of a row that holds so many real tokens."""
    return -(-max(tokens, 1) // ROW_MULTIPLE) * ROW_MULTIPLE


def pack_row(input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, document_ids: Tensor) -> PackedRow:
    """Lay padded rows out as one.

    Args:
        input_ids: int64 [rows, length], right-padded.
        loss_mask: bool or 0/1 [rows, length].
        lengths: int64 [rows], real tokens of each row.
        document_ids: int64 [rows].
    """
    rows, padded = input_ids.shape
    real = torch.arange(padded) < lengths[:, None]  # [rows, padded]
    source = real.flatten().nonzero().squeeze(1)  # [tokens]
    tokens = source.numel()
    length = packed_length(tokens)

    def row(values: Tensor, tail: int) -> Tensor:
        out = torch.full((length,), tail, dtype=values.dtype)
        out[:tokens] = values
        return out

    return PackedRow(
        input_ids=row(input_ids.flatten()[source], 0),
        loss_mask=row(loss_mask.bool().flatten()[source], 0),
        document=row(source // padded, TAIL),
        position=row(source % padded, 0),
        document_ids=document_ids,
        starts=lengths.cumsum(0) - lengths,
        source=source,
    )


def pack_taps(taps: list[Tensor], row: PackedRow) -> Tensor:
    """Gather the taps of the real tokens and concatenate them.

    Args:
        taps: one [rows, length, H] per tapped layer, on the target's device.

    Returns:
        [T, taps·H] on the same device and in the same dtype; zeros in the tail.
    """
    hidden = taps[0].shape[-1]
    packed = taps[0].new_zeros(row.length, len(taps) * hidden)
    [source] = sent([row.source], taps[0].device)
    for number, tap in enumerate(taps):
        columns = packed[: row.tokens, number * hidden : (number + 1) * hidden]
        columns.copy_(tap.reshape(-1, hidden).index_select(0, source))
    return packed
