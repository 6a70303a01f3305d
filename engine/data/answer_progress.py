"""How far a regeneration is: a line every few seconds, with the remaining time.

How many answers a file asks for is known only once it is parsed, so progress is counted in rows; each
answer is its share of one. The pace is that of answers written now, not of those an earlier attempt left.
"""

import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console

SECONDS_BETWEEN_LINES = 10.0


class AnswerProgress:
    """A line every few seconds; on a terminal the same line again and again."""

    def __init__(self, rows: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows, self._console, self._clock = rows, console, clock
        self._done = 0.0  # rows, in parts of a row
        self._share = 0.0  # of a row that an answer of this chunk is
        self._fresh = 0.0  # rows answered now, for the pace
        self._tokens = 0
        self._begun = self._told = clock()
        self._end = 0.0

    def begin(self, rows: int, answers: int) -> None:
        """A chunk of rows, with so many answers to write."""
        self._end = self._done + rows
        self._share = rows / answers if answers else 0.0

    def passed(self, answers: int) -> None:
        """So many answers of the chunk are there, or will not be written."""
        self._done += answers * self._share

    def tell(self, answers: int, tokens: int) -> None:
        """A batch was written."""
        self._fresh += answers * self._share
        self._tokens += tokens
        now = self._clock()
        terminal = self._console.is_terminal
        if not answers or (not terminal and now - self._told < SECONDS_BETWEEN_LINES):
            return
        self._told = now
        elapsed = max(now - self._begun, 1e-9)
        left = timedelta(seconds=round((self._rows - self._done) * elapsed / self._fresh))
        speed = self._tokens / elapsed
        line = f"answered {self._done:,.0f} of {self._rows:,} rows, {speed:,.0f} tokens/s, ETA {left}"
        self._console.print(
            line.ljust(self._console.width - 1) if terminal else line,
            end="\r" if terminal else "\n",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def end(self) -> None:
        """The chunk is over."""
        self._done = self._end
        if self._console.is_terminal and self._end >= self._rows:
            self._console.print()
