"""`export` as a command: what it takes from a run, where it writes, what it refuses."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import small_project

from engine import cli
from engine.dflash.export import check_layout, read_drafter_config
from engine.errors import CheckpointError, DifferenceFound, InputError, NonFinite
from engine.export import export
from engine.independent_reader import block_logits
from engine.run import run
from engine.run_folder import resolve_checkpoint
from engine.schedule import load_schedule


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = small_project(tmp_path_factory.mktemp("project"))
    output = tmp_path_factory.mktemp("runs") / "run"
    run(load_schedule(project, ["run.steps=3"]), output=output, plain=True)
    return output


def test_a_run_is_exported_with_a_card_and_nothing_else(trained: Path, tmp_path: Path) -> None:
    said: list[str] = []
    folder = export(trained, tmp_path / "deep" / "out", target_name="Some/Target", say=said.append)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert read_drafter_config(folder) == read_drafter_config(resolve_checkpoint(trained))
    masters = load_file(resolve_checkpoint(trained) / "training/state.safetensors")
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(weight, masters[f"master.{name}"])
    assert any("bit for bit" in line for line in said)

    card = (folder / "README.md").read_text()
    rows = [orjson.loads(line) for line in (trained / "metrics.jsonl").read_bytes().splitlines()]
    accepted = next(row["accepted_length"] for row in rows if row["step"] == 3)
    assert f"{accepted:.2f} of 4 tokens per verification" in card and "measured after | 3 steps" in card
    assert "--speculative-algorithm DFLASH" in card and "--speculative-num-draft-tokens 4" in card
    assert '"num_speculative_tokens": 3' in card and "vllm serve Some/Target" in card
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in card and "extra_buffer" in card  # mixed layers, a hybrid target
    assert "| objective | decay, gamma 4 |" in card and "| length | 3 steps |" in card
    assert str(trained) not in card


def test_an_export_can_be_exported_again(trained: Path, tmp_path: Path) -> None:
    first = export(trained, tmp_path / "first")
    target = load_schedule(trained / "schedule.toml").target.path
    second = export(first, tmp_path / "second", target=target)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert "## Training" not in (second / "README.md").read_text()  # nobody knows


def test_nothing_is_written_over_what_no_export_wrote(trained: Path, tmp_path: Path) -> None:
    folder = export(trained, tmp_path / "out")
    with pytest.raises(InputError, match="holds an exported drafter; --overwrite replaces it"):
        export(trained, folder)
    export(trained, folder, overwrite=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes.txt, which no export wrote"):
        export(trained, folder, overwrite=True)
    checkpoint = resolve_checkpoint(trained)
    with pytest.raises(InputError, match="is the checkpoint itself"):
        export(trained, checkpoint, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        export(trained, tmp_path / "file", overwrite=True)


def copied(trained: Path, run_folder: Path) -> Path:
    """A run of one's own to spoil; its latest checkpoint."""
    shutil.copytree(trained, run_folder, symlinks=True)
    return resolve_checkpoint(run_folder)


