"""Whether copies from one device to another arrive as they were sent.

Peer copies between PCIe cards have corrupted data without any error, where an IOMMU or a switch's
access control stands between them, and a drafter trained on such states only looks a little worse. So
random bytes are copied in sizes that take different paths, onto memory that held something else, and
compared bit for bit with the same bytes brought there from the host. torch is imported where it is
used: `doctor` reads this module on machines where torch does not import.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

COPY_SIZES = (1, 4_099, 1 << 20, (1 << 22) + 3, 1 << 26)
"""Bytes: below and above a page, aligned and not, up to what a micro-batch's taps take."""


def patterns(sizes: Sequence[int] = COPY_SIZES) -> "list[Tensor]":
    """Random bytes on the CPU, uint8 [size], one for each size; the same at every call."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def copy_differences(
    source: str,
    destination: str,
    sent: "Sequence[Tensor]",
    *,
    copy: "Callable[[Tensor, Tensor], object] | None" = None,
) -> dict[int, int]:
    """Copy bytes from one device to another and compare them there.

    Args:
        source, destination: names of devices.
        sent: uint8 [size] on the CPU, one copy each.
        copy: `copy(to, from)`; torch's own by default.

    Returns:
        Size to the number of bytes that arrived wrong, of those sizes where any did.
    """
    wrong = {}
    for pattern in sent:
        there, expected = pattern.to(source), pattern.to(destination)
        # What was there before differs in every bit: a copy that never happens is seen as well.
        received = ~expected
        _wait(source, destination)
        if copy is None:
            received.copy_(there)
        else:
            copy(received, there)
        _wait(source, destination)
        if different := int((received != expected).sum()):
            wrong[pattern.numel()] = different
    return wrong


def _wait(*devices: str) -> None:
    import torch

    for device in devices:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
