"""The lines of the DFlash contract that servers rely on, perturbation tests first.

Each perturbation test also perturbs something that must matter, so that a drafter which ignores
its context would fail it.
"""

import pytest
import torch
from blocks import VOCAB, recipe_of, row_of, run_blocks, shared_weights, small_config, small_drafter, taps_of

from engine.dflash.anchors import anchors_at, blocks_at, draw_anchors, valid_anchor_slots
from engine.dflash.attention import prepare_attention
from engine.dflash.configuration import FULL, SLIDING, DrafterConfig
from engine.dflash.drafter import rotary
from engine.dflash.packing import pack_row, pack_taps
from engine.dflash.training import drafter_blocks, drafter_loss, training_loss

LAYOUTS = [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)]


@pytest.fixture(params=LAYOUTS, ids=["full", "sliding", "mixed"])
def config(request: pytest.FixtureRequest) -> DrafterConfig:
    return small_config(layer_types=request.param)


def perturbed(taps: torch.Tensor, *slots: int) -> torch.Tensor:
    out = taps.clone()
    out[list(slots)] += 1.0
    return out


def test_perturbing_the_anchors_own_state_leaves_its_block_unchanged(config: DrafterConfig) -> None:
    row = row_of((20, 5))
    taps = taps_of(row)
    reference = run_blocks(config, row, taps, [9])
    assert torch.equal(run_blocks(config, row, perturbed(taps, 9), [9]), reference)
    assert not torch.equal(run_blocks(config, row, perturbed(taps, 8), [9]), reference)


def test_perturbing_later_context_leaves_a_block_unchanged(config: DrafterConfig) -> None:
    row = row_of((20, 5))
    taps = taps_of(row)
    reference = run_blocks(config, row, taps, [9, 15])
    changed = run_blocks(config, row, perturbed(taps, *range(10, 20)), [9, 15])
    assert torch.equal(changed[0], reference[0])
    assert not torch.equal(changed[1], reference[1])


def test_perturbing_another_document_leaves_a_block_unchanged(config: DrafterConfig) -> None:
    row = row_of((12, 4), (11, 3), (9, 2))
    taps = taps_of(row)
    slots = [6, 12 + 7, 23 + 5]
    reference = run_blocks(config, row, taps, slots)
    changed = run_blocks(config, row, perturbed(taps, *range(12, 23)), slots)
    assert torch.equal(changed[[0, 2]], reference[[0, 2]])
    assert not torch.equal(changed[1], reference[1])


def test_another_document_leaves_a_documents_loss_unchanged() -> None:
    config = small_config()
    drafter, shared = small_drafter(config), shared_weights()
    losses = []
    for seed in (2, 5):  # other tokens, other states in document A
        row = row_of((14, 4), (11, 3))
        other = row_of((14, 4), (11, 3), seed=seed)
        ids = torch.where(row.document == 0, other.input_ids, row.input_ids)
        row = type(row)(
            ids, row.loss_mask, row.document, row.position, row.document_ids, row.starts, row.source
        )
        taps = torch.where((row.document == 0)[:, None], taps_of(row, seed=seed), taps_of(row))
        anchors = anchors_at(row, torch.tensor([14 + 3, 14 + 6]), 2)
        loss = drafter_loss(drafter, shared, drafter.context(taps), row, anchors, recipe_of())
        losses.append(loss.loss_sum)
    assert torch.equal(losses[0], losses[1])


def test_another_block_leaves_a_block_unchanged(config: DrafterConfig) -> None:
    row = row_of((24, 5))
    taps = taps_of(row)
    anchors = anchors_at(row, torch.tensor([8, 11]), 2)
    attention = prepare_attention("dense", anchors, row.starts, row.length, config, taps.device)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(2 * config.block_size, heads, config.head_dim, generator=generator)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    )
    context = torch.randn(row.length, config.kv_heads, config.head_dim, generator=generator)
    for kind in set(config.layer_types):
        reference = attention(kind, q, context, context, k, v).view(2, config.block_size, -1)
        k2, v2 = k.clone(), v.clone()
        k2[config.block_size :] += 1.0
        v2[config.block_size :] += 1.0
        changed = attention(kind, q, context, context, k2, v2).view(2, config.block_size, -1)
        assert torch.equal(changed[0], reference[0])
        assert not torch.equal(changed[1], reference[1])


