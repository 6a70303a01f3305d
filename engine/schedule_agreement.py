"""Keys of a schedule that are right each by itself and wrong together.

Everything that is wrong is listed, one problem a line that names the key, what was found and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.schedule_stages import stage_problems
from engine.toml_text import shown

if TYPE_CHECKING:
    from engine.schedule import Drafter, Schedule

GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
"""The decay constants that were tuned; for any other block size there is no default."""


def disagreements(schedule: Schedule) -> Iterator[str]:
    """What does not go together in a schedule whose keys have been read."""
    run, data, train = schedule.run, schedule.data, schedule.train
    if run.epochs is None and run.steps is None:
        yield "run.epochs: missing, and so is run.steps; give one of the two"
    if run.epochs is not None and run.steps is not None:
        yield f"run.steps = {run.steps}: run.epochs = {run.epochs} is given too; keep one of the two"
    yield from _drafter_disagreements(schedule.drafter)
    row = math.ceil(data.max_length / data.length_bucket) * data.length_bucket
    if row > data.token_budget:
        yield (
            f"data.max_length = {data.max_length}: a row is padded to {row} tokens, a multiple of "
            f"data.length_bucket = {data.length_bucket}, and data.token_budget = {data.token_budget} "
            "does not hold one; raise the budget or lower the length"
        )
    yield from stage_problems(schedule.stage)
    if schedule.layout is not None and schedule.devices != "auto":
        yield (
            f'layout = {shown(schedule.layout)}: shares out what devices = "auto" finds, and [devices] '
            "lists its lanes itself; keep one of the two"
        )
    if train.gradient_dtype == "bfloat16" and schedule.drafter.dtype == "float32":
        yield (
            'train.gradient_dtype = "bfloat16": drafter.dtype = "float32", whose gradients are float32; '
            'set drafter.dtype = "bfloat16" too, or leave the key out'
        )
    if train.min_lr > train.lr:
        yield f"train.min_lr = {train.min_lr}: larger than train.lr = {train.lr}; lower it"
    if train.objective == "decay" and train.gamma is None:
        block_size = schedule.drafter.block_size
        if block_size not in GAMMA_BY_BLOCK_SIZE:
            yield (
                f"train.gamma: missing; drafter.block_size = {block_size} has no default (known are "
                f"{', '.join(map(str, GAMMA_BY_BLOCK_SIZE))}), so the schedule must give it"
            )


def _drafter_disagreements(drafter: Drafter) -> Iterator[str]:
    if drafter.heads % drafter.kv_heads:
        yield (
            f"drafter.kv_heads = {drafter.kv_heads}: drafter.heads = {drafter.heads} is not a multiple "
            "of it; each key head serves the same number of query heads"
        )
    types = drafter.layer_types or ("full_attention",) * drafter.layers
    if len(types) != drafter.layers:
        yield (
            f"drafter.layer_types = {shown(types)}: names {len(types)} layers, and "
            f"drafter.layers = {drafter.layers}; give one type per layer"
        )
    sliding = "sliding_attention" in types
    if sliding and drafter.sliding_window is None:
        yield "drafter.sliding_window: missing; a layer of drafter.layer_types is sliding_attention"
    if not sliding and drafter.sliding_window is not None:
        yield (
            f"drafter.sliding_window = {drafter.sliding_window}: no layer is sliding_attention; "
            "name some in drafter.layer_types or leave the window out"
        )
    if sliding and "full_attention" in types and drafter.is_causal is not None:
        yield (
            f"drafter.is_causal = {shown(drafter.is_causal)}: servers read no such key for a mix of "
            "sliding and full layers (causal and bidirectional there); leave it out"
        )
    ids = drafter.target_layer_ids
    if ids is not None and (not ids or any(b <= a for a, b in zip(ids, ids[1:], strict=False))):
        yield (
            f"drafter.target_layer_ids = {shown(ids)}: expected distinct layers in increasing order; "
            "leave the key out for an even spread"
        )
