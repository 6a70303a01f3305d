"""CUDA graphs of the target: replays are the forward, bit for bit, whatever other lanes do meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from small_runs import assembled, small_project, write_config

from engine.errors import DifferenceFound, EngineError
from engine.lanes import open_run_lanes
from engine.runtime.graph import LaneSpec
from engine.runtime.graph_capture import LaneGraphs
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.runtime.side_by_side import side_by_side
from engine.shape_buckets import shape_buckets
from engine.stress_calls import Form, load_operations
from engine.target.loading import Target, copy_target, load_target
from plugins.graph_target import GraphTarget, GraphWalk, Options

SHAPES = [(4, 64), (2, 128), (1, 192)]


WIDER: dict[str, Any] = {  # than the targets of CPU tests: FLA's kernels want heads of 16 and more
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
}


def hybrid(folder: Path, device: str = "cuda:0") -> Target:
    write_config(folder, **WIDER, vocab_size=512)
    return load_target(
        folder, target_layer_ids=[0, 2], dtype=torch.bfloat16, device=torch.device(device), init="random"
    )


def lane_on(device: str, index: int = 0) -> Lane:
    return Lane(LaneSpec("target", index, device))


def wrapped(target: Target, lane: Lane, serializer: Serializer, **options: Any) -> Target:
    return GraphTarget(Options(**options)).wrap_target(target, lane, serializer)


def walk_of(target: Target) -> GraphWalk:
    assert isinstance(target.walk, GraphWalk)
    return target.walk


def prepared(target: Target, lane: Lane, shapes: list[tuple[int, int]] = SHAPES) -> None:
    with lane.active():
        for rows, length in shapes:
            walk_of(target).prepare(rows, length)


def random_ids(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.randint(0, 512, shape).to(device)  # a GPU's own generator is closed while a lane records


def equal(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, reference, strict=True))


@pytest.fixture
def serializer() -> Serializer:
    made = Serializer("tune")
    made.install()
    return made


def test_on_a_cpu_lane_the_target_stays_as_it_is_and_says_so(tmp_path: Path) -> None:
    parts = assembled(small_project(tmp_path))
    target = wrapped(parts.targets[0], lane_on("cpu"), Serializer("none"))
    assert target.walk is None
    assert target.kernels()["graph_target"] == "not used: cpu has no CUDA graphs"


def test_a_lane_on_a_cpu_keeps_no_graphs() -> None:
    with pytest.raises(EngineError, match=r"target.0@cpu: CUDA graphs need a GPU"):
        LaneGraphs(lane_on("cpu"), Serializer("none"))


class KeptOutputs:
    """Stands in for a lane's graphs on a CPU: a `capture` whose replays may be made wrong."""

    bytes = 0

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong
        self.recorded: list[str] = []

    def capture(self, call: Callable, inputs: torch.Tensor, like: list, what: str) -> Any:
        self.recorded.append(what)
        stale, wrong = call(inputs), self.wrong

        class Captured:
            def replay(self, inputs: torch.Tensor) -> list[torch.Tensor]:
                return stale if wrong else call(inputs)

            def spoil(self) -> None:
                """Nothing is kept."""

        return Captured()


def cpu_walk(tmp_path: Path, graphs: KeptOutputs, **options: Any) -> GraphWalk:
    target = assembled(small_project(tmp_path)).targets[0]
    lane = lane_on("cpu")
    kept: Any = graphs
    return GraphWalk(target, lane, Serializer("none"), Options(**options), kept)


def test_shapes_beyond_the_limit_run_eagerly_and_are_counted(tmp_path: Path) -> None:
    graphs = KeptOutputs()
    walk = cpu_walk(tmp_path, graphs, shapes=2)
    for rows, length in [(2, 32), (2, 32), (1, 64), (3, 16)]:
        walk.prepare(rows, length)
    assert [what.split(" of ")[1] for what in graphs.recorded] == [
        "2 × 32 tokens on target.0@cpu",
        "1 × 64 tokens on target.0@cpu",
    ]
    assert not walk.eager, "getting ready is no forward of the run"
    for shape in [(2, 32), (3, 16), (3, 16), (5, 8)]:
        ids = torch.randint(0, 90, shape)
        assert equal(walk(ids), walk.inner.forward_taps(ids))
    assert walk.eager == {(3, 16): 2, (5, 8): 1}


