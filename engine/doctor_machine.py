"""The machine around the GPUs: cache folders, compilers, processors, memory, disk.

Compiled kernels are programs that later runs load without looking, so a cache folder is judged like a
folder of programs: can this user write there, is anything in it another user's, is anything cut short.
"""

import os
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from engine.disk_space import existing_folder
from engine.doctor_findings import Finding, gigabytes
from engine.errors import InputError

WALK_S = 1.0
"""Seconds that looking through one cache folder may take; a larger one is told in part."""

CACHED_PROGRAMS = (".json", ".cubin", ".hsaco", ".ptx", ".so", ".py", ".cpp")
"""Cached files that are never empty when they are whole."""

OLD_PART_S = 3600.0
"""A partial file that was not touched for this long is nobody's work in progress."""

SPARE_DISK = 10e9
"""Bytes that should be free where no schedule says what will be written."""


@attrs.frozen(kw_only=True)
class CacheFolder:
    """What looking through a cache folder found."""

    path: Path
    exists: bool
    writable: bool
    """Whether a file can be made in it, or in the nearest folder above it that exists."""
    files: int = 0
    bytes: int = 0
    whole: bool = True
    """Whether all of it was looked through."""
    partial: tuple[str, ...] = ()
    """Files that a process left half-written."""
    foreign: tuple[str, ...] = ()
    """Entries of another user."""


def cache_folders() -> dict[str, Path]:
    """Where kernels and what was learnt about them are kept, by whose cache it is."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from engine.runtime.tuning_file import cache_folder

    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return {
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")),
        "torch.compile": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()),
        "engine": cache_folder(),
    }


def look_through(path: Path, *, user: int | None = None, seconds: float = WALK_S) -> CacheFolder:
    """Look through a cache folder; nothing in it is changed.

    Args:
        user: whose files it should hold; by default, this process's user.
    """
    user = os.getuid() if user is None else user
    nearest = existing_folder(path)
    writable = os.access(nearest, os.W_OK | os.X_OK)
    if not path.is_dir():
        # Something else in the folder's place is as good as a folder that nobody can write.
        return CacheFolder(path=path, exists=False, writable=writable and not path.exists())
    deadline = time.monotonic() + seconds
    files = size = 0
    partial: list[str] = []
    foreign: list[str] = ["."] if path.stat().st_uid != user else []
    whole = True
    for parent, folders, names in os.walk(path):
        if time.monotonic() > deadline:
            whole = False
            break
        for name in (*folders, *names):
            entry = Path(parent) / name
            try:
                status = entry.lstat()
            except FileNotFoundError:  # another process cleared it in this moment
                continue
            shown = str(entry.relative_to(path))
            if status.st_uid != user:
                foreign.append(shown)
            if name in names:
                files += 1
                size += status.st_size
            if _is_partial(name, status, file=name in names):
                partial.append(shown)
    return CacheFolder(
        path=path,
        exists=True,
        writable=writable,
        files=files,
        bytes=size,
        whole=whole,
        partial=tuple(sorted(partial)),
        foreign=tuple(sorted(foreign)),
    )


def _is_partial(name: str, status: os.stat_result, *, file: bool) -> bool:
    if file and not status.st_size and name.endswith(CACHED_PROGRAMS) and not name.startswith("__init__"):
        return True
    # The names under which Triton, torch.compile and this engine write before they rename.
    unfinished = name.startswith("tmp.pid_") or name.endswith((".tmp", ".partial"))
    return unfinished and time.time() - status.st_mtime > OLD_PART_S


def cache_findings(name: str, folder: CacheFolder, *, needed: bool) -> Iterator[Finding]:
    """One line on a cache folder: the worst of what was found in it.

    Args:
        needed: whether runs end where it cannot be written, rather than start slowly.
    """
    subject = f"cache of {name}"
    size = f"{'' if folder.whole else 'more than '}{gigabytes(folder.bytes)} in {folder.files:,} files"
    shown = f"{folder.path}: {size if folder.exists else 'not there yet'}"
    if not folder.writable:
        yield Finding(
            subject,
            "fail" if needed else "warn",
            f"{shown}, and it cannot be written, so nothing can be kept there",
            f"make it this user's, or point {_variable(name)} at a folder that is",
        )
    elif folder.foreign:
        yield Finding(
            subject,
            "warn",
            f"{shown}; another user's: {_few(folder.foreign)}; kernels in there are programs that runs load",
            f"remove the folder, or point {_variable(name)} at one of your own",
        )
    elif folder.partial:
        yield Finding(
            subject,
            "warn",
            f"{shown}; half-written: {_few(folder.partial)}",
            "remove those, or the whole folder while no run uses it; it is filled again",
        )
    else:
        yield Finding(subject, "ok", shown)


def tuning_findings() -> Iterator[Finding]:
    """The engine's own tuning results for this kind of machine."""
    from engine.runtime.tuning_file import cache_folder, fingerprint, read_results, tuning_file

    held_for = fingerprint()
    path = tuning_file(held_for, cache_folder())
    results, dropped = read_results(path, held_for)
    if dropped:
        yield Finding(
            "tuning results", "warn", "; ".join(dropped), f"remove {path}; the next run tunes again"
        )
    else:
        keys = sum(map(len, results.values()))
        found = (
            f"{keys} keys of {len(results)} kernels" if keys else "none yet: the first run tunes its kernels"
        )
        yield Finding("tuning results", "ok", f"{found}, for {held_for}")


