"""`target-forward`: run the frozen target over a micro-batch's rows and keep its taps."""

from collections.abc import Mapping

import attrs

from engine.data.batches import BatchPlan
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.stages.cargo import Cargo
from engine.target.loading import Target


@attrs.frozen(eq=False)
class TargetForward:
    batches: BatchPlan
    targets: Mapping[str, Target]
    """By lane."""
    serializer: Serializer

    def __call__(self, lane: Lane, micro_batch: int, cargo: None) -> Cargo:
        batch = self.batches.micro_batch(micro_batch)
        lane.count(tokens=batch.tokens)
        input_ids = batch.input_ids.to(lane.device, non_blocking=True)  # [rows, length]
        with self.serializer.launching(lane):
            taps = self.targets[lane.name].forward_taps(input_ids)
        return Cargo(batch, taps=taps)
