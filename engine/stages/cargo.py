"""What a micro-batch carries from stage to stage."""

import attrs
from torch import Tensor

from engine.data.batches import MicroBatch
from engine.dflash.packing import PackedRow
from engine.dflash.training import Packed
from engine.runtime.parcel import Parcel


@attrs.define(eq=False)
class Cargo:
    """One micro-batch under way. A stage takes out what it uses up, so that memory goes when it may."""

    batch: MicroBatch
    taps: list[Tensor] | None = None
    """From `target-forward` to `pack`: [rows, length, H] each, on the target's device."""
    row: PackedRow | None = None
    """From `pack` on; CPU tensors."""
    parcel: Parcel[Packed] | None = None
    """From `pack` to `drafter-fwd-bwd`: the packed taps, on the target's and then on the drafter's device."""
