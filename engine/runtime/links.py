"""How tensors go from one GPU to another: directly, or through host memory where that cannot be trusted.

Whatever crosses devices in a run goes through a run's `Links`: weights while they are loaded, parcels
that lanes copy in, gradients and new weights at the end of a step. For most pairs of GPUs that is
torch's own copy. A pair without peer access, or whose peer copies arrived corrupted when they were
probed, is copied in pieces through one ring of pinned memory: while one piece leaves, the one before
arrives. The ring is allocated once, and only where there is such a pair.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.runtime.inbox import Stop
from engine.runtime.pinned_ring import PinnedRing

Pair = tuple[torch.device, torch.device]
"""(source, destination)"""

PIECE_BYTES = 1 << 25
PIECES = 4  # two lanes may be fetching at once, each with one piece leaving and one arriving


class Links:
    """The pairs of a run's devices, by how they are copied. Threads may share it."""

    def __init__(self, through_host: Iterable[Pair] = ()) -> None:
        self.through_host = frozenset(through_host)
        self._ring = PinnedRing(PIECES, PIECE_BYTES) if self.through_host else None

    def staged(self, source: torch.device, destination: torch.device) -> bool:
        """Whether copies from one to the other go through host memory."""
        return (source, destination) in self.through_host

    def facts(self) -> dict[str, list[str]]:
        """For environment.json: the pairs that are copied through host memory."""
        return {
            "through_host": sorted(f"{source} → {destination}" for source, destination in self.through_host)
        }

    def copy(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Fill a tensor from one on another device, and return it.

        As torch does it: on the source device's current stream, with the destination's current stream
        waiting before and after.

        Args:
            destination: of the source's shape; where the pair is staged, of its dtype and contiguous.
            non_blocking: as torch's; a staged copy makes the thread wait for room in the ring alone.

        Raises:
            EngineError: a staged copy between tensors of different shapes or dtypes.
        """
        if self._ring is None or not self.staged(source.device, destination.device):
            return destination.copy_(source, non_blocking=non_blocking)
        copy_through_host(
            destination,
            source,
            self._ring,
            leaving=_current_stream(source.device),
            arriving=_current_stream(destination.device),
        )
        return destination

    def to(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on a device: itself where it lies there, else a copy."""
        if tensor.device == device or not self.staged(tensor.device, device):
            return tensor.to(device)
        return self.copy(torch.empty(tensor.shape, dtype=tensor.dtype, device=device), tensor)


def peer_access(source: torch.device, destination: torch.device) -> bool:
    """Whether one GPU can read another's memory directly."""
    return torch.cuda.can_device_access_peer(destination, source)


def copy_through_host(
    destination: Tensor,
    source: Tensor,
    ring: PinnedRing,
    *,
    leaving: torch.cuda.Stream | None,
    arriving: torch.cuda.Stream | None,
) -> None:
    """Copy a tensor in pieces of the ring's slots, without gradient; the bytes are those of the source.

    Args:
        leaving, arriving: streams of the source's and the destination's device; None on a CPU.

    Raises:
        EngineError: shapes or dtypes differ, or the destination is not contiguous.
    """
    if (
        destination.shape != source.shape
        or destination.dtype != source.dtype
        or not destination.is_contiguous()
    ):
        raise EngineError(
            f"a copy through host memory of {source.dtype} {list(source.shape)} into {destination.dtype} "
            f"{list(destination.shape)}; both have one shape and dtype, and the destination is contiguous"
        )
    if leaving is not None and arriving is not None:
        leaving.wait_stream(arriving)  # the source may have been made known to that stream alone
    with torch.cuda.stream(leaving):
        sent = _bytes(source.detach().contiguous())
    received = _bytes(destination.detach())
    never = Stop()  # a slot is given back as soon as its second copy is launched, so no wait is for long
    for begin in range(0, sent.numel(), ring.slot_bytes):
        piece = sent[begin : begin + ring.slot_bytes]
        slot = ring.reserve([piece], never)
        (host,) = slot.views([piece])
        with torch.cuda.stream(leaving):
            host.copy_(piece, non_blocking=True)
        if leaving is not None and arriving is not None:
            arriving.wait_event(leaving.record_event())
        with torch.cuda.stream(arriving):
            received[begin : begin + ring.slot_bytes].copy_(host, non_blocking=True)
        slot.release(None if arriving is None else arriving.record_event())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
