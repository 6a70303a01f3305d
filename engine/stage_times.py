"""Where a run's time went: spans of stages on lanes, summed up by stage and by lane.

A span is busy from its launch on the host until host and device are both done with it, the interval
[start, start + max(host, device)]. A lane is busy in the union of its spans: a copy stream beside
the compute stream, or a host that launches ahead of its device, counts once, and no share passes
100 %. The price: work that is queued behind other work is placed at its launch, so a lane that
launches far ahead was busier than it looks. Spans inside a stage (`stage.part`) are listed with it
and counted with neither lane nor bound.

A row says how long its lane waited for it, not when: for input or its turn before it, in a meeting
within, for room after it. So a wait is laid into the lane's free time before the span, and what does
not fit there behind its end; busy time wins where both would stand.

The steps that are left out (compiling, warming up) may overlap the first one that counts, because
targets run ahead. So the wall time begins when the last span left out has ended, and spans are cut
to it. Nothing here draws or reads files; the run's end and the report tool share it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from engine.bottleneck import Bound, Shares, find_bound, lane_key
from engine.errors import InputError
from engine.launch_table import LaunchTime, launch_times
from engine.timing_rows import SpanLog, Spans

STAGE_ORDER = ("target-forward", "pack", "transfer", "drafter-fwd-bwd", "optimizer")
STEPS_WITHOUT_WARM_UP = 3
"""A run of no more steps is measured whole: without its first step too little would be left."""


@attrs.frozen(kw_only=True)
class StageTime:
    """One stage, or part of one, on one lane; times of spans are max(host, device)."""

    stage: str
    lane: str
    part_of: str | None
    """The stage that these spans lie in; None for a stage itself."""
    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    host_ms: float
    """Mean."""
    device_ms: float | None
    """Mean; None where no span has a device time."""
    share: float
    """Of the wall time: the union of the spans."""
    waited_ms: float
    """Mean time for which the lane stood still for input, its turn, others or room."""
    waiting_share: float
    """Of the wall time: the union of those waits."""
    tokens: int | None
    bytes: int | None


@attrs.frozen(kw_only=True)
class LaneTime:
    """A lane, or all lanes of a shared device; the three shares add up to 1."""

    name: str
    busy: float
    waiting: float
    """Waiting and not busy: a wait that the device worked through is no loss."""
    idle: float


@attrs.frozen(kw_only=True)
class StageTimes:
    """The figures of the steps that count. Shares are of `wall_s`."""

    first_step: int | None
    """None where no row has a step."""
    last_step: int | None
    steps: int
    left_out: int
    """Steps before `first_step`."""
    spans: int
    begin: float
    """Unix seconds: when the steps left out were over."""
    wall_s: float
    tokens: int | None
    """Of the micro-batches, each once; None where no row has any."""
    tokens_per_s: float | None
    idle_share: float
    """No lane busy: evaluation, checkpoints, a break before a resume, or all waiting."""
    stages: tuple[StageTime, ...]
    lanes: tuple[LaneTime, ...]
    devices: tuple[LaneTime, ...]
    """Devices that several lanes share."""
    launches: tuple[LaunchTime, ...]
    """Stages on lanes that have any; empty where no row counts launches."""
    bound: Bound

    def table(self, *, narrow: bool = False) -> Table:
        """See `stage_table`."""
        return stage_table(self.stages, self.left_out, narrow=narrow)

    def lane_table(self) -> Table:
        """What each lane did with the wall time, and each device that lanes share."""
        table = Table(title="lanes", title_justify="left", box=box.SIMPLE)
        table.add_column("lane", no_wrap=True)
        for heading in ("busy", "waiting", "idle"):
            table.add_column(heading, justify="right", no_wrap=True)
        for lane in self.lanes + self.devices:
            table.add_row(lane.name, f"{lane.busy:.1%}", f"{lane.waiting:.1%}", f"{lane.idle:.1%}")
        return table


def stage_table(
    stages: Iterable[StageTime], left_out: int, *, narrow: bool = False, percentiles: str | None = None
) -> Table:
    """Time by stage and lane, parts below their stage; `narrow` fits 80 columns.

    Args:
        left_out: steps that do not count.
        percentiles: what to say below them, where they are no exact ones.
    """
    title = "time by stage" + (", without the first step" if left_out == 1 else "")
    caption = None if narrow else percentiles
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE)
    for heading in ("stage", "lane"):
        table.add_column(heading, no_wrap=True)
    times = () if narrow else ("p50 ms", "p95 ms")
    waited = () if narrow else ("waited ms",)
    for heading in ("count", "mean ms", *times, "share", *waited, "waiting"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in stages:
        name = row.stage if row.part_of is None else "  " + row.stage.removeprefix(row.part_of)
        of_spans = (row.mean_ms,) if narrow else (row.mean_ms, row.p50_ms, row.p95_ms)
        figures = [f"{value:,.1f}" for value in of_spans] + [f"{row.share:.1%}"]
        figures += [] if narrow else [f"{row.waited_ms:,.1f}"]
        table.add_row(name, row.lane, f"{row.count:,}", *figures, f"{row.waiting_share:.1%}")
    return table


def summarise(rows: Spans | Iterable[Mapping[str, Any]], first_step: int | None = None) -> StageTimes:
    """Sum rows of timings.jsonl up.

    Args:
        rows: dictionaries with that file's keys, or the columns that a `SpanLog` made of them.
        first_step: leave earlier steps out. None: leave the first one out if there are more than
            `STEPS_WITHOUT_WARM_UP`.

    Raises:
        InputError: no rows, a row that is none, no such step, or times that cannot be.
    """
    spans = rows if isinstance(rows, Spans) else _columns(rows)
    if not len(spans):
        raise InputError("no spans to sum up; a run writes them as it trains")
    steps = np.unique(spans.step[~np.isnan(spans.step)])
    if first_step is None and steps.size:
        first_step = int(steps[1] if steps.size > STEPS_WITHOUT_WARM_UP else steps[0])
    counted = np.ones(len(spans), dtype=bool)
    if first_step is not None:
        if not (steps >= first_step).any():
            there = f"{steps[0]:.0f} to {steps[-1]:.0f}" if steps.size else "none"
            raise InputError(f"first step {first_step}: no span of it or a later one; steps are {there}")
        counted = spans.step >= first_step
        # Work that belongs to no step counts from when the first counted step began.
        counted |= np.isnan(spans.step) & (spans.start >= spans.start[counted].min())
    kept = spans.where(counted)
    begin = window_begin(spans, counted)
    wall = float(kept.end.max()) - begin
    if wall <= 0:
        raise InputError(
            "the wall time of the counted steps is not positive: steps that were left out end after them, or "
            "no span lasts; the clock was set back, or rows of two runs are mixed: name another first step"
        )
    is_part = kept.is_part()
    waits = lay_waits(kept)
    whole, whole_waits = kept.where(~is_part), waits.where(~is_part)
    share = Shares(begin, wall)
    tokens = _tokens(whole)
    counted_steps = steps[steps >= first_step] if first_step is not None else steps
    stages = _by_stage(kept, is_part, waits, share)
    lanes = _by_lane(whole, whole_waits, share, whole.lane, whole.lanes)
    return StageTimes(
        first_step=int(counted_steps[0]) if steps.size else None,
        last_step=int(counted_steps[-1]) if steps.size else None,
        steps=counted_steps.size,
        left_out=steps.size - counted_steps.size,
        spans=len(kept),
        begin=begin,
        wall_s=wall,
        tokens=tokens,
        tokens_per_s=None if tokens is None else tokens / wall,
        idle_share=max(0.0, 1 - share.union(whole.start, whole.end)),
        stages=stages,
        lanes=lanes,
        devices=_shared_devices(whole, whole_waits, share),
        launches=launch_times(kept, [(row.stage, row.lane) for row in stages]),
        bound=find_bound(whole, share, {lane.name: lane.busy for lane in lanes}),
    )


@attrs.frozen(eq=False)
class Waits:
    """Where the waits of spans stand, unix seconds: before [n] and behind [n] each; no length for none."""

    before: tuple[NDArray[np.float64], NDArray[np.float64]]
    behind: tuple[NDArray[np.float64], NDArray[np.float64]]

    def where(self, chosen: NDArray[Any]) -> "Waits":
        """The waits of the spans that a mask or indices choose."""
        return Waits(*((low[chosen], high[chosen]) for low, high in (self.before, self.behind)))

    def intervals(self, chosen: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Starts and ends of both kinds, of the spans that a mask or indices choose."""
        low, high = zip(self.before, self.behind, strict=True)
        return np.concatenate([side[chosen] for side in low]), np.concatenate([side[chosen] for side in high])