def alter_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def test_a_checkpoint_that_was_changed_is_not_exported(trained: Path, tmp_path: Path) -> None:
    checkpoint = copied(trained, tmp_path / "run")
    whole = (checkpoint / "model.safetensors").read_bytes()
    alter_weights(checkpoint / "model.safetensors", lambda weights: weights["fc.weight"].add_(1))
    with pytest.raises(CheckpointError, match="fc.weight in model.safetensors is not what training kept"):
        export(checkpoint, tmp_path / "out")
    (checkpoint / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors: corrupt"):
        export(checkpoint, tmp_path / "out")
    (checkpoint / "model.safetensors").write_bytes(whole)
    stated = orjson.loads((checkpoint / "config.json").read_bytes())
    stated["dflash_config"]["mask_token_id"] = 1
    (checkpoint / "config.json").write_bytes(orjson.dumps(stated))
    with pytest.raises(
        CheckpointError, match="mask_token_id is 1, and the checkpoint's schedule trained with"
    ):
        export(checkpoint, tmp_path / "out")


def test_weights_that_are_not_finite_are_told_as_such(trained: Path, tmp_path: Path) -> None:
    checkpoint = copied(trained, tmp_path / "run")
    state, served = checkpoint / "training/state.safetensors", checkpoint / "model.safetensors"
    for value, words in (
        (1e38, "the training model's own logits hold NaN or infinite values"),
        (float("nan"), "fc.weight is not finite in float32"),
    ):
        alter_weights(state, lambda weights, value=value: weights["master.fc.weight"].fill_(value))
        alter_weights(served, lambda weights, value=value: weights["fc.weight"].fill_(value))
        with pytest.raises(NonFinite, match=words):
            export(checkpoint, tmp_path / "out")
    names = list(load_file(served))
    alter_weights(served, lambda weights: [weights[name].fill_(float("nan")) for name in names])
    alter_weights(state, lambda weights: [weights[f"master.{name}"].fill_(float("nan")) for name in names])
    with pytest.raises(NonFinite, match=f" and {len(names) - 1} more tensors are not finite"):
        export(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_last_row_that_is_not_finished_counts_for_none(trained: Path, tmp_path: Path) -> None:
    checkpoint = copied(trained, tmp_path / "run")
    rows = tmp_path / "run" / "metrics.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(whole + b'{"step":3,"accepted_length":9.75,"held')
    assert "measured after | 3 steps" in (export(checkpoint, tmp_path / "out") / "README.md").read_text()
    number = whole.count(b"\n") + 1
    for line in (b'{"step":3,"accep', b'{"accepted_length":9.75}', b"[3]", b'{"step":null}'):
        rows.write_bytes(whole + line + b"\n")
        with pytest.raises(CheckpointError, match=f"metrics.jsonl: line {number} is no row with a step"):
            export(checkpoint, tmp_path / "out", overwrite=True)


def test_figures_that_an_evaluation_could_not_tell_stay_off_the_card(trained: Path, tmp_path: Path) -> None:
    checkpoint = copied(trained, tmp_path / "run")
    rows = tmp_path / "run" / "metrics.jsonl"
    rows.write_bytes(
        b'{"step":1,"accepted_length":2.5,"held_out_loss":null}\n{"step":2,"accepted_length":null}\n'
    )
    card = (export(checkpoint, tmp_path / "out") / "README.md").read_text()
    assert "2.50 of 4 tokens" in card and "measured after | 1 steps" in card and "held-out loss" not in card


def test_neither_the_current_folder_nor_one_among_checkpoints_is_replaced(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = copied(trained, tmp_path / "run")
    there = sorted(tmp_path.rglob("*"))
    link = tmp_path / "run" / "checkpoints" / "latest"
    for place, words in (
        (checkpoint / "sub", "lies inside the checkpoint"),
        (checkpoint / "training" / "deep", "lies inside the checkpoint"),
        (link / "sub", "lies inside the checkpoint"),
        (checkpoint.parent / "step_000099", "lies where a run keeps its checkpoints"),
        (trained / "checkpoints" / "mine", "lies where a run keeps its checkpoints"),
    ):
        with pytest.raises(InputError, match=words):
            export(checkpoint, place)
    assert sorted(tmp_path.rglob("*")) == there
    (tmp_path / "run" / "schedule.toml").unlink()
    with pytest.raises(InputError, match="lies where a run keeps its checkpoints"):
        export(checkpoint, checkpoint.parent / "step_000099")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = f"{tmp_path}/here: is the current folder, and an export replaces"
    for here in (".", tmp_path / "here"):
        with pytest.raises(InputError, match=words):
            export(checkpoint, Path(here))
    check_layout(export(checkpoint, Path("drafter")))
    assert (tmp_path / "here" / "drafter" / "README.md").is_file()


def test_a_difference_leaves_nothing_behind(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> torch.Tensor:
        return block_logits(*arguments) + 1

    monkeypatch.setattr("engine.export_comparison.block_logits", wrong)
    with pytest.raises(DifferenceFound, match="would not be served as it was trained"):
        export(trained, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_another_targets_drafter_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no drafter for .*hidden_size 32, not 192"):
        export(trained, tmp_path / "out", target="builtin:tiny-hybrid")


def test_a_target_that_is_gone_is_needed_for_speculators_alone(trained: Path, tmp_path: Path) -> None:
    first = export(trained, tmp_path / "first")
    export(first, tmp_path / "second")
    with pytest.raises(InputError, match="--format speculators: names the target"):
        export(first, tmp_path / "third", layout="speculators")


def test_the_command_exports_and_ends_with_2_for_a_mixed_speculators_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["engine", "export", str(trained), str(tmp_path / "out")]
    for more, code, words in (
        ([], 0, "bit for bit"),
        (["--overwrite", "--format", "speculators"], 2, "one flag for causality"),
    ):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert (left.value.code or 0) == code and words in capsys.readouterr().err
        check_layout(tmp_path / "out")  # the old one stays


def test_the_speculators_layout_is_told_where_it_cannot_be_read(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(orjson.dumps({"speculators_model_type": "dflash"}))
    with pytest.raises(CheckpointError, match="in the speculators layout.*--format dflash"):
        read_drafter_config(tmp_path)


def test_a_target_without_a_name_is_told(trained: Path, tmp_path: Path) -> None:
    said: list[str] = []
    export(trained, tmp_path / "one", say=said.append)
    assert "no --target-name: the card calls the target" in said[-1]
    export(trained, tmp_path / "two", target_name="Acme/Tiny", say=said.append)
    assert "two" in said[-1]
