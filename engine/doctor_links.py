"""How GPUs are linked, and whether copies between them arrive unharmed.

The links are what nvidia-smi says; the copies are the proof, by the same probe that a run begins with.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from engine.copy_probe import COPY_SIZES, copy_differences, patterns
from engine.doctor_devices import Gpu
from engine.doctor_findings import Finding


def read_topology() -> str | None:
    """What `nvidia-smi topo -m` prints; None where there is none or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def link_findings(gpus: Sequence[Gpu], topology: str | None) -> Iterator[Finding]:
    """How GPUs are connected.

    Args:
        topology: what `nvidia-smi topo -m` printed; None where it did not.
    """
    if len(gpus) < 2:
        return
    links = read_links(topology or "")
    if not links:
        yield Finding(
            "links",
            "warn",
            "unknown: nvidia-smi topo -m is not available",
            "none is needed; the copies below are the proof",
        )
        return
    kinds: dict[str, list[str]] = {}
    for (one, other), kind in links.items():
        kinds.setdefault(kind, []).append(f"{one}-{other}")
    shown = [f"{kind}: {', '.join(pairs[:4])}{' …' * (len(pairs) > 4)}" for kind, pairs in kinds.items()]
    yield Finding("links", "ok", f"by nvidia-smi's numbers, {'; '.join(shown)}")


def read_links(topology: str) -> dict[tuple[str, str], str]:
    """Pairs of GPUs to their link (`NV18`, `PIX`, `SYS`, …) from the matrix that nvidia-smi prints."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    header = next((line for line in lines if line and line[0] == "GPU0"), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for cells in lines:
        if cells and cells[0] in columns and len(cells) > len(columns):
            for column, kind in zip(columns, cells[1:], strict=False):
                if int(cells[0][3:]) < int(column[3:]):
                    links[cells[0], column] = kind
    return links


def probe_peers(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Copy between every two GPUs, both ways, and compare."""
    import torch

    sent = patterns() if len(gpus) > 1 else []
    for index, one in enumerate(gpus):
        for other in gpus[index + 1 :]:
            directions = ((one.name, other.name), (other.name, one.name))
            direct = all(torch.cuda.can_device_access_peer(a, b) for a, b in directions)
            wrong = {f"{a} → {b}": copy_differences(a, b, sent) for a, b in directions}
            yield peer_finding(f"{one.name} ↔ {other.name}", wrong, direct=direct)


def peer_finding(subject: str, wrong: Mapping[str, Mapping[int, int]], *, direct: bool) -> Finding:
    """What copies between two GPUs came to.

    Args:
        wrong: direction to what `copy_differences` returned.
        direct: whether each can read the other's memory, without host memory in between.
    """
    bad = [
        f"{direction}: {count:,} of {size:,} bytes"
        for direction, sizes in wrong.items()
        for size, count in sizes.items()
    ]
    if bad:
        return Finding(
            subject,
            "fail",
            f"copies arrive corrupted: {'; '.join(bad)}",
            "turn off the IOMMU or the PCIe switches' access control (ACS); until then a run copies through "
            "host memory between these two, slower, and says so",
        )
    if not direct:
        return Finding(
            subject,
            "warn",
            f"no peer access: copies go through host memory; bit for bit right in {len(COPY_SIZES)} sizes",
            "nothing to mend if the GPUs have no link; in a virtual machine, ask for peer access",
        )
    return Finding(
        subject, "ok", f"peer access; copies both ways bit for bit right in {len(COPY_SIZES)} sizes"
    )
