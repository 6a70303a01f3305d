"""The file that tuning results are kept in: where it lies, what it holds for, reading and merging.

One file per kind of GPU and versions of torch, triton, FLA and driver, since a result that was best
under others is only a guess here. It is rewritten whole, under a lock between processes, merged with
what another process wrote meanwhile. A file is judged entry by entry when it is read: what is no
configuration is left out and named, the rest is used.
"""

import ctypes
import fcntl
import importlib.metadata
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from engine.errors import DiskError
from engine.whole_files import disk_errors, replace_file

SCHEMA = 1
LOCK_PATIENCE_S = 10.0
"""How long to wait for another process that writes the file; it takes milliseconds."""
WITHOUT_GPU = "cpu-stub"

Configuration = dict[str, Any]
"""Block sizes, `num_warps` and the rest, by name."""
Results = dict[str, dict[str, Configuration]]
"""Kernel with the hash of what it is → key → configuration."""

_VALUES = (bool, int, float, str, type(None))


def cache_folder() -> Path:
    """Where the engine keeps what can be made again: $DFLASH_ENGINE_CACHE, or in the user's cache folder."""
    if named := os.environ.get("DFLASH_ENGINE_CACHE"):
        return Path(named).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "dflash-engine"
    try:
        return Path.home() / ".cache" / "dflash-engine"
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir()) / f"dflash-engine-{os.getuid()}"


def tuning_file(fingerprint: str, folder: Path) -> Path:
    """The file of results for a fingerprint, below the cache folder."""
    return folder / "tuning" / f"{re.sub(r'[^0-9A-Za-z.+-]+', '_', fingerprint)}.json"


def fingerprint() -> str:
    """What results hold for: the kinds of GPU here, and the versions that decide how kernels run.

    Triton's keys do not name a device, so with several kinds of GPU results belong to the mix.
    """
    import torch

    kinds = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    parts = ["+".join(sorted(kinds)) or WITHOUT_GPU, f"torch{torch.__version__}"]
    for name, distribution in (("triton", "triton"), ("fla", "fla-core")):
        try:
            parts.append(name + importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"{name}-none")
    if kinds:
        parts.append(f"driver{driver_version() or '-unknown'}")
    return "-".join(parts)


def driver_version() -> str | None:
    """The NVIDIA driver's, such as "580.65.06"; None without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    version = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    found = nvml.nvmlSystemGetDriverVersion(version, len(version)) == 0
    nvml.nvmlShutdown()
    return version.value.decode(errors="replace") if found else None


def read_results(path: Path, fingerprint: str) -> tuple[Results, list[str]]:
    """What a file of results holds, and a line for each thing in it that cannot be used.

    Raises:
        DiskError: it is there and cannot be read.
    """
    with disk_errors(path, "read"):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return {}, []
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return {}, [f"{path}: is no JSON ({error}); dropped, its kernels are tuned again"]
    found = found if isinstance(found, dict) else {}
    for word, wanted in (("schema", SCHEMA), ("fingerprint", fingerprint)):
        if found.get(word) != wanted:
            return {}, [f"{path}: its {word} is {found.get(word)!r}, not {wanted!r}; dropped as a whole"]
    kernels = found.get("kernels")
    if not isinstance(kernels, dict):
        return {}, [f"{path}: has no table `kernels`; dropped as a whole"]
    results: Results = {}
    lines = []
    for kernel, entries in kernels.items():
        if not isinstance(entries, dict):
            lines.append(f"{path}: {kernel} is no table of keys; dropped")
            continue
        results[kernel] = {key: values for key, values in entries.items() if _is_configuration(values)}
        if unsound := len(entries) - len(results[kernel]):
            lines.append(f"{path}: {kernel} has {unsound} entries that are no configuration; dropped")
    return results, lines


def _is_configuration(values: Any) -> bool:
    return isinstance(values, dict) and all(type(value) in _VALUES for value in values.values())


def rewrite_results(path: Path, fingerprint: str, added: Results, dropped: Results) -> list[str]:
    """Put results into the file, and take out others unless they were replaced; keeps all the rest.

    Returns:
        Lines about what was found in the file and could not be kept.

    Raises:
        DiskError: it cannot be read or written, or another process does not let go of it.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            results, lines = read_results(path, fingerprint)
            for kernel, entries in dropped.items():
                for key, values in entries.items():
                    if results.get(kernel, {}).get(key) == values:
                        del results[kernel][key]
            kernels = {kernel: entries for kernel, entries in merged(results, added).items() if entries}
            content = {"schema": SCHEMA, "fingerprint": fingerprint, "kernels": kernels}
            replace_file(path, orjson.dumps(content, option=orjson.OPT_INDENT_2))
    return lines


def merged(results: Results, newer: Results) -> Results:
    """Both, kernel by kernel; the newer one's where both have a key."""
    kernels = sorted({*results, *newer})
    return {kernel: {**results.get(kernel, {}), **newer.get(kernel, {})} for kernel in kernels}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    # The system gives the lock up when its holder ends, however it ends; the file itself stays.
    with lock.open("a") as file:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DiskError(
                        f"{lock}: another process has held it for {LOCK_PATIENCE_S:g} s; end it if it hangs"
                    ) from None
                time.sleep(0.02)
        yield
