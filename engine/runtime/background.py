"""One job at a time beside the lanes: work that must not hold them up, such as a disk's.

A job runs in a thread of its own; the next one waits for it, so that nothing piles up behind a slow
disk. What it raises is kept until the thread that gave the job asks, since only that one can end a run
in good order. A job that is no longer wanted is told so and ends at its next look.
"""

import contextvars
import threading
import time
from collections.abc import Callable

from engine.runtime.inbox import Stop, Stopped

GRACE_S = 2.0  # what a dropped job gets to end in: well within the 5 s in which a failed run ends

Job = Callable[[Stop], None]
"""Called in the background; looks at its stop between pieces of work and lets `Stopped` through."""


class Background:
    """Runs jobs one after another; its methods are called from one thread."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: of its threads, as it stands in a stack dump.
        """
        self.name = name
        self._thread: threading.Thread | None = None
        self._stop = Stop()
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is at work."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Job) -> float:
        """Begin a job once the one before is done; returns the seconds waited for it.

        Raises:
            BaseException: what an earlier job raised; this one is not begun then.
        """
        waited = self.wait()
        self._stop = Stop()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run, job, self._stop),
            name=self.name,
            daemon=True,
        )
        self._thread.start()
        return waited

    def check(self) -> None:
        """Raise what a job raised; returns at once where none did, or where one is still at work."""
        if not self.busy and self._error is not None:
            raise self._error

    def wait(self) -> float:
        """Wait for the job at work; returns the seconds that it took.

        Raises:
            BaseException: what it raised.
        """
        begin = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        self.check()
        return time.perf_counter() - begin

    def drop(self, grace_s: float = GRACE_S) -> bool:
        """Tell the job at work that it is not wanted any more; what it raises is forgotten.

        Returns:
            Whether it has ended; a job inside a system call may take longer than `grace_s`.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(grace_s)
        return not self.busy

    def _run(self, job: Job, stop: Stop) -> None:
        try:
            job(stop)
        except Stopped:
            pass
        except BaseException as error:  # whatever it was, it belongs to the thread that asks
            if not stop.is_set():
                self._error = error
