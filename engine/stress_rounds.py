"""A stress's rounds: threads launch the same calls side by side, then one thread launches them alone.

The main thread only watches, so that a thread which hangs in a kernel or a lock is found and named. A
worker's record is written by its own thread while that runs, and read by others once it has ended.
"""

import contextvars
import faulthandler
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from engine.errors import Stalled, is_out_of_memory
from engine.runtime.lane import Lane
from engine.runtime.launch_state import ColdKey
from engine.runtime.serializer import Serializer
from engine.stress_calls import Call, calls_of_round

REPEATS = 3  # of each call, thread and round: the first may be cold, the others are warm
PAUSE_S = 0.002  # at most, between two calls
ERRORS = 20  # of a thread and round, after which it gives up: a CUDA error fails all that follows
SHOWN = 20  # findings kept in words; all are counted
PHASE_S = 1_200.0  # for the threads of one round, and for its repetition alone
POLL_S = 0.05


class StressStalled(Stalled):
    """Threads that make no progress and cannot be ended."""

    def __init__(self, message: str, stuck: Sequence[str]) -> None:
        super().__init__(message)
        self.stuck = tuple(stuck)
        """Names of the threads."""


@attrs.define(eq=False)
class Worker:
    """One thread's place, and what came of it."""

    name: str
    device: str
    """`cuda:<n>`, or `stub:<n>` for a device of the stub driver."""
    lane: Lane
    calls: int = 0
    errors: int = 0
    first_error: str | None = None
    """A traceback."""
    at: str = "start"
    since: float = attrs.field(factory=time.monotonic)
    """When it began what it is at, on the monotonic clock."""
    results: dict[Call, Any] = attrs.field(factory=dict)
    """The first of each call of this round."""

    def begin(self, what: str) -> None:
        self.at, self.since = what, time.monotonic()


@attrs.frozen(eq=False, kw_only=True)
class Ground:
    """Where calls run, and how their results are told apart."""

    operations: Sequence[str]
    run: Callable[[Worker, Call], Any]
    difference: Callable[[Any, Any], str | None]
    """Between two results of one call, in words."""
    suspicion: Callable[[Any], str | None]
    """What is wrong with one result, whatever others are, in words."""


@attrs.define(eq=False, kw_only=True)
class Stress:
    """A stress in progress."""

    serializer: Serializer
    workers: list[Worker]
    alone: Worker
    ground: Ground
    tuners: list[Any]
    """The autotuners of FLA's kernels."""
    stall_after: float
    """Seconds without a call that ended or a key that was tuned."""
    rounds: int = 0
    distinct: set[Call] = attrs.field(factory=set)
    compared: int = 0
    """Results of threads that were held against the same call alone."""
    keys: int = 0
    """Tuned while threads ran."""
    differences: int = 0
    findings: list[str] = attrs.field(factory=list)
    out_of_memory: str | None = None
    tuned_at: float = attrs.field(factory=time.monotonic)
    """When the last tuning ended, in whatever thread: those that wait for it are not stalled."""

    @property
    def errors(self) -> int:
        return sum(worker.errors for worker in (*self.workers, self.alone))

    def differ(self, text: str) -> None:
        """Keep a difference."""
        self.differences += 1
        self._find(text)

    def fail(self, worker: Worker, error: BaseException) -> None:
        """Keep the exception that is being handled."""
        worker.errors += 1
        if worker.first_error is None:
            worker.first_error = traceback.format_exc()
            self._find(f"{worker.name}, {worker.at}: {type(error).__name__}: {error}")
        if self.out_of_memory is None and is_out_of_memory(error):
            self.out_of_memory = f"{worker.name}, {worker.at}: {error}"

    def tuned(self, key: ColdKey) -> None:
        """What the serializer calls after a tuning, in its thread."""
        self.tuned_at = time.monotonic()

    def _find(self, text: str) -> None:
        if len(self.findings) < SHOWN:
            self.findings.append(text)


def run_round(stress: Stress, deadline: float) -> None:
    """Launch from all threads, then alone, and compare.

    Args:
        deadline: on the monotonic clock; no thread begins a call after it, save its first.

    Raises:
        StressStalled: no progress for `stall_after` seconds, or a round without end.
    """
    calls = calls_of_round(stress.rounds, stress.ground.operations)
    forget_keys(stress)
    before = {id(tuner): set(tuner.cache) for tuner in stress.tuners}
    at = time.monotonic() + POLL_S  # the same moment for all, so that they meet on the first cold key
    _watch(
        stress,
        {
            worker: _thread(stress, worker, partial(_together, stress, worker, calls, at, deadline))
            for worker in stress.workers
        },
    )
    stress.keys += sum(len(set(tuner.cache) - before[id(tuner)]) for tuner in stress.tuners)
    _watch(stress, {stress.alone: _thread(stress, stress.alone, partial(_alone, stress, calls))})
    if problem := overwritten(stress.serializer):
        stress.differ(problem)
    for worker in stress.workers:
        worker.results.clear()
    stress.rounds += 1


