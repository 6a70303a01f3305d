"""A resumed run repeats the unbroken one, under other lanes too; what would not repeat it is refused."""

import io
import shutil
from pathlib import Path

import orjson
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from small_runs import small_project, write_config, write_random

from engine.drift import run_facts
from engine.errors import CheckpointError
from engine.planning import plan_run
from engine.run import RunResult, run
from engine.schedule import load_schedule

TIMED = {"tokens_per_s", "peak_memory"}
STATE = "training/state.safetensors"


def lanes(targets: int, drafters: int, depth: int = 1) -> list[str]:
    names = [", ".join(['"cpu"'] * count) for count in (targets, drafters)]
    devices = f"devices={{targets = [{names[0]}], drafters = [{names[1]}]}}"
    return [devices, f"stage.transfer.depth={depth}"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


def trained(schedule: Path, output: Path, *overrides: str, **options: object) -> tuple[RunResult, str]:
    said = io.StringIO()
    console = Console(file=said, width=160)
    result = run(load_schedule(schedule, overrides), output=output, console=console, **options)  # type: ignore[arg-type]
    return result, said.getvalue()


@pytest.fixture(scope="module")
def unbroken(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    trained(project, output, *lanes(1, 1))
    return output


@pytest.fixture(scope="module")
def saved(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was cut short after step 3, where it saved anyway."""
    output = tmp_path_factory.mktemp("runs") / "saved"
    trained(project, output, *lanes(1, 1), steps=3)
    return output


@pytest.fixture
def broken(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "broken", symlinks=True)


def metrics(output: Path) -> list[dict]:
    rows = [orjson.loads(line) for line in (output / "metrics.jsonl").read_bytes().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def bytes_of(output: Path) -> list[bytes]:
    latest = output / "checkpoints/latest"
    return [(latest / name).read_bytes() for name in ("model.safetensors", "config.json", STATE)]


def cursor(checkpoint: Path) -> dict:
    return orjson.loads((checkpoint / "training/cursor.json").read_bytes())


# The same run


@pytest.mark.parametrize(
    "other",
    [lanes(2, 1, depth=3), [*lanes(2, 1), "stage.target-forward.exclusive=target-forward"]],
    ids=["pipelined", "sequential"],
)
def test_a_run_that_was_cut_goes_on_bit_for_bit_under_another_schedule(
    project: Path, unbroken: Path, broken: Path, tmp_path: Path, other: list[str]
) -> None:
    schedule = tmp_path / "other.toml"
    schedule.write_text(project.read_text() + '[[plugin]]\nuse = "plugins.async_copy"\n')
    trained(schedule, broken, *other, resume=True)
    assert metrics(broken) == metrics(unbroken)
    assert bytes_of(broken) == bytes_of(unbroken)


def test_one_drafter_goes_on_where_two_left_off_within_a_millionth(project: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / "unbroken", tmp_path / "broken"]
    trained(project, outputs[0], *lanes(1, 2))
    trained(project, outputs[1], *lanes(1, 2), steps=3)
    trained(project, outputs[1], *lanes(1, 1), resume=True)
    one, other = (metrics(output) for output in outputs)
    assert one[:4] == other[:4] and len(one) == len(other) == 7
    for row, expected in zip(other[4:], one[4:], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert row["lr"] == expected["lr"] and row["anchors"] == expected["anchors"]
    weights = [load_file(output / "checkpoints/latest" / STATE) for output in outputs]
    for name, value in weights[0].items():
        if name.startswith("master."):
            assert (weights[1][name] - value).abs().max() <= 1e-6 * value.abs().max()


def test_cadences_come_from_the_global_step(project: Path, tmp_path: Path) -> None:
    settings = ["run.save_every=2", "run.eval_every=4", *lanes(1, 1)]
    trained(project, tmp_path / "run", *settings, steps=3)
    result, _ = trained(project, tmp_path / "run", *settings, resume=True)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*"))
    assert names == ["step_000002", "step_000003", "step_000004", "step_000006"]
    # Step 3 was the last one of a run that was cut, which evaluates at its end.
    assert [row["step"] for row in metrics(tmp_path / "run") if "held_out_loss" in row] == [0, 3, 4, 6]
    assert result.steps == 6, "a run cut by steps ends where the schedule says"


def test_figures_from_before_training_are_those_of_the_first_start(
    project: Path, unbroken: Path, broken: Path
) -> None:
    result, said = trained(project, broken, *lanes(1, 1), resume=True)
    assert result.before is not None and result.after is not None
    first = metrics(unbroken)[0]
    assert result.before.row() == {key: first[key] for key in ("held_out_loss", "accepted_length")}
    assert 0 <= result.before.accuracy <= 1 and result.before.documents == 8
    assert "–" not in said.partition("held-out documents")[2]


def test_step_counters_and_scalars_keep_their_types(project: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "counting.py"
    plugin.write_text(
        """
import attrs, torch
from engine.hookspecs import hookimpl

@attrs.frozen(kw_only=True)
class Options:
    pass

class Counting(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0})

    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                assert type(state.setdefault("count", 0)) is int and state.setdefault("note", None) is None
                state["count"] += 1
                state["long"] = state.get("long", torch.zeros(1, dtype=torch.int64)) + 1
                weight.add_(weight.grad, alpha=-group["lr"] / state["count"])

class Plugin:
    @hookimpl
    def make_optimizer(self, parameters, train):
        return Counting(list(parameters.values()))

def make(options):
    return Plugin()
"""
    )
    schedule = tmp_path / "counting.toml"
    schedule.write_text(project.read_text() + f'[[plugin]]\nuse = "{plugin}"\n')
    settings = ["run.eval_every=0", "run.steps=4", *lanes(1, 2)]
    trained(schedule, tmp_path / "unbroken", *settings)
    trained(schedule, tmp_path / "broken", *settings, steps=2)
    scalars = cursor(tmp_path / "broken/checkpoints/latest")["scalars"]
    assert scalars["count.fc.weight"] == 2 and scalars["note.fc.weight"] is None
    trained(schedule, tmp_path / "broken", *settings, resume=True)
    assert bytes_of(tmp_path / "broken") == bytes_of(tmp_path / "unbroken")
    state = load_file(tmp_path / "broken/checkpoints/latest" / STATE)
    assert state["long.fc.weight"].dtype == torch.int64 and int(state["long.fc.weight"]) == 4


def test_adams_counters_are_stored_as_it_keeps_them(saved: Path) -> None:
    state = load_file(saved / "checkpoints/latest" / STATE)
    counters = [value for name, value in state.items() if name.startswith("step.")]
    assert len(counters) == 25 and all(one.dtype == torch.float32 and one.item() == 3 for one in counters)


# Drift


def test_a_cursor_says_what_the_run_was(saved: Path) -> None:
    kept = cursor(saved / "checkpoints/latest")
    assert (kept["step"], kept["micro_batch"], kept["drift"]) == (3, 6, [])
    facts = kept["facts"]
    assert facts["run.seed"] == 3 and facts["total steps"] == 6
    assert len(facts["documents (fingerprint)"]) == len(facts["target configuration (fingerprint)"]) == 32


def test_a_run_whose_folders_have_moved_is_the_same_run(
    project: Path, unbroken: Path, broken: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(project.parent, tmp_path / "moved")
    schedule = moved / "small.toml"
    schedule.write_text(project.read_text().replace(str(project.parent), str(moved)))
    trained(schedule, broken, *lanes(1, 1), resume=True)
    assert metrics(broken) == metrics(unbroken)


def test_other_documents_and_another_target_stop_a_resume_and_are_listed(
    project: Path, saved: Path, tmp_path: Path
) -> None:
    write_random(tmp_path / "train", seed=5)
    write_config(tmp_path / "target", initializer_range=0.03)
    (tmp_path / "target/tokenizer.json").write_text("{}")
    others = [f"data.path={tmp_path}/train", f"target.path={tmp_path}/target", "run.cpu_threads=2"]
    before = metrics(saved)
    with pytest.raises(CheckpointError) as found:
        trained(project, saved, *lanes(1, 1), *others, resume=True)
    assert found.value.exit_code == 2
    text = str(found.value)
    for named in ("documents (", "target configuration (", "tokenizer (", "run.cpu_threads: was 1, is 2"):
        assert f"\n  {named}" in text
    assert "held-out" not in text and "path" not in text and "--allow-drift" in text
    assert metrics(saved) == before, "nothing is cut by a resume that is refused"


def test_another_optimizer_or_option_stops_a_resume(project: Path, saved: Path, tmp_path: Path) -> None:
    muon = tmp_path / "muon.toml"
    muon.write_text(project.read_text() + '[[plugin]]\nuse = "plugins.muon"\nmomentum = 0.9\n')
    with pytest.raises(
        CheckpointError, match=r"make_optimizer: was the engine's own, is plugins.muon \(.*0\.9"
    ):
        trained(muon, saved, *lanes(1, 1), resume=True)


def test_a_wrapper_stops_a_resume_unless_it_keeps_the_numbers(
    project: Path, saved: Path, tmp_path: Path
) -> None:
    wrapper = tmp_path / "wrapper.py"
    source = (
        "import attrs\nfrom engine.hookspecs import hookimpl\n\n@attrs.frozen\nclass Options:\n    pass\n\n"
        "class Wrapper:\n    @hookimpl\n    def wrap_target(self, target):\n        return None\n\n"
        "def make(options):\n    return Wrapper()\n"
    )
    schedule = tmp_path / "wrapped.toml"
    schedule.write_text(project.read_text() + f'[[plugin]]\nuse = "{wrapper}"\n')
    wrapper.write_text(source)
    with pytest.raises(CheckpointError, match=r"plugin for wrap_target: was the engine's own, is .*wrapper"):
        trained(schedule, saved, *lanes(1, 1), resume=True)
    quiet = tmp_path / "quiet.py"
    quiet.write_text(source + "\n\nKEEPS_NUMBERS = True\n")
    schedule.write_text(project.read_text() + f'[[plugin]]\nuse = "{quiet}"\n')
    plan = plan_run(load_schedule(schedule))
    assert not run_facts(plan)["plugin for wrap_target"]


def test_an_allowed_drift_is_written_down_and_goes_on(project: Path, broken: Path, tmp_path: Path) -> None:
    muon = tmp_path / "muon.toml"
    muon.write_text(project.read_text() + '[[plugin]]\nuse = "plugins.muon"\n')
    settings = [*lanes(1, 1), "train.clip=0.5"]
    _, said = trained(muon, broken, *settings, steps=4, resume=True, allow_drift=True)
    changed = ["train.clip: was 1.0, is 0.5"]
    kept = cursor(broken / "checkpoints/step_000004")["drift"]
    assert len(kept) == 1 and kept[0]["step"] == 3 and kept[0]["differences"][:1] == changed
    row = next(row for row in metrics(broken) if "drift" in row)
    assert row == {"step": 3, "drift": kept[0]["differences"]}
    log = (broken / "run.log").read_text()
    assert "drift: train.clip: was 1.0, is 0.5" in log and "optimizer's state begins anew" in log
    assert "drift: train.clip" in said
    assert "momentum_buffer.fc.weight" in load_file(broken / "checkpoints/latest" / STATE)
    trained(muon, broken, *settings, resume=True)  # the new recipe is the run's own now
    assert cursor(broken / "checkpoints/latest")["drift"] == kept


# Which checkpoint


@pytest.fixture(scope="module")
def saved_twice(project: Path, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, cut short once more after step 5."""
    output = shutil.copytree(saved, tmp_path_factory.mktemp("runs") / "saved_twice", symlinks=True)
    trained(project, output, *lanes(1, 1), steps=5, resume=True)
    return output


@pytest.mark.parametrize("damage", ["cut short", "latest missing", "foreign", "gone"])
def test_a_torn_or_foreign_checkpoint_is_skipped_for_the_one_before(
    project: Path, unbroken: Path, saved_twice: Path, tmp_path: Path, damage: str
) -> None:
    output = shutil.copytree(saved_twice, tmp_path / "run", symlinks=True)
    checkpoints = output / "checkpoints"
    newest = checkpoints / "step_000005"
    if damage == "cut short":
        state = newest / STATE
        state.write_bytes(state.read_bytes()[:-1])
    if damage == "latest missing":
        (checkpoints / "latest").unlink()
        (newest / "config.json").write_text("{")
    if damage == "foreign":
        shutil.rmtree(newest / "training")
    if damage == "gone":
        shutil.rmtree(newest)
    (checkpoints / "step_abc").mkdir()
    _, said = trained(project, output, *lanes(1, 1), resume=True)
    assert "warning: not resumed from step_000005" in said and "resumed from step_000003" in said
    assert "warning: not resumed from step_000005" in (output / "run.log").read_text()
    assert bytes_of(output) == bytes_of(unbroken) and metrics(output) == metrics(unbroken)


def test_latest_counts_and_not_the_highest_number(
    project: Path, unbroken: Path, saved_twice: Path, tmp_path: Path
) -> None:
    output = shutil.copytree(saved_twice, tmp_path / "run", symlinks=True)
    checkpoints = output / "checkpoints"
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").symlink_to("step_000003")
    _, said = trained(project, output, *lanes(1, 1), resume=True)
    assert "resumed from step_000003" in said and metrics(output) == metrics(unbroken)


def test_what_a_killed_write_left_is_cleared_away_and_a_replaced_one_comes_back(
    project: Path, unbroken: Path, broken: Path
) -> None:
    checkpoints = broken / "checkpoints"
    (checkpoints / "step_000003").rename(checkpoints / ".step_000003.replaced")
    for name in (".step_000003.partial", ".step_000001.removed"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_bytes(b"half")
    (checkpoints / ".latest.0123456789ab.partial").symlink_to("step_000003")
    (broken / ".metrics.jsonl.partial").write_bytes(b"half")
    trained(project, broken, *lanes(1, 1), resume=True)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000003", "step_000006"]
    assert not list(broken.glob(".*.partial")) and metrics(broken) == metrics(unbroken)
