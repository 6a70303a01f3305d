"""Everything a run will launch is got ready before its first step, and nothing of it is left behind."""

import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import VOCAB, assembled, plain_loop, small_project
from test_lanes import exactly, lanes_of
from tuned_kernels import one_call, tuner

from engine.data.batches import BatchPlan
from engine.data.documents import open_documents
from engine.data.shards import write_documents
from engine.dflash.packing import pack_row, packed_length
from engine.errors import EngineError, NonFinite, OutOfMemory
from engine.lanes import RunLanes, open_run_lanes
from engine.plain import train_step
from engine.runtime.alone import run_alone
from engine.runtime.failure import StageFailure
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.training_parts import pack_micro_batch
from engine.warm_up import Readied, made_up, packed_rows, target_shapes

EVERYWHERE = frozenset({"cpu", "cuda"})
TWO_LENGTHS = ["data.token_budget=2400", "data.length_bucket=96"]
"""Micro-batches of this project pack into rows of 1024 and of 2048 then."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


def batches(folder: Path, lengths: list[int], budget: int, bucket: int) -> BatchPlan:
    rows = [([7 + number % 50] * length, [0] + [1] * (length - 1)) for number, length in enumerate(lengths)]
    write_documents(folder, rows, vocab_size=VOCAB)
    return BatchPlan(
        open_documents(folder), token_budget=budget, max_length=4096, length_bucket=bucket, seed=5
    )


@given(
    lengths=st.lists(st.integers(2, 700), min_size=1, max_size=30),
    budget=st.sampled_from([768, 2048, 5000]),
    bucket=st.sampled_from([1, 64, 256]),
)
def test_no_epoch_brings_a_packed_row_that_was_not_made_ready(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], budget: int, bucket: int
) -> None:
    plan = batches(tmp_path_factory.mktemp("rows"), lengths, budget, bucket)
    ready = {
        pack_row(batch.input_ids, batch.loss_mask, batch.lengths, batch.document_ids).length
        for batch in packed_rows(plan)
    }
    ranges = plan.token_ranges()
    for index in range(3 * plan.per_epoch):
        batch = plan.micro_batch(index)
        fewest, most = ranges[batch.input_ids.shape[0], batch.input_ids.shape[1]]
        assert fewest <= batch.tokens <= most
        assert packed_length(batch.tokens) in ready


def test_a_made_up_micro_batch_has_the_tokens_it_is_asked_for() -> None:
    batch = made_up(3, 64, 100)
    assert batch.lengths.tolist() == [34, 33, 33] and batch.tokens == 100
    assert batch.loss_mask.sum() == 97 and not batch.loss_mask[:, 0].any()
    assert np.array_equal(batch.loss_mask.sum(1).numpy() + 1, batch.lengths.numpy())


def test_target_shapes_are_those_of_training_and_evaluation_the_largest_first(project: Path) -> None:
    parts = assembled(project)
    assert parts.plan.held_out is not None
    expected = {*parts.plan.train.statistics().shapes, *parts.plan.held_out.statistics().shapes}
    shapes = target_shapes(parts)
    assert set(shapes) == expected and len(shapes) == len(expected)
    assert shapes[0][0] * shapes[0][1] == max(rows * length for rows, length in shapes)


def ready_lanes(project: Path, *overrides: str) -> tuple[RunLanes, list[str]]:
    lanes = open_run_lanes(assembled(project, *overrides))
    lines: list[str] = []
    readied = lanes.warm_up(lines.append, kinds=EVERYWHERE)
    assert readied is not None and readied.packed_rows == 1 and readied.tuned == 0
    return lanes, lines


def test_a_run_after_a_warm_up_is_the_run_without_one(project: Path) -> None:
    lanes, lines = ready_lanes(project)
    assert [line.split(",")[0] for line in lines] == [
        "drafter.0@cpu: drafter ready for packed rows of 1024",
        "drafter.1@cpu: drafter ready for packed rows of 1024",
    ][: len(lines)]
    rows: list[dict] = []
    lanes.train(0, 2, rows.append)
    expected = [train_step(plain_loop(project), step) for step in range(1)]
    for key in ("loss", "tokens", "anchors", "padding", "skipped"):
        assert rows[0][key] == pytest.approx(expected[0][key], rel=1e-6)
    assert [row["cold_keys"] for row in rows] == [0, 0]


def test_lanes_on_a_cpu_have_nothing_to_get_ready(project: Path) -> None:
    assert open_run_lanes(assembled(project)).warm_up(print) is None


def test_a_warm_up_runs_in_the_lanes_own_threads_one_at_a_time(project: Path) -> None:
    lanes = open_run_lanes(assembled(project))
    seen: list[tuple[str, int]] = []
    drafter = lanes.warming.drafter
    assert drafter is not None
    inner = drafter.parts.recipe.weights
    names = {lane.name for lane in lanes.scheduler.graph.lanes}

    def weights(*args: torch.Tensor) -> torch.Tensor:
        seen.append(
            (threading.current_thread().name, sum(thread.name in names for thread in threading.enumerate()))
        )
        return inner(*args)

    object.__setattr__(drafter.parts.recipe, "weights", weights)
    lanes.warm_up(lambda line: None, kinds=EVERYWHERE)
    assert {name for name, _ in seen} == {lane.name for lane in lanes.scheduler.graph.drafter_lanes}
    assert {alive for _, alive in seen} == {1}


def three_steps(project: Path, warm: bool) -> tuple[list[dict], dict[str, torch.Tensor]]:
    parts = assembled(project, *lanes_of(2, 2, 1, 2), *TWO_LENGTHS)
    lanes = open_run_lanes(parts)
    if warm:
        readied = lanes.warm_up(lambda line: None, kinds=EVERYWHERE)
        assert readied is not None and readied.packed_rows == 2
    rows: list[dict] = []
    lanes.train(0, 3, rows.append)
    return rows, parts.masters


def test_a_warm_up_leaves_no_bit_behind_in_rows_or_masters(project: Path) -> None:
    warm, cold = three_steps(project, True), three_steps(project, False)
    assert all(row["grad_norm"] > 0 for row in cold[0])
    exactly(warm, cold)


def with_forwards(lanes: RunLanes, forward: Callable[[str, torch.Tensor], None]) -> RunLanes:
    """The same lanes, whose targets do something else: `forward` gets lane and ids."""
    assert lanes.warming.forward is not None
    targets = {
        name: SimpleNamespace(forward_taps=lambda ids, name=name: forward(name, ids))
        for name in lanes.warming.forward.targets
    }
    stage = attrs.evolve(lanes.warming.forward, targets=targets)
    return attrs.evolve(lanes, warming=attrs.evolve(lanes.warming, forward=stage))


def test_every_drafter_lane_runs_every_packed_row_and_each_device_its_targets_shapes(project: Path) -> None:
    parts = assembled(project, *lanes_of(4, 2, 1, 2), *TWO_LENGTHS)
    ran: list[tuple[str, tuple[int, ...], str]] = []
    lanes = with_forwards(
        open_run_lanes(parts),
        lambda name, ids: ran.append((name, tuple(ids.shape), f"{ids.device.type} {ids.dtype}")),
    )
    for number in (2, 3):  # a second device, and nobody computes there
        lanes.warming.lanes[f"target.{number}@cpu"].device = torch.device("meta")
    lines: list[str] = []
    readied = lanes.warm_up(lines.append, kinds=EVERYWHERE | {"meta"})
    shapes = target_shapes(parts)
    assert len(shapes) > 1
    assert ran == [("target.0@cpu", shape, "cpu torch.int64") for shape in shapes] + [
        ("target.2@cpu", shapes[0], "meta torch.int64")
    ]
    assert [line.rpartition(",")[0] for line in lines] == [
        f"drafter.{number}@cpu: drafter ready for packed rows of {length}"
        for number in range(2)
        for length in (2048, 1024)
    ]
    assert readied is not None and (readied.forwards, readied.packed_rows) == (len(shapes), 2)


def test_drafters_get_taps_as_the_target_makes_them(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = open_run_lanes(assembled(project, "target.dtype=bfloat16"))
    found: list[tuple[int, set[torch.dtype], set[torch.Size]]] = []

    def packing(parts, batch, taps):
        found.append(
            (len(taps), {one.dtype for one in taps}, {one.shape[:2] == batch.input_ids.shape for one in taps})
        )
        assert all(one.shape[2] == 32 and one.count_nonzero() for one in taps)
        return pack_micro_batch(parts, batch, taps)

    monkeypatch.setattr("engine.warm_up.pack_micro_batch", packing)
    lanes.warm_up(lambda line: None, kinds=EVERYWHERE)
    assert found and all(one == (3, {torch.bfloat16}, {True}) for one in found)


def test_keys_tuned_by_a_warm_up_are_told_and_counted_once_with_second_tries(project: Path) -> None:
    short = iter([True])

    def benchmark(call, quantiles):
        if next(short, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return one_call(call, quantiles)

    kernel = tuner(benchmark=benchmark)
    lanes = with_forwards(
        open_run_lanes(assembled(project)), lambda name, ids: kernel.run(0, 0, 7, grid=(1,))
    )
    lanes.serializer.fallback = "launches take turns: this Triton is built otherwise"
    tuner().run(0, 0, 5, grid=(1,))  # an earlier key is none of the warm-up's
    assert lanes.notices()
    lines: list[str] = []
    readied = lanes.warm_up(lines.append, kinds=EVERYWHERE)
    assert lines[0] == lanes.serializer.fallback
    assert [line.rpartition(",")[0] for line in lines if "tuned" in line] == ["tuned scale (7,)"]
    assert readied is not None and (readied.tuned, readied.retries) == (1, 1)
    assert "1 keys tuned" in str(readied) and "1 tunings ran out of memory" in str(readied)
    assert not lanes.notices(), "foreseen, and told by the warm-up"
    again = lanes.warm_up(lines.append, kinds=EVERYWHERE)
    assert again is not None and (again.tuned, again.retries) == (0, 0)
    assert "ran out of memory" not in str(again)


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_warm_up_cold_keys_are_the_watchs_again(project: Path, fails: bool) -> None:
    def forward(name: str, ids: torch.Tensor) -> None:
        if fails:
            raise KeyError(name)

    lanes = with_forwards(open_run_lanes(assembled(project)), forward)
    before = lanes.serializer.on_cold
    assert before is not None
    try:
        lanes.warm_up(lambda line: None, kinds=EVERYWHERE)
    except StageFailure:
        assert fails
    assert lanes.serializer.on_cold == before
    tuner().run(0, 0, 9, grid=(1,))
    assert "tuned scale (9,)" in lanes.notices()[0]


@pytest.mark.parametrize(("error", "advised"), [(OutOfMemory("full"), True), (NonFinite("nan"), False)])
def test_a_warm_up_without_memory_ends_with_the_schedule_lines_that_lower_it(
    project: Path, error: Exception, advised: bool
) -> None:
    def forward(name: str, ids: torch.Tensor) -> None:
        raise error

    lanes = with_forwards(open_run_lanes(assembled(project)), forward)
    with pytest.raises(StageFailure, match="warm-up on target.0@cpu: ") as caught:
        lanes.warm_up(lambda line: None, kinds=EVERYWHERE)
    assert caught.value.exit_code == type(error).exit_code
    assert ("\n  - lower data.token_budget (256)" in str(caught.value)) == advised


def test_each_lane_compiles_each_length_in_its_turn_and_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has compiled code of its own: what the first lane has met is new to the second."""
    parts = assembled(project, *lanes_of(1, 2, 1, 2), *TWO_LENGTHS)
    recipe = attrs.evolve(parts.recipe, backend="flex")
    lanes = open_run_lanes(attrs.evolve(parts, plan=attrs.evolve(parts.plan, recipe=recipe)))
    turns: list[str] = []
    inner = lanes.serializer.compiling
    monkeypatch.setattr(lanes.serializer, "compiling", lambda lane: (turns.append(lane.name), inner(lane))[1])
    monkeypatch.setattr("engine.stages.drafter_fwd_bwd.forward_backward", lambda *work: None)
    lanes.warm_up(lambda line: None, kinds=EVERYWHERE)
    assert turns == ["drafter.0@cpu"] * 2 + ["drafter.1@cpu"] * 2
    lanes.warm_up(lambda line: None, kinds=EVERYWHERE)
    assert len(turns) == 4


