"""What looks after a run from outside: signals, the clock and the watchdog, and what they say and write.

All three live in threads of their own and outlast whatever the main thread is stuck in; so what they do
to a run goes through here: ask the trainer to end, tell log and screen, and, where the process has to be
left from such a thread, the last status.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from engine.heartbeat import Heartbeat
from engine.interrupts import Asked, Interrupts
from engine.run_folder import RunFolder
from engine.runtime.watchdog import SETTING_UP_S, Watchdog, Watched

LAST_WORDS_S = 0.4  # for what is written before the process is left; a hanging disk must not keep it


class Guarded(Protocol):
    """What trains, as far as its guard is concerned."""

    @property
    def watched(self) -> Watched:
        """What tells how its lanes get on."""

    def request_stop(self) -> None:
        """End when the step under way is done; from any thread."""


class Guard:
    """Of one run, from `with` to its end."""

    def __init__(
        self,
        stall_seconds: float,
        max_hours: float | None,
        say: Callable[[str], None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """
        Args:
            say: takes a line for the screen, from any thread.
        """
        self._say = say
        self._folder: RunFolder | None = None
        self._heartbeat: Heartbeat | None = None
        self._has_steps = False
        self._setting_up = contextlib.ExitStack()
        self.interrupts = Interrupts(max_hours, tell=self._tell, last_words=self._interrupted, leave=leave)
        self.watchdog = Watchdog(stall_seconds, tell=self._tell, last_words=self._failed, leave=leave)

    def __enter__(self) -> "Guard":
        with contextlib.ExitStack() as entered:
            entered.enter_context(self.interrupts)
            entered.enter_context(self.watchdog)
            self._further = self._setting_up.enter_context(self.watchdog.over("setting up", SETTING_UP_S))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._entered.close()

    @property
    def asked(self) -> Asked | None:
        """Why the run is to end early."""
        return self.interrupts.asked

    def keeps(self, folder: RunFolder, heartbeat: Heartbeat) -> None:
        """Where a run's last words go; until it steps, leaving it removes the folder."""
        self._folder, self._heartbeat = folder, heartbeat

    def say(self, text: str) -> None:
        """A line for the screen; while a run is set up, it also shows that this got further."""
        if not self._has_steps:
            self._further()
        self._say(text)

    @contextlib.contextmanager
    def stepping(self, trainer: Guarded) -> Iterator[None]:
        """Steps are done inside the block."""
        self._setting_up.close()
        self._has_steps = True
        self.watchdog.watch(trainer.watched)
        with self.interrupts.stepping(trainer.request_stop):
            yield

    def _tell(self, text: str) -> None:
        """To the log, if there is one, and the first line to the screen; before steps all goes there."""
        logged = self._folder is not None and self._has_steps
        if self._folder is not None and logged:
            self._folder.log(text)
        self._say(text.partition("\n")[0] if logged else text)

    def _failed(self, error: BaseException) -> None:
        self._leaves(lambda heartbeat: heartbeat.end_with(error), f"failed: {type(error).__name__}: {error}")

    def _interrupted(self, asked: Asked) -> None:
        def end(heartbeat: Heartbeat) -> None:
            heartbeat.end("stopped", asked.exit_code, asked.why)

        _in_time(lambda: self._leaves(end, f"left at once: {asked.why}"))

    def _leaves(self, end: Callable[[Heartbeat], Any], line: str) -> None:
        """The process is about to be left from a thread."""
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
        if self._heartbeat is not None:
            end(self._heartbeat)
        if self._folder is None:
            return
        if self._has_steps:
            self._folder.log(line)
        else:
            self._folder.discard()


def _in_time(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="last words", daemon=True)
    thread.start()
    thread.join(LAST_WORDS_S)