def _variable(name: str) -> str:
    return {"triton": "TRITON_CACHE_DIR", "torch.compile": "TORCHINDUCTOR_CACHE_DIR"}.get(
        name, "DFLASH_ENGINE_CACHE"
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def compiler_findings(*, gpus: bool) -> Iterator[Finding]:
    """Compilers: Triton builds its launchers in C, torch.compile builds code for a CPU in C++."""
    from plugins.lazy_compile import check_compiler

    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    for subject, device in (("C compiler", "cuda"), ("C++ compiler", "cpu")):
        needed = gpus if device == "cuda" else False
        try:
            check_compiler(device)
        except InputError as error:
            problem, _, cure = str(error).partition("; ")
            yield Finding(subject, "fail" if needed else "warn", problem, cure)
            continue
        if not headers.is_file():
            yield Finding(
                subject,
                "fail" if needed else "warn",
                f"there, but {headers} is not, which launchers and compiled code include",
                "install Python's development files (python3-dev, python3-devel)",
            )
        else:
            yield Finding(subject, "ok", "there, with Python's headers")


def processor_findings(cores: int, lanes: Sequence[str], cpu_threads: int) -> Iterator[Finding]:
    """Cores against the threads that a run keeps busy.

    Args:
        cores: that this process may use.
        lanes: device of each lane; empty without a schedule.
        cpu_threads: of one operation on a CPU lane.
    """
    busy = sum(cpu_threads if device == "cpu" else 1 for device in lanes)
    shown = f"{cores} for this process"
    if busy > cores:
        yield Finding(
            "processor cores",
            "warn",
            f"{shown}, and the schedule's {len(lanes)} lanes keep {busy} threads busy",
            ("lower run.cpu_threads, " if cpu_threads > 1 and "cpu" in lanes else "")
            + "name fewer lanes, or put up with lanes that slow each other down",
        )
    else:
        yield Finding("processor cores", "ok", shown + (f", {busy} kept busy by lanes" if lanes else ""))


def memory_findings(available: int | None, checkpoint: int | None) -> Iterator[Finding]:
    """Main memory against what a checkpoint passes through it.

    Args:
        available: bytes; None where the system does not say.
        checkpoint: bytes of one; None without a schedule.
    """
    if available is None:
        yield Finding(
            "main memory", "warn", "the system does not say how much is available", "look with `free -g`"
        )
    elif checkpoint is not None and available < checkpoint:
        yield Finding(
            "main memory",
            "warn",
            f"{gigabytes(available)} available, and a checkpoint brings {gigabytes(checkpoint)} through it",
            "free some, or take a machine with more",
        )
    else:
        yield Finding("main memory", "ok", f"{gigabytes(available)} available")


def available_memory(meminfo: int | None, cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Main memory that this process may still take: the system's, or less in a container.

    Args:
        meminfo: what the system says is available, in bytes.
        cgroup: where the limits of this process's group stand.
    """
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return meminfo
    return limit - used if meminfo is None else min(meminfo, limit - used)


def disk_findings(folder: Path, free: int, checkpoint: int | None, count: int) -> Iterator[Finding]:
    """Free disk where runs are written, against a run's checkpoints.

    Args:
        folder: where, free: bytes there.
        checkpoint: bytes of one; None without a schedule. count: how many the run writes.
    """
    shown = f"{gigabytes(free)} free at {folder}"
    if checkpoint is None:
        if free < SPARE_DISK:
            cure = "free some: a checkpoint of a drafter for a 27B target takes 24 GB"
            yield Finding("disk", "warn", shown, cure)
        else:
            yield Finding("disk", "ok", shown)
        return
    shown += f"; the run writes {count} checkpoints of {gigabytes(checkpoint)}"
    if free < checkpoint * count:
        yield Finding(
            "disk",
            "fail",
            f"{shown}, {gigabytes(checkpoint * count)} in all, room for {free // checkpoint}",
            "raise run.save_every, point run.output_dir at a larger disk, or free some",
        )
    else:
        yield Finding("disk", "ok", shown)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