def test_a_warm_up_says_what_it_came_to() -> None:
    assert str(Readied(3, 2, 5, 0, 1.25)) == (
        "warm-up: 3 target shapes, 2 lengths of packed rows, 5 keys tuned, 1.2 s"
    )


# One lane at work alone


@pytest.mark.parametrize(
    ("error", "code"),
    [(NonFinite("nan"), 4), (torch.OutOfMemoryError("CUDA out of memory"), 3), (KeyError(1), 1)],
)
def test_what_fails_alone_names_the_lane_and_keeps_its_exit_code(error: Exception, code: int) -> None:
    lane = Lane(LaneSpec("target", 0, "cpu"))

    def work() -> None:
        raise error

    with pytest.raises(StageFailure, match="warm-up on target.0@cpu: ") as caught:
        run_alone(lane, "warm-up", work, [lane])
    assert caught.value.exit_code == code and caught.value.__cause__ is error


def one_lane() -> Lane:
    return Lane(LaneSpec("target", 0, "cpu"))


def test_work_alone_is_in_the_callers_context_in_a_thread_of_the_lane_until_the_device_is_through() -> None:
    lane, setting = one_lane(), contextvars.ContextVar("setting", default="unset")
    setting.set("by the caller")
    calls: list[tuple[str, str, str]] = []

    def at(what: str) -> None:
        calls.append((what, threading.current_thread().name, setting.get()))
        setting.set("by the lane")

    lane.synchronize = lambda: at("synchronised")  # type: ignore[method-assign]
    run_alone(lane, "warm-up", lambda: at("worked"), [lane])
    assert calls == [
        ("worked", lane.name, "by the caller"),
        ("synchronised", lane.name, "by the lane"),
    ]
    assert setting.get() == "by the caller"


