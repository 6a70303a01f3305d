"""`pack`: leave the padding out and lay the documents behind one another, on the target's lane."""

import attrs

from engine.errors import EngineError
from engine.runtime.lane import Lane
from engine.runtime.parcel import Parcel
from engine.stages.cargo import Cargo
from engine.training_parts import TrainingParts, pack_micro_batch


@attrs.frozen(eq=False)
class Pack:
    parts: TrainingParts

    def __call__(self, lane: Lane, micro_batch: int, cargo: Cargo) -> Cargo:
        if cargo.taps is None:
            raise EngineError(f"micro-batch {micro_batch} has no taps; target-forward comes before")
        taps, cargo.taps = cargo.taps, None
        cargo.row, packed = pack_micro_batch(self.parts, cargo.batch, taps)
        cargo.parcel = Parcel.made(lane, packed)
        lane.count(tokens=cargo.batch.tokens, bytes=cargo.parcel.nbytes)
        return cargo
