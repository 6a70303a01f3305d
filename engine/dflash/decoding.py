"""Accepted length: what a greedy server would commit per verification.

The walk is teacher-forced. Every answer position is scored as an anchor once; then a document is
walked as a server would: the first answer token comes from the prefill and is the first anchor;
at an anchor the leading right slots n are accepted and the target adds one token of its own, so
the next anchor lies n + 1 further on. The mean of these advances is the accepted length. A mean
over all anchors would count easy stretches once per token and is another number.

An answer's last verification commits no token past the answer's end, so neither does the walk.
"""

from collections.abc import Iterable

import attrs
import torch

from engine.dflash.anchors import anchors_at, valid_anchor_slots
from engine.dflash.drafter import Drafter
from engine.dflash.objective import BlockCounts, leading_right
from engine.dflash.packing import PackedRow
from engine.dflash.training import Packed, Recipe, SharedWeights, drafter_loss


def answer_spans(row: PackedRow) -> list[tuple[int, int]]:
    """Runs of supervised tokens within a document, as (first slot, last slot), both inclusive."""
    mask = row.loss_mask & (row.document >= 0)
    follows = torch.zeros_like(mask)
    follows[1:] = mask[1:] & mask[:-1] & (row.document[1:] == row.document[:-1])
    begins = (mask & ~follows).nonzero().squeeze(1)
    continues = torch.cat([follows[1:], follows.new_zeros(1)])
    ends = (mask & ~continues).nonzero().squeeze(1)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def walk(leading: dict[int, int], first: int, last: int) -> list[int]:
    """Tokens committed by each verification of one answer.

    Args:
        leading: anchor slot → leading right slots of the block there.
        first, last: slots of the answer's first and last token.
    """
    advances = []
    anchor = first
    while anchor < last:
        advance = min(leading[anchor] + 1, last - anchor)
        advances.append(advance)
        anchor += advance
    return advances


@attrs.frozen
class Evaluation:
    """A drafter on held-out answers."""

    held_out_loss: float
    """Σ w·CE / Σ w over every valid anchor, nats."""
    accepted_length: float
    """Mean tokens per verification; NaN where no answer has two tokens."""
    accuracy: float
    block_prefix: float
    verifications: int
    documents: int

    def row(self) -> dict[str, float]:
        """As it stands in `metrics.jsonl`."""
        return {"held_out_loss": self.held_out_loss, "accepted_length": self.accepted_length}


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    shared: SharedWeights,
    batches: Iterable[tuple[PackedRow, Packed]],
    recipe: Recipe,
) -> Evaluation:
    """Score and walk packed held-out documents.

    Args:
        batches: packed rows with their packed taps on the drafter's device.
        recipe: without noise, whatever it says; the blocks of a row are scored `max_anchors` at a time.
    """
    device = shared.lm_head.device
    counts = BlockCounts.zeros(drafter.config.block_size, device)
    advances: list[int] = []
    documents = 0
    for row, packed in batches:
        context = recipe.features.context(drafter, packed)
        documents += row.document_ids.numel()
        leading: dict[int, int] = {}
        for slots in valid_anchor_slots(row).split(recipe.max_anchors):
            if not slots.numel():  # a row without an answer
                continue
            anchors = anchors_at(row, slots, recipe.max_anchors)
            loss = drafter_loss(drafter, shared, context, row, anchors, recipe)
            counts.add(loss, anchors.used)
            prefixes = leading_right(loss.right[: anchors.used]).tolist()
            leading.update(zip(slots.tolist(), prefixes, strict=True))
        for first, last in answer_spans(row):
            advances += walk(leading, first, last)
    return Evaluation(
        held_out_loss=counts.loss,
        accepted_length=sum(advances) / len(advances) if advances else float("nan"),
        accuracy=counts.accuracy,
        block_prefix=counts.block_prefix,
        verifications=len(advances),
        documents=documents,
    )
