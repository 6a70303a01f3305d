"""`status`: how a run is, told from its folder alone.

One small file is read, so it works over ssh, for another user, from a container beside the run's, and
while the run hangs. What the file says is believed as long as its writer can be: where the process
numbers are the same as ours, the kernel is asked whether the process that wrote it still lives; elsewhere
silence decides.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import attrs
import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.errors import InputError
from engine.live_status import ENDED, STATUS_FILE, LiveStatus, read_live_status
from engine.process_identity import process_start, this_machine
from engine.run_folder import LATEST

SILENT_S = 90.0  # a network file system may show a file as it was a minute ago, and clocks differ

REFRESH_S = 1.0

DEAD = "dead"

EXIT_CODES = {"failed": 1, DEAD: 5}
"""By state; `stopped` ends with the run's own code, all others with 0."""


@attrs.frozen(kw_only=True)
class Judged:
    """A status and what to make of it."""

    folder: Path
    status: LiveStatus
    state: str
    """As the status says, or `dead`."""
    reason: str | None
    """Why it is dead."""
    age_s: float
    """Of the last heartbeat; 0 where its clock is ahead of ours."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.state == DEAD or self.state in ENDED

    @property
    def exit_code(self) -> int:
        """Of the command `status`: 0 under way or done, 1 failed, 5 dead; the run's own for `stopped`."""
        if self.state == "stopped":
            return self.status.exit_code or 0
        return EXIT_CODES.get(self.state, 0)

    def as_json(self) -> bytes:
        """One object: the file's fields, with `state` as judged and what it was judged by."""
        judged = {"folder": str(self.folder), "state": self.state, "reason": self.reason, "age_s": self.age_s}
        return orjson.dumps(judged | {"said": self.status.state} | _without_state(self.status))


def find_run(path: Path) -> Path:
    """The run's folder that is meant: the folder itself, or the newest run in it.

    Raises:
        InputError: there is neither; says what was found.
    """
    if not path.is_dir():
        more = ", and `latest` beside the runs names a folder that is gone" if path.is_symlink() else ""
        raise InputError(
            f"{path}: no such folder{more}; give a run's folder, or the folder that the runs are in. A run "
            "whose start failed leaves none: what happened stands on its standard error"
        )
    if (path / STATUS_FILE).exists():
        return path.resolve()
    latest = path / LATEST
    if latest.is_symlink():
        return find_run(latest)
    raise InputError(
        f"{path}: holds neither {STATUS_FILE} nor `{LATEST}`: no run's folder, and none that runs are in"
    )


def judge(folder: Path, now: float | None = None) -> Judged:
    """Read a run's status and decide whether it can still be believed.

    Args:
        now: unix time, the present by default.

    Raises:
        InputError: there is no status, or none that can be read.
    """
    status = read_live_status(folder / STATUS_FILE)
    age = max((time.time() if now is None else now) - status.time, 0.0)
    reason = None if status.state in ENDED else _death(status, age)
    return Judged(
        folder=folder, status=status, state=DEAD if reason else status.state, reason=reason, age_s=age
    )


def _death(status: LiveStatus, age: float) -> str | None:
    """Why a run that says that it is under way is not."""
    if status.machine is not None and status.machine == this_machine():
        started = process_start(status.pid)
        if started is None:
            return f"process {status.pid} is gone, without a word"
        if started != status.process_start:
            return f"process {status.pid} is gone, and another one has its number now"
        silent = f"process {status.pid} is there, but gave no heartbeat for {_span(age)}: stopped or hung"
    else:
        silent = (
            f"no heartbeat for {_span(age)}; process {status.pid} is on another host or in another container"
        )
    return silent if age > SILENT_S else None


def show_status(path: Path, *, watch: bool, as_json: bool, output: TextIO) -> int:
    """Print how a run is; returns the exit code of the command.

    Args:
        watch: go on until the run is over.
        as_json: one object; with `watch` one a line, whenever there is a new heartbeat.

    Raises:
        InputError: no run there, or a status that cannot be read.
    """
    folder = find_run(path)
    if not watch:
        judged = judge(folder)
        if as_json:
            output.write(judged.as_json().decode() + "\n")
        else:
            _console(output).print(picture(judged))
        return judged.exit_code
    if as_json:
        return _follow(folder, lambda judged: _write_line(output, judged))
    console = _console(output)
    if not console.is_terminal:
        return _follow(folder, lambda judged: console.print(picture(judged)))
    with Live(console=console, auto_refresh=False) as live:
        return _follow(folder, lambda judged: live.update(picture(judged), refresh=True), every_time=True)


