"""What the schedules that ship promise in their headings."""

from pathlib import Path

import pytest

from engine.schedule import load_schedule

SCHEDULES = sorted((Path(__file__).parent.parent / "schedules").glob("*.toml"))


@pytest.mark.parametrize("path", SCHEDULES, ids=[path.stem for path in SCHEDULES])
def test_target_forwards_take_turns_in_the_sequential_schedule_alone(path: Path) -> None:
    schedule = load_schedule(path)
    (forward,) = (stage for stage in schedule.stage if stage.name == "target-forward")
    sequential = schedule.layout == "sequential"
    assert (forward.exclusive is not None) == sequential
    assert sequential == path.stem.startswith("sequential")
