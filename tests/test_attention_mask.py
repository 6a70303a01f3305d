"""The tile table against brute force, and every backend against every other."""

from typing import Any

import pytest
import torch
from blocks import recipe_of, row_of, run_blocks, shared_weights, small_config, small_drafter, taps_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.dflash.anchors import Anchors, anchors_at, draw_anchors
from engine.dflash.attention import flex_slots, prepare_attention
from engine.dflash.attention_mask import TILE, block_mask, dense_mask, visible_runs
from engine.dflash.configuration import FULL, SLIDING, DrafterConfig
from engine.dflash.packing import PackedRow
from engine.dflash.training import drafter_blocks
from engine.errors import InputError


def brute_force(row: PackedRow, anchors: Anchors, config: DrafterConfig, layer_type: str) -> Tensor:
    """The contract's rules pair by pair, written without runs: bool [N·B, T + N·B]."""
    size, count, length = config.block_size, anchors.count, row.length
    block = torch.arange(count * size) // size
    slot = torch.arange(count * size) % size
    used = anchors.document[block] >= 0
    q_position = anchors.position[block] + slot
    same_document = row.document[None] == anchors.document[block][:, None]
    context = same_document & (row.position[None] < anchors.position[block][:, None]) & used[:, None]
    own = block[:, None] == block[None]
    if layer_type == SLIDING:
        window = config.sliding_window
        context &= q_position[:, None] - row.position[None] < window
        own &= slot[:, None] - slot[None] < window
        if config.is_causal is not False:
            own &= slot[None] <= slot[:, None]
    return torch.cat([context, own], dim=1).view(count * size, length + count * size)


cases = st.fixed_dictionaries(
    {
        "documents": st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), min_size=1, max_size=5),
        "block_size": st.sampled_from([2, 5, 8, 10, 16]),
        "max_anchors": st.integers(1, 40),
        "window": st.sampled_from([1, 3, 20, 150]),
        "layer_type": st.sampled_from([FULL, SLIDING]),
        "bidirectional": st.booleans(),
        "epoch": st.integers(0, 3),
    }
)


def built(case: dict) -> tuple[PackedRow, Anchors, DrafterConfig]:
    row = row_of(*[(length, min(first, length)) for length, first in case["documents"]])
    config = small_config(
        block_size=case["block_size"],
        layer_types=(case["layer_type"],),
        sliding_window=case["window"],
        is_causal=False if case["bidirectional"] and case["layer_type"] == SLIDING else None,
    )
    return row, draw_anchors(row, seed=1, epoch=case["epoch"], max_anchors=case["max_anchors"]), config


@given(cases)
@settings(max_examples=60, deadline=None)
def test_dense_mask_equals_the_rules_pair_by_pair(case: dict) -> None:
    row, anchors, config = built(case)
    runs = visible_runs(anchors, row.starts, row.length, config, case["layer_type"])
    queries = anchors.count * config.block_size
    mask = dense_mask(runs, slice(0, queries), torch.arange(row.length + queries))
    assert torch.equal(mask, brute_force(row, anchors, config, case["layer_type"]))
    assert mask.any(1).all(), "a fully masked row"


@given(cases)
@settings(max_examples=60, deadline=None)
def test_tile_table_equals_brute_force(case: dict) -> None:
    check_table(*built(case), case["layer_type"])


@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
@pytest.mark.parametrize("window", [128, 129])
def test_anchors_on_the_borders_of_tiles_see_whole_tiles(layer_type: str, window: int) -> None:
    row = row_of((700, 600))
    config = small_config(block_size=16, layer_types=(layer_type,), sliding_window=window)
    for slots in ([127, 128, 129, 255, 256, 257, 384, 640], [*range(256, 264), *range(384, 392)]):
        check_table(row, anchors_at(row, torch.tensor(slots), 24), config, layer_type)


