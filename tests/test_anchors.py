"""How anchors are shared out and drawn."""

import torch
from blocks import row_of
from hypothesis import given
from hypothesis import strategies as st

from engine.dflash.anchors import draw_anchors, share_anchors, valid_anchor_slots
from engine.randomness import stateless_hash, stateless_uniform


def shared_in_rounds(available: list[int], max_anchors: int) -> list[int]:
    shares = [0] * len(available)
    while max_anchors and shares != available:
        for number, count in enumerate(available):
            if max_anchors and shares[number] < count:
                shares[number] += 1
                max_anchors -= 1
    return shares


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 200))
def test_sharing_equals_handing_out_one_at_a_time(available: list[int], max_anchors: int) -> None:
    assert share_anchors(available, max_anchors) == shared_in_rounds(available, max_anchors)


def test_short_documents_are_not_starved() -> None:
    assert share_anchors([3, 1000, 2], 9) == [3, 4, 2]


def test_anchors_are_valid_distinct_and_sorted() -> None:
    row = row_of((50, 3), (8, 7), (30, 29), (60, 5))
    anchors = draw_anchors(row, seed=5, epoch=1, max_anchors=40)
    slots = anchors.slot[: anchors.used]
    assert anchors.used == 40 and anchors.count == 40
    assert (slots[1:] > slots[:-1]).all()
    assert torch.isin(slots, valid_anchor_slots(row)).all()
    assert torch.equal(row.document[slots], anchors.document) and (anchors.document == 1).sum() == 1


def test_the_slot_count_is_fixed_and_the_rest_is_marked_unused() -> None:
    anchors = draw_anchors(row_of((9, 5)), seed=5, epoch=0, max_anchors=16)
    assert anchors.used == 4 and anchors.count == 16
    assert (anchors.document[4:] == -2).all()


def test_all_positions_are_drawn_over_many_epochs() -> None:
    row = row_of((30, 5))
    drawn = torch.cat([draw_anchors(row, seed=1, epoch=e, max_anchors=3).position for e in range(80)])
    counts = torch.bincount(drawn, minlength=30)[4:29]
    assert (counts > 0).all() and counts.max() < 25  # 240 draws over 25 positions


def test_hash_is_uniform_and_depends_on_every_key() -> None:
    x = torch.arange(100_000)
    uniform = stateless_uniform(1, x)
    assert abs(float(uniform.mean()) - 0.5) < 0.005 and abs(float(uniform.var()) - 1 / 12) < 0.002
    assert stateless_hash(1, x).unique().numel() == x.numel()
    for keys in ((2, 3), (3, 2), (2, 3, 0), (2,)):
        assert int(stateless_hash(*keys)) != int(stateless_hash(2, 4))
    assert len({int(stateless_hash(*keys)) for keys in ((2, 3), (3, 2), (2, 3, 0), (2,))}) == 4
    assert (stateless_hash(2**63 + 5, x) >= 0).all()
