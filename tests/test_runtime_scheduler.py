"""Lanes run their static programs to the end, whatever the timing, and one failure ends them all."""

import random
import threading
import time
from collections import defaultdict
from contextvars import ContextVar

import pytest
import torch
from tuned_kernels import tuner

from engine.errors import DiskError, EngineError, NonFinite, ScheduleError
from engine.runtime.failure import StageFailure
from engine.runtime.graph import GraphError, LaneSpec, StageSpec, build_graph
from engine.runtime.inbox import Stop, Stopped
from engine.runtime.lane import Lane, open_lanes
from engine.runtime.parcel import Parcel
from engine.runtime.scheduler import Scheduler
from engine.runtime.serializer import Serializer
from engine.runtime.timing import Timings

NAMES = ["target-forward", "pack", "transfer", "drafter-fwd-bwd", "optimizer"]


def graph_of(targets, drafters, micro_batches, depth=1, exclusive=None):
    stages = [
        StageSpec("target-forward", "target", exclusive=exclusive),
        StageSpec("pack", "target", after=("target-forward",)),
        StageSpec("transfer", "drafter", after=("pack",), depth=depth),
        StageSpec("drafter-fwd-bwd", "drafter", after=("transfer",), exclusive=exclusive and "drafter"),
        StageSpec("optimizer", "drafter", after=("drafter-fwd-bwd",), barrier=True),
    ]
    lanes = [LaneSpec("target", n, "cpu") for n in range(targets)]
    lanes += [LaneSpec("drafter", n, "cpu") for n in range(drafters)]
    return build_graph(stages, lanes, micro_batches)


def random_delay(seed, most=0.002):
    """A function of what is delayed, so that threads do not share a generator."""

    def delay(stage, lane, number):
        return random.Random(f"{seed} {stage} {lane} {number}").random() * most

    return delay


def passing(**others):
    """Work for every stage that passes its cargo on; `others` by name with underscores."""
    works = {name: lambda lane, number, cargo: cargo for name in NAMES}
    works["optimizer"] = lambda lane, step, meeting: None
    works.update({name.replace("_", "-"): work for name, work in others.items()})
    return works


def scheduler_of(graph, works, *, mode="stage", **options):
    return Scheduler(graph, works, serializer=Serializer(mode), timings=Timings(), **options)


def workers():
    return [thread.name for thread in threading.enumerate() if "@cpu" in thread.name]


def join(name):
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(5)


