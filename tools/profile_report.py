"""Show where a run's time went, from its timings.jsonl.

    python tools/profile_report.py runs/latest
    python tools/profile_report.py runs/latest --png gantt.png --steps 3

A table by stage and lane, the busy share of each lane, tokens/s, and the stage that bounds the run;
where the run counted kernel launches, a table of them, of tuning and of the time waited for locks;
with --png a Gantt chart of the last steps. What the words mean: a span is busy from its launch until
host and device are both done with it; a share is of the wall time, from the end of the steps that are
left out to the end of the last span; spans that overlap on a lane count once; waiting is time in which
a lane stood still for input, its turn, other lanes or room. The last line says how the bound is found.

Exit code 2 where the file cannot be read as timings; 6 where the chart cannot be written.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console

from engine.bottleneck import lane_key
from engine.errors import DiskError, EngineError, InputError
from engine.launch_table import launch_table
from engine.stage_times import STAGE_ORDER, StageTimes, lay_waits, stage_key, summarise, window_begin
from engine.timing_rows import BadRow, SpanLog, Spans

CHUNK_BYTES = 1 << 20
"""Rows of a chunk are dictionaries for a moment; more of them fit no cache, and take half as long again."""
STEPS_DRAWN = 3
WIDTH_WITHOUT_TERMINAL = 150
"""Columns of a table in a file or a pipe, where nothing says how wide it may be."""

OWN_COLOURS = dict(zip(STAGE_ORDER, ("#4269d0", "#97bbf5", "#6cc5b0", "#efb118", "#ff725c"), strict=True))
OTHER_COLOURS = ("#a463f2", "#9c6b4e", "#3ca951", "#ff8ab7", "#9498a0")


def timings_path(path: Path) -> Path:
    """The file that is meant by a run's folder or a file.

    Raises:
        InputError: there is none.
    """
    file = path / "timings.jsonl" if path.is_dir() else path
    if not file.is_file():
        what = "a folder without timings.jsonl" if path.is_dir() else "no such file or folder"
        raise InputError(f"{path}: {what}; give a run's folder or its timings.jsonl")
    return file


def read_timings(file: Path) -> tuple[Spans, list[str]]:
    """Read timings.jsonl by chunks.

    Returns:
        The spans, and a note for a reader where a last line without its end was skipped.

    Raises:
        InputError: a damaged line, named by number; no whole line; or the file cannot be read.
    """
    log, notes, lines_before = SpanLog(), [], 0
    try:
        with file.open("rb") as opened:
            while lines := opened.readlines(CHUNK_BYTES):
                number = lines_before + len(lines)
                # A run that was killed, or that writes at this moment, leaves part of a line.
                if not lines[-1].endswith(b"\n") and not _is_json(lines[-1]):
                    notes.append(f"line {number} is not whole and was skipped: the run was writing it")
                    lines.pop()
                _take_in(log, lines, file, lines_before)
                lines_before = number
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    spans = log.spans()
    if not len(spans):
        what = "holds no whole line" if lines_before else "is empty"
        raise InputError(f"{file}: {what}; a run writes a line for each stage of its first step")
    return spans, notes


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _take_in(log: SpanLog, lines: list[bytes], file: Path, lines_before: int) -> None:
    rows: list[Any] = []
    damaged: InputError | None = None
    try:
        for line in lines:
            rows.append(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        number = lines_before + len(rows) + 1
        damaged = InputError(f"{file}: line {number} is damaged: {error}; mend or remove it")
    try:
        log.add(rows)
    except BadRow as error:
        number = lines_before + error.index + 1
        raise InputError(f"{file}: line {number} is no span: {error.reason}; mend or remove it") from None
    if damaged:
        raise damaged


def print_report(times: StageTimes, file: Path, notes: list[str], console: Console) -> None:
    """The tables and the sentences around them."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    measured = "all spans" if times.first_step is None else f"steps {times.first_step} to {times.last_step}"
    say(f"{file}: {measured}, {times.spans:,} spans in {times.wall_s:,.3f} s")
    for note in notes:
        say(f"note: {note}")
    console.print(times.table())
    console.print(times.lane_table())
    if times.launches:
        console.print(launch_table(times.launches))
    if times.tokens_per_s is not None:
        say(f"{times.tokens_per_s:,.0f} tokens/s: {times.tokens:,} tokens in {times.wall_s:,.3f} s")
    say(f"no lane busy: {times.idle_share:.1%} of the wall time")
    say(times.bound.sentence())


def warm_up_note(times: StageTimes, asked: int | None) -> list[str]:
    """Says that steps are left out, by whose choice, and how to count them."""
    if not times.left_out:
        return []
    if asked is not None:
        return [f"the {times.left_out} steps before step {asked} are left out (--first)"]
    return ["the first step is left out (compiling, warming up); --first with its number counts it"]


