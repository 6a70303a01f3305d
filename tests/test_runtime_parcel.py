"""A parcel is read after its event, lives until its last reader is done, and no longer."""

import gc
import threading
import time
import weakref

import pytest
import torch

from engine.errors import EngineError
from engine.runtime.graph import LaneSpec, StageSpec, build_graph
from engine.runtime.inbox import Stop, Stopped
from engine.runtime.lane import Lane
from engine.runtime.parcel import Meeting, Parcel
from engine.runtime.pinned_ring import PinnedRing
from engine.runtime.scheduler import Scheduler
from engine.runtime.serializer import Serializer
from engine.runtime.timing import Timings


def lane_of(role="target", index=0, device="cpu"):
    return Lane(LaneSpec(role, index, device))


def test_a_parcel_gives_what_was_put_in_and_lets_go_after_the_last_reader():
    maker, readers = lane_of(), [lane_of("drafter", 0), lane_of("drafter", 1)]
    taps = torch.arange(4.0)
    alive = weakref.ref(taps)
    parcel = Parcel.made(maker, {"taps": taps}, note="row", readers=2)
    del taps
    assert parcel.note == "row" and parcel.nbytes == 16
    assert readers[0].copy_in(parcel) is parcel
    assert torch.equal(parcel.take(readers[0])["taps"], torch.arange(4.0))
    assert alive() is not None and not parcel.released
    assert torch.equal(parcel.take(readers[1])["taps"], torch.arange(4.0))
    gc.collect()
    assert alive() is None and parcel.released and parcel.nbytes == 0
    with pytest.raises(EngineError, match="released after drafter.0@cpu, drafter.1@cpu; raise `readers`"):
        parcel.take(readers[0])


def test_a_tuple_comes_back_as_a_tuple_and_may_be_empty():
    lane = lane_of()
    first, second = Parcel.made(lane, (torch.zeros(1), torch.ones(1))).take(lane)
    assert (float(first), float(second)) == (0, 1)
    assert Parcel.made(lane, ()).take(lane) == ()


def test_tensors_of_another_device_are_refused_both_ways():
    lane = lane_of()
    with pytest.raises(EngineError, match="put tensor 'taps' of meta into a parcel"):
        Parcel.made(lane, {"taps": torch.zeros(1, device="meta")})
    elsewhere = Parcel(lane, (), device=torch.device("meta"), ready=None)
    with pytest.raises(EngineError, match="lies on meta; copy it in first"):
        elsewhere.take(lane)


def test_a_parcel_cannot_be_shared_once_it_was_read():
    lane = lane_of()
    parcel = Parcel.made(lane, ())
    parcel.take(lane)
    with pytest.raises(EngineError, match="is shared after target.0@cpu took it"):
        parcel.share(3)


def test_all_lanes_of_a_meeting_get_all_parcels_in_lane_order_every_time():
    lanes = [lane_of("drafter", number) for number in range(3)]
    meeting, found = Meeting([lane.spec for lane in lanes], Stop()), []

    def work(lane):
        for turn in range(50):
            if (turn + lane.spec.index) % 7 == 0:
                time.sleep(0.001)
            gifts = meeting.exchange(lane, Parcel.made(lane, (torch.tensor(turn * 10 + lane.spec.index),)))
            found.append((turn, [int(parcel.take(lane)[0]) for parcel in gifts]))

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 150
    assert all(numbers == [turn * 10, turn * 10 + 1, turn * 10 + 2] for turn, numbers in found)


def test_a_ring_says_what_it_costs_and_refuses_what_does_not_fit():
    ring = PinnedRing(3, 5000)
    assert (ring.slot_bytes, ring.nbytes) == (8192, 3 * 8192)
    with pytest.raises(EngineError, match="a parcel of 8,448 bytes for a pinned ring with slots of 8,192"):
        ring.reserve([torch.zeros(8193, dtype=torch.uint8)], Stop())
    with pytest.raises(EngineError, match="both are at least 1"):
        PinnedRing(0, 1)


def test_a_slot_holds_several_tensors_and_goes_back_when_released_or_dropped():
    ring, stop = PinnedRing(1, 4096), Stop()
    tensors = [torch.randn(3, 5), torch.arange(7), torch.randn(2, 2).bfloat16()]
    slot = ring.reserve(tensors, stop)
    views = slot.views(tensors)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    slot.release(None)
    with pytest.raises(EngineError, match="after its release"):
        slot.views(tensors)
    dropped = ring.reserve(tensors, stop)
    del dropped
    threading.Timer(0.2, stop.set).start()
    held = ring.reserve(tensors, stop)
    with pytest.raises(Stopped):  # no slot is free, and waiting for one ends with the run
        ring.reserve(tensors, stop)
    del held


