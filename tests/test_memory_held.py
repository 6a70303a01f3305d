"""Where memory ran out, the failure says who held it and what lowers it."""

import threading
from pathlib import Path

import pytest
import torch
from small_runs import assembled, small_project

from engine.errors import NonFinite
from engine.lanes import open_run_lanes
from engine.runtime.failure import Failure, Place, StageFailure
from engine.runtime.graph import LaneSpec, StageSpec, build_graph
from engine.runtime.lane import Lane
from engine.runtime.memory_held import by_holder, describe, held_memory
from engine.runtime.scheduler import Scheduler
from engine.runtime.serializer import Serializer
from engine.runtime.timing import Timings


def segment(gpu: int, stream: int, active: int, total: int) -> dict[str, int]:
    return {
        "device": gpu,
        "stream": stream,
        "active_size": active,
        "allocated_size": active,
        "total_size": total,
    }


def test_segments_are_added_up_by_lane_the_largest_first() -> None:
    segments = [
        segment(0, 0, 30, 30),
        segment(0, 0, 20, 25),
        segment(0, 11, 90, 95),
        segment(0, 12, 1, 2),
        segment(1, 11, 1000, 1000),
    ]
    held = by_holder(segments, {(0, 11): "target.0@cuda:0", (0, 99): "drafter.0@cuda:0"}, 0)
    assert list(held.items()) == [
        ("target.0@cuda:0", (90, 5)),
        ("loaded before the lanes began", (50, 5)),
        ("stream 0xc", (1, 1)),
    ]


def test_a_holder_is_described_in_gigabytes_and_small_caches_are_left_out() -> None:
    held = {"target.0@cuda:0": (54_000_000_000, 2_500_000_000), "drafter.0@cuda:0": (7_000_000_000, 5)}
    assert describe(held) == "target.0@cuda:0 54.00 GB and 2.50 GB cached; drafter.0@cuda:0 7.00 GB"


def test_lanes_on_a_cpu_hold_nothing_that_could_be_read() -> None:
    assert held_memory([Lane(LaneSpec("target", 0, "cpu"))]) == []


def test_out_of_memory_on_a_lane_ends_with_the_schedule_lines_that_lower_it(tmp_path: Path) -> None:
    parts = assembled(small_project(tmp_path))
    lanes = open_run_lanes(parts)

    def full(lane: Lane, micro_batch: int, cargo: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    lanes.scheduler._works = {**lanes.scheduler._works, "pack": full}
    with pytest.raises(StageFailure, match="pack, micro-batch 0, step 1 on target.0@cpu") as caught:
        lanes.train(0, 1, lambda row: None)
    assert caught.value.exit_code == 3
    assert "what lowers the need:\n" in str(caught.value)
    assert "\n  - lower data.token_budget (256)" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "read"), [(torch.OutOfMemoryError("CUDA out of memory"), True), (NonFinite("nan"), False)]
)
def test_who_held_memory_is_read_of_all_lanes_in_the_lane_that_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, read: bool
) -> None:
    lanes = open_run_lanes(assembled(small_project(tmp_path)))
    readings: list[tuple[str, set[str]]] = []

    def held(lanes: list[Lane]) -> list[str]:
        readings.append((threading.current_thread().name, {lane.name for lane in lanes}))
        return ["cuda:0: target.0@cuda:0 54.00 GB"]

    def full(lane: Lane, micro_batch: int, cargo: object) -> None:
        raise error

    monkeypatch.setattr("engine.runtime.failure.held_memory", held)
    lanes.scheduler._works = {**lanes.scheduler._works, "pack": full}
    with pytest.raises(StageFailure) as caught:
        lanes.scheduler.run(0, 1)
    story = "\nwho held memory then:\n  cuda:0: target.0@cuda:0 54.00 GB"
    assert (story in str(caught.value)) == read
    assert readings[:1] == ([("target.0@cpu", set(lanes.scheduler.lanes))] if read else [])


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), Mute()], ids=["held", "mute"]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_that_cannot_be_read_ends_the_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lanes = open_run_lanes(assembled(small_project(tmp_path)))
    ended: list[BaseException] = []

    def held(lanes: list[Lane]) -> list[str]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(lane: Lane, micro_batch: int, cargo: object) -> None:
        raise error

    def go() -> None:
        try:
            lanes.scheduler.run(0, 2)
        except BaseException as failure:
            ended.append(failure)

    monkeypatch.setattr("engine.runtime.failure.held_memory", held)
    lanes.scheduler._works = {**lanes.scheduler._works, "pack": fail}
    caller = threading.Thread(target=go, daemon=True)
    caller.start()
    caller.join(3)
    hangs, run = caller.is_alive(), lanes.scheduler._run
    if hangs and run is not None:  # let no thread wait on through the tests that follow
        run.news.put(Failure("the test", Place(stage="its end"), NonFinite("hangs")))
        caller.join(10)
    assert not hangs and isinstance(ended[0], StageFailure)
    assert ended[0].__cause__ is error


@pytest.mark.gpu
def test_a_full_gpu_is_told_apart_by_lane() -> None:
    gpu = "cuda:0"
    total = torch.cuda.mem_get_info(0)[1]
    stages = [
        StageSpec("forward", "target"),
        StageSpec("learn", "drafter", ("forward",)),
        StageSpec("update", "drafter", ("learn",), barrier=True),
    ]
    graph = build_graph(stages, [LaneSpec("target", 0, gpu), LaneSpec("drafter", 0, gpu)], 1)
    before = torch.empty(300_000_000, dtype=torch.uint8, device=gpu)
    kept = []

    def forward(lane: Lane, micro_batch: int, cargo: object) -> None:
        kept.append(torch.empty(500_000_000, dtype=torch.uint8, device=gpu))

    def learn(lane: Lane, micro_batch: int, cargo: object) -> None:
        kept.append(torch.empty(200_000_000, dtype=torch.uint8, device=gpu))
        torch.empty(8_000_000_000, dtype=torch.uint8, device=gpu)

    works = {"forward": forward, "learn": learn, "update": lambda lane, step, meeting: None}
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(4_000_000_000 / total, 0)
    try:
        scheduler = Scheduler(graph, works, serializer=Serializer("stage"), timings=Timings())
        with pytest.raises(StageFailure, match="learn, micro-batch 0, step 1 on drafter.0@cuda:0") as caught:
            scheduler.run(0, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        kept.clear()
        del before
        torch.cuda.empty_cache()
    assert caught.value.exit_code == 3
    story = str(caught.value)
    assert "who held memory then:\n  cuda:0: " in story
    assert "target.0@cuda:0 0.5" in story and "drafter.0@cuda:0 0.2" in story
    assert "loaded before the lanes began 0.3" in story