def forget_keys(stress: Stress) -> None:
    """Make tuned keys cold again: all of them in even rounds, those of half of the kernels in odd ones."""
    draw = random.Random(stress.rounds)
    for tuner in stress.tuners:
        if stress.rounds % 2 == 0 or draw.random() < 0.5:
            tuner.cache.clear()


def overwritten(serializer: Serializer) -> str | None:
    """Whether something undid the serializer meanwhile, in words."""
    if serializer.mode == "none" or serializer.effective():
        return None
    return f"the serializer's mode {serializer.mode!r} is not in effect any more: something replaced it"


def _thread(stress: Stress, worker: Worker, work: Callable[[], None]) -> threading.Thread:
    """As a lane's: named, and in a copy of this context, which holds Triton's allocator."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # a thread that ends early would pass for one that agreed
            stress.fail(worker, error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(guarded,), name=worker.name, daemon=True)
    thread.start()
    return thread


def _watch(stress: Stress, threads: Mapping[Worker, threading.Thread]) -> None:
    begin = time.monotonic()
    for worker in threads:
        worker.since = begin
    while running := [worker for worker, thread in threads.items() if thread.is_alive()]:
        threads[running[0]].join(POLL_S)
        now = time.monotonic()
        for worker in running:
            quiet = now - max(worker.since, stress.tuned_at)
            if quiet > stress.stall_after or now - begin > PHASE_S:
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                places = "; ".join(f"{worker.name} at {worker.at}" for worker in running)
                raise StressStalled(
                    f"no call ended and no key was tuned for {quiet:.0f} s, {now - begin:.0f} s into round "
                    f"{stress.rounds + 1}: {places}; the stacks of all threads stand above",
                    [worker.name for worker in running],
                )


def _together(stress: Stress, worker: Worker, calls: Sequence[Call], at: float, deadline: float) -> None:
    """What one of several threads does in a round."""
    draw = random.Random(f"{stress.rounds} {worker.name}")
    # In even rounds all begin in one order, and meet on cold keys; else they meet by chance.
    first = list(calls) if stress.rounds % 2 == 0 else draw.sample(calls, len(calls))
    order = [*first, *(call for _ in range(1, REPEATS) for call in draw.sample(calls, len(calls)))]
    errors = worker.errors
    with worker.lane.active(), torch.no_grad():
        while time.monotonic() < at:
            time.sleep(0)
        for call in order:
            if worker.errors - errors >= ERRORS or (worker.calls and time.monotonic() > deadline):
                break
            time.sleep(draw.random() * PAUSE_S)
            _one(stress, worker, call)
        worker.begin("synchronize")
        worker.lane.synchronize()


def _one(stress: Stress, worker: Worker, call: Call) -> None:
    worker.begin(str(call))
    worker.calls += 1
    try:
        result = _launch(stress, worker, call)
        first = worker.results.setdefault(call, result)
        if first is not result and (difference := stress.ground.difference(result, first)):
            stress.differ(f"{worker.name}, {call}: differs from this thread's first result: {difference}")
    except Exception as error:
        stress.fail(worker, error)


def _launch(stress: Stress, worker: Worker, call: Call) -> Any:
    with stress.serializer.launching(worker.lane):
        return stress.ground.run(worker, call)


def _alone(stress: Stress, calls: Sequence[Call]) -> None:
    """Repeat the round's calls on every device, with no other thread, and compare."""
    alone, ground = stress.alone, stress.ground
    places: dict[str, Worker] = {}
    for worker in stress.workers:
        places.setdefault(worker.device, worker)
    for call in calls:
        if not any(call in worker.results for worker in stress.workers):
            continue
        stress.distinct.add(call)
        reference = None
        for device, place in places.items():
            alone.begin(f"{call} on {device}")
            alone.calls += 1
            try:
                with place.lane.active(), torch.no_grad():
                    result = _launch(stress, place, call)
                    _compare(stress, place, call, result)
                    if reference is None:
                        reference = result
                    elif difference := ground.difference(result, reference):
                        first = next(iter(places))
                        stress.differ(f"{call}: {device} differs from {first}, both alone: {difference}")
            except Exception as error:
                stress.fail(alone, error)
                if alone.errors >= ERRORS:
                    return


def _compare(stress: Stress, place: Worker, call: Call, result: Any) -> None:
    """Hold what the threads of one device got against the same call alone."""
    if suspicion := stress.ground.suspicion(result):
        stress.differ(f"{call} alone on {place.device}: {suspicion}")
    for worker in stress.workers:
        if worker.device != place.device or call not in worker.results:
            continue
        stress.compared += 1
        theirs = worker.results[call]
        difference = stress.ground.suspicion(theirs) or stress.ground.difference(theirs, result)
        if difference is None:
            continue
        again = stress.ground.difference(_launch(stress, place, call), result)
        why = "; it differs alone as well, so this is no race" if again else ""
        stress.differ(f"{worker.name}, {call}: differs from the same call alone: {difference}{why}")
