"""GPUs: the driver under them, code for their architecture, their memory, and that they are of one kind.

What decides is kept apart from what asks the machine: every judgement is a function of plain facts, so
that it can be tried for GPUs that are not here.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from engine.doctor_findings import Finding, gigabytes

DRIVER_FLOORS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version to the oldest driver branch whose GPUs run programs built for it."""

SMALL_IN_USE = 1_500_000_000
"""Bytes of a GPU's memory that this process's own CUDA context and the driver may take."""

TRITON_FLOOR = (8, 0)
"""Compute capability below which Triton supports no GPU."""


@attrs.frozen(kw_only=True)
class Gpu:
    """One GPU, as CUDA shows it."""

    name: str
    """`cuda:<n>`"""
    model: str
    capability: tuple[int, int]
    total: int
    """Bytes of memory."""
    free: int
    """Bytes that are free while this process holds nothing but a context."""

    @property
    def kind(self) -> str:
        return f"{self.model} (compute capability {self.capability[0]}.{self.capability[1]})"


def read_gpus() -> list[Gpu]:
    """The GPUs that CUDA shows to this process; makes a context on each."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        found.append(
            Gpu(name=f"cuda:{index}", model=properties.name, capability=capability, total=total, free=free)
        )
    return found


def read_driver() -> str | None:
    """The NVIDIA driver's version; None where there is no driver."""
    from engine.runtime.tuning_file import driver_version

    if version := driver_version():
        return version
    # Its library does not start where library and kernel module are of two versions.
    module = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3}\.\d+[.\d]*)\b", module.read_text()) if module.is_file() else None
    return match[1] if match else None


def cuda_error() -> str | None:
    """Why torch has no CUDA, in its own words; None where it has."""
    import torch

    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "CUDA starts and shows no GPU"


def driver_findings(driver: str | None, cuda: str | None, error: str | None) -> Iterator[Finding]:
    """Driver against torch's CUDA.

    Args:
        driver: its version, cuda: the one that torch was built for; None where there is none.
        error: why torch cannot use a GPU; None where it can.
    """
    if driver is None and error is not None:
        built = f"torch is built for CUDA {cuda} and " if cuda else ""
        yield Finding("driver", "ok", f"{built}no NVIDIA driver is here: everything runs on the CPU")
        return
    shown = driver or "unknown"
    if cuda is None:
        yield Finding(
            "driver",
            "fail",
            f"NVIDIA driver {shown}, and this torch is built without CUDA, so no GPU is used",
            "install torch's build for CUDA, as pytorch.org's selector says",
        )
        return
    floor = DRIVER_FLOORS.get(int(cuda.partition(".")[0]))
    too_old = driver is not None and floor is not None and int(driver.partition(".")[0]) < floor
    if error is not None:
        why = f"; CUDA {cuda} needs driver {floor} or newer" if too_old else ""
        yield Finding(
            "driver",
            "fail",
            f"NVIDIA driver {shown}, and torch cannot use it: {error}{why}",
            f"install driver {floor} or newer, or torch's build for an older CUDA"
            if too_old
            else "look at nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the container was given GPUs",
        )
    elif too_old:
        yield Finding(
            "driver",
            "warn",
            f"NVIDIA driver {shown}; CUDA {cuda} asks for {floor} or newer and works through a "
            "compatibility package",
            f"install driver {floor} or newer",
        )
    else:
        yield Finding("driver", "ok", f"NVIDIA driver {shown} runs CUDA {cuda}")


def read_triton_architectures() -> list[str]:
    """The architectures that Triton's assemblers know, such as `sm_90a`; empty where they can't be asked."""
    try:
        import triton
    except ImportError:
        return []
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    known: set[str] = set()
    for program in sorted(folder.glob("ptxas*")):
        done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=15)
        known.update(re.findall(r"\bsm_\d+[af]?\b", done.stdout))
    return sorted(known)