class Summing:
    """Adds a float32 term per micro-batch in an order that a difference in timing would change."""

    def __init__(self):
        self.seen = defaultdict(list)
        self.terms = defaultdict(list)

    def works(self):
        def forward(lane, micro_batch, cargo):
            assert cargo is None
            self.seen[lane.name].append(micro_batch)
            generator = torch.Generator().manual_seed(micro_batch)
            return torch.rand(64, generator=generator) * 10 ** (micro_batch % 5)

        def pack(lane, micro_batch, cargo):
            return Parcel.made(lane, {"taps": cargo}, note=micro_batch)

        def transfer(lane, micro_batch, parcel):
            assert parcel.note == micro_batch
            return lane.copy_in(parcel)

        def train(lane, micro_batch, parcel):
            self.seen[lane.name].append(micro_batch)
            self.terms[lane.name].append(parcel.take(lane)["taps"])

        def update(lane, step, meeting):
            terms = tuple(self.terms.pop(lane.name))
            gifts = [parcel.take(lane) for parcel in meeting.exchange(lane, Parcel.made(lane, terms))]
            total = torch.zeros(64)
            for position in range(sum(len(gift) for gift in gifts)):  # micro-batch order
                total += gifts[position % len(gifts)][position // len(gifts)]
            return total

        return dict(zip(NAMES, (forward, pack, transfer, train, update), strict=True))


@pytest.mark.parametrize(
    ("targets", "drafters", "m"), [(5, 3, 3), (5, 3, 4), (1, 2, 4), (3, 1, 2), (2, 2, 2)]
)
@pytest.mark.parametrize("depth", [1, 3])
def test_every_micro_batch_is_processed_once_and_in_order_whatever_the_delays(targets, drafters, m, depth):
    graph, sums = graph_of(targets, drafters, m, depth), []
    for seed in range(3):
        summing, steps, totals = Summing(), [], []

        def on_step(step, results, steps=steps, totals=totals):
            steps.append(step)
            assert all(torch.equal(result, results[0]) for result in results)
            totals.append(results[0])

        scheduler = scheduler_of(graph, summing.works(), delay=random_delay(seed))
        assert scheduler.run(2, 10, on_step) == 10
        assert steps == list(range(2, 10))
        for lane in graph.lanes:
            assert summing.seen[lane.name] == graph.micro_batches_of(lane, 2, 10)
        sums.append(torch.stack(totals))
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    assert not workers()


def test_the_sum_would_tell_another_order():
    terms = [torch.rand(64, generator=torch.Generator().manual_seed(i)) * 10 ** (i % 5) for i in range(4)]
    assert not torch.equal(sum(terms), sum(terms[::-1]))


def test_lanes_serve_one_run_after_another():
    graph, summing = graph_of(3, 2, 4, depth=2), Summing()
    lanes = open_lanes(graph.lanes)
    for lane in lanes.values():
        with torch.no_grad(), lane.active():  # setting up
            assert torch.is_grad_enabled()
    scheduler = scheduler_of(graph, summing.works(), lanes=lanes)
    totals = []
    assert scheduler.run(0, 3, lambda step, results: totals.append(results[0])) == 3
    assert scheduler.run(3, 3) == 3
    assert scheduler.run(3, 6, lambda step, results: totals.append(results[0])) == 6
    for lane in graph.lanes:
        assert summing.seen[lane.name] == graph.micro_batches_of(lane, 0, 6)
        with lanes[lane.name].active():
            pass
    whole = []
    scheduler_of(graph, Summing().works()).run(0, 6, lambda step, results: whole.append(results[0]))
    assert torch.equal(torch.stack(totals), torch.stack(whole))


def test_workers_have_their_lanes_name_gradients_on_the_callers_context_and_thread_count():
    variable, found = ContextVar("allocator", default="none"), []
    variable.set("set by the caller")

    def forward(lane, micro_batch, cargo):
        name, threads = threading.current_thread().name, torch.get_num_threads()
        found.append((name, torch.is_grad_enabled(), variable.get(), threads))

    with torch.no_grad():
        scheduler_of(graph_of(1, 1, 1), passing(target_forward=forward)).run(0, 1)
    assert found == [("target.0@cpu", True, "set by the caller", torch.get_num_threads())]


def test_a_lane_at_work_is_nobody_elses():
    graph = graph_of(1, 1, 1)
    lanes = open_lanes(graph.lanes)

    def on_step(step, results):
        with lanes["drafter.0@cpu"].active():
            pass

    scheduler = scheduler_of(graph, passing(), lanes=lanes, delay=lambda *at: 0.02)
    with pytest.raises(StageFailure, match="is at work in another thread"):
        scheduler.run(0, 5, on_step)


def fail_at(stage, lane_name, at, error):
    def work(lane, number, cargo):
        if lane.name == lane_name and number == at:
            raise error
        if stage == "optimizer":
            cargo.exchange(lane, Parcel.made(lane, ()))
            return None
        return cargo

    return {stage.replace("-", "_"): work}


@pytest.mark.parametrize("exclusive", [None, "turn"])
@pytest.mark.parametrize(
    ("stage", "lane", "number", "micro_batch", "step"),
    [
        ("target-forward", "target.1@cpu", 5, 5, 3),  # others wait in inboxes, for credits, for the turn
        ("pack", "target.0@cpu", 4, 4, 3),
        ("transfer", "drafter.0@cpu", 6, 6, 4),
        ("drafter-fwd-bwd", "drafter.1@cpu", 3, 3, 2),  # the other drafter waits in the exchange
        ("optimizer", "drafter.1@cpu", 2, None, 3),
    ],
)
def test_the_first_failure_ends_the_run_and_is_named(stage, lane, number, micro_batch, step, exclusive):
    def update(lane, step, meeting):
        meeting.exchange(lane, Parcel.made(lane, ()))

    works = passing(optimizer=update) | passing(**fail_at(stage, lane, number, ValueError("boom")))
    if stage != "optimizer":
        works["optimizer"] = update
    begin = time.monotonic()
    with pytest.raises(StageFailure) as caught:
        scheduler_of(graph_of(2, 2, 2, exclusive=exclusive), works).run(0, 20)
    assert time.monotonic() - begin < 5
    failure = caught.value
    assert (failure.stage, failure.lane) == (stage, lane)
    assert (failure.micro_batch, failure.step, failure.stuck) == (micro_batch, step, ())
    assert isinstance(failure.__cause__, ValueError)
    for word in (stage, lane, f"step {step}", "ValueError: boom"):
        assert word in str(failure)
    if micro_batch is not None:
        assert f"micro-batch {micro_batch}" in str(failure)
    assert not workers()


def test_a_failure_of_on_step_ends_the_run():
    def on_step(step, results):
        if step == 2:
            raise DiskError("no space left")

    works = passing(transfer=lambda *at: time.sleep(0.01))
    with pytest.raises(StageFailure, match="reporting, step 3 on main thread: DiskError: no space") as caught:
        scheduler_of(graph_of(3, 2, 2), works).run(0, 1000, on_step)
    assert caught.value.exit_code == DiskError.exit_code
    assert not caught.value.stuck
    assert not workers()


def test_leaving_in_on_step_is_a_run_that_failed():
    def on_step(step, results):
        raise SystemExit(0)

    with pytest.raises(StageFailure, match="reporting, step 1 on main thread: SystemExit") as caught:
        scheduler_of(graph_of(1, 1, 1), passing()).run(0, 3, on_step)
    assert caught.value.exit_code == 1
    assert not workers()


def test_a_stop_that_nobody_asked_for_ends_the_run_and_not_its_lane_alone():
    works = passing(**fail_at("pack", "target.0@cpu", 0, Stopped()))
    with pytest.raises(StageFailure, match="pack, micro-batch 0, step 1 on target.0@cpu: Stopped"):
        scheduler_of(graph_of(2, 1, 1), works).run(0, 3)
    assert not workers()


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (OSError(28, "No space left on device"), 6),
        (NonFinite("nan"), 4),
        (torch.OutOfMemoryError("no"), 3),
        (MemoryError(), 3),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 3),
        (RuntimeError("shape"), 1),
        (SystemExit(0), 1),
    ],
)
def test_the_cause_decides_the_exit_code(error, exit_code):
    works = passing(**fail_at("pack", "target.0@cpu", 0, error))
    with pytest.raises(StageFailure) as caught:
        scheduler_of(graph_of(1, 1, 1), works).run(0, 2)
    assert caught.value.exit_code == exit_code
    assert isinstance(caught.value, EngineError)


