"""Micro-batches: every document once per epoch, under the budget, in an order that is a function."""

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from engine.data.batches import PAD_ID, BatchPlan, MicroBatch
from engine.data.documents import Documents, open_documents, write_documents
from engine.errors import DataError

Rows = list[tuple[list[int], list[int]]]


def rows_of(lengths: list[int]) -> Rows:
    """Distinct documents of these lengths, everything but the first token supervised."""
    generator = np.random.default_rng(0)
    return [
        ([1, *generator.integers(1, 30_000, length - 1).tolist()], [0] + [1] * (length - 1))
        for length in lengths
    ]


def documents_of(folder: Path, rows: Rows) -> Documents:
    write_documents(folder, rows, rows_per_shard=50)
    return open_documents(folder)


def plan_of(documents: Documents, seed: int = 3, max_length: int = 100, budget: int = 128) -> BatchPlan:
    return BatchPlan(documents, token_budget=budget, max_length=max_length, length_bucket=8, seed=seed)


def ids_of(plan: BatchPlan, first: int, last: int) -> list[list[int]]:
    return [plan.micro_batch(index).document_ids.tolist() for index in range(first, last)]


def same(one: MicroBatch, other: MicroBatch) -> bool:
    names = ("document_ids", "lengths", "input_ids", "loss_mask")
    return (one.index, one.epoch) == (other.index, other.epoch) and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in names
    )


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(2, 120), min_size=1, max_size=60), seed=st.integers(0, 2**40))
def test_every_document_appears_exactly_once_per_epoch_under_the_budget(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    rows = rows_of(lengths)
    documents = documents_of(tmp_path_factory.mktemp("batches") / "out", rows)
    plan = plan_of(documents, seed=seed)
    buckets = Counter(-(-min(length, 100) // 8) * 8 for length in lengths)
    assert plan.per_epoch == sum(-(-count // (128 // padded)) for padded, count in buckets.items())
    content = dict(zip(documents.content_ids.tolist(), rows, strict=False))
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for index in range(epoch * plan.per_epoch, (epoch + 1) * plan.per_epoch):
            batch = plan.micro_batch(index)
            count, length = batch.input_ids.shape
            assert (batch.index, batch.epoch) == (index, epoch)
            assert count * length <= 128 and length % 8 == 0
            assert batch.loss_mask.shape == batch.input_ids.shape and batch.loss_mask.dtype == torch.bool
            assert batch.tokens + batch.padding == count * length
            seen.update(batch.document_ids.tolist())
            for row in range(count):
                ids, mask = content[int(batch.document_ids[row])]
                end = int(batch.lengths[row])
                assert end == min(len(ids), 100) and length - 8 < end <= length
                assert batch.input_ids[row, :end].tolist() == ids[:end]
                assert batch.loss_mask[row, :end].tolist() == [bool(entry) for entry in mask[:end]]
                assert (batch.input_ids[row, end:] == PAD_ID).all() and not batch.loss_mask[row, end:].any()
        assert seen == Counter(documents.content_ids.tolist())


def test_any_micro_batch_can_be_asked_for_at_any_time(tmp_path: Path) -> None:
    documents = documents_of(tmp_path / "out", rows_of(list(range(2, 90))))
    plan = plan_of(documents)
    forward = [plan.micro_batch(index) for index in range(3 * plan.per_epoch)]
    for index in reversed(range(3 * plan.per_epoch)):
        assert same(plan.micro_batch(index), forward[index])
    resumed = plan_of(open_documents(tmp_path / "out"))
    assert same(resumed.micro_batch(2 * plan.per_epoch + 1), forward[2 * plan.per_epoch + 1])


def test_the_order_changes_with_the_epoch_and_the_seed_and_with_nothing_else(tmp_path: Path) -> None:
    rows = rows_of([20 + place % 40 for place in range(200)])
    plan = plan_of(documents_of(tmp_path / "out", rows))
    n = plan.per_epoch
    first, second = ids_of(plan, 0, n), ids_of(plan, n, 2 * n)
    assert first != second
    assert {tuple(sorted(batch)) for batch in first} != {tuple(sorted(batch)) for batch in second}
    assert ids_of(plan_of(open_documents(tmp_path / "out"), seed=4), 0, n) != first
    shuffled = [rows[place] for place in np.random.default_rng(1).permutation(len(rows))]
    assert ids_of(plan_of(documents_of(tmp_path / "shuffled", shuffled)), 0, 2 * n) == first + second


def test_batches_of_all_buckets_are_mixed(tmp_path: Path) -> None:
    plan = plan_of(documents_of(tmp_path / "out", rows_of([16] * 200 + [64] * 50)))
    lengths = [plan.micro_batch(index).input_ids.shape[1] for index in range(plan.per_epoch)]
    changes = sum(one != other for one, other in zip(lengths, lengths[1:], strict=False))
    assert changes > 10


def test_duplicate_documents_leave_the_order_a_function_of_content(tmp_path: Path) -> None:
    rows = rows_of([30] * 12) * 3 + rows_of([70] * 5) * 2
    plan = plan_of(documents_of(tmp_path / "out", rows))
    other = plan_of(documents_of(tmp_path / "reversed", rows[::-1]))
    for index in range(2 * plan.per_epoch):
        assert same(plan.micro_batch(index), other.micro_batch(index))
    seen = Counter(sum(ids_of(plan, 0, plan.per_epoch), []))
    assert sorted(seen.values()) == [2] * 5 + [3] * 12


def test_a_long_document_is_cut_at_the_end_and_counted(tmp_path: Path) -> None:
    (giant,) = rows_of([5000])
    plan = plan_of(documents_of(tmp_path / "out", [giant]))
    batch = plan.micro_batch(0)
    assert batch.input_ids.shape == (1, 104)
    assert batch.input_ids[0, :100].tolist() == giant[0][:100]
    assert batch.lengths.tolist() == [100] and batch.padding == 4
    assert plan.statistics().cut == 1


def test_documents_with_nothing_to_learn_after_cutting_are_skipped_and_counted(tmp_path: Path) -> None:
    late: tuple[list[int], list[int]] = ([5] * 150, [0] * 100 + [1] * 50)
    just_in_time: tuple[list[int], list[int]] = ([6] * 150, [0] * 99 + [1] * 51)
    only_the_first: tuple[list[int], list[int]] = ([7] * 20, [1] + [0] * 19)
    nothing: tuple[list[int], list[int]] = ([8] * 20, [0] * 20)
    documents = documents_of(tmp_path / "out", [late, just_in_time, only_the_first, nothing])
    plan = plan_of(documents)
    statistics = plan.statistics()
    assert (statistics.documents, statistics.skipped, statistics.cut) == (1, 3, 1)
    assert ids_of(plan, 0, plan.per_epoch) == [[int(documents.content_ids[1])]]
    with pytest.raises(DataError, match="within its first 50 tokens"):
        plan_of(documents, max_length=50)


def test_an_answer_of_one_token_and_a_document_of_two_train(tmp_path: Path) -> None:
    plan = plan_of(documents_of(tmp_path / "out", [([4, 9], [0, 1])]))
    batch = plan.micro_batch(0)
    assert batch.input_ids.tolist() == [[4, 9, 0, 0, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True] + [False] * 6]


def test_a_length_that_does_not_fit_the_budget_is_named(tmp_path: Path) -> None:
    documents = documents_of(tmp_path / "out", rows_of([10, 60]))
    with pytest.raises(DataError, match=r"60 tokens, is padded to 64 .* data.token_budget = 63"):
        plan_of(documents, budget=63)
    assert plan_of(documents, budget=64).per_epoch == 2


@pytest.mark.parametrize("name", ["token_budget", "max_length", "length_bucket"])
def test_sizes_below_one_are_refused(tmp_path: Path, name: str) -> None:
    documents = documents_of(tmp_path / "out", rows_of([10]))
    sizes = {"token_budget": 64, "max_length": 64, "length_bucket": 8, name: 0}
    with pytest.raises(DataError, match=f"data.{name} = 0"):
        BatchPlan(documents, seed=0, **sizes)


def test_statistics_are_those_of_the_micro_batches(tmp_path: Path) -> None:
    plan = plan_of(documents_of(tmp_path / "out", rows_of([2 + place % 97 for place in range(300)])))
    statistics = plan.statistics()
    batches = [plan.micro_batch(index) for index in range(plan.per_epoch)]
    assert statistics.micro_batches == len(batches)
    for spread, values in (
        (statistics.rows, [len(batch.lengths) for batch in batches]),
        (statistics.tokens, [batch.tokens for batch in batches]),
        (statistics.padding, [batch.padding for batch in batches]),
    ):
        assert (spread.min, spread.max) == (min(values), max(values))
        assert spread.mean == pytest.approx(sum(values) / len(values))
    assert statistics.shapes == sorted({tuple(batch.input_ids.shape) for batch in batches})
    later = [plan.micro_batch(index) for index in range(plan.per_epoch, 2 * plan.per_epoch)]
    assert {tuple(batch.input_ids.shape) for batch in later} == set(statistics.shapes)


def test_the_table_says_how_many_and_how_full(tmp_path: Path) -> None:
    plan = plan_of(documents_of(tmp_path / "out", rows_of([10] * 9 + [150])))
    text = Console(width=100, no_color=True)
    with text.capture() as captured:
        text.print(plan.statistics().table())
    printed = captured.get()
    for words in ("10 documents in 3 micro-batches", "rows", "tokens", "padding", "1 documents cut", "mean"):
        assert words in printed


@pytest.mark.slow
def test_the_order_of_a_million_documents_takes_about_a_second(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 30_000, 200_000, dtype=np.int32)
    starts, lengths = generator.integers(0, 190_000, 1_000_000), generator.integers(4, 40, 1_000_000)
    mask = np.array([0] + [1] * 40, dtype=np.uint8)
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    write_documents(tmp_path / "out", ((tokens[at : at + n], mask[:n]) for at, n in spans))
    documents = open_documents(tmp_path / "out")
    begun = time.perf_counter()
    plan = plan_of(documents)
    for epoch in range(3):
        plan.micro_batch(epoch * plan.per_epoch)
    took = (time.perf_counter() - begun) / 3
    print(f"{took:.2f} s per epoch of a million documents")
    assert took < 4.0
