"""float32 masters, one division per step, a learning rate that is a function of the step."""

import pytest
import torch
from blocks import CPU, small_config

from engine.dflash.drafter import build_drafter
from engine.dflash.masters import Masters, learning_rate, share_out
from engine.errors import CheckpointError, NonFinite
from engine.schedule import Train
from plugins.adamw import AdamW


def masters(dtype: torch.dtype = torch.float32, seed: int = 0) -> Masters:
    drafter = build_drafter(small_config(), CPU, dtype)
    drafter.initialise(seed)
    return Masters(drafter, make_optimizer)


def make_optimizer(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    train = Train(betas=(0.9, 0.95), weight_decay=0.01)
    return AdamW().make_optimizer(parameters, train)


def put_gradients(m: Masters, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in m.parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    m.accumulate()


def test_bfloat16_drafters_keep_updates_that_bfloat16_would_lose() -> None:
    m = masters(torch.bfloat16)
    before = {name: weight.detach().clone() for name, weight in m.weights.items()}
    for step in range(8):
        put_gradients(m, step)
        m.step(1.0, lr=1e-5, clip=1.0)
    for name, weight in m.weights.items():
        assert weight.dtype == torch.float32 and not torch.equal(weight, before[name])
        assert torch.equal(m.parameters[name], weight.bfloat16())
    assert torch.equal(m.parameters["norm.weight"], torch.ones(32, dtype=torch.bfloat16))


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    m = masters(torch.bfloat16)
    name = "fc.weight"
    for value in (256.0, 1.0, 1.0):  # 256 + 1 is 256 in bfloat16
        for parameter in m.parameters.values():
            parameter.grad = torch.full_like(parameter, value)
        m.accumulate()
    assert (m.sums()[name] == 258.0).all()


def test_the_sum_is_divided_once_before_clipping() -> None:
    m, scaled = masters(), masters()
    put_gradients(m, 1)
    put_gradients(scaled, 1, scale=8.0)  # an exact power of two
    norms = m.step(2.0, lr=1e-3, clip=0.5), scaled.step(16.0, lr=1e-3, clip=0.5)
    assert norms[0] == norms[1] > 0.5
    assert all(torch.equal(m.weights[name], scaled.weights[name]) for name in m.weights)


def test_a_bad_gradient_is_named_and_updates_nothing() -> None:
    m = masters()
    before = {name: weight.detach().clone() for name, weight in m.weights.items()}
    put_gradients(m, 1)
    m._sums["layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    with pytest.raises(NonFinite, match=r"layers\.1\.mlp\.up_proj\.weight.*1 of"):
        m.step(1.0, lr=1e-3, clip=1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in m.weights.items())


def test_weight_decay_spares_the_norms() -> None:
    m = masters()
    for parameter in m.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    m.accumulate()
    before = m.weights["fc.weight"].detach().clone()
    m.step(1.0, lr=1e-1, clip=1.0)
    assert (m.weights["norm.weight"] == 1).all()
    torch.testing.assert_close(m.weights["fc.weight"].detach(), before * (1 - 1e-1 * 0.01))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_masters_go_on_bit_for_bit(dtype: torch.dtype) -> None:
    one = masters(dtype)
    for step in range(3):
        put_gradients(one, step)
        one.step(1.0, lr=1e-3, clip=1.0)
    saved = {name: value.clone() for name, value in one.state().items()}
    other = masters(dtype, seed=9)
    other.load(saved)
    for m in (one, other):
        put_gradients(m, 10)
        m.step(1.0, lr=1e-3, clip=1.0)
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    assert all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.weights)
    assert {k: v.dtype for k, v in one.state().items()} == {k: v.dtype for k, v in other.state().items()}


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = masters().state()
    with pytest.raises(CheckpointError, match="master.norm.weight is missing"):
        masters().load({name: value for name, value in state.items() if name != "master.norm.weight"})
    with pytest.raises(CheckpointError, match="no such parameter"):
        masters().load(state | {"master.extra": torch.zeros(1)})


def test_learning_rate_rises_then_falls_to_its_minimum() -> None:
    rates = [learning_rate(s, 100, lr=1.0, min_lr=0.1, warmup=0.04) for s in range(100)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[99] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[3:], rates[4:], strict=False))
    assert learning_rate(0, 1, lr=1.0, min_lr=0.1, warmup=0.0) == 1.0


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_masters_are_shared_out_whole_and_about_evenly(shares: int) -> None:
    sizes = {name: weight.numel() for name, weight in masters().weights.items()}
    runs = share_out(sizes, shares)
    assert [name for run in runs for name in run] == list(sizes)
    totals = [sum(sizes[name] for name in run) for run in runs]
    assert max(totals) <= sum(sizes.values()) / shares + max(sizes.values())