# On a GPU: the maker writes i late, its freed memory is overwritten at once, the reader reads late.

SIZE = 1 << 14


def corrupted(path, hand_overs, devices):
    """Hand canaries over between two lanes under random stream delays; how many were read wrong."""
    stages = [
        StageSpec("target-forward", "target"),
        StageSpec("drafter-fwd-bwd", "drafter", after=("target-forward",), depth=2),
        StageSpec("optimizer", "drafter", after=("drafter-fwd-bwd",), barrier=True),
    ]
    specs = [LaneSpec("target", 0, devices[0]), LaneSpec("drafter", 0, devices[1])]
    graph = build_graph(stages, specs, 50)
    ring = PinnedRing(3, 4 * SIZE) if path == "ring" else None
    generator = torch.Generator().manual_seed(1)
    cycles = torch.randint(0, 60_000, (4, 997), generator=generator)
    # Some last longer than the host takes to hand over, or it would be the host that keeps the order.
    long = torch.rand(4, 997, generator=generator) < 1 / 8
    cycles = torch.where(long, cycles * 30, cycles).tolist()
    wrong = torch.zeros((), dtype=torch.int64, device=devices[1])

    def sleep(kind, i, stream):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles[kind][i % 997])

    def make(lane, i, cargo):
        sleep(0, i, lane.stream)
        sleep(1, i, lane.copy_out_stream)
        parcel = Parcel.made(lane, (torch.full((SIZE,), i, dtype=torch.int32, device=lane.device),))
        # Whatever was freed too early lies in these blocks.
        poison = [torch.full((SIZE,), -1, dtype=torch.int32, device=lane.device) for _ in range(3)]
        del poison
        return lane.copy_out(parcel, ring) if ring else parcel

    def read(lane, i, parcel):
        sleep(2, i, lane.copy_in_stream)
        (canary,) = lane.copy_in(parcel).take(lane)
        sleep(3, i, lane.stream)
        wrong.add_((canary != i).any())

    works = {"target-forward": make, "drafter-fwd-bwd": read, "optimizer": lambda *at: None}
    scheduler = Scheduler(graph, works, serializer=Serializer("none"), timings=Timings())
    scheduler.run(0, hand_overs // 50)
    return int(wrong)


def gpu_pairs():
    two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    return [
        pytest.param("direct", ("cuda:0", "cuda:0"), id="one GPU"),
        pytest.param("ring", ("cuda:0", "cuda:0"), id="one GPU, ring"),
        pytest.param("direct", ("cuda:0", "cuda:1"), id="two GPUs", marks=two),
        pytest.param("ring", ("cuda:0", "cuda:1"), id="two GPUs, ring", marks=two),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("path", "devices"), gpu_pairs())
def test_ten_thousand_hand_overs_under_random_delays_corrupt_nothing(path, devices):
    assert corrupted(path, 10_000, devices) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("path", "devices"), gpu_pairs())
def test_the_canaries_find_a_missing_event(path, devices, monkeypatch):
    monkeypatch.setattr(Lane, "wait", lambda lane, event, stream=None: None)
    assert corrupted(path, 2_000, devices) > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("path", "devices"), gpu_pairs())
def test_the_canaries_find_a_missing_record_stream(path, devices, monkeypatch):
    monkeypatch.setattr(Lane, "keep", lambda lane, tensor, stream=None: None)
    assert corrupted(path, 2_000, devices) > 0


@pytest.mark.gpu
def test_the_canaries_find_a_ring_that_does_not_wait_for_its_slots(monkeypatch):
    give_back = PinnedRing.give_back
    monkeypatch.setattr(PinnedRing, "give_back", lambda ring, memory, last_use: give_back(ring, memory, None))
    assert corrupted("ring", 2_000, ("cuda:0", "cuda:0")) > 0


@pytest.mark.gpu
def test_a_cpu_lane_reads_what_a_gpu_lane_made_and_the_reverse():
    gpu, cpu = lane_of(device="cuda:0"), lane_of("drafter")
    with gpu.active():
        torch.cuda._sleep(10_000_000)
        parcel = Parcel.made(gpu, {"taps": torch.arange(1000, device="cuda:0")}, note="row")
    with cpu.active():
        there = cpu.copy_in(parcel)
        assert there.note == "row" and parcel.released
        assert torch.equal(there.take(cpu)["taps"], torch.arange(1000))
        parcel = Parcel.made(cpu, (torch.arange(1000),))
    with gpu.active():
        (back,) = gpu.copy_in(parcel).take(gpu)
        assert torch.equal(back.cpu(), torch.arange(1000))
