"""A thread that does one small thing at equal intervals, beside lanes that must not notice it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Ticker:
    """Calls `work` every `seconds`, in a thread of its own, from `start` until `close`."""

    def __init__(
        self,
        work: Callable[[], None],
        seconds: float,
        *,
        name: str,
        on_error: Callable[[Exception], None],
    ) -> None:
        """
        Args:
            on_error: takes what `work` raised, in the ticker's thread; the next tick comes all the same.
        """
        self._work = work
        self._seconds = seconds
        self._on_error = on_error
        self._closed = threading.Event()
        self._turn = threading.Lock()
        # A daemon: a tick that hangs in a driver or on a disk keeps no process from its end.
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Begin; the first call of `work` comes one interval later."""
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Call `work` no more; any thread may say so, and more than once.

        Args:
            timeout: seconds to wait for a call that goes on at this moment.

        Returns:
            Whether that call is over, or was this thread's own.
        """
        self._closed.set()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @contextmanager
    def turn(self, timeout: float = -1) -> Iterator[bool]:
        """Keep the ticker and its owner from doing something at once, such as writing the same file.

        Args:
            timeout: seconds to wait for the other one; negative: without end.

        Yields:
            Whether the turn came; False after `timeout`.
        """
        mine = self._turn.acquire(timeout=timeout)
        try:
            yield mine
        finally:
            if mine:
                self._turn.release()

    def _loop(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                self._work()
            except Exception as error:  # whatever it was; the owner decides what it means
                self._on_error(error)
