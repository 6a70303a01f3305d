"""Whether the disk has room for the checkpoints of a run, before it starts and before each of them.

A checkpoint of a drafter for a 27B target is 24 GB, and a disk that is full in the middle of one has
cost a night. Its size follows from the drafter alone, so a run without room for a single one does not
start, and a save that would not fit is refused before anything is written: the checkpoint before it
stays, and so does what little room there is for logs. Free space is what an unprivileged process may
still write; a quota is not seen here, and ends in the write's own `DiskError`.

torch is imported where it is used: `doctor` reads this module on machines where torch does not import.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import DiskError

if TYPE_CHECKING:
    import torch

    from engine.planning import RunPlan

MASTER = 4
"""Bytes per parameter that a checkpoint holds beside the served weights and the optimizer's state."""

FreeDisk = Callable[[Path], int]


def free_disk(folder: Path) -> int:
    """Bytes free where a folder is or would be made."""
    return shutil.disk_usage(existing_folder(folder)).free


def existing_folder(path: Path) -> Path:
    """The nearest folder that exists: `path` or one above it."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def checkpoints(plan: "RunPlan") -> tuple[int, int]:
    """Bytes of a checkpoint, and how many of a run's stand at once.

    With `run.keep_last` that is one more than are kept, since an old one goes when a new one is whole.
    """
    import torch

    from engine.dflash.drafter import build_drafter

    drafter = build_drafter(plan.drafter_config, torch.device("meta"), plan.compute_dtype)
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    run, last = plan.schedule.run, plan.total_steps
    steps = [*range(run.save_every, last, run.save_every), last] if run.save_every else [last]
    if run.keep_last:
        newest = len(steps) - run.keep_last - 1
        steps = [
            step
            for place, step in enumerate(steps)
            if place >= newest or (run.keep_every and step % run.keep_every == 0)
        ]
    return parameters * (MASTER + plan.compute_dtype.itemsize) + plan.optimizer_bytes, len(steps)


def saved_bytes(state: "Iterable[torch.Tensor]", served: "Iterable[torch.Tensor]") -> int:
    """Bytes of a checkpoint's tensors: the training state, and the drafter in the dtype it is served in."""
    return sum(tensor.nbytes for tensor in (*state, *served))


def check_room(folder: Path, needed: int, free: FreeDisk = free_disk) -> None:
    """Refuse to begin a checkpoint that does not fit.

    Args:
        folder: where it is to be written.
        needed: its bytes.

    Raises:
        DiskError: names what is needed and what is free; nothing was written.
    """
    there = free(folder)
    if there < needed:
        raise DiskError(
            f"{folder}: a checkpoint of {_gb(needed)} does not fit, {_gb(there)} are free; those before it "
            "stay. Free some, or set run.keep_last so that old ones are removed, then go on with --resume"
        )


def check_first_room(
    plan: "RunPlan", folder: Path, say: Callable[[str], None], free: FreeDisk = free_disk
) -> None:
    """Refuse to start a run whose disk has no room for one more checkpoint.

    Args:
        folder: the run's; the checkpoints that stand there already are not counted again.
        say: takes a line where there is room for one and not for all.

    Raises:
        DiskError: names what is needed, what is free, and what mends it.
    """
    needed, count = checkpoints(plan)
    there = free(folder)
    if there < needed:
        raise DiskError(
            f"{folder}: {_gb(there)} are free, and one checkpoint of this drafter takes {_gb(needed)}; free "
            "some, or point run.output_dir or --output at a larger disk"
        )
    standing = sum(path.is_dir() for path in folder.glob("checkpoints/step_*"))
    # At least one more: a resumed run that replaces its last checkpoint writes the new one beside it.
    wanted = max(count - standing, 1)
    if there < needed * wanted:
        say(
            f"disk: {_gb(there)} free at {folder}, room for {there // needed} of the {wanted} checkpoints "
            f"of {_gb(needed)} that this run still writes; it ends where one does not fit. Raise "
            "run.save_every, or set run.keep_last"
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