def test_a_lane_stuck_in_a_long_call_is_named_and_does_not_hold_the_failure_up():
    over = threading.Event()

    def forward(lane, micro_batch, cargo):
        if lane.name == "target.1@cpu":
            over.wait(30)  # heeds no stop, as a kernel or a compiler would not
        time.sleep(0.05)
        raise ValueError("boom")

    begin = time.monotonic()
    with pytest.raises(StageFailure) as caught:
        scheduler_of(graph_of(2, 1, 2), passing(target_forward=forward)).run(0, 2)
    assert time.monotonic() - begin < 5
    assert caught.value.stuck == ("target.1@cpu",)
    assert "target.1@cpu at target-forward, micro-batch 1, step 1" in str(caught.value)
    over.set()
    join("target.1@cpu")


def test_a_lane_begins_no_stage_after_a_failure_elsewhere():
    packed = []

    def forward(lane, micro_batch, cargo):
        if lane.name == "target.1@cpu":
            raise ValueError("boom")
        time.sleep(0.2)

    works = passing(target_forward=forward, pack=lambda lane, micro_batch, cargo: packed.append(micro_batch))
    with pytest.raises(StageFailure, match="boom"):
        scheduler_of(graph_of(2, 1, 2), works).run(0, 2)
    assert not packed and not workers()


