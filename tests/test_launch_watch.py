"""What no warm-up foresaw is counted in its step's row and named in the log, and nothing else is."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_runs import assembled, small_project
from tuned_kernels import tuner

from engine.lanes import RunLanes, open_run_lanes
from engine.launch_watch import LaunchWatch, graphs_compiled
from engine.runtime.failure import Place
from engine.runtime.serializer import Serializer

LANE = "target.0@cpu"
PLACE = Place(stage="target-forward", micro_batch=4, step=2)


@pytest.fixture
def serializer() -> Iterator[Serializer]:
    made = Serializer("tune")
    made.install()
    yield made
    made.uninstall()


def tune(key: int, thread: str) -> None:
    """Launch a kernel with a key that it has not met, in a thread of that name."""
    worker = threading.Thread(target=lambda: tuner().run(0, 0, key, grid=(1,)), name=thread)
    worker.start()
    worker.join(30)
    assert not worker.is_alive()


def compile_something() -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(3))


def test_a_key_tuned_within_a_step_is_counted_once_and_named_with_its_place(serializer: Serializer) -> None:
    watch = LaunchWatch(serializer, lambda: {LANE: PLACE})
    tune(7, LANE)
    tune(8, "an evaluation")
    assert watch.step() == {"cold_keys": 2, "recompiles": 0}
    assert watch.step() == {"cold_keys": 0, "recompiles": 0}
    lines = watch.notices()
    assert [line.replace("0.1 s", "0.0 s") for line in lines] == [
        f"tuned scale (7,) in 0.0 s, unforeseen, at target-forward, micro-batch 4, step 2 on {LANE}",
        "tuned scale (8,) in 0.0 s, unforeseen, at an evaluation",
    ]
    assert watch.notices() == []


def test_graphs_compiled_within_a_step_are_counted_once_and_named(serializer: Serializer) -> None:
    compile_something()  # before the watch begins
    watch = LaunchWatch(serializer, dict)
    assert watch.step() == {"cold_keys": 0, "recompiles": 0}
    before = graphs_compiled()
    compile_something()
    compile_something()
    assert graphs_compiled() == before + 2
    assert watch.step() == {"cold_keys": 0, "recompiles": 2}
    assert watch.step() == {"cold_keys": 0, "recompiles": 0}
    assert watch.notices() == ["compiled 2 graphs, unforeseen"]
    assert watch.notices() == []


def test_what_came_before_the_count_began_anew_is_in_no_row(serializer: Serializer) -> None:
    tune(6, LANE)
    watch = LaunchWatch(serializer, dict)
    assert watch.step() == {"cold_keys": 0, "recompiles": 0}
    tune(7, LANE)
    compile_something()
    watch.begin()
    assert watch.step() == {"cold_keys": 0, "recompiles": 0}
    assert len(watch.notices()) == 1, "the key is named all the same"


def lanes_with(project: Path, forward: Callable[[int], None]) -> RunLanes:
    """Lanes one of whose micro-batches does something before its forward."""
    lanes = open_run_lanes(assembled(project, 'devices={targets = ["cpu"], drafters = ["cpu"]}'))
    inner = lanes.scheduler._works["target-forward"]

    def work(lane, micro_batch, cargo):
        forward(micro_batch)
        return inner(lane, micro_batch, cargo)

    lanes.scheduler._works = {**lanes.scheduler._works, "target-forward": work}
    return lanes


def test_rows_of_a_run_have_what_its_steps_tuned_and_not_what_an_evaluation_did(tmp_path: Path) -> None:
    def forward(micro_batch: int) -> None:
        if micro_batch in (2, 6):  # the first ones of the second and of the fourth step
            tuner().run(0, 0, micro_batch, grid=(1,))

    lanes = lanes_with(small_project(tmp_path), forward)
    tune(100, "a warm-up")
    lanes.notices()
    rows: list[dict] = []
    lanes.train(0, 2, rows.append)
    tune(101, "an evaluation")
    compile_something()
    lanes.train(2, 3, rows.append)
    lanes.train(3, 4, rows.append)
    # A step's forward may be ahead of the row before it, never behind its own.
    assert rows[0]["cold_keys"] + rows[1]["cold_keys"] == 1
    assert [(row["cold_keys"], row["recompiles"]) for row in rows[2:]] == [(0, 0), (1, 0)]
    lines = lanes.notices()
    assert [line.partition(" at ")[2] for line in lines] == [
        f"target-forward, micro-batch 2, step 2 on {LANE}",
        "an evaluation",
        f"target-forward, micro-batch 6, step 4 on {LANE}",
    ]
    assert lanes.notices() == []
