"""Everything a run will launch is got ready before its first step, and nothing of it is left behind."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import VOCAB, assembled, plain_loop, small_project

from engine.data.batches import BatchPlan
from engine.data.documents import open_documents
from engine.data.shards import write_documents
from engine.dflash.packing import pack_row, packed_length
from engine.errors import NonFinite
from engine.lanes import RunLanes, open_run_lanes
from engine.plain import train_step
from engine.runtime.alone import run_alone
from engine.runtime.failure import StageFailure
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.warm_up import made_up, packed_rows, target_shapes

EVERYWHERE = frozenset({"cpu", "cuda"})


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
