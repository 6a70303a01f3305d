"""Runs a graph: a worker thread per lane, each with a static program, and one end for all.

A target lane runs its micro-batches in order through the target stages and hands each to the
drafter lane that owns it; a drafter lane runs, for each step, its micro-batches in order through the
drafter stages and then the barrier stage. Who computes what and in which order is fixed before a
thread starts; threads decide only when. So numbers cannot depend on timing, and nothing can
deadlock: the smallest micro-batch not yet taken always has its credit, and all that its lanes wait
for are smaller ones.

The first failure anywhere ends the run. Other lanes see it at their next wait or stage border; one
that sits in a kernel or a compiler is named and left behind, for no thread can be ended from outside.
"""

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from engine.runtime.failure import GRACE_S, Failure, Place, StageFailure, held_at
from engine.runtime.graph import Graph, GraphError, StageSpec
from engine.runtime.inbox import Inbox, Stop, Stopped
from engine.runtime.lane import Lane, open_lanes
from engine.runtime.parcel import Meeting
from engine.runtime.progress import ENDED, Activity, Progress
from engine.runtime.serializer import Serializer
from engine.runtime.timing import Span, Timings

Work = Callable[[Lane, int, Any], Any]
"""(lane, micro_batch, cargo) -> cargo, and for the barrier (lane, step, meeting) -> result."""


class _Run:
    """The state of one call of `Scheduler.run`."""

    def __init__(self, graph: Graph, first_step: int, last_step: int) -> None:
        self.first, self.end = first_step, last_step
        self.begun = first_step - 1  # the furthest step that a drafter lane has begun
        self.stop = Stop()
        self.meeting = Meeting(graph.drafter_lanes, self.stop)
        self.inboxes = {
            lane.name: Inbox(graph.micro_batches_of(lane, first_step, last_step), graph.depth, self.stop)
            for lane in graph.drafter_lanes
        }
        self.news: queue.SimpleQueue[Failure | tuple[str, int | None, Any]] = queue.SimpleQueue()
        """Failures; (lane, step, result) of a barrier; (lane, None, None) of a lane that ended."""
        # Re-entrant, because a signal handler may ask for a stop on top of the thread that holds it.
        self.lock = threading.RLock()

    def end_after(self, step: int) -> None:
        with self.lock:
            # A run that is asked to end before its first step has begun does that one.
            self.end = min(self.end, max(step, self.begun, self.first) + 1)

    def begin(self, step: int) -> bool:
        """Whether a drafter lane may begin a step; once one has, all will finish it."""
        with self.lock:
            if step >= self.end:
                return False
            self.begun = max(self.begun, step)
            return True

    def wants(self, step: int) -> bool:
        with self.lock:
            return step < self.end


