"""A checkpoint: the servable drafter at its root, what training needs to go on below it.

    step_000100/
      config.json, model.safetensors      what a server reads
      training/state.safetensors          float32 masters, moments, step counters
      training/cursor.json                step, seed, data, and the schedule it was trained by

Servers load every safetensors file of a folder's root, so the training state stands in a folder of
its own. A checkpoint is written beside its place and renamed into it.
"""

import tomllib
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.dflash.export import write_drafter
from engine.errors import CheckpointError
from engine.run_folder import RunFolder
from engine.training_parts import TrainingParts
from engine.whole_files import write_whole

STATE = Path("training/state.safetensors")
CURSOR = Path("training/cursor.json")

CURSOR_KEYS = ("step", "tensors", "micro_batch", "seed", "total_steps", "data_fingerprint", "schedule")

DECIDING = ("target", "drafter", "data", "train")
"""Sections that decide what a step computes; a resumed run must not change them."""


def save_checkpoint(folder: RunFolder, parts: TrainingParts, step: int) -> Path:
    """Write the checkpoint after `step` steps and make it the latest."""
    plan = parts.plan
    state = {name: value.cpu().contiguous() for name, value in parts.state().items()}
    cursor = {
        "step": step,
        "tensors": len(state),
        "micro_batch": step * plan.schedule.train.micro_batches,
        "seed": plan.schedule.run.seed,
        "total_steps": plan.total_steps,
        "data_fingerprint": plan.data_fingerprint,
        "schedule": plan.schedule.to_toml(),
    }

    def write(path: Path) -> None:
        write_drafter(path, plan.drafter_config, parts.masters)
        (path / STATE.parent).mkdir()
        save_file(state, path / STATE)
        (path / CURSOR).write_bytes(orjson.dumps(cursor, option=orjson.OPT_INDENT_2))

    path = folder.checkpoint_path(step)
    write_whole(path, write)
    folder.mark_latest(step)
    return path


def load_checkpoint(path: Path, parts: TrainingParts) -> int:
    """Restore masters, moments and weights; returns the number of steps done.

    Raises:
        CheckpointError: the checkpoint is torn, or was trained by another recipe or on other data.
    """
    cursor = read_cursor(path)
    if differences := drift(cursor, parts):
        raise CheckpointError(
            f"{path}: resuming would not continue that run; it differs in\n  " + "\n  ".join(differences)
        )
    try:
        state = load_file(path / STATE)
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"{path / STATE}: cannot be read: {error}") from error
    if len(state) != cursor["tensors"]:
        raise CheckpointError(
            f"{path / STATE}: holds {len(state)} tensors, and {cursor['tensors']} were written; "
            "resume from another checkpoint"
        )
    parts.load(state)
    return int(cursor["step"])


def read_cursor(path: Path) -> dict[str, Any]:
    """The cursor of a checkpoint's folder."""
    try:
        cursor: dict[str, Any] = orjson.loads((path / CURSOR).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: holds no training state, so it can be served but not resumed"
        ) from error
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path / CURSOR}: not JSON: {error}") from error
    missing = [key for key in CURSOR_KEYS if key not in cursor]
    if missing:
        raise CheckpointError(f"{path / CURSOR}: lacks {', '.join(missing)}; resume from another checkpoint")
    return cursor


def drift(cursor: dict[str, Any], parts: TrainingParts) -> list[str]:
    """What decides a step's numbers and is not as it was, one line each."""
    plan = parts.plan
    try:
        now, then = tomllib.loads(plan.schedule.to_toml()), tomllib.loads(cursor["schedule"])
    except tomllib.TOMLDecodeError as error:
        raise CheckpointError(
            f"the checkpoint's cursor holds no schedule that can be read: {error}"
        ) from error
    lines = []
    for section in DECIDING:
        for key in sorted(now[section].keys() | then[section].keys()):
            was, is_now = then[section].get(key), now[section].get(key)
            if was != is_now:
                lines.append(f"{section}.{key}: was {was!r}, is {is_now!r}")
    facts = {
        "run.seed": (cursor["seed"], plan.schedule.run.seed),
        "total steps": (cursor["total_steps"], plan.total_steps),
        "documents (fingerprint)": (cursor["data_fingerprint"], plan.data_fingerprint),
    }
    return lines + [f"{name}: was {was!r}, is {now!r}" for name, (was, now) in facts.items() if was != now]
