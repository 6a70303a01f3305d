"""Every stage and part leaves a complete row, and waiting is told apart from working."""

import threading
import time

import pytest
import torch

from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.timing import Timings, Wait

KEYS = ["stage", "lane", "micro_batch", "step", "start"]
KEYS += ["waited_ms", "host_ms", "device_ms", "tokens", "bytes"]


def cpu_lane(timings):
    return Lane(LaneSpec("drafter", 0, "cpu"), timings)


def test_a_stage_and_its_part_leave_rows_with_every_key():
    timings = Timings()
    lane = cpu_lane(timings)
    before = time.time()
    span = lane.begin("drafter-fwd-bwd", micro_batch=7, step=4)
    with lane.span("block_mask", bytes=12):
        time.sleep(0.02)
    lane.count(tokens=100)
    lane.count(tokens=11, bytes=5)
    lane.end(span)
    lane.add(span)
    part, stage = timings.drain()
    assert list(part) == list(stage) == KEYS
    assert part["stage"] == "drafter-fwd-bwd.block_mask"
    assert (part["micro_batch"], part["step"], part["bytes"]) == (7, 4, 12)
    assert (stage["tokens"], stage["bytes"], stage["lane"]) == (111, 5, "drafter.0@cpu")
    assert before <= stage["start"] <= part["start"] <= time.time()
    assert 19 < part["host_ms"] <= stage["host_ms"] < 1000
    assert stage["device_ms"] == stage["host_ms"]
    assert timings.drain() == []


def test_waiting_is_no_host_time():
    timings = Timings()
    lane = cpu_lane(timings)
    span = lane.begin("optimizer", micro_batch=None, step=1)
    with lane.waiting() as wait:  # within the work
        begin = time.perf_counter()
        time.sleep(0.05)
        wait.seconds = time.perf_counter() - begin
    lane.end(span)
    span.wait(Wait(seconds=0.75))  # before or after it
    lane.add(span)
    (row,) = timings.drain()
    assert row["waited_ms"] == pytest.approx(750 + wait.seconds * 1e3)
    assert row["host_ms"] < 40


def test_a_failed_part_leaves_no_row_and_no_open_span():
    timings = Timings()
    lane = cpu_lane(timings)
    with pytest.raises(ValueError), lane.span("outer"), lane.span("inner"):
        raise ValueError
    with lane.span("next"):
        pass
    assert [row["stage"] for row in timings.drain()] == ["next"]


def test_threads_lose_no_rows():
    timings, rows = Timings(), []

    def work(number):
        lane = Lane(LaneSpec("target", number, "cpu"), timings)
        for _ in range(500):
            with lane.span("x"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        rows += timings.drain()
    rows += timings.flush()
    assert len(rows) == 2000


@pytest.mark.gpu
def test_a_thread_that_waits_above_a_busy_device_is_no_waiting_lane():
    timings = Timings()
    lane = Lane(LaneSpec("target", 0, "cuda:0"), timings)
    with lane.active():
        torch.cuda._sleep(1000)
        lane.synchronize()
        for cycles in (400_000_000, 1000):
            span = lane.begin("pack", micro_batch=0, step=1)
            torch.cuda._sleep(cycles)
            lane.end(span)
            with lane.waiting() as wait:
                time.sleep(0.05)
                wait.seconds = 0.05
            span.wait(wait)
            lane.add(span)
            lane.synchronize()
    busy, idle = (row["waited_ms"] for row in timings.flush())
    assert busy < 5 < 40 < idle


@pytest.mark.gpu
def test_a_thread_runs_ahead_of_its_device_by_one_micro_batch():
    lane = Lane(LaneSpec("target", 0, "cuda:0"))
    with lane.active():
        torch.cuda._sleep(1000)
        lane.synchronize()
        took = []
        for _ in range(4):
            begin = time.perf_counter()
            torch.cuda._sleep(200_000_000)
            lane.pace()
            took.append(time.perf_counter() - begin)
    assert took[0] < 0.02 < min(took[1:])


@pytest.mark.gpu
def test_device_time_comes_without_synchronising_and_leaves_stream_waits_out():
    timings = Timings()
    maker = Lane(LaneSpec("target", 0, "cuda:0"), timings)
    reader = Lane(LaneSpec("drafter", 0, "cuda:0"), timings)
    with maker.active():
        torch.cuda._sleep(1000)  # loads the kernel
        maker.synchronize()
        with maker.span("target-forward"):
            torch.cuda._sleep(400_000_000)  # a fifth of a second or so
        event = maker.record()
    with reader.active(), reader.span("drafter-fwd-bwd"):
        reader.wait(event)
        torch.cuda._sleep(1000)
    assert timings.drain() == []
    rows = {row["stage"]: row for row in timings.flush()}
    assert rows["target-forward"]["host_ms"] < 50 < rows["target-forward"]["device_ms"]
    assert rows["drafter-fwd-bwd"]["waited_ms"] > 50 > rows["drafter-fwd-bwd"]["device_ms"]


@pytest.mark.gpu
def test_a_traced_lane_opens_and_closes_a_range_for_each_span(monkeypatch):
    ranges = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    lane = Lane(LaneSpec("target", 0, "cuda:0"))
    lane.traced = True
    with lane.active():
        lane.end(lane.begin("pack", micro_batch=7, step=2))
    assert ranges == ["pack 7", "end"]
