"""Copies of tensors in host memory that is taken once and used again at each copy.

A copy of training state is as large as the state (12 bytes per parameter with AdamW, 21 GB for a
drafter of 1.7 billion), and lanes wait while it is made. From GPUs it is made at the full rate of the
bus only into pinned memory. PyTorch's own pinned allocations round up to powers of two, which could
double that; so plain memory is taken and then pinned where it lies, to the byte.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; as CUDA aligns its own allocations


class HostCopy:
    """Room for one copy of a set of tensors; a new copy overwrites the one before."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.pinned = False

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self._memory.nbytes

    def reserve(self, nbytes: int) -> None:
        """Take room for `nbytes`, unless there is as much; copies made before are lost.

        Pinning takes about as long as writing the memory once, so it is better done before lanes wait.
        """
        if nbytes <= self._memory.nbytes:
            return
        self.close()
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        if torch.cuda.is_available():
            # A machine may allow less pinned memory than it has; copies are slower then, and right.
            code = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), nbytes, 0)
            self.pinned = int(code) == 0

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors of any device; returns contiguous copies, whole when this returns.

        The caller sees to it that nothing writes to the tensors meanwhile.
        """
        self.reserve(room_for(tensors))
        copies, offset = {}, 0
        for name, tensor in tensors.items():
            room = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            # All GPUs copy at once; each waits only for itself, below.
            copies[name] = room.copy_(tensor.detach(), non_blocking=self.pinned)
            offset += _aligned(tensor.nbytes)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copies

    def close(self) -> None:
        """Give the memory back; copies must not be used any more."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self.pinned = False
        self._memory = torch.empty(0, dtype=torch.uint8)


def room_for(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of host memory that a copy of these tensors takes."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
