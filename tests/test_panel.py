"""Progress: what a person sees on a terminal and in a log."""

import io
from typing import Any

import pytest
from rich.console import Console

from engine.panel import LivePanel, PlainLines, make_panel, sparkline


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def row(step: int, **more: Any) -> dict[str, Any]:
    figures = {"loss": 3.25, "accuracy": 0.125, "block_prefix": 1.5, "tokens_per_s": 12345.6}
    return {"step": step, **figures, **more}


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pipe_gets_one_plain_line_per_log_every_steps() -> None:
    console, clock = plain_console(), Clock()
    panel = make_panel(10, console, log_every=4, clock=clock)
    assert isinstance(panel, PlainLines)
    for step in range(1, 11):
        clock.now += 2.0
        panel.step(row(step))
    panel.close()
    lines = written(console).splitlines()
    assert [line.split()[1] for line in lines] == ["4/10", "8/10", "10/10"]
    assert lines[0] == (
        "step 4/10  loss 3.2500  accuracy 12.5%  block prefix 1.50  tokens/s 12,346  ETA 12 s"
    )
    assert "\x1b" not in written(console), "no control codes in a log"


def test_an_evaluation_always_gets_a_line() -> None:
    console = plain_console()
    panel = make_panel(100, console, log_every=50)
    panel.step({"step": 0, "held_out_loss": 4.5, "accepted_length": 1.25})
    panel.step(row(7))
    panel.step(row(8, held_out_loss=2.0, accepted_length=2.75))
    first, second = written(console).splitlines()
    assert "held-out loss 4.5000" in first and "accepted length 1.25" in first
    assert "loss –" not in first, "it has no training figures of its own"
    assert second.startswith("step 8/100") and "accepted length 2.75" in second


def test_messages_are_printed_as_they_are() -> None:
    for console in (plain_console(), terminal_console()):
        panel = make_panel(10, console)
        panel.message("drafter.target_layer_ids[4] = 64: [red]no markup[/red], " + "and never wrapped " * 10)
        panel.close()
        assert "target_layer_ids[4] = 64: [red]no markup[/red], and never wrapped and" in written(console)


def test_a_terminal_gets_a_panel_with_every_figure() -> None:
    console, clock = terminal_console(), Clock()
    panel = make_panel(200, console, clock=clock)
    assert isinstance(panel, LivePanel)
    for step in range(1, 101):
        clock.now += 1.0
        panel.step(row(step, loss=5.0 - step / 50))
    panel.step({"step": 100, "held_out_loss": 2.5, "accepted_length": 2.25})
    panel.close()
    last = written(console).rpartition("step 100/200")[2]
    for words in ("loss 3.0000", "accuracy 12.5%", "block prefix 1.50", "tokens/s 12,346"):
        assert words in last
    assert "ETA 1 min 40 s" in last and "━" in last and "██▇▇▇▆▆" in last
    assert "held-out loss 2.5000" in last and "accepted length 2.25" in last and "at step 100" in last
    assert last.endswith("\n\x1b[?25h"), "what is printed next starts on its own line"


def test_a_panel_is_redrawn_a_few_times_a_second_at_most() -> None:
    console, clock = terminal_console(), Clock()
    panel = make_panel(10_000, console, clock=clock)
    for step in range(1, 1001):
        clock.now += 0.001
        panel.step(row(step))
    assert 5 <= written(console).count("step ") <= 15
    panel.close()
    assert "step 1000/10000" in written(console)


def test_a_loss_that_is_not_finite_is_shown_and_does_not_break_the_curve() -> None:
    console = terminal_console()
    panel = make_panel(3, console)
    panel.step(row(1))
    panel.step(row(2, loss=float("nan")))
    panel.step(row(3, loss=None))
    panel.close()
    assert "loss –" in written(console)
    plain = plain_console()
    make_panel(3, plain).step(row(2, loss=float("nan")))
    assert "loss nan" in written(plain)


def test_a_resumed_run_counts_its_pace_from_its_first_step() -> None:
    console, clock = plain_console(), Clock()
    panel = make_panel(10_000, console, clock=clock)
    panel.step(row(1000))
    clock.now += 3.0
    panel.step(row(1001))
    first, second = written(console).splitlines()
    assert first.endswith("ETA –") and second.endswith("ETA 7 h 29 min")


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 7.0, 3.0], "▁█▄")]
)
def test_a_sparkline_spans_its_values(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_a_live_panel_has_a_bar_for_every_lane() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    panel = make_panel(10, console)
    panel.lanes({"target.0@cpu": 0.25, "drafter.0@cpu": 0.9})
    panel.step(row(10))
    panel.close()
    text = console.file.getvalue()
    assert "target.0@cpu" in text and "25% busy" in text
    assert "drafter.0@cpu" in text and "90% busy" in text
