"""The drafter's step in its cheaper forms: what is left out, run again or kept smaller changes no number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from blocks import CPU, recipe_of, row_of, shared_weights, small_config, small_drafter, taps_of
from torch import Tensor

from engine.dflash.anchors import anchors_at
from engine.dflash.attention import flex_on
from engine.dflash.drafter import Drafter
from engine.dflash.masters import Masters
from engine.dflash.objective import chunk_softmax
from engine.dflash.packing import sent
from engine.dflash.training import Recipe, drafter_loss, training_loss
from engine.errors import InputError, NonFinite
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.schedule import Train
from engine.verify import compare, verify_files
from plugins.adamw import AdamW
from plugins.lazy_compile import LazyCompile, Options


def gradients_of(drafter: Drafter, recipe: Recipe) -> tuple[Tensor, dict[str, Tensor]]:
    row = row_of((30, 4), (11, 3))
    loss, _ = training_loss(drafter, shared_weights(), (taps_of(row),), row, epoch=0, recipe=recipe)
    loss.loss_sum.backward()
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    return loss.loss_sum.detach(), found


def wrapped(recompute: bool = True) -> Drafter:
    plugin = LazyCompile(Options(backend="aot_eager", recompute=recompute))
    drafter = small_drafter(small_config())
    return plugin.wrap_drafter(drafter, Lane(LaneSpec("drafter", 0, "cpu")), Serializer("none")) or drafter


def test_layers_that_are_run_again_leave_every_bit_of_loss_and_gradients() -> None:
    drafter = small_drafter(small_config())
    loss, gradients = gradients_of(drafter, recipe_of())
    runs = []
    for layer in drafter.layers:
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
    again, found = gradients_of(drafter, recipe_of(checkpointing=True))
    assert len(runs) == 2 * len(drafter.layers)
    assert torch.equal(loss, again) and found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)


def test_compiled_layers_can_be_run_again() -> None:
    loss, gradients = gradients_of(wrapped(), recipe_of())
    again, found = gradients_of(wrapped(), recipe_of(checkpointing=True))
    assert torch.equal(loss, again) and all(torch.equal(found[name], gradients[name]) for name in gradients)


def kept_for_backward(drafter: Drafter, recipe: Recipe) -> int:
    """Bytes that autograd keeps of one forward pass, each storage once."""
    row = row_of((30, 4), (11, 3))
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        training_loss(drafter, shared_weights(), (taps_of(row),), row, epoch=0, recipe=recipe)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
    return sum(storages.values())


def test_checkpointing_keeps_a_layers_input_and_little_else() -> None:
    drafter = small_drafter(small_config())
    assert (
        kept_for_backward(drafter, recipe_of(checkpointing=True))
        < kept_for_backward(drafter, recipe_of()) / 2
    )


def test_a_compiled_layer_keeps_less_when_it_may_make_it_again() -> None:
    kept = []
    for recompute in (True, False):
        torch._dynamo.reset()  # what is compiled already stays as it was
        kept.append(kept_for_backward(wrapped(recompute), recipe_of()))
    assert kept[0] < kept[1]


@pytest.fixture
def memory_begins_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` and `torch.empty_like` give is as bad as memory can be, not zero by luck."""

    def spoilt(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 40)

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, spoilt(getattr(torch, name)))


