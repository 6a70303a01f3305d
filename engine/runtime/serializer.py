"""What must not run at once: stages that share a word, and kernel launches that corrupt each other.

`exclusive` is a schedule's wish: stages with the same word never overlap, so a turn is given up only
when the lane's device work is over as well. `launching` is a need: Triton's autotuner keeps the
arguments of the current call on an object that all threads share, so launches of autotuned kernels
must be kept apart in time. In mode "stage" a whole forward's launches are one lane's alone; its
device work runs on beside other lanes'. Mode "none" keeps nothing apart and is for debugging.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineError, ScheduleError
from engine.runtime.lane import Lane
from engine.runtime.timing import Wait

MODES = ("stage", "none")


class _Turn:
    """A lock whose wait ends with the run, and whose length is known."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._holder: str | None = None

    def take(self, lane: Lane) -> Wait:
        """Returns the wait for it. Raises Stopped when the run is over, EngineError when it has the turn."""
        with lane.waiting() as wait, self._free:
            if self._holder == lane.name:
                raise EngineError(f"{lane.name} asks for a turn that it has, and would wait for itself")
            wait.seconds = lane.stop.wait_for(self._free, lambda: self._holder is None)
            self._holder = lane.name
        return wait

    def give_up(self) -> None:
        with self._free:
            self._holder = None
            self._free.notify_all()


class Serializer:
    """The one object of a run that keeps work apart."""

    def __init__(self, mode: str) -> None:
        """
        Args:
            mode: "stage" or "none".

        Raises:
            ScheduleError: another mode.
        """
        if mode not in MODES:
            raise ScheduleError(f"serialize.launches = {mode!r}: expected one of {', '.join(MODES)}")
        self.mode = mode
        self._lock = threading.Lock()
        self._words: dict[str, _Turn] = {}
        self._launches = _Turn()

    @contextmanager
    def exclusive(self, word: str, lane: Lane) -> Iterator[Wait]:
        """Run alone among all lanes that use `word`; yields the wait for it.

        Raises:
            Stopped: the run was over before the turn came.
            EngineError: the lane runs alone under this word already.
        """
        with self._lock:
            turn = self._words.setdefault(word, _Turn())
        wait = turn.take(lane)
        try:
            yield wait
            lane.synchronize()
        except BaseException:
            # Its kernels may still run: whoever is next must find the run stopped, not the turn free.
            lane.stop.set()
            raise
        finally:
            turn.give_up()

    @contextmanager
    def launching(self, lane: Lane) -> Iterator[None]:
        """Launch a whole forward with no other lane launching one.

        Leave it before anything is synchronised: whoever waits for the device in here makes all
        lanes wait. Waiting for it is counted to the lane's open spans.

        Raises:
            Stopped: the run was over before the turn came.
        """
        if self.mode == "none":
            yield
            return
        self._launches.take(lane)
        try:
            yield
        finally:
            self._launches.give_up()
