"""A lock that lanes wait for: the wait ends with the run, and its length is known."""

import threading

from engine.errors import EngineError
from engine.runtime.lane import Lane
from engine.runtime.timing import Wait


class Turn:
    """One lane has it at a time."""

    def __init__(self, *, again: bool = False) -> None:
        """
        Args:
            again: whether the lane that has the turn may take it once more.
        """
        self._free = threading.Condition()
        self._holder: str | None = None
        self._again = again
        self._times = 0

    def take(self, lane: Lane) -> Wait:
        """Returns the wait for it. Raises Stopped when the run is over, EngineError when it has the turn."""
        with lane.waiting() as wait, self._free:
            if self._holder != lane.name:
                wait.seconds = lane.stop.wait_for(self._free, lambda: self._holder is None)
            elif not self._again:
                raise EngineError(f"{lane.name} asks for a turn that it has, and would wait for itself")
            self._holder = lane.name
            self._times += 1
        return wait

    def give_up(self) -> None:
        with self._free:
            self._times -= 1
            if not self._times:
                self._holder = None
                self._free.notify_all()
