"""Rounding is told from a rollback that is slightly wrong by what rounding does to the target alone."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from decoding_targets import builtin_drafter, builtin_target, draft_from
from rich.console import Console
from test_evaluate_command import differing

from engine import evaluate, rounding_null
from engine.builtin.tokenizer import VOCABULARY
from engine.data.documents import Documents, open_documents
from engine.data.shards import write_documents
from engine.dflash import speculation
from engine.dflash.speculation import decode_alone
from engine.errors import DifferenceFound
from engine.evaluate import check_output, decode_documents
from engine.evaluation_report import DecodingFigures, EvaluationReport, print_report
from engine.plugin_host import load_plugins
from engine.rounding_null import RoundingNull, is_reduced, measure_null, other_number
from engine.served_pair import ServedPair
from engine.target import cached_forward, generation
from engine.target.cached_forward import TargetRows, Verification
from engine.target.generation import Difference
from engine.target.loading import Target

PROMPTS, TOKENS = 80, 32


def null(differing: int, moved: int, others: int, others_moved: int, sample: int = 64) -> RoundingNull:
    return RoundingNull(
        rows_together=(8,),
        differing=differing,
        differing_again=min(differing, sample),
        differing_moved=moved,
        others=others,
        others_again=min(differing, others, sample),
        others_moved=others_moved,
    )


def test_a_prompt_of_the_sample_counts_for_those_it_stands_for() -> None:
    assert null(20, 10, 180, 1).expected == 10 + 180 / 20
    assert null(128, 10, 72, 0).expected == 20  # 64 of 128 were decoded again
    assert null(200, 64, 0, 0).expected == 200


def test_what_is_allowed_is_twice_what_was_measured_and_its_spread_and_never_more_than_half() -> None:
    assert null(20, 10, 20, 0).allowed == 20  # half of the prompts
    assert null(20, 10, 180, 0).allowed == 20 + 24  # three deviations: 66 of variance
    assert null(20, 0, 180, 0).allowed == 7  # three of 6
    assert null(60, 60, 140, 60).allowed == 100
    assert null(1, 0, 2, 0).allowed == 2


def test_one_prompt_of_the_sample_that_stands_for_many_is_as_uncertain_as_they_are_many() -> None:
    # 2 + 9 expected; variance 2 · (1 + 11) + 4 · (1 + 2 + 9²)
    assert null(20, 2, 180, 1).allowed == 22 + 56
    # 64 of 128, each for two: 10 expected; 2 · (1 + 10) + 4 · (1 + 5 · 2²)
    assert null(128, 5, 72, 0).allowed == 20 + 30


def report_of(rounding: RoundingNull, ties: int) -> EvaluationReport:
    found = differing(ties, 200)
    assert found.decoding
    return attrs.evolve(found, decoding=attrs.evolve(found.decoding, rounding=rounding))


def test_the_command_judges_by_what_was_measured() -> None:
    check_output(report_of(null(30, 10, 170, 0), 30))
    with pytest.raises(DifferenceFound, match="for 30 of 200 prompts; a near tie explains each of them, but"):
        check_output(report_of(null(30, 2, 170, 0), 30))


def test_another_number_of_rows_is_never_more_but_for_one() -> None:
    assert [other_number(rows) for rows in (1, 2, 3, 8, 15, 16, 32, 200, 256)] == [
        2,
        1,
        1,
        4,
        7,
        2,
        4,
        25,
        32,
    ]
    assert all(other_number(rows) < rows for rows in range(2, 300))
    assert [is_reduced(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [
        True,
        True,
        False,
    ]


# --- the built-in target in bfloat16, at texts that it is not sure of --------------------------------------


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 400, (PROMPTS, 9), generator=generator).tolist()


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]]) -> Documents:
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder, [([*text, 5], [0] * len(text) + [1]) for text in texts], vocab_size=VOCABULARY)
    return open_documents(folder, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def own(texts: list[list[int]]) -> list[list[int]]:
    target = builtin_target(torch.bfloat16)
    return decode_alone(
        target, texts, max_new_tokens=TOKENS, stop=target.summary.eos_token_ids, rows_at_once=PROMPTS
    )


def decoded(
    monkeypatch: pytest.MonkeyPatch,
    documents: Documents,
    own: Sequence[Sequence[int]],
    max_new_tokens: int = TOKENS,
) -> DecodingFigures:
    draft_from(monkeypatch, own, 0.15, VOCABULARY)
    pair = ServedPair(
        checkpoint=Path("c"),
        schedule=None,
        host=load_plugins(),
        target=builtin_target(torch.bfloat16),
        drafter=builtin_drafter(torch.bfloat16),
    )
    return decode_documents(
        pair,
        documents,
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        seed=0,
        batch=PROMPTS,
        say=lambda line: None,
    )


def judged(decoding: DecodingFigures) -> EvaluationReport:
    return EvaluationReport(
        checkpoint=Path("c"),
        target=Path("t"),
        device="cpu",
        block_size=8,
        walk=None,
        decoding=decoding,
    )


def test_in_bfloat16_differences_by_rounding_pass(
    monkeypatch: pytest.MonkeyPatch, documents: Documents, own: list[list[int]]
) -> None:
    found = decoded(monkeypatch, documents, own)
    assert found.differences and found.rounding
    assert found.rounding.differing == found.rounding.differing_again == len(found.differences)
    assert found.rounding.differing_moved > 0
    check_output(judged(found))


def test_in_bfloat16_states_that_keep_a_tenth_of_what_was_rejected_are_found_out(
    monkeypatch: pytest.MonkeyPatch, documents: Documents, own: list[list[int]]
) -> None:
    def leaking(rows: TargetRows, verification: Verification, counts: Sequence[int]) -> None:
        cached_forward.commit(rows, verification, counts)
        partly = [row for row, count in enumerate(counts) if count < len(verification.blocks[row])]
        at = torch.tensor(partly, dtype=torch.int64)
        for layer, after in zip(rows.layers, verification.forward.layers, strict=True):
            for number, state in layer.states.get("recurrent_states", {}).items():
                state[at] = state[at].lerp(after.recurrent_states[number][at].to(state.dtype), 0.1)

    monkeypatch.setattr(speculation, "commit", leaking)
    found = decoded(monkeypatch, documents, own)
    with pytest.raises(DifferenceFound):
        check_output(judged(found))
    # By their number alone, too, had each of them been a near tie.
    ties = [attrs.evolve(difference, near_tie=True) for difference in found.differences]
    with pytest.raises(DifferenceFound, match="rounding leaves no more than"):
        check_output(judged(attrs.evolve(found, differences=tuple(ties))))


def test_prompts_that_differed_are_decoded_again_and_as_many_others(
    texts: list[list[int]], own: list[list[int]]
) -> None:
    target = builtin_target(torch.bfloat16)
    alone = dict(enumerate(own))
    alone[3] = [*own[3][:-1], own[3][-1] + 1]  # as if it had said something else before
    found = measure_null(
        target,
        texts,
        alone,
        {3, 7},
        max_new_tokens=TOKENS,
        stop=target.summary.eos_token_ids,
        groups=[range(PROMPTS)],
    )
    assert found
    assert (found.differing_again, found.others_again, found.others) == (2, 2, PROMPTS - 2)
    assert found.differing_moved >= 1


@pytest.mark.parametrize("differ", [{3}, {3, 7}, set(range(20)), {16}, set(range(17))])
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32])
def test_the_numbers_told_are_those_taken_and_no_prompt_has_the_one_it_had(
    monkeypatch: pytest.MonkeyPatch, texts: list[list[int]], batch: int, differ: set[int]
) -> None:
    target, count = builtin_target(torch.bfloat16), max(17, len(differ))
    prompts = texts[:count]
    groups = [range(start, min(start + batch, count)) for start in range(0, count, batch)]
    before = {tuple(prompts[number]): len(group) for group in groups for number in group}
    taken: list[list[tuple[int, ...]]] = []

    def noted(target: Target, texts: Sequence[Sequence[int]]) -> Any:
        taken.append([tuple(text) for text in texts])
        return cached_forward.prefill(target, texts)

    monkeypatch.setattr(generation, "prefill", noted)
    alone = {number: [-1] for number in range(count)}
    found = measure_null(target, prompts, alone, differ, max_new_tokens=1, stop=[], groups=groups)
    assert found and found.differing_moved == len(differ) and found.others_moved == found.others_again
    assert found.others_again == min(len(differ), count - len(differ))
    assert found.rows_together == tuple(sorted({len(together) for together in taken}))
    assert max(found.rows_together) <= max(2, max(map(len, groups)))
    numbers = {prompt: len(together) for together in taken for prompt in together}
    chosen = [*differ, *[number for number in range(count) if number not in differ][: len(differ)]]
    for number in chosen:
        prompt = tuple(prompts[number])
        assert numbers[prompt] != before[prompt]
    assert len(numbers) - len(chosen) in (0, 1)


def test_a_prompt_that_was_decoded_alone_is_decoded_beside_itself_where_there_is_no_other(
    texts: list[list[int]],
) -> None:
    target = builtin_target(torch.bfloat16)
    found = measure_null(target, texts[:1], {0: [-1]}, {0}, max_new_tokens=1, stop=[], groups=[[0]])
    assert found and (found.rows_together, found.differing_moved, found.others_again) == ((2,), 1, 0)


def test_where_memory_runs_out_the_figures_stay_and_the_gate_says_that_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, documents: Documents, own: list[list[int]]
) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def parted(target: Target, prompt: Any, ours: list[int], alone: Any) -> Difference:
        return Difference(0, ours[0], ours[0] + 1, (ours[0], ours[0] + 1), (1.0, 1.0), 0.1, near_tie=True)

    monkeypatch.setattr(evaluate, "explain_difference", parted)
    monkeypatch.setattr(rounding_null, "decode_alone", full)
    found = decoded(monkeypatch, documents, own, max_new_tokens=2)
    assert found.differences and not found.unexplained
    assert found.rounding is None and found.rounding_unknown and found.near_ties_allowed == 0
    assert found.acceptance.accepted_length >= 1 and found.alone_tokens
    screen = io.StringIO()
    print_report(judged(found), Console(file=screen, width=200))
    assert "memory ran out while the target decoded some again" in screen.getvalue()
    assert "taken for rounding" not in screen.getvalue()
    one = attrs.evolve(found, differences=found.differences[:1])
    for figures in (found, one):
        with pytest.raises(DifferenceFound, match="rounding could not be told from a fault"):
            check_output(judged(figures))

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(rounding_null, "decode_alone", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        decoded(monkeypatch, documents, own, max_new_tokens=2)
