"""`drafter-fwd-bwd`: score the blocks at this epoch's anchors and add up unnormalised gradients."""

from collections.abc import Mapping

import attrs

from engine.errors import EngineError
from engine.plain import forward_backward
from engine.runtime.lane import Lane
from engine.stages.cargo import Cargo
from engine.training_parts import DrafterPart, TrainingParts


@attrs.frozen(eq=False)
class DrafterForwardBackward:
    parts: TrainingParts
    drafters: Mapping[str, DrafterPart]
    """By lane."""

    def __call__(self, lane: Lane, micro_batch: int, cargo: Cargo) -> Cargo:
        if cargo.parcel is None or cargo.row is None:
            raise EngineError(f"micro-batch {micro_batch} has no packed taps; pack comes before")
        parcel, cargo.parcel = cargo.parcel, None
        packed = parcel.take(lane)
        lane.count(tokens=cargo.batch.tokens)
        forward_backward(self.parts, self.drafters[lane.name], cargo.batch, cargo.row, packed)
        return cargo
