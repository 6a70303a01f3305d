"""The formulas of the memory plan against real modules and real allocations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import small_runs
import torch
from blocks import recipe_of

from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.masters import Masters
from engine.dflash.objective import head_cross_entropy
from engine.dflash.packing import PackedRow, pack_row
from engine.dflash.training import SharedWeights, training_loss
from engine.memory_sizes import DrafterLane, target_forward_bytes
from engine.planning import optimizer_bytes
from engine.plugin_host import load_plugins
from engine.schedule import Plugin, Train
from engine.target.configuration import read_json
from engine.target.loading import load_target
from plugins.concat import ConcatenatedTaps

CONFIG = DrafterConfig(
    hidden_size=64,
    intermediate_size=160,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab_size=512,
    block_size=8,
    target_layer_ids=(0, 1, 2),
    num_target_layers=5,
    mask_token_id=511,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=32,
)
ROWS, LENGTH, ANCHORS, CHUNK = 4, 256, 160, 64


def lane(**changes: Any) -> DrafterLane:
    """The lane of `CONFIG` on a CPU."""
    values: dict[str, Any] = dict(
        config=CONFIG,
        e=4,
        context=ROWS * LENGTH,
        longest=LENGTH,
        anchors=ANCHORS,
        chunk=CHUNK,
        state=optimizer_bytes(load_plugins(), CONFIG),
        lanes=1,
        turns=1,
        noise=False,
        checkpointing=False,
        wide=True,
        split_fc=False,
        flex=False,
        fused_norm=False,
    )
    return DrafterLane(**values | changes)


@pytest.mark.parametrize("changes", [{}, {"layer_types": ("full_attention",) * 3, "sliding_window": None}])
def test_drafter_parameters_are_counted_exactly(changes: dict[str, Any]) -> None:
    config = attrs.evolve(CONFIG, **changes)
    with torch.device("meta"):
        real = sum(parameter.numel() for parameter in Drafter(config).parameters())
    assert lane(config=config).parameters == real


def kept(
    drafter: Drafter, gradient_dtype: torch.dtype = torch.float32, plugins: Sequence[Plugin] = ()
) -> Masters:
    """All masters of a drafter, with AdamW or what the plugins have."""

    def make_optimizer(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = load_plugins(plugins).choose(
            "make_optimizer", parameters=parameters, train=Train()
        )
        return made

    return Masters(drafter, make_optimizer, gradient_dtype=gradient_dtype)


@pytest.mark.parametrize("plugins", [(), (Plugin(use="plugins.muon"),)], ids=["AdamW", "Muon"])
def test_masters_and_moments_are_what_the_optimizer_holds(plugins: Sequence[Plugin]) -> None:
    planned = optimizer_bytes(load_plugins(plugins), CONFIG)
    for dtype, e in ((torch.float32, 4), (torch.bfloat16, 2)):
        drafter = build_drafter(CONFIG, torch.device("cpu"), dtype)
        drafter.initialise(0)
        masters = kept(drafter, plugins=plugins)
        for parameter in drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)
        masters.accumulate()
        masters.step(1.0, lr=1e-3, clip=1.0)
        assert masters.optimizer is not None
        state = masters.optimizer.state.values()
        moments = sum(value.nbytes for entry in state for value in entry.values() if value.ndim)
        own = 0 if masters.own else sum(weight.nbytes for weight in masters.weights.values())
        assert (lane(e=e).masters, lane(e=e, state=planned).moments) == (own, moments)


def batch(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[PackedRow, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (ROWS, LENGTH), generator=generator)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    row = pack_row(ids, mask, torch.full((ROWS,), LENGTH), torch.arange(ROWS))
    taps = torch.randn(row.length, 3 * CONFIG.hidden_size, generator=generator)
    return row, taps.to(device, dtype)


def trainable(
    device: str = "cpu", dtype: torch.dtype = torch.float32, config: DrafterConfig = CONFIG
) -> tuple[Drafter, SharedWeights]:
    drafter = build_drafter(config, torch.device(device), dtype)
    drafter.initialise(0)
    drafter.requires_grad_(True)
    embedding, head = torch.randn(2, CONFIG.vocab_size, CONFIG.hidden_size).to(device, dtype)
    return drafter, SharedWeights(embedding.clone(), head.clone())


def loss_of(
    drafter: Drafter,
    shared: SharedWeights,
    row: PackedRow,
    taps: torch.Tensor,
    backend: Any,
    anchors: int = ANCHORS,
    checkpointing: bool = False,
) -> Any:
    recipe = recipe_of(
        features=ConcatenatedTaps(CONFIG.hidden_size),
        backend=backend,
        max_anchors=anchors,
        chunk=CHUNK,
        checkpointing=checkpointing,
    )
    return training_loss(drafter, shared, (taps,), row, epoch=0, recipe=recipe)[0].loss_sum


@pytest.mark.parametrize("intermediate_size", [160, 1024])
def test_activations_are_what_autograd_keeps_of_a_real_step(intermediate_size: int) -> None:
    config = attrs.evolve(CONFIG, intermediate_size=intermediate_size)
    drafter, shared = trainable(config=config)
    row, taps = batch()
    kept: dict[int, int] = {}
    # Held until they are counted, so that no address is given out twice.
    alive: list[torch.Tensor] = []
    weights = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(drafter, shared, row, taps, "dense")
    # The head's gradient and the weights of the slots belong to the hidden states at the head.
    real = sum(kept.values()) - ANCHORS * (CONFIG.block_size - 1) * (CONFIG.hidden_size + 1) * 4
    plan = lane(config=config).block_activations() + lane(config=config).context_activations()
    assert plan == pytest.approx(real, rel=0.05)


def allocated_peak(run: Any) -> int:
    """The most bytes that were allocated at a time on the CPU while `run` ran, beyond those before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vocabulary_chunk_is_what_the_head_allocates(dtype: torch.dtype) -> None:
    rows, hidden, vocabulary = 400, 8, 5_000
    head, labels = torch.randn(vocabulary, hidden).to(dtype), torch.zeros(rows, dtype=torch.int64)
    states = torch.randn(rows, hidden).to(dtype).requires_grad_(True)
    for chunk in (100, 1000):
        config = attrs.evolve(CONFIG, vocab_size=vocabulary, block_size=5)
        loss = lane(config=config, e=dtype.itemsize, anchors=100, chunk=chunk).phases()[0]
        [item] = [item for item in loss if item.what.startswith("vocabulary chunk")]
        peak = allocated_peak(lambda chunk=chunk: head_cross_entropy(states, head, labels, chunk))
        assert item.bytes == pytest.approx(peak, rel=0.1)


