"""Which devices run the target and which train the drafter.

Names are `cpu` and `cuda:<n>`. They are checked before anything is loaded, against the devices
that are there, so that a schedule written for another machine ends with a sentence and not with a
CUDA error ten minutes later. The plain loop runs one target and one drafter; lists that ask for
more are refused rather than shortened.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal

from engine.errors import ScheduleError
from engine.schedule import Devices
from engine.toml_tables import shown

_NAME = re.compile(r"cpu|cuda:(0|[1-9][0-9]*)")


def available_devices() -> list[str]:
    """The devices of this machine: `cpu` first, then every GPU that CUDA shows."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def resolve_devices(
    devices: Devices | Literal["auto"],
    available: Sequence[str] | Callable[[], Sequence[str]] = available_devices,
    *,
    micro_batches: int,
) -> tuple[list[str], list[str]]:
    """Names of the target's and the drafter's devices.

    Args:
        devices: a schedule's `devices`; `auto` is the first GPU for both, or the CPU.
        available: the devices that are there, or a function that finds them.
        micro_batches: a schedule's `train.micro_batches`; a drafter without one would never work.

    Raises:
        ScheduleError: everything that is wrong with the names, one problem a line.
    """
    there = list(available() if callable(available) else available)
    if devices == "auto":
        device = "cuda:0" if "cuda:0" in there else "cpu"
        return [device], [device]
    problems = [
        *_problems("devices.targets", devices.targets, there),
        *_problems("devices.drafters", devices.drafters, there),
    ]
    if len(devices.drafters) > micro_batches:
        problems.append(
            f"devices.drafters = {shown(devices.drafters)}: {len(devices.drafters)} drafters share "
            f"train.micro_batches = {micro_batches} per step, so some would idle; name fewer or raise it"
        )
    if problems:
        raise ScheduleError("\n".join(problems))
    return list(devices.targets), list(devices.drafters)


def _problems(key: str, names: Sequence[str], there: Sequence[str]) -> list[str]:
    problems = []
    if not names:
        problems.append(f'{key} = []: names no device; give one, or write devices = "auto"')
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            problems.append(f'{key}[{index}] = {shown(name)}: expected a name such as "cpu" or "cuda:0"')
        elif name not in there:
            problems.append(
                f"{key}[{index}] = {shown(name)}: no such device here; there are {', '.join(there)}"
            )
    if len(names) > 1:
        problems.append(
            f"{key} = {shown(names)}: {len(names)} devices, and training is one loop of one target and "
            "one drafter; name one"
        )
    return problems


def resolve_attention(
    attention: Literal["auto", "dense", "flex"], drafter_device: str
) -> Literal["dense", "flex"]:
    """The drafter's attention backend, `dense` or `flex`, on its device.

    Raises:
        ScheduleError: flex on a CPU, where it has no backward pass.
    """
    on_gpu = drafter_device.startswith("cuda")
    if attention == "flex" and not on_gpu:
        raise ScheduleError(
            f'drafter.attention = "flex": the drafter trains on {drafter_device}, where FlexAttention '
            'has no backward pass; use "dense" or "auto"'
        )
    return "flex" if attention == "flex" or (attention == "auto" and on_gpu) else "dense"
