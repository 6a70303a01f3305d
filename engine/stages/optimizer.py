"""`optimizer`: all drafters meet, add up their gradients, and each updates the masters it keeps.

    1. everybody tells Σ w and hands every other drafter the gradient sums of the masters kept there
    2. sums are added in the drafters' order and divided once; everybody tells its parameters' norms
    3. everybody clips to the same total, updates its own masters, and hands out the new weights

With one drafter nothing is exchanged and these are the plain loop's operations in the plain loop's order.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.dflash.masters import total_norm
from engine.dflash.objective import BlockCounts
from engine.errors import NonFinite
from engine.plain import check_loss, step_learning_rate
from engine.runtime.lane import Lane
from engine.runtime.parcel import Meeting, Parcel
from engine.training_parts import DrafterPart, TrainingParts, step_row

Tensors = Mapping[str, Tensor]


@attrs.frozen(eq=False)
class Optimizer:
    parts: TrainingParts
    drafters: Mapping[str, DrafterPart]
    """By lane, in lane order."""

    def __call__(self, lane: Lane, step: int, meeting: Meeting) -> dict[str, Any] | None:
        part = self.drafters[lane.name]
        lr = step_learning_rate(self.parts, step)
        counts, gradients = self._gather(lane, part, meeting)
        weight_sum = float(counts.weight_sum)
        norm = 0.0
        if weight_sum:
            check_loss(float(counts.loss_sum), step)
            norm = self._update(lane, part, meeting, gradients, weight_sum, lr, step)
        first = lane.name == next(iter(self.drafters))
        row = step_row(self.parts, step, norm, lr, counts) if first else None
        # Nobody begins the next step's figures before the first drafter has read everybody's.
        meeting.exchange(lane, Parcel.made(lane, {}))
        part.begin_step()
        return row

    def _gather(self, lane: Lane, part: DrafterPart, meeting: Meeting) -> tuple[BlockCounts, list[Tensors]]:
        """The step's figures over all drafters, and their gradient sums for the masters kept here."""
        sums = part.masters.sums()
        packets = [
            Parcel.made(lane, {name: sums[name] for name in other.masters.names if name in sums})
            for other in self.drafters.values()
        ]
        figures = part.counts.cpu()
        met = meeting.exchange(lane, Parcel.made(lane, {}, (figures, packets)))
        rank = list(self.drafters).index(lane.name)
        counts = met[0].note[0]
        for other in met[1:]:
            counts = counts + other.note[0]
        return counts, [self._taken(lane, parcel.note[1][rank]) for parcel in met]

    def _update(
        self,
        lane: Lane,
        part: DrafterPart,
        meeting: Meeting,
        gradients: list[Tensors],
        weight_sum: float,
        lr: float,
        step: int,
    ) -> float:
        norms = part.masters.receive(gradients, weight_sum)
        told = {name: float(norm) for name, norm in norms.items()}
        met = meeting.exchange(lane, Parcel.made(lane, {}, (told, part.masters.first_bad(told))))
        everybody = {name: torch.tensor(norm) for other in met for name, norm in other.note[0].items()}
        norm = total_norm(everybody, [name for name in part.masters.parameters if name in everybody])
        if not torch.isfinite(norm):
            bad = next((other.note[1] for other in met if other.note[1]), "the gradient's norm overflows")
            raise NonFinite(f"step {step + 1}: {bad}; nothing was updated")
        part.masters.update(norm.to(lane.device), lr=lr, clip=self.parts.plan.schedule.train.clip)
        self._spread(lane, part, meeting)
        return float(norm)

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
