"""Numbers that are not finite: noticed on the device, read with a step's other figures, told by name.

A single NaN in the gradient would spoil every weight for good, so a step that holds one updates nothing,
on any drafter. To look for it must not make a lane wait: each micro-batch leaves the largest magnitude
of each of its taps and its loss on the device, a handful of numbers in which NaN and infinity survive,
and the optimizer reads them where it waits for the device anyway. One bad step may be a document's
or a passing fault's; several in a row are the run's, which then ends at the state before them.
"""

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from engine.errors import NonFinite

DOCUMENTS_SHOWN = 16


@attrs.frozen(eq=False)
class Reading:
    """What one micro-batch left on the device."""

    micro_batch: int
    document_ids: Tensor
    """int64 [rows], on the CPU."""
    sizes: Tensor
    """float32 [taps + 1]: the largest magnitude of each tap, then Σ w·CE."""


@attrs.frozen
class Trouble:
    """The first number that was not finite, in words; the order among micro-batches is theirs."""

    micro_batch: int
    text: str


def take_reading(micro_batch: int, document_ids: Tensor, taps: Sequence[Tensor], loss_sum: Tensor) -> Reading:
    """Launch what tells whether a micro-batch is finite; nothing waits for it.

    Args:
        document_ids: int64 [rows], on the CPU.
        taps: [T, H] each, on the drafter's device. loss_sum: a scalar there.
    """
    largest = [torch.linalg.vector_norm(tap.detach(), ord=math.inf, dtype=torch.float32) for tap in taps]
    return Reading(micro_batch, document_ids, torch.stack([*largest, loss_sum.detach().float()]))


def first_trouble(readings: Sequence[Reading], target_layer_ids: Sequence[int]) -> Trouble | None:
    """The first tap, or else loss, that is not finite; waits for the device."""
    if not readings:
        return None
    rows = torch.stack([reading.sizes for reading in readings]).tolist()
    for reading, sizes in zip(readings, rows, strict=True):
        for place, size in enumerate(sizes):
            if math.isfinite(size):
                continue
            at_loss = place == len(sizes) - 1
            what = "the loss" if at_loss else f"tap {place} (target layer {target_layer_ids[place]})"
            return Trouble(
                reading.micro_batch,
                f"{what} of micro-batch {reading.micro_batch} is not finite ({size}); "
                f"{listed(reading.document_ids.tolist())}",
            )
    return None


def listed(document_ids: Sequence[int]) -> str:
    """Content ids of documents, in words; the first of many."""
    shown = ", ".join(map(str, document_ids[:DOCUMENTS_SHOWN]))
    more = len(document_ids) - DOCUMENTS_SHOWN
    return f"its documents: {shown}" + (f" and {more} more" if more > 0 else "")


class BadStepsInARow(NonFinite):
    """As many steps in a row were not finite as a run may have."""

    def __init__(self, message: str, last_good: int) -> None:
        super().__init__(message)
        self.last_good = last_good
        """Steps done before the first of them; weights and moments are as they were then."""


@attrs.define
class BadSteps:
    """Counts steps in a row that were skipped for a number that is not finite."""

    most: int
    """How many end the run."""
    in_a_row: int = 0

    def passed(self, step: int, trouble: str | None) -> None:
        """Take in step `step`, counted from 0.

        Raises:
            BadStepsInARow: it was one too many.
        """
        if trouble is None:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row >= self.most:
            last_good = step + 1 - self.in_a_row
            raise BadStepsInARow(
                f"step {step + 1}: {trouble}. Steps skipped in a row: {self.in_a_row}, and "
                f"train.max_bad_steps = {self.most}; weights are those after step {last_good}. Look at "
                "those documents and at the target's kernels, or lower train.lr",
                last_good,
            )
