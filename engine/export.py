"""`python -m engine export`: a checkpoint as a folder that servers load, and the proof that they can.

The folder is written beside its place. Before it gets its name it is read back from the disk by a second
implementation, which knows nothing but the two files, and that one has to compute what training computes
(`engine/export_comparison.py`): a wrong weight, window, rotary base or causality does not get past that.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.builtin import resolve
from engine.checkpoint import MASTER, STATE
from engine.dflash.configuration import DrafterConfig
from engine.dflash.export import (
    CONFIG,
    WEIGHTS,
    read_drafter_config,
    read_drafter_weights,
    write_drafter,
)
from engine.errors import CheckpointError, InputError, NonFinite
from engine.export_card import render_card
from engine.export_comparison import compare_with_training
from engine.export_speculators import Verifier, write_speculators
from engine.run_folder import CHECKPOINTS, resolve_checkpoint
from engine.schedule import Schedule
from engine.served_pair import trained_by
from engine.target.configuration import read_json, read_target_config, text_section
from engine.whole_files import write_whole

CARD = "README.md"
OURS = frozenset({CONFIG, WEIGHTS, CARD})

Format = Literal["dflash", "speculators"]


@attrs.frozen(kw_only=True)
class TargetFacts:
    """What an export needs to know of a target."""

    folder: Path
    architectures: tuple[str, ...]
    hybrid: bool
    """Whether it has recurrent layers."""


def export(
    source: Path,
    folder: Path,
    *,
    layout: Format = "dflash",
    target: str | None = None,
    target_name: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the drafter of a checkpoint, or of a run's latest, as a folder for servers.

    Args:
        folder: where to; made. One that is there is replaced with `overwrite`, if an export wrote it.
        target: its folder, where the schedule's does not exist any more.
        target_name: what card and configuration call it, such as its Hub name; else the path.

    Raises:
        CheckpointError: the checkpoint cannot be used, or the drafter cannot be served as it was trained.
        DifferenceFound: the folder, read back, computes something else; nothing is left of it.
        NonFinite: a weight, as it would be stored, is not finite.
        InputError: `folder` is no place for it.
        DiskError: the disk will not.
    """
    checkpoint, folder = resolve_checkpoint(source), folder.resolve()
    config = read_drafter_config(checkpoint)
    schedule, _ = trained_by(checkpoint)
    if schedule is not None:
        _check_recipe(checkpoint, config, schedule)
    named = target or (schedule.target.path if schedule else None)
    facts = _target_facts(checkpoint, config, named)
    if facts is None and layout == "speculators":
        raise InputError(
            f"--format speculators: names the target, whose config.json is not at {named}; "
            "give its folder with --target"
        )
    _check_place(folder, checkpoint, overwrite)
    weights = _trained_weights(checkpoint, config)
    _check_finite(checkpoint, config, weights)
    card = render_card(
        config,
        target=target_name or named or "its target",
        layout=layout,
        hybrid=facts is not None and facts.hybrid,
        schedule=schedule,
        figures=_newest_evaluation(checkpoint),
    )

    def write(partial: Path) -> None:
        if layout == "speculators" and facts is not None:
            name = target_name or str(facts.folder)
            verifier = Verifier(name_or_path=name, architectures=facts.architectures)
            write_speculators(partial, config, weights, verifier)
        else:
            write_drafter(partial, config, weights)
        (partial / CARD).write_text(card, encoding="utf-8")
        compared = compare_with_training(partial, config, weights)
        say(f"read back: {compared} blocks by a second implementation, every logit the same, bit for bit")

    write_whole(folder, write)
    say(f"exported {checkpoint} to {folder}: {len(weights)} tensors in {config.dtype}, {layout} layout")
    if target_name is None:
        say(
            f"no --target-name: the card calls the target {named or 'its target'}, which servers may not know"
        )
    return folder