def test_work_alone_has_the_lane_to_itself() -> None:
    lane, refused = one_lane(), []

    def work() -> None:
        def other() -> None:
            with pytest.raises(EngineError, match="at work in another thread"), lane.active():
                pass
            refused.append(True)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)

    run_alone(lane, "warm-up", work, [lane])
    assert refused == [True]
    with lane.active(), pytest.raises(StageFailure, match="target.0@cpu is at work in another thread"):
        run_alone(lane, "warm-up", lambda: None, [lane])


def test_spans_that_a_failure_alone_left_open_are_forgotten() -> None:
    lane = one_lane()

    def work() -> None:
        lane.begin("compile", micro_batch=None, step=None)
        raise NonFinite("nan")

    with pytest.raises(StageFailure):
        run_alone(lane, "warm-up", work, [lane])
    assert not lane._spans


@pytest.mark.parametrize(("error", "asked"), [(OutOfMemory("full"), True), (NonFinite("nan"), False)])
def test_memory_that_runs_out_alone_is_told_by_all_lanes_in_the_lanes_thread(
    monkeypatch: pytest.MonkeyPatch, error: Exception, asked: bool
) -> None:
    lane, other = one_lane(), Lane(LaneSpec("drafter", 0, "cpu"))
    readings: list[tuple[str, list[Lane]]] = []

    def held(lanes: list[Lane]) -> list[str]:
        readings.append((threading.current_thread().name, lanes))
        return ["cuda:0: drafter.0@cuda:0 7.00 GB"]

    def work() -> None:
        raise error

    monkeypatch.setattr("engine.runtime.failure.held_memory", held)
    with pytest.raises(StageFailure) as caught:
        run_alone(lane, "warm-up", work, [lane, other])
    story = "\nwho held memory then:\n  cuda:0: drafter.0@cuda:0 7.00 GB"
    assert (story in str(caught.value)) == asked
    assert readings == ([(lane.name, [lane, other])] if asked else [])


def test_a_reading_of_memory_that_fails_hides_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, error = one_lane(), torch.OutOfMemoryError("CUDA out of memory")

    def held(lanes: list[Lane]) -> list[str]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def work() -> None:
        raise error

    monkeypatch.setattr("engine.runtime.failure.held_memory", held)
    with pytest.raises(StageFailure, match="not known, for reading it failed: RuntimeError: CUDA") as caught:
        run_alone(lane, "warm-up", work, [lane])
    assert caught.value.exit_code == 3 and caught.value.__cause__ is error


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_exception_without_words_alone_is_a_failure_all_the_same() -> None:
    lane = one_lane()

    def work() -> None:
        raise Mute

    with pytest.raises(StageFailure, match="Mute: .its message cannot be read"):
        run_alone(lane, "warm-up", work, [lane])


def test_a_thread_that_ends_without_a_word_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = one_lane()
    lost = SimpleNamespace(copy_context=lambda: SimpleNamespace(run=lambda worker: None))
    monkeypatch.setattr("engine.runtime.alone.contextvars", lost)
    with pytest.raises(EngineError, match="warm-up on target.0@cpu: its thread ended before"):
        run_alone(lane, "warm-up", lambda: None, [lane])
