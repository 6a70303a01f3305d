"""Progress for people: a live panel on a terminal, plain lines everywhere else.

Both are fed the rows that go to metrics.jsonl, so a person sees the names that the file has. The
panel is redrawn by whoever reports a step, a few times a second at most: rich's own refresh
thread would compete with kernel launches for the Python lock.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_LOSSES_SHOWN = 20
_SECONDS_BETWEEN_DRAWINGS = 0.1

Row = Mapping[str, Any]

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("loss", "loss", ".4f"),
    ("accuracy", "accuracy", ".1%"),
    ("block prefix", "block_prefix", ".2f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
)
_EVALUATION: tuple[tuple[str, str, str], ...] = (
    ("held-out loss", "held_out_loss", ".4f"),
    ("accepted length", "accepted_length", ".2f"),
)


class Panel(Protocol):
    """What a loop reports to."""

    def step(self, row: Row) -> None:
        """A row of metrics.jsonl: `step` counts from 1; keys that are absent show as a dash."""

    def lanes(self, busy: Mapping[str, float]) -> None:
        """What share of the last moments each lane was at work, in [0, 1], by lane name."""

    def message(self, text: str) -> None:
        """A sentence that stays on the screen."""

    def close(self) -> None:
        """The last state stays; call it before anything else is printed."""


def make_panel(
    total_steps: int,
    console: Console | None = None,
    *,
    log_every: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> Panel:
    """A live panel if the console is a terminal, else plain lines.

    Args:
        total_steps: optimizer steps of the whole run, those before a resume included.
        console: standard error by default, so that standard output stays free for results.
        log_every: steps between two plain lines; the last step and evaluations always get one.
        clock: seconds; another one makes tests of the remaining time exact.
    """
    console = console or Console(stderr=True)
    remaining = RemainingTime(total_steps, clock)
    if console.is_terminal and not console.is_dumb_terminal:
        return LivePanel(total_steps, console, remaining, clock)
    return PlainLines(total_steps, console, remaining, log_every)


class RemainingTime:
    """Seconds until the last step, from the pace since the first one that was seen.

    The first step is left out of the pace: compiling and warming up happen in it.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self.total_steps = total_steps
        self.clock = clock
        self.first: tuple[int, float] | None = None

    def after(self, step: int) -> float | None:
        """Seconds left after `step`; None until there is a pace."""
        now = self.clock()
        if step < 1:
            return None
        if self.first is None:
            self.first = (step, now)
        first_step, first_time = self.first
        if step <= first_step:
            return None
        return (self.total_steps - step) * (now - first_time) / (step - first_step)


class PlainLines:
    """A line per `log_every` steps, for logs and pipes."""

    def __init__(self, total_steps: int, console: Console, remaining: RemainingTime, log_every: int) -> None:
        self.total_steps = total_steps
        self.console = console
        self.remaining = remaining
        self.log_every = log_every

    def step(self, row: Row) -> None:
        step = row["step"]
        evaluated = any(key in row for _, key, _ in _EVALUATION)
        if "loss" not in row:  # an evaluation by itself
            self.message(f"step {step}/{self.total_steps}  {_listed(_EVALUATION, row)}")
            return
        left = self.remaining.after(step)
        if step % self.log_every and step != self.total_steps and not evaluated:
            return
        columns = _COLUMNS + (_EVALUATION if evaluated else ())
        self.message(f"step {step}/{self.total_steps}  {_listed(columns, row)}  ETA {_duration(left)}")

    def lanes(self, busy: Mapping[str, float]) -> None:
        pass  # a log has the table by stage at the end

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class LivePanel:
    """A panel that is redrawn in place."""

    def __init__(
        self,
        total_steps: int,
        console: Console,
        remaining: RemainingTime,
        clock: Callable[[], float],
    ) -> None:
        self.total_steps = total_steps
        self.remaining = remaining
        self.clock = clock
        self.drawn_at = -math.inf
        self.row: Row = {"step": 0}
        self.evaluation: dict[str, Any] = {}
        self.left: float | None = None
        self.losses: deque[float] = deque(maxlen=_LOSSES_SHOWN)
        self.busy: Mapping[str, float] = {}
        self.live = Live(console=console, auto_refresh=False, transient=False)
        self.live.start()

    def step(self, row: Row) -> None:
        # An evaluation may come as a row of its own, which must not blank the training figures.
        self.row = {**self.row, **row}
        self.left = self.remaining.after(row["step"])
        if _is_finite(row.get("loss")):
            self.losses.append(row["loss"])
        if evaluated := {key: row[key] for _, key, _ in _EVALUATION if key in row}:
            self.evaluation = {**evaluated, "step": row["step"]}
        if self.clock() - self.drawn_at >= _SECONDS_BETWEEN_DRAWINGS or row["step"] >= self.total_steps:
            self._draw()

    def lanes(self, busy: Mapping[str, float]) -> None:
        self.busy = busy

    def message(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._draw()
        self.live.stop()

    def _draw(self) -> None:
        self.drawn_at = self.clock()
        self.live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        step = self.row["step"]
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(f"step {step}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(self.total_steps, 1), completed=step, width=30, finished_style="green"),
            Text(f"ETA {_duration(self.left)}"),
            Text(sparkline(list(self.losses)), style="cyan"),
        )
        lines = [bar, _figures(_COLUMNS, self.row)]
        if self.evaluation:
            lines.append(_figures(_EVALUATION, self.evaluation, f"at step {self.evaluation['step']}"))
        if self.busy:
            lanes = Table.grid(padding=(0, 1))
            for name, share in self.busy.items():
                lanes.add_row(name, ProgressBar(total=1.0, completed=share, width=30), f"{share:4.0%} busy")
            lines.append(lanes)
        return Group(*lines)


def _listed(columns: Sequence[tuple[str, str, str]], row: Row) -> str:
    return "  ".join(f"{label} {_figure(row.get(key), form)}" for label, key, form in columns)


def _figures(columns: Sequence[tuple[str, str, str]], row: Row, note: str = "") -> Table:
    table = Table.grid(padding=(0, 3))
    cells = [
        Text.assemble((f"{label} ", "dim"), (_figure(row.get(key), form), "bold"))
        for label, key, form in columns
    ]
    table.add_row(*cells, Text(note, style="dim"))
    return table


def sparkline(values: Sequence[float]) -> str:
    """Finite numbers as a row of bars between their least and their largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _figure(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {left:02d} s" if minutes else f"{left} s"
