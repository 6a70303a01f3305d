"""`optimizer`: all drafters meet, add up their gradients, and each updates the masters it keeps.

    1. everybody hands every other drafter the gradient sums of the masters kept there
    2. sums are added in the drafters' order; everybody tells Σ w and its parameters' norms
    3. everybody divides and clips by the same factor, updates its own masters, and hands out the new weights

With one drafter nothing is exchanged and these are the plain loop's operations in the plain loop's order.
A lane waits for its device once, in 2, behind all that was launched before; the targets' lanes go on.

What is not finite is told along with 2, so every drafter knows of it and none updates.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.dflash.finite import BadSteps, Trouble, first_trouble, listed
from engine.dflash.masters import NORM_OVERFLOWS, read_norms, step_factor, total_norm
from engine.dflash.objective import BlockCounts
from engine.plain import step_learning_rate
from engine.replica_check import ReplicaCheck
from engine.runtime.lane import Lane
from engine.runtime.parcel import Meeting, Parcel
from engine.training_parts import DrafterPart, TrainingParts, step_row

Tensors = Mapping[str, Tensor]


@attrs.frozen(eq=False)
class _Gathered:
    """What every drafter knows after the second exchange."""

    counts: BlockCounts
    """The step's figures over all drafters."""
    norms: dict[str, float]
    """Of every parameter's gradient sum, wherever it is kept."""
    bad: str | None
    """The first gradient that is not finite."""
    documents: list[int]
    """Content ids of the step, in micro-batch order."""
    trouble: str | None
    """The first tap or loss that is not finite."""


@attrs.frozen(eq=False)
class Optimizer:
    parts: TrainingParts
    drafters: Mapping[str, DrafterPart]
    """By lane, in lane order."""
    bad_steps: BadSteps = attrs.field(init=False)
    """Counted by the first drafter's lane; it raises before the others can begin another step."""
    replicas: ReplicaCheck = attrs.field(init=False)
    """Sees the weights before they are updated."""

    @bad_steps.default
    def _bad_steps(self) -> BadSteps:
        return BadSteps(self.parts.plan.schedule.train.max_bad_steps)

    @replicas.default
    def _replicas(self) -> ReplicaCheck:
        return ReplicaCheck(self.drafters, self.parts.plan.schedule.run.check_every)

    def __call__(self, lane: Lane, step: int, meeting: Meeting) -> dict[str, Any] | None:
        part = self.drafters[lane.name]
        self.replicas(lane, step, meeting)
        lr = step_learning_rate(self.parts, step)
        gathered = self._gather(lane, part, meeting)
        weight_sum = float(gathered.counts.weight_sum)
        norm, trouble = 0.0, gathered.trouble
        if trouble is not None:
            norm = math.nan
        elif weight_sum:
            norm, trouble = self._update(lane, part, meeting, gathered, weight_sum, lr)
        part.masters.discard()  # what a step without an update leaves
        row = None
        if lane.name == next(iter(self.drafters)):
            self.bad_steps.passed(step, trouble)
            row = step_row(self.parts, step, norm, lr, gathered.counts, trouble)
        # Nobody begins the next step's figures before the first drafter has read everybody's.
        meeting.exchange(lane, Parcel.made(lane, {}))
        part.begin_step()
        return row

    def _gather(self, lane: Lane, part: DrafterPart, meeting: Meeting) -> "_Gathered":
        sums = part.masters.sums()
        packets = [
            Parcel.made(lane, {name: sums[name] for name in other.masters.names if name in sums})
            for other in self.drafters.values()
        ]
        del sums
        given = meeting.exchange(lane, Parcel.made(lane, {}, packets))
        rank = list(self.drafters).index(lane.name)
        norms = part.masters.receive([self._taken(lane, parcel.note[rank]) for parcel in given])
        # Only now is the device waited for.
        figures, told = part.counts.cpu(), read_norms(norms)
        trouble = first_trouble(part.readings, self.parts.plan.drafter_config.target_layer_ids)
        documents = {reading.micro_batch: reading.document_ids.tolist() for reading in part.readings}
        note = (figures, told, part.masters.first_bad(told), trouble, documents)
        met = [parcel.note for parcel in meeting.exchange(lane, Parcel.made(lane, {}, note))]
        counts = met[0][0]
        for other in met[1:]:
            counts = counts + other[0]
        troubles: list[Trouble] = [other[3] for other in met if other[3] is not None]
        by_micro_batch = sorted(pair for other in met for pair in other[4].items())
        return _Gathered(
            counts,
            {name: norm for other in met for name, norm in other[1].items()},
            next((other[2] for other in met if other[2]), None),
            [number for _, ids in by_micro_batch for number in ids],
            min(troubles, key=lambda one: one.micro_batch).text if troubles else None,
        )

    def _update(
        self,
        lane: Lane,
        part: DrafterPart,
        meeting: Meeting,
        gathered: "_Gathered",
        weight_sum: float,
        lr: float,
    ) -> tuple[float, str | None]:
        """The gradient's norm before clipping, and what of it is not finite: no drafter updates then."""
        names = [name for name in part.masters.parameters if name in gathered.norms]
        norm = total_norm(gathered.norms, names) / weight_sum
        if not math.isfinite(norm):
            bad = gathered.bad or NORM_OVERFLOWS
            return math.nan, f"{bad}; the step's micro-batches were finite; {listed(gathered.documents)}"
        clip = self.parts.plan.schedule.train.clip
        part.masters.update(step_factor(norm, weight_sum, clip), lr=lr)
        self._spread(lane, part, meeting)
        return norm, None

    def _spread(self, lane: Lane, part: DrafterPart, meeting: Meeting) -> None:
        """Hand the updated weights around."""
        mine = {name: part.masters.parameters[name].detach() for name in part.masters.names}
        others = meeting.exchange(lane, Parcel.made(lane, mine))
        for name, parcel in zip(self.drafters, others, strict=True):
            if name == lane.name:
                continue
            weights = self._taken(lane, parcel)
            if weights:
                with torch.no_grad():
                    torch._foreach_copy_(
                        [part.masters.parameters[parameter] for parameter in weights], list(weights.values())
                    )

    def _taken(self, lane: Lane, parcel: Parcel[Tensors]) -> Tensors:
        return lane.copy_in(parcel).take(lane)
