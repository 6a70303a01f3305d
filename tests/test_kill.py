"""SIGKILL at any moment, a resume each time: weights and metrics are those of the run that never stopped."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from small_runs import small_project
from warm_parent import PAUSES, Child, WarmParent

from engine.run_folder import RUN_FILES

SETTINGS = (
    'devices={targets = ["cpu", "cpu"], drafters = ["cpu", "cpu"]}',
    "run.save_every=2",
    "run.eval_every=3",
    "run.keep_last=2",
    "run.steps=7",
    "data.token_budget=512",  # few micro-batches an epoch, so that a new one begins on the way
)
TIMED = {"tokens_per_s", "peak_memory"}


@pytest.fixture(scope="module")
def parent() -> Iterator[WarmParent]:
    one = WarmParent()
    yield one
    one.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def unbroken(parent: WarmParent, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    ended_well(parent.run(project, output, *SETTINGS))
    assert len({row["epoch"] for row in metrics(output) if "epoch" in row}) > 1
    return output


def ended_well(child: Child) -> None:
    code = child.wait()
    assert code == 0, child.said()


def metrics(output: Path) -> list[dict]:
    rows = [orjson.loads(line) for line in (output / "metrics.jsonl").read_bytes().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def the_same(output: Path, unbroken: Path) -> None:
    assert metrics(output) == metrics(unbroken)
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["latest", "step_000006", "step_000007"]
    for file in ("model.safetensors", "config.json", "training/state.safetensors"):
        checkpoints = (path / "checkpoints" / "latest" / file for path in (output, unbroken))
        one, other = (path.read_bytes() for path in checkpoints)
        assert one == other, file
    timed = [orjson.loads(line) for line in (output / "timings.jsonl").read_bytes().splitlines()]
    forwards = [row["micro_batch"] for row in timed if row["stage"] == "target-forward"]
    assert sorted(forwards) == list(range(14))


def killed_after(child: Child, seconds: float) -> None:
    """At whatever it is at then; it may have ended before."""
    time.sleep(seconds)
    child.send(signal.SIGKILL)
    assert child.wait() in (-signal.SIGKILL, 0), child.said()


def test_three_kills_and_three_resumes_repeat_the_unbroken_run(
    parent: WarmParent, project: Path, unbroken: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    parent.run(project, output, *SETTINGS, pause="in_a_checkpoint_write").kill_at_pause()
    assert [path.name for path in (output / "checkpoints").iterdir()] == [".step_000002.partial"]
    begun_again = parent.run(project, output, *SETTINGS, pause="in_a_row_of_metrics", resume=True)
    begun_again.kill_at_pause()
    assert "no checkpoint was written yet" in begun_again.said()
    killed_after(parent.run(project, output, *SETTINGS, resume=True), random.Random(1).uniform(0.2, 1.0))
    ended_well(parent.run(project, output, *SETTINGS, resume=True))
    the_same(output, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("point", sorted(PAUSES))
def test_a_kill_at_each_awkward_point_costs_nothing_but_steps(
    parent: WarmParent, project: Path, unbroken: Path, tmp_path: Path, point: str
) -> None:
    output = tmp_path / "run"
    if point in ("while_one_is_replaced", "while_rows_are_cut"):
        # Only a run that goes on from an earlier checkpoint than its newest comes to these.
        parent.run(project, output, *SETTINGS, pause="before_latest_moves").kill_at_pause()
        parent.run(project, output, *SETTINGS, pause=point, resume=True).kill_at_pause()
    else:
        parent.run(project, output, *SETTINGS, pause=point).kill_at_pause()
    ended_well(parent.run(project, output, *SETTINGS, resume=True))
    the_same(output, unbroken)


def begun(output: Path) -> bool:
    """Whether there is a run to resume; a kill may have come before its first file."""
    return any((output / name).exists() for name in RUN_FILES)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_repeat_the_unbroken_run(
    parent: WarmParent, project: Path, unbroken: Path, tmp_path: Path
) -> None:
    draw = random.Random(20)
    begin = time.perf_counter()
    ended_well(parent.run(project, tmp_path / "measured", *SETTINGS))
    whole = time.perf_counter() - begin
    kills, round_ = 0, 0
    while kills < 20:
        output = tmp_path / f"run{round_}"
        round_ += 1
        for attempt in range(7):
            resume = {"resume": True} if begun(output) else {}
            child = parent.run(project, output, *SETTINGS, **resume)
            time.sleep(draw.uniform(0.0, whole))
            child.send(signal.SIGKILL)
            code = child.wait()
            assert code in (-signal.SIGKILL, 0), child.said()
            kills += code != 0
            if code == 0 and attempt:
                break
        resume = {"resume": True} if begun(output) else {}
        ended_well(parent.run(project, output, *SETTINGS, **resume))
        the_same(output, unbroken)