def test_a_failure_ends_the_wait_for_a_turn_whose_holder_is_stuck(monkeypatch):
    monkeypatch.setattr("engine.runtime.scheduler.GRACE_S", 0.5)
    over = threading.Event()

    def forward(lane, micro_batch, cargo):
        if micro_batch == 2:  # target.1 waits for the turn, which target.0 keeps
            over.wait(10)

    def transfer(lane, micro_batch, cargo):
        time.sleep(0.1)
        raise ValueError("boom")

    works = passing(target_forward=forward, transfer=transfer)
    with pytest.raises(StageFailure, match="boom") as caught:
        scheduler_of(graph_of(2, 1, 2, depth=3, exclusive="turn"), works).run(0, 4)
    assert caught.value.stuck == ("target.0@cpu",)
    over.set()
    join("target.0@cpu")


def test_an_interruption_of_the_caller_stops_the_lanes_and_stays_itself():
    def on_step(step, results):
        raise KeyboardInterrupt

    works = passing(transfer=lambda *at: time.sleep(0.01))
    with pytest.raises(KeyboardInterrupt):
        scheduler_of(graph_of(2, 1, 2), works).run(0, 1000, on_step)
    assert not workers()


@pytest.mark.parametrize("seed", range(4))
def test_an_orderly_stop_finishes_a_step_on_all_lanes(seed):
    summing, steps = Summing(), []
    scheduler = scheduler_of(graph_of(4, 3, 3, depth=2), summing.works(), delay=random_delay(seed))

    def on_step(step, results):
        steps.append(step)
        if step == 4:
            scheduler.request_stop()

    reached = scheduler.run(0, 500, on_step)
    assert 5 <= reached < 500
    assert steps == list(range(reached))
    for lane in scheduler.graph.drafter_lanes:
        assert summing.seen[lane.name] == scheduler.graph.micro_batches_of(lane, 0, reached)
    assert not workers()
    scheduler.request_stop(after_step=reached)  # asked for before it begins
    assert scheduler.run(reached, 500) == reached + 1


class Overlaps:
    """How many works were inside at once, at most."""

    def __init__(self):
        self.inside = self.most = 0
        self.lock = threading.Lock()

    def __enter__(self):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.002)

    def __exit__(self, *failure):
        with self.lock:
            self.inside -= 1


@pytest.mark.parametrize(("exclusive", "together"), [("turn", 1), (None, 3)])
def test_stages_with_the_same_word_never_overlap(exclusive, together):
    overlaps = Overlaps()

    def forward(lane, micro_batch, cargo):
        with overlaps:
            return cargo

    graph = graph_of(3, 1, 3, depth=3, exclusive=exclusive)
    scheduler_of(graph, passing(target_forward=forward)).run(0, 10)
    assert (overlaps.most == 1) == (together == 1)


@pytest.mark.parametrize(("mode", "alone"), [("stage", True), ("tune", False), ("none", False)])
def test_launches_are_one_lanes_alone_in_stage_mode(mode, alone):
    overlaps, serializer = Overlaps(), Serializer(mode)

    def forward(lane, micro_batch, cargo):
        with serializer.launching(lane), overlaps:
            return cargo

    timings = Timings()
    graph = graph_of(3, 1, 3, depth=3)
    Scheduler(graph, passing(target_forward=forward), serializer=serializer, timings=timings).run(0, 10)
    assert (overlaps.most == 1) == alone
    waits = [row["waited_ms"] for row in timings.flush() if row["stage"] == "target-forward"]
    assert (max(waits) > 1) == alone


def test_a_turn_waits_for_the_lanes_device_work_and_a_failure_stops_before_it_gives_it_up():
    serializer, lane, other = (
        Serializer("stage"),
        Lane(LaneSpec("target", 0, "cpu")),
        Lane(LaneSpec("target", 1, "cpu")),
    )
    other.stop = lane.stop
    calls = []
    lane.synchronize = lambda: calls.append("synchronised")
    with serializer.exclusive("turn", lane):
        calls.append("launched")
    assert calls == ["launched", "synchronised"]
    with pytest.raises(ValueError), serializer.exclusive("turn", lane):
        raise ValueError
    with pytest.raises(Stopped), serializer.exclusive("turn", other):
        raise AssertionError("its turn came though the run is over")


