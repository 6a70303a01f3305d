"""The spans of a whole run in bounded memory, for the table at its end.

A run of days has tens of millions of spans, and all of them are in timings.jsonl, where the report tool
reads them; the table at the end needs counts, means, two percentiles and shares. So a run keeps its
newest spans, and when there are too many the older half is added up: sums, the length of what busy spans
and waits cover, and a histogram of times. A run that never has too many gets the figures of `summarise`
itself. In a longer one counts and means are the same, percentiles are read from the histogram, and shares
differ where halves meet: a span that comes in after later ones were added up covers only what is behind
them, and a wait at the seam is laid before its span although its lane may have been busy there.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from engine.stage_times import (
    STEPS_WITHOUT_WARM_UP,
    StageTime,
    Waits,
    in_order,
    lay_waits,
    stage_table,
    summarise,
    window_begin,
)
from engine.timing_rows import SpanLog, Spans

Array = NDArray[np.float64]

LIMIT = 200_000
"""Spans kept one by one: 20 MB."""

PIECES = 512
"""Batches of rows that are kept apart; of single rows, the arrays would weigh more than what is in them."""

SHORTEST_S, RATIO, BINS = 1e-6, 1.01, 2_600
"""Of the histogram: the first bin's lower end, how much wider each is than the one before; up to 1.7e5 s."""


@attrs.define(eq=False)
class Covered:
    """What intervals cover that come in pieces, nearly in order; seconds from the window's begin."""

    length: float = 0.0
    reached: float = 0.0

    def add(self, low: Array, high: Array) -> None:
        """Take intervals [n] in; of those in earlier pieces' time only what is behind these pieces counts."""
        if not low.size:
            return
        order = np.argsort(low, kind="stable")
        reached = np.maximum(np.maximum.accumulate(high[order]), self.reached)
        before = np.concatenate(([self.reached], reached[:-1]))
        self.length += float(np.clip(reached - np.maximum(low[order], before), 0, None).sum())
        self.reached = float(reached[-1])


@attrs.define(eq=False)
class StageTotals:
    """One stage, or part of one, on one lane."""

    count: int = 0
    seconds: float = 0.0
    host: float = 0.0
    device: float = 0.0
    devices: int = 0
    """Spans that have a device time."""
    waited: float = 0.0
    tokens: float | None = None
    bytes: float | None = None
    busy: Covered = attrs.field(factory=Covered)
    waiting: Covered = attrs.field(factory=Covered)
    times: NDArray[np.int64] = attrs.field(factory=lambda: np.zeros(BINS, np.int64))
    """[BINS]: spans by how long they took."""

    def add(self, group: Spans, waits: Waits, begin: float, end: float) -> None:
        """Take spans of this stage on this lane in.

        Args:
            begin, end: of the window, unix seconds.
        """
        duration = group.duration
        has_device = ~np.isnan(group.device)
        self.count += len(group)
        self.seconds += float(duration.sum())
        self.host += float(group.host.sum())
        self.device += float(group.device[has_device].sum())
        self.devices += int(has_device.sum())
        self.waited += float(group.waited.sum())
        self.tokens = _added(self.tokens, group.tokens)
        self.bytes = _added(self.bytes, group.bytes)
        for covered, (low, high) in (
            (self.busy, (group.start, group.end)),
            (self.waiting, waits.intervals(np.arange(len(group)))),
        ):
            covered.add(*(np.clip(side - begin, 0, end - begin) for side in (low, high)))
        widths = np.log(np.maximum(duration, SHORTEST_S) / SHORTEST_S) / np.log(RATIO)
        self.times += np.bincount(np.minimum(widths.astype(np.int64), BINS - 1), minlength=BINS)

    def percentile_ms(self, percent: float) -> float:
        """Between the two spans beside that rank, each to within half a bin."""
        rank = percent / 100 * (self.count - 1)
        beside = np.array([np.floor(rank), np.ceil(rank)])
        bins = np.searchsorted(np.cumsum(self.times), beside, side="right")
        low, high = 1e3 * SHORTEST_S * RATIO ** (bins + 0.5)
        return float(low + (rank - beside[0]) * (high - low))

    def row(self, stage: str, lane: str, part_of: str | None, wall: float) -> StageTime:
        """As `summarise` has it."""
        return StageTime(
            stage=stage,
            lane=lane,
            part_of=part_of,
            count=self.count,
            mean_ms=1e3 * self.seconds / self.count,
            p50_ms=self.percentile_ms(50),
            p95_ms=self.percentile_ms(95),
            host_ms=1e3 * self.host / self.count,
            device_ms=1e3 * self.device / self.devices if self.devices else None,
            share=min(1.0, self.busy.length / wall),
            waited_ms=1e3 * self.waited / self.count,
            waiting_share=min(1.0, self.waiting.length / wall),
            tokens=None if self.tokens is None else int(self.tokens),
            bytes=None if self.bytes is None else int(self.bytes),
        )


