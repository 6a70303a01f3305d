"""What a schedule may say about this target and these documents.

The classes in `schedule.py` judge a schedule by itself. Here it meets what it names: the target's
configuration, a drafter to go on from, and the manifest of the documents. Only small files are
read and torch is not needed, so a person learns of a mask id that is the EOS token before 54 GB
of weights are loaded. All problems of one check are listed together.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from engine.errors import CheckpointError, ScheduleError
from engine.schedule import Drafter, Schedule
from engine.toml_text import shown
from engine.warm_start import read_earlier


class TargetFacts(Protocol):
    """What the checks need to know of a target; `TargetSummary` has it."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...


def check_against_target(schedule: Schedule, summary: TargetFacts) -> Schedule:
    """Check taps, mask id and an earlier drafter against the target.

    Returns:
        The schedule with `drafter.target_layer_ids` filled in where it was left out.

    Raises:
        ScheduleError: everything that does not fit, one problem a line.
        TargetError: the target is too shallow for the default taps.
    """
    from engine.target.taps import check_target_layer_ids, default_target_layer_ids

    drafter = schedule.drafter
    problems = list(_mask_problems(drafter.mask_token_id, summary))
    if drafter.target_layer_ids is None:
        ids = tuple(default_target_layer_ids(summary.layers, drafter.layers))
        drafter = attrs.evolve(drafter, target_layer_ids=ids)
    else:
        try:
            check_target_layer_ids(drafter.target_layer_ids, summary.layers)
        except ScheduleError as error:
            problems.append(str(error))
    if drafter.init != "fresh":
        problems += _earlier_drafter_problems(drafter, summary)
    if problems:
        raise ScheduleError("\n".join(problems))
    return attrs.evolve(schedule, drafter=drafter)


def _mask_problems(mask_token_id: int, summary: TargetFacts) -> Iterator[str]:
    key = f"drafter.mask_token_id = {mask_token_id}"
    advice = "choose an id that never stands in text"
    if mask_token_id >= summary.vocab_size:
        yield (
            f"{key}: the target's vocabulary has {summary.vocab_size} ids, 0…{summary.vocab_size - 1}; "
            f"{advice}"
        )
    if mask_token_id == summary.pad_token_id:
        yield f"{key}: is the target's pad token; {advice}"
    if mask_token_id in summary.eos_token_ids:
        yield f"{key}: is an EOS token of the target; {advice}"


LEFT_OUT_ELSEWHERE = ("num_target_layers",)
"""What other layouts than ours do not state, and no tensor depends on."""


def _earlier_drafter_problems(drafter: Drafter, summary: TargetFacts) -> Iterator[str]:
    key = f"drafter.init = {shown(drafter.init)}"
    try:
        config = read_earlier(Path(drafter.init)).config
    except CheckpointError as error:
        yield f"{key}: {error}"
        return
    for name, wanted, wanted_by in _expected_config(drafter, summary):
        table, _, inner = name.rpartition(".")
        found = (config[table] if table else config).get(inner)
        if found is None and name in LEFT_OUT_ELSEWHERE:
            continue
        if found != wanted:
            yield (
                f"{key}: its config.json says {name} = {_found(found)}, and {wanted_by} {shown(wanted)}; "
                'use a drafter that fits, or init = "fresh"'
            )


def _found(value: Any) -> str:
    return "nothing" if value is None else shown(value)


def _expected_config(drafter: Drafter, summary: TargetFacts) -> Iterator[tuple[str, Any, str]]:
    """(name in the exported configuration, value that fits, who says so)."""
    yield "hidden_size", summary.hidden_size, "the target has"
    yield "vocab_size", summary.vocab_size, "the target has"
    yield "num_target_layers", summary.layers, "the target has"
    yield "num_hidden_layers", drafter.layers, "drafter.layers is"
    yield "num_attention_heads", drafter.heads, "drafter.heads is"
    yield "num_key_value_heads", drafter.kv_heads, "drafter.kv_heads is"
    yield "head_dim", drafter.head_dim, "drafter.head_dim is"
    yield "intermediate_size", drafter.intermediate_size, "drafter.intermediate_size is"
    yield "block_size", drafter.block_size, "drafter.block_size is"
    layer_types = list(drafter.layer_types or ("full_attention",) * drafter.layers)
    yield "layer_types", layer_types, "drafter.layer_types is"
    if drafter.sliding_window is not None:
        yield "sliding_window", drafter.sliding_window, "drafter.sliding_window is"
    yield "dflash_config.mask_token_id", drafter.mask_token_id, "drafter.mask_token_id is"
    if drafter.target_layer_ids is not None:
        ids = list(drafter.target_layer_ids)
        yield "dflash_config.target_layer_ids", ids, "drafter.target_layer_ids is"


def check_against_manifest(
    schedule: Schedule,
    ids_seen: Collection[int],
    *,
    vocab_size: int,
    manifest_vocab_size: int | None = None,
    tokenizer: str | None = None,
    manifest_tokenizer: str | None = None,
    key: str = "data.path",
) -> None:
    """Check the mask id and the target's vocabulary against what the documents are known to hold.

    Args:
        ids_seen: every token id that occurs in the documents.
        vocab_size: the target's.
        manifest_vocab_size: of the tokenizer that prepared the documents, where it is known.
        tokenizer, manifest_tokenizer: fingerprints of the target's tokenizer and of the one that
            prepared the documents, where both are known.
        key: which documents: `data.path` or `data.held_out`.

    Raises:
        ScheduleError: everything that does not fit, one problem a line.
    """
    where = f"{key} = {shown(getattr(schedule.data, key.removeprefix('data.')))}"
    advice = "prepare the documents with this target's tokenizer"
    problems = []
    mask_token_id = schedule.drafter.mask_token_id
    if mask_token_id in ids_seen:
        problems.append(
            f"drafter.mask_token_id = {mask_token_id}: occurs in the documents of {where}, where it would "
            "mean a slot to be filled; choose an id that never stands in text"
        )
    largest = max(ids_seen, default=-1)
    if largest >= vocab_size:
        problems.append(
            f"{where}: holds token {largest}, and the target's vocabulary ends at {vocab_size - 1}; {advice}"
        )
    if manifest_vocab_size is not None and manifest_vocab_size > vocab_size:
        problems.append(
            f"{where}: prepared for a vocabulary of {manifest_vocab_size} ids, and the target has "
            f"{vocab_size}; {advice}"
        )
    if tokenizer is not None and manifest_tokenizer is not None and tokenizer != manifest_tokenizer:
        problems.append(
            f"{where}: prepared with tokenizer {manifest_tokenizer}, and the target's is {tokenizer}; "
            f"{advice}"
        )
    if problems:
        raise ScheduleError("\n".join(problems))
