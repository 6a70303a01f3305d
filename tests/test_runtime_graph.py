"""A graph that cannot run is refused with a sentence; one that can gives every micro-batch its lanes."""

import ast
from pathlib import Path

import attrs
import pytest

import engine.runtime
from engine.errors import InputError
from engine.runtime.graph import GraphError, LaneSpec, StageSpec, build_graph

STAGES = (
    StageSpec("target-forward", "target", exclusive="target-forward"),
    StageSpec("pack", "target", after=("target-forward",)),
    StageSpec("transfer", "drafter", after=("pack",), depth=2),
    StageSpec("drafter-fwd-bwd", "drafter", after=("transfer",)),
    StageSpec("optimizer", "drafter", after=("drafter-fwd-bwd",), barrier=True),
)


def lanes(targets=2, drafters=2):
    return [
        *(LaneSpec("target", index, "cpu") for index in range(targets)),
        *(LaneSpec("drafter", index, "cpu") for index in range(drafters)),
    ]


def with_stage(name, **changes):
    return [attrs.evolve(stage, **changes) if stage.name == name else stage for stage in STAGES]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (with_stage("target-forward", after=("pack",)), "pack → target-forward → pack wait for each other"),
        (with_stage("pack", after=("pack",)), "pack → pack wait for each other"),
        (with_stage("pack", role="reader"), 'stage pack: lane = "reader" is unknown'),
        ([*STAGES, STAGES[1]], "stage pack: named 2 times"),
        (with_stage("pack", after=("tokenize",)), "comes after tokenize, and there is no such stage"),
        (with_stage("optimizer", barrier=False), "barrier stages: none"),
        (with_stage("transfer", barrier=True, depth=None), "barrier stages: transfer, optimizer"),
        (
            [*STAGES[:4], StageSpec("sum", "target", after=("pack",), barrier=True)],
            "stage sum: a barrier holds the drafter lanes together",
        ),
        (
            [*STAGES, StageSpec("log", "drafter", after=("optimizer",))],
            "stage log comes after the barrier optimizer, which must be the last",
        ),
        (
            [*STAGES, StageSpec("score", "target", after=("transfer",))],
            "stage score runs on the target lanes after transfer on the drafter lanes",
        ),
        (with_stage("transfer", depth=0), "stage transfer: depth = 0"),
        (with_stage("pack", depth=1), "stage pack: depth says how many micro-batches wait for a drafter"),
        (with_stage("drafter-fwd-bwd", depth=1), "stages transfer, drafter-fwd-bwd: each has a depth"),
        (with_stage("optimizer", exclusive="update"), "would stop it for good"),
        (STAGES[2:4] + STAGES[4:], "no stage per micro-batch runs on the target lanes"),
    ],
)
def test_stages_that_cannot_run_are_refused_by_name(stages, message):
    with pytest.raises(GraphError) as caught:
        build_graph(stages, lanes(), 2)
    assert message in str(caught.value)
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("specs", "micro_batches", "message"),
    [
        (lanes(targets=0), 2, "no target lane"),
        (lanes(drafters=0), 2, "no drafter lane"),
        (lanes(drafters=3), 2, "3 drafter lanes share 2 micro-batches per step"),
        ([*lanes(), LaneSpec("target", 1, "cpu")], 2, "lane target.1: named 2 times"),
        ([*lanes(), LaneSpec("reader", 0, "cpu")], 2, 'role "reader" is unknown'),
        (lanes(drafters=1), 0, "micro_batches = 0"),
    ],
)
def test_lanes_that_cannot_run_are_refused_by_name(specs, micro_batches, message):
    with pytest.raises(GraphError) as caught:
        build_graph(STAGES, specs, micro_batches)
    assert message in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(GraphError) as caught:
        build_graph(with_stage("transfer", depth=0), lanes(targets=0), 2)
    assert len(str(caught.value).splitlines()) == 2


def test_stages_are_brought_into_the_order_of_the_flow():
    graph = build_graph(STAGES[::-1], lanes(), 2)
    assert graph.stages == STAGES
    assert [stage.name for stage in graph.target_stages] == ["target-forward", "pack"]
    assert [stage.name for stage in graph.drafter_stages] == ["transfer", "drafter-fwd-bwd"]
    assert graph.barrier.name == "optimizer"
    assert graph.depth == 2


def test_a_stage_written_last_runs_where_its_edges_put_it():
    extra = StageSpec("check", "target", after=("pack",))
    names = [stage.name for stage in build_graph([*STAGES, extra], lanes(), 2).stages]
    assert names == ["target-forward", "pack", "check", "transfer", "drafter-fwd-bwd", "optimizer"]


@pytest.mark.parametrize(("targets", "drafters", "micro_batches"), [(1, 1, 1), (5, 3, 4), (2, 3, 6)])
def test_every_micro_batch_has_one_target_and_one_drafter_lane(targets, drafters, micro_batches):
    graph = build_graph(STAGES, lanes(targets, drafters), micro_batches)
    numbers = range(3 * micro_batches, 7 * micro_batches)
    for i in numbers:
        assert graph.target_lane_of(i).index == i % targets
        assert graph.drafter_lane_of(i).index == (i % micro_batches) % drafters
    for role in (graph.target_lanes, graph.drafter_lanes):
        per_lane = [graph.micro_batches_of(lane, 3, 7) for lane in role]
        assert sorted(sum(per_lane, [])) == list(numbers)
        assert all(numbers == sorted(numbers) for numbers in per_lane)


def test_a_lane_is_named_by_role_number_and_device():
    assert LaneSpec("target", 0, "cuda:0").name == "target.0@cuda:0"


def test_the_runtime_knows_nothing_of_what_it_runs():
    """Of the engine it imports itself, the errors and how files are written whole, which know nothing
    of training either; what else it needs is torch's, Triton's and Python's."""
    for file in Path(engine.runtime.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}: relative import"
                names = [str(node.module)]
            for name in names:
                if name.split(".")[0] in ("engine", "plugins"):
                    known = name in ("engine.errors", "engine.whole_files")
                    assert known or name.startswith("engine.runtime."), f"{file.name}: {name}"