@pytest.mark.usefixtures("memory_begins_as_nan")
def test_chunks_without_an_anchor_never_reach_the_head_and_change_no_bit() -> None:
    config = small_config()
    row, slots = row_of((60, 4)), config.block_size - 1
    context = small_drafter(config).context(taps_of(row)).detach()
    anchors = anchors_at(row, torch.tensor([5, 9, 20]), 12)
    found = []
    for given in (anchors, attrs.evolve(anchors, used=12)):  # the second as if all slots were used
        drafter = small_drafter(config)
        chunks: list[int] = []

        def softmax(
            logits: Tensor, labels: Tensor, with_gradient: bool, chunks: list[int] = chunks
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            chunks.append(logits.shape[0])
            return chunk_softmax(logits, labels, with_gradient)

        drafter.softmax = softmax
        loss = drafter_loss(drafter, shared_weights(), context, row, given, recipe_of(chunk=4))
        loss.loss_sum.backward()
        assert chunks == [4] * -(-given.used * slots // 4), "fewer chunks, of the same shape"
        gradients = [p.grad for p in drafter.parameters() if p.grad is not None]
        found.append([loss.loss_sum.detach(), loss.weight_sum, loss.right, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_sent_arrives_as_it_was() -> None:
    given = [
        torch.arange(6).view(2, 3),
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.tensor([], dtype=torch.int64),
    ]
    for device in [CPU] + [torch.device("cuda")] * torch.cuda.is_available():
        for one, other in zip(given, sent(given, device), strict=True):
            assert other.device.type == device.type and torch.equal(one, other.cpu())
            assert one.dtype == other.dtype and one.shape == other.shape


# Gradients in bfloat16


def bfloat16_masters(shares: list[list[str] | None]) -> list[Masters]:
    def make_optimizer(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        return AdamW().make_optimizer(parameters, Train())

    drafters = [small_drafter(small_config()).bfloat16() for _ in shares]
    return [
        Masters(drafter, make_optimizer, names, gradient_dtype=torch.bfloat16)
        for drafter, names in zip(drafters, shares, strict=True)
    ]


def put(masters: Masters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in masters.parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    masters.accumulate()


def test_bfloat16_sums_are_the_gradients_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.dflash.masters.PIECE", 2000)  # several pieces, some of one parameter
    [narrow] = bfloat16_masters([None])
    wide = bfloat16_masters([None])[0]
    wide.wide = True
    for m in (narrow, wide):
        put(m, 1)
    assert narrow._sums == {} and all(p.grad is not None for p in narrow.parameters.values())
    norms = narrow.step(3.0, lr=1e-2, clip=1.0), wide.step(3.0, lr=1e-2, clip=1.0)
    # One micro-batch: float32 copies of the same numbers.
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for name, weight in narrow.weights.items():
        torch.testing.assert_close(weight, wide.weights[name], rtol=1e-6, atol=1e-7)
        assert torch.equal(narrow.parameters[name], weight.bfloat16())
        assert narrow.parameters[name].grad is None and weight.grad is None
    assert narrow.sums() == {}


@pytest.mark.parametrize("wide", [False, True])
def test_every_micro_batch_of_a_step_is_in_its_sums(wide: bool) -> None:
    [m] = bfloat16_masters([None])
    m.wide = wide
    alone: list[dict[str, Tensor]] = []
    for seed in (1, 2):
        [each] = bfloat16_masters([None])
        put(each, seed)
        alone.append(each.sums())
        put(m, seed)
    sums = m.sums()
    assert sums.keys() == m.parameters.keys()
    for name, found in sums.items():
        expected = alone[0][name].float() + alone[1][name].float()
        assert found.dtype == (torch.float32 if wide else torch.bfloat16)
        torch.testing.assert_close(found.float(), expected, rtol=0.0 if wide else 2.0**-8, atol=0.0)


def test_a_piece_never_holds_more_than_it_may_or_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.dflash.masters.PIECE", 2000)
    [m] = bfloat16_masters([None])
    put(m, 1)
    m.receive([m.sums()])
    pieces = m._pieces()
    sizes = [[m.parameters[name].numel() for name in names] for names in pieces]
    assert [name for names in pieces for name in names] == list(m.parameters)
    assert len(pieces) > 1 and all(sum(each) <= 2000 or len(each) == 1 for each in sizes)


def test_bfloat16_sums_of_several_drafters_are_added_in_float32() -> None:
    [m] = bfloat16_masters([None])
    name = "norm.weight"
    one, other = (torch.full((32,), value, dtype=torch.bfloat16) for value in (256.0, 1.0))
    norms = m.receive([{name: one}, {name: other}])  # 256 + 1 is 256 in bfloat16
    assert float(norms[name]) == pytest.approx(257 * 32**0.5)
    before = m.weights[name].detach().clone()
    m.update(1.0, lr=1e-2)
    assert not torch.equal(m.weights[name], before)
    assert m.optimizer is not None
    torch.testing.assert_close(m.optimizer.state[m.weights[name]]["exp_avg"], torch.full((32,), 25.7))


def test_a_bad_bfloat16_gradient_is_named_and_forgotten() -> None:
    [m] = bfloat16_masters([None])
    put(m, 1)
    m.parameters["fc.weight"].grad[0, 0] = float("inf")  # type: ignore[index]
    before = {name: weight.detach().clone() for name, weight in m.weights.items()}
    with pytest.raises(NonFinite, match=r"fc\.weight is not finite \(1 of"):
        m.step(1.0, lr=1e-2, clip=1.0)
    assert all(torch.equal(m.weights[name], before[name]) for name in before)
    assert m.sums() == {} and m._received == {}


def test_flex_attention_is_refused_where_compilers_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(InputError, match="TORCHDYNAMO_DISABLE.*134,217,728 scores"):
        flex_on(torch.device("cuda"), 8192, 8192)


GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["mixed_sliding_b8", "invalid_slots"])
def test_a_compiled_drafter_computes_the_references(name: str) -> None:
    plugin, lane = LazyCompile(Options(backend="aot_eager")), Lane(LaneSpec("drafter", 0, "cpu"))

    def wrap(drafter: Drafter) -> Drafter:
        return plugin.wrap_drafter(drafter, lane, Serializer("none")) or drafter

    assert compare(GOLDEN / f"{name}.safetensors", device=CPU, backend="dense", wrap=wrap).passed


@pytest.mark.gpu
def test_a_drafter_compiled_for_a_gpu_computes_the_references() -> None:
    files = sorted(GOLDEN.glob("*.safetensors"))
    for attention in ("dense", "flex"):
        verify_files(files, device_name="cuda:0", attention=attention, compiled=True)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_warm_step_never_waits_for_the_device(compiled: bool) -> None:
    device = torch.device("cuda:0")
    lane = Lane(LaneSpec("drafter", 0, "cuda:0"))
    drafter = small_drafter(small_config(head_dim=32)).to(device, torch.bfloat16)
    if compiled:
        drafter = LazyCompile(Options()).wrap_drafter(drafter, lane, Serializer("none")) or drafter
    masters = Masters(drafter, lambda p: AdamW().make_optimizer(p, Train()))
    row = row_of((300, 4), (200, 3))
    taps = taps_of(row).to(device, torch.bfloat16)
    shared = shared_weights().to(device, torch.bfloat16)
    recipe = recipe_of(backend="flex", context_noise=0.05)
    with lane.active():
        for number in range(4):
            torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
            try:
                loss, _ = training_loss(drafter, shared, (taps,), row, epoch=number, recipe=recipe)
                loss.loss_sum.backward()
                masters.accumulate()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        norm = masters.step(100.0, lr=1e-3, clip=1.0)
    assert norm > 0
