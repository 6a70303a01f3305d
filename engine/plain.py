"""The whole training as one loop: the reading copy of the engine, and its yardstick.

    for each step:
        for each of its micro-batches:
            taps  = target(rows)                       target-forward
            row   = real tokens, one behind the other  pack
            Σw·CE over blocks at fresh anchors, back-propagated unnormalised
                                                       drafter-fwd-bwd
        gradient / Σw, clip, AdamW                     optimizer

What runs here in this order is what lanes run side by side, and with one drafter their numbers
are these, bit for bit on a CPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.data.batches import BatchPlan, MicroBatch
from engine.dflash.decoding import Evaluation, evaluate
from engine.dflash.drafter import Drafter
from engine.dflash.masters import Masters, learning_rate
from engine.dflash.objective import BlockCounts, choose_weights
from engine.dflash.packing import PackedRow, pack_row, pack_taps
from engine.dflash.training import SharedWeights, training_loss
from engine.errors import NonFinite
from engine.planning import RunPlan
from engine.target.loading import Target

LANE = "plain"


@attrs.frozen(kw_only=True)
class Training:
    """The parts of one run, loaded and in place."""

    plan: RunPlan
    target: Target
    shared: SharedWeights
    drafter: Drafter
    masters: Masters
    record_timing: Callable[[dict[str, Any]], None]
    """Takes a row of timings.jsonl."""

    @contextmanager
    def timed(self, stage: str, micro_batch: int | None, step: int, tokens: int = 0) -> Iterator[None]:
        """Time one stage. The loop waits for the device, so host and device time are one."""
        start = time.time()
        begin = time.perf_counter()
        yield
        for device in {self.plan.target_device, self.plan.drafter_device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        elapsed = (time.perf_counter() - begin) * 1e3
        self.record_timing(
            {
                "stage": stage,
                "lane": LANE,
                "micro_batch": micro_batch,
                "step": step,
                "start": start,
                "waited_ms": 0.0,
                "host_ms": elapsed,
                "device_ms": elapsed,
                "tokens": tokens,
            }
        )


def target_forward(training: Training, batch: MicroBatch) -> list[Tensor]:
    """Taps of one micro-batch, each [rows, length, H] on the target's device."""
    return training.target.forward_taps(batch.input_ids.to(training.plan.target_device))


def pack(training: Training, batch: MicroBatch, taps: list[Tensor]) -> tuple[PackedRow, Tensor]:
    """The micro-batch as one row, with its taps [T, taps·H] where the drafter wants them."""
    row = pack_row(batch.input_ids, batch.loss_mask, batch.lengths, batch.document_ids)
    packed = pack_taps(taps, row)
    if training.plan.schedule.train.zero_taps:
        packed.zero_()
    return row, packed.to(training.plan.drafter_device, training.plan.compute_dtype)


def train_step(training: Training, step: int) -> dict[str, Any]:
    """Run optimizer step `step`, counted from 0, and return its row of metrics.jsonl.

    Raises:
        NonFinite: a gradient or the loss is not finite; nothing was updated.
    """
    plan, schedule = training.plan, training.plan.schedule
    begin = time.perf_counter()
    done = step + 1
    counts = BlockCounts.zeros(schedule.drafter.block_size, plan.drafter_device)
    weights = _weights(plan)
    tokens = padding = skipped = 0
    first = step * schedule.train.micro_batches
    for index in range(first, first + schedule.train.micro_batches):
        batch = plan.train.micro_batch(index)
        with training.timed("target-forward", index, done, batch.tokens):
            taps = target_forward(training, batch)
        with training.timed("pack", index, done, batch.tokens):
            row, packed = pack(training, batch, taps)
            del taps
        with training.timed("drafter-fwd-bwd", index, done, batch.tokens):
            loss, anchors = training_loss(
                training.drafter,
                training.shared,
                packed,
                row,
                seed=schedule.run.seed,
                epoch=batch.epoch,
                max_anchors=schedule.data.max_anchors,
                context_noise=schedule.train.context_noise,
                backend=plan.backend,
                weights=weights,
                chunk=schedule.train.loss_chunk,
            )
            loss.loss_sum.backward()
            training.masters.accumulate()
        counts.add(loss, anchors.used)
        tokens += batch.tokens
        padding += batch.padding
        skipped += not anchors.used
    lr = learning_rate(
        step,
        plan.total_steps,
        lr=schedule.train.lr,
        min_lr=schedule.train.min_lr,
        warmup=schedule.train.warmup,
    )
    with training.timed("optimizer", None, done):
        grad_norm = optimizer_step(training, counts, done, lr)
    return {
        "step": done,
        "epoch": batch.epoch,
        "loss": counts.loss,
        "accuracy": counts.accuracy,
        "accuracy_by_slot": counts.accuracy_by_slot,
        "block_prefix": counts.block_prefix,
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens": tokens,
        "padding": padding,
        "tokens_per_s": tokens / (time.perf_counter() - begin),
        "anchors": counts.anchors,
        "skipped": skipped,
        "peak_memory": peak_memory(plan),
    }


def optimizer_step(training: Training, counts: BlockCounts, step: int, lr: float) -> float:
    """Update from the accumulated gradients; a step without a supervised slot passes unchanged."""
    weight_sum, loss_sum = float(counts.weight_sum), float(counts.loss_sum)
    if not weight_sum:
        training.masters.discard()
        return 0.0
    if loss_sum != loss_sum or abs(loss_sum) == float("inf"):
        raise NonFinite(f"step {step}: the loss is {loss_sum}; nothing was updated")
    try:
        return training.masters.step(weight_sum, lr=lr, clip=training.plan.schedule.train.clip)
    except NonFinite as error:
        raise NonFinite(f"step {step}: {error}; nothing was updated") from error


def evaluate_held_out(training: Training, batches: BatchPlan) -> Evaluation:
    """Held-out loss and accepted length, every answer position scored once."""
    schedule = training.plan.schedule

    def packed() -> Iterator[tuple[PackedRow, Tensor]]:
        for index in range(batches.per_epoch):
            batch = batches.micro_batch(index)
            yield pack(training, batch, target_forward(training, batch))

    return evaluate(
        training.drafter,
        training.shared,
        packed(),
        backend=training.plan.backend,
        weights=_weights(training.plan),
        anchors_at_once=schedule.data.max_anchors,
        chunk=schedule.train.loss_chunk,
    )


def _weights(plan: RunPlan) -> Any:
    train = plan.schedule.train
    return choose_weights(train.objective, gamma=train.gamma, dpace_alpha=train.dpace_alpha)


def peak_memory(plan: RunPlan) -> dict[str, float]:
    """Peak of allocated GPU memory so far, GB (10^9 bytes) by device; empty on a CPU."""
    devices = {plan.target_device, plan.drafter_device}
    return {
        str(device): torch.cuda.max_memory_allocated(device) / 1e9
        for device in sorted(devices, key=str)
        if device.type == "cuda"
    }
