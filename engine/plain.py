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

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.data.batches import BatchPlan, MicroBatch
from engine.dflash.decoding import Evaluation, evaluate, tokens_by_slot
from engine.dflash.finite import BadSteps, first_trouble, listed, take_reading
from engine.dflash.masters import learning_rate
from engine.dflash.packing import PackedRow
from engine.dflash.training import Packed, training_loss
from engine.errors import EngineError, NonFinite
from engine.runtime.failure import Place, StageFailure
from engine.runtime.progress import LoopProgress
from engine.target.own_tokens import own_tokens_and_taps
from engine.training_parts import DrafterPart, TrainingParts, pack_micro_batch, step_row

LANE = "plain"


@attrs.frozen(kw_only=True)
class PlainLoop:
    """Trains one target's drafter, one thing after another."""

    parts: TrainingParts
    """Of one drafter: several share the masters out, and one alone would update only its share."""
    record_timing: Callable[[dict[str, Any]], None]
    """Takes a row of timings.jsonl."""
    progress: LoopProgress = attrs.field(factory=LoopProgress)
    bad_steps: BadSteps = attrs.field(init=False)

    @bad_steps.default
    def _bad_steps(self) -> BadSteps:
        return BadSteps(self.parts.plan.schedule.train.max_bad_steps)

    def __attrs_post_init__(self) -> None:
        if len(self.parts.drafters) != 1:
            raise EngineError(f"{len(self.parts.drafters)} drafters, and the plain loop trains one alone")

    @contextmanager
    def timed(self, stage: str, micro_batch: int | None, step: int, tokens: int = 0) -> Iterator[None]:
        """Time one stage. The loop waits for the device, so host and device time are one."""
        self.progress.enter(LANE, Place(stage=stage, micro_batch=micro_batch, step=step + 1))
        start = time.time()
        begin = time.perf_counter()
        yield
        for device in self.parts.plan.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        elapsed = (time.perf_counter() - begin) * 1e3
        self.record_timing(
            {
                "stage": stage,
                "lane": LANE,
                "micro_batch": micro_batch,
                "step": step + 1,
                "start": start,
                "waited_ms": 0.0,
                "host_ms": elapsed,
                "device_ms": elapsed,
                "tokens": tokens,
            }
        )


class PlainTrainer:
    """The plain loop behind the interface that lanes have."""

    def __init__(self, parts: TrainingParts) -> None:
        self._timings: list[dict[str, Any]] = []
        self._loop = PlainLoop(parts=parts, record_timing=self._timings.append)
        self._ends = False

    def warm_up(self, say: Callable[[str], None]) -> None:
        """Nothing: alone in its process, the loop tunes and compiles when a shape first comes."""

    @property
    def watched(self) -> LoopProgress:
        """What tells how the loop gets on."""
        return self._loop.progress

    def request_stop(self) -> None:
        """End when the step under way is done; from any thread."""
        self._ends = True

    def places(self) -> dict[str, Place]:
        """What the loop is at, as if it were a lane's."""
        return self._loop.progress.places()

    def notices(self) -> list[str]:
        """Nothing, for the same reason."""
        return []

    def train(self, first: int, last: int, on_step: Callable[[dict[str, Any]], None]) -> int:
        """Run steps [first, last) and hand on each one's row; returns the step to go on with.

        Raises:
            StageFailure: names stage and micro-batch, and their documents.
        """
        try:
            for step in range(first, last):
                on_step(self._step(step))
                if self._ends:
                    return step + 1
            return last
        finally:  # and not at the beginning, or what was asked just before would be forgotten
            self._ends = False

    def _step(self, step: int) -> dict[str, Any]:
        try:
            return train_step(self._loop, step)
        except Exception as error:
            place = self._loop.progress.place(LANE)
            failure = StageFailure(place, LANE, error, {})
            if place.micro_batch is not None:
                failure.add(listed(self._loop.parts.plan.train.document_ids(place.micro_batch)))
            raise failure from error
        finally:
            self._loop.progress.leave(LANE)

    def drain(self) -> list[dict[str, Any]]:
        """Rows of timings.jsonl."""
        rows, self._timings[:] = list(self._timings), []
        return rows

    flush = drain


def target_forward(parts: TrainingParts, batch: MicroBatch) -> list[Tensor]:
    """Taps of one micro-batch, each [rows, length, H] on the target's device."""
    target = parts.targets[0]
    return target.forward_taps(batch.input_ids.to(target.device))


