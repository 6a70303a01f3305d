"""Target agreement: measured where the target is whole, told where it is not, and warned of when low."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import ONE_LANE_EACH, VOCAB, small_project, write_config, write_random

from engine.builtin import HELD_OUT, TINY_HYBRID, resolve
from engine.data.batches import BatchPlan
from engine.data.documents import open_documents
from engine.data.shards import write_documents
from engine.errors import EngineError, NonFinite
from engine.planning import plan_run
from engine.run import run
from engine.schedule import load_schedule
from engine.target.loading import Target, load_target
from engine.target_agreement import measure_agreement, report_agreement, rows_agreement
from engine.training_parts import load_parts

CPU = torch.device("cpu")


def small_target(folder: Path, **options: Any) -> Target:
    settings = {"keep_head": True} | options
    return load_target(
        write_config(folder),
        target_layer_ids=[0, 1, 2],
        dtype=torch.float32,
        device=CPU,
        init="random",
        **settings,
    )


def batches(folder: Path) -> BatchPlan:
    return BatchPlan(open_documents(folder), token_budget=256, max_length=96, length_bucket=32, seed=1)


def test_the_counts_are_those_of_the_whole_logits(tmp_path: Path) -> None:
    target = small_target(tmp_path / "target")
    ids = torch.randint(0, VOCAB, (4, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ids[:, 25:] = target.logits(ids).argmax(-1)[:, 24:-1]  # some of them become right
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[0, 20:40], mask[1, :30], mask[3, 49] = True, True, True
    found = rows_agreement(target, ids, mask)
    said = target.logits(ids).argmax(-1)[:, :-1]
    assert found.agreed == int(((said == ids[:, 1:]) & mask[:, 1:]).sum())
    assert found.supervised == 20 + 29 + 1 and 0 < found.agreed < found.supervised


def test_logits_are_never_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target(tmp_path / "target")
    monkeypatch.setattr("engine.target.own_tokens.PLACES_AT_ONCE", 7)
    rows: list[int] = []
    target.model.get_output_embeddings().register_forward_hook(
        lambda module, given, logits: rows.append(logits.shape[0])
    )
    ids = torch.zeros(2, 20, dtype=torch.int64)
    assert rows_agreement(target, ids, torch.ones_like(ids, dtype=torch.bool)).supervised == 38
    assert rows == [7, 7, 7, 7, 7, 3]


def test_what_the_target_wrote_agrees_and_what_it_did_not_write_does_not(tmp_path: Path) -> None:
    target = load_target(
        resolve(TINY_HYBRID), target_layer_ids=[0], dtype=torch.float32, device=CPU, keep_head=True
    )
    own = BatchPlan(
        open_documents(resolve(HELD_OUT)), token_budget=1024, max_length=320, length_bucket=64, seed=1
    )
    found = measure_agreement(target, own, tokens=1500)
    assert found.share > 0.999 and found.supervised > 500
    write_random(tmp_path / "random", seed=4)
    assert measure_agreement(target, batches(tmp_path / "random"), tokens=500).share < 0.05


def test_as_many_micro_batches_are_read_as_the_tokens_ask_for(tmp_path: Path) -> None:
    target = small_target(tmp_path / "target")
    plan = batches(write_random(tmp_path / "data", seed=1))
    few, all_of_it = measure_agreement(target, plan, tokens=1), measure_agreement(target, plan, tokens=10**9)
    assert few.documents == len(plan.micro_batch(0).lengths)
    assert all_of_it.documents == 40


def test_a_cut_target_and_nan_logits_are_refused(tmp_path: Path) -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    cut = small_target(tmp_path / "target", keep_head=False)
    with pytest.raises(EngineError, match="keep_head"):
        rows_agreement(cut, ids, torch.ones_like(ids, dtype=torch.bool))
    broken = small_target(tmp_path / "target")
    with torch.no_grad():
        broken.lm_head[5] = float("nan")
    with pytest.raises(NonFinite, match="NaN"):
        rows_agreement(broken, ids, torch.ones_like(ids, dtype=torch.bool))


def test_a_run_measures_records_and_warns(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    screen = io.StringIO()
    schedule = load_schedule(project, ["run.steps=1", "run.eval_every=1", ONE_LANE_EACH])
    result = run(schedule, output=tmp_path / "run", console=Console(file=screen, width=200))
    printed = screen.getvalue()
    kept = json.loads((result.folder.path / "environment.json").read_text())["target_agreement"]
    assert kept["measured"] and kept["documents"] == "held out"
    assert kept["share"] == kept["agreed"] / kept["supervised"] < 0.6
    assert f"target agreement {kept['share']:.3f}" in printed
    assert "warning" in printed and "prepare --answers target" in " ".join(printed.split())


def told(project: Path, weights: str, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    parts = load_parts(
        plan_run(load_schedule(project, [ONE_LANE_EACH, "run.eval_every=0", *overrides])), lambda line: None
    )
    lines: list[str] = []
    return report_agreement(parts, weights, lines.append), lines


def with_author(folder: Path, **answers: object) -> str:
    rows = [([1, 2, 3, 4 + number], [0, 0, 1, 1]) for number in range(40)]
    write_documents(folder, rows, vocab_size=VOCAB, source={"answers": answers}, overwrite=True)
    return f"data.path={folder}"


def test_a_cut_target_tells_what_the_manifest_says(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    facts, lines = told(project, "abc")
    assert (facts["measured"], facts["share"], len(lines)) == (False, None, 1)
    assert "not measured" in lines[0] and "does not say" in lines[0]

    training = ["data.held_out=0.25"]
    data = with_author(tmp_path / "own", weights="abc", target="this", agreement=0.91)
    facts, lines = told(project, "abc", data, *training)
    assert facts["share"] == 0.91 and "this target wrote" in lines[0] and "0.910" in lines[0]
    assert len(lines) == 1

    data = with_author(tmp_path / "own", weights="abc", target="this", agreement=0.42)
    _, lines = told(project, "abc", data, *training)
    assert len(lines) == 2 and lines[1].startswith("warning: 42%")

    data = with_author(tmp_path / "own", weights="xyz", target="that-7b", agreement=0.91)
    facts, lines = told(project, "abc", data, *training)
    assert facts["share"] is None and "another target wrote the answers: that-7b" in lines[0]


@pytest.mark.gpu
def test_on_a_gpu_the_builtin_conversations_agree_with_their_target() -> None:
    target = load_target(
        resolve(TINY_HYBRID),
        target_layer_ids=[0],
        dtype=torch.bfloat16,
        device=torch.device("cuda:0"),
        keep_head=True,
    )
    own = BatchPlan(
        open_documents(resolve(HELD_OUT)), token_budget=8192, max_length=320, length_bucket=64, seed=1
    )
    assert measure_agreement(target, own).share > 0.97
