"""The memory plan of whole runs: known totals, how items scale, what a person reads."""

import io
from pathlib import Path
from typing import Any

import attrs
import pytest
import small_runs
import torch
from rich.console import Console

from engine.builtin import resolve
from engine.errors import InputError
from engine.memory_free import check_fits, free_memory
from engine.memory_plan import GB, MemoryPlan, plan_memory
from engine.planning import drafter_config, optimizer_bytes
from engine.plugin_host import load_plugins
from engine.schedule import Plugin, Schedule, load_schedule
from engine.schedule_checks import check_against_target
from engine.target.configuration import TargetSummary, read_target_config
from engine.target.loading import load_target

LARGE = Path(__file__).parent.parent / "schedules" / "qwen3_6_27b_1gpu.toml"
LARGE_SHAPES = [(32, 256), (2, 3072)]


def small_schedule(root: Path, *changes: str) -> tuple[Schedule, TargetSummary]:
    path = root / "small.toml"
    schedule = load_schedule(path if path.exists() else small_runs.small_project(root), list(changes))
    summary = read_target_config(schedule.target.path)
    return check_against_target(schedule, summary), summary


def planned(
    schedule: Schedule,
    summary: TargetSummary,
    *,
    targets: tuple[str, ...] = ("cpu",),
    drafters: tuple[str, ...] = ("cpu",),
    depth: int = 1,
    shapes: Any = ((8, 32),),
    tuned: bool = False,
    warms_up: bool = True,
) -> MemoryPlan:
    config = drafter_config(schedule, summary)
    host = load_plugins(schedule.plugin)
    return plan_memory(
        schedule,
        summary,
        config,
        targets=targets,
        drafters=drafters,
        depth=depth,
        shapes=shapes,
        optimizer_bytes=optimizer_bytes(host, config),
        wrapped=lambda memory, target, device: host.wrap(
            "wrap_target_memory", memory, target=target, device=device
        ),
        tuned=tuned,
        warms_up=warms_up,
    )


def size(plan: MemoryPlan, device: str, what: str, phase: str = "training") -> int:
    found = [item.bytes for item in plan.phases[device][phase] if item.what.startswith(what)]
    assert len(found) == 1, f"{what}: {[item.what for item in plan.phases[device][phase]]}"
    return found[0]


@pytest.fixture(scope="module")
def large() -> tuple[Schedule, TargetSummary]:
    schedule = load_schedule(LARGE, ["target.path=builtin:qwen3.6-27b", "target.init=random"])
    summary = read_target_config(resolve(schedule.target.path))
    return check_against_target(schedule, summary), summary


# Counts


def test_the_large_drafter_has_1_730_billion_parameters(large: tuple[Schedule, TargetSummary]) -> None:
    plan = planned(*large, shapes=LARGE_SHAPES)
    assert round(size(plan, "cpu", "drafter weights") / 2 / 1e9, 3) == 1.730


@pytest.mark.parametrize("eval_every", [0, 3], ids=["cut", "whole"])
def test_target_weights_are_those_that_loading_allocates(tmp_path: Path, eval_every: int) -> None:
    schedule, summary = small_schedule(tmp_path, f"run.eval_every={eval_every}")
    target = load_target(
        schedule.target.path,
        target_layer_ids=schedule.drafter.target_layer_ids or (),
        dtype=torch.float32,
        device=torch.device("cpu"),
        init="random",
        keep_head=eval_every > 0,
    )
    real = sum(parameter.untyped_storage().nbytes() for parameter in target.model.parameters())
    assert size(planned(schedule, summary), "cpu", "target weights") == real


def test_the_large_run_on_one_gpu_needs_about_105_gb(large: tuple[Schedule, TargetSummary]) -> None:
    plan = planned(*large, targets=("cuda:0",), drafters=("cuda:0",), shapes=LARGE_SHAPES)
    assert plan.peak_phase("cuda:0") == "training"
    assert plan.total("cuda:0") / GB == pytest.approx(105, rel=0.15)


def test_the_large_drafter_step_alone_needs_what_another_trainer_measured(
    large: tuple[Schedule, TargetSummary],
) -> None:
    plan = planned(*large, targets=("cuda:1",), drafters=("cuda:0",), shapes=LARGE_SHAPES)
    items = ("embedding and head", "drafter weights", "drafter activations, blocks")
    items += ("drafter activations, context", "hidden states", "vocabulary chunk")
    gradients = size(plan, "cuda:0", "drafter weights")
    step = sum(size(plan, "cuda:0", item) for item in items) + gradients
    assert step / GB == pytest.approx(24.3, rel=0.15)


# How it scales


