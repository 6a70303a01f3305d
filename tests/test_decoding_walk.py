"""Accepted length, on documents whose right slots are written down."""

import math

import pytest
import torch
from blocks import recipe_of, row_of, shared_weights, small_config, small_drafter, taps_of

from engine.dflash.decoding import answer_spans, evaluate, walk
from engine.dflash.packing import pack_row


def test_walk_advances_by_the_right_slots_and_the_targets_own_token() -> None:
    leading = {4: 2, 7: 0, 8: 3}
    assert walk(leading, 4, 12) == [3, 1, 4]


def test_walk_commits_nothing_past_the_answers_end() -> None:
    assert walk({4: 7}, 4, 9) == [5]
    assert walk({4: 3, 8: 1}, 4, 9) == [4, 1]


def test_an_answer_of_one_token_needs_no_verification() -> None:
    assert walk({}, 4, 4) == []


def test_a_mean_over_all_anchors_is_another_number() -> None:
    # Seven easy tokens, then seven hard ones: the walk crosses the easy ones in one stride.
    leading = {slot: 7 - slot for slot in range(7)} | {slot: 0 for slot in range(7, 14)}
    advances = walk(leading, 0, 14)
    assert sum(advances) / len(advances) == 14 / 7
    assert 1 + sum(leading.values()) / len(leading) == 3.0


def test_spans_end_at_documents_and_at_gaps() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    row = pack_row(torch.ones(2, 5).long(), mask, torch.tensor([5, 2]), torch.tensor([1, 2]))
    assert answer_spans(row) == [(1, 2), (4, 4), (5, 6)]


@pytest.mark.parametrize("anchors_at_once", [1, 3, 64])
def test_evaluation_does_not_depend_on_how_many_blocks_are_scored_at_once(anchors_at_once: int) -> None:
    config = small_config()
    row = row_of((20, 5), (9, 8), (30, 12))
    evaluation = evaluate(
        small_drafter(config),
        shared_weights(),
        [(row, (taps_of(row),), row.input_ids)],
        recipe_of(max_anchors=anchors_at_once),
    )
    assert evaluation.documents == 3 and evaluation.verifications >= 3
    assert 1.0 <= evaluation.accepted_length <= config.block_size
    assert evaluation.held_out_loss == pytest.approx(
        evaluate(
            small_drafter(config),
            shared_weights(),
            [(row, (taps_of(row),), row.input_ids)],
            recipe_of(max_anchors=7),
        ).held_out_loss,
        rel=1e-6,
    )


def test_documents_without_answers_have_no_accepted_length() -> None:
    row = row_of((6, 6))
    evaluation = evaluate(
        small_drafter(small_config()),
        shared_weights(),
        [(row, (taps_of(row),), row.input_ids)],
        recipe_of(max_anchors=4),
    )
    assert math.isnan(evaluation.accepted_length) and evaluation.verifications == 0
