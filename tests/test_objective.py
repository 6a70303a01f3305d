"""Loss, weights, hits: against the formulas written out, with the vocabulary held whole."""

import math

import pytest
import torch
import torch.nn.functional as F

from engine.dflash.objective import (
    BlockCounts,
    BlockLoss,
    block_loss,
    decay_weights,
    dpace_weights,
    head_cross_entropy,
    leading_right,
)

CPU = torch.device("cpu")


def problem(blocks: int = 5, size: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(blocks * size, 16, generator=generator, requires_grad=True)
    head = torch.randn(37, 16, generator=generator)
    labels = torch.randint(0, 37, (blocks, size - 1), generator=generator)
    supervised = torch.rand(blocks, size - 1, generator=generator) < 0.7
    return hidden, head, labels, supervised


@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
@pytest.mark.parametrize("weights", [decay_weights(4.0), decay_weights(None), dpace_weights(0.5)])
def test_loss_and_gradient_equal_those_of_whole_logits(chunk: int, weights) -> None:
    hidden, head, labels, supervised = problem()
    loss = block_loss(hidden, head, labels, supervised, weights=weights, chunk=chunk)
    (loss.loss_sum * 3).backward()
    gradient = hidden.grad
    hidden.grad = None
    rows = hidden.view(5, 4, 16)[:, 1:]
    entropy = F.cross_entropy((rows @ head.T).flatten(0, 1), labels.flatten(), reduction="none").view(5, 3)
    w = weights(entropy.detach(), supervised)
    ((w * entropy).sum() * 3).backward()
    torch.testing.assert_close(loss.loss_sum, (w * entropy).sum())
    torch.testing.assert_close(loss.weight_sum, w.sum())
    torch.testing.assert_close(gradient, hidden.grad)
    assert torch.equal(loss.right, ((rows @ head.T).argmax(-1) == labels) & supervised)
    assert not gradient.view(5, 4, 16)[:, 0].any(), "slot 0 is not supervised"


def test_evaluation_forms_no_gradient() -> None:
    hidden, head, labels, supervised = problem()
    with torch.no_grad():
        loss = block_loss(hidden, head, labels, supervised, weights=decay_weights(4.0), chunk=8)
    assert not loss.loss_sum.requires_grad


def test_softmax_is_float32_for_bfloat16_states() -> None:
    hidden, head, labels, _ = problem()
    rows = hidden.detach()[: labels.numel()].bfloat16()
    entropy, _ = head_cross_entropy(rows, head.bfloat16(), labels.flatten(), 4)
    exact = F.cross_entropy((rows @ head.bfloat16().T).float(), labels.flatten(), reduction="none")
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy, exact)


def test_the_vocabulary_is_never_held_whole() -> None:
    rows, chunk, vocab = 512, 16, 50_000
    hidden = torch.randn(rows, 8, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        entropy, _ = head_cross_entropy(hidden, torch.randn(vocab, 8), torch.zeros(rows).long(), chunk)
        entropy.sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= 4 * chunk * vocab * 4  # a few tensors of one chunk, not 512 rows


def test_decay_weights_are_the_contracts() -> None:
    supervised = torch.tensor([[True, True, False, True]])
    weights = decay_weights(7.0)(torch.zeros(1, 4), supervised)
    expected = torch.tensor([[1.0, math.exp(-1 / 7), 0.0, math.exp(-3 / 7)]])
    torch.testing.assert_close(weights, expected)


def test_dpace_weights_are_the_papers() -> None:
    entropy = torch.tensor([[0.3, 1.2, 2.0, 0.1]])
    supervised = torch.tensor([[True, False, True, True]])
    q = torch.exp(-entropy[0])
    s = [0.5 * float(q[0]) + 0.5, 1.0, 0.5 * float(q[2]) + 0.5, 0.5 * float(q[3]) + 0.5]
    c = [math.prod(s[: k + 1]) for k in range(4)]
    expected = [c[0] + c[2] + c[3], 0.0, c[2] + c[3], c[3]]
    torch.testing.assert_close(dpace_weights(0.5)(entropy, supervised)[0], torch.tensor(expected))


def counts_of(*rights: list[list[bool]]) -> BlockCounts:
    counts = BlockCounts.zeros(4, CPU)
    for right in rights:
        hits = torch.tensor(right)
        loss = BlockLoss(torch.tensor(2.0), torch.tensor(4.0), hits, torch.ones_like(hits), hits.long())
        counts.add(loss, len(right))
    return counts


def test_metrics_are_quotients_of_sums_over_the_whole_step() -> None:
    counts = counts_of([[True, True, False]], [[False, True, True], [True, True, True], [True, False, True]])
    assert counts.loss == 0.5
    assert counts.accuracy == pytest.approx(9 / 12)
    assert counts.accuracy_by_slot == pytest.approx([3 / 4, 3 / 4, 3 / 4])
    assert counts.block_prefix == pytest.approx(1 + (2 + 0 + 3 + 1) / 4)


def test_unused_blocks_are_not_counted() -> None:
    hits = torch.tensor([[True, True, True], [False, False, False]])
    counts = BlockCounts.zeros(4, CPU)
    counts.add(BlockLoss(torch.tensor(1.0), torch.tensor(1.0), hits, hits, hits.long()), 1)
    assert counts.block_prefix == 4.0 and counts.anchors == 1 and counts.accuracy == 1.0


def test_a_step_without_supervision_has_no_figures_rather_than_wrong_ones() -> None:
    counts = BlockCounts.zeros(4, CPU)
    assert math.isnan(counts.loss) and math.isnan(counts.accuracy) and math.isnan(counts.block_prefix)


def test_leading_right_stops_at_the_first_miss() -> None:
    right = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    assert leading_right(right).tolist() == [1, 3, 0]


def test_counts_of_two_drafters_add_up() -> None:
    one, other = counts_of([[True, True, False]]), counts_of([[False, True, True], [True, True, True]])
    both = (one + other).cpu()
    assert both.anchors == 3 and both.accuracy == pytest.approx(7 / 9)
    assert both.block_prefix == pytest.approx(1 + (2 + 0 + 3) / 3) and both.loss == 0.5
