"""Pinned host memory for parcels that cannot or should not go directly from GPU to GPU."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.runtime.inbox import Stop

SLOT_ALIGNMENT = 256  # bytes; what CUDA aligns its own allocations to


class PinnedRing:
    """Slots of pinned host memory, allocated once and used in turn, each guarded by its last event.

    Pinned allocations round up to powers of two and cannot be paged out, so a slot's size is rounded
    here, where it can be seen, and `nbytes` is what the ring costs. A lane that copies out holds a
    slot until the copy in is launched: give every source lane a ring of its own, since lanes that
    share one can hold its slots for later micro-batches while an earlier one waits for a slot.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """
        Args:
            slots: how many parcels may be on their way.
            slot_bytes: the largest parcel; rounded up to a power of two.

        Raises:
            EngineError: fewer than one slot or byte.
        """
        if slots < 1 or slot_bytes < 1:
            raise EngineError(f"a pinned ring of {slots} slots of {slot_bytes} bytes; both are at least 1")
        self.slot_bytes = 1 << (slot_bytes - 1).bit_length()
        pinned = torch.cuda.is_available()  # without a GPU there is nothing to pin for
        self._memory = [
            torch.empty(self.slot_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(slots)
        ]
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = [(slot, None) for slot in self._memory]
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.slot_bytes * len(self._memory)

    def reserve(self, tensors: Sequence[Tensor], stop: Stop) -> "Slot":
        """The slot that has been free for longest, once its last use is over.

        Raises:
            EngineError: no slot has room for these tensors.
            Stopped: the run is over while none is free.
        """
        nbytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if nbytes > self.slot_bytes:
            raise EngineError(
                f"a parcel of {nbytes:,} bytes for a pinned ring with slots of {self.slot_bytes:,}; "
                "make its slots larger"
            )
        with self._changed:
            stop.wait_for(self._changed, lambda: bool(self._free))
            memory, last_use = self._free.pop(0)
        if last_use is not None:
            last_use.synchronize()
        return Slot(self, memory)

    def give_back(self, memory: Tensor, last_use: torch.cuda.Event | None) -> None:
        """What a slot calls when it is released."""
        with self._changed:
            self._free.append((memory, last_use))
            self._changed.notify_all()


class Slot:
    """One use of a ring's slot; it goes back when released, or when nobody holds it any more."""

    def __init__(self, ring: PinnedRing, memory: Tensor) -> None:
        self.last_use: torch.cuda.Event | None = None
        self._ring = ring
        self._memory: Tensor | None = memory

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Room in the slot for tensors of these shapes and dtypes. Raises EngineError after release."""
        if self._memory is None:
            raise EngineError("a slot of a pinned ring is used after its release")
        views, offset = [], 0
        for tensor in tensors:
            piece = self._memory[offset : offset + tensor.nbytes]
            views.append(piece.view(tensor.dtype).view(tensor.shape))
            offset += _aligned(tensor.nbytes)
        return views

    def release(self, last_use: torch.cuda.Event | None) -> None:
        """Give the slot back; it is used again after `last_use`."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._ring.give_back(memory, last_use)

    def __del__(self) -> None:
        self.release(self.last_use)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
