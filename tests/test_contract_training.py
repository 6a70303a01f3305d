"""The contract's lines about training: one division, clipping, noise, learning rate, walks, draws.

Each compares with something computed here from the formulas, not with another path through the
same functions.
"""

from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from blocks import (
    CPU,
    HIDDEN,
    VOCAB,
    recipe_of,
    row_of,
    run_blocks,
    shared_weights,
    small_config,
    small_drafter,
    taps_of,
)
from small_runs import assembled, plain_loop, small_project

from engine.dflash.anchors import blocks_at, draw_anchors
from engine.dflash.decoding import evaluate
from engine.dflash.masters import Masters, learning_rate
from engine.dflash.objective import BlockLoss, block_loss, decay_weights, dpace_weights
from engine.dflash.packing import PackedRow, pack_row
from engine.dflash.training import add_context_noise, training_loss
from engine.lanes import open_run_lanes
from engine.plain import evaluate_held_out, pack, target_forward, train_step
from plugins.concat import ConcatenatedTaps


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


def test_the_gradient_is_that_of_one_quotient_over_the_whole_step(project: Path) -> None:
    loop = plain_loop(project, "train.micro_batches=3")
    row = train_step(loop, 0)
    parts = plain_loop(project, "train.micro_batches=3").parts  # the same fresh weights
    part, losses, weights = parts.drafters[0], [], []
    for index in range(3):
        batch = parts.plan.train.micro_batch(index)
        packed_row, packed = pack(parts, batch, target_forward(parts, batch))
        loss, _ = training_loss(
            part.drafter, part.shared, packed, packed_row, epoch=batch.epoch, recipe=parts.recipe
        )
        losses.append(loss.loss_sum)
        weights.append(loss.weight_sum)
    assert max(weights) > 1.01 * min(weights), "equal weights would hide a division per micro-batch"
    (sum(losses) / sum(weights)).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in part.drafter.parameters()]).norm()
    assert row["grad_norm"] == pytest.approx(float(expected), rel=1e-5)
    assert row["loss"] == pytest.approx((sum(losses) / sum(weights)).item(), rel=1e-6)


def test_clipping_leaves_a_gradient_of_exactly_the_norm_asked_for() -> None:
    masters = Masters(small_drafter(small_config()), lambda weights: torch.optim.SGD(weights.values(), lr=0))
    before = {name: weight.detach().clone() for name, weight in masters.weights.items()}
    for parameter in masters.parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    masters.accumulate()
    assert masters.step(1.0, lr=1.0, clip=0.5) > 10
    moved = torch.cat(
        [(weight.detach() - before[name]).flatten() for name, weight in masters.weights.items()]
    )
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4)


def test_every_step_has_the_learning_rate_of_its_number(project: Path) -> None:
    loop = plain_loop(project)
    for step in range(2):
        assert train_step(loop, step)["lr"] == learning_rate(step, 6, lr=1e-3, min_lr=1e-4, warmup=0.04)
    assert learning_rate(0, 10, lr=1.0, min_lr=0.1, warmup=0.25) == pytest.approx(1 / 3)  # 3 of 10 steps rise
    assert learning_rate(0, 6, lr=1e-3, min_lr=1e-4, warmup=0.04) == 1e-3


def test_noise_reaches_training_and_never_evaluation(project: Path) -> None:
    quiet, noisy = (plain_loop(project, f"train.context_noise={deviation}") for deviation in (0.0, 5.0))
    held_out = quiet.parts.plan.held_out
    assert held_out is not None
    assert evaluate_held_out(quiet.parts, held_out) == evaluate_held_out(noisy.parts, held_out)
    assert train_step(quiet, 0)["loss"] != train_step(noisy, 0)["loss"]


def test_noise_differs_between_documents() -> None:
    row = row_of((30, 3), (30, 3))
    taps = torch.zeros(row.length, 2 * HIDDEN)
    path = ConcatenatedTaps(HIDDEN)
    (noise,) = add_context_noise((taps,), row, features=path, deviation=1.0, seed=1, epoch=0)
    assert not torch.allclose(noise[:30], noise[30:60], atol=1e-3)


def test_the_walk_begins_at_the_first_answer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of((20, 5))

    def asked(drafter, shared, context, row, anchors, recipe):  # instead of hidden states: what was asked
        blocks = blocks_at(row, anchors, block_size=4, mask_token_id=0)
        return SimpleNamespace(anchors=anchors, device=torch.device("cpu")), blocks

    def hits(hidden, head, labels, supervised, **_) -> BlockLoss:
        anchors = hidden.anchors
        right = (anchors.position < 10)[:, None].expand(-1, 3) & (anchors.document >= 0)[:, None]
        predicted = torch.where(right, labels, -1)
        return BlockLoss(torch.tensor(1.0), torch.tensor(1.0), right, torch.ones_like(right), predicted)

    monkeypatch.setattr("engine.dflash.decoding.drafter_blocks", asked)
    monkeypatch.setattr("engine.dflash.decoding.block_loss", hits)
    drafter = small_drafter(small_config())
    for at_once in (1, 6, 64):
        recipe = recipe_of(max_anchors=at_once)
        evaluation = evaluate(drafter, shared_weights(), [(row, (taps_of(row),), row.input_ids)], recipe)
        # Anchors 5 and 9 commit four each, then 13 to 18 one each.
        assert (evaluation.accepted_length, evaluation.verifications) == (14 / 8, 8)
        assert evaluation.block_prefix == pytest.approx(1 + 6 * 3 / 15)  # positions 4 to 9 of 4 to 18


