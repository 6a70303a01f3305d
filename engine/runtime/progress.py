"""What each thread of a run is at, since when, and how long it is usually there.

A lane tells when it goes from one place to the next; that is all that a watchdog, a heartbeat and a
failure's message need to know of it, and it costs a lane two dictionary entries a stage. What is
usual is the median of a place's last few stays, so that a first one, which compiled, does not count
for long.
"""

import statistics
import time
from collections import deque

import attrs

from engine.runtime.failure import Place

STAYS = 9  # kept of each place, to take the median of
ENDED = "end of the run"


@attrs.frozen(kw_only=True)
class Activity:
    """What one thread is at."""

    place: Place
    since: float
    """Of `time.monotonic`."""
    before: Place | None = None
    """Where it was last."""

    @property
    def ended(self) -> bool:
        """Whether it has nothing more to do."""
        return self.place.stage == ENDED

    def __str__(self) -> str:
        text = f"at {self.place} for {time.monotonic() - self.since:.1f} s"
        return text if self.before is None else f"{text}, after {self.before}"


class Progress:
    """Of some threads, by name. Each is told of by itself alone, and read by anybody."""

    def __init__(self) -> None:
        self._activities: dict[str, Activity] = {}
        self._stays: dict[str, deque[float]] = {}

    def enter(self, name: str, place: Place) -> None:
        """`name` is at `place` from now on; entering a place again is progress too."""
        now = time.monotonic()
        left = self._activities.get(name)
        if left is not None:
            self._stays.setdefault(left.place.stage, deque(maxlen=STAYS)).append(now - left.since)
        self._activities[name] = Activity(place=place, since=now, before=left.place if left else None)

    def leave(self, name: str) -> None:
        """`name` has nothing more to do."""
        self._activities.pop(name, None)

    def clear(self) -> None:
        """Forget who is where; what is usual stays."""
        self._activities = {}

    def activities(self) -> dict[str, Activity]:
        """Who is where, by name."""
        return self._activities.copy()

    def places(self) -> dict[str, Place]:
        """Where everybody is or has ended."""
        return {name: activity.place for name, activity in self.activities().items()}

    def place(self, name: str) -> Place:
        """Where `name` is."""
        activity = self._activities.get(name)
        return Place(stage="start") if activity is None else activity.place

    def usual_s(self, stage: str) -> float:
        """The usual stay at a stage; 0 before there is any."""
        stays = list(self._stays.get(stage, ()))
        return statistics.median(stays) if stays else 0.0

    def slowest_s(self) -> float:
        """The usual stay where one stays longest."""
        return max((self.usual_s(stage) for stage in self._stays.copy()), default=0.0)


class LoopProgress(Progress):
    """Of one loop in the main thread: nobody waits for anybody, and nothing can be failed from outside."""

    def holds_others_up(self) -> bool:
        """Never: there are no others."""
        return False

    def failed(self) -> None:
        """Nothing: a failure is raised where it happens."""

    def fail(self, lane: str, place: Place, error: BaseException) -> bool:
        """False: the loop looks for no failure of another thread's."""
        return False
