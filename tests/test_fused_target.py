"""The fused walk stands for the Hugging Face modules: the same taps, no further from float32, or an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from test_target import settings_of, write_config
from torch import Tensor

from engine.builtin import TINY_HYBRID, resolve
from engine.device_trust import check_kernels
from engine.errors import DifferenceFound, EngineError, TargetError
from engine.target import fused_operations
from engine.target.fused_check import fused_errors, relative_error
from engine.target.fused_layers import why_not
from engine.target.fused_operations import torch_operations
from engine.target.fused_walk import FusedWalk, fused_walk
from engine.target.kernels import Binding, bindings
from engine.target.loading import Target, load_target
from plugins import fused_target
from plugins.fused_target import FusedTarget, Options

KINDS = ["qwen3_5_text", "qwen3", "llama"]
TAPS = (0, 2, 4)
CPU_LANE: Any = SimpleNamespace(device=torch.device("cpu"))
GPU_LANE: Any = SimpleNamespace(device=torch.device("cuda", 0))


def random_target(
    folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any
) -> Target:
    """A small target whose norms and gates are not at their initial values, where mistakes cancel."""
    keep_head = changes.pop("keep_head", False)
    target = load_target(
        write_config(folder, settings_of(kind, **changes)),
        target_layer_ids=TAPS,
        dtype=dtype,
        device=torch.device(device),
        init="random",
        keep_head=keep_head,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.add_(noise.to(parameter.device, parameter.dtype))
    return target


def ids_of(target: Target, rows: int = 2, length: int = 70) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, target.summary.vocab_size, (rows, length), generator=generator)
    return ids.to(target.device)


@pytest.mark.parametrize("keep_head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_walk_s_taps_are_the_modules(tmp_path: Path, kind: str, keep_head: bool) -> None:
    target = random_target(tmp_path, kind, keep_head=keep_head)
    walk = fused_walk(target, torch_operations())
    ids = ids_of(target)
    for tap, expected in zip(walk(ids), target.forward_taps(ids), strict=True):
        assert tap.shape == expected.shape and tap.dtype == expected.dtype and not tap.requires_grad
        assert relative_error(tap, expected) < 1e-4
    assert len(walk.layers) == TAPS[-1] + 1, "layers behind the last tap are not run"


def test_a_walk_changes_nothing_in_the_model_and_a_second_one_is_as_good(tmp_path: Path) -> None:
    target = random_target(tmp_path, "qwen3_5_text", keep_head=True)
    ids = ids_of(target)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    logits = target.logits(ids)
    first, second = (fused_walk(target, torch_operations()) for _ in range(2))
    taps = first(ids)
    assert all(torch.equal(a, b) for a, b in zip(taps, second(ids), strict=True))
    assert torch.equal(target.logits(ids), logits)
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
    kept = [tap.clone() for tap in taps]
    first(ids.flip(1))
    assert all(torch.equal(a, b) for a, b in zip(taps, kept, strict=True)), "later calls leave taps alone"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_the_right_and_no_other_row_reaches_a_token(tmp_path: Path, kind: str) -> None:
    target = random_target(tmp_path, kind)
    walk = fused_walk(target, torch_operations())
    ids = ids_of(target)
    changed = ids.clone()
    changed[0, 40:] += 1
    changed %= target.summary.vocab_size
    for tap, other in zip(walk(ids), walk(changed), strict=True):
        assert torch.equal(tap[0, :40], other[0, :40]) and torch.equal(tap[1], other[1])
        assert not torch.equal(tap[0, 40:], other[0, 40:])


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_each_kind_of_layer_is_at_most_a_tenth_further_from_float32(
    tmp_path: Path, kind: str
) -> None:
    target = random_target(tmp_path, kind, dtype=torch.bfloat16, initializer_range=0.05)
    errors = fused_errors(target, fused_walk(target, torch_operations()), tolerance=1.1)
    hybrid = {"linear_attention", "full_attention"}
    assert {error.what for error in errors[: -len(TAPS)]} == (
        hybrid if kind == "qwen3_5_text" else {"full_attention"}
    )
    for error in errors:
        assert 0 < error.fused < 0.1 and not error.bad, str(error)


def spoilt(name: str) -> Any:
    """An operations table with one mistake, of the kind that training would not show."""
    table = torch_operations()
    wrong: dict[str, Any] = {
        "add_norm": lambda branch, residual, norm, plain: fused_operations.add_norm(
            branch, residual, attrs.evolve(norm, weight=norm.weight - 1), plain
        ),
        "swiglu": lambda gate, up: fused_operations.swiglu(up, gate),
        "convolve": lambda x, weight, *sizes: fused_operations.convolve(x, weight.flip(0), *sizes),
        "delta_rule": lambda q, k, v, decay, beta, *rest: fused_operations.delta_rule(
            q, k, v, beta, decay, *rest
        ),
        "gated_norm": lambda x, gate, norm: fused_operations.gated_norm(x, gate.sigmoid(), norm),
        "rotate": lambda x, norm, cos, sin: fused_operations.rotate(x, norm, cos, -sin),
        "gate_heads": lambda x, gate: fused_operations.gate_heads(x, None),
    }
    return attrs.evolve(table, **{name: wrong[name]})


@pytest.mark.parametrize(
    "name", ["add_norm", "swiglu", "convolve", "delta_rule", "gated_norm", "rotate", "gate_heads"]
)
def test_an_operation_that_computes_something_else_is_found_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = random_target(tmp_path, "qwen3_5_text", dtype=torch.bfloat16)
    monkeypatch.setattr(fused_target, "torch_operations", lambda: spoilt(name))
    with pytest.raises(
        DifferenceFound, match="further from float32 than the module is: .*attention"
    ) as error:
        FusedTarget(Options(on="all")).wrap_target(target, CPU_LANE)
    assert error.value.exit_code == 7


def test_a_cpu_lane_is_left_alone_unless_all_are_asked_for_and_lanes_of_a_device_share_a_walk(
    tmp_path: Path,
) -> None:
    target = random_target(tmp_path, "qwen3")
    for on in ("auto", "gpu", "never"):
        assert FusedTarget(Options(on=on)).wrap_target(target, CPU_LANE) is None  # type: ignore[arg-type]
    assert FusedTarget(Options(on="never")).wrap_target(target, GPU_LANE) is None
    plugin = FusedTarget(Options(on="all"))
    fused = plugin.wrap_target(target, CPU_LANE)
    assert fused is not None and plugin.wrap_target(target, CPU_LANE) is fused
    ids = ids_of(target)
    expected = fused_walk(target, torch_operations())(ids)
    assert all(torch.equal(a, b) for a, b in zip(fused.forward_taps(ids), expected, strict=True))
    kernels = fused.kernels()
    assert kernels["norm"].startswith("torch (fused walk") and "full_attention" in kernels["fused_target"]
    assert target.kernels()["norm"].endswith("Qwen3RMSNorm.forward"), "the target as loaded is as it was"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "there are sliding_attention layers",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"change with the length \(dynamic\)",
        ),
    ],
)
def test_a_target_it_does_not_know_is_left_as_it_is_and_noted_or_refused_where_it_was_asked_for(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    target = random_target(tmp_path, "qwen3", **changes)
    left = FusedTarget(Options())._fused(target, on_gpu=True)
    assert left.walk is None and left.kernels()["fused_target"].startswith("not used: ")
    with pytest.raises(TargetError, match=rf"cannot be fused: .*{reason}.*leave plugins.fused_target out"):
        FusedTarget(Options(on="all")).wrap_target(target, CPU_LANE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"linear_key_head_dim": 12}, "key heads have 12 channels, it knows powers of two"),
        ({"linear_conv_kernel_dim": 3}, "convolutions have 3 taps, it knows 4"),
    ],
)
def test_a_convolution_that_the_kernel_does_not_compute_is_named(
    tmp_path: Path, changes: dict[str, int], reason: str
) -> None:
    assert reason in str(why_not(random_target(tmp_path, "qwen3_5_text", **changes).model))


def test_another_architecture_is_named(tmp_path: Path) -> None:
    target = random_target(tmp_path, "qwen3")
    target.model.config.model_type = "gemma3_text"
    assert "gemma3_text is none of the architectures it knows" in str(why_not(target.model))


def test_the_check_runs_the_module_on_its_plain_functions_alone(tmp_path: Path) -> None:
    target = random_target(tmp_path, "qwen3_5_text", dtype=torch.bfloat16)
    walk = fused_walk(target, torch_operations())
    expected = fused_errors(target, walk, tolerance=1.1)
    with kernels_that_fail(target):
        assert fused_errors(target, walk, tolerance=1.1) == expected


@pytest.mark.parametrize("kernels_round", [True, False])
def test_in_float32_a_walk_may_round_as_the_module_s_kernels_do_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels_round: bool
) -> None:
    target = random_target(tmp_path, "qwen3_5_text", initializer_range=0.05)

    def coarse(rule: Any) -> Any:  # values in TF32's ten bits, as FLA's products have them
        return lambda q, k, v, *rest, **named: rule(
            q, k, (v.view(torch.int32) & -8192).view(v.dtype), *rest, **named
        )

    table = torch_operations()
    rounding = attrs.evolve(table, delta_rule=coarse(table.delta_rule))
    monkeypatch.setattr(fused_target, "torch_operations", lambda: rounding)
    if kernels_round:
        (rule,) = (one for one in bindings(target.model) if one.operation == "chunk_gated_delta_rule")
        monkeypatch.setattr(rule.module, rule.attribute, bound(rule, coarse(rule.plain)))
        fused = FusedTarget(Options(on="all")).wrap_target(target, CPU_LANE)
        assert fused is not None and isinstance(fused.walk, FusedWalk) and not fused.walk.checked
    else:
        with pytest.raises(DifferenceFound, match="further from float32 than the module is"):
            FusedTarget(Options(on="all")).wrap_target(target, CPU_LANE)


@pytest.mark.parametrize("fault", ["rows mixed up", "not a number", "no kernel image"])
def test_in_float32_what_module_and_walk_have_wrong_alike_is_found_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    target = random_target(tmp_path, "qwen3_5_text", initializer_range=0.05)

    def wrong(rule: Any) -> Any:
        def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
            if fault == "no kernel image":
                raise RuntimeError(fault)
            return rule(q, k, v.roll(1, 0) if fault == "rows mixed up" else v * torch.nan, *rest, **named)

        return call

    table = torch_operations()
    monkeypatch.setattr(
        fused_target, "torch_operations", lambda: attrs.evolve(table, delta_rule=wrong(table.delta_rule))
    )
    (rule,) = (one for one in bindings(target.model) if one.operation == "chunk_gated_delta_rule")
    monkeypatch.setattr(rule.module, rule.attribute, bound(rule, wrong(rule.plain)))
    expected = "Hugging Face module on cpu failed" if fault == "no kernel image" else "linear_attention"
    with pytest.raises(EngineError, match=expected) as error:
        FusedTarget(Options(on="all")).wrap_target(target, CPU_LANE)
    assert isinstance(error.value, DifferenceFound) is (fault != "no kernel image")


def test_the_module_s_kernels_are_compared_unless_a_checked_walk_stands_for_them(tmp_path: Path) -> None:
    target = random_target(tmp_path, "qwen3_5_text", dtype=torch.bfloat16)
    fused = FusedTarget(Options(on="all")).wrap_target(target, CPU_LANE)
    unchecked = attrs.evolve(target, walk=fused_walk(target, torch_operations()))
    recorded = attrs.evolve(target, walk=SimpleNamespace(inner=fused))
    with kernels_that_fail(target):
        for used in (target, unchecked, attrs.evolve(target, walk=SimpleNamespace(inner=target))):
            with pytest.raises(EngineError, match="chunk_gated_delta_rule|causal_conv1d_fn"):
                parts: Any = SimpleNamespace(targets=[used])
                check_kernels(parts, print, [target])
        for checked in (fused, recorded):
            said: list[str] = []
            parts = SimpleNamespace(targets=[checked])
            check_kernels(parts, said.append, [target])
            assert said == [
                "kernels of the Hugging Face module on cpu: not compared; the fused target that runs in its "
                "place was, with float32"
            ]


def bound(binding: Binding, kernel: Any) -> Any:
    """An operation bound to a kernel, in the form in which transformers binds."""
    func_name: str = binding.operation
    torch_function: Any = binding.plain
    implementation = kernel

    def call(*args: Any, **kwargs: Any) -> Any:
        assert func_name and torch_function
        return implementation(*args, **kwargs)

    return call


@contextmanager
def kernels_that_fail(target: Target) -> Iterator[None]:
    """A target's module bound to kernels that cannot run."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image")

    with pytest.MonkeyPatch.context() as patch:
        for binding in bindings(target.model):
            patch.setattr(binding.module, binding.attribute, bound(binding, fail))
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_kernels_are_as_exact_as_the_modules(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    heads = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}
    if kind == "qwen3_5_text":
        rope = settings_of(kind)["rope_parameters"] | {"mrope_section": [4, 2, 2]}
        heads |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "rope_parameters": rope}
    target = random_target(tmp_path, kind, dtype=dtype, device="cuda:0", **heads)
    fused = FusedTarget(Options(on="gpu")).wrap_target(target, GPU_LANE)
    assert fused is not None and isinstance(fused.walk, FusedWalk)
    assert fused.kernels()["norm"].startswith("fla.")
    for rows, length in ((1, 512), (3, 200), (4, 64)):
        ids = ids_of(target, rows, length)
        plain = fused_walk(target, torch_operations())(ids)
        for tap, expected in zip(fused.forward_taps(ids), plain, strict=True):
            assert relative_error(tap, expected) < (0.03 if dtype == torch.bfloat16 else 5e-3)


@pytest.mark.gpu
def test_on_a_gpu_the_built_in_target_is_fused_in_its_float32() -> None:
    target = load_target(
        resolve(TINY_HYBRID), target_layer_ids=TAPS, dtype=torch.float32, device=torch.device("cuda:0")
    )
    fused = FusedTarget(Options()).wrap_target(target, GPU_LANE)
    assert fused is not None and isinstance(fused.walk, FusedWalk), target.kernels()["fused_target"]