@pytest.mark.parametrize("layer_type, is_causal", [(FULL, None), (SLIDING, None), (SLIDING, False)])
def test_a_sliding_layer_is_causal_in_its_block_and_a_full_layer_is_not(
    layer_type: str, is_causal: bool | None
) -> None:
    config = small_config(layer_types=(layer_type,), is_causal=is_causal)
    row = row_of((24, 5))
    anchors = anchors_at(row, torch.tensor([12]), 1)
    drafter, shared = small_drafter(config), shared_weights()
    context = drafter.context(taps_of(row))
    reference, _ = drafter_blocks(drafter, shared, context, row, anchors, recipe_of())
    # Another embedding of the mask token reaches slot 0 only where the block is bidirectional.
    shared.embed_tokens[config.mask_token_id] += 1.0
    changed, _ = drafter_blocks(drafter, shared, context, row, anchors, recipe_of())
    causal = layer_type == SLIDING and is_causal is None
    assert torch.equal(changed[0], reference[0]) == causal


def test_the_windows_edge_is_counted_from_each_query() -> None:
    window, anchor = 6, 15
    config = small_config(layer_types=(SLIDING,), sliding_window=window)
    row = row_of((24, 5))
    taps = taps_of(row)
    reference = run_blocks(config, row, taps, [anchor])[0]
    for slot in range(config.block_size):
        edge = anchor + slot - window  # the first key that slot no longer sees
        assert torch.equal(run_blocks(config, row, perturbed(taps, edge), [anchor])[0, slot], reference[slot])
        changed = run_blocks(config, row, perturbed(taps, edge + 1), [anchor])[0, slot]
        assert not torch.equal(changed, reference[slot])


def test_positions_are_absolute_within_the_document() -> None:
    config = small_config(layer_types=(FULL,))
    alone, second = row_of((20, 5)), row_of((13, 4), (20, 5))
    taps = taps_of(alone)
    ids = second.input_ids.clone()
    ids[13:33] = alone.input_ids[:20]
    moved = type(second)(
        ids,
        second.loss_mask,
        second.document,
        second.position,
        second.document_ids,
        second.starts,
        second.source,
    )
    moved_taps = taps_of(moved)
    moved_taps[13:33] = taps[:20]
    torch.testing.assert_close(
        run_blocks(config, moved, moved_taps, [13 + 9]), run_blocks(config, alone, taps, [9])
    )


def test_rotary_frequencies_stay_float32_in_a_bfloat16_module() -> None:
    config = small_config(rope_theta=1e7)
    drafter = small_drafter(config).to(torch.bfloat16)
    assert not list(drafter.buffers())
    cos, _ = rotary(torch.tensor([3000]), config)
    exact = torch.cos(3000 * 1e7 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16))
    torch.testing.assert_close(cos[0, 0, :8].double(), exact, atol=2e-4, rtol=0)


def test_slot_zero_holds_the_real_token_and_the_others_the_mask() -> None:
    row = row_of((20, 5))
    blocks = blocks_at(row, anchors_at(row, torch.tensor([9]), 1), block_size=4, mask_token_id=60)
    assert blocks.input_ids.tolist() == [[int(row.input_ids[9]), 60, 60, 60]]
    assert blocks.positions.tolist() == [[9, 10, 11, 12]]
    assert blocks.labels.tolist() == [row.input_ids[10:13].tolist()]


def test_the_last_prompt_token_is_an_anchor_and_learns_the_first_answer_token() -> None:
    row = row_of((12, 7))
    assert valid_anchor_slots(row)[0] == 6
    blocks = blocks_at(row, anchors_at(row, torch.tensor([6]), 1), block_size=4, mask_token_id=60)
    assert blocks.supervised.tolist() == [[True, True, True]]


def test_the_last_token_of_a_document_is_no_anchor_and_labels_past_it_weigh_nothing() -> None:
    row = row_of((12, 7), (10, 3))
    slots = valid_anchor_slots(row).tolist()
    assert 11 not in slots and 10 in slots and 12 + 9 not in slots
    blocks = blocks_at(row, anchors_at(row, torch.tensor([10, 21 - 1]), 2), block_size=4, mask_token_id=60)
    assert blocks.supervised.tolist() == [[True, False, False], [True, False, False]]
    assert blocks.labels[:, 1:].eq(0).all()


def test_gaps_in_the_loss_mask_are_seen_and_not_learnt() -> None:
    row = row_of((12, 4))
    row.loss_mask[7] = False
    blocks = blocks_at(row, anchors_at(row, torch.tensor([5]), 1), block_size=4, mask_token_id=60)
    assert blocks.supervised.tolist() == [[True, False, True]]
    assert 6 not in valid_anchor_slots(row).tolist()


