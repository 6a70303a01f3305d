"""`transfer`: bring a micro-batch's packed taps to the drafter's device, the way the schedule chose."""

import attrs

from engine.errors import EngineError
from engine.hookspecs import Transfer as TransferStrategy
from engine.runtime.lane import Lane
from engine.stages.cargo import Cargo


@attrs.frozen(eq=False)
class Transfer:
    strategy: TransferStrategy

    def __call__(self, lane: Lane, micro_batch: int, cargo: Cargo) -> Cargo:
        if cargo.parcel is None:
            raise EngineError(f"micro-batch {micro_batch} has no parcel; pack comes before")
        if cargo.parcel.device != lane.device:
            lane.count(bytes=cargo.parcel.nbytes)
        cargo.parcel = self.strategy.receive(lane, cargo.parcel)
        return cargo
