"""What kernel launches came to, by stage and lane: how many, what was tuned, and which lock was waited for.

A run counts them in rows of timings.jsonl, and only what is not zero. So a stage of which no span has
a count is left out, and in one that is listed a span without a count has zero: a mean per call is
over all of the stage's spans on that lane. Waits add up over lanes, which wait side by side; they are
seconds of threads, no share of the wall time.
"""

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
from rich import box
from rich.table import Table

from engine.timing_rows import Spans


@attrs.frozen(kw_only=True)
class LaunchTime:
    """Launches of one stage, or part of one, on one lane; sums over its spans."""

    stage: str
    lane: str
    calls: int
    """Spans, with or without launches: the target's are forwards."""
    launches_per_call: float
    """Mean; launches of autotuned kernels, benchmarks left out."""
    cold_keys: int
    """Shapes that a kernel was tuned for."""
    tuning_s: float
    """Compilation and the first launch included."""
    tuning_waited_s: float
    """Waited for another lane's tuning."""
    launch_waited_s: float
    """Waited for other lanes' launches."""
    stage_waited_s: float
    """Waited for the launches of other lanes' forwards."""
    compile_waited_s: float
    """Waited for another lane's compiling."""
    out_of_memory_retries: int


def launch_times(spans: Spans, places: Iterable[tuple[str, str]]) -> tuple[LaunchTime, ...]:
    """Sum launches up for each (stage, lane) of `places` that has any, in their order."""
    if not spans.launches:
        return ()
    width = len(spans.lanes)
    place = spans.stage * width + spans.lane
    calls = np.bincount(place)
    sums = {name: np.bincount(place, weights=column) for name, column in spans.launches.items()}
    found = []
    for stage, lane in places:
        here = spans.stages.index(stage) * width + spans.lanes.index(lane)
        total = {name: float(column[here]) for name, column in sums.items()}
        if not any(total.values()):
            continue
        row = LaunchTime(
            stage=stage,
            lane=lane,
            calls=int(calls[here]),
            launches_per_call=total.get("launches", 0.0) / int(calls[here]),
            cold_keys=int(total.get("cold_keys", 0)),
            tuning_s=total.get("tuning_ms", 0.0) / 1e3,
            tuning_waited_s=total.get("tuning_waited_ms", 0.0) / 1e3,
            launch_waited_s=total.get("launch_waited_ms", 0.0) / 1e3,
            stage_waited_s=total.get("stage_waited_ms", 0.0) / 1e3,
            compile_waited_s=total.get("compile_waited_ms", 0.0) / 1e3,
            out_of_memory_retries=int(total.get("out_of_memory_retries", 0)),
        )
        found.append(row)
    return tuple(found)


def launch_table(rows: Sequence[LaunchTime]) -> Table:
    """A line per stage and lane; retries after a lack of memory have a column only where there were any."""
    table = Table(title="launches", title_justify="left", box=box.SIMPLE)
    for heading in ("stage", "lane"):
        table.add_column(heading, no_wrap=True)
    headings = ["calls", "launches\nper call", "cold\nkeys", "tuning\ns"]
    headings += [f"waited s:\n{lock}" for lock in ("tuning", "launches", "forwards", "compiling")]
    retried = any(row.out_of_memory_retries for row in rows)
    headings += ["retries:\nmemory"] * retried
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        seconds = (row.tuning_s, row.tuning_waited_s, row.launch_waited_s, row.stage_waited_s)
        figures = [f"{row.calls:,}", f"{row.launches_per_call:,.1f}", f"{row.cold_keys:,}"]
        figures += [f"{value:,.2f}" for value in (*seconds, row.compile_waited_s)]
        figures += [f"{row.out_of_memory_retries:,}"] * retried
        table.add_row(row.stage, row.lane, *figures)
    return table
