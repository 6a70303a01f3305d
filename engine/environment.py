"""What a run ran on: versions and devices, for environment.json.

A result that cannot be repeated elsewhere is explained by this file more often than by the
schedule. Only what is listed here is collected: no environment variables, no command line, no host
or user names, so a run's folder can be shared as it is.
"""

import importlib.metadata
import os
import platform
from typing import Any

_PACKAGES = {
    "engine": "dflash-engine",
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "fla": "flash-linear-attention",
    "safetensors": "safetensors",
}


def environment() -> dict[str, Any]:
    """Versions and devices of this machine, for environment.json; no variables, no secrets."""
    import torch

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in _PACKAGES.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "versions": versions,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": [{"name": "cpu"}]
        + [
            {"name": f"cuda:{index}", "model": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)}
            for index, gpu in enumerate(gpus)
        ],
    }
