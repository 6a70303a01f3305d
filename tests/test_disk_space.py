"""A checkpoint that does not fit is refused before it is begun, and the one before it stays."""

import io
from pathlib import Path

import orjson
import pytest
from rich.console import Console
from small_runs import assembled, small_project

import engine.disk_space
from engine.disk_space import check_first_room, check_room, checkpoints, free_disk, saved_bytes
from engine.errors import DiskError
from engine.planning import plan_run
from engine.run import run
from engine.schedule import load_schedule


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


def planned(project: Path, *overrides: str):  # type: ignore[no-untyped-def]
    return plan_run(load_schedule(project, overrides))


@pytest.mark.parametrize(
    "settings, count",
    [
        (["run.save_every=2"], 3),
        (["run.save_every=4"], 2),
        (["run.save_every=0"], 1),
        (["run.save_every=1", "run.keep_last=2"], 3),
        (["run.save_every=1", "run.keep_last=2", "run.keep_every=2"], 4),
        (["run.save_every=1", "run.keep_last=9"], 6),
    ],
)
def test_as_many_checkpoints_are_counted_as_stand_at_once(
    project: Path, settings: list[str], count: int
) -> None:
    assert checkpoints(planned(project, *settings))[1] == count


def test_a_run_without_room_for_one_checkpoint_does_not_start(project: Path, tmp_path: Path) -> None:
    plan = planned(project)
    needed = checkpoints(plan)[0]
    with pytest.raises(DiskError, match=r"0\.\d\d MB are free, and one checkpoint.*run\.output_dir") as found:
        check_first_room(plan, tmp_path, lambda line: None, free=lambda folder: needed - 1)
    assert found.value.exit_code == 6


def test_a_run_looks_at_the_disk_before_it_loads_and_leaves_no_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.disk_space.check_first_room, "__defaults__", (lambda folder: 0,))
    monkeypatch.setattr("engine.run.load_parts", None)
    with pytest.raises(DiskError, match="one checkpoint of this drafter takes"):
        run(load_schedule(project), output=tmp_path / "run", console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_room_for_one_and_not_for_all_is_said_and_standing_ones_are_not_counted_again(
    project: Path, tmp_path: Path
) -> None:
    plan = planned(project, "run.save_every=2")
    needed, count = checkpoints(plan)
    said: list[str] = []
    check_first_room(plan, tmp_path, said.append, free=lambda folder: 2 * needed)
    assert len(said) == 1 and f"room for 2 of the {count} checkpoints" in said[0]
    (tmp_path / "checkpoints/step_000002").mkdir(parents=True)
    check_first_room(plan, tmp_path, said.append, free=lambda folder: 2 * needed)
    assert len(said) == 1


def test_what_is_needed_before_a_save_is_what_the_plan_foretold(project: Path, tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO())
    result = run(
        load_schedule(project, ["run.eval_every=0"]), steps=2, output=tmp_path / "run", console=quiet
    )
    parts = assembled(project)
    served = parts.drafters[0].masters.parameters.values()
    before = saved_bytes(parts.state().values(), served)
    foretold = checkpoints(parts.plan)[0]
    on_disk = sum(path.stat().st_size for path in result.checkpoint.rglob("*") if path.is_file())
    assert before < foretold <= on_disk < foretold * 1.2  # headers and JSON weigh in one this small


def test_a_refused_save_names_need_and_room(tmp_path: Path) -> None:
    check_room(tmp_path, 10, free=lambda folder: 10)
    with pytest.raises(DiskError, match=r"24\.2 GB does not fit, 3\.0 GB are free.*run\.keep_last"):
        check_room(tmp_path, 24_200_000_000, free=lambda folder: 3_000_000_000)


def test_free_space_is_told_for_folders_that_are_not_made_yet(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "a" / "b") > 0


def test_a_disk_that_fills_up_during_a_run_keeps_the_checkpoint_before(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    filled: list[Path] = []

    def free(folder: Path) -> int:
        filled.append(folder)
        return 0 if (output / "checkpoints/latest").exists() else 10**12

    monkeypatch.setattr(engine.disk_space.check_room, "__defaults__", (free,))
    settings = ["run.eval_every=0", "run.save_every=2"]
    with pytest.raises(DiskError, match="a checkpoint of .* does not fit") as found:
        run(load_schedule(project, settings), output=output, console=Console(file=io.StringIO()))
    assert found.value.exit_code == 6 and len(filled) == 2
    there = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert there == ["latest", "step_000002"]
    assert orjson.loads((output / "status.json").read_bytes())["state"] == "failed"