def _trained_weights(checkpoint: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """A checkpoint's weights as they are served, which have to be those that training kept, rounded."""
    weights = read_drafter_weights(checkpoint, config)
    path = checkpoint / STATE
    if not path.is_file():
        return weights
    try:
        with safe_open(path, framework="pt") as file:
            for name, weight in weights.items():
                trained = file.get_tensor(f"{MASTER}{name}").to(weight.dtype)
                if not torch.equal(trained.nan_to_num(), weight.nan_to_num()):
                    raise CheckpointError(
                        f"{checkpoint}: {name} in {WEIGHTS} is not what training kept in {path.name}, "
                        "so one of them was changed since; export an earlier checkpoint"
                    )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return weights


def _check_recipe(checkpoint: Path, config: DrafterConfig, schedule: Schedule) -> None:
    """Refuse a configuration that is not the one the checkpoint's own schedule trained."""
    drafter = schedule.drafter
    for name, said, trained in (
        ("mask_token_id", config.mask_token_id, drafter.mask_token_id),
        ("block_size", config.block_size, drafter.block_size),
        ("sliding_window", config.sliding_window, drafter.sliding_window),
        ("target_layer_ids", config.target_layer_ids, drafter.target_layer_ids or config.target_layer_ids),
    ):
        if said != trained:
            raise CheckpointError(
                f"{checkpoint / CONFIG}: {name} is {said}, and the checkpoint's schedule trained with "
                f"{trained}; the file was changed since: export an earlier checkpoint"
            )


def _check_finite(checkpoint: Path, config: DrafterConfig, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not finite in the dtype that they are going to be stored in."""
    dtype = getattr(torch, config.dtype)
    bad = [name for name, weight in weights.items() if not bool(weight.to(dtype).isfinite().all())]
    if bad:
        which = f"{bad[0]} and {len(bad) - 1} more tensors are" if bad[1:] else f"{bad[0]} is"
        raise NonFinite(
            f"{checkpoint}: {which} not finite in {config.dtype} (NaN or infinite values); "
            "export an earlier checkpoint"
        )


def _target_facts(checkpoint: Path, config: DrafterConfig, named: str | None) -> TargetFacts | None:
    """The target's own account of itself, compared with the drafter's; None where it is not there."""
    folder = resolve(named) if named else None
    if folder is None or not (folder / CONFIG).is_file():
        return None
    summary = read_target_config(folder)
    wanted = {
        "hidden_size": summary.hidden_size,
        "vocab_size": summary.vocab_size,
        "num_target_layers": summary.layers,
        "max_position_embeddings": summary.max_position_embeddings,
    }
    wrong = [
        f"{name} {getattr(config, name)}, not {value}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint}: is no drafter for {folder}: it has {'; '.join(wrong)}; "
            "give its own target with --target"
        )
    whole = read_json(folder / CONFIG)
    text = text_section(whole)
    return TargetFacts(
        folder=folder,
        architectures=tuple(whole.get("architectures") or ()),
        hybrid="linear_attention" in (text.get("layer_types") or ()) or "linear_num_key_heads" in text,
    )


def _check_place(folder: Path, checkpoint: Path, overwrite: bool) -> None:
    """Refuse to write over what no export wrote, or where checkpoints are kept."""
    checkpoint = checkpoint.resolve()
    if folder == checkpoint:
        raise InputError(f"{folder}: is the checkpoint itself; choose another folder")
    if checkpoint in folder.parents:
        raise InputError(f"{folder}: lies inside the checkpoint {checkpoint}; choose a folder outside it")
    if folder.exists() and folder.samefile(Path()):
        raise InputError(
            f"{folder}: is the current folder, and an export replaces a folder as a whole, under the shell "
            "that stands in it; name one inside it, such as ./drafter"
        )
    for kept in (folder, *folder.parents):
        of_a_run = kept == checkpoint.parent or (kept.parent / "schedule.toml").is_file()
        if kept.name == CHECKPOINTS and of_a_run:
            raise InputError(f"{folder}: lies where a run keeps its checkpoints; choose a folder outside")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file; choose a folder")
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in OURS)
    if foreign:
        raise InputError(f"{folder}: holds {foreign[0]}, which no export wrote; choose another folder")
    if not overwrite:
        raise InputError(f"{folder}: holds an exported drafter; --overwrite replaces it")


def _newest_evaluation(checkpoint: Path) -> dict[str, Any]:
    """The last row with an accepted length until this checkpoint, of the run that it lies in.

    A run that was killed, or still goes on, may have left its last line unfinished; that one is no row yet.

    Raises:
        CheckpointError: another line is damaged; names file and line.
    """
    step = checkpoint.resolve().name.removeprefix("step_")
    path = checkpoint.resolve().parent.parent / "metrics.jsonl"
    if not step.isdecimal() or not path.is_file():
        return {}
    newest: dict[str, Any] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
            if int(row["step"]) <= int(step) and row.get("accepted_length") is not None:
                newest = row
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            raise CheckpointError(
                f"{path}: line {number} is no row with a step; mend or remove it, and export again"
            ) from None
    return newest