def torch_support(capability: tuple[int, int], architectures: Iterable[str]) -> str | None:
    """How a build of torch runs on a GPU: `native`, `compiled at start` from PTX, or None: not at all.

    Args:
        architectures: as `torch.cuda.get_arch_list` gives them, such as `sm_90` and `compute_120`.
    """
    major, minor = capability
    ptx = False
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        kind, built, suffix = match[1], (int(match[2]), int(match[3])), match[4]
        # Machine code runs on later minors of its own major, that of "a" nowhere else, PTX on all later ones.
        fits = built == capability if suffix == "a" else built[0] == major and built[1] <= minor
        if kind == "sm" and fits:
            return "native"
        ptx = ptx or (kind == "compute" and not suffix and built <= capability)
    return "compiled at start" if ptx else None


def architecture_findings(
    gpus: Sequence[Gpu], torch_architectures: Sequence[str], triton_architectures: Sequence[str]
) -> Iterator[Finding]:
    """Whether torch and Triton have code for each kind of GPU."""
    for capability in sorted({gpu.capability for gpu in gpus}):
        named = f"sm_{capability[0]}{capability[1]}"
        subject = f"architecture {named}"
        support = torch_support(capability, torch_architectures)
        if support is None:
            yield Finding(
                subject,
                "fail",
                f"this torch has no code for it; it has {', '.join(torch_architectures) or 'none'}",
                "install a torch that is built for this GPU, as pytorch.org's selector says",
            )
        elif capability < TRITON_FLOOR:
            yield Finding(
                subject,
                "fail",
                f"Triton needs compute capability {TRITON_FLOOR[0]}.{TRITON_FLOOR[1]} or newer",
                "use another GPU, or hide this one with CUDA_VISIBLE_DEVICES",
            )
        elif not triton_architectures:
            yield Finding(
                subject,
                "warn",
                f"torch: {support}; what Triton supports is unknown, no assembler is in it",
                "install triton from PyPI, or run `python -m engine stress`",
            )
        elif named not in triton_architectures:
            yield Finding(
                subject,
                "fail",
                f"torch: {support}; Triton's assembler does not know it, the latest it knows is "
                f"{max(triton_architectures, key=_number)}",
                "install a newer triton, and the torch that names it",
            )
        elif support != "native":
            yield Finding(
                subject,
                "warn",
                "torch compiles its kernels for this GPU when it starts, from code for an older one; "
                "Triton knows it",
                "install a torch that is built for this GPU; until then the first start takes minutes",
            )
        else:
            yield Finding(subject, "ok", "torch has code for it and Triton's assembler knows it")


def _number(architecture: str) -> int:
    return int(re.sub(r"\D", "", architecture))


def gpu_findings(gpus: Sequence[Gpu], used: Sequence[str] = ()) -> Iterator[Finding]:
    """The GPUs, their memory, and that they are of one kind.

    Args:
        used: names of the devices that a schedule uses; without one all GPUs count.
    """
    if not gpus:
        yield Finding("gpus", "ok", "none; lanes run on the CPU")
        return
    for gpu in gpus:
        found = f"{gpu.kind}, {gigabytes(gpu.total)}, {gigabytes(gpu.free)} free"
        in_use = gpu.total - gpu.free
        if in_use > SMALL_IN_USE:
            yield Finding(
                gpu.name,
                "warn",
                f"{found}: {gigabytes(in_use)} are in use before a run begins",
                "nvidia-smi shows whose; end it, or choose other GPUs with CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Finding(gpu.name, "ok", found)
    counted = [gpu for gpu in gpus if not used or gpu.name in used]
    kinds = sorted({gpu.kind for gpu in counted})
    if len(kinds) > 1:
        listed = ", ".join(f"{gpu.name} is {gpu.kind}" for gpu in counted)
        yield Finding(
            "gpu kinds",
            "fail",
            f"more than one: {listed}; kernels tuned on one kind can fail on another",
            "name GPUs of one kind in [devices], or hide the others with CUDA_VISIBLE_DEVICES",
        )
    elif len(counted) > 1:
        yield Finding("gpu kinds", "ok", f"all {len(counted)} are {kinds[0]}")
