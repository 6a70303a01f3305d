"""What status.json says: the format that a run's heartbeat writes and `status` reads.

It is small and whole: a reader needs no other file, no lock and no GPU library to tell how a run is.
"""

from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
import orjson

from engine.errors import InputError
from engine.whole_files import disk_errors

STATUS_FILE = "status.json"

State = Literal["starting", "warming-up", "running", "evaluating", "saving", "done", "failed", "stopped"]
ENDED = ("done", "failed", "stopped")
"""States after which no heartbeat comes."""


@attrs.frozen(kw_only=True)
class LaneActivity:
    """What a lane is at."""

    stage: str
    micro_batch: int | None
    step: int | None
    """Counted from 1, as in metrics.jsonl."""
    since: float
    """Unix time at which a heartbeat first saw it there."""
    busy: float | None
    """Share of the last moments that it was at work, in [0, 1]; None until a step is done."""


@attrs.frozen(kw_only=True)
class GpuMemory:
    """One GPU's memory, GB of 10^9 bytes."""

    used_gb: float
    """By all processes, as the driver counts."""
    total_gb: float
    peak_allocated_gb: float | None
    """The most that this run's tensors took; None until a step is done."""


@attrs.frozen(kw_only=True)
class LastCheckpoint:
    """The newest checkpoint that is whole."""

    name: str
    step: int
    time: float
    """Unix time."""


@attrs.frozen(kw_only=True)
class LiveStatus:
    """A run at one moment."""

    state: State
    """`stopped`: asked to end before its last step; what it was at is saved where it had a step to save."""
    pid: int
    machine: str | None
    """Where `pid` counts; see `engine.process_identity`. None where that cannot be told."""
    process_start: int | None
    """The kernel's start time of the process, in its ticks: tells a process number used again apart."""
    started: float
    """Unix time."""
    time: float
    """Unix time of this heartbeat."""
    step: int | None
    """Optimizer steps done; None before the first one is known."""
    last_step: int | None
    """Where the run ends; None until its documents are counted."""
    loss: float | None
    """None where it was not finite, too."""
    tokens_per_s: float | None
    """Of the last step."""
    eta_s: float | None
    """Seconds left; None until there is a pace."""
    lanes: dict[str, LaneActivity]
    """By lane name; empty while all are idle."""
    gpu_memory: dict[str, GpuMemory]
    """By device; empty on a CPU."""
    checkpoint: LastCheckpoint | None
    resumed_from: str | None
    """Name of the checkpoint that this process went on from."""
    error: str | None
    exit_code: int | None
    """Of the run's process; None while it is at work."""


def read_live_status(path: Path) -> LiveStatus:
    """The status in a file.

    Raises:
        InputError: there is none, it is torn, or it says something else than a run's status does.
        DiskError: it cannot be read.
    """
    with disk_errors(path, "read"):
        data = path.read_bytes() if path.exists() else None
    if data is None:
        raise InputError(
            f"{path}: no such file; give a run's folder, or the folder that the runs are in. A run whose "
            "start failed leaves no folder: what happened stands on its standard error"
        )
    try:
        values: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        found = f"{len(data)} bytes that are no JSON ({error})" if data else "an empty file"
        raise InputError(
            f"{path}: {found}; a run replaces the file whole every second, so a power cut or another program "
            "left this; what is certain stands in metrics.jsonl and run.log"
        ) from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: JSON, but no run's status: expected an object")
    names = [field.name for field in attrs.fields(LiveStatus)]
    if missing := [name for name in names if name not in values]:
        raise InputError(
            f"{path}: no status that this version reads: it lacks {', '.join(missing)}; another version of "
            "the engine wrote it, or something else did"
        )
    try:
        return cattrs.Converter().structure(values, LiveStatus)
    except cattrs.BaseValidationError as error:
        problems = "; ".join(cattrs.transform_error(error, path="status"))
        raise InputError(f"{path}: no status that this version reads: {problems}") from None
