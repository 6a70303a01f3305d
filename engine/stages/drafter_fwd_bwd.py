"""`drafter-fwd-bwd`: score the blocks at this epoch's anchors and add up unnormalised gradients.

FlexAttention compiles at the first row of each length, its backward in a thread of autograd's; two
lanes must not compile at once. So no other lane compiles during a lane's first row of a length.
"""

from collections.abc import Mapping
from contextlib import nullcontext

import attrs

from engine.data.batches import MicroBatch
from engine.dflash.packing import PackedRow
from engine.dflash.training import Packed
from engine.errors import EngineError
from engine.plain import forward_backward
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.stages.cargo import Cargo
from engine.training_parts import DrafterPart, TrainingParts


@attrs.frozen(eq=False)
class DrafterForwardBackward:
    parts: TrainingParts
    drafters: Mapping[str, DrafterPart]
    """By lane."""
    serializer: Serializer
    met: set[tuple[str, int]] = attrs.field(factory=set)
    """Lanes and row lengths that are compiled."""

    def __call__(self, lane: Lane, micro_batch: int, cargo: Cargo) -> Cargo:
        if cargo.parcel is None or cargo.row is None:
            raise EngineError(f"micro-batch {micro_batch} has no packed taps; pack comes before")
        parcel, cargo.parcel = cargo.parcel, None
        packed = parcel.take(lane)
        lane.count(tokens=cargo.batch.tokens)
        self._train(lane, cargo.batch, cargo.row, packed)
        return cargo

    def ready(self, lane: Lane, batch: MicroBatch, row: PackedRow, packed: Packed) -> None:
        """Run a row for the sake of what it compiles; gradients and figures are forgotten."""
        self._train(lane, batch, row, packed)
        part = self.drafters[lane.name]
        part.masters.discard()
        part.begin_step()

    def _train(self, lane: Lane, batch: MicroBatch, row: PackedRow, packed: Packed) -> None:
        compiled = self.parts.recipe.backend != "flex" or (lane.name, row.length) in self.met
        with nullcontext() if compiled else self.serializer.compiling(lane):
            forward_backward(self.parts, self.drafters[lane.name], batch, row, packed)
        self.met.add((lane.name, row.length))
