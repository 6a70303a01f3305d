"""`bench` measures what it says: counted operations, interleaved medians, and commands that run on a CPU."""

import math
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
import torch
from small_runs import VOCAB, small_project, write_config
from torch import nn
from typer.testing import CliRunner

from engine.bench import SCHEDULES, in_words, opened, per_second
from engine.bench_floor import Operations, _layer_weights, drafter_operations, layer_kinds, target_operations
from engine.bench_measure import Work, in_turns, product_work
from engine.bench_target import layers_in_words
from engine.bench_variants import plugin_use
from engine.cli import app
from engine.dflash.anchors import Anchors
from engine.dflash.configuration import DrafterConfig
from engine.dflash.packing import pack_row
from engine.errors import InputError, NonFinite, TargetError
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.side_by_side import side_by_side
from engine.schedule import load_schedule
from engine.target.loading import load_target

LANE = LaneSpec("target", 0, "cpu")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("bench"))


def bench(project: Path, tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Figures and printed text of a command."""
    file = tmp_path / "figures.json"
    arguments = ["bench", words[0], "--schedule", str(project), *words[1:], "--json", str(file)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return orjson.loads(file.read_bytes()), result.stdout


# --- floors --------------------------------------------------------------------------------------


def loaded(folder: Path, **changes: Any) -> Any:
    write_config(folder, **changes)
    return load_target(
        folder, target_layer_ids=[0, 2], dtype=torch.float32, device=torch.device("cpu"), init="random"
    ).model


def test_the_floor_counts_the_products_that_the_modules_compute(tmp_path: Path) -> None:
    model = loaded(tmp_path / "hybrid", num_hidden_layers=8)
    found: list[int] = []

    def count(module: nn.Linear, inputs: tuple, output: torch.Tensor) -> None:
        found.append(2 * output.numel() * module.in_features)

    layers = [part for part in model.base_model.layers.modules() if isinstance(part, nn.Linear)]
    hooks = [part.register_forward_hook(count) for part in layers]
    model.base_model(input_ids=torch.zeros(2, 48, dtype=torch.int64), use_cache=False)
    for hook in hooks:
        hook.remove()
    counted = target_operations(model, 3, rows=2, length=48)
    assert counted.linear == sum(found)
    assert counted.attention == 0 and counted.delta_rule > 0  # the three layers up to the last tap


def test_attention_is_counted_as_its_causal_half(tmp_path: Path) -> None:
    model = loaded(tmp_path / "hybrid", full_attention_interval=2)
    assert layer_kinds(model.config)[:3] == ["linear_attention", "full_attention", "linear_attention"]
    scores = 48 * 48 / 2  # of a head; the diagonal's other half is nothing beside it
    assert target_operations(model, 3, rows=2, length=48).attention == 2 * 2 * 2 * scores * 2 * 16


def test_modules_that_the_configuration_does_not_explain_are_refused(tmp_path: Path) -> None:
    model = loaded(tmp_path / "hybrid")
    model.base_model.layers[1].extra = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"layer 1 of a qwen3_5_text holds .* comes to .*; floors are known"):
        target_operations(model, 3, rows=1, length=8)


def test_the_floor_of_qwen3_6_27b_is_the_published_arithmetic() -> None:
    config: Any = type("Config", (), {})()
    settings = {"hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248320, "head_dim": 256}
    settings |= {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_key_head_dim": 128}
    settings |= {"linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48}
    settings |= {"model_type": "qwen3_5_text", "num_hidden_layers": 64}
    vars(config).update(settings, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16)
    layers = sum(_layer_weights(config, kind) for kind in layer_kinds(config))
    assert layers + 2 * config.vocab_size * config.hidden_size == pytest.approx(26.9e9, rel=0.01)


def small_drafter(**changes: Any) -> DrafterConfig:
    made = DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        heads=2,
        kv_heads=1,
        head_dim=16,
        vocab_size=VOCAB,
        block_size=4,
        target_layer_ids=(0, 1),
        num_target_layers=4,
        mask_token_id=95,
        layer_types=("full_attention",),
        sliding_window=None,
        is_causal=None,
    )
    return attrs.evolve(made, **changes)


def test_a_drafters_floor_counts_each_product_once_forward_and_where_it_has_a_gradient() -> None:
    lengths = torch.tensor([8])
    row = pack_row(torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8), lengths, torch.arange(1))
    anchors = Anchors(slot=torch.tensor([5]), document=torch.tensor([0]), position=torch.tensor([5]), used=1)
    counted = drafter_operations(small_drafter(), row, anchors)
    slots, context = 4, row.length
    product = 2 * 32
    q, out, keys_values, mlp = 32, 32, 32, 3 * 48
    blocks = product * slots * (3 * (q + out + keys_values + mlp) - (q + keys_values))
    assert counted.linear == blocks + product * context * (3 * keys_values + 2 * 2 * 32)
    assert counted.head == 2 * product * 3 * VOCAB
    pairs = slots * (5 + slots)  # five context slots before the anchor, and the own block
    assert counted.attention == 7 * 2 * pairs * 2 * 16


def test_milliseconds_of_operations_are_told_by_kind() -> None:
    counted = Operations(linear=3e12, attention=1e12)
    assert counted.ms(1e15) == {"linear": 3.0, "attention": 1.0, "total": 4.0}


# --- timing --------------------------------------------------------------------------------------


def test_works_are_timed_in_turns_and_each_ones_median_is_kept() -> None:
    order: list[str] = []
    said: list[str] = []
    works = {name: Work(call=lambda _, name=name: order.append(name)) for name in "ab"}
    lane = Lane(LANE)
    with lane.active():
        readings = in_turns(lane, works, repeats=3, warm_up=1, say=said.append)
    assert order == ["a", "b"] * 4
    assert [line.partition(":")[0] for line in said] == ["warm-up 1", *(f"round {n} of 3" for n in (1, 2, 3))]
    assert all("a 0.0 ms, b " in line for line in said)
    assert readings["a"].repeats == 3 and readings["a"].peak_gb is None
    assert readings["a"].least_ms <= readings["a"].ms <= readings["a"].most_ms


def test_every_call_gets_fresh_inputs_and_finds_its_last_outputs_spoiled() -> None:
    kept = torch.zeros(3)
    seen: list[torch.Tensor] = []

    def call(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(kept.clone())
        return kept.copy_(inputs)

    lane = Lane(LANE)
    with lane.active():
        in_turns(lane, {"a": Work(inputs=lambda: torch.rand(3), call=call)}, repeats=2, warm_up=0)
    assert seen[0].isfinite().all() and seen[1].isnan().all()


def test_a_work_that_hands_out_old_results_is_found() -> None:
    stale = torch.zeros(3)
    lane = Lane(LANE)
    with lane.active(), pytest.raises(NonFinite, match="an output of stale holds a NaN"):
        in_turns(lane, {"stale": Work(call=lambda _: [stale])}, repeats=2)


def test_the_yardstick_times_one_of_its_products() -> None:
    work = product_work(torch.device("cpu"), torch.float32)
    lane = Lane(LANE)
    with lane.active():
        one = in_turns(lane, {"one": work}, repeats=1)["one"]
        whole = in_turns(lane, {"all": attrs.evolve(work, calls=1)}, repeats=1)["all"]
    assert whole.ms > 3 * one.ms


def test_lanes_side_by_side_meet_and_a_failure_names_its_lane() -> None:
    lanes = [Lane(LaneSpec("target", index, "cpu")) for index in range(2)]
    assert side_by_side({lane: (lambda lane=lane: lane.name) for lane in lanes}, "test") == {
        lane: lane.name for lane in lanes
    }

    def fails() -> None:
        raise TargetError("no such thing")

    with pytest.raises(Exception, match=r"test on target.1@cpu: TargetError: no such thing"):
        side_by_side({lanes[0]: lambda: None, lanes[1]: fails}, "test")


# --- commands ------------------------------------------------------------------------------------


def test_bench_target_compares_the_module_and_plugins_with_the_floor(project: Path, tmp_path: Path) -> None:
    fused = tmp_path / "fused_anywhere.py"
    fused.write_text(
        "from plugins.fused_target import FusedTarget, Options as Given\n"
        "class Options(Given): pass\n"
        "def make(options): return FusedTarget(Given(on='all', tolerance=2.0))\n"
    )
    words = ["--tokens", "128", "--length", "64", "--repeats", "2", "--plugin", str(fused)]
    figures, printed = bench(project, tmp_path, "target", *words, "--plugin", "graph_target")
    names = [row["variant"] for row in figures["variants"]]
    assert names == ["Hugging Face", str(fused)]
    for row in figures["variants"]:
        assert row["tokens_per_s"] == pytest.approx(128e3 / row["ms"])
        assert row["of_floor"] == pytest.approx(row["floor_ms"]["total"] / row["ms"])
    assert figures["variants"][0]["difference"] == 0 and figures["variants"][1]["difference"] < 1e-4
    assert figures["rows"] == 2 and figures["layers"] == 3 and figures["taps"] == [0, 1, 2]
    assert "graph_target leaves this target as it is" in printed
    assert "floor" in printed and "Hugging Face" in printed


def test_bench_target_takes_the_first_layers_alone(project: Path, tmp_path: Path) -> None:
    target = write_config(tmp_path / "deep", num_hidden_layers=8)
    words = ["--config", str(target), "--layers", "5", "--tokens", "32", "--repeats", "1"]
    figures, _ = bench(project, tmp_path, "target", *words)
    assert figures["layers_of_target"] == 5 and figures["layers"] == 3


def test_bench_drafter_measures_forward_and_backward(project: Path, tmp_path: Path) -> None:
    figures, printed = bench(
        project, tmp_path, "drafter", "--tokens", "128", "--length", "64", "--repeats", "2"
    )
    (row,) = figures["variants"]
    assert row["variant"] == "plain" and row["times_floor"] > 1
    assert row["times_floor"] == pytest.approx(row["ms"] / figures["floor_ms"]["total"])
    assert figures["context"] == 1024 and figures["anchors"] == 12
    assert "no plugin wraps the drafter" in printed
    assert "thousand parameters" in printed and "GFLOP/s" in printed


def test_bench_launch_says_what_it_could_not_measure(project: Path, tmp_path: Path) -> None:
    figures, printed = bench(project, tmp_path, "launch", "--repeats", "2")
    assert figures["variants"][0]["variant"] == "Hugging Face" and figures["variants"][0]["host_ms"] > 0
    if not torch.cuda.is_available():
        assert "two threads on two GPUs were not measured: there is no GPU here" in printed
        assert "plugins.graph_target leaves this target as it is" in printed


def test_bench_run_counts_the_steps_behind_the_first(project: Path, tmp_path: Path) -> None:
    words = ["run", "--steps", "2", "--documents", "30"]
    figures, printed = bench(project, tmp_path, *words)
    assert figures["steps"] == 2 and len(figures["losses"]) == 5
    assert all(math.isfinite(loss) for loss in figures["losses"])
    assert figures["tokens_per_s"] == pytest.approx(figures["tokens"] / figures["seconds"])
    shares = figures["shares"]
    assert shares["together"] == pytest.approx(sum(v for k, v in shares.items() if k != "together"))
    assert 0 < shares["masks"] < 1 and 0 < shares["packing"] < 1
    assert {stage["stage"] for stage in figures["stages"]} >= {"target-forward", "optimizer"}
    assert str(len(figures["shapes"]["target"])) in printed
    assert figures["cold_keys"] == figures["recompiles"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused where there is no GPU")
@pytest.mark.parametrize("what", ["target", "drafter", "launch", "run"])
def test_a_large_target_on_a_cpu_is_refused_with_advice(what: str) -> None:
    message = r"builtin:qwen3.6-27b has about 2\d.\d billion weights and torch sees no GPU.*--config FOLDER"
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, ["bench", what], catch_exceptions=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused where there is no GPU")
@pytest.mark.parametrize("what", ["drafter", "run"])
def test_a_large_drafter_on_a_cpu_is_refused_with_advice(what: str, tmp_path: Path) -> None:
    target = write_config(tmp_path / "small", num_hidden_layers=8)
    message = r"drafter of qwen3_6_27b_1gpu.toml has about [\d.]+ million weights .*--schedule schedules/"
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, ["bench", what, "--config", str(target)], catch_exceptions=False)


def test_a_built_in_target_brings_the_schedule_that_trains_it() -> None:
    with opened("drafter", config="builtin:tiny-hybrid", schedule=None, overrides=[]) as made:
        demo = load_schedule(SCHEDULES / "sequential_target_parallel_drafter.toml")
        assert made.schedule.drafter == demo.drafter
        assert made.schedule.data.token_budget == demo.data.token_budget


def test_units_leave_digits_to_read() -> None:
    assert in_words(996_864) == "997 thousand" and in_words(1.73e9) == "1.73 billion"
    assert per_second(101.2e9) == "101.2 GFLOP/s" and per_second(680.6e12) == "680.6 TFLOP/s"
    assert layers_in_words(3, 4) == "3 of 4 layers (cut behind the last tap)"
    assert layers_in_words(4, 4) == "4 layers"


@pytest.mark.parametrize(
    "words, message",
    [
        (["target", "--tokens", "100", "--length", "64"], "--tokens 100: no whole rows of --length 64"),
        (["drafter", "--tokens", "100", "--length", "64"], "--tokens 100: no whole documents"),
        (["target", "--layers", "9"], "--layers 9: target has 4 layers"),
        (["run", "--gpus", "64"], "--gpus 64: torch sees"),
    ],
)
def test_what_cannot_be_measured_says_why(project: Path, words: list[str], message: str) -> None:
    arguments = ["bench", words[0], "--schedule", str(project), *words[1:]]
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_schedule_of_another_target_gets_taps_that_it_has(project: Path, tmp_path: Path) -> None:
    target = write_config(tmp_path / "shallow", num_hidden_layers=4)
    overrides = ["drafter.target_layer_ids=[1, 5, 9]"]
    with opened("target", config=str(target), schedule=project, overrides=overrides) as made:
        assert made.schedule.drafter.target_layer_ids == (0, 1, 2)
        folder = made.folder
        assert folder.exists()
    assert not folder.exists()


def test_short_names_are_files_of_the_plugins_folder() -> None:
    assert plugin_use("graph_target") == "plugins.graph_target"
    assert plugin_use("plugins.split_fc") == "plugins.split_fc"
    assert plugin_use("./mine.py") == "./mine.py"
    assert plugin_use("somebody's") == "somebody's"