def test_a_lane_that_asks_for_the_turn_it_has_is_told_so():
    serializer, lane = Serializer("stage"), Lane(LaneSpec("target", 0, "cpu"))
    asks = pytest.raises(EngineError, match="asks for a turn that it has")
    with asks, serializer.exclusive("turn", lane), serializer.exclusive("turn", lane):
        pass
    lane.stop = Stop()
    with serializer.exclusive("turn", lane), serializer.exclusive("other", lane):
        pass


def test_an_unknown_serializer_mode_is_refused():
    with pytest.raises(ScheduleError, match="'always' .serialize.launches.: expected one of tune"):
        Serializer("always")


def test_work_and_stages_must_match():
    works = passing()
    works["packing"] = works.pop("pack")
    with pytest.raises(GraphError, match="stages without work: pack; work without a stage: packing"):
        scheduler_of(graph_of(1, 1, 1), works)


def test_every_stage_leaves_a_row_with_its_waits():
    timings = Timings()

    def forward(lane, micro_batch, cargo):
        time.sleep(0.01)
        lane.count(tokens=10 + micro_batch)

    def train(lane, micro_batch, cargo):
        with lane.span("block_mask"):
            pass

    works = passing(target_forward=forward, drafter_fwd_bwd=train)
    graph = graph_of(2, 2, 2)
    Scheduler(graph, works, serializer=Serializer("stage"), timings=timings).run(3, 6)
    rows = timings.flush()
    found = sorted((row["stage"], row["lane"], row["micro_batch"], row["step"]) for row in rows)
    expected = [
        ("optimizer", lane.name, None, step + 1) for lane in graph.drafter_lanes for step in range(3, 6)
    ]
    for i in range(6, 12):
        for stage in ("target-forward", "pack"):
            expected.append((stage, graph.target_lane_of(i).name, i, i // 2 + 1))
        for stage in ("transfer", "drafter-fwd-bwd", "drafter-fwd-bwd.block_mask"):
            expected.append((stage, graph.drafter_lane_of(i).name, i, i // 2 + 1))
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert {row["micro_batch"]: row["tokens"] for row in rows if row["stage"] == "target-forward"}[7] == 17
    waits = [row["waited_ms"] for row in rows if row["stage"] == "transfer"]
    works = [row["host_ms"] for row in rows if row["stage"] == "transfer"]
    assert sum(waits) > 30 > sum(works)  # each drafter lane waits for three forwards of 10 ms


def test_waiting_for_a_credit_is_counted_to_the_last_target_stage():
    timings = Timings()
    works = passing(drafter_fwd_bwd=lambda lane, number, cargo: time.sleep(0.02))
    Scheduler(graph_of(1, 1, 1), works, serializer=Serializer("none"), timings=timings).run(0, 5)
    rows = timings.flush()
    assert sum(row["waited_ms"] for row in rows if row["stage"] == "pack") > 30
    assert all(row["waited_ms"] == 0 for row in rows if row["stage"] == "target-forward")


def test_a_stages_row_has_its_own_threads_launches_and_no_other_lanes():
    serializer, timings = Serializer("tune"), Timings()
    serializer.install()
    kernel = tuner(warm=(1,))
    begun, launched = threading.Event(), threading.Event()

    def forward(lane, micro_batch, cargo):
        if lane.name == "target.1@cpu":  # its forward lasts around the other lane's
            begun.set()
            assert launched.wait(10)
            kernel.run(0, 0, 1, grid=(1,))
            return
        assert begun.wait(10)
        for _ in range(3):
            kernel.run(0, 0, 1, grid=(1,))
        kernel.run(0, 0, 2, grid=(1,))
        launched.set()

    works = passing(target_forward=forward)
    Scheduler(graph_of(2, 1, 2), works, serializer=serializer, timings=timings).run(0, 1)
    rows = timings.flush()
    found = {
        (row["stage"], row["lane"]): (row["launches"], row.get("cold_keys", 0))
        for row in rows
        if "launches" in row
    }
    assert found == {
        ("target-forward", "target.0@cpu"): (4, 1),
        ("target-forward", "target.1@cpu"): (1, 0),
    }
