"""8-bit products of a fused target: how far they are off, what they free, and when they are refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from small_runs import ONE_LANE_EACH, small_project
from test_fused_target import CPU_LANE, GPU_LANE, ids_of, random_target
from torch import nn

from engine.errors import DifferenceFound, InputError
from engine.memory_sizes import TargetMemory
from engine.run import run
from engine.schedule import load_schedule
from engine.target import fp8
from engine.target.fp8 import (
    LARGEST,
    Fp8Projection,
    QuantizedRows,
    emulated_product,
    fp8_walk,
    quantized,
    scaled_product,
    unfit,
)
from engine.target.fused_check import relative_error
from engine.target.fused_operations import torch_operations
from engine.target.fused_walk import FusedWalk, fused_walk
from engine.target.loading import Target
from plugins.fp8_target import Fp8Target, Options
from plugins.fused_target import FusedTarget
from plugins.fused_target import Options as FusedOptions


def fused(target: Target) -> Target:
    made = FusedTarget(FusedOptions(on="all")).wrap_target(target, CPU_LANE)
    assert made is not None
    return made


def test_each_row_is_quantised_with_a_scale_of_its_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 0.0])[:, None]
    rows = quantized(x)
    assert rows.values.dtype == torch.float8_e4m3fn and rows.scales.shape == (5, 1)
    assert bool((rows.values[:4].float().abs().amax(1) == LARGEST).all())
    restored = rows.values.float() * rows.scales
    assert not restored[4].any()
    # Three bits of mantissa: each value is off by a sixteenth of itself at most, the tiny ones by less.
    assert bool(((restored - x).abs() <= x.abs() / 16 + rows.scales / 512).all())


def test_a_projection_is_the_linear_layer_up_to_rounding() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 48)
    weight = quantized(linear.weight.detach())
    project = Fp8Projection(weight.values, weight.scales, linear.bias, torch.float32, emulated_product)
    x = torch.randn(20, 128)
    with torch.no_grad():
        assert relative_error(project(quantized(x)), linear(x)) < 0.05
        assert relative_error(project(quantized(x)), linear(x) - linear.bias) > 0.05


def test_scales_of_tokens_and_channels_go_where_they_belong() -> None:
    values = torch.eye(16).to(torch.float8_e4m3fn)
    tokens, channels = torch.arange(1.0, 17)[:, None], torch.arange(1.0, 17)[:, None] * 100
    out = emulated_product(QuantizedRows(values, tokens), values, channels, torch.float32)
    assert torch.equal(out, torch.diag(torch.arange(1.0, 17) ** 2 * 100))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3", "llama"])
def test_taps_move_by_what_three_bits_round_and_are_noted(tmp_path: Path, kind: str) -> None:
    target = fused(random_target(tmp_path, kind, dtype=torch.bfloat16, initializer_range=0.05))
    ids = ids_of(target)
    before = target.forward_taps(ids)
    plugin = Fp8Target(Options(on="all"))
    made = plugin.wrap_target(target, CPU_LANE)
    assert made is not None and plugin.wrap_target(target, CPU_LANE) is made
    for tap, expected in zip(made.forward_taps(ids), before, strict=True):
        assert tap.dtype == torch.bfloat16
        assert 0.003 < relative_error(tap, expected) < 0.2
    kernels = made.kernels()
    assert "e4m3" in kernels["linear"]
    assert kernels["fp8_target"].startswith("relative error against bfloat16: tap of layer 0 ")
    assert kernels["fused_target"] == target.kernels()["fused_target"]


def tensor_bytes(target: Target) -> int:
    """What the model's weights and the 8-bit projections over them take."""
    found: dict[int, int] = {}
    seen: set[int] = set()

    def look(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, Fp8Projection):
            found[id(thing)] = thing.weight.nbytes + thing.scales.nbytes
        elif attrs.has(type(thing)):
            for field in attrs.fields(type(thing)):
                look(getattr(thing, field.name))
        elif isinstance(thing, list | tuple):
            for one in thing:
                look(one)
        elif callable(thing) and getattr(thing, "__closure__", None):
            for cell in thing.__closure__:
                look(cell.cell_contents)

    assert isinstance(target.walk, FusedWalk)
    look(list(target.walk.layers))
    return sum(parameter.nbytes for parameter in target.model.parameters()) + sum(found.values())


def test_quantised_weights_are_freed_unless_the_whole_target_is_there_to_decode_with(tmp_path: Path) -> None:
    for keep_head in (False, True):
        folder = tmp_path / str(keep_head)
        target = random_target(folder, "qwen3_5_text", dtype=torch.bfloat16, keep_head=keep_head)
        plugin = Fp8Target(Options(on="all"))
        before = sum(parameter.nbytes for parameter in target.model.parameters())
        planned = TargetMemory(loaded=before, weights=before, forward=0)
        planned = plugin.wrap_target_memory(planned, target, target.device) or planned
        made = plugin.wrap_target(fused(target), CPU_LANE)
        assert made is not None
        assert planned.loaded == before and planned.weights == tensor_bytes(made)
        layer = target.model.base_model.layers[0]
        assert bool(layer.mlp.gate_proj.weight.numel()) == keep_head
        assert layer.linear_attn.in_proj_a.weight.numel() and target.embed_tokens.numel()
        assert target.lm_head.numel()
        if keep_head:
            assert bool(made.logits(ids_of(target)).isfinite().all())