def test_items_grow_with_the_keys_that_the_advice_names(tmp_path: Path) -> None:
    def grown(item: str, *changes: str, depth: int = 1, shapes: Any = ((32, 32),)) -> float:
        before = planned(*small_schedule(tmp_path), shapes=((32, 32),))
        after = planned(*small_schedule(tmp_path, *changes), depth=depth, shapes=shapes)
        return size(after, "cpu", item) / size(before, "cpu", item)

    assert grown("drafter activations, blocks", "data.max_anchors=24") == pytest.approx(2, rel=0.1)
    assert grown("hidden states at the head", "data.max_anchors=24") == 2
    assert grown("packed taps", depth=3) == 2  # one is being packed
    assert grown("target forward", shapes=((64, 32),)) == 2
    assert grown("drafter activations, context", "data.token_budget=2048", shapes=((64, 32),)) == 2
    assert grown("target weights", "target.dtype=bfloat16") == 0.5
    assert grown("optimizer state", "drafter.dtype=bfloat16") == 1


def test_drafters_share_out_masters_and_moments_but_not_gradient_sums(
    large: tuple[Schedule, TargetSummary],
) -> None:
    schedule, summary = large
    schedule = attrs.evolve(schedule, train=attrs.evolve(schedule.train, micro_batches=4))
    one = planned(schedule, summary, targets=("cuda:0",), drafters=("cuda:1",), shapes=LARGE_SHAPES)
    two = planned(schedule, summary, targets=("cuda:0",), drafters=("cuda:1", "cuda:2"), shapes=LARGE_SHAPES)
    for item, factor in (("master weights", 0.5), ("optimizer state", 0.5), ("gradient sums", 1)):
        assert size(two, "cuda:1", item) == size(one, "cuda:1", item) * factor
        assert size(two, "cuda:2", item) == size(two, "cuda:1", item)


def with_plugins(schedule: Schedule, whole: bool, *names: str) -> Schedule:
    run = attrs.evolve(schedule.run, eval_every=1000 if whole else 0)
    plugins = tuple(Plugin(use=f"plugins.{name}") for name in names)
    return attrs.evolve(schedule, run=run, plugin=plugins)


def test_a_target_in_8_bits_is_planned_as_loaded_and_as_it_is_used(
    large: tuple[Schedule, TargetSummary],
) -> None:
    schedule, summary = large
    apart: dict[str, Any] = dict(targets=("cuda:0",), drafters=("cuda:1",), shapes=LARGE_SHAPES)
    plain = planned(with_plugins(schedule, False), summary, **apart)
    weights = size(plain, "cuda:0", "target weights")
    quantised = planned(with_plugins(schedule, False, "fp8_target"), summary, **apart)
    assert quantised.peak_phase("cuda:0") == "loading" and quantised.total("cuda:0") == weights
    kept = size(quantised, "cuda:0", "target weights")
    assert 0.5 * weights < kept < 0.6 * weights  # embedding, head and small projections stay as they are
    both = planned(with_plugins(schedule, True, "fp8_target"), summary, **apart)
    assert both.peak_phase("cuda:0") == "training"
    assert size(both, "cuda:0", "target weights") > 1.4 * weights  # evaluation decodes with the originals
    assert quantised.total("cuda:1") == plain.total("cuda:1")


def test_each_target_lane_s_recordings_are_planned_as_a_forward_more(
    large: tuple[Schedule, TargetSummary],
) -> None:
    schedule, summary = large
    apart: dict[str, Any] = dict(targets=("cuda:0",) * 2, drafters=("cuda:1",), shapes=LARGE_SHAPES)
    plan = planned(with_plugins(schedule, False, "graph_target"), summary, **apart)
    assert size(plan, "cuda:0", "recordings") == size(plan, "cuda:0", "target forward") > 0


def test_lanes_of_one_device_are_added_up_and_shared_weights_counted_once(
    large: tuple[Schedule, TargetSummary],
) -> None:
    one = planned(*large, targets=("cuda:0",), drafters=("cuda:1",), shapes=LARGE_SHAPES)
    two = planned(*large, targets=("cuda:0",) * 2, drafters=("cuda:1",) * 2, shapes=LARGE_SHAPES)
    for device, item, factor in (
        ("cuda:0", "target weights", 1),
        ("cuda:0", "target forward", 2),
        ("cuda:0", "taps of the rows", 2),
        ("cuda:1", "embedding and head", 1),
        ("cuda:1", "drafter weights", 2),
        ("cuda:1", "master weights", 1),  # half each
        ("cuda:1", "drafter activations, blocks", 2),
    ):
        assert size(two, device, item) == size(one, device, item) * factor
    together = planned(*large, targets=("cuda:0",), drafters=("cuda:0",), shapes=LARGE_SHAPES)
    assert not any(item.what.startswith("embedding") for item in together.items("cuda:0"))