def pack(parts: TrainingParts, batch: MicroBatch, taps: list[Tensor]) -> tuple[PackedRow, Packed]:
    """The micro-batch as one row, its taps where the drafter wants them."""
    row, packed = pack_micro_batch(parts, batch, taps)
    device = parts.drafters[0].shared.lm_head.device
    return row, tuple(parts.links.to(tensor, device) for tensor in packed)


def train_step(loop: PlainLoop, step: int) -> dict[str, Any]:
    """Run optimizer step `step`, counted from 0, and return its row of metrics.jsonl.

    A tap, loss or gradient that is not finite leaves the weights as they are, and the row names it.

    Raises:
        BadStepsInARow: it was one step too many of that kind.
    """
    parts, part, plan = loop.parts, loop.parts.drafters[0], loop.parts.plan
    part.begin_step()
    first = step * plan.schedule.train.micro_batches
    for index in range(first, first + plan.schedule.train.micro_batches):
        batch = plan.train.micro_batch(index)
        with loop.timed("target-forward", index, step, batch.tokens):
            taps = target_forward(parts, batch)
        with loop.timed("pack", index, step, batch.tokens):
            row, packed = pack(parts, batch, taps)
            del taps
        with loop.timed("drafter-fwd-bwd", index, step, batch.tokens):
            forward_backward(parts, part, batch, row, packed)
    with loop.timed("optimizer", None, step):
        lr = step_learning_rate(parts, step)
        norm, trouble = optimizer_step(parts, part, lr=lr)
        loop.bad_steps.passed(step, trouble)
    return step_row(parts, step, norm, lr, part.counts, trouble)


def forward_backward(
    parts: TrainingParts, part: DrafterPart, batch: MicroBatch, row: PackedRow, packed: Packed
) -> None:
    """Score a micro-batch's blocks and add their gradients to the drafter's sums."""
    loss, anchors = training_loss(
        part.drafter, part.shared, packed, row, epoch=batch.epoch, recipe=parts.recipe
    )
    taps = parts.recipe.features.tap_views(packed)
    part.readings.append(take_reading(batch.index, batch.document_ids, taps, loss.loss_sum))
    loss.loss_sum.backward()
    part.masters.accumulate()
    part.counts.add(loss, anchors.used)
    part.count(batch, anchors.used)


def step_learning_rate(parts: TrainingParts, step: int) -> float:
    """The learning rate of step `step`, counted from 0."""
    train = parts.plan.schedule.train
    return learning_rate(step, parts.plan.total_steps, lr=train.lr, min_lr=train.min_lr, warmup=train.warmup)


def optimizer_step(parts: TrainingParts, part: DrafterPart, *, lr: float) -> tuple[float, str | None]:
    """Update from the accumulated gradients; a step without a supervised slot passes unchanged.

    Returns:
        The gradient's norm before clipping, and what was not finite, in words, if anything was:
        nothing is updated then.
    """
    weight_sum = float(part.counts.weight_sum)
    trouble = first_trouble(part.readings, parts.plan.drafter_config.target_layer_ids)
    if trouble is not None:
        part.masters.discard()
        return math.nan, trouble.text
    if not weight_sum:
        part.masters.discard()
        return 0.0, None
    try:
        return part.masters.step(weight_sum, lr=lr, clip=parts.plan.schedule.train.clip), None
    except NonFinite as error:
        documents = [number for reading in part.readings for number in reading.document_ids.tolist()]
        return math.nan, f"{error}; the step's micro-batches were finite; {listed(documents)}"


def evaluate_held_out(
    parts: TrainingParts, batches: BatchPlan, further: Callable[[], None] = lambda: None
) -> Evaluation:
    """Held-out loss and accepted length, every answer position scored once.

    What the target would have said counts as accepted, where the run's target keeps its head; a target cut
    behind its last tap says nothing, and there the documents' own tokens do.

    Args:
        further: called at each micro-batch.
    """
    target = parts.targets[0]

    def packed() -> Iterator[tuple[PackedRow, Packed, Tensor]]:
        for index in range(batches.per_epoch):
            further()
            batch = batches.micro_batch(index)
            if not target.has_head:
                row, taps = pack(parts, batch, target_forward(parts, batch))
                yield row, taps, row.input_ids
                continue
            ids = batch.input_ids.to(target.device)
            own, states = own_tokens_and_taps(target, ids, batch.loss_mask.bool())
            row, taps = pack(parts, batch, states)
            del states
            yield row, taps, tokens_by_slot(row, own)

    part = parts.drafters[0]
    return evaluate(part.drafter, part.shared, packed(), parts.recipe)
