"""Noise on the taps: uniform, of the deviation asked for, and a function of its keys."""

import torch
from blocks import HIDDEN, row_of, taps_of

from engine.dflash.packing import PackedRow
from engine.dflash.training import add_context_noise
from plugins.concat import ConcatenatedTaps
from plugins.split_fc import SeparateTaps

CONCAT = ConcatenatedTaps(HIDDEN)


def noise(row: PackedRow, **changes: int) -> torch.Tensor:
    taps = taps_of(row)
    keys = {"seed": 1, "epoch": 0} | changes
    return add_context_noise((taps,), row, features=CONCAT, deviation=0.05, **keys)[0] - taps


def test_noise_has_the_deviation_asked_for_and_spares_the_tail() -> None:
    row = row_of((400, 5), (300, 2))
    drawn = noise(row)[: row.tokens]
    assert abs(float(drawn.std()) - 0.05) < 0.001 and abs(float(drawn.mean())) < 0.001
    assert float(drawn.abs().max()) <= 0.05 * 3**0.5 + 1e-6
    assert not noise(row)[row.tokens :].any()


def test_noise_does_not_depend_on_neighbours() -> None:
    together, alone = row_of((20, 5), (30, 4)), row_of((20, 5))
    assert torch.allclose(noise(together)[:20], noise(alone)[:20], atol=1e-6)


def test_noise_differs_by_seed_epoch_and_tap() -> None:
    row = row_of((50, 5))
    base = noise(row)[:50]
    assert not torch.allclose(base, noise(row, epoch=1)[:50], atol=1e-3)
    assert not torch.allclose(base, noise(row, seed=2)[:50], atol=1e-3)
    assert not torch.allclose(base[:, :HIDDEN], base[:, HIDDEN:], atol=1e-3)


def test_no_noise_is_no_copy() -> None:
    row = row_of((50, 5))
    packed = (taps_of(row),)
    assert add_context_noise(packed, row, features=CONCAT, deviation=0.0, seed=1, epoch=0) is packed


def test_noise_is_the_same_however_the_taps_are_split() -> None:
    row = row_of((50, 5), (30, 3))
    split = SeparateTaps()
    taps = taps_of(row)
    apart = tuple(taps.split(HIDDEN, dim=1))
    noisy = add_context_noise(apart, row, features=split, deviation=0.05, seed=1, epoch=0)
    together = add_context_noise((taps,), row, features=CONCAT, deviation=0.05, seed=1, epoch=0)
    assert torch.equal(torch.cat(noisy, dim=1), together[0])
