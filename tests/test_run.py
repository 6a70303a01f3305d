"""Whole runs of the plain loop on a small hybrid target."""

import io
import shutil
from pathlib import Path

import attrs
import orjson
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_runs import VOCAB, assembled, plain_loop, small_project

from engine.data.documents import open_documents
from engine.data.shards import write_documents
from engine.dflash.finite import BadStepsInARow
from engine.errors import CheckpointError, NonFinite
from engine.plain import evaluate_held_out, train_step
from engine.planning import plan_run
from engine.report import print_plan
from engine.run import RunResult, run
from engine.run_folder import resolve_checkpoint
from engine.schedule import load_schedule


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


def trained(project: Path, output: Path, *overrides: str, **options: object) -> RunResult:
    console = Console(file=io.StringIO())
    return run(load_schedule(project, overrides), output=output, console=console, **options)  # type: ignore[arg-type]


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [orjson.loads(line) for line in (folder / name).read_bytes().splitlines()]


TIMED = {"tokens_per_s"}


def untimed(folder: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows(folder)]


@pytest.fixture(scope="module")
def unbroken(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    trained(project, output)
    return output


@pytest.mark.parametrize(
    "steps, words", [(2, "; 2 of 6 steps of"), (6, "; 6 steps of"), (None, "; 6 steps of")]
)
def test_a_run_that_stops_early_heads_with_its_steps_of_all(
    project: Path, steps: int | None, words: str
) -> None:
    console = Console(file=io.StringIO(), width=400)
    print_plan(plan_run(load_schedule(project)), console, steps)
    assert isinstance(console.file, io.StringIO)
    assert words in console.file.getvalue() and "AdamW" not in console.file.getvalue()


def test_a_run_leaves_the_folder_that_the_design_names(unbroken: Path) -> None:
    names = {path.name for path in unbroken.iterdir()}
    assert names == {
        "schedule.toml",
        "environment.json",
        "metrics.jsonl",
        "timings.jsonl",
        "status.json",
        "run.log",
        "checkpoints",
    }
    assert orjson.loads((unbroken / "status.json").read_bytes())["state"] == "done"
    checkpoints = sorted(path.name for path in (unbroken / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step_000003", "step_000006"]
    assert (unbroken / "checkpoints/latest").resolve().name == "step_000006"
    environment = orjson.loads((unbroken / "environment.json").read_bytes())
    assert environment["versions"]["torch"] and environment["kernels"]["chunk_gated_delta_rule"]


def test_metrics_have_the_names_that_the_design_gives_and_sane_values(unbroken: Path) -> None:
    steps = [row for row in rows(unbroken) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        assert {
            "step",
            "epoch",
            "loss",
            "accuracy",
            "accuracy_by_slot",
            "block_prefix",
            "lr",
            "grad_norm",
            "tokens",
            "padding",
            "tokens_per_s",
            "anchors",
            "skipped",
            "peak_memory",
        } <= set(row)
        assert 0 <= row["accuracy"] <= 1 and 1 <= row["block_prefix"] <= 4
        assert all(0 <= share <= 1 for share in row["accuracy_by_slot"] if share is not None)
        assert 0 < row["anchors"] <= 24 and row["tokens"] > 0
    evaluated = [row for row in rows(unbroken) if "accepted_length" in row]
    assert [row["step"] for row in evaluated] == [0, 3, 6]
    assert all(1 <= row["accepted_length"] <= 4 and row["held_out_loss"] > 0 for row in evaluated)


def test_every_stage_of_every_micro_batch_is_timed(unbroken: Path) -> None:
    timed = rows(unbroken, "timings.jsonl")
    for stage in ("target-forward", "pack", "drafter-fwd-bwd"):
        assert sorted(row["micro_batch"] for row in timed if row["stage"] == stage) == list(range(12))
    optimizer = [row["step"] for row in timed if row["stage"] == "optimizer"]
    assert sorted(set(optimizer)) == [1, 2, 3, 4, 5, 6]
    assert all(row["host_ms"] > 0 for row in timed)


def test_the_effective_schedule_repeats_the_run(unbroken: Path, tmp_path: Path) -> None:
    trained(unbroken / "schedule.toml", tmp_path / "again")
    assert untimed(tmp_path / "again") == untimed(unbroken)


def test_a_checkpoint_is_a_servable_drafter_at_its_root(unbroken: Path) -> None:
    checkpoint = resolve_checkpoint(unbroken)
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "config.json",
        "model.safetensors",
        "training",
    ]
    assert len(load_file(checkpoint / "model.safetensors")) == 3 + 11 * 2


def test_a_resumed_run_repeats_the_unbroken_one(project: Path, unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "broken"
    trained(project, output, "run.eval_every=3", steps=4)
    (output / "checkpoints/latest").unlink()
    (output / "checkpoints/latest").symlink_to("step_000003")  # as if killed in step 5
    trained(project, output, resume=True)
    assert untimed(output) == untimed(unbroken)
    one, other = (load_file(resolve_checkpoint(path) / "model.safetensors") for path in (output, unbroken))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    "override, named",
    [
        ("train.lr=2e-3", "train.lr: was 0.001, is 0.002"),
        ("train.micro_batches=1", "train.micro_batches"),
        ("run.seed=4", "run.seed: was 3, is 4"),
        ("run.steps=7", "total steps: was 6, is 7"),
        ("data.max_anchors=13", "data.max_anchors"),
    ],
)
def test_a_resume_that_would_not_continue_the_run_is_refused(
    project: Path, unbroken: Path, override: str, named: str
) -> None:
    before = rows(unbroken)
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")):
        trained(project, unbroken, override, resume=True)
    assert rows(unbroken) == before


@pytest.mark.parametrize(
    "damage, named",
    [
        ("cursor without keys", "cursor.json: lacks step, micro_batch"),
        ("cursor not JSON", "cursor.json: not JSON"),
        ("state without moments", "state.safetensors: holds .* bytes, and .* were written"),
        ("no state", "state.safetensors: is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_named(
    project: Path, unbroken: Path, tmp_path: Path, damage: str, named: str
) -> None:
    output = tmp_path / "damaged"
    shutil.copytree(unbroken, output, symlinks=True)
    for training in (output / "checkpoints").glob("step_*/training"):
        if damage == "cursor without keys":
            (training / "cursor.json").write_text("{}")
        if damage == "cursor not JSON":
            (training / "cursor.json").write_text("{")
        if damage == "state without moments":
            state = load_file(training / "state.safetensors")
            masters = {name: value for name, value in state.items() if name.startswith("master.")}
            save_file(masters, training / "state.safetensors")
        if damage == "no state":
            (training / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match=named):
        trained(project, output, resume=True)


def test_steps_cuts_short_without_moving_the_learning_rates_end(
    project: Path, unbroken: Path, tmp_path: Path
) -> None:
    trained(project, tmp_path / "short", "run.eval_every=0", steps=2)
    short = [row["lr"] for row in rows(tmp_path / "short") if "lr" in row]
    assert short == [row["lr"] for row in rows(unbroken) if "lr" in row][:2]


def test_training_learns_what_can_be_learnt(project: Path, tmp_path: Path) -> None:
    counting = [([(start + k) % 20 for k in range(40)], [0] * 4 + [1] * 36) for start in range(20)]
    write_documents(tmp_path / "counting", counting, vocab_size=VOCAB)
    overrides = (f"data.path={tmp_path}/counting", "data.held_out=0.2", "train.lr=1e-2", "run.steps=80")
    result = trained(project, tmp_path / "run", *overrides, "run.eval_every=0")
    assert result.before and result.after
    assert result.before.accepted_length < 1.5 and result.after.accepted_length > 2.5
    assert result.after.held_out_loss < result.before.held_out_loss - 0.5


@pytest.mark.parametrize("layer_types", ['["full_attention", "full_attention"]', None], ids=["full", "mixed"])
def test_one_document_is_learnt_and_its_exported_files_draft_whole_blocks(
    project: Path, tmp_path: Path, layer_types: str | None
) -> None:
    ids = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:41].tolist()
    write_documents(tmp_path / "one", [(ids, [0] * 4 + [1] * 37)], vocab_size=VOCAB)
    schedule = tmp_path / "one.toml"
    text = project.read_text().replace(f'held_out = "{project.parent}/held_out"\n', "")
    if layer_types:
        text = text.replace('["sliding_attention", "full_attention"]', layer_types)
        text = text.replace("sliding_window = 16\n", "")
    schedule.write_text(text + '[[plugin]]\nuse = "plugins.muon"\n')
    overrides = (f"data.path={tmp_path}/one", "run.steps=120", "train.lr=2e-2", "data.max_anchors=40")
    result = trained(schedule, tmp_path / "run", *overrides)
    exported = tmp_path / "exported"
    exported.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(result.checkpoint / name, exported)
    served = assembled(schedule, *overrides, f"drafter.init={exported}")
    evaluation = evaluate_held_out(served, served.plan.train)
    assert evaluation.accepted_length >= 3.5 and evaluation.accuracy > 0.98  # of 4


def test_zeroed_taps_are_a_control_that_trains(project: Path, unbroken: Path, tmp_path: Path) -> None:
    trained(project, tmp_path / "control", "train.zero_taps=true")
    control, real = (
        [row["loss"] for row in rows(path) if "loss" in row] for path in (tmp_path / "control", unbroken)
    )
    assert control != real and all(loss > 0 for loss in control)
    weights = load_file(resolve_checkpoint(tmp_path / "control") / "training/state.safetensors")
    assert not weights["exp_avg.fc.weight"].any()


@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_bfloat16_follows_float32(project: Path, unbroken: Path, tmp_path: Path, objective: str) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        output = tmp_path / dtype
        trained(project, output, f"drafter.dtype={dtype}", f"train.objective={objective}", "run.eval_every=0")
        losses.append([row["loss"] for row in rows(output) if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] != losses[0]


def test_a_step_without_a_supervised_token_passes_and_is_counted(project: Path) -> None:
    loop = plain_loop(project)
    parts = loop.parts
    batch = parts.plan.train.micro_batch(0)
    empty = attrs.evolve(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    parts.plan.train.micro_batch = lambda index: attrs.evolve(empty, index=index)  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in parts.state().items()}
    row = train_step(loop, 0)
    assert row["skipped"] == 2 and row["anchors"] == 0 and row["lr"] > 0
    assert all(torch.equal(value, before[name]) for name, value in parts.state().items())


def test_losses_that_are_not_finite_skip_their_steps_and_three_in_a_row_end_the_run(project: Path) -> None:
    loop = plain_loop(project)
    weight = loop.parts.drafters[0].drafter.norm.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0] = float("nan")
    for step in range(2):
        row = train_step(loop, step)
        assert row["bad_steps"] == 1 and row["lr"] > 0
        first = 2 * step
        assert row["not_finite"].startswith(f"the loss of micro-batch {first} is not finite (nan)")
        assert all(str(one) in row["not_finite"] for one in loop.parts.plan.train.document_ids(first))
    with pytest.raises(NonFinite, match="step 3: the loss of micro-batch 4 .* in a row: 3") as found:
        train_step(loop, 2)
    assert found.value.exit_code == 4 and isinstance(found.value, BadStepsInARow)
    assert found.value.last_good == 0
    with torch.no_grad():
        weight.copy_(before)
    assert train_step(loop, 3)["bad_steps"] == 0 and loop.bad_steps.in_a_row == 0


def test_a_warm_start_begins_where_the_earlier_drafter_ended(project: Path, unbroken: Path) -> None:
    parts = assembled(project, f"drafter.init={resolve_checkpoint(unbroken)}")
    held_out = parts.plan.held_out
    assert held_out is not None
    expected = [row for row in rows(unbroken) if row["step"] == 6 and "held_out_loss" in row][0]
    assert evaluate_held_out(parts, held_out).row() == {
        key: expected[key] for key in ("held_out_loss", "accepted_length")
    }


def test_numbers_do_not_depend_on_what_was_computed_before(project: Path) -> None:
    fresh, used = plain_loop(project), plain_loop(project)
    parts = used.parts
    held_out = parts.plan.held_out
    assert held_out is not None
    parts.plan.train.micro_batch(9)
    evaluate_held_out(parts, held_out)
    torch.randn(7)
    first, second = train_step(fresh, 0), train_step(used, 0)
    assert {k: v for k, v in first.items() if k not in TIMED} == {
        k: v for k, v in second.items() if k not in TIMED
    }


def test_held_out_by_fraction_is_disjoint_by_answer(project: Path) -> None:
    plan = plan_run(load_schedule(project, ["data.held_out=0.25"]))
    assert plan.held_out is not None
    whole = len(open_documents(project.parent / "train"))
    counted = plan.train.statistics().documents + plan.held_out.statistics().documents
    assert counted == whole and 0 < plan.held_out.statistics().documents < whole / 2


def test_the_drafter_shares_embedding_and_head_with_the_target(project: Path) -> None:
    parts = assembled(project)
    for part in parts.drafters:
        names = [name for name, _ in part.drafter.named_parameters()]
        assert not any("embed" in name or "lm_head" in name for name in names)
        assert part.shared.embed_tokens.data_ptr() == parts.targets[0].embed_tokens.data_ptr()
        assert part.shared.lm_head.data_ptr() == parts.targets[0].lm_head.data_ptr()
