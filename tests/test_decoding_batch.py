"""How many prompts are decoded together follows from what a text weighs and what is free."""

from pathlib import Path

import pytest
import torch
from decoding_targets import drafter_for, tiny_target

from engine.decoding_batch import TOGETHER_ON_CPU, row_weight, rows_together, rows_with_room
from engine.dflash.drafter_cache import ContextCache
from engine.target.cached_forward import prefill


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_row_s_weight_is_what_target_and_drafter_keep_of_its_text(tmp_path: Path, kind: str) -> None:
    target = tiny_target(tmp_path, kind)
    drafter = drafter_for(target)
    text = [3 + place % 30 for place in range(48)]
    rows, _, _ = prefill(target, [text])
    kept = [kept for layer in rows.layers for kept in (layer.keys, layer.values) if kept is not None]
    kept += [state for layer in rows.layers for states in layer.states.values() for state in states.values()]
    cache = ContextCache(drafter, 1)
    taps = torch.zeros(48, len(target.target_layer_ids) * target.summary.hidden_size)
    cache.extend([taps])
    drafted = sum(keys[:, :, :48].nbytes for keys in (*cache.keys, *cache.values)) + taps.nbytes
    assert row_weight(target, text[:5], 48) == sum(state.nbytes for state in kept)
    both = row_weight(target, text[:5], 48, (drafter.config, 4))
    assert both == row_weight(target, text[:5], 48) + drafted
    assert rows_together(target, text, 48) == TOGETHER_ON_CPU


def test_rows_are_a_power_of_two_that_fits_and_one_where_none_does() -> None:
    weight = 10**9
    assert [rows_with_room(free * 10**9, weight) for free in (0, 7, 8, 15, 16, 100, 10**6)] == [
        1,
        1,
        1,
        1,
        2,
        8,
        256,
    ]