def draw_gantt(spans: Spans, times: StageTimes, steps: int, png: Path) -> None:
    """Draw the last steps: a row per lane, a colour per stage, waiting pale and hatched.

    Everything that lanes did in that time is drawn, work ahead for later steps included.

    Raises:
        InputError: matplotlib is not installed. DiskError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise InputError(f"--png needs matplotlib, which cannot be imported ({error}); install it") from None

    whole = spans.where(~spans.is_part())
    present = np.unique(whole.step[~np.isnan(whole.step)])[-steps:]
    shown = whole.step >= present[0] if present.size else np.ones(len(whole), dtype=bool)
    begin, end = window_begin(whole, shown), float(whole.end[shown].max())
    waits = lay_waits(whole)
    seen = whole.where((whole.end > begin) & (whole.start < end))
    lanes = sorted({whole.lanes[number] for number in np.unique(whole.lane)}, key=lane_key)
    names = [whole.stages[number] for number in np.unique(seen.stage)]
    names.sort(key=lambda name: stage_key(name, whole.stages))
    colours = _colours(names)
    busy = {lane.name: lane.busy for lane in times.lanes}

    # A figure of its own, with no global state of pyplot behind it.
    figure = Figure(figsize=(14, 1.7 + 0.42 * max(len(lanes), 2)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for stage, lane, members in whole.groups():
        group = whole.where(members)
        colour, row = colours[whole.stages[stage]], lanes.index(whole.lanes[lane])
        pale = _bars(*waits.intervals(members), begin, end)
        axes.broken_barh(
            pale, (row - 0.28, 0.56), facecolor=colour, edgecolor="grey", alpha=0.3, hatch="////", lw=0
        )
        bars = _bars(group.start, group.end, begin, end)
        # The pale edge keeps short neighbours of one stage apart.
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, edgecolor="white", lw=0.4, zorder=3)
    for step in present:
        over = float(whole.end[whole.step == step].max()) - begin
        axes.axvline(over, color="black", lw=0.8, ls=":", zorder=4)
        axes.text(over, -0.6, f"step {step:.0f} ends ", ha="right", va="bottom", fontsize=8)
    axes.set_xlim(0, end - begin)
    axes.set_ylim(len(lanes) - 0.45, -0.95)
    axes.set_yticks(
        range(len(lanes)), [f"{lane}  {busy[lane]:4.0%}" if lane in busy else lane for lane in lanes]
    )
    axes.set_xlabel("seconds; beside each lane its busy share over all measured steps")
    axes.spines[["top", "right"]].set_visible(False)
    rate = "" if times.tokens_per_s is None else f", {times.tokens_per_s:,.0f} tokens/s"
    axes.set_title(f"the last {max(present.size, 1)} of {times.steps} measured steps{rate}", loc="left")
    key = [Patch(facecolor=colours[name], label=name) for name in names]
    key.append(Patch(facecolor="lightgrey", edgecolor="grey", hatch="////", lw=0, label="waiting"))
    figure.legend(handles=key, loc="outside lower center", ncols=min(len(key), 6), frameon=False)
    try:
        figure.savefig(png, format="png")
    except OSError as error:
        raise DiskError(
            f"{png}: the chart cannot be written: {error.strerror}; give another --png"
        ) from error


def _bars(
    start: NDArray[np.float64], end: NDArray[np.float64], begin: float, last: float
) -> list[tuple[float, float]]:
    """(from, length) in seconds since `begin`, cut to the window; nothing for what has no length there."""
    low, high = (np.clip(side, begin, last) - begin for side in (start, end))
    some = high > low
    return list(zip(low[some].tolist(), (high - low)[some].tolist(), strict=True))


def _colours(names: list[str]) -> dict[str, str]:
    others = [name for name in names if name not in OWN_COLOURS]
    return OWN_COLOURS | {
        name: OTHER_COLOURS[number % len(OTHER_COLOURS)] for number, name in enumerate(others)
    }


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_OR_TIMINGS", help="a run's folder, or a timings.jsonl")
    parser.add_argument("--json", action="store_true", help="print the same figures as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a Gantt chart of the last steps")
    parser.add_argument("--steps", type=positive, metavar="N", help=f"steps on the chart ({STEPS_DRAWN})")
    parser.add_argument("--first", type=int, metavar="STEP", help="first step that the figures count")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.png is None:
        parser.error("--steps says how many steps the chart shows, so it needs --png")
    try:
        file = timings_path(options.run)
        spans, notes = read_timings(file)
        times = summarise(spans, options.first)
        notes += warm_up_note(times, options.first)
        if options.png is not None:
            drawn = min(options.steps or STEPS_DRAWN, max(times.steps, 1))
            draw_gantt(spans, times, drawn, options.png)
    except EngineError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
    if options.json:
        figures = {"file": str(file), "notes": notes} | attrs.asdict(times)
        figures["bound"]["sentence"] = times.bound.sentence()
        if not times.launches:
            del figures["launches"]
        sys.stdout.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
        print_report(times, file, notes, console)


if __name__ == "__main__":
    main()
