"""One sample is learnt, exported, and decoded from the exported files alone.

The files are decoded by the independent reader, which shares no code with training, and by the engine's
own decoding. Each fault that is known to train well and serve badly is planted once, to see the measure
fall. Targets and drafters lie in `served_drafters`, made by `tools/train_served_drafters.py`.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.dflash.configuration import FULL, SLIDING
from engine.dflash.drafter import build_drafter
from engine.dflash.export import check_layout, fill_drafter, read_drafter_config, read_drafter_weights
from engine.dflash.speculation import decode_alone, speculate
from engine.errors import CheckpointError
from engine.independent_reader import decode, read_served
from engine.target.loading import Target
from tools.train_served_drafters import (
    ANSWER,
    BLOCK,
    DOCUMENTS,
    FAULTS,
    LAYERS,
    read_target,
    train,
    write_sample,
)

FOLDER = Path(__file__).parent / "served_drafters"
PAIRS = [(kind, layout) for kind in ("dense", "hybrid") for layout in LAYERS]
ENOUGH = BLOCK - 1


@cache
def target_of(kind: str) -> Target:
    return read_target(FOLDER / f"{kind}_target")


def sample_of(kind: str) -> tuple[list[list[int]], list[list[int]]]:
    sample = json.loads((FOLDER / f"{kind}_target" / "sample.json").read_text())
    return sample["prompts"], sample["answers"]


def decoded(folder: Path, kind: str, prompts: int = DOCUMENTS) -> list[list[int]]:
    """Tokens of each verification, prompt by prompt, decoded from files; the text is the target's own."""
    drafter, acceptances = read_served(folder), []
    for prompt, answer in list(zip(*sample_of(kind), strict=True))[:prompts]:
        tokens, acceptance = decode(drafter, target_of(kind).model, prompt, ANSWER)
        assert tokens == answer and sum(acceptance) == ANSWER - 1
        acceptances.append(acceptance)
    return acceptances


def accepted_length(folder: Path, kind: str, prompts: int = DOCUMENTS) -> float:
    """Mean tokens per verification, over the first few prompts."""
    verifications = sum(decoded(folder, kind, prompts), [])
    return sum(verifications) / len(verifications)


def changed(folder: Path, into: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of an exported folder whose `config.json` says something else."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    change(config)
    (into / "config.json").write_text(json.dumps(config))
    return into


@pytest.mark.parametrize("kind, layout", PAIRS)
def test_the_exported_files_of_a_learnt_sample_draft_whole_blocks(kind: str, layout: str) -> None:
    folder = FOLDER / f"{kind}_{layout}"
    check_layout(folder)
    assert set(read_drafter_config(folder).layer_types) == ({FULL} if layout == "full" else {FULL, SLIDING})
    assert accepted_length(folder, kind) >= ENOUGH


@pytest.mark.parametrize("kind, layout", PAIRS)
def test_decoding_with_caches_accepts_what_the_files_propose(kind: str, layout: str) -> None:
    folder = FOLDER / f"{kind}_{layout}"
    target, (prompts, answers) = target_of(kind), sample_of(kind)
    config = read_drafter_config(folder)
    drafter = build_drafter(config, target.device, torch.float32)
    fill_drafter(drafter, read_drafter_weights(folder, config), str(folder))
    assert decode_alone(target, prompts, max_new_tokens=ANSWER, stop=[]) == answers
    ours = speculate(target, drafter, prompts, max_new_tokens=ANSWER, stop=[])
    assert [one.tokens for one in ours] == answers
    assert [one.acceptance for one in ours] == decoded(folder, kind)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_training_serves_badly(fault: str) -> None:
    check_layout(FOLDER / fault)  # nothing in the folder shows it
    assert accepted_length(FOLDER / fault, "hybrid") < ENOUGH


@pytest.mark.parametrize("kind, layout", PAIRS)
def test_a_copied_partial_rotary_factor_serves_badly_and_is_refused(
    tmp_path: Path, kind: str, layout: str
) -> None:
    def copy_from_target(config: dict[str, Any]) -> None:
        config["rope_parameters"]["partial_rotary_factor"] = 0.5

    folder = changed(FOLDER / f"{kind}_{layout}", tmp_path / "copied", copy_from_target)
    assert accepted_length(folder, kind, prompts=2) < ENOUGH
    with pytest.raises(CheckpointError, match="partial_rotary_factor belongs to a target"):
        check_layout(folder)


@pytest.mark.parametrize("kind, layout", PAIRS)
@pytest.mark.parametrize("taps", [[1, 3, 5], [1, 2, 4], [0, 1, 4], [0, 3, 4], [0, 2, 3], [0, 2, 5]], ids=str)
def test_a_wrong_tap_index_serves_badly(tmp_path: Path, kind: str, layout: str, taps: list[int]) -> None:
    def move(config: dict[str, Any]) -> None:
        config["dflash_config"]["target_layer_ids"] = taps

    folder = changed(FOLDER / f"{kind}_{layout}", tmp_path / "wrong", move)
    assert accepted_length(folder, kind, prompts=4) < ENOUGH


@pytest.mark.parametrize("change", [{"is_causal": True}, {"is_causal": False}, {"sliding_window": 4}])
def test_another_causality_or_window_than_trained_serves_badly(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = changed(FOLDER / "dense_mixed", tmp_path / "wrong", lambda config: config.update(change))
    assert accepted_length(folder, "dense") < ENOUGH


def learnt(root: Path, kind: str, layout: str) -> Path:
    """The whole way: train in a run, export."""
    write_sample(root, *sample_of(kind))
    assert train(root, FOLDER / f"{kind}_target", layout, root / "exported") < 0.01
    return root / "exported"


def test_training_and_exporting_now_gives_what_the_kept_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.train_served_drafters.STEPS", 120)  # as many as it takes
    assert accepted_length(learnt(tmp_path, "dense", "mixed"), "dense") >= ENOUGH


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout", PAIRS)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_planted_while_training_is_found(
    tmp_path: Path, kind: str, layout: str, fault: str | None
) -> None:
    if fault is None:
        assert accepted_length(learnt(tmp_path, kind, layout), kind) >= ENOUGH
        return
    with FAULTS[fault]():
        folder = learnt(tmp_path, kind, layout)
    assert accepted_length(folder, kind) < ENOUGH
