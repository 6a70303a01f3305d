"""`optimizer`: all drafters meet, add up their gradients, and each updates the masters it keeps.

    1. everybody tells Σ w and hands every other drafter the gradient sums of the masters kept there
    2. sums are added in the drafters' order and divided once; everybody tells its parameters' norms
    3. everybody clips to the same total, updates its own masters, and hands out the new weights

With one drafter nothing is exchanged and these are the plain loop's operations in the plain loop's order.

What is not finite is told along with 1 and 2, so every drafter knows of it and none updates.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.dflash.finite import BadSteps, Trouble, first_trouble, listed
from engine.dflash.masters import NORM_OVERFLOWS, total_norm
from engine.dflash.objective import BlockCounts
from engine.plain import step_learning_rate
from engine.replica_check import ReplicaCheck
from engine.runtime.lane import Lane
from engine.runtime.parcel import Meeting, Parcel
from engine.training_parts import DrafterPart, TrainingParts, step_row

Tensors = Mapping[str, Tensor]


@attrs.frozen(eq=False)
class _Gathered:
    """What a drafter knows after the first exchange."""

    counts: BlockCounts
    """The step's figures over all drafters."""
    gradients: list[Tensors]
    """The drafters' sums for the masters kept here, in the drafters' order."""
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
        figures = part.counts.cpu()
        trouble = first_trouble(part.readings, self.parts.plan.drafter_config.target_layer_ids)
        documents = {reading.micro_batch: reading.document_ids.tolist() for reading in part.readings}
        met = meeting.exchange(lane, Parcel.made(lane, {}, (figures, packets, trouble, documents)))
        rank = list(self.drafters).index(lane.name)
        counts = met[0].note[0]
        for other in met[1:]:
            counts = counts + other.note[0]
        troubles: list[Trouble] = [other.note[2] for other in met if other.note[2] is not None]
        by_micro_batch = sorted(pair for other in met for pair in other.note[3].items())
        return _Gathered(
            counts,
            [self._taken(lane, parcel.note[1][rank]) for parcel in met],
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
        norms = part.masters.receive(gathered.gradients, weight_sum)
        told = {name: float(norm) for name, norm in norms.items()}
        met = meeting.exchange(lane, Parcel.made(lane, {}, (told, part.masters.first_bad(told))))
        everybody = {name: torch.tensor(norm) for other in met for name, norm in other.note[0].items()}
        norm = total_norm(everybody, [name for name in part.masters.parameters if name in everybody])
        if not torch.isfinite(norm):
            part.masters.discard()
            bad = next((other.note[1] for other in met if other.note[1]), NORM_OVERFLOWS)
            return math.nan, f"{bad}; the step's micro-batches were finite; {listed(gathered.documents)}"
        part.masters.update(norm.to(lane.device), lr=lr, clip=self.parts.plan.schedule.train.clip)
        self._spread(lane, part, meeting)
        return float(norm), None

    def _spread(self, lane: Lane, part: DrafterPart, meeting: Meeting) -> None:
        """Hand the updated weights around."""
        mine = {name: part.masters.parameters[name].detach() for name in part.masters.names}
        others = meeting.exchange(lane, Parcel.made(lane, mine))
        for name, parcel in zip(self.drafters, others, strict=True):
            if name == lane.name:
                continue
            with torch.no_grad():
                for parameter, weight in self._taken(lane, parcel).items():
                    part.masters.parameters[parameter].copy_(weight)

    def _taken(self, lane: Lane, parcel: Parcel[Tensors]) -> Tensors:
        return lane.copy_in(parcel).take(lane)