@pytest.mark.parametrize(
    "documents",
    [
        [(3, 1)],  # shorter than a block
        [(9, 8)],  # an answer of one token
        [(7, 7)],  # nothing supervised
        [(1, 0)],  # one token
        [(700, 2)],  # one giant
        [(3, 1), (9, 8), (7, 7), (29, 4)],
    ],
    ids=["shorter-than-a-block", "one-token-answer", "no-anchor", "one-token", "giant", "together"],
)
@pytest.mark.parametrize("block_size", [4, 5, 7])
def test_odd_documents_train_or_are_skipped_with_a_finite_loss(
    documents: list[tuple[int, int]], block_size: int
) -> None:
    config = small_config(block_size=block_size)
    row = row_of(*documents)
    drafter = small_drafter(config)
    loss, anchors = training_loss(
        drafter, shared_weights(), (taps_of(row),), row, epoch=0, recipe=recipe_of(max_anchors=12)
    )
    loss.loss_sum.backward()
    assert torch.isfinite(loss.loss_sum)
    assert all(torch.isfinite(parameter.grad).all() for parameter in drafter.parameters())
    supervised = sum(max(length - max(first, 1), 0) for length, first in documents)
    assert anchors.used == min(supervised, 12)
    assert (loss.weight_sum > 0) == (supervised > 0)
    if not supervised:
        assert all(not parameter.grad.any() for parameter in drafter.parameters())


def test_unused_slots_change_nothing(config: DrafterConfig) -> None:
    row = row_of((20, 5), (9, 2))
    taps = taps_of(row)
    exact = run_blocks(config, row, taps, [9, 22])
    padded = run_blocks(config, row, taps, [9, 22], count=50)
    torch.testing.assert_close(padded[:2], exact)
    assert torch.isfinite(padded).all()


def test_every_draw_is_a_function_of_seed_epoch_and_document() -> None:
    alone = draw_anchors(row_of((40, 5)), seed=7, epoch=3, max_anchors=4)
    again = draw_anchors(row_of((40, 5)), seed=7, epoch=3, max_anchors=4)
    assert alone.position.tolist() == again.position.tolist() == sorted(alone.position.tolist())
    other_epoch = draw_anchors(row_of((40, 5)), seed=7, epoch=4, max_anchors=4)
    other_seed = draw_anchors(row_of((40, 5)), seed=8, epoch=3, max_anchors=4)
    assert alone.position.tolist() != other_epoch.position.tolist()
    assert alone.position.tolist() != other_seed.position.tolist()


def test_a_neighbour_changes_a_documents_anchors_only_through_the_share() -> None:
    first = draw_anchors(row_of((40, 5)), seed=7, epoch=0, max_anchors=4)
    both = draw_anchors(row_of((40, 5), (30, 4)), seed=7, epoch=0, max_anchors=8)
    assert both.position[both.document == 0].tolist() == first.position.tolist()
    assert (both.document == 1).sum() == 4


def test_padding_never_reaches_the_packed_row() -> None:
    ids = torch.arange(1, 13).view(3, 4)
    lengths = torch.tensor([4, 1, 3])
    row = pack_row(ids, torch.ones(3, 4), lengths, torch.tensor([5, 6, 7]))
    assert row.length == 1024 and row.tokens == 8
    assert row.input_ids[:8].tolist() == [1, 2, 3, 4, 5, 9, 10, 11]
    assert row.document[:9].tolist() == [0, 0, 0, 0, 1, 2, 2, 2, -1]
    assert row.position[:8].tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert row.starts.tolist() == [0, 4, 5]
    taps = [torch.randn(3, 4, 5), torch.randn(3, 4, 5)]
    packed = pack_taps(taps, row)
    assert packed.shape == (1024, 10) and not packed[8:].any()
    assert torch.equal(packed[4], torch.cat([taps[0][1, 0], taps[1][1, 0]]))


def test_mask_token_is_never_a_label_or_context(config: DrafterConfig) -> None:
    row = row_of((20, 5))
    blocks = blocks_at(row, draw_anchors(row, seed=1, epoch=0, max_anchors=8), block_size=4, mask_token_id=60)
    assert (blocks.labels != VOCAB - 1).all() and (blocks.input_ids[:, 1:] == 60).all()
