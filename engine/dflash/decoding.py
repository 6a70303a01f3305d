"""Accepted length: what a greedy server would commit per verification.

The walk is teacher-forced. Every answer position is scored as an anchor once; then a document is
walked as a server would: the first answer token comes from the prefill and is the first anchor;
at an anchor the leading right slots n are accepted and the target adds one token of its own, so
the next anchor lies n + 1 further on. The mean of these advances is the accepted length. A mean
over all anchors would count easy stretches once per token and is another number.

An answer's last verification commits no token past the answer's end, so neither does the walk.

A slot is right where it has the token that the target would have said there, which is what a server
compares with. The text's own token is another one wherever the target's was drawn at a temperature.
"""

from collections.abc import Iterable

import attrs
import torch
from torch import Tensor

from engine.dflash.anchors import anchors_at, blocks_at, valid_anchor_slots
from engine.dflash.drafter import Drafter
from engine.dflash.objective import BlockCounts, block_loss, leading_right
from engine.dflash.packing import PackedRow
from engine.dflash.training import Packed, Recipe, SharedWeights, drafter_blocks


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
    """Σ w·CE / Σ w over every valid anchor against the documents' own tokens, nats."""
    accepted_length: float
    """Mean tokens per verification; NaN where no answer has two tokens."""
    accuracy: float
    block_prefix: float
    verifications: int
    documents: int

    def row(self) -> dict[str, float]:
        """As it stands in `metrics.jsonl`."""
        return {"held_out_loss": self.held_out_loss, "accepted_length": self.accepted_length}


@attrs.frozen
class Walked:
    """Answers that were scored and walked; figures of several batches can be added up from these."""

    counts: BlockCounts
    """Over every valid anchor: losses against the documents' own tokens, hits of what counts as right."""
    advances: list[int]
    """Tokens committed by each verification, in order."""
    drafted: list[int]
    """How many of these were the drafter's: all but the target's own, which an answer's end may cut off."""
    documents: int

    @property
    def accepted_length(self) -> float:
        """Mean tokens per verification; NaN where no answer has two tokens."""
        return sum(self.advances) / len(self.advances) if self.advances else float("nan")


def tokens_by_slot(row: PackedRow, tokens: Tensor) -> Tensor:
    """Tokens of the padded rows [rows, length], on any device, at the slots of their packed row.

    Returns:
        int64 [T] on the CPU; 0 in the tail.
    """
    by_slot = torch.zeros_like(row.input_ids)
    by_slot[: row.tokens] = tokens.cpu().flatten()[row.source]
    return by_slot


@torch.no_grad()
def walk_answers(
    drafter: Drafter,
    shared: SharedWeights,
    batches: Iterable[tuple[PackedRow, Packed, Tensor]],
    recipe: Recipe,
) -> Walked:
    """Score every answer position as an anchor, and walk the answers.

    Args:
        batches: packed rows with their packed taps on the drafter's device, and the token that counts as
            right at each slot, int64 [T] on the CPU: what the target would have said or, where that is not
            known, the row's own. The loss is against the row's own tokens in any case, as in training.
        recipe: without noise, whatever it says; the blocks of a row are scored `max_anchors` at a time.
    """
    config = drafter.config
    counts = BlockCounts.zeros(config.block_size, shared.lm_head.device)
    advances: list[int] = []
    drafted: list[int] = []
    documents = 0
    for row, packed, right in batches:
        context = recipe.features.context(drafter, packed)
        documents += row.document_ids.numel()
        wanted = attrs.evolve(row, input_ids=right)
        leading: dict[int, int] = {}
        for slots in valid_anchor_slots(row).split(recipe.max_anchors):
            if not slots.numel():  # a row without an answer
                continue
            anchors = anchors_at(row, slots, recipe.max_anchors)
            hidden, blocks = drafter_blocks(drafter, shared, context, row, anchors, recipe)
            loss = block_loss(
                hidden,
                shared.lm_head,
                blocks.labels,
                blocks.supervised,
                weights=recipe.weights,
                chunk=recipe.chunk,
                used=anchors.used,
                softmax=drafter.softmax,
            )
            own = blocks_at(
                wanted, anchors, block_size=config.block_size, mask_token_id=config.mask_token_id
            ).labels
            hits = (loss.predicted == own.to(hidden.device)) & blocks.supervised
            counts.add(attrs.evolve(loss, right=hits), anchors.used)
            prefixes = leading_right(hits[: anchors.used]).tolist()
            leading.update(zip(slots.tolist(), prefixes, strict=True))
        for anchor, last in answer_spans(row):
            for advance in walk(leading, anchor, last):
                advances.append(advance)
                drafted.append(min(leading[anchor], advance))
                anchor += advance
    return Walked(counts, advances, drafted, documents)


def evaluate(
    drafter: Drafter,
    shared: SharedWeights,
    batches: Iterable[tuple[PackedRow, Packed, Tensor]],
    recipe: Recipe,
) -> Evaluation:
    """The figures of `walk_answers`, as a run reports them; arguments as there."""
    walked = walk_answers(drafter, shared, batches, recipe)
    return Evaluation(
        held_out_loss=walked.counts.loss,
        accepted_length=walked.accepted_length,
        accuracy=walked.counts.accuracy,
        block_prefix=walked.counts.block_prefix,
        verifications=len(walked.advances),
        documents=walked.documents,
    )
