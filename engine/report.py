"""What a run says: rows for its files, the panel and plugins, and tables for people."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engine.dflash.decoding import Evaluation
from engine.errors import DiskError, words
from engine.heartbeat import Heartbeat
from engine.live_status import ENDED, State
from engine.panel import Panel
from engine.planning import RunPlan
from engine.plugin_host import PluginHost
from engine.run_folder import RunFolder
from engine.span_totals import SpanTotals

Rows = list[dict[str, Any]]

SMOOTHING = 0.8  # what stays of a lane's bar at each look, so that it can be read


@attrs.define
class Reporter:
    """Feeds files, panel and plugins from the same rows."""

    folder: RunFolder
    panel: Panel
    host: PluginHost
    last: int
    heartbeat: Heartbeat
    row: dict[str, Any] = attrs.field(factory=dict)
    speeds: list[float] = attrs.field(factory=list)
    spans: SpanTotals = attrs.field(factory=SpanTotals)
    busy: dict[str, float] = attrs.field(factory=dict)
    """By lane, over the last few looks."""
    looked_at: float = attrs.field(factory=time.perf_counter)

    def step(self, row: dict[str, Any], timings: Rows) -> None:
        """A step is done."""
        self.row = row
        self.speeds.append(row["tokens_per_s"])
        self.timings(timings)
        self.folder.append_metrics(row)
        self.panel.lanes(self.busy)
        self.panel.step(row)
        self.heartbeat.step(row)
        self.host.tell("step_finished", step=row["step"], row=row)

    def timings(self, rows: Rows) -> None:
        """Spans that are complete."""
        self.folder.append_timings(rows)
        self.spans.add(rows)
        self._follow_lanes(rows)

    def _follow_lanes(self, rows: Rows) -> None:
        """Share of the time since the last look that each lane was at work, smoothed over a few looks."""
        now = time.perf_counter()
        elapsed, self.looked_at = (now - self.looked_at) * 1e3, now
        worked = dict.fromkeys(self.busy, 0.0)
        for row in rows:
            if "." not in row["stage"]:  # parts of stages are inside them
                spent = max(row["host_ms"], row["device_ms"] or 0.0)
                worked[row["lane"]] = worked.get(row["lane"], 0.0) + spent
        for lane in sorted(worked, key=lambda name: (name.startswith("drafter"), name)):
            share = min(worked[lane] / elapsed, 1.0)
            self.busy[lane] = SMOOTHING * self.busy.get(lane, share) + (1 - SMOOTHING) * share

    def evaluated(self, step: int, figures: dict[str, float]) -> None:
        """The drafter after `step` steps was evaluated. After a step, its row bears the figures already."""
        row = {"step": step, **figures}
        if not step:  # before training there is no other row
            self.folder.append_metrics(row)
            self.panel.step(row)
        self.host.tell("evaluated", step=step, row=row)

    def checkpoint(self, step: int, path: Path) -> None:
        """A whole checkpoint was written."""
        self.heartbeat.checkpoint(step, path)
        self.folder.log(f"checkpoint {path.name}")
        self.host.tell("checkpoint_written", step=step, path=path)

    def message(self, text: str) -> None:
        """A sentence for the log and the screen."""
        self.folder.log(text)
        self.panel.message(text)

    def failed(self, error: BaseException, timings: Rows) -> None:
        """The run ends with an error; what is known so far is written down."""
        self.heartbeat.end_with(error)
        try:
            self.timings(timings)
            self.folder.log(f"failed: {type(error).__name__}: {words(error)}")
        except DiskError as trouble:  # must not stand in for the error that ends the run
            error.add_note(f"and its last rows and lines could not be written: {trouble}")

    def status(self, state: State, *, exit_code: int = 0, error: str | None = None) -> None:
        """What the run does from now on, or how it ended."""
        if state in ENDED:
            self.heartbeat.end(state, exit_code, error)
        else:
            self.heartbeat.state(state)


@contextmanager
def loading_bar(console: Console) -> Iterator[Progress | None]:
    """A bar for shards that load, on a terminal; elsewhere None, and lines are printed instead."""
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as progress:
        yield progress


def wide_console() -> Console:
    """Standard error; in a file or a pipe as wide as the tables, not as an imagined terminal."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def print_plan(plan: RunPlan, console: Console, steps: int | None = None) -> None:
    """What is about to happen: lanes, sizes, steps, batches, memory.

    Args:
        steps: after so many the run stops, the schedule's end or not.
    """
    config = plan.drafter_config
    short = steps is not None and steps < plan.total_steps
    of = f"{steps} of {plan.total_steps}" if short else str(plan.total_steps)
    console.print(
        f"target {plan.summary.model_type}, {plan.summary.layers} layers, "
        f"taps {list(config.target_layer_ids)}; drafter {config.layers} layers, block {config.block_size}, "
        f"attention {plan.recipe.backend}; {of} steps of {plan.graph.micro_batches} "
        f"micro-batches on {', '.join(lane.name for lane in plan.graph.lanes)}",
        markup=False,
        highlight=False,
    )
    for name, batches in (("training", plan.train), ("held out", plan.held_out)):
        if batches:
            table = batches.statistics().table()
            table.title = f"{name}: {table.title}"
            console.print(table)
    console.print(plan.memory.table())


def print_result(
    before: Evaluation | None, after: Evaluation | None, report: Reporter, console: Console
) -> None:
    """Time by stage, and held-out figures before and after."""
    if report.speeds:
        console.print(report.spans.table(narrow=console.width < 105))
    if after:
        table = Table(title="held-out documents")
        for heading in ("", "before", "after"):
            table.add_column(heading, justify="right" if heading else "left")
        for name in ("accepted_length", "held_out_loss", "accuracy", "block_prefix"):
            figures = [
                f"{getattr(evaluation, name):.4f}" if evaluation else "–" for evaluation in (before, after)
            ]
            table.add_row(name.replace("_", " ").replace("held out", "held-out"), *figures)
        console.print(table)