class SpanTotals:
    """Takes rows in as a run makes them, and sums them up."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._log = SpanLog()
        self._pieces = 0
        self._window: tuple[float, int] | None = None
        """When the steps that are left out were over, and how many; None until spans were added up."""
        self._end = 0.0
        self._totals: dict[tuple[int, int], StageTotals] = {}
        """By stage and lane, as the log numbers them."""

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows of timings.jsonl in.

        Raises:
            BadRow: as `SpanLog.add`.
        """
        self._log.add(rows)
        self._pieces += 1
        if self._pieces >= PIECES:
            self._log.spans()
            self._pieces = 0
        if len(self._log) > self._limit:
            self._add_up_older_half()

    def stages(self) -> tuple[tuple[StageTime, ...], int]:
        """A row per stage and lane of the steps that count, and how many steps were left out.

        Raises:
            InputError: there were no rows, or their times cannot be.
        """
        if self._window is None:
            times = summarise(self._log.spans())
            return times.stages, times.left_out
        begin, left_out = self._window
        totals, spans = copy.deepcopy(self._totals), self._log.spans()
        end = max(self._end, float(spans.end.max(initial=begin)))
        _add_up(totals, spans, lay_waits(spans), begin, end)
        wall = max(end - begin, SHORTEST_S)
        names = {(spans.stages[stage], spans.lanes[lane]): total for (stage, lane), total in totals.items()}
        rows = []
        for (stage, lane), total in names.items():
            whole, dot, _ = stage.partition(".")
            rows.append(total.row(stage, lane, whole if dot and (whole, lane) in names else None, wall))
        return in_order(rows, spans.stages), left_out

    def table(self, *, narrow: bool = False) -> Table:
        """The table of `summarise`; where percentiles are a histogram's, it says so."""
        stages, left_out = self.stages()
        read = None
        if self._window is not None:
            count = sum(row.count for row in stages)
            read = f"{count:,} spans: p50 and p95 are read from a histogram, to within 0.5 %"
        return stage_table(stages, left_out, narrow=narrow, percentiles=read)

    def _add_up_older_half(self) -> None:
        spans = self._log.spans()
        if self._window is None:
            steps = np.unique(spans.step[~np.isnan(spans.step)])
            left_out = int(steps.size > STEPS_WITHOUT_WARM_UP)
            counted = np.ones(len(spans), dtype=bool)
            if left_out:  # as `summarise` leaves the first step out
                counted = spans.step >= steps[1]
                counted |= np.isnan(spans.step) & (spans.start >= spans.start[counted].min())
            self._window = window_begin(spans, counted), left_out
            self._log.keep(counted)
            spans = self._log.spans()
        older = np.zeros(len(spans), dtype=bool)
        older[np.argsort(spans.start, kind="stable")[: len(spans) // 2]] = True
        waits = lay_waits(spans).where(older)
        going = spans.where(older)
        self._end = max(self._end, float(going.end.max(initial=0.0)))
        _add_up(self._totals, going, waits, self._window[0], np.inf)
        self._log.keep(~older)


def _add_up(
    totals: dict[tuple[int, int], StageTotals], spans: Spans, waits: Waits, begin: float, end: float
) -> None:
    for stage, lane, members in spans.groups():
        total = totals.setdefault((stage, lane), StageTotals())
        total.add(spans.where(members), waits.where(members), begin, end)


def _added(sum_: float | None, values: Array) -> float | None:
    return sum_ if np.isnan(values).all() else (sum_ or 0.0) + float(np.nansum(values))