def two_documents(first: int, second: int) -> PackedRow:
    """Documents 7 and 8 in either order; a document's tokens follow from its id."""
    ids = torch.stack(
        [
            torch.randint(0, VOCAB - 1, (40,), generator=torch.Generator().manual_seed(n))
            for n in (first, second)
        ]
    )
    mask = torch.ones(2, 40, dtype=torch.bool)
    return pack_row(ids, mask, torch.tensor([40, 40]), torch.tensor([first, second]))


def test_a_documents_anchors_do_not_depend_on_where_it_stands() -> None:
    one = draw_anchors(two_documents(7, 8), seed=1, epoch=0, max_anchors=12)
    other = draw_anchors(two_documents(8, 7), seed=1, epoch=0, max_anchors=12)
    assert one.position[one.document == 0].tolist() == other.position[other.document == 1].tolist()
    assert one.position[one.document == 1].tolist() == other.position[other.document == 0].tolist()
    assert one.position[one.document == 0].tolist() != one.position[one.document == 1].tolist()


def test_an_anchors_own_state_stays_hidden_beside_a_later_anchor_of_its_document() -> None:
    config = small_config(layer_types=("full_attention",))
    row = row_of((30, 3))
    taps = taps_of(row)
    changed = taps.clone()
    changed[9] += 1.0
    before, after = (run_blocks(config, row, some, [9, 20]) for some in (taps, changed))
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_slots_without_supervision_are_neither_right_nor_counted() -> None:
    head = torch.eye(16)
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    hidden = torch.cat([torch.zeros(2, 1, 16), 9 * head[labels]], dim=1).view(8, 16)  # every slot is right
    supervised = torch.tensor([[True, False, True], [False, False, True]])
    loss = block_loss(hidden, head, labels, supervised, weights=decay_weights(None), chunk=4)
    assert torch.equal(loss.right, supervised) and float(loss.weight_sum) == 3
    wrong = block_loss(-hidden, head, labels, supervised, weights=decay_weights(None), chunk=4)
    assert not wrong.right.any()


def test_dpace_smooths_towards_certain_acceptance() -> None:
    entropy, alpha = torch.tensor([[0.3, 1.2]]), 0.2
    s = [0.8 * float(torch.exp(-ce)) + alpha for ce in entropy[0]]
    expected = torch.tensor([[s[0] + s[0] * s[1], s[0] * s[1]]])
    torch.testing.assert_close(dpace_weights(alpha)(entropy, torch.ones(1, 2, dtype=torch.bool)), expected)


def test_order_depends_on_seed_and_epoch(project: Path) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        # A row to a micro-batch, so that the order of micro-batches is that of documents.
        budget = ("data.token_budget=96", "data.length_bucket=96", f"run.seed={seed}")
        plan = assembled(project, *budget).plan.train
        first = epoch * plan.per_epoch
        return [int(plan.micro_batch(first + i).document_ids[0]) for i in range(plan.per_epoch)]

    base = order(1, 0)
    assert order(1, 0) == base
    assert sorted(order(1, 1)) == sorted(order(2, 0)) == sorted(base)
    assert order(1, 1) != base and order(2, 0) != base


@pytest.mark.parametrize("drafters", [1, 2])
def test_a_step_without_an_anchor_passes_on_lanes_too(project: Path, drafters: int) -> None:
    lanes_of = ", ".join(['"cpu"'] * drafters)
    parts = assembled(project, f'devices={{targets = ["cpu"], drafters = [{lanes_of}]}}')
    original = parts.plan.train.micro_batch

    def empty(index: int):
        batch = original(index)
        return attrs.evolve(batch, loss_mask=torch.zeros_like(batch.loss_mask)) if index < 2 else batch

    parts.plan.train.micro_batch = empty  # type: ignore[method-assign]
    before = {name: weight.detach().clone() for name, weight in parts.masters.items()}
    rows: list[dict] = []
    lanes = open_run_lanes(parts)
    lanes.train(0, 1, rows.append)
    assert rows[0]["skipped"] == 2 and rows[0]["grad_norm"] == 0.0
    assert all(torch.equal(weight, before[name]) for name, weight in parts.masters.items())
    lanes.train(1, 2, rows.append)
    assert rows[1]["skipped"] == 0 and rows[1]["grad_norm"] > 0
    assert any(not torch.equal(weight, before[name]) for name, weight in parts.masters.items())
    assert parts.drafters[0].shared.lm_head.device == CPU
