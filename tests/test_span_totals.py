"""The table at a run's end: exact for runs that fit, the same figures in bounded memory for longer ones."""

import tracemalloc
from typing import Any

import attrs
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from engine.errors import InputError
from engine.span_totals import Covered, SpanTotals
from engine.stage_times import StageTime, summarise
from engine.timing_rows import BadRow

T0 = 1_795_977_874.0
LANES = ("target.0@cuda:0", "target.1@cuda:1", "drafter.0@cuda:1")

Row = dict[str, Any]


def rows_of(steps: int, *, first: int = 1, seed: int = 0) -> list[Row]:
    """Steps of two targets that run ahead and a drafter with a part; rows as spans end, nearly by time."""
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    for step in range(first, first + steps):
        at = T0 + step
        times = random.lognormal(-1.5, 0.4, 6).clip(0.01, 0.9)
        for lane, ahead in zip(LANES[:2], times[4:], strict=True):
            more = {"lane": lane, "micro_batch": step, "tokens": 100, "waited_ms": 200 * float(ahead)}
            device_ms = 1e3 * float(times[0])
            rows.append(row("target-forward", step, at - ahead, 20, device_ms=device_ms, **more))
            rows.append(row("pack", step, at, 1e3 * times[1] / 9, bytes=5_000, **more))
        drafter = {"lane": LANES[2], "micro_batch": step}
        rows.append(row("drafter-fwd-bwd.masks", step, at + 0.1, 40 * times[2], **drafter))
        rows.append(row("drafter-fwd-bwd", step, at + 0.1, 400 * times[2], waited_ms=90, **drafter))
        rows.append(row("optimizer", step, at + 0.6, 200 * times[3], lane=LANES[2], waited_ms=3))
    rows.sort(key=lambda one: one["start"] + 1e-3 * one["host_ms"])
    return rows


def row(stage: str, step: int, start: float, host_ms: float, **more: Any) -> Row:
    return {"stage": stage, "step": step, "start": float(start), "host_ms": float(host_ms)} | more


def summed_up(rows: list[Row], *, limit: int, piece: int = 7) -> SpanTotals:
    totals = SpanTotals(limit)
    for at in range(0, len(rows), piece):
        totals.add(rows[at : at + piece])
    return totals


def text(table: Table) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize("steps", [1, 3, 4, 50])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_run_that_fits_has_the_table_of_all_its_spans(steps: int, narrow: bool) -> None:
    rows = rows_of(steps)
    totals = summed_up(rows, limit=len(rows))
    assert totals.stages() == (summarise(rows).stages, summarise(rows).left_out)
    assert text(totals.table(narrow=narrow)) == text(summarise(rows).table(narrow=narrow))
    assert "histogram" not in text(totals.table())


def near(found: StageTime, exact: StageTime, steps: int) -> None:
    """Counts and sums are the same; percentiles lie within half a bin, shares within a few seams."""
    for field in attrs.fields(StageTime):
        value, expected = getattr(found, field.name), getattr(exact, field.name)
        if field.name in ("p50_ms", "p95_ms"):
            assert value == pytest.approx(expected, rel=0.005), field.name
        elif field.name in ("share", "waiting_share"):
            assert value == pytest.approx(expected, abs=0.002), field.name
        elif isinstance(expected, float):
            assert value == pytest.approx(expected, rel=1e-9), field.name
        else:
            assert value == expected, field.name


@pytest.mark.parametrize("piece", [1, 7, 500])
def test_a_run_that_does_not_fit_has_nearly_the_figures_of_all_its_spans(piece: int) -> None:
    steps = 2_000
    rows = rows_of(steps)
    totals = summed_up(rows, limit=1_000, piece=piece)
    (stages, left_out), exact = totals.stages(), summarise(rows)
    assert left_out == exact.left_out == 1
    assert [(one.stage, one.lane) for one in stages] == [(one.stage, one.lane) for one in exact.stages]
    for one, other in zip(stages, exact.stages, strict=True):
        near(one, other, steps)
    assert totals.stages() == (stages, left_out), "asking changes nothing"


def test_few_spans_have_their_percentiles_between_them() -> None:
    seldom = [row("checkpoint", 5, T0 + 5.5, ms, lane="main") for ms in (8_000, 11_000, 20_000, 24_000)]
    rows = sorted(rows_of(300) + seldom, key=lambda one: one["start"])
    (found,) = (one for one in summed_up(rows, limit=500).stages()[0] if one.stage == "checkpoint")
    assert found.p50_ms == pytest.approx(15_500, rel=0.005)
    assert found.p95_ms == pytest.approx(23_400, rel=0.005)


def test_launches_and_spans_without_a_step_are_added_up_too() -> None:
    rows = rows_of(300)
    for at in range(0, len(rows), 3):
        rows[at] = rows[at] | {"launches": 7}
    rows += [
        {"stage": "evaluation", "step": None, "start": T0 + at, "host_ms": 9.0, "lane": "main"}
        for at in (100, 200)
    ]
    rows.sort(key=lambda one: one["start"])
    stages, exact = summed_up(rows, limit=500).stages()[0], summarise(rows).stages
    assert [(one.stage, one.count) for one in stages] == [(one.stage, one.count) for one in exact]


def test_what_pieces_cover_counts_once_where_they_meet() -> None:
    covered = Covered()
    for low, high in (([0, 2], [10, 4]), ([], []), ([5, 20, 21], [12, 22, 25]), ([8, 24], [9, 26])):
        covered.add(np.array(low, float), np.array(high, float))
    assert covered.length == 12 + 6


def test_percentiles_that_are_not_exact_are_told_and_only_these() -> None:
    rows = rows_of(2_000)
    totals = summed_up(rows, limit=1_000)
    said = f"{len(rows) - 7:,} spans: p50 and p95 are read from a histogram, to within 0.5 %"
    assert said in text(totals.table())
    assert "histogram" not in text(totals.table(narrow=True)), "that one has none"


def test_a_row_that_is_no_span_is_refused_and_no_rows_have_no_table() -> None:
    totals = SpanTotals()
    with pytest.raises(InputError, match="no spans to sum up"):
        totals.table()
    with pytest.raises(BadRow, match="host_ms is missing"):
        totals.add([{"stage": "pack", "lane": "x", "start": 0.0}])


def test_a_million_spans_take_the_memory_of_the_newest() -> None:
    rows = rows_of(1_000)
    totals, count = SpanTotals(50_000), 0
    tracemalloc.start()
    try:
        held = []
        while count < 1_000_000:
            totals.add(rows)
            count += len(rows)
            for one in rows:
                one["step"] += 1_000
                one["start"] += 1_000.0
            if count % 100_000 < len(rows):
                held.append(tracemalloc.get_traced_memory()[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(held) < 12e6 and peak < 40e6, (held, peak)
    assert sum(one.count for one in totals.stages()[0]) == count - 7