def check_table(row: PackedRow, anchors: Anchors, config: DrafterConfig, layer_type: str) -> None:
    mask = block_mask(visible_runs(anchors, row.starts, row.length, config, layer_type))
    pairs = brute_force(row, anchors, config, layer_type)
    padded = -(-pairs.shape[0] // TILE) * TILE
    whole = torch.zeros(padded, row.length + padded, dtype=torch.bool)
    whole[: pairs.shape[0], : pairs.shape[1]] = pairs
    tail = torch.arange(pairs.shape[0], padded)
    whole[tail, row.length + tail] = True  # rows past the last block see their own key
    tiles = whole.view(padded // TILE, TILE, -1, TILE)
    full, some = tiles.all(3).all(1), tiles.any(3).any(1)
    assert torch.equal(table(mask.full_kv_num_blocks, mask.full_kv_indices), full)
    assert torch.equal(table(mask.kv_num_blocks, mask.kv_indices), some & ~full)
    assert torch.equal(table(mask.q_num_blocks, mask.q_indices), (some & ~full).T)
    index = torch.arange(whole.shape[1])
    for query in range(0, padded, 37):
        seen = mask.mask_mod(None, None, torch.tensor(query), index)
        assert torch.equal(seen, whole[query])


def table(counts: Tensor, indices: Tensor) -> Tensor:
    out = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for tile, count in enumerate(counts[0, 0].tolist()):
        out[tile, indices[0, 0, tile, :count].long()] = True
    return out


@pytest.mark.parametrize("block_size", [4, 5])
@pytest.mark.parametrize("layer_types", [(FULL,), (SLIDING,), (SLIDING, FULL)])
def test_flex_and_dense_give_the_same_hidden_states(block_size: int, layer_types: tuple[str, ...]) -> None:
    config = small_config(block_size=block_size, layer_types=layer_types)
    row = row_of((90, 5), (40, 3))
    anchors = draw_anchors(row, seed=3, epoch=0, max_anchors=30)
    hidden = {}
    with torch.no_grad():
        for backend in ("dense", "flex"):
            drafter = small_drafter(config)
            hidden[backend], _ = drafter_blocks(
                drafter,
                shared_weights(),
                drafter.context(taps_of(row)),
                row,
                anchors,
                recipe_of(backend=backend),
            )
    used = anchors.used * block_size
    torch.testing.assert_close(hidden["flex"][:used], hidden["dense"][:used], atol=2e-5, rtol=2e-5)


def test_flex_takes_the_context_in_few_lengths_each_a_power_of_two() -> None:
    expected = {1: 128, 128: 128, 129: 256, 256: 256, 257: 512, 1024: 1024, 3072: 4096, 4097: 8192}
    assert {length: flex_slots(length) for length in expected} == expected
    found = {flex_slots(length) for length in range(1, 100_001)}
    assert found == {128 << doublings for doublings in range(11)}


@pytest.mark.parametrize("length", [129, 257, 300])
def test_keys_that_fill_the_context_up_to_a_power_of_two_are_seen_by_no_query(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    config = small_config(layer_types=(SLIDING, FULL), sliding_window=40)
    row = row_of((70, 3), (length - 71, 5))
    anchors = draw_anchors(row, seed=3, epoch=0, max_anchors=30)
    queries, slots = anchors.count * config.block_size, flex_slots(length)
    assert slots > length
    seen: list[tuple[tuple[int, ...], Tensor]] = []

    def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
        some = torch.zeros(k.shape[2], dtype=torch.bool)
        for query in range(q.shape[2]):
            some |= block_mask.mask_mod(None, None, torch.tensor(query), torch.arange(k.shape[2]))
        seen.append((tuple(k.shape), some[length:slots]))
        full = table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        partial = table(block_mask.kv_num_blocks, block_mask.kv_indices)
        assert not partial[:, -(-length // TILE) : slots // TILE].any(), "tiles of nothing else are skipped"
        assert not full[:, length // TILE : slots // TILE].any(), "compiled, a full tile asks no mask"
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)

    monkeypatch.setattr("engine.dflash.attention.flex_on", lambda device, queries, length: flex)
    generator = torch.Generator().manual_seed(0)

    def states(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, 16, generator=generator)

    given = (states(queries, 4), states(length, 2), states(length, 2), states(queries, 2), states(queries, 2))
    dense, padded = (
        prepare_attention(backend, anchors, row.starts, length, config, torch.device("cpu"))
        for backend in ("dense", "flex")
    )
    for kind in (SLIDING, FULL):
        used = anchors.used * config.block_size
        torch.testing.assert_close(padded(kind, *given)[:used], dense(kind, *given)[:used])
    for shape, some in seen:
        assert shape == (1, 2, slots + -(-queries // TILE) * TILE, 16)
        assert some.numel() == slots - length and not some.any()


def test_a_document_in_pieces_gives_the_same_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    row = row_of((200, 2))
    slots = list(range(5, 150))
    whole = run_blocks(config, row, taps_of(row), slots)
    monkeypatch.setattr("engine.dflash.attention.BLOCKS_PER_PIECE", 7)
    torch.testing.assert_close(run_blocks(config, row, taps_of(row), slots), whole)


def test_uncompiled_flex_is_refused_above_a_small_size() -> None:
    config = small_config(block_size=16)
    row = row_of((1000, 2))
    anchors = anchors_at(row, torch.arange(5, 400), 512)
    with pytest.raises(InputError, match=r"scores per head.*dense"):
        prepare_attention("flex", anchors, row.starts, row.length, config, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [8, 10, 16])
def test_compiled_flex_equals_dense_forward_and_backward(block_size: int) -> None:
    device = torch.device("cuda")
    config = small_config(block_size=block_size)
    row = row_of((900, 5), (40, 3), (500, 30))
    anchors = draw_anchors(row, seed=3, epoch=0, max_anchors=100)
    results = []
    for backend in ("dense", "flex"):
        drafter = small_drafter(config).to(device)
        shared = shared_weights().to(device, torch.float32)
        context = drafter.context(taps_of(row).to(device))
        hidden, _ = drafter_blocks(drafter, shared, context, row, anchors, recipe_of(backend=backend))
        used = hidden[: anchors.used * block_size]
        (used * torch.linspace(-1, 1, used.numel(), device=device).view_as(used)).sum().backward()
        results.append((used, drafter.fc.weight.grad, drafter.layers[0].self_attn.k_proj.weight.grad))
    for dense, flex in zip(*results, strict=True):
        assert (dense - flex).abs().max() < 1e-3 * dense.abs().max()


def test_a_long_document_s_dense_masks_are_made_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(layer_types=(FULL, SLIDING), sliding_window=20)
    row = row_of((700, 2))
    slots = list(range(5, 695, 7))  # four pieces of up to 32 blocks
    kept = run_blocks(config, row, taps_of(row), slots)
    sizes: list[int] = []

    def counted(*arguments: Any) -> Tensor:
        mask = dense_mask(*arguments)
        sizes.append(mask.numel())
        return mask

    monkeypatch.setattr("engine.dflash.attention.dense_mask", counted)
    monkeypatch.setattr("engine.dflash.attention.MASKS_KEPT", 1000)
    anchors = anchors_at(row, torch.tensor(slots), len(slots))
    prepare_attention("dense", anchors, row.starts, row.length, config, torch.device("cpu"))
    assert not sizes  # nothing is made before a layer asks
    torch.testing.assert_close(run_blocks(config, row, taps_of(row), slots), kept, atol=2e-6, rtol=2e-6)
    assert len(sizes) == 4 * 2 and max(sizes) <= 32 * config.block_size * (700 + 32 * config.block_size)
    assert sum(sizes[4:]) < sum(sizes[:4])  # the sliding layer looks at its windows alone
