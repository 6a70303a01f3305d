"""Admission by credit, and waiting that a stop can end.

Micro-batches reach a drafter lane from several target lanes and must be consumed in their order. A
plain bounded queue deadlocks there: it fills with later micro-batches while the one that is due
finds no place. So a place is a credit for a position: micro-batch `i` may enter only when it is
within `depth` of the next one that the lane will take. The one that is due then always has a
place, and a drafter lane never holds more than `depth` waiting.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import EngineError

POLL_S = 0.05  # a stop needs no list of who waits for what; it is seen this late at most


class Stopped(BaseException):
    """The run is over while this lane waited. No error of its own, and no `except Exception` eats it."""


class Stop:
    """A run's end, seen by every wait of every lane."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises Stopped when the run is over."""
        if self._event.is_set():
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Raises Stopped when the run is over before."""
        if self._event.wait(seconds):
            raise Stopped

    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool]) -> float:
        """Wait, holding `condition`, until `ready()`; returns the seconds that it took.

        Raises:
            Stopped: the run is over, even where `ready()` would hold: nothing new begins then.
        """
        self.check()
        if ready():
            return 0.0
        begin = time.perf_counter()
        while not ready():
            condition.wait(POLL_S)
            self.check()
        return time.perf_counter() - begin


def admits(position: int, taken: int, depth: int) -> bool:
    """Whether a lane that has taken `taken` micro-batches has a credit for the one at `position`."""
    return position < taken + depth


class Inbox:
    """What waits for one drafter lane."""

    def __init__(self, expected: Sequence[int], depth: int, stop: Stop) -> None:
        """
        Args:
            expected: micro-batches in the order in which the lane takes them.
            depth: how many may wait.
        """
        self._expected = expected
        self._positions = {micro_batch: position for position, micro_batch in enumerate(expected)}
        self._depth = depth
        self._stop = stop
        self._items: dict[int, Any] = {}
        self._taken = 0
        self._changed = threading.Condition()

    def put(self, micro_batch: int, item: Any) -> float:
        """Hand a micro-batch in once it has a credit; returns the seconds waited.

        Raises:
            Stopped: the run is over.
            EngineError: the lane does not expect it, or had it already.
        """
        position = self._positions.get(micro_batch)
        if position is None:
            raise EngineError(f"micro-batch {micro_batch} was sent to a lane that does not expect it")
        with self._changed:
            if micro_batch in self._items or position < self._taken:
                raise EngineError(f"micro-batch {micro_batch} was sent to its lane twice")
            waited = self._stop.wait_for(self._changed, lambda: admits(position, self._taken, self._depth))
            self._items[micro_batch] = item
            self._changed.notify_all()
        return waited

    def take(self) -> tuple[int, Any, float]:
        """The next micro-batch in order: its number, what was put, and the seconds waited for it.

        Raises:
            Stopped: the run is over.
            EngineError: all expected micro-batches were taken.
        """
        with self._changed:
            if self._taken == len(self._expected):
                raise EngineError(f"the lane took all of its {self._taken} micro-batches and wants another")
            due = self._expected[self._taken]
            waited = self._stop.wait_for(self._changed, lambda: due in self._items)
            self._taken += 1
            self._changed.notify_all()
            return due, self._items.pop(due), waited
