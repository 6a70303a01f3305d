"""The default transfer: `.to(device)` on the drafter's own stream.

The drafter waits for its copy and nothing overlaps, but there is nothing to tune and no memory beside
the copy itself. Where target and drafter share a device, the parcel is handed over as it is.
"""

from typing import Any

import attrs

from engine.hookspecs import hookimpl
from engine.runtime.lane import Lane
from engine.runtime.parcel import Parcel, like, listed


@attrs.frozen(kw_only=True)
class Options:
    """None."""


class CopyOnComputeStream:
    def receive(self, lane: Lane, parcel: Parcel[Any]) -> Parcel[Any]:
        if parcel.device == lane.device:
            return parcel
        # Between GPUs torch copies on the source's stream and makes this lane's stream wait on both
        # sides; so reading on this lane's stream keeps the source alive until the copy is over.
        tensors = parcel.read(lane, lane.stream)
        copies = [tensor.to(lane.device) for tensor in listed(tensors)]
        return Parcel.made(lane, like(tensors, copies), parcel.note)


class PlainCopy:
    @hookimpl
    def make_transfer(self) -> CopyOnComputeStream:
        return CopyOnComputeStream()


def make(options: Options) -> PlainCopy:
    return PlainCopy()