def planned_peak(lane: DrafterLane) -> int:
    return max(sum(item.bytes for item in phase) for phase in lane.phases())


def measured_peak(
    drafter: Drafter,
    shared: SharedWeights,
    turns: int,
    anchors: int,
    *,
    checkpointing: bool = False,
    gradient_dtype: torch.dtype = torch.float32,
) -> int:
    """Peak of the micro-batches that one drafter trains on in a step, its sums included."""
    row, taps = batch(dtype=shared.lm_head.dtype)
    masters = kept(drafter, gradient_dtype)

    def step() -> None:
        for _ in range(turns):
            loss_of(drafter, shared, row, taps, "dense", anchors, checkpointing).backward()
            masters.accumulate()

    step()  # what is made once is not this step's
    masters.discard()
    return allocated_peak(step) + taps.nbytes


@pytest.mark.parametrize("turns", [1, 2])
def test_a_real_drafter_step_peaks_where_the_plan_says(turns: int) -> None:
    peak = measured_peak(*trainable(), turns, ANCHORS)
    assert planned_peak(lane(turns=turns)) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_large_drafter_with_few_blocks_peaks_where_its_gradients_are_whole(turns: int) -> None:
    config = attrs.evolve(
        CONFIG, intermediate_size=4096, layer_types=("full_attention",) * 6, sliding_window=None
    )
    peak = measured_peak(*trainable(config=config), turns, anchors=2)
    plan = lane(config=config, anchors=2, turns=turns)
    assert planned_peak(plan) == sum(item.bytes for item in plan.phases()[2])
    assert planned_peak(plan) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("layers", [2, 6])
def test_a_checkpointed_step_peaks_where_the_plan_says(layers: int) -> None:
    config = attrs.evolve(CONFIG, layer_types=("full_attention",) * layers, sliding_window=None)
    peak = measured_peak(*trainable(config=config), 1, ANCHORS, checkpointing=True)
    plan = lane(config=config, checkpointing=True)
    assert planned_peak(plan) == pytest.approx(peak, rel=0.15)
    assert planned_peak(plan) < planned_peak(lane(config=config))


@pytest.mark.parametrize("turns", [1, 2])
def test_sums_in_bfloat16_take_what_the_plan_says(turns: int) -> None:
    config = attrs.evolve(
        CONFIG, intermediate_size=4096, layer_types=("full_attention",) * 6, sliding_window=None
    )
    given = trainable(dtype=torch.bfloat16, config=config)
    peak = measured_peak(*given, turns, anchors=2, gradient_dtype=torch.bfloat16)
    plan = lane(config=config, e=2, anchors=2, turns=turns, wide=False)
    before = [sum(item.bytes for item in phase) for phase in plan.phases()[:3]]  # the optimizer's is not run
    assert max(before) == pytest.approx(peak, rel=0.15)
    assert max(before) < planned_peak(lane(config=config, e=2, anchors=2, turns=turns))


def dense_sizes() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_a_real_target_forward_peaks_where_the_plan_says(tmp_path: Path, kind: str) -> None:
    wide_heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes = small_runs.HYBRID | wide_heads if kind == "hybrid" else dense_sizes()
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    target = load_target(
        tmp_path,
        target_layer_ids=[0],
        dtype=torch.float32,
        device=torch.device("cpu"),
        init="random",
    )
    ids = torch.zeros(8, 128, dtype=torch.int64)
    target.forward_taps(ids)
    peak = allocated_peak(lambda: target.forward_taps(ids))
    plan = target_forward_bytes(read_json(tmp_path / "config.json"), ids.numel(), 4, fused=False)
    assert plan == pytest.approx(peak, rel=0.1)


@pytest.mark.gpu
def test_a_drafter_step_on_a_gpu_peaks_where_the_plan_says() -> None:
    device = "cuda:0"
    drafter, shared = trainable(device, torch.bfloat16)
    row, taps = batch(device, torch.bfloat16)
    loss_of(drafter, shared, row, taps, "flex").backward()
    drafter.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - taps.nbytes
    torch.cuda.reset_peak_memory_stats()
    loss_of(drafter, shared, row, taps, "flex").backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert planned_peak(lane(e=2, flex=True, fused_norm=True)) == pytest.approx(peak, rel=0.15)
