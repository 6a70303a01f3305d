"""The default transfer: a copy on the drafter's own stream.

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
        # Between GPUs a copy runs on the source's stream, with this lane's stream waiting on both
        # sides; so reading on this lane's stream keeps the source alive until the copy is over.
        tensors = parcel.read(lane, lane.stream)
        copies = [lane.links.to(tensor, lane.device) for tensor in listed(tensors)]
        return Parcel.made(lane, like(tensors, copies), parcel.note)


class PlainCopy:
    @hookimpl
    def make_transfer(self) -> CopyOnComputeStream:
        return CopyOnComputeStream()


def make(options: Options) -> PlainCopy:
    return PlainCopy()