def lay_waits(spans: Spans) -> Waits:
    """Lay each span's wait into its lane's free time; a part's into that between parts of its name."""
    is_part = spans.is_part()
    tracks = [np.flatnonzero(~is_part & (spans.lane == lane)) for lane in np.unique(spans.lane)]
    tracks += [members for _, _, members in spans.groups() if is_part[members[0]]]
    free = np.empty(len(spans))
    for members in tracks:
        order = members[np.argsort(spans.start[members], kind="stable")]
        if order.size:
            reached = np.concatenate(([-np.inf], np.maximum.accumulate(spans.end[order])[:-1]))
            free[order] = np.clip(spans.start[order] - reached, 0, None)
    before = np.minimum(spans.waited, free)
    return Waits((spans.start - before, spans.start), (spans.end, spans.end + (spans.waited - before)))


def window_begin(spans: Spans, counted: NDArray[np.bool_]) -> float:
    """Unix seconds: when the last span that is not counted ended, or the first counted one began."""
    begin = float(spans.start[counted].min())
    before = ~counted & ~np.isnan(spans.step)
    return max(begin, float(spans.end[before].max())) if before.any() else begin


def stage_key(stage: str, stages: Sequence[str]) -> tuple[int, int]:
    """Sorts the engine's own stages in the order of flow, others after them as they came."""
    own = STAGE_ORDER.index(stage) if stage in STAGE_ORDER else len(STAGE_ORDER)
    return own, stages.index(stage)


