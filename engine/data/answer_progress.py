"""How far a regeneration is: a line every few seconds, with the remaining time.

The pace is that of answers written now, not of those that an earlier attempt or another part left:
these pass in no time. While nothing else passes, their own pace says when the last of them will have.
"""

import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console

SECONDS_BETWEEN_LINES = 5.0


class AnswerProgress:
    """A line every few seconds; on a terminal the same line again and again."""

    def __init__(
        self, answers: int, there: int, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            answers: that are asked for. there: of these, written before.
        """
        self._answers, self._there, self._console, self._clock = answers, there, console, clock
        self._done = 0
        self._written = 0
        self._tokens = 0
        self._begun = self._told = clock()
        self._open = False  # whether the cursor stands in a line

    def passed(self, answers: int) -> None:
        """So many answers have their place, or will not be written."""
        self._done += answers

    def tell(self, written: int, found: int, tokens: int) -> None:
        """A batch is done: answers written now, of so many tokens, and answers that were there."""
        self._written += written
        self._there = max(self._there - found, 0)
        self._tokens += tokens
        now = self._clock()
        terminal = self._console.is_terminal
        if now - self._told < (0.2 if terminal else SECONDS_BETWEEN_LINES):
            return
        self._told = now
        elapsed = max(now - self._begun, 1e-9)
        left = self._answers - self._done
        if self._written:
            seconds = max(left - self._there, 0) * elapsed / self._written
        else:
            seconds = left * elapsed / max(self._done, 1)
        line = (
            f"{self._done:,} of {self._answers:,} answers; {self._tokens:,} tokens written, "
            f"{self._tokens / elapsed:,.0f} tokens/s; {timedelta(seconds=round(seconds))} left"
        )
        self._open = terminal
        self._console.print(
            line.ljust(self._console.width - 1) if terminal else line,
            end="\r" if terminal else "\n",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def end(self) -> None:
        """The batches that were read are done; after the last of all, the line ends."""
        if self._open and self._done >= self._answers:
            self._console.print()
            self._open = False
