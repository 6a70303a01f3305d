"""What stands still is found in its time, named rightly, and nobody else is accused."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from test_runtime_scheduler import graph_of, join, passing, scheduler_of

from engine.errors import Stalled
from engine.plain import LANE
from engine.runtime import watchdog as module
from engine.runtime.failure import Place, StageFailure
from engine.runtime.inbox import Stop, Stopped
from engine.runtime.lane import Lane
from engine.runtime.progress import LoopProgress, Progress
from engine.runtime.watchdog import Watchdog

STALL = 0.4


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.scheduler.GRACE_S", 0.3)


class Seen:
    """What a watchdog did."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.words: list[BaseException] = []
        self.codes: list[int] = []


@contextmanager
def watching(watched: object, stall: float = STALL) -> Iterator[tuple[Watchdog, Seen]]:
    seen = Seen()
    dog = Watchdog(stall, tell=seen.told.append, last_words=seen.words.append, leave=seen.codes.append)
    with dog:
        dog.watch(watched)  # type: ignore[arg-type]
        yield dog, seen


def waits(ready: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_lane_that_hangs_is_told_with_stacks_and_fails_the_run() -> None:
    over = threading.Event()

    def the_hanging_one(lane: Lane, micro_batch: int, cargo: object) -> object:
        if micro_batch == 3:
            over.wait(20)
        return cargo

    scheduler = scheduler_of(graph_of(2, 2, 2), passing(drafter_fwd_bwd=the_hanging_one))
    begin = time.monotonic()
    with watching(scheduler) as (_, seen):
        with pytest.raises(StageFailure, match="drafter-fwd-bwd, micro-batch 3, step 2") as caught:
            scheduler.run(0, 50)
        assert time.monotonic() - begin < STALL + 5
    assert caught.value.exit_code == Stalled.exit_code and caught.value.lane == "drafter.1@cpu"
    assert caught.value.stuck == ("drafter.1@cpu",) and not seen.codes
    report = seen.told[0]
    for line in (
        "  drafter.1@cpu at drafter-fwd-bwd, micro-batch 3, step 2 for",
        "after transfer, micro-batch 3, step 2",
        "  target.0@cpu at ",
        "thread drafter.1@cpu:",
        "the_hanging_one",
        "thread MainThread:",
    ):
        assert line in report
    over.set()
    join("drafter.1@cpu")


def test_a_stage_may_take_twenty_times_what_it_usually_takes() -> None:
    def slow(lane: Lane, micro_batch: int, cargo: object) -> object:
        time.sleep(0.8 if micro_batch == 9 else 0.06)  # the limit is 1.2 s by then
        return cargo

    scheduler = scheduler_of(graph_of(1, 1, 1), passing(target_forward=slow))
    with watching(scheduler) as (_, seen):
        assert scheduler.run(0, 10) == 10
    assert not seen.told


def test_a_lane_that_compiles_and_those_that_wait_for_it_have_longer(monkeypatch) -> None:
    monkeypatch.setattr(module, "SETTING_UP_S", 1.5)
    compiles = {8: 1.0, 9: 30.0}
    over = threading.Event()

    def compiling(lane: Lane, micro_batch: int, cargo: object) -> object:
        with scheduler.serializer.compiling(lane):
            over.wait(compiles.get(micro_batch, 0.0))
        return cargo

    scheduler = scheduler_of(graph_of(1, 1, 1), passing(drafter_fwd_bwd=compiling))
    with watching(scheduler) as (_, seen):
        assert scheduler.run(0, 9) == 9
        assert not seen.told
        begin = time.monotonic()
        with pytest.raises(StageFailure, match="Stalled"):
            scheduler.run(9, 12)
        assert time.monotonic() - begin > 1.5
    over.set()
    join("drafter.0@cpu")


@pytest.mark.parametrize("after", [0.2, 0.6, None])
def test_who_waited_first_is_accused_only_where_nobody_else_stands_still(after: float | None) -> None:
    stop, changed, over = Stop(), threading.Condition(), threading.Event()

    def waiting() -> None:
        with contextlib.suppress(Stopped), changed:
            stop.wait_for(changed, lambda: False)

    lanes = {"waits": threading.Thread(target=waiting, name="waits", daemon=True)}
    if after is not None:
        lanes["hangs"] = threading.Thread(target=over.wait, name="hangs", daemon=True)
    progress = LoopProgress()
    with watching(progress) as (_, seen):
        begin = time.monotonic()
        for name, thread in lanes.items():  # the one that hangs is over its limit after the other
            thread.start()
            progress.enter(name, Place(stage="pack"))
            time.sleep(STALL * (after or 0))
        waits(lambda: seen.codes)
        assert 1.2 * STALL < time.monotonic() - begin < 4 * STALL
    assert seen.codes == [5]
    assert f"pack on {'waits' if after is None else 'hangs'}: Stalled" in str(seen.words[0])
    stop.set()
    over.set()


def test_a_loop_or_a_main_thread_that_hangs_is_left_with_exit_code_5() -> None:
    progress = LoopProgress()
    progress.enter(LANE, Place(stage="pack", micro_batch=4, step=3))
    with watching(progress) as (_, seen):
        waits(lambda: seen.codes)
    assert seen.codes == [5] and "pack, micro-batch 4, step 3 on plain: Stalled" in str(seen.words[0])
    with watching(LoopProgress()) as (dog, seen), dog.over("evaluation"):
        waits(lambda: seen.codes)
    assert seen.codes == [5] and "evaluation on main thread" in str(seen.words[0])


def test_progress_and_idleness_are_no_stall() -> None:
    progress = LoopProgress()
    with watching(progress) as (dog, seen):
        with dog.over("evaluation") as further:
            for _ in range(12):
                further()
                time.sleep(STALL / 6)
        time.sleep(2 * STALL)  # nobody has anything to do
        with dog.over("setting up", at_least_s=30.0):
            time.sleep(2 * STALL)
    assert not seen.told and not seen.codes


def test_time_in_which_the_whole_process_was_stopped_counts_for_nobody(monkeypatch) -> None:
    progress = LoopProgress()
    clock = [0.0]
    real = time.monotonic
    monkeypatch.setattr("engine.runtime.watchdog.time.monotonic", lambda: real() + clock[0])
    with watching(progress) as (_, seen):
        progress.enter(LANE, Place(stage="pack"))
        time.sleep(STALL / 4)
        clock[0] = 1000.0
        time.sleep(STALL / 2)
        assert not seen.told
        waits(lambda: seen.codes)  # from then on it is a stall as any other


def test_a_failure_that_the_main_thread_does_not_end_is_ended_for_it(monkeypatch) -> None:
    monkeypatch.setattr(module, "LEFT_S", 0.3)
    over = threading.Event()

    def forward(lane: Lane, micro_batch: int, cargo: object) -> object:
        if micro_batch == 3:
            raise ValueError("boom")
        return cargo

    scheduler = scheduler_of(graph_of(1, 1, 1), passing(target_forward=forward))
    with watching(scheduler, stall=60.0) as (_, seen):
        thread = threading.Thread(target=lambda: waits(lambda: seen.codes) or over.set())
        thread.start()
        with pytest.raises(StageFailure, match="boom"):
            scheduler.run(0, 10, lambda step, results: over.wait(10))
        thread.join()
    assert seen.codes == [1] and "micro-batch 3, step 4 on target.0@cpu: ValueError: boom" in str(
        seen.words[0]
    )


def test_a_failure_that_is_dealt_with_in_good_order_has_its_time(monkeypatch) -> None:
    monkeypatch.setattr(module, "LEFT_S", 0.2)

    def forward(lane: Lane, micro_batch: int, cargo: object) -> object:
        raise ValueError("boom")

    scheduler = scheduler_of(graph_of(1, 1, 1), passing(target_forward=forward))
    with watching(scheduler, stall=60.0) as (dog, seen):
        with pytest.raises(StageFailure, match="boom"):
            scheduler.run(0, 10)
        dog.pardon()
        time.sleep(0.8)
    assert not seen.codes


def test_what_is_usual_forgets_a_first_stay_that_compiled(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("engine.runtime.progress.time.monotonic", lambda: clock[0])
    progress = Progress()
    for seconds in (100.0, 1.0, 1.0, 1.0, 1.0):
        progress.enter("lane", Place(stage="forward"))
        clock[0] += seconds
    progress.enter("lane", Place(stage="pack"))
    assert progress.usual_s("forward") == 1.0 and progress.slowest_s() == 1.0
    assert str(progress.activities()["lane"]) == "at pack for 0.0 s, after forward"
