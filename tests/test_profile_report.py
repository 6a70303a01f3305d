"""The report on a run's time: figures by hand, intervals that overlap, files that are damaged."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bottleneck import union_length
from engine.errors import InputError
from engine.run_folder import RunFolder
from engine.runtime.launch_state import LaunchCounts
from engine.stage_times import StageTime, StageTimes, summarise
from engine.timing_rows import LAUNCHES, BadRow, SpanLog
from tools import profile_report
from tools.profile_report import main, read_timings

T0 = 1_795_977_874.0
TARGET, DRAFTER = "target.0@cuda:0", "drafter.0@cuda:1"

Row = dict[str, Any]


def span(stage: str, start: float, host_ms: float, *, lane: str = DRAFTER, step: int = 1, **more: Any) -> Row:
    """A row whose start counts from T0."""
    return {"stage": stage, "lane": lane, "step": step, "start": T0 + start, "host_ms": host_ms} | more


def steps_of(count: int, *, lane: str = DRAFTER, first: int = 1) -> list[Row]:
    """Steps of one second: 0.6 s on the drafter, then 0.3 s of optimizer; 100 tokens each."""
    rows = []
    for number in range(count):
        step, micro_batch = first + number, {"micro_batch": number, "tokens": 100}
        rows.append(span("drafter-fwd-bwd", number, 600, lane=lane, step=step, **micro_batch))
        rows.append(span("optimizer", number + 0.7, 300, lane=lane, step=step, waited_ms=100))
    return rows


def near(value: Any) -> Any:
    """Unix seconds in a double resolve a quarter of a microsecond."""
    return pytest.approx(value, abs=1e-5)


def stage_of(times: StageTimes, stage: str, lane: str = DRAFTER) -> StageTime:
    (found,) = [row for row in times.stages if (row.stage, row.lane) == (stage, lane)]
    return found


def write(folder: Path, rows: Sequence[Row], tail: bytes = b"") -> Path:
    file = folder / "timings.jsonl"
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows) + tail)
    return file


def fails(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert caught.value.code == code
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


def test_the_figures_are_those_that_a_person_works_out_by_hand() -> None:
    times = summarise(steps_of(3))
    assert (times.first_step, times.last_step, times.steps, times.left_out) == (1, 3, 3, 0)
    assert times.wall_s == near(3.0)
    assert times.tokens == 300
    assert times.tokens_per_s == near(100)
    assert times.idle_share == near(0.1)
    forward, optimizer = times.stages
    assert (forward.stage, forward.count, forward.mean_ms) == ("drafter-fwd-bwd", 3, 600)
    assert (forward.share, forward.waiting_share) == (near(0.6), 0)
    assert (optimizer.share, optimizer.waiting_share) == (near(0.3), near(0.1))
    assert optimizer.waited_ms == near(100)
    (lane,) = times.lanes
    assert (lane.busy, lane.waiting, lane.idle) == near((0.9, 0.1, 0.0))


def test_percentiles_are_of_single_spans() -> None:
    row = summarise([span("pack", number, number + 1) for number in range(101)]).stages[0]
    assert (row.mean_ms, row.p50_ms, row.p95_ms) == near((51, 51, 96))


def test_a_span_lasts_until_host_and_device_are_done() -> None:
    rows = [span("pack", 0, 100, device_ms=400), span("pack", 1, 300, device_ms=200), span("pack", 2, 300)]
    times = summarise(rows)
    assert times.stages[0].mean_ms == near(1000 / 3)
    assert times.wall_s == near(2.3)
    assert times.lanes[0].busy == near(1.0 / 2.3)
    assert times.stages[0].device_ms == near(300)


def test_copies_that_overlap_on_a_lane_count_once() -> None:
    rows = [span("transfer", 0.1 * number, 1000) for number in range(11)]
    times = summarise(rows)
    assert times.lanes[0].busy == times.stages[0].share == 1.0
    assert times.wall_s == near(2.0)


def test_a_wait_is_laid_into_the_free_time_before_its_span_and_what_does_not_fit_behind_it() -> None:
    rows = [span("target-forward", 0, 400), span("pack", 0.4, 100, waited_ms=300), span("pack", 1.0, 100)]
    rows += [span("target-forward", 1.2, 800, waited_ms=500)]
    times = summarise(rows)
    assert stage_of(times, "pack").waiting_share == near(0.3 / 2)
    # Before the last span 0.1 s are free; the other 0.4 s of its wait lie behind the end of the wall time.
    assert stage_of(times, "target-forward").waiting_share == near(0.1 / 2)
    (lane,) = times.lanes
    assert (lane.busy, lane.waiting, lane.idle) == near((0.7, 0.2, 0.1))


interval = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 12))


@given(st.lists(interval, min_size=1, max_size=30))
def test_a_union_covers_each_moment_once_and_shares_add_up_to_one(
    intervals: list[tuple[int, int, int]],
) -> None:
    covered = {moment for start, length, _ in intervals for moment in range(start, start + length)}
    starts, lengths = (np.array([row[place] for row in intervals], float) for place in (0, 1))
    assert union_length(starts, starts + lengths) == len(covered)
    rows = [span("pack", start, 1e3 * length, waited_ms=1e3 * wait) for start, length, wait in intervals]
    if not covered:
        return
    for lane in summarise(rows).lanes:
        assert lane.busy + lane.waiting + lane.idle == near(1)
        assert min(lane.busy, lane.waiting, lane.idle) >= 0


def test_parts_are_listed_below_their_stage_and_counted_with_neither_lane_nor_bound() -> None:
    rows = steps_of(3) + [span("drafter-fwd-bwd.mask", 0.0, 900, step=1)]
    times = summarise(rows)
    assert [row.stage for row in times.stages] == ["drafter-fwd-bwd", "drafter-fwd-bwd.mask", "optimizer"]
    assert [row.part_of for row in times.stages] == [None, "drafter-fwd-bwd", None]
    assert times.lanes == summarise(steps_of(3)).lanes
    assert times.bound == summarise(steps_of(3)).bound


def test_a_dot_in_a_name_makes_no_part_where_its_lane_runs_no_such_stage() -> None:
    times = summarise([span("my.stage", 0, 500), span("pack", 0.5, 500), span("my", 0, 10, lane=TARGET)])
    assert stage_of(times, "my.stage").part_of is None
    assert {lane.name: lane.busy for lane in times.lanes}[DRAFTER] == near(1.0)


def test_stages_stand_in_the_order_of_flow_and_lane_2_before_lane_10() -> None:
    lanes = [f"{role}.{number}@cpu" for role in ("target", "drafter") for number in range(11)]
    rows = [span(stage, 0, 5, lane=lane) for stage in ("mine", "optimizer", "pack") for lane in lanes[::-1]]
    times = summarise(rows)
    assert [lane.name for lane in times.lanes] == lanes
    assert [row.stage for row in times.stages] == ["pack"] * 22 + ["optimizer"] * 22 + ["mine"] * 22


@pytest.mark.parametrize(("steps", "left_out"), [(1, 0), (3, 0), (4, 1)])
def test_the_first_step_is_left_out_of_runs_of_more_than_three(steps: int, left_out: int) -> None:
    times = summarise(steps_of(steps, first=101))
    assert times.left_out == left_out
    assert times.first_step == 101 + left_out


def test_work_ahead_during_the_warm_up_does_not_stretch_the_wall_time() -> None:
    rows = [span("drafter-fwd-bwd", 0, 60_000, step=1)]
    rows += [span("target-forward", 0.5 * number, 500, lane=TARGET, step=number) for number in (2, 3)]
    rows += [span("drafter-fwd-bwd", 58 + number, 1000, step=number) for number in (2, 3, 4)]
    times = summarise(rows)
    assert times.wall_s == near(3.0)
    assert {lane.name: lane.busy for lane in times.lanes} == {TARGET: 0, DRAFTER: near(1)}


def test_a_span_of_no_step_counts_from_the_first_counted_step_on() -> None:
    idle = {"step": None}
    rows = steps_of(5) + [span("mine", 0.5, 10) | idle, span("mine", 2.5, 10) | idle]
    assert stage_of(summarise(rows), "mine").count == 1


def test_tokens_of_a_micro_batch_count_once_whatever_stages_name_them() -> None:
    rows = [span("pack", 0, 1000, lane=TARGET, micro_batch=0, tokens=70)]
    rows += [span("drafter-fwd-bwd", 1, 1000, micro_batch=number, tokens=70) for number in (0, 1)]
    assert summarise(rows).tokens == 140
    without = summarise([span("pack", 0, 1000)])
    assert (without.tokens, without.tokens_per_s, without.stages[0].bytes) == (None, None, None)


def test_the_bound_compares_roles_before_stages() -> None:
    rows = [span("target-forward", 0, 700, lane=TARGET)]
    rows += [span("drafter-fwd-bwd", 0, 550), span("optimizer", 0.55, 450)]
    bound = summarise(rows).bound
    assert (bound.role, bound.stage, bound.next) == ("drafter", "drafter-fwd-bwd", "the target lane")
    assert (bound.load, bound.stage_share) == near((1.0, 0.55))
    assert bound.margin == near(0.3)
    assert "30.0 points less" in bound.sentence()


def test_a_stage_that_lanes_took_turns_in_bounds_the_run_though_each_lane_is_mostly_idle() -> None:
    lanes = [f"target.{number}@cuda:{number}" for number in range(4)]
    rows = [span("target-forward", 0.25 * number, 240, lane=lane) for number, lane in enumerate(lanes)]
    rows += [span("drafter-fwd-bwd", 0.0, 500, lane=f"drafter.{number}@cpu") for number in range(2)]
    bound = summarise(rows).bound
    assert (bound.stage, bound.in_turns, bound.lanes) == ("target-forward", True, 4)
    assert bound.load == near(0.96 / 0.99)
    for number, row in enumerate(rows[:4]):
        row["start"] = T0 + 0.1 * number
    overlapping = summarise(rows).bound
    assert (overlapping.stage, overlapping.in_turns) == ("drafter-fwd-bwd", False)


def test_a_run_of_one_lane_is_bound_by_its_largest_stage() -> None:
    bound = summarise(steps_of(3, lane="plain")).bound
    assert (bound.role, bound.stage, bound.next) == ("plain", "drafter-fwd-bwd", "optimizer")
    assert bound.margin == near(0.3)


def test_a_device_that_lanes_share_is_busy_in_the_union_of_its_lanes() -> None:
    rows = [span("target-forward", 0, 600, lane="target.0@cuda:0"), span("pack", 0.4, 600)]
    rows += [span("optimizer", 0.5, 200, lane="drafter.1@cuda:0")]
    (device,) = summarise(rows).devices
    assert device.name == "cuda:0 (2 lanes)"
    assert device.busy == near(0.7)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stage": None}, "stage = None: expected a name"),
        ({"lane": ["a"]}, "expected a name"),
        ({"start": "soon"}, "start = 'soon': expected a number"),
        ({"host_ms": True}, "host_ms = True: expected a number"),
        ({"host_ms": -1}, "host_ms = -1: expected a number that is 0 or more"),
        ({"device_ms": float("inf")}, "device_ms = inf"),
        ({"step": 1.5}, "step = 1.5: expected a whole number"),
        ({"launches": 0.5}, "launches = 0.5: expected a whole number"),
        ({"cold_keys": True}, "cold_keys = True: expected a number"),
        ({"compile_waited_ms": -1}, "compile_waited_ms = -1: expected a number that is 0 or more"),
        ({"tuning_ms": "long"}, "tuning_ms = 'long': expected a number"),
    ],
)
def test_a_row_that_is_no_span_is_named_with_the_reason(change: Row, reason: str) -> None:
    log = SpanLog()
    with pytest.raises(BadRow, match="row 4") as caught:
        log.add([*steps_of(2), span("pack", 0, 1) | change])
    assert reason in str(caught.value)
    assert not len(log.spans())


def test_numpy_scalars_are_numbers_and_rows_may_come_in_pieces() -> None:
    rows = steps_of(4)
    log = SpanLog()
    for row in rows:
        log.add([row | {"host_ms": np.float32(row["host_ms"])}])
        log.spans()
    assert summarise(log.spans()) == summarise(rows)


def test_steps_that_are_not_there_and_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="first step 9.*steps are 1 to 3"):
        summarise(steps_of(3), first_step=9)
    with pytest.raises(InputError, match="clock was set back"):
        summarise(steps_of(1) + [span("pack", -50, 1, step=2)], first_step=2)


def launch_rows() -> list[Row]:
    """Four forwards of two target lanes, after a drafter that counts nothing."""
    rows = [span("drafter-fwd-bwd", 0, 100)]
    for number, lane in enumerate(("target.0@cuda:0", "target.1@cuda:1")):
        rows.append(
            span("target-forward", number, 900, lane=lane)
            | LaunchCounts(launches=150, cold_keys=2, tuning_s=30, compile_waited_s=number).row()
        )
        rows.append(
            span("target-forward", number + 1, 900, lane=lane)
            | LaunchCounts(launches=144, tuning_waited_s=1.5, launch_waited_s=0.25, stage_waited_s=4).row()
        )
    return rows


def test_every_count_of_a_run_is_a_column_of_the_report() -> None:
    counts = LaunchCounts(**{field.name: 1 for field in attrs.fields(LaunchCounts)})
    assert list(counts.row()) == list(LAUNCHES)
    (row,) = summarise([span("pack", 0, 1) | counts.row()]).launches
    assert all(value == near(1) for value in attrs.astuple(row)[2:])


def test_launches_are_summed_by_stage_and_lane_where_there_are_any() -> None:
    first, second = summarise(launch_rows()).launches
    assert (first.stage, first.lane, first.calls) == ("target-forward", "target.0@cuda:0", 2)
    assert (first.launches_per_call, first.cold_keys, first.out_of_memory_retries) == (147, 2, 0)
    assert (first.tuning_s, first.tuning_waited_s) == near((30, 1.5))
    assert (first.launch_waited_s, first.stage_waited_s, first.compile_waited_s) == near((0.25, 4, 0))
    assert (second.lane, second.compile_waited_s) == ("target.1@cuda:1", near(1))


def test_a_span_without_counts_has_launched_nothing_and_is_a_call_all_the_same() -> None:
    rows = [span("pack", number, 100, launches=launches) for number, launches in enumerate((6, None, 0))]
    (row,) = summarise([*rows, span("pack", 3, 100)]).launches
    assert (row.calls, row.launches_per_call) == (4, 1.5)


def test_launches_of_steps_that_are_left_out_do_not_count() -> None:
    rows = steps_of(4)
    rows[0] |= {"cold_keys": 7}
    assert summarise(rows).launches == ()
    assert summarise(rows, first_step=1).launches[0].cold_keys == 7
    rows[4] |= {"cold_keys": 1}
    assert summarise(rows).launches[0].cold_keys == 1


@pytest.mark.parametrize("piece", [1, 2, 5])
def test_counts_stay_with_their_rows_whatever_pieces_these_come_in(piece: int) -> None:
    rows = launch_rows()
    log = SpanLog()
    for number in range(0, len(rows), piece):
        log.add(rows[number : number + piece])
        log.spans()
    spans = log.spans()
    assert spans.launches["launches"].tolist() == [0, 150, 144, 150, 144]
    assert spans.launches["compile_waited_ms"].tolist() == [0, 0, 0, 1000, 0]
    assert "out_of_memory_retries" not in spans.launches
    assert summarise(spans) == summarise(rows)


def test_the_launches_table_and_json_say_the_same_and_are_left_out_where_nothing_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(write(tmp_path, launch_rows()))])
    printed = capsys.readouterr().out
    _, title, table = printed.partition("\nlaunches ")
    assert title
    lines = [line.split() for line in table.splitlines() if "target" in line]
    figures = ["147.0", "2", "30.00", "1.50", "0.25", "4.00"]
    assert lines[0] == ["target-forward", "target.0@cuda:0", "2", *figures, "0.00"]
    assert lines[1] == ["target-forward", "target.1@cuda:1", "2", *figures, "1.00"]
    assert "drafter-fwd-bwd" not in table.partition("bound by")[0]
    assert "retries:" not in printed
    main([str(tmp_path), "--json"])
    row = orjson.loads(capsys.readouterr().out)["launches"][1]
    assert (row["calls"], row["launches_per_call"], row["compile_waited_s"]) == (2, 147, near(1))

    main([str(write(tmp_path, steps_of(3)))])
    assert "\nlaunches " not in capsys.readouterr().out
    main([str(tmp_path), "--json"])
    assert "launches" not in orjson.loads(capsys.readouterr().out)


def test_a_retry_after_a_lack_of_memory_gets_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(write(tmp_path, [*launch_rows(), span("pack", 1, 1, out_of_memory_retries=3)]))])
    printed = capsys.readouterr().out
    assert "retries:" in printed
    (line,) = [line for line in printed.partition("\nlaunches ")[2].splitlines() if "pack" in line]
    assert line.split()[-1] == "3"


@pytest.mark.parametrize("of_folder", [True, False])
def test_a_folder_and_its_file_give_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_folder: bool
) -> None:
    folder = RunFolder(tmp_path)
    for number in range(5):
        folder.append_timings([row for row in steps_of(5) if row["step"] == number + 1])
    main([str(tmp_path if of_folder else tmp_path / "timings.jsonl"), "--json"])
    figures = orjson.loads(capsys.readouterr().out)
    assert figures["tokens_per_s"] == near(100)
    assert (figures["first_step"], figures["left_out"]) == (2, 1)
    assert figures["stages"][0]["share"] == near(0.6)
    assert "left out" in figures["notes"][0]


def test_the_report_says_what_was_left_out_and_names_stages_that_nobody_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*steps_of(5), span("a-strangers-stage", 4, 10, step=5), span("optimizer.sum", 4.7, 10, step=5)]
    main([str(write(tmp_path, rows))])
    printed = capsys.readouterr().out
    for expected in (
        "steps 2 to 5",
        "the first step is left out",
        "a-strangers-stage",
        "\n    .sum ",
        "100 tokens/s",
        "bound by drafter-fwd-bwd: the drafter lane is busy 90.0% of the wall time",
    ):
        assert expected in printed
    main([str(tmp_path), "--first", "1"])
    printed = capsys.readouterr().out
    assert "steps 1 to 5" in printed
    assert "left out" not in printed


def test_a_last_line_that_is_not_whole_is_skipped_with_a_note(tmp_path: Path) -> None:
    file = write(tmp_path, steps_of(3), tail=b'{"stage": "pack", "la')
    spans, notes = read_timings(file)
    assert len(spans) == 6
    assert notes == ["line 7 is not whole and was skipped: the run was writing it"]


def test_a_whole_last_line_counts_without_its_end_too(tmp_path: Path) -> None:
    spans, notes = read_timings(write(tmp_path, steps_of(3), tail=orjson.dumps(span("pack", 4, 1))))
    assert (len(spans), notes) == (7, [])


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
@pytest.mark.parametrize("line", [b'{"stage": "pa', b"[1, 2]", b'{"stage": "pack", "lane": "plain"}', b""])
def test_a_damaged_line_in_the_middle_ends_with_file_and_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: bytes,
    chunk: int,
) -> None:
    monkeypatch.setattr(profile_report, "CHUNK_BYTES", chunk)
    file = write(tmp_path, steps_of(2), tail=line + b"\n" + orjson.dumps(span("pack", 0, 1)) + b"\n")
    assert f"{file}: line 5 is " in fails(capsys, file)


def test_the_first_of_two_damaged_lines_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, [span("pack", 0, -1)], tail=b"{\n")
    assert f"{file}: line 1 is no span: host_ms = -1" in fails(capsys, file)


def test_what_holds_no_timings_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such file or folder" in fails(capsys, tmp_path / "nowhere")
    assert "a folder without timings.jsonl" in fails(capsys, tmp_path)
    assert "is empty" in fails(capsys, write(tmp_path, []))
    assert "holds no whole line" in fails(capsys, write(tmp_path, [], tail=b'{"st'))
    assert "--steps" in fails(capsys, write(tmp_path, steps_of(1)), "--steps", 2)


def test_the_chart_shows_each_lane_and_stage_in_the_colour_of_the_legend(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    lanes = [f"target.{number}@cuda:{number}" for number in range(16)]
    rows = [
        span("target-forward", step, 900, lane=lane, step=step, waited_ms=100)
        for lane in lanes
        for step in (1, 2)
    ]
    png = tmp_path / "chart.png"
    main([str(write(tmp_path, rows)), "--png", str(png)])
    pixels = (255 * image.imread(png)[..., :3]).round().astype(int)
    blue = (pixels == [0x42, 0x69, 0xD0]).all(-1)
    # Down the middle of the left half, away from labels: 16 bars with gaps between them.
    column = blue[:, pixels.shape[1] // 3]
    assert np.diff(column.astype(int)).tolist().count(1) == 16
    assert blue.mean() > 0.4


def test_a_chart_that_cannot_be_written_ends_with_the_code_of_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file = write(tmp_path, steps_of(2))
    assert "cannot be written" in fails(capsys, file, "--png", tmp_path / "no" / "folder.png", code=6)


def test_the_tool_runs_as_a_command(tmp_path: Path) -> None:
    write(tmp_path, steps_of(3))
    root = Path(__file__).parents[1]
    command = [sys.executable, str(root / "tools" / "profile_report.py")]
    environment = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    good = subprocess.run([*command, tmp_path], capture_output=True, text=True, env=environment)
    assert (good.returncode, good.stderr) == (0, "")
    assert "bound by drafter-fwd-bwd" in good.stdout
    bad = subprocess.run([*command, tmp_path / "no"], capture_output=True, text=True, env=environment)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("InputError: ")
    assert "matplotlib" not in good.stderr


@pytest.mark.slow
def test_a_million_rows_take_seconds(tmp_path: Path) -> None:
    counts = LaunchCounts(launches=144, tuning_waited_s=0.5, compile_waited_s=0.1).row()
    rows = [row | counts if row["stage"] == "optimizer" else row for row in steps_of(10)]
    file = write(tmp_path, rows * 10)
    file.write_bytes(file.read_bytes() * 5000)
    begin = time.process_time()
    times = summarise(read_timings(file)[0])
    assert sum(row.count for row in times.stages) == 900_000
    assert [(row.calls, row.launches_per_call) for row in times.launches] == [(450_000, 144)]
    assert time.process_time() - begin < 12  # about 3.5 s on one core of a shared machine
