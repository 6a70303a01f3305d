"""Finds what no exception tells: a thread that gets no further, and a run that fails and does not end.

A thread beside the lanes looks at what everybody is at. A lane that is too long in one place is a stall:
the stack of every thread and the place of every lane are told, and the run is failed as if the lane had
raised. That needs nobody's help, so it works while the lane sits in a kernel, a system call or a lock.
If the main thread does not end the run in time either, because it is the one that is stuck, the last
words are told from here and the process is left with the exit code of the failure.

How long is too long: `stall_seconds`, or 20 times what the slowest stage usually takes, for a lane that
waits is as slow as whom it waits for. While a lane compiles or tunes, which the serializer knows, all
together have an hour; and time in which this thread itself did not run, in a stopped process or a sleeping
machine, is nobody's.

Last words go through a thread of their own with a time limit, for the disk may be what hangs. A call that
keeps Python's lock for good stops this thread too: `faulthandler`, which needs no lock, then writes the
stacks to the standard error. It does not end the process, which may only have been stopped for hours by a
batch system; the heartbeat's silence tells.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from engine.errors import Stalled
from engine.runtime.failure import Failure, Place, StageFailure
from engine.runtime.inbox import Stop, Stopped
from engine.runtime.progress import Activity, Progress

USUAL_TIMES = 20  # a stage may be so many times slower than it usually is
SETTING_UP_S = 3600.0  # for loading, tuning and compiling, which take minutes and tell little
LEFT_S = 4.4  # after a failure, in which the main thread has to end the run; with what follows, 5 s
LAST_WORDS_S = 0.5
LOCKED_S = 60.0  # beyond the limit of a stall, in which this thread did not run at all
POLL_S = 0.25
ARMED_S = 10.0  # between two settings of faulthandler's clock
ASLEEP_S = 5.0  # a look that is so late was kept from running, with everybody else

MAIN = "main thread"


class Watched(Protocol):
    """What trains: lanes, or a loop."""

    def activities(self) -> Mapping[str, Activity]:
        """What each lane is at; empty while none is at work."""

    def slowest_s(self) -> float:
        """What the slowest stage usually takes."""

    def holds_others_up(self) -> bool:
        """Whether a lane compiles or tunes."""

    def failed(self) -> tuple[Failure, float] | None:
        """The first failure, from the moment it happens, and when (`time.monotonic`)."""

    def fail(self, lane: str, place: Place, error: BaseException) -> bool:
        """End the run as if a lane had raised; False where nobody would notice."""


class Watchdog:
    """Watches from `with` to its end."""

    def __init__(
        self,
        stall_seconds: float,
        *,
        tell: Callable[[str], None],
        last_words: Callable[[BaseException], None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """
        Args:
            tell: takes the report of a stall, for the log and the screen; called in a thread.
            last_words: what is written before the process is left from here; called in a thread.
        """
        self.stall_seconds = stall_seconds
        self._tell = tell
        self._last_words = last_words
        self._leave = leave
        self._watched: Watched | None = None
        self._own = Progress()
        self._at_least = 0.0
        self._excused = -1.0  # nobody was still before this moment
        self._pardoned: Failure | None = None
        self._stop = Stop()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._excused = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join(1.0)
        faulthandler.cancel_dump_traceback_later()

    def watch(self, trainer: Watched) -> None:
        """Watch its lanes too, from now on."""
        self._watched = trainer

    @contextlib.contextmanager
    def over(self, stage: str, at_least_s: float = 0.0) -> Iterator[Callable[[], None]]:
        """The main thread is at a stage inside the block; yields what to call when it got further.

        Args:
            at_least_s: how long it may take between two calls, whatever `stall_seconds` says.
        """
        place = Place(stage=stage)
        self._at_least = at_least_s
        self._own.enter(MAIN, place)
        try:
            yield lambda: self._own.enter(MAIN, place)
        finally:
            self._own.leave(MAIN)

    def pardon(self) -> None:
        """The failure so far is being dealt with in good order, which may take longer than a failure may."""
        failed = self._watched.failed() if self._watched else None
        self._pardoned = failed[0] if failed else None

    def limit_s(self, name: str, place: Place) -> float:
        """How long a thread may be in one place."""
        if name == MAIN:
            usual, at_least = self._own.usual_s(place.stage), self._at_least
        else:
            usual, at_least = self._watched.slowest_s() if self._watched is not None else 0.0, 0.0
        return max(self.stall_seconds, USUAL_TIMES * usual, at_least)

    def _watch(self) -> None:
        poll = min(POLL_S, self.stall_seconds / 5)
        looked = time.monotonic()
        armed = 0.0
        while not self._over_after(poll):
            now = time.monotonic()
            if now - armed > ARMED_S:
                armed = now
                faulthandler.dump_traceback_later(self.stall_seconds + LOCKED_S, file=sys.__stderr__ or 2)
            if now - looked > ASLEEP_S:
                self._excused = now
            looked = now
            watched = self._watched
            if watched is not None and watched.holds_others_up():
                # Many may compile one after another; somebody gets further in between.
                newest = max((one.since for one in self._all().values()), default=now)
                if now - newest < SETTING_UP_S:
                    self._excused = now
            failed = watched.failed() if watched is not None else None
            if failed is not None and failed[0] is not self._pardoned:
                if now - failed[1] > LEFT_S:
                    return self._leave_for(failed[0])
            elif (stalled := self._stalled(now)) and self._beyond_doubt(stalled, now):
                return self._end_stall(stalled, now)

    def _over_after(self, seconds: float) -> bool:
        """Wait so long, or until the run is over; returns whether it is."""
        try:
            self._stop.sleep(seconds)
        except Stopped:
            return True
        return False

    def _all(self) -> dict[str, Activity]:
        return {**(self._watched.activities() if self._watched is not None else {}), **self._own.activities()}

    def _stalled(self, now: float) -> dict[str, Activity]:
        return {
            name: activity
            for name, activity in self._all().items()
            if not activity.ended
            and now - max(activity.since, self._excused) > self.limit_s(name, activity.place)
        }

    def _beyond_doubt(self, stalled: Mapping[str, Activity], now: float) -> bool:
        """Whether it is known who hangs: one of them that waits for nobody. Who waits may have begun before
        the one that it waits for came to stand still, and is over its limit first. So it is accused only a
        quarter later, and while nobody at work has been in one place for a quarter of its own limit: that one
        gets further soon, or is the one that hangs."""

        def share(name: str, activity: Activity) -> float:
            return (now - max(activity.since, self._excused)) / self.limit_s(name, activity.place)

        if not all(self._waits(name) for name in stalled):
            return True
        at_work = {name: one for name, one in self._all().items() if not one.ended and not self._waits(name)}
        if any(share(name, activity) > 0.25 for name, activity in at_work.items()):
            return False
        return any(share(name, activity) > 1.25 for name, activity in stalled.items())

    def _end_stall(self, stalled: Mapping[str, Activity], now: float) -> None:
        name = self._culprit(stalled)
        activity = stalled[name]
        limit = self.limit_s(name, activity.place)
        error = Stalled(
            f"no progress for {now - activity.since:.1f} s (the limit is {limit:.3g} s: "
            "run.stall_seconds, or 20 times what the slowest stage usually takes); every thread's stack is "
            "in run.log. Resume from the last checkpoint; if the stage is merely slow, raise "
            "run.stall_seconds"
        )
        # The stacks are taken now: what follows changes them.
        report = stall_report(name, error, self._all())
        _in_time(lambda: self._tell(report))
        watched = self._watched
        taken = name != MAIN and watched is not None and watched.fail(name, activity.place, error)
        if taken and self._over_after(LEFT_S):
            return
        self._leave_for(Failure(name, activity.place, error))

    def _culprit(self, stalled: Mapping[str, Activity]) -> str:
        """Of those who stand still, one that does not wait for another; the longest, if several."""
        return min(stalled, key=lambda name: (self._waits(name), stalled[name].since))

    @staticmethod
    def _waits(name: str) -> bool:
        """Whether a thread waits for another lane, now."""
        frames = sys._current_frames()
        threads = {thread.name: thread.ident for thread in threading.enumerate()}
        threads[MAIN] = threading.main_thread().ident
        frame = frames.get(threads.get(name) or 0)
        while frame is not None:
            if frame.f_code is Stop.wait_for.__code__:
                return True
            frame = frame.f_back
        return False

    def _leave_for(self, failure: Failure) -> None:
        """End the process from here, unless the run has ended meanwhile."""
        error = StageFailure(failure.place, failure.lane, failure.error, {}, failure.held)
        error.__cause__ = failure.error
        _in_time(lambda: self._last_words(error))
        if not self._stop.is_set():
            self._leave(error.exit_code)


def stall_report(name: str, error: Stalled, activities: Mapping[str, Activity]) -> str:
    """Where every lane is and what it did before, then the stack of every thread."""
    lines = [f"stalled: {name} {activities.get(name, '')}: {error}", "lanes:"]
    lines += [f"  {lane} {activity}" for lane, activity in sorted(activities.items())]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for identity, frame in sorted(sys._current_frames().items()):
        if identity == threading.get_ident():
            continue
        lines.append(f"thread {names.get(identity, f'{identity}, not started by Python')}:")
        lines += [line.rstrip() for line in traceback.format_stack(frame)]
    return "\n".join(lines)


def _in_time(work: Callable[[], None]) -> None:
    """Call `work` in a thread and go on after `LAST_WORDS_S` in any case; what it raises is printed there."""
    thread = threading.Thread(target=work, name="last words", daemon=True)
    thread.start()
    thread.join(LAST_WORDS_S)
