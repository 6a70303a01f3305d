"""Transfer on copy streams: the next micro-batch travels while the drafter computes on this one.

GPUs that can reach each other copy directly. Where they can't, where the probe at the run's start saw
peer copies arrive corrupted, or where `through = "host"` asks for it, a copy goes through a ring of
pinned host memory, one per target lane: with a ring shared between targets, one target's later
micro-batches could hold the slots that another's earlier one waits for. Rings are allocated once, when
the run is set up, with slots as large as the largest parcel, rounded up to a power of two.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import attrs
import torch

from engine.errors import InputError
from engine.hookspecs import hookimpl
from engine.runtime.lane import Lane
from engine.runtime.links import peer_access
from engine.runtime.parcel import Parcel
from engine.runtime.pinned_ring import PinnedRing
from engine.toml_tables import Bounds

PeerAccess = Callable[[torch.device, torch.device], bool]


@attrs.frozen(kw_only=True)
class Options:
    """How copies travel."""

    slots: Annotated[int, Bounds(at_least=1)] = 2
    """Pinned buffers of each target lane, where copies between GPUs go through host memory."""
    through: Literal["auto", "peer", "host"] = "auto"
    """`peer`: from GPU to GPU, refused where they can't; `host`: pinned memory; `auto`: peer where it can.
    Between lanes of one device, or of a CPU, nothing is copied whatever it says."""


@attrs.frozen(eq=False)
class CopyOnCopyStreams:
    rings: dict[str, PinnedRing]
    """By target lane; lanes without one copy directly."""

    def receive(self, lane: Lane, parcel: Parcel[Any]) -> Parcel[Any]:
        return lane.copy_in(parcel, ring=self.rings.get(parcel.lane.name))


def lanes_through_host(
    through: Literal["auto", "peer", "host"],
    target_lanes: Sequence[Lane],
    drafter_lanes: Sequence[Lane],
    can_peer: PeerAccess = peer_access,
) -> list[Lane]:
    """The target lanes that need a pinned ring: those with a drafter on another GPU, as `through` says.

    Args:
        can_peer: whether the second GPU reads the first one's memory directly, and rightly.

    Raises:
        InputError: `peer` was asked for, and some of the GPUs can't reach each other.
    """
    chosen, unreachable = [], []
    for source in target_lanes:
        others = {
            lane.device
            for lane in drafter_lanes
            if lane.device != source.device and source.device.type == lane.device.type == "cuda"
        }
        blind = [device for device in others if through != "host" and not can_peer(source.device, device)]
        unreachable += [f"{source.device} and {device}" for device in sorted(blind, key=str)]
        if blind or (others and through == "host"):
            chosen.append(source)
    if through == "peer" and unreachable:
        raise InputError(
            f'through = "peer": no direct copies between {", ".join(dict.fromkeys(unreachable))}; '
            'use through = "auto" or "host", or other devices'
        )
    return chosen


class AsyncCopy:
    def __init__(self, options: Options) -> None:
        self.options = options

    @hookimpl
    def make_transfer(
        self, target_lanes: Sequence[Lane], drafter_lanes: Sequence[Lane], parcel_bytes: int
    ) -> CopyOnCopyStreams:
        links = drafter_lanes[0].links

        def can_peer(source: torch.device, destination: torch.device) -> bool:
            return peer_access(source, destination) and not links.staged(source, destination)

        through_host = lanes_through_host(self.options.through, target_lanes, drafter_lanes, can_peer)
        return CopyOnCopyStreams(
            {lane.name: PinnedRing(self.options.slots, parcel_bytes) for lane in through_host}
        )


def make(options: Options) -> AsyncCopy:
    return AsyncCopy(options)
