"""A run on GPUs keeps what it tuned, takes its cache off whatever happens, and stays under its cap."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import small_project

from engine.errors import NonFinite
from engine.lanes import RunLanes
from engine.memory_free import cap_gpu_memory, free_memory
from engine.memory_plan import CUDA_CONTEXT
from engine.planning import RunPlan
from engine.run import run
from engine.schedule import load_schedule

TOTAL = 141_000_000_000


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run that believes to be on GPUs does, in order."""
    found: list[str] = []

    class Recorder:
        def __init__(self, fingerprint: str, folder: Path, say: Callable[[str], None]) -> None:
            say("tuning results are heard")
            found.append("made")

        def install(self) -> None:
            found.append("install")

        def save(self) -> None:
            found.append("save")

        def uninstall(self) -> None:
            found.append("uninstall")

    def told(word: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found.append(word)
            return inner(*args, **options)

        return call

    monkeypatch.setattr(RunPlan, "on_gpus", property(lambda plan: True))
    monkeypatch.setattr("engine.run.TuningCache", Recorder)
    monkeypatch.setattr("engine.run.load_parts", told("load", run.__globals__["load_parts"]))
    monkeypatch.setattr(RunLanes, "warm_up", told("warm up", RunLanes.warm_up))
    monkeypatch.setattr(RunLanes, "train", told("train", RunLanes.train))
    return found


def short_run(project: Path, output: Path, *overrides: str) -> str:
    """One step; returns what was printed."""
    console = Console(file=io.StringIO(), width=200)
    run(load_schedule(project, ["run.eval_every=0", *overrides]), steps=1, output=output, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tuning_results_are_installed_before_loading_and_saved_after_the_warm_up_and_at_the_end(
    project: Path, tmp_path: Path, events: list[str]
) -> None:
    printed = short_run(project, tmp_path / "run")
    assert events == ["made", "install", "load", "warm up", "save", "train", "save", "uninstall"]
    assert "tuning results are heard" in printed


def test_a_run_on_a_cpu_has_no_tuning_results(
    project: Path, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunPlan, "on_gpus", property(lambda plan: False))
    short_run(project, tmp_path / "run")
    assert events == ["load", "warm up", "train"]


def failing(*args: Any, **options: Any) -> None:
    raise NonFinite("planted")


def test_tuning_results_are_saved_and_taken_off_when_a_step_fails(
    project: Path, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLanes, "train", failing)
    with pytest.raises(NonFinite, match="planted"):
        short_run(project, tmp_path / "run")
    assert events == ["made", "install", "load", "warm up", "save", "save", "uninstall"]


@pytest.mark.parametrize(
    "where", ["engine.run.load_parts", "engine.run.open_run_lanes", "engine.lanes.RunLanes.warm_up"]
)
def test_tuning_results_are_taken_off_when_setting_up_fails(
    project: Path, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(where, failing)
    with pytest.raises(NonFinite, match="planted"):
        short_run(project, tmp_path / "run")
    assert events[:2] == ["made", "install"]
    assert not (tmp_path / "run").exists()
    assert events[-1] == "uninstall"


# A cap on memory


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Shares of their memory that GPUs were told to keep to; each has 141 GB, 120 of them free."""
    shares: dict[str, float] = {}

    def set_fraction(share: float, device: torch.device) -> None:
        shares[str(device)] = share

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120_000_000_000, TOTAL))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    return shares


@pytest.mark.parametrize(
    ("most", "share"),
    [
        (None, 1.0),
        (40_000_000_000, (40_000_000_000 - CUDA_CONTEXT) / TOTAL),
        (TOTAL + CUDA_CONTEXT, 1.0),
        (2 * TOTAL, 1.0),
        (CUDA_CONTEXT // 2, 0.0),
    ],
)
def test_a_cap_covers_the_context_and_is_never_more_than_the_gpu(
    gpus: dict[str, float], most: int | None, share: float
) -> None:
    cap_gpu_memory(["cuda:0", "cpu", "cuda:1"], most)
    assert gpus == pytest.approx({"cuda:0": share, "cuda:1": share})


@pytest.mark.parametrize(
    ("most", "free"),
    [(None, 120_000_000_000), (40_000_000_000, 40_000_000_000), (130_000_000_000, 120_000_000_000)],
)
def test_what_counts_as_free_is_the_lesser_of_the_cap_and_what_is_there(
    gpus: dict[str, float], most: int | None, free: int
) -> None:
    assert free_memory(["cuda:0"], most) == {"cuda:0": free}


@pytest.mark.parametrize(
    ("overrides", "expected"), [(["run.gpu_memory_gb=40.5"], 40_500_000_000), ([], None)]
)
def test_a_schedules_cap_is_in_gigabytes_and_used_for_judging_and_for_capping(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: int | None
) -> None:
    asked: list[tuple[str, object, int | None]] = []

    def free(devices: Any, most: int | None) -> dict[str, int]:
        asked.append(("free", list(devices), most))
        return {}

    def cap(devices: Any, most: int | None) -> None:
        asked.append(("cap", list(devices), most))

    monkeypatch.setattr("engine.run.free_memory", free)
    monkeypatch.setattr("engine.run.cap_gpu_memory", cap)
    monkeypatch.setattr("engine.run.load_parts", failing)
    with pytest.raises(NonFinite, match="planted"):
        short_run(project, tmp_path / "run", *overrides)
    assert asked == [("free", ["cpu"], expected), ("cap", ["cpu"], expected)]
