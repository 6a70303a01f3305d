"""A checkpoint: the servable drafter at its root, what training needs to go on below it.

    step_000100/
      config.json, model.safetensors      what a server reads
      training/state.safetensors          float32 masters, moments, step counters
      training/cursor.json                step, seed, data, and the schedule it was trained by

Servers load every safetensors file of a folder's root, so the training state stands in a folder of
its own. A checkpoint is written beside its place, read back, and renamed into it; the cursor is
written last and says how long each file is, so that one that was torn is known without reading it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.dflash.configuration import DrafterConfig
from engine.dflash.export import CONFIG, WEIGHTS, write_drafter
from engine.errors import CheckpointError, DiskError, EngineError
from engine.tensor_file import entry_of, read_header, write_tensors
from engine.training_parts import TrainingParts

STATE = "training/state.safetensors"
CURSOR = "training/cursor.json"
FILES = (CONFIG, WEIGHTS, STATE)

CURSOR_KEYS = {
    "step": int,
    "micro_batch": int,
    "tensors": int,
    "scalars": dict,
    "facts": dict,
    "schedule": str,
    "drift": list,
    "files": dict,
}

MASTER = "master."

Cursor = dict[str, Any]


@attrs.frozen(kw_only=True)
class Contents:
    """What goes into a checkpoint, of one moment."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    """Masters and optimizer state by `<key>.<parameter>`, of any device."""
    cursor: Cursor


def contents(
    parts: TrainingParts, step: int, facts: Mapping[str, Any], drift: list[dict[str, Any]]
) -> Contents:
    """What a checkpoint after `step` steps holds; its tensors are the run's own, so copy or write them now.

    Args:
        facts: what a resumed run must share, see `engine.drift`.
        drift: what differed at earlier resumes that were told to go on.

    Raises:
        EngineError: the optimizer keeps something that no checkpoint can hold; names it.
    """
    plan = parts.plan
    state: dict[str, Any] = parts.state()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    scalars = {name: value for name, value in state.items() if name not in tensors}
    for name, value in scalars.items():
        if value is not None and not isinstance(value, bool | int | float):
            raise EngineError(
                f"the optimizer's state {name} is a {type(value).__name__}, which a checkpoint cannot hold; "
                "make_optimizer's state is tensors and numbers"
            )
    cursor = {
        "step": step,
        "micro_batch": step * plan.schedule.train.micro_batches,
        "tensors": len(tensors),
        "scalars": scalars,  # a counter that is an int stays one
        "facts": dict(facts),
        "schedule": plan.schedule.to_toml(),
        "drift": drift,
    }
    return Contents(config=plan.drafter_config, tensors=tensors, cursor=cursor)


def write_checkpoint(folder: Path, whole: Contents, between: Callable[[], None] = lambda: None) -> None:
    """Fill an empty folder and read back what can be without reading all of it.

    Args:
        between: called between pieces of a few MB; what it raises leaves the folder torn.

    Raises:
        OSError: as the disk reports it.
        DiskError: the files read back are not those that were written.
    """
    masters = {
        name.removeprefix(MASTER): value for name, value in whole.tensors.items() if name.startswith(MASTER)
    }
    write_drafter(folder, whole.config, masters, between)
    (folder / STATE).parent.mkdir()
    write_tensors(folder / STATE, whole.tensors, between=between)
    _read_back(folder / STATE, whole.tensors)
    cursor = whole.cursor | {"files": {name: (folder / name).stat().st_size for name in FILES}}
    (folder / CURSOR).write_bytes(orjson.dumps(cursor, option=orjson.OPT_INDENT_2))
    try:
        read_checkpoint(folder)
    except CheckpointError as error:
        raise DiskError(f"a checkpoint was written and reads back torn: {error}") from error


def _read_back(path: Path, written: Mapping[str, Tensor]) -> None:
    try:
        header = {name: (entry.dtype, entry.shape) for name, entry in read_header(path).items()}
    except CheckpointError as error:
        raise DiskError(f"a checkpoint was written and reads back torn: {error}") from error
    if header != {name: entry_of(tensor) for name, tensor in written.items()}:
        raise DiskError(f"{path}: reads back other tensors than were written; look at the disk")


def read_checkpoint(folder: Path) -> Cursor:
    """The cursor of a checkpoint that is whole: every file there, as long as it was, with its header.

    Raises:
        CheckpointError: it is torn, or no checkpoint of a run; says why.
    """
    cursor = _read_cursor(folder)
    for name, size in cursor["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path}: holds {path.stat().st_size:,} bytes, and {size:,} were written")
    read_header(folder / WEIGHTS)
    there = len(read_header(folder / STATE))
    if there != cursor["tensors"]:
        raise CheckpointError(
            f"{folder / STATE}: holds {there} tensors, and {cursor['tensors']} were written"
        )
    return cursor


def _read_cursor(folder: Path) -> Cursor:
    path = folder / CURSOR
    try:
        cursor = orjson.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: holds no training state, so it cannot be resumed") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(cursor, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    wrong = [key for key, kind in CURSOR_KEYS.items() if not isinstance(cursor.get(key), kind)]
    if wrong:
        raise CheckpointError(f"{path}: lacks {', '.join(wrong)}")
    return cursor


def restore(folder: Path, cursor: Cursor, parts: TrainingParts, *, keep_optimizer: bool = True) -> None:
    """Restore masters, weights and, unless it is to begin anew, the optimizer's state.

    Raises:
        CheckpointError: the state cannot be read, or belongs to another drafter.
    """
    try:
        state: dict[str, Any] = load_file(folder / STATE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / STATE}: cannot be read: {error}") from error
    if not keep_optimizer:
        state = {name: value for name, value in state.items() if name.startswith(MASTER)}
    parts.load(state)
    if not keep_optimizer:
        return
    for part in parts.drafters:
        masters = part.masters
        for full_name, value in cursor["scalars"].items():
            key, _, name = full_name.partition(".")
            if masters.optimizer is not None and name in masters.weights:
                masters.optimizer.state[masters.weights[name]][key] = value
