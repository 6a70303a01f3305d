"""Rounding is told from a rollback that is slightly wrong by what rounding does to the target alone."""

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import torch
from decoding_targets import builtin_drafter, builtin_target, draft_from
from test_evaluate_command import differing

from engine.builtin.tokenizer import VOCABULARY
from engine.data.documents import Documents, open_documents
from engine.data.shards import write_documents
from engine.dflash import speculation
from engine.dflash.speculation import decode_alone
from engine.errors import DifferenceFound
from engine.evaluate import check_output, decode_documents
from engine.evaluation_report import DecodingFigures, EvaluationReport
from engine.plugin_host import load_plugins
from engine.rounding_null import RoundingNull, is_reduced, measure_null, other_number
from engine.served_pair import ServedPair
from engine.target import cached_forward
from engine.target.cached_forward import TargetRows, Verification

PROMPTS, TOKENS = 40, 32


def null(differing: int, moved: int, others: int, others_moved: int, sample: int = 64) -> RoundingNull:
    return RoundingNull(
        rows_together=8,
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


def report_of(rounding: RoundingNull, ties: int) -> EvaluationReport:
    found = differing(ties, 200)
    assert found.decoding
    return attrs.evolve(found, decoding=attrs.evolve(found.decoding, rounding=rounding))


def test_the_command_judges_by_what_was_measured() -> None:
    check_output(report_of(null(30, 10, 170, 0), 30))
    with pytest.raises(DifferenceFound, match="for 30 of 200 prompts; a near tie explains each of them, but"):
        check_output(report_of(null(30, 2, 170, 0), 30))


def test_another_number_of_rows_is_fewer_where_there_are_many() -> None:
    assert [other_number(rows) for rows in (1, 8, 16, 32, 200, 256)] == [32, 32, 8, 8, 25, 32]
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
    monkeypatch: pytest.MonkeyPatch, documents: Documents, own: Sequence[Sequence[int]]
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
        max_new_tokens=TOKENS,
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
        rows_together=PROMPTS,
    )
    assert (found.differing_again, found.others_again, found.others) == (2, 2, PROMPTS - 2)
    assert found.differing_moved >= 1