class Scheduler:
    """A graph with its work and its lanes; runs stretches of steps, one after another."""

    def __init__(
        self,
        graph: Graph,
        works: Mapping[str, Work],
        *,
        serializer: Serializer,
        timings: Timings,
        delay: Callable[[str, str, int], float] | None = None,
        lanes: Mapping[str, Lane] | None = None,
    ) -> None:
        """
        Args:
            works: by stage name. A stage is called as work(lane, micro_batch, cargo) and what it
                returns is the next one's cargo; the first one's is None. The barrier stage is called
                as work(lane, step, meeting), with steps counted from 0; what it returns is a result.
            delay: seconds to sleep before stage, lane and number; for tests.
            lanes: by name, where they were opened for setting up; otherwise they are opened here.

        Raises:
            GraphError: stages without work, work without a stage, or lanes missing.
        """
        stages = {stage.name for stage in graph.stages}
        if stages != set(works):
            raise GraphError(
                f"stages without work: {', '.join(sorted(stages - set(works))) or 'none'}; "
                f"work without a stage: {', '.join(sorted(set(works) - stages)) or 'none'}"
            )
        self.graph = graph
        self.timings = timings
        self.serializer = serializer
        self.lanes = dict(lanes) if lanes is not None else open_lanes(graph.lanes)
        missing = [lane.name for lane in graph.lanes if lane.name not in self.lanes]
        if missing:
            raise GraphError(f"lanes {', '.join(missing)} were not opened")
        for lane in self.lanes.values():
            lane.timings = timings
        self._works = works
        self._delay = delay
        self._run: _Run | None = None
        self._asked_to_end_after: int | None = None
        self._progress = Progress()
        self._failed: tuple[Failure, float] | None = None

    def places(self) -> dict[str, Place]:
        """What each lane of the current run is at."""
        return self._progress.places()

    def activities(self) -> dict[str, Activity]:
        """What each lane is at, since when; empty while no run is going on."""
        return {} if self._run is None else self._progress.activities()

    def slowest_s(self) -> float:
        """What the slowest stage, or wait for one, usually takes."""
        return self._progress.slowest_s()

    def holds_others_up(self) -> bool:
        """Whether a lane compiles or tunes, which others may be waiting for."""
        return self.serializer.holds_others_up()

    def failed(self) -> tuple[Failure, float] | None:
        """The first failure of the current run, from the moment it happens, and when (`time.monotonic`)."""
        return self._failed

    def fail(self, lane: str, place: Place, error: BaseException) -> bool:
        """End the current run with a failure that no lane noticed; from any thread.

        Returns:
            Whether there is a run to end.
        """
        run = self._run
        if run is None:
            return False
        self._end(run, Failure(lane, place, error))
        return True

    def _end(self, run: _Run, failure: Failure) -> None:
        self._failed = self._failed or (failure, time.monotonic())
        run.news.put(failure)
        run.stop.set()

    def request_stop(self, after_step: int = -1) -> None:
        """End the run, or the next one if none is running, when a step is done; a signal handler may call it.

        Args:
            after_step: counted from 0; a later step that a drafter lane has begun is finished first.
        """
        self._asked_to_end_after = after_step
        if self._run is not None:
            self._run.end_after(after_step)

    def run(
        self,
        first_step: int,
        last_step: int,
        on_step: Callable[[int, list[Any]], None] | None = None,
    ) -> int:
        """Run steps [first_step, last_step), counted from 0, and return with all lanes idle.

        Args:
            on_step: called in this thread with a step and the barrier stage's results of all drafter
                lanes, as soon as it is complete; later steps go on meanwhile.

        Returns:
            The step to go on with: `last_step`, or less after `request_stop`.

        Raises:
            StageFailure: a stage or `on_step` failed; its cause is the exception. Lanes that could not
                stop are in `stuck`, and the scheduler is of no further use.
        """
        run = self._run = _Run(self.graph, first_step, last_step)
        self._progress.clear()
        self._failed = None
        if self._asked_to_end_after is not None:
            run.end_after(self._asked_to_end_after)
        for lane in self.lanes.values():
            lane.stop = run.stop
            if lane.stream is not None:
                torch.cuda.synchronize(lane.device)  # setting up may have used any stream
        threads = {
            spec.name: threading.Thread(
                # Triton's allocator is a context variable, which new threads do not inherit.
                target=contextvars.copy_context().run,
                args=(self._worker, run, self.lanes[spec.name]),
                name=spec.name,
                daemon=True,
            )
            for spec in self.graph.lanes
        }
        failure = None
        with self.serializer.running(run.stop):
            try:
                for thread in threads.values():
                    thread.start()
                failure = self._follow(run, on_step)
                if failure is not None:
                    self._failed = self._failed or (failure, time.monotonic())
            finally:
                run.stop.set()
                stuck = _join(threads)
                self._run = self._asked_to_end_after = None
                for lane in self.lanes.values():
                    lane.stop = run.stop if lane.name in stuck else Stop()  # idle lanes may evaluate
        if failure is not None:
            at = {name: self._progress.place(name) for name in stuck}
            raise StageFailure(
                failure.place, failure.lane, failure.error, at, failure.held
            ) from failure.error
        return run.end

    def _follow(self, run: _Run, on_step: Callable[[int, list[Any]], None] | None) -> Failure | None:
        """Pass results on until every lane has ended; returns the first failure at once."""
        drafters = [lane.name for lane in self.graph.drafter_lanes]
        results: dict[int, dict[str, Any]] = {}
        running = {lane.name for lane in self.graph.lanes}
        while running:
            news = run.news.get()
            if isinstance(news, Failure):
                return news
            lane, step, result = news
            if step is None:
                running.remove(lane)
                if not running.intersection(drafters):
                    run.stop.set()  # targets that ran ahead of an early end would wait for good
                continue
            results.setdefault(step, {})[lane] = result
            if len(results[step]) == len(drafters):
                by_lane = results.pop(step)
                try:
                    if on_step is not None:
                        on_step(step, [by_lane[name] for name in drafters])
                except (Exception, SystemExit) as error:  # whoever leaves in here leaves a run that failed
                    return Failure("main thread", Place(stage="reporting", step=step + 1), error)
        return None

    def _worker(self, run: _Run, lane: Lane) -> None:
        program = self._target_program if lane.spec.role == "target" else self._drafter_program
        try:
            with lane.active():
                program(run, lane)
                self._progress.enter(lane.name, Place(stage=ENDED))
                lane.synchronize()
        except BaseException as error:  # whatever it was, the run must end and say so
            if not (isinstance(error, Stopped) and run.stop.is_set()):
                held = held_at(error, list(self.lanes.values()))
                self._end(run, Failure(lane.name, self._progress.place(lane.name), error, held))
        finally:
            lane.abandon_spans()
        run.news.put((lane.name, None, None))

    def _target_program(self, run: _Run, lane: Lane) -> None:
        graph = self.graph
        for micro_batch in graph.micro_batches_of(lane.spec, run.first, run.end):
            if not run.wants(graph.step_of(micro_batch)):
                return
            inbox = run.inboxes[graph.drafter_lane_of(micro_batch).name]
            cargo = None
            for stage in graph.target_stages:
                cargo, span = self._stage(run, lane, stage, micro_batch, cargo)
                if stage is graph.target_stages[-1]:
                    with lane.waiting() as wait:
                        wait.seconds = inbox.put(micro_batch, cargo)
                    span.wait(wait)
                lane.add(span)
            del cargo  # the inbox holds it now; here it would live through the next forward
            lane.pace()

    def _drafter_program(self, run: _Run, lane: Lane) -> None:
        graph = self.graph
        step = run.first
        while run.begin(step):
            for _ in graph.micro_batches_of(lane.spec, step, step + 1):
                first = graph.drafter_stages[0]
                self._progress.enter(lane.name, Place(stage=f"waiting for {first.name}", step=step + 1))
                with lane.waiting() as wait:
                    micro_batch, cargo, wait.seconds = run.inboxes[lane.name].take()
                for stage in graph.drafter_stages:
                    cargo, span = self._stage(run, lane, stage, micro_batch, cargo)
                    if stage is first:
                        span.wait(wait)
                    lane.add(span)
                del cargo  # or it would live through the wait for the next
                lane.pace()
            result, span = self._stage(run, lane, graph.barrier, step, run.meeting)
            lane.add(span)
            run.news.put((lane.name, step, result))
            step += 1

    def _stage(self, run: _Run, lane: Lane, stage: StageSpec, number: int, cargo: Any) -> tuple[Any, Span]:
        """Run one stage in its turn; returns what it returned, and its closed span."""
        micro_batch = None if stage.barrier else number
        step = (number if stage.barrier else self.graph.step_of(number)) + 1
        self._progress.enter(lane.name, Place(stage=stage.name, micro_batch=micro_batch, step=step))
        run.stop.check()
        if self._delay is not None:
            run.stop.sleep(self._delay(stage.name, lane.name, number))
        turn = self.serializer.exclusive(stage.exclusive, lane) if stage.exclusive else nullcontext()
        with turn as wait:
            span = lane.begin(stage.name, micro_batch=micro_batch, step=step)
            before = self.serializer.own_counts()
            result = self._works[stage.name](lane, number, cargo)
            span.launches = self.serializer.own_counts() - before
            lane.end(span)
        if wait is not None:
            span.wait(wait)
        return result, span


def _join(threads: Mapping[str, threading.Thread]) -> list[str]:
    """Wait for threads that were told to stop; returns the names of those that did not in time."""
    deadline = time.monotonic() + GRACE_S
    for thread in threads.values():
        if thread.ident is not None:
            thread.join(max(deadline - time.monotonic(), 0.0))
    return [name for name, thread in threads.items() if thread.is_alive()]
