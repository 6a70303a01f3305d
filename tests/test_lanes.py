"""Lanes compute what the plain loop computes: the exactness table on the CPU, and how runs fail."""

import io
import math
import random
import time
from pathlib import Path

import attrs
import orjson
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from small_runs import ONE_LANE_EACH, assembled, plain_loop, small_project

from engine.errors import NonFinite
from engine.lanes import open_run_lanes
from engine.plain import PlainTrainer, train_step
from engine.run import run
from engine.runtime.failure import StageFailure
from engine.schedule import load_schedule

STEPS = 3
TIMED = {"tokens_per_s"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


Result = tuple[list[dict], dict[str, torch.Tensor]]


def plainly(project: Path, *overrides: str) -> Result:
    loop = plain_loop(project, *overrides)
    rows = [train_step(loop, step) for step in range(STEPS)]
    return [{k: v for k, v in row.items() if k not in TIMED} for row in rows], loop.parts.masters


def on_lanes(project: Path, *overrides: str, seed: int | None = None) -> Result:
    """The same on lanes, every stage delayed at random where a seed is given."""
    parts = assembled(project, *overrides)
    lanes = open_run_lanes(parts)
    if seed is not None:
        draw = random.Random(seed)
        lanes.scheduler._delay = lambda stage, lane, number: draw.random() * 0.02
    rows: list[dict] = []
    lanes.scheduler.run(0, STEPS, lambda step, results: rows.append(results[0]))
    return rows, parts.masters


def lanes_of(targets: int, drafters: int, depth: int, micro_batches: int = 3) -> list[str]:
    names = [", ".join(['"cpu"'] * count) for count in (targets, drafters)]
    return [
        f"devices={{targets = [{names[0]}], drafters = [{names[1]}]}}",
        f"stage.transfer.depth={depth}",
        f"train.micro_batches={micro_batches}",
    ]


def exactly(one: Result, other: Result) -> None:
    assert repr(one[0]) == repr(other[0])  # as text, in which a slot never supervised (NaN) equals itself
    assert all(torch.equal(one[1][name], other[1][name]) for name in other[1])


def closely(one: Result, other: Result, tolerance: float = 1e-6) -> None:
    for row, expected in zip(one[0], other[0], strict=True):
        assert row["anchors"] == expected["anchors"] and row["tokens"] == expected["tokens"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=10 * tolerance)


@pytest.mark.parametrize("targets, depth", [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_one_drafter_equals_the_plain_loop_bit_for_bit(project: Path, targets: int, depth: int) -> None:
    settings = lanes_of(targets, 1, depth)
    exactly(on_lanes(project, *settings, seed=targets), plainly(project, "train.micro_batches=3"))


@pytest.mark.parametrize("targets, drafters, depth", [(1, 2, 2), (2, 2, 1), (3, 2, 3), (5, 3, 1), (2, 3, 2)])
def test_several_drafters_equal_the_plain_loop_closely(
    project: Path, targets: int, drafters: int, depth: int
) -> None:
    settings = lanes_of(targets, drafters, depth)
    closely(on_lanes(project, *settings, seed=depth), plainly(project, "train.micro_batches=3"))


def test_thread_timing_targets_depth_and_transfer_change_no_bit_of_several_drafters(project: Path) -> None:
    reference = on_lanes(project, *lanes_of(1, 2, 1))
    exactly(on_lanes(project, *lanes_of(1, 2, 1), seed=1), reference)
    exactly(on_lanes(project, *lanes_of(3, 2, 3), seed=2), reference)
    with_copies = project.with_name("copies.toml")
    with_copies.write_text(project.read_text() + '[[plugin]]\nuse = "plugins.async_copy"\n')
    exactly(on_lanes(with_copies, *lanes_of(2, 2, 2), seed=3), reference)


@pytest.mark.parametrize("layout", ["sequential", "pipelined", "colocated"])
def test_every_layout_computes_the_same(project: Path, layout: str) -> None:
    rows = on_lanes(project, f"layout={layout}", "train.micro_batches=2", seed=4)
    closely(rows, plainly(project, "train.micro_batches=2"))


@pytest.mark.parametrize("drafters", [1, 2])
def test_split_taps_equal_joined_ones(project: Path, drafters: int) -> None:
    split = project.with_name("split.toml")
    split.write_text(project.read_text() + '[[plugin]]\nuse = "plugins.split_fc"\n')
    closely(on_lanes(split, *lanes_of(2, drafters, 2), seed=5), plainly(project, "train.micro_batches=3"))


def test_masters_of_bfloat16_drafters_are_shared_out_and_agree(project: Path) -> None:
    settings = [*lanes_of(1, 3, 1), "drafter.dtype=bfloat16"]
    parts = assembled(project, *settings)
    lanes = open_run_lanes(parts)
    lanes.scheduler.run(0, STEPS, None)
    kept = [set(part.masters.weights) for part in parts.drafters]
    assert set.union(*kept) == set(parts.drafters[0].masters.parameters)
    assert sum(len(names) for names in kept) == len(set.union(*kept))
    for name, master in parts.masters.items():
        for part in parts.drafters:
            assert torch.equal(part.masters.parameters[name], master.bfloat16())


def test_gradients_in_bfloat16_and_layers_run_again_are_the_plain_loops_too(project: Path) -> None:
    narrow = ["drafter.dtype=bfloat16", "train.gradient_dtype=bfloat16", "train.checkpointing=true"]
    reference = plainly(project, "train.micro_batches=3", *narrow)
    exactly(on_lanes(project, *lanes_of(2, 1, 2), *narrow, seed=1), reference)
    # Fewer micro-batches are added up in bfloat16 where there are more drafters.
    closely(on_lanes(project, *lanes_of(2, 3, 1), *narrow, seed=2), reference, tolerance=1e-2)


def test_muon_goes_on_where_a_checkpoint_left_off(project: Path, tmp_path: Path) -> None:
    muon = tmp_path / "muon.toml"
    muon.write_text(project.read_text() + '[[plugin]]\nuse = "plugins.muon"\n')
    quiet = Console(file=io.StringIO())
    settings = [*lanes_of(2, 2, 1, micro_batches=2), "run.eval_every=0"]
    schedule = load_schedule(muon, settings)
    whole = run(schedule, output=tmp_path / "whole", console=quiet)
    run(schedule, steps=3, output=tmp_path / "broken", console=quiet)
    broken = run(schedule, output=tmp_path / "broken", resume=True, console=quiet)
    one, other = (Path(result.checkpoint) / "training/state.safetensors" for result in (whole, broken))
    assert one.read_bytes() == other.read_bytes()
    assert any(name.startswith("momentum_buffer.") for name in load_file(one))


def test_a_checkpoint_does_not_show_how_many_drafters_wrote_it(project: Path, tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO())
    states = []
    for drafters in (1, 2):
        schedule = load_schedule(project, [*lanes_of(1, drafters, 1, micro_batches=2), "run.eval_every=0"])
        result = run(schedule, steps=2, output=tmp_path / str(drafters), console=quiet)
        states.append(load_file(result.checkpoint / "training/state.safetensors"))
    assert {name: value.shape for name, value in states[0].items()} == {
        name: value.shape for name, value in states[1].items()
    }


@pytest.mark.parametrize("stage", ["target-forward", "pack", "transfer", "drafter-fwd-bwd", "optimizer"])
def test_a_failing_stage_ends_the_run_within_five_seconds_and_is_named(project: Path, stage: str) -> None:
    parts = assembled(project, *lanes_of(3, 2, 2))
    lanes = open_run_lanes(parts)
    original = lanes.scheduler._works[stage]

    def failing(lane: object, number: int, cargo: object) -> object:
        if number == (1 if stage == "optimizer" else 4):
            raise NonFinite("planted")
        return original(lane, number, cargo)  # type: ignore[arg-type]

    lanes.scheduler._works = {**lanes.scheduler._works, stage: failing}
    begin = time.perf_counter()
    with pytest.raises(StageFailure, match=rf"{stage}.*(target|drafter)\.\d@cpu.*planted") as found:
        lanes.scheduler.run(0, 20, None)
    assert time.perf_counter() - begin < 5
    assert found.value.exit_code == 4
    assert stage == "optimizer" or found.value.micro_batch == 4


@pytest.mark.parametrize("drafters", [1, 2])
@pytest.mark.parametrize("fault", ["tap", "loss", "gradient"])
def test_what_is_not_finite_is_named_and_skips_the_step_on_all_drafters_as_in_the_plain_loop(
    project: Path, monkeypatch: pytest.MonkeyPatch, fault: str, drafters: int
) -> None:
    bad = 4  # of micro-batches 3, 4 and 5 in step 2; with two drafters the second one's
    import engine.plain as plain

    original = plain.training_loss

    def spoilt(drafter, shared, packed, row, *, epoch, recipe):
        first = int(row.document_ids[0])
        if first != ids[0]:
            return original(drafter, shared, packed, row, epoch=epoch, recipe=recipe)
        if fault == "tap":
            packed[0][3, 40] = float("nan")  # of the second tap, whose channels are 32 to 63
        loss, anchors = original(drafter, shared, packed, row, epoch=epoch, recipe=recipe)
        if fault == "loss":
            loss = attrs.evolve(loss, loss_sum=loss.loss_sum * float("inf"))
        if fault == "gradient":
            weight = drafter.layers[1].mlp.up_proj.weight
            zero = (weight * 0).sum()
            zero.register_hook(lambda gradient: gradient * float("nan"))
            loss = attrs.evolve(loss, loss_sum=loss.loss_sum + zero)
        return loss, anchors

    ids: list[int] = assembled(project, ONE_LANE_EACH, "train.micro_batches=3").plan.train.document_ids(bad)
    monkeypatch.setattr(plain, "training_loss", spoilt)
    reference = plainly(project, "train.micro_batches=3")
    result = on_lanes(project, *lanes_of(2, drafters, 2), seed=drafters)
    said = {
        "tap": f"tap 1 (target layer 1) of micro-batch {bad} is not finite (nan)",
        "loss": f"the loss of micro-batch {bad} is not finite (inf)",
        "gradient": "gradient of layers.1.mlp.up_proj.weight is not finite (1,536 of 1,536 numbers)",
    }[fault]
    for rows, _ in (reference, result):
        assert [row["bad_steps"] for row in rows] == [0, 1, 0]
        assert rows[1]["not_finite"].startswith(said) and str(ids[0]) in rows[1]["not_finite"]
        assert rows[1]["lr"] > 0 and math.isnan(rows[1]["grad_norm"])
    if drafters == 1:
        exactly(result, reference)
    else:
        for name, weight in result[1].items():
            torch.testing.assert_close(weight, reference[1][name], rtol=1e-5, atol=1e-6)


def test_a_step_that_is_skipped_changes_no_weight_and_no_moment(project: Path) -> None:
    parts = assembled(project, *lanes_of(1, 2, 1), "train.max_bad_steps=9")
    lanes = open_run_lanes(parts)
    lanes.scheduler.run(0, 1, None)
    before = {name: value.clone() for name, value in parts.state().items()}
    handle = parts.drafters[1].drafter.layers[1].mlp.up_proj.weight.register_hook(lambda g: g * float("nan"))
    lanes.scheduler.run(1, 3, None)
    assert all(torch.equal(value, before[name]) for name, value in parts.state().items())
    handle.remove()
    lanes.scheduler.run(3, 4, None)
    assert not any(torch.equal(value, before[name]) for name, value in parts.state().items() if "avg" in name)
    replicas = [part.masters.parameters for part in parts.drafters]
    assert all(torch.equal(value, replicas[1][name]) for name, value in replicas[0].items())


def test_a_failed_stage_names_its_documents(project: Path) -> None:
    parts = assembled(project, *lanes_of(1, 1, 1))
    lanes = open_run_lanes(parts)

    def failing(lane: object, number: int, cargo: object) -> object:
        raise KeyError("planted")

    lanes.scheduler._works = {**lanes.scheduler._works, "drafter-fwd-bwd": failing}
    with pytest.raises(StageFailure, match="micro-batch 0") as found:
        lanes.train(0, 2, lambda row: None)
    ids = parts.plan.train.micro_batch(0).document_ids.tolist()
    assert str(found.value).endswith(f"'planted'\nits documents: {', '.join(map(str, ids))}")


def test_a_run_on_lanes_writes_the_losses_of_the_plain_loop(project: Path, tmp_path: Path) -> None:
    settings = [*lanes_of(2, 1, 2, micro_batches=2), "run.eval_every=0"]
    console = Console(file=io.StringIO())
    schedule = load_schedule(project, settings)
    plain = run(schedule, steps=STEPS, output=tmp_path / "plain", plain=True, console=console)
    result = run(schedule, steps=STEPS, output=tmp_path / "run", console=console)
    weights = [load_file(one.checkpoint / "model.safetensors") for one in (plain, result)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    rows = [orjson.loads(line) for line in (result.folder.path / "metrics.jsonl").read_bytes().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == [row["loss"] for row in plainly(project, "train.micro_batches=2")[0]]


@pytest.mark.parametrize("backend, alone", [("flex", True), ("dense", False)])
def test_a_lanes_first_row_of_a_length_runs_alone_where_attention_compiles(
    project: Path, monkeypatch: pytest.MonkeyPatch, backend: str, alone: bool
) -> None:
    parts = assembled(project, *lanes_of(2, 2, 1, micro_batches=2))
    parts = attrs.evolve(
        parts, plan=attrs.evolve(parts.plan, recipe=attrs.evolve(parts.recipe, backend=backend))
    )
    inside: list[str] = []
    overlaps: list[bool] = []

    def compiling(parts, part, batch, row, packed) -> None:  # instead of forward and backward
        inside.append(batch)
        time.sleep(0.2)
        overlaps.append(len(inside) > 1)
        inside.remove(batch)

    monkeypatch.setattr("engine.stages.drafter_fwd_bwd.forward_backward", compiling)
    lanes = open_run_lanes(parts)
    lanes.scheduler.run(0, 1, None)
    assert any(overlaps) != alone
    overlaps.clear()
    lanes.scheduler.run(1, 4, None)
    assert any(overlaps), "later rows of a length run side by side"


@pytest.mark.parametrize("plain", [False, True])
def test_an_end_that_is_asked_for_before_the_first_step_lets_one_be_done(project: Path, plain: bool) -> None:
    parts = assembled(project, ONE_LANE_EACH)
    trainer = PlainTrainer(parts) if plain else open_run_lanes(parts)
    trainer.request_stop()
    rows: list[dict] = []
    assert trainer.train(0, 3, rows.append) == 1 and len(rows) == 1
    assert trainer.train(1, 3, rows.append) == 3 and len(rows) == 3  # asked once, heeded once
