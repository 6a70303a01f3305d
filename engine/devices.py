"""Which devices run the target and which train the drafter.

Names are `cpu` and `cuda:<n>`; each entry of a list is a lane, and a name may repeat. They are checked
before anything is loaded, against the devices that are there, so that a schedule written for another
machine ends with a sentence and not with a CUDA error ten minutes later. GPUs of two kinds in one run
are refused: kernels are tuned once per process, and what was tuned on one kind can fail on the other.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from engine.errors import ScheduleError
from engine.schedule import Devices, Layout
from engine.toml_text import shown

_NAME = re.compile(r"cpu|cuda:(0|[1-9][0-9]*)")


def available_devices() -> list[str]:
    """The devices of this machine: `cpu` first, then every GPU that CUDA shows."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def gpu_kinds(names: Sequence[str]) -> dict[str, str]:
    """What kind of GPU each of some devices is: the model's name and its compute capability."""
    import torch

    found = {}
    for name in names:
        gpu = torch.cuda.get_device_properties(name)
        found[name] = f"{gpu.name} (compute capability {gpu.major}.{gpu.minor})"
    return found


def resolve_devices(
    devices: Devices | Literal["auto"],
    available: Sequence[str] | Callable[[], Sequence[str]] = available_devices,
    *,
    micro_batches: int,
    layout: Layout | None = None,
    kinds: Callable[[Sequence[str]], Mapping[str, str]] = gpu_kinds,
) -> tuple[list[str], list[str]]:
    """Names of the targets' and the drafters' devices, one per lane.

    Args:
        devices: a schedule's `devices`; `auto` is shared out by `share_out`.
        available: the devices that are there, or a function that finds them.
        micro_batches: a schedule's `train.micro_batches`; a drafter without one would never work.
        layout: a schedule's `layout`; None is `sequential`.
        kinds: tells the kind of GPU of each name; asked where a run would use two GPUs or more.

    Raises:
        ScheduleError: everything that is wrong with the names, one problem a line.
    """
    there = list(available() if callable(available) else available)
    if devices == "auto":
        gpus = [name for name in there if name != "cpu"]
        targets, drafters = share_out(gpus, layout or "sequential")
        drafters = drafters[:micro_batches]
    else:
        targets, drafters = list(devices.targets), list(devices.drafters)
        problems = [
            *_problems("devices.targets", targets, there),
            *_problems("devices.drafters", drafters, there),
        ]
        if len(drafters) > micro_batches:
            problems.append(
                f"devices.drafters = {shown(drafters)}: {len(drafters)} drafters share "
                f"train.micro_batches = {micro_batches} per step, so some would idle; name fewer or raise it"
            )
        if problems:
            raise ScheduleError("\n".join(problems))
    _refuse_mixed_kinds([*targets, *drafters], kinds)
    return targets, drafters


def share_out(gpus: Sequence[str], layout: Layout) -> tuple[list[str], list[str]]:
    """Devices of targets and drafters for `devices = "auto"`; without a GPU, lanes on the CPU.

    - `sequential`: one GPU does both, two do both each, more are halved. An odd one out becomes a
      target: forwards run one at a time, and with a target more the next is ready sooner.
    - `pipelined`: three eighths of the GPUs, rounded down and at least one, train drafters. A target's
      forward costs several drafter steps, so 4 GPUs are 3 and 1, 8 are 5 and 3. A single GPU does both.
    - `colocated`: every GPU does both.
    """
    count = len(gpus)
    if not count:
        lanes = {"sequential": (2, 2), "pipelined": (2, 1), "colocated": (1, 1)}[layout]
        return ["cpu"] * lanes[0], ["cpu"] * lanes[1]
    if layout == "colocated" or count == 1 or (layout == "sequential" and count == 2):
        return list(gpus), list(gpus)
    drafters = count // 2 if layout == "sequential" else max(1, 3 * count // 8)
    return list(gpus[: count - drafters]), list(gpus[count - drafters :])


def _refuse_mixed_kinds(names: Sequence[str], kinds: Callable[[Sequence[str]], Mapping[str, str]]) -> None:
    gpus = sorted({name for name in names if name != "cpu"}, key=lambda name: int(name.partition(":")[2]))
    if len(gpus) < 2:
        return
    found = kinds(gpus)
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} is {found[name]}" for name in gpus)
        raise ScheduleError(
            f"devices: GPUs of more than one kind in one run: {listed}; kernels tuned on one kind can fail "
            "on another, so name GPUs of one kind in [devices], or hide the others with CUDA_VISIBLE_DEVICES"
        )


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
    return problems


def resolve_attention(
    attention: Literal["auto", "dense", "flex"], *drafter_devices: str
) -> Literal["dense", "flex"]:
    """The attention backend, `dense` or `flex`, that all drafters of a run share.

    Raises:
        ScheduleError: flex on a CPU, where it has no backward pass.
    """
    cpu = [device for device in drafter_devices if not device.startswith("cuda")]
    if attention == "flex" and cpu:
        raise ScheduleError(
            f'drafter.attention = "flex": the drafter trains on {cpu[0]}, where FlexAttention '
            'has no backward pass; use "dense" or "auto"'
        )
    return "flex" if attention == "flex" or (attention == "auto" and not cpu) else "dense"
