"""Who holds a GPU's memory when it is full: PyTorch's allocator, read by lane.

The allocator keeps a pool per stream and every lane computes on a stream of its own, so a snapshot
tells lanes apart with no bookkeeping of ours. What lies in the default stream's pool was allocated
before the lanes began: weights, masters, embedding and head.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from engine.runtime.lane import Lane

GB = 1e9

BEFORE_LANES = "loaded before the lanes began"


def held_memory(lanes: Sequence[Lane]) -> list[str]:
    """A line for each GPU of these lanes: in use, cached and free, then each holder. Nothing on a CPU."""
    holders: dict[tuple[int, int], str] = {}
    gpus = []
    for lane in lanes:
        if lane.device.type != "cuda":
            continue
        gpu = lane.device.index if lane.device.index is not None else torch.cuda.current_device()
        gpus.append(gpu)
        for stream, suffix in (
            (lane.stream, ""),
            (lane.copy_in_stream, ", copies in"),
            (lane.copy_out_stream, ", copies out"),
        ):
            if stream is not None:
                holders[gpu, stream.cuda_stream] = lane.name + suffix
    if not gpus:
        return []
    segments = torch.cuda.memory_snapshot()
    return [
        f"cuda:{gpu}: {_gb(torch.cuda.mem_get_info(gpu)[0])} GB free on the device; "
        f"{describe(by_holder(segments, holders, gpu))}"
        for gpu in dict.fromkeys(gpus)
    ]


def by_holder(
    segments: Iterable[Mapping[str, Any]], holders: Mapping[tuple[int, int], str], gpu: int
) -> dict[str, tuple[int, int]]:
    """Bytes in use and bytes cached without use, by holder, the largest first.

    Args:
        segments: of `torch.cuda.memory_snapshot`.
        holders: names by (GPU, stream handle); other streams' pools are called by their number.
    """
    sums: dict[str, tuple[int, int]] = {}
    for segment in segments:
        if segment["device"] != gpu:
            continue
        stream = segment["stream"]
        name = holders.get((gpu, stream)) or (BEFORE_LANES if stream == 0 else f"stream {stream:#x}")
        used, cached = sums.get(name, (0, 0))
        active = segment.get(
            "active_size", segment["allocated_size"]
        )  # freed blocks that a stream still reads
        sums[name] = used + active, cached + segment["total_size"] - active
    return dict(sorted(sums.items(), key=lambda item: sum(item[1]), reverse=True))


def describe(held: Mapping[str, tuple[int, int]]) -> str:
    """Holders in one line, in GB of 10^9 bytes."""
    return "; ".join(
        f"{name} {_gb(used)} GB" + (f" and {_gb(cached)} GB cached" if cached >= GB / 100 else "")
        for name, (used, cached) in held.items()
    )


def _gb(size: int) -> str:
    return f"{size / GB:.2f}"