def _console(output: TextIO) -> Console:
    """In a file or a pipe as wide as the tables."""
    return Console(file=output, width=None if output.isatty() else 120)


def _write_line(output: TextIO, judged: Judged) -> None:
    output.write(judged.as_json().decode() + "\n")
    output.flush()


def _follow(folder: Path, show: Callable[[Judged], None], every_time: bool = False) -> int:
    """Show a run until it is over: at each heartbeat, or each second, too, where its age is to be seen."""
    shown = None
    while True:
        judged = judge(folder)
        news = (judged.state, judged.status.time)
        if every_time or news != shown:
            show(judged)
        shown = news
        if judged.over:
            return judged.exit_code
        time.sleep(REFRESH_S)


def picture(judged: Judged, now: float | None = None) -> RenderableType:
    """A run's status for people: a few lines, the lanes, the GPUs."""
    status = judged.status
    now = time.time() if now is None else now
    colour = {"failed": "red", DEAD: "red", "stopped": "yellow"}.get(judged.state, "green")
    headline = Text.assemble(f"{judged.folder}: ", (judged.state, f"bold {colour}"))
    if judged.reason:
        headline.append(f", it was {status.state}")
    if status.exit_code is not None:
        headline.append(f", exit code {status.exit_code}")
    parts: list[RenderableType] = [headline]
    if judged.reason:
        parts.append(Text(judged.reason))
    if status.error:
        parts.append(Text(status.error))
    parts.append(Text("  ".join(_figures(judged))))
    began = _span(now - status.started)
    parts.append(
        Text(f"heartbeat {_span(judged.age_s)} ago from process {status.pid}, which began {began} ago")
    )
    if status.checkpoint:
        written = _span(now - status.checkpoint.time)
        parts.append(Text(f"last checkpoint {status.checkpoint.name}, {written} ago"))
    if status.resumed_from:
        parts.append(Text(f"resumed from {status.resumed_from}"))
    if status.lanes:
        parts.append(_lanes(status))
    if status.gpu_memory:
        parts.append(_gpus(status))
    return Group(*parts)


def _figures(judged: Judged) -> list[str]:
    status = judged.status
    step = "–" if status.step is None else f"{status.step:,}"
    last = "–" if status.last_step is None else f"{status.last_step:,}"
    figures = [f"step {step}/{last}"]
    figures.append("loss –" if status.loss is None else f"loss {status.loss:.4f}")
    figures.append("tokens/s –" if status.tokens_per_s is None else f"tokens/s {status.tokens_per_s:,.0f}")
    if not judged.over:
        figures.append("ETA –" if status.eta_s is None else f"ETA {_span(status.eta_s)}")
    return figures


def _lanes(status: LiveStatus) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("lane", "at", "for", "busy"):
        table.add_column(heading, justify="right" if heading in ("for", "busy") else "left")
    for name, lane in status.lanes.items():
        at = [lane.stage]
        if lane.micro_batch is not None:
            at.append(f"micro-batch {lane.micro_batch}")
        if lane.step is not None:
            at.append(f"step {lane.step}")
        busy = "–" if lane.busy is None else f"{lane.busy:.0%}"
        table.add_row(name, ", ".join(at), _span(status.time - lane.since), busy)
    return table


def _gpus(status: LiveStatus) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("GPU memory", "used", "of", "most allocated by this run"):
        table.add_column(heading, justify="left" if heading == "GPU memory" else "right")
    for name, memory in status.gpu_memory.items():
        peak = memory.peak_allocated_gb
        table.add_row(
            name,
            f"{memory.used_gb:.1f} GB",
            f"{memory.total_gb:.1f} GB",
            "–" if peak is None else f"{peak:.1f} GB",
        )
    return table


def _span(seconds: float) -> str:
    """A time span; tenths where they can be told."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"
    return f"{hours // 24} days {hours % 24} h"


def _without_state(status: LiveStatus) -> dict[str, Any]:
    values = attrs.asdict(status)
    del values["state"]
    return values
