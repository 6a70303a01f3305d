"""Tensors that cross lanes, with the event after which they may be read.

A tensor made on one stream and read on another is at risk twice: read before it is written, or its
memory given to the maker's next tensor while it is still being read. A parcel settles both: it
holds the maker's ready event, and `take` makes the reader's stream wait for that event and tells
the allocator that the reader's stream uses the memory. After the last expected reader the parcel
lets go of its tensors. On a CPU there are no events, and the bookkeeping is the same.

What is in a parcel is not written any more. A maker that wants its buffers back has the readers
send it a parcel, an empty one will do, made behind their last use.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.runtime.graph import LaneSpec
from engine.runtime.inbox import Stop

if TYPE_CHECKING:
    from engine.runtime.lane import Lane
    from engine.runtime.pinned_ring import Slot

Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...] | Mapping[str, Tensor])


class Parcel(Generic[Tensors]):
    """Tensors of one device on their way from a maker to its readers."""

    def __init__(
        self,
        lane: "Lane",
        tensors: Tensors,
        *,
        device: torch.device,
        ready: torch.cuda.Event | None,
        note: Any = None,
        readers: int = 1,
        slot: "Slot | None" = None,
    ) -> None:
        """What `made` and a lane's copies call. `slot` is the pinned memory the tensors lie in."""
        self.lane = lane
        self.device = device
        self.ready = ready
        self.note = note
        self.slot = slot
        self._tensors: Tensors | None = tensors
        self._readers = readers
        self._taken_by: list[str] = []
        self._lock = threading.Lock()

    @classmethod
    def made(cls, lane: "Lane", tensors: Tensors, note: Any = None, *, readers: int = 1) -> "Parcel[Tensors]":
        """Wrap what the lane has launched on its stream so far.

        Args:
            tensors: a tuple or mapping, all on the lane's device; empty is allowed.
            note: whatever goes along without being a device's business.
            readers: how many times it will be taken.

        Raises:
            EngineError: a tensor lies on another device.
        """
        for key, tensor in _items(tensors):
            if tensor.device != lane.device:
                raise EngineError(
                    f"{lane.name} put tensor {key!r} of {tensor.device} into a parcel; a parcel's tensors "
                    "lie on its maker's device, and what need not is its note"
                )
        return cls(lane, tensors, device=lane.device, ready=lane.record(), note=note, readers=readers)

    def share(self, readers: int) -> None:
        """Expect another number of readers. Raises EngineError when one has been there already."""
        with self._lock:
            if self._taken_by:
                raise EngineError(f"a parcel of {self.lane.name} is shared after {self._taken_by[0]} took it")
            self._readers = readers

    def take(self, lane: "Lane") -> Tensors:
        """The tensors, to be used on the lane's stream; counts as one reading.

        Raises:
            EngineError: all expected readers were there, or the tensors lie on another device.
        """
        if self.device != lane.device:
            raise EngineError(
                f"{lane.name} takes a parcel that lies on {self.device}; copy it in first (lane.copy_in)"
            )
        if self.slot is not None:
            raise EngineError(
                f"{lane.name} takes a parcel that lies in a pinned ring; a GPU lane copies it in"
            )
        return self.read(lane, lane.stream)

    def read(self, lane: "Lane", stream: torch.cuda.Stream | None) -> Tensors:
        """`take` for one of the lane's own copies, on whichever of its streams runs it."""
        with self._lock:
            if self._tensors is None:
                raise EngineError(
                    f"{lane.name} reads a parcel of {self.lane.name} that was released after "
                    f"{', '.join(self._taken_by)}; raise `readers` where it is made"
                )
            tensors = self._tensors
            self._taken_by.append(lane.name)
            if len(self._taken_by) == self._readers:
                self._tensors = None
        lane.wait(self.ready, stream)
        for _, tensor in _items(tensors):
            lane.keep(tensor, stream)
        return tensors

    @property
    def released(self) -> bool:
        """Whether the last expected reader was there."""
        with self._lock:
            return self._tensors is None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors; 0 after release."""
        with self._lock:
            return 0 if self._tensors is None else sum(tensor.nbytes for _, tensor in _items(self._tensors))


class Meeting:
    """Where the drafter lanes exchange parcels during a barrier stage."""

    def __init__(self, lanes: Sequence[LaneSpec], stop: Stop) -> None:
        self._ranks = {lane.name: rank for rank, lane in enumerate(lanes)}
        self._stop = stop
        self._rounds = [0] * len(lanes)
        self._given: dict[int, dict[int, Parcel[Any]]] = {}
        self._received: dict[int, int] = {}
        self._changed = threading.Condition()

    def exchange(self, lane: "Lane", parcel: Parcel[Any]) -> list[Parcel[Any]]:
        """Give a parcel, get those of all drafter lanes in lane order, one's own included.

        All lanes call it equally often and in the same order. Each may take each parcel once, on
        another device by way of `lane.copy_in`.

        Raises:
            Stopped: the run is over.
        """
        everybody = len(self._ranks)
        parcel.share(everybody)
        rank = self._ranks[lane.name]
        with lane.waiting() as wait, self._changed:
            number = self._rounds[rank]
            self._rounds[rank] += 1
            given = self._given.setdefault(number, {})
            given[rank] = parcel
            self._changed.notify_all()
            wait.seconds = self._stop.wait_for(self._changed, lambda: len(given) == everybody)
            self._received[number] = self._received.get(number, 0) + 1
            if self._received[number] == everybody:
                del self._given[number], self._received[number]
        return [given[rank] for rank in range(everybody)]


def listed(tensors: Tensors) -> list[Tensor]:
    """The tensors without their keys, in order."""
    return [tensor for _, tensor in _items(tensors)]


def like(tensors: Tensors, replaced: list[Tensor]) -> Tensors:
    """`replaced` in the form of `tensors`: a tuple, or a mapping with the same keys."""
    if isinstance(tensors, Mapping):
        return cast(Tensors, dict(zip(tensors, replaced, strict=True)))
    return cast(Tensors, tuple(replaced))


def _items(tensors: tuple[Tensor, ...] | Mapping[str, Tensor]) -> list[tuple[Any, Tensor]]:
    return list(tensors.items()) if isinstance(tensors, Mapping) else list(enumerate(tensors))