def test_taps_that_move_too_far_end_the_run(tmp_path: Path) -> None:
    for option in ("max_error", "max_layer_error"):
        target = fused(random_target(tmp_path / option, "qwen3", dtype=torch.bfloat16))
        with pytest.raises(
            DifferenceFound, match=rf"too far from bfloat16: tap of layer 0 .*{option}"
        ) as error:
            Fp8Target(Options(on="all", **{option: 1e-3})).wrap_target(target, CPU_LANE)
        assert error.value.exit_code == 7


def test_a_layer_with_a_wrong_scale_is_found_whatever_the_taps_may_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fused(random_target(tmp_path, "qwen3", dtype=torch.bfloat16))
    monkeypatch.setattr(fp8, "LARGEST", fp8.LARGEST / 2**16)
    with pytest.raises(DifferenceFound, match=r"of one layer .*max_layer_error is 0.25"):
        Fp8Target(Options(on="all")).wrap_target(target, CPU_LANE)


def test_a_target_that_is_not_fused_is_refused_with_what_to_do(tmp_path: Path) -> None:
    target = random_target(tmp_path, "qwen3")
    plugin = Fp8Target(Options(on="all"))
    with pytest.raises(InputError, match="this target is not fused .*Let plugins.fused_target come first"):
        plugin.wrap_target(target, CPU_LANE)
    assert Fp8Target(Options()).wrap_target(target, CPU_LANE) is None


def test_a_gpu_without_8_bit_products_and_sizes_that_they_cannot_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_target(tmp_path, "qwen3", dtype=torch.bfloat16, intermediate_size=264)
    walk = fused_walk(target, torch_operations())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "Old GPU (cpu) has no 8-bit matrix products" in str(unfit(walk))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "layers.0.mlp.gate_proj is 264 × 32, no multiples of 16" in str(unfit(walk))


def test_a_run_trains_over_the_8_bit_target_and_writes_its_errors_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = small_project(tmp_path)
    lines = project.read_text()
    plugins = ("fused_target", "fp8_target")
    tables = "".join(f'[[plugin]]\nuse = "plugins.{name}"\non = "all"\n' for name in plugins)
    project.write_text(lines + tables + "max_error = 2.0\n")
    result = run(load_schedule(project, [ONE_LANE_EACH, "run.eval_every=0"]), steps=2)
    kernels: dict[str, Any] = json.loads((result.folder.path / "environment.json").read_text())["kernels"]
    assert "e4m3" in kernels["linear"] and "tap of layer 2" in kernels["fp8_target"]
    assert result.steps == 2


@pytest.mark.gpu
def test_on_a_gpu_the_8_bit_product_is_the_emulated_one() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 512, device="cuda").bfloat16() for rows in (300, 256))
    rows, matrix = quantized(x), quantized(weight)
    got = scaled_product(rows, matrix.values, matrix.scales, torch.bfloat16)
    expected = emulated_product(rows, matrix.values, matrix.scales, torch.bfloat16)
    assert relative_error(got, expected) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3", "llama"])
def test_on_a_gpu_the_kernels_walk_as_the_emulation_does(tmp_path: Path, kind: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit products")
    sizes: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
    if kind == "qwen3_5_text":
        sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    target = random_target(
        tmp_path, kind, dtype=torch.bfloat16, device="cuda:0", initializer_range=0.05, keep_head=True, **sizes
    )
    lane: Any = SimpleNamespace(device=GPU_LANE.device)
    bfloat16 = FusedTarget(FusedOptions(on="gpu")).wrap_target(target, lane)
    assert bfloat16 is not None
    made = Fp8Target(Options()).wrap_target(bfloat16, lane)
    assert made is not None and isinstance(made.walk, FusedWalk) and "_scaled_mm" in made.kernels()["linear"]
    plain = fused_walk(target, torch_operations())
    ids = ids_of(target, 3, 128)
    exact = plain(ids)
    emulated = fused_walk(target, _emulated(plain))(ids)
    for tap, other, reference in zip(made.forward_taps(ids), emulated, exact, strict=True):
        assert relative_error(tap, reference) < 1.2 * relative_error(other, reference)


def _emulated(plain: FusedWalk) -> Any:
    from engine.target.fp8 import fp8_operations

    return fp8_operations(plain.operations, on_gpu=False, release=False)


def test_a_second_walk_in_8_bits_over_unreleased_weights_is_the_same(tmp_path: Path) -> None:
    target = random_target(tmp_path, "qwen3_5_text", dtype=torch.bfloat16)
    walk = fused_walk(target, torch_operations())
    ids = ids_of(target)
    first, second = (fp8_walk(target, walk, release=False)(ids) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
