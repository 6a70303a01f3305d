"""Being asked to end: by a signal, or by the clock.

The first SIGINT or SIGTERM asks: the step that is under way is finished, saved, and the run ends with 130
or 143. The second one leaves at once. `--max-hours` asks in the same way, and the run then ends with 0.
Before the first step there is nothing to save, so the first signal ends that at once. SIGHUP is not
meant for a training run: its terminal has gone, and what it would print from then on goes nowhere.

Python's handlers run in the main thread alone, which may sit in a kernel's wait for minutes. So they do
next to nothing: the interpreter also writes each signal's number into a pipe, wherever the main thread
is, and a thread reads it there.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import attrs

SETTING_UP_S = 3.0  # in which the main thread has to end what it sets up; then it is left as it is

ENDING = (signal.SIGINT, signal.SIGTERM)


@attrs.frozen
class Asked:
    """Why a run is to end before its last step."""

    why: str
    exit_code: int


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. No `except Exception` takes it for an error of its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupts:
    """Listens from `with` to its end; signals only where that is in the main thread."""

    def __init__(
        self,
        max_hours: float | None = None,
        *,
        tell: Callable[[str], None],
        last_words: Callable[[Asked], None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """
        Args:
            max_hours: when the clock asks, from now.
            tell: takes a line for the screen; called in a thread.
            last_words: called in a thread before the process is left from there.
        """
        self.asked: Asked | None = None
        self._until = None if max_hours is None else time.monotonic() + max_hours * 3600
        self._max_hours = max_hours
        self._tell = tell
        self._last_words = last_words
        self._leave = leave
        self._stop: Callable[[], None] | None = None
        self._begun = False
        self._over = False

    def __enter__(self) -> "Interrupts":
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._woken_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            for number in ENDING:
                self._before[number] = signal.signal(number, self._in_main_thread)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda number, frame: None)
        self._thread = threading.Thread(target=self._listen, name="interrupts", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._over = True
        if self._before:
            for number, handler in self._before.items():
                # None stands for a handler that C code had installed, which cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._woken_before)
        os.write(self._writing, b"\0")
        self._thread.join(1.0)
        for descriptor in (self._reading, self._writing):
            os.close(descriptor)

    @contextlib.contextmanager
    def stepping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Steps are done inside the block, and there is something to save from here on.

        Args:
            stop: called in a thread when somebody asks; lets the step under way be finished.
        """
        self._stop, self._begun = stop, True
        try:
            if self.asked is not None:  # while nobody was there to be told
                stop()
            yield
        finally:
            self._stop = None

    def check(self) -> None:
        """Raises Interrupted where a signal asked for the end."""
        if self.asked is not None and self.asked.exit_code:
            raise Interrupted(self.asked.why, self.asked.exit_code)

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if not self._begun and not self._over:
            self.asked = self.asked or _by_signal(number)
            self.check()

    def _listen(self) -> None:
        ending = 0
        leave_at: float | None = None
        while True:
            times = [time_ for time_ in (self._until if self.asked is None else None, leave_at) if time_]
            wait = max(min(times) - time.monotonic(), 0.0) if times else None
            ready, _, _ = select.select([self._reading], [], [], wait)
            if self._over:
                return
            now = time.monotonic()
            if leave_at is not None and now >= leave_at and not self._begun:
                return self._go(self.asked)
            for number in os.read(self._reading, 64) if ready else b"":
                if number == signal.SIGHUP:
                    self._let_terminals_go()
                if number not in ENDING:
                    continue
                ending += 1
                asked = _by_signal(number)
                if ending > 1:
                    return self._go(asked)
                if not self._begun:
                    leave_at = now + SETTING_UP_S
                    self.asked = self.asked or asked
                else:
                    self._ask(asked)
            if self._until is not None and self.asked is None and now >= self._until:
                self._ask(Asked(f"--max-hours {self._max_hours:g} have passed", 0))

    def _ask(self, asked: Asked) -> None:
        if self.asked is None or not self.asked.exit_code:
            self.asked = asked
        stop = self._stop
        if stop is not None:
            stop()
        if self._begun:
            again = "; the same again leaves at once" if asked.exit_code else ""
            self._tell(f"{asked.why}: finishing the step, saving, then the end{again}")

    def _go(self, asked: Asked | None) -> None:
        if asked is not None:
            self._last_words(asked)
            self._leave(asked.exit_code)

    def _let_terminals_go(self) -> None:
        """What the process prints to a terminal that has gone would fail; now it goes nowhere."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _by_signal(number: int) -> Asked:
    return Asked(signal.Signals(number).name, 128 + number)