def _columns(rows: Iterable[Mapping[str, Any]]) -> Spans:
    log = SpanLog()
    log.add(list(rows))
    return log.spans()


def _tokens(whole: Spans) -> int | None:
    """Every stage of a micro-batch names its tokens, so each micro-batch counts once."""
    named = ~np.isnan(whole.tokens) & ~np.isnan(whole.micro_batch)
    if not named.any():
        return None
    _, which = np.unique(whole.micro_batch[named], return_inverse=True)
    most = np.zeros(int(which.max()) + 1)
    np.maximum.at(most, which, whole.tokens[named])
    return int(most.sum())


def _by_stage(kept: Spans, is_part: NDArray[np.bool_], waits: Waits, share: Shares) -> tuple[StageTime, ...]:
    found = []
    for stage, lane, members in kept.groups():
        group = kept.where(members)
        parent = kept.stages[stage].partition(".")[0] if is_part[members[0]] else None
        time_ms = 1e3 * group.duration
        p50, p95 = np.percentile(time_ms, (50, 95))
        row = StageTime(
            stage=kept.stages[stage],
            lane=kept.lanes[lane],
            part_of=parent,
            count=len(group),
            mean_ms=float(time_ms.mean()),
            p50_ms=float(p50),
            p95_ms=float(p95),
            host_ms=1e3 * float(group.host.mean()),
            device_ms=None if np.isnan(group.device).all() else 1e3 * float(np.nanmean(group.device)),
            share=share.union(group.start, group.end),
            waited_ms=1e3 * float(group.waited.mean()),
            waiting_share=share.union(*waits.intervals(members)),
            tokens=_total(group.tokens),
            bytes=_total(group.bytes),
        )
        found.append(row)
    return in_order(found, kept.stages)


def in_order(rows: Iterable[StageTime], stages: Sequence[str]) -> tuple[StageTime, ...]:
    """Stages in the order of flow, each lane by lane with its parts behind it; `stages` as they came."""

    def key(row: StageTime) -> tuple[Any, ...]:
        whole = stage_key(row.part_of or row.stage, stages)
        return whole, lane_key(row.lane), row.part_of is not None, stages.index(row.stage)

    return tuple(sorted(rows, key=key))


def _total(values: NDArray[np.float64]) -> int | None:
    return None if np.isnan(values).all() else int(np.nansum(values))


def _by_lane(
    whole: Spans, waits: Waits, share: Shares, owner: NDArray[np.int64], names: Sequence[str]
) -> tuple[LaneTime, ...]:
    found = []
    for number in np.unique(owner):
        members = np.flatnonzero(owner == number)
        start, end = whole.start[members], whole.end[members]
        busy = share.union(start, end)
        low, high = waits.intervals(members)
        used = max(busy, share.union(np.concatenate((start, low)), np.concatenate((end, high))))
        found.append(LaneTime(name=names[number], busy=busy, waiting=used - busy, idle=1 - used))
    return tuple(sorted(found, key=lambda lane: lane_key(lane.name)))


def _shared_devices(whole: Spans, waits: Waits, share: Shares) -> tuple[LaneTime, ...]:
    """Lanes `target.0@cuda:0` and `drafter.0@cuda:0` share cuda:0; names without a device share nothing."""
    present = [whole.lanes[number] for number in np.unique(whole.lane)]
    device_of = [lane.rpartition("@")[2] if "@" in lane else "" for lane in whole.lanes]
    lanes_on = {device: [lane for lane in present if lane.endswith(f"@{device}")] for device in device_of}
    shared = [device for device, lanes in lanes_on.items() if device and len(lanes) > 1]
    names = [f"{device} ({len(lanes_on[device])} lanes)" for device in shared]
    numbers = [shared.index(device) if device in shared else -1 for device in device_of]
    owner = np.array(numbers, dtype=np.int64)[whole.lane]
    chosen = owner >= 0
    return _by_lane(whole.where(chosen), waits.where(chosen), share, owner[chosen], names)
