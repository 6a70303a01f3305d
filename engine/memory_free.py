"""What memory is free, and whether a plan fits into it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from engine.errors import InputError
from engine.memory_plan import CUDA_CONTEXT, MemoryPlan, in_gb


def cap_gpu_memory(devices: Iterable[str], most: int | None) -> None:
    """Let this process's tensors take at most `most` bytes of each GPU, context included; None: all."""
    for device in devices:
        if device.startswith("cuda"):
            total = torch.cuda.mem_get_info(torch.device(device))[1]
            share = 1.0 if most is None else min(max(most - CUDA_CONTEXT, 0) / total, 1.0)
            torch.cuda.set_per_process_memory_fraction(share, torch.device(device))


def free_memory(devices: Iterable[str], most: int | None = None) -> dict[str, int]:
    """Bytes that are free now, and of a GPU's no more than `most`; a CPU that does not say is left out."""
    free = {}
    for device in devices:
        if device.startswith("cuda"):
            there = torch.cuda.mem_get_info(torch.device(device))[0]
            free[device] = there if most is None else min(there, most)
        elif (available := available_ram()) is not None:
            free[device] = available
    return free


def available_ram() -> int | None:
    """Bytes of host memory that this machine can still give; None where it does not say."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else None


def check_fits(plan: MemoryPlan, free: Mapping[str, int], force: bool = False) -> None:
    """Refuse a plan that needs more than is free; devices that `free` does not name are not judged.

    Raises:
        InputError: a device is too small and `force` is not set; names need, free memory, the
            three largest items and what lowers them, per device.
    """
    problems = []
    for device in plan.devices:
        need = plan.total(device) + plan.outside[device]
        if force or device not in free or need <= free[device]:
            continue
        largest = ", ".join(f"{item.what} {in_gb(item.bytes)}" for item in plan.largest(device)[:3])
        cures = "".join(f"\n  - {line}" for line in plan.advice(device))
        problems.append(
            f"{device}: the run needs {in_gb(need)} GB and {in_gb(free[device])} GB are free; largest (GB): "
            f"{largest}. What lowers it, or --force to go on:{cures}"
        )
    if problems:
        raise InputError("\n".join(problems))