def test_a_full_pool_records_no_more(tmp_path: Path) -> None:
    graphs = KeptOutputs()
    walk = cpu_walk(tmp_path, graphs, memory_gb=0.001)
    walk.prepare(2, 32)
    graphs.bytes = 2_000_000
    walk.prepare(1, 32)
    assert list(walk.captured) == [(2, 32)]


def test_a_replay_with_other_bits_is_an_error_that_names_shape_and_lane(tmp_path: Path) -> None:
    walk = cpu_walk(tmp_path, KeptOutputs(wrong=True))
    message = r"2 × 32 tokens on target.0@cpu, recorded .* other bits .* in tap 0.*same bits every time"
    with pytest.raises(DifferenceFound, match=message):
        walk.prepare(2, 32)
    assert not walk.captured


def test_rows_of_a_run_count_forwards_without_a_graph(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    parts = assembled(project, 'devices={targets = ["cpu"], drafters = ["cpu"]}')
    graphs: Any = KeptOutputs()
    walk = GraphWalk(parts.targets[0], lane_on("cpu"), Serializer("none"), Options(), graphs)
    shapes = parts.plan.train.statistics().shapes
    walk.prepare(*shapes[-1])
    parts.targets[0] = attrs.evolve(parts.targets[0], walk=walk)
    lanes = open_run_lanes(parts)
    rows: list[dict] = []
    lanes.train(0, 3, rows.append)
    batches = [parts.plan.train.micro_batch(index) for index in range(6)]
    expected = sum(tuple(batch.input_ids.shape) != shapes[-1] for batch in batches)
    assert 0 < sum(row["eager_forwards"] for row in rows) == expected
    assert "target forwards without a graph" in "\n".join(lanes.notices())


def test_a_warm_up_records_every_shape_of_the_run_on_every_lane(tmp_path: Path) -> None:
    on_cpu = 'devices={targets = ["cpu", "cpu"], drafters = ["cpu"]}'
    parts = assembled(small_project(tmp_path), on_cpu)
    for rank, target in enumerate(parts.targets):
        graphs: Any = KeptOutputs()
        walk = GraphWalk(target, lane_on("cpu", rank), Serializer("none"), Options(), graphs)
        parts.targets[rank] = attrs.evolve(target, walk=walk)
    readied = open_run_lanes(parts).warm_up(lambda line: None, kinds=frozenset({"cpu"}))
    shapes = shape_buckets(parts.plan)
    assert [list(walk_of(target).captured) for target in parts.targets] == [shapes.target] * 2
    assert readied is not None and readied.graphs == 2 * len(shapes.target)
    assert f"{readied.graphs} graphs captured" in str(readied)
    tokens = [rows * length for rows, length in shapes.target]
    assert str(shapes).startswith(f"{len(shapes.target)} target shapes of {min(tokens)} to {max(tokens)} ")
    assert shapes.contexts == [1024] and shapes.attention == []


@pytest.mark.gpu
def test_replays_have_the_forwards_bits_for_every_shape_and_any_order(
    tmp_path: Path, serializer: Serializer
) -> None:
    lane = lane_on("cuda:0")
    with lane.active():
        bare = hybrid(tmp_path)
    target = wrapped(bare, lane, serializer)
    prepared(target, lane)
    with lane.active():
        for shape in [*SHAPES, *reversed(SHAPES), SHAPES[0]]:
            ids = random_ids(shape, lane.device)
            assert equal(target.forward_taps(ids), bare.forward_taps(ids))
    assert len(walk_of(target).captured) == len(SHAPES) and not walk_of(target).eager
    assert target.kernels()["graphs"].startswith("3 shapes, ")


@pytest.mark.gpu
def test_returned_taps_survive_later_replays(tmp_path: Path, serializer: Serializer) -> None:
    lane = lane_on("cuda:0")
    with lane.active():
        bare = hybrid(tmp_path)
    target = wrapped(bare, lane, serializer)
    prepared(target, lane)
    with lane.active():
        ids = random_ids(SHAPES[0], lane.device)
        taps = target.forward_taps(ids)
        for shape in SHAPES * 3:
            target.forward_taps(random_ids(shape, lane.device))
        assert equal(taps, bare.forward_taps(ids))


@pytest.mark.gpu
def test_a_thread_on_another_stream_gets_whole_taps(tmp_path: Path, serializer: Serializer) -> None:
    lane = lane_on("cuda:0")
    with lane.active():
        bare = hybrid(tmp_path)
    target = wrapped(bare, lane, serializer)
    prepared(target, lane)
    lane.synchronize()
    other = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(other):
        for _ in range(20):
            ids = random_ids(SHAPES[0], lane.device)
            assert equal(target.forward_taps(ids), bare.forward_taps(ids))


@pytest.mark.gpu
def test_unknown_shapes_run_eagerly_and_right(tmp_path: Path, serializer: Serializer) -> None:
    lane = lane_on("cuda:0")
    with lane.active():
        bare = hybrid(tmp_path)
    target = wrapped(bare, lane, serializer, shapes=1)
    prepared(target, lane)
    with lane.active():
        for shape in SHAPES:
            ids = random_ids(shape, lane.device)
            assert equal(target.forward_taps(ids), bare.forward_taps(ids))
    assert walk_of(target).eager == {shape: 1 for shape in SHAPES[1:]}


@pytest.mark.gpu
def test_what_cannot_be_recorded_is_an_error_that_names_the_shape(
    tmp_path: Path, serializer: Serializer
) -> None:
    lane = lane_on("cuda:0")

    def waits(ids: torch.Tensor) -> list[torch.Tensor]:
        return [torch.full((2, 4), float(ids.sum().item()), device=ids.device)]

    with lane.active():
        ids = random_ids((2, 64), lane.device)
        with pytest.raises(EngineError, match="a forward of 2 × 64 cannot be recorded as a CUDA graph: "):
            LaneGraphs(lane, serializer).capture(waits, ids, waits(ids), "a forward of 2 × 64")


def replaying(target: Target, bare: Target, lane: Lane, rounds: int) -> Callable[[], list[str]]:
    def work() -> list[str]:
        wrong = []
        for number in range(rounds):
            shape = SHAPES[number % len(SHAPES)]
            ids = random_ids(shape, lane.device)
            if not equal(target.forward_taps(ids), bare.forward_taps(ids)):
                wrong.append(f"round {number}, {shape}")
        return wrong

    return work


def disturbing(lane: Lane, rounds: int) -> Callable[[], list[str]]:
    """Allocates, frees, launches and waits for its own stream, as a drafter beside the target does."""

    def work() -> list[str]:
        for number in range(rounds):
            size = 1 + number % 7
            tensors = [torch.full((size, 1 << 20), 0.5, device=lane.device) for _ in range(4)]
            sum(tensor.sin().sum() for tensor in tensors).item()
            del tensors
        return []

    return work


def tuning(lane: Lane, rounds: int) -> Callable[[], list[str]]:
    """Launches an autotuned kernel with keys that nobody has met."""

    def work() -> list[str]:
        operation = load_operations()["cumulative-decay"]
        for batch in range(1, rounds + 1):
            operation(Form(batch, 64, "float32"), lane.device)
        return []

    return work


def compiling(lane: Lane, serializer: Serializer) -> Callable[[], list[str]]:
    def work() -> list[str]:
        for size in range(3):
            with serializer.compiling(lane):
                compiled = torch.compile(lambda x, size=size: (x * (size + 2)).sin() + size, dynamic=False)
                compiled(torch.ones(64 + size, device=lane.device))
        return []

    return work


@pytest.mark.gpu
def test_two_lanes_of_one_gpu_replay_beside_one_that_compiles_and_one_that_allocates(
    tmp_path: Path, serializer: Serializer
) -> None:
    lanes = [lane_on("cuda:0", index) for index in range(2)]
    with lanes[0].active():
        bare = hybrid(tmp_path)
    targets = [wrapped(bare, lane, serializer) for lane in lanes]
    for target, lane in zip(targets, lanes, strict=True):
        prepared(target, lane)
    others = [Lane(LaneSpec("drafter", index, "cuda:0")) for index in range(2)]
    found = side_by_side(
        {
            **{lane: replaying(t, bare, lane, 200) for t, lane in zip(targets, lanes, strict=True)},
            others[0]: compiling(others[0], serializer),
            others[1]: disturbing(others[1], 300),
        },
        "test",
    )
    assert all(wrong == [] for wrong in found.values())


@pytest.mark.gpu
def test_recording_beside_lanes_that_launch_allocate_and_tune(tmp_path: Path, serializer: Serializer) -> None:
    lanes = [lane_on("cuda:0", index) for index in range(2)]
    others = [Lane(LaneSpec("drafter", index, "cuda:0")) for index in range(2)]
    with lanes[0].active():
        bare = hybrid(tmp_path)
    targets = [wrapped(bare, lane, serializer) for lane in lanes]
    prepared(targets[0], lanes[0])

    def recording() -> list[str]:
        for rows, length in [*SHAPES, (3, 64), (1, 320)]:
            walk_of(targets[1]).prepare(rows, length)
        return []

    found = side_by_side(
        {
            lanes[0]: replaying(targets[0], bare, lanes[0], 100),
            lanes[1]: recording,
            others[0]: disturbing(others[0], 150),
            others[1]: tuning(others[1], 12),
        },
        "test",
    )
    assert all(wrong == [] for wrong in found.values())
    with lanes[1].active():
        assert replaying(targets[1], bare, lanes[1], 20)() == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_lanes_of_two_gpus_record_and_replay_side_by_side(tmp_path: Path, serializer: Serializer) -> None:
    lanes = [lane_on("cuda:0", 0), lane_on("cuda:1", 1)]
    with lanes[0].active():
        bare = [hybrid(tmp_path)]
    bare.append(copy_target(bare[0], torch.device("cuda:1")))
    targets = [wrapped(one, lane, serializer) for one, lane in zip(bare, lanes, strict=True)]

    def work(number: int) -> Callable[[], list[str]]:
        def recorded() -> list[str]:
            for rows, length in SHAPES:
                walk_of(targets[number]).prepare(rows, length)
            return replaying(targets[number], bare[number], lanes[number], 200)()

        return recorded

    found = side_by_side({lane: work(number) for number, lane in enumerate(lanes)}, "test")
    assert all(wrong == [] for wrong in found.values())


@pytest.mark.gpu
def test_graphs_of_a_lane_share_their_memory(tmp_path: Path, serializer: Serializer) -> None:
    lane = lane_on("cuda:0")
    with lane.active():
        target = wrapped(hybrid(tmp_path), lane, serializer)
        walk = walk_of(target)
        walk.prepare(16, 512)
        first = walk.graphs.bytes
        for rows in (15, 14, 13, 12):
            walk.prepare(rows, 512)
    assert walk.graphs.bytes < 1.5 * first


@pytest.mark.gpu
@pytest.mark.parametrize("fused", ["never", "auto"])
def test_a_run_on_lanes_replays_what_its_warm_up_recorded(tmp_path: Path, fused: str) -> None:
    project = small_project(tmp_path)
    write_config(tmp_path / "target", **WIDER)
    plugins = f'[[plugin]]\nuse = "plugins.fused_target"\non = "{fused}"\n'
    project.write_text(project.read_text() + plugins + '[[plugin]]\nuse = "plugins.graph_target"\n')
    on_gpu = ('devices={targets = ["cuda:0", "cuda:0"], drafters = ["cuda:0"]}', "drafter.attention=dense")
    lanes = open_run_lanes(assembled(project, *on_gpu, "target.dtype=bfloat16"))
    lines: list[str] = []
    readied = lanes.warm_up(lines.append)
    assert readied is not None and readied.graphs == 2 * readied.forwards
    rows: list[dict] = []
    lanes.train(0, 4, rows.append)
    assert [row["eager_forwards"] for row in rows] == [0] * 4
