"""How many shapes a run compiles, tunes and captures: known before it starts, from the documents' lengths.

Rows are padded to a bucket and a micro-batch never mixes buckets, so that an epoch has a handful of
(rows × length); packed rows are padded to a multiple of their own. Everything that costs time once per shape
is done for these before the first step, and a step that meets another one is told of.
"""

from collections.abc import Sequence
from typing import Any

import attrs

from engine.dflash.attention import flex_slots
from engine.planning import RunPlan
from engine.warm_up import planned_shapes, rows_by_length


@attrs.frozen
class ShapeBuckets:
    """The shapes of a run."""

    target: Sequence[tuple[int, int]]
    """(rows, length) of target forwards, evaluation included, the largest first."""
    contexts: Sequence[int]
    """Slots of packed rows that a drafter trains on, the longest first."""
    attention: Sequence[int]
    """Slots that FlexAttention is compiled for; none with dense attention."""

    def row(self) -> dict[str, Any]:
        """For a file."""
        return {
            "target": [list(shape) for shape in self.target],
            "contexts": list(self.contexts),
            "attention": list(self.attention),
            "text": str(self),
        }

    def __str__(self) -> str:
        tokens = [rows * length for rows, length in self.target]
        text = (
            f"{_counted(len(self.target), 'target shape')} of {min(tokens):,} to {max(tokens):,} tokens "
            f"({len({length for _, length in self.target})} lengths), "
            f"{_counted(len(self.contexts), 'context length')} of {self.contexts[-1]:,} "
            f"to {self.contexts[0]:,}"
        )
        if self.attention:
            text += f", {_counted(len(self.attention), 'compiled attention length')}"
        return text


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def shape_buckets(plan: RunPlan) -> ShapeBuckets:
    """Every shape that any epoch of a run can bring; nothing is read but lengths."""
    contexts = list(rows_by_length(plan.train))
    flex = plan.recipe.backend == "flex"
    return ShapeBuckets(
        target=planned_shapes(plan),
        contexts=contexts,
        attention=sorted({flex_slots(slots) for slots in contexts}, reverse=True) if flex else [],
    )
