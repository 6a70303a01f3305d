"""Where blocks begin.

A position is a valid anchor when the token after it is supervised and lies in the same document:
the last prompt token counts, so the first answer token is learnt. Each epoch draws afresh, and
statelessly: the positions of a document are ranked by a hash of (seed, epoch, document,
position) and the first few are taken, so that neither neighbours nor threads nor a resume change
which ones. How many a document gets is settled by water-filling, since a share by length would
leave short documents, whose answers are as real, with nothing.
"""

import attrs
import torch
from torch import Tensor

from engine.dflash.packing import PackedRow
from engine.randomness import stateless_hash

UNUSED = -2


@attrs.frozen
class Anchors:
    """A fixed number N of anchor slots over a packed row, the used ones first and sorted."""

    slot: Tensor
    """int64 [N]: the anchor's slot in the row; 0 where unused."""
    document: Tensor
    """int64 [N]: its document's number within the micro-batch, -2 where unused."""
    position: Tensor
    """int64 [N]: its position in its document; 0 where unused."""
    used: int
    """How many slots hold an anchor."""

    @property
    def count(self) -> int:
        return self.slot.numel()


def valid_anchor_slots(row: PackedRow) -> Tensor:
    """Slots of the row where a block may begin, int64 [valid], ascending."""
    follows = row.document[1:] == row.document[:-1]
    return (follows & row.loss_mask[1:] & (row.document[:-1] >= 0)).nonzero().squeeze(1)


def share_anchors(available: list[int], max_anchors: int) -> list[int]:
    """Hand out `max_anchors` one at a time, document by document, until nobody wants more.

    The rounds are not played one by one: every document gets the level that fits, and what is
    left over goes to the first documents that still want one, as the rounds would have it.
    """
    low, high = 0, max(available, default=0)
    while low < high:  # the highest level at which the total still fits
        middle = (low + high + 1) // 2
        if sum(min(count, middle) for count in available) <= max_anchors:
            low = middle
        else:
            high = middle - 1
    shares = [min(count, low) for count in available]
    left = max_anchors - sum(shares)
    for number, count in enumerate(available):
        if left > 0 and count > shares[number]:
            shares[number] += 1
            left -= 1
    return shares


def draw_anchors(row: PackedRow, *, seed: int, epoch: int, max_anchors: int) -> Anchors:
    """Draw this epoch's anchors for one packed row; a function of the arguments alone."""
    candidates = valid_anchor_slots(row)
    document = row.document[candidates]
    available = torch.bincount(document, minlength=row.document_ids.numel()).tolist()
    shares = torch.tensor(share_anchors(available, max_anchors), dtype=torch.int64)

    rank = stateless_hash(seed, epoch, row.document_ids[document], row.position[candidates])
    by_rank = rank.argsort(stable=True)
    order = by_rank[document[by_rank].argsort(stable=True)]  # by document, then by rank
    first = torch.tensor([0, *available], dtype=torch.int64).cumsum(0)[:-1]  # [documents]
    place = torch.arange(order.numel()) - first[document[order]]  # place within the document
    chosen = candidates[order[place < shares[document[order]]]].sort().values
    return anchors_at(row, chosen, max_anchors)


def anchors_at(row: PackedRow, slots: Tensor, count: int) -> Anchors:
    """Anchors at given ascending slots of the row, with unused slots up to `count`."""
    used = slots.numel()

    def fill(values: Tensor, filler: int) -> Tensor:
        out = torch.full((count,), filler, dtype=torch.int64)
        out[:used] = values
        return out

    return Anchors(
        slot=fill(slots, 0),
        document=fill(row.document[slots], UNUSED),
        position=fill(row.position[slots], 0),
        used=used,
    )


@attrs.frozen
class Blocks:
    """What the drafter reads and what it must say, for N anchors of B slots; made on the CPU."""

    input_ids: Tensor
    """int64 [N, B]: the real token at the anchor, then mask tokens."""
    positions: Tensor
    """int64 [N, B]: position of each slot in its document."""
    labels: Tensor
    """int64 [N, B - 1]: the tokens that slots 1 … B-1 predict; 0 where there is none."""
    supervised: Tensor
    """bool [N, B - 1]: the label is an answer token of the anchor's own document."""


def blocks_at(row: PackedRow, anchors: Anchors, *, block_size: int, mask_token_id: int) -> Blocks:
    """Inputs and labels of the blocks that begin at `anchors`."""
    offsets = torch.arange(block_size)
    input_ids = torch.full((anchors.count, block_size), mask_token_id, dtype=torch.int64)
    input_ids[:, 0] = row.input_ids[anchors.slot]
    slots = anchors.slot[:, None] + offsets[1:]  # [N, B - 1]
    inside = slots < row.length
    slots = slots.clamp(max=row.length - 1)
    inside &= row.document[slots] == anchors.document[:, None]
    return Blocks(
        input_ids=input_ids,
        positions=anchors.position[:, None] + offsets,
        labels=row.input_ids[slots] * inside,
        supervised=row.loss_mask[slots] & inside,
    )