# What a person reads


def test_a_device_that_is_too_small_is_refused_with_need_largest_items_and_cures(
    large: tuple[Schedule, TargetSummary],
) -> None:
    plan = planned(*large, targets=("cuda:0",), drafters=("cuda:0",), shapes=LARGE_SHAPES)
    check_fits(plan, {"cuda:0": 141_000_000_000})
    check_fits(plan, {})
    check_fits(plan, {"cuda:0": 80_000_000_000}, force=True)
    with pytest.raises(InputError) as refusal:
        check_fits(plan, {"cuda:0": 80_000_000_000})
    text = str(refusal.value)
    assert refusal.value.exit_code == 2
    assert text.startswith("cuda:0: the run needs ") and "80.0 GB are free" in text
    for item in plan.largest("cuda:0")[:3]:
        assert item.what in text
    assert plan.largest("cuda:0")[3].what not in text
    for key in ("devices.targets", "devices.drafters", "max_anchors (512)", "loss_chunk (1024)", "--force"):
        assert key in text
    assert "drafter.dtype" not in text  # bfloat16 already


def test_the_context_counts_against_free_memory_and_not_as_allocated(
    large: tuple[Schedule, TargetSummary],
) -> None:
    plan = planned(*large, targets=("cuda:0",), drafters=("cuda:0",), shapes=LARGE_SHAPES)
    assert plan.total("cuda:0") == sum(item.bytes for item in plan.items("cuda:0"))
    with pytest.raises(InputError):
        check_fits(plan, {"cuda:0": plan.total("cuda:0")})
    check_fits(plan, {"cuda:0": plan.total("cuda:0") + plan.outside["cuda:0"]})


def test_benchmarks_of_cold_kernels_count_where_they_can_happen(tmp_path: Path) -> None:
    def benchmarks(phase: str, **changes: Any) -> list[str]:
        values: dict[str, Any] = {"targets": ("cuda:0",), "drafters": ("cuda:0",)}
        plan = planned(*small_schedule(tmp_path), **values | changes)
        return [
            device
            for device in plan.devices
            if any(item.what.startswith("benchmarks") for item in plan.phases[device][phase])
        ]

    two = ((8, 32), (4, 64))
    assert benchmarks("warm-up", shapes=two) == ["cuda:0"]
    assert benchmarks("training", shapes=two) == []  # every shape was tuned before
    assert benchmarks("warm-up", targets=("cuda:1", "cuda:0"), drafters=("cuda:2",)) == ["cuda:1"]
    assert benchmarks("warm-up", targets=("cpu",)) == []
    assert benchmarks("warm-up", tuned=True) == []
    plain: dict[str, Any] = {"warms_up": False}
    assert benchmarks("first forward", **plain) == ["cuda:0"]
    assert benchmarks("training", **plain) == []
    assert benchmarks("training", shapes=two, **plain) == ["cuda:0"]  # another number of rows, another key
    assert benchmarks("training", shapes=two, tuned=True, **plain) == []


def test_a_warm_up_runs_one_target_lane_of_a_device_at_a_time(tmp_path: Path) -> None:
    lanes: dict[str, Any] = {"targets": ("cuda:0",) * 3, "drafters": ("cuda:0",)}
    plan = planned(*small_schedule(tmp_path), **lanes)
    forward = "target forward, widest layer"
    assert size(plan, "cuda:0", forward) == 3 * size(plan, "cuda:0", forward, "warm-up")
    assert size(plan, "cuda:0", "target weights") == size(plan, "cuda:0", "target weights", "warm-up")


def test_a_small_model_on_a_gpu_peaks_while_its_kernels_are_tuned(tmp_path: Path) -> None:
    schedule, summary = small_schedule(tmp_path)
    plan = planned(schedule, summary, targets=("cuda:0",), drafters=("cuda:0",))
    assert plan.peak_phase("cuda:0") == "warm-up"
    assert planned(schedule, summary).peak_phase("cpu") == "training"


def test_the_table_has_every_item_and_the_total(tmp_path: Path) -> None:
    plan = planned(*small_schedule(tmp_path))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(plan.table())
    text = console.export_text()
    for item in plan.items("cpu"):
        assert item.what in text
    assert "allocated, training" in text


def test_free_memory_of_the_cpu_is_what_the_system_says() -> None:
    free = free_memory(["cpu"])
    assert not free or 0 < free["cpu"] < 1 << 50
