"""`evaluate`: two measures that check each other, and what they refuse."""

import io
import math
import shutil
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from rich.console import Console
from served_runs import served_run
from small_runs import PAD
from test_commands import engine

from engine.dflash.decoding import walk
from engine.dflash.speculation import Decoded, speculate
from engine.errors import CheckpointError, DifferenceFound, DiskError, InputError
from engine.evaluate import FLEX_ABOVE, check_output, decode_documents, evaluate_checkpoint, takes_flex
from engine.evaluation_report import (
    Acceptance,
    DecodingFigures,
    EvaluationReport,
    PromptDifference,
    print_report,
    write_files,
)
from engine.planning import plan_run
from engine.run import run
from engine.run_folder import resolve_checkpoint
from engine.schedule import load_schedule
from engine.served_pair import held_out_documents, load_pair
from tools.quality_curve import draw, evaluations, markdown

TOKENS = 24  # what the answers of the documents were cut at


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def report(trained: Path) -> EvaluationReport:
    return evaluate_checkpoint(trained, device="cpu", max_new_tokens=TOKENS)


def exported(trained: Path, folder: Path) -> Path:
    """The servable files alone."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(resolve_checkpoint(trained) / name, folder)
    return folder


def test_walk_and_decoding_commit_the_same_where_the_text_is_the_targets(report: EvaluationReport) -> None:
    assert report.walk and report.decoding
    assert report.walk.target_agreement == 1.0
    assert report.walk.acceptance == report.decoding.acceptance
    assert report.decoding.acceptance.accepted_length > 1.3  # or there was nothing to agree on
    assert report.decoding.identical == report.decoding.prompts == 12 and not report.decoding.differences


def test_the_figures_of_the_run_are_those_of_its_checkpoint(trained: Path, report: EvaluationReport) -> None:
    last = [row for row in evaluations(trained) if row["step"] == 30][0]
    assert report.walk
    assert report.walk.acceptance.accepted_length == pytest.approx(last["accepted_length"])
    assert report.walk.loss == pytest.approx(last["held_out_loss"], rel=1e-4)


def test_every_token_is_counted_once(report: EvaluationReport) -> None:
    assert report.decoding
    found = report.decoding.acceptance
    committed = sum(tokens * count for tokens, count in enumerate(found.histogram, 1))
    assert committed == report.decoding.tokens - report.decoding.prompts  # the prefills' tokens
    assert sum(found.histogram) == found.verifications
    assert found.accepted_length == pytest.approx(committed / found.verifications)


def test_slots_count_as_accepted_where_an_answers_end_cuts_the_targets_own_token_off() -> None:
    assert walk({4: 3, 8: 2}, 4, 10) == [4, 2]
    found = Acceptance.of([4, 2], [3, 2], block_size=4)
    assert found.histogram == (0, 1, 0, 1) and found.accepted_by_slot == (1.0, 1.0, 0.5)
    assert math.isnan(Acceptance.of([], [], block_size=4).accepted_length)


def test_long_documents_take_flex_on_a_gpu_unless_the_schedule_says_dense() -> None:
    assert takes_flex("auto", FLEX_ABOVE + 1) and not takes_flex("auto", FLEX_ABOVE)
    assert takes_flex("flex", 10) and not takes_flex("dense", 10 * FLEX_ABOVE)


@pytest.mark.gpu
def test_on_a_gpu_the_walk_through_flex_is_that_through_dense_attention(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = evaluate_checkpoint(trained, device="cuda:0", decodes=False).walk
    monkeypatch.setattr("engine.evaluate.FLEX_ABOVE", 1)
    flex = evaluate_checkpoint(trained, device="cuda:0", decodes=False).walk
    assert dense and flex and flex.loss == pytest.approx(dense.loss, rel=1e-2)
    assert flex.acceptance.accepted_length == pytest.approx(dense.acceptance.accepted_length, rel=0.03)


def test_the_held_out_documents_are_those_that_the_run_evaluates(trained: Path) -> None:
    pair = load_pair(trained, device="cpu")
    plan = plan_run(load_schedule(trained / "schedule.toml", ["data.max_eval_documents=5"])).held_out
    assert plan is not None
    used = [number for index in range(plan.per_epoch) for number in plan.document_ids(index)]
    assert sorted(held_out_documents(pair, None, 5).content_ids.tolist()) == sorted(used)


def test_the_command_prints_writes_and_draws(capsys, monkeypatch, trained: Path, tmp_path: Path) -> None:
    code, output = engine(
        capsys, monkeypatch, "evaluate", trained, "--device", "cpu", "--prompts", 6,
        "--max-new-tokens", TOKENS, "--json", tmp_path / "f.json", "--png", tmp_path / "f.png",
    )  # fmt: skip
    assert code == 0, output
    for words in ("accepted length", "4 committed", "slot 3 accepted", "6 of 6 outputs", "tokens/s"):
        assert words in output
    found = orjson.loads((tmp_path / "f.json").read_bytes())
    assert found["decoding"]["identical"] == 6 and found["walk"]["target_agreement"] == 1.0
    assert found["decoding"]["tokens_per_s"] > 0 and len(found["walk"]["acceptance"]["histogram"]) == 4
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_output_that_is_not_the_targets_own_ends_with_7_and_is_explained(
    capsys, monkeypatch, trained: Path, tmp_path: Path
) -> None:
    def slipped(*arguments: Any, **options: Any) -> list[Decoded]:
        decoded = speculate(*arguments, **options)
        decoded[1].tokens[5] = (decoded[1].tokens[5] + 1) % PAD
        return decoded

    monkeypatch.setattr("engine.evaluate.speculate", slipped)
    code, output = engine(
        capsys, monkeypatch, "evaluate", trained, "--device", "cpu", "--no-walk",
        "--max-new-tokens", TOKENS, "--json", tmp_path / "f.json",
    )  # fmt: skip
    assert code == 7, output
    assert "for 1 of 12 prompts" in output and "token 5 is" in output and "apart: not a tie" in output
    assert orjson.loads((tmp_path / "f.json").read_bytes())["decoding"]["identical"] == 11


def differing(ties: int, prompts: int, *, tokens: int = 20, unexplained: int = 0) -> EvaluationReport:
    found = [
        PromptDifference(prompt=place, words="token 3 is 1 and not 2", near_tie=place >= unexplained)
        for place in range(ties)
    ]
    decoding = DecodingFigures(
        acceptance=Acceptance.of([2], [1], 4),
        prompts=prompts,
        batch=8,
        temperature=0.0,
        tokens=prompts * tokens,
        seconds=1.0,
        alone_tokens=prompts * tokens,
        alone_seconds=1.0,
        ended=0,
        identical=prompts - ties,
        differences=tuple(found),
    )
    return EvaluationReport(
        checkpoint=Path("c"), target=Path("t"), device="cpu", block_size=4, walk=None, decoding=decoding
    )


def test_near_ties_are_told_and_too_many_of_them_are_no_rounding() -> None:
    screen = io.StringIO()
    print_report(differing(4, 200), Console(file=screen, width=150))
    assert "4 of 200 outputs (2.0%) differ by near ties; up to 40 are taken for rounding" in screen.getvalue()
    check_output(differing(40, 200))
    with pytest.raises(DifferenceFound, match="for 41 of 200 prompts; a near tie explains each of them, but"):
        check_output(differing(41, 200, tokens=256))
    check_output(differing(2, 3))  # of so few a share says nothing
    with pytest.raises(DifferenceFound, match="for 3 of 3 prompts"):
        check_output(differing(3, 3))
    with pytest.raises(DifferenceFound, match="for 1 of 200 prompts, and no near tie"):
        check_output(differing(9, 200, unexplained=1))


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    capsys, monkeypatch, trained: Path, tmp_path: Path
) -> None:
    def measured(*arguments: Any, **options: Any) -> EvaluationReport:
        raise AssertionError("measured")

    monkeypatch.setattr("engine.evaluate.evaluate_checkpoint", measured)
    for flag in ("--json", "--png"):
        code, output = engine(capsys, monkeypatch, "evaluate", trained, flag, tmp_path / "none" / "f")
        assert code == 2 and flag in output and "there is no folder" in output, output
        code, output = engine(capsys, monkeypatch, "evaluate", trained, flag, tmp_path)
        assert code == 2 and "is a folder" in output, output


def test_figures_and_chart_are_written_independently_of_each_other(tmp_path: Path) -> None:
    report, gone = differing(0, 4), tmp_path / "gone"
    for json, png in ((gone / "f.json", tmp_path / "f.png"), (tmp_path / "f.json", gone / "f.png")):
        with pytest.raises(DiskError, match="gone"):
            write_files(report, json, png)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert orjson.loads((tmp_path / "f.json").read_bytes())["decoding"]["prompts"] == 4


def test_sampling_compares_nothing_and_repeats_whatever_the_batch(trained: Path) -> None:
    pair = load_pair(trained, device="cpu")
    documents = held_out_documents(pair, None, 6)

    def sampled(batch: int, seed: int):
        return decode_documents(
            pair, documents, max_new_tokens=12, temperature=0.8, seed=seed, batch=batch, say=lambda line: None
        )

    one, other = sampled(batch=6, seed=1), sampled(batch=4, seed=1)
    assert one.identical is None and not one.differences
    screen = io.StringIO()
    print_report(attrs.evolve(differing(0, 6), decoding=one), Console(file=screen, width=150))
    assert (
        "at temperature 0.8" in screen.getvalue() and "sampled outputs are not compared" in screen.getvalue()
    )
    assert one.acceptance == other.acceptance and one.tokens == other.tokens
    assert one.acceptance != sampled(batch=6, seed=2).acceptance


def test_an_exported_folder_is_evaluated_with_its_target_named(
    capsys, monkeypatch, trained: Path, report: EvaluationReport, tmp_path: Path
) -> None:
    folder = exported(trained, tmp_path / "exported")
    code, output = engine(capsys, monkeypatch, "evaluate", folder, "--device", "cpu")
    assert code == 2 and "--target" in output
    root = trained.parent
    code, output = engine(
        capsys, monkeypatch, "evaluate", folder, "--device", "cpu", "--target", root / "target"
    )
    assert code == 2 and "--data" in output
    found = evaluate_checkpoint(
        folder,
        target=str(root / "target"),
        data=str(root / "held_out"),
        device="cpu",
        decodes=False,
    )
    assert found.walk and report.walk and found.decoding is None
    assert found.walk.acceptance == report.walk.acceptance


def test_another_target_is_refused_unless_it_is_asked_for(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(trained.parent / "target", target)
    content = bytearray((target / "model.safetensors").read_bytes())
    content[-2] ^= 0x10
    (target / "model.safetensors").write_bytes(content)
    moved = tmp_path / "moved"
    shutil.copytree(resolve_checkpoint(trained), moved)
    cursor = orjson.loads((moved / "training/cursor.json").read_bytes())
    cursor["schedule"] = cursor["schedule"].replace(str(trained.parent / "target"), str(target))
    (moved / "training/cursor.json").write_bytes(orjson.dumps(cursor))
    with pytest.raises(CheckpointError, match="other weights.*--target"):
        load_pair(moved, device="cpu")
    lines: list[str] = []
    load_pair(moved, target=str(target), device="cpu", say=lines.append)
    assert any("other weights" in line for line in lines)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--no-walk", "--no-decoding"], ["--no-walk", "nothing to evaluate"]),
        (["--device", "cuda:99"], ["cuda:99", "no such device"]),
        (["--max-new-tokens", "511"], ["--max-new-tokens 511", "512 positions"]),
        (["--data", "nowhere"], ["nowhere"]),
        (["--target", "nowhere"], ["nowhere", "--target"]),
        (["--trust-remote-code"], ["--trust-remote-code", "--target FOLDER"]),
        (["--target", "builtin:tiny-hybrid"], ["hidden_size 32", "192"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_evaluated_ends_with_2(
    capsys, monkeypatch, trained: Path, options: list[str], words: list[str]
) -> None:
    code, output = engine(capsys, monkeypatch, "evaluate", trained, "--no-walk", *options)
    assert code == 2 and all(word in output for word in words), output
    assert "Traceback" not in output


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    "command", [("evaluate",), ("generate", "--prompt", "w1")], ids=lambda words: words[0]
)
def test_code_in_a_targets_folder_runs_only_where_it_is_trusted(
    capsys, monkeypatch, trained: Path, command: tuple[str, ...], trust: bool
) -> None:
    def load(folder: Path, *, trust_remote_code: bool, **settings: object) -> None:
        raise InputError(f"code trusted: {trust_remote_code}")

    monkeypatch.setattr("plugins.huggingface_target.load_huggingface_target", load)
    flags = ["--target", trained.parent / "target", "--device", "cpu", *["--trust-remote-code"] * trust]
    code, output = engine(capsys, monkeypatch, command[0], trained, *command[1:], *flags)
    assert code == 2 and f"code trusted: {trust}" in output, output


def test_a_control_without_taps_is_walked_and_not_decoded(trained: Path, tmp_path: Path) -> None:
    schedule = load_schedule(
        trained / "schedule.toml", ["train.zero_taps=true", "run.steps=2", "run.eval_every=2"]
    )
    screen = io.StringIO()
    run(schedule, output=tmp_path / "control", console=Console(file=screen, width=100))
    assert "no decoded sample: this drafter was trained without" in screen.getvalue()
    with pytest.raises(InputError, match="zero_taps.*--no-decoding"):
        evaluate_checkpoint(tmp_path / "control", device="cpu")
    found = evaluate_checkpoint(tmp_path / "control", device="cpu", decodes=False).walk
    last = evaluations(tmp_path / "control")[-1]
    assert found and found.loss == pytest.approx(last["held_out_loss"], rel=1e-4)


def test_a_report_of_one_measure_shows_that_one(report: EvaluationReport) -> None:
    screen = io.StringIO()
    print_report(attrs.evolve(report, walk=None), Console(file=screen, width=100))
    assert "decoding" in screen.getvalue() and "walk" not in screen.getvalue()


def test_the_quality_table_has_a_row_per_evaluation(
    trained: Path, report: EvaluationReport, tmp_path: Path
) -> None:
    rows = evaluations(trained)
    assert [row["step"] for row in rows] == [0, 30]
    text = markdown(rows, orjson.loads(orjson.dumps(report.to_dict(), default=str)))
    assert f"| 30 | {rows[1]['loss']:.3f} | {rows[1]['held_out_loss']:.3f} |" in text
    assert "| 0 | – |" in text and "Decoding 12 held-out prompts" in text
    draw(trained, rows, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_on_a_gpu_walk_and_decoding_agree_and_differences_are_near_ties(trained: Path) -> None:
    found = evaluate_checkpoint(trained, device="cuda:0", max_new_tokens=TOKENS)
    assert found.walk and found.decoding
    assert found.decoding.unexplained == []
    assert found.decoding.acceptance.accepted_length == pytest.approx(
        found.walk.acceptance.accepted_length, rel=0.03
    )
