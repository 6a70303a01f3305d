"""Before the first step: every kernel the run will launch is tuned and compiled, one lane at a time.

Tuning needs memory and an idle device, and compiling takes minutes; both are better over before
the optimizer's memory is taken and before other lanes wait. What has to be ready follows from the
documents: the (rows, length) of the micro-batches are the same in every epoch, and from their lengths
follows which packed rows can occur. Tuning results serve all devices of a kind, so the first target
lane runs through all shapes and those on other devices through the largest. Compiled code belongs to a
device, so every drafter lane runs through its packed rows; captured graphs belong to a lane, so every
target lane that keeps any runs through all shapes. Numbers that come out are thrown away, and with a CPU
lane there is nothing to do.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import attrs
import torch

from engine.data.batches import BatchPlan, MicroBatch
from engine.dflash.packing import ROW_MULTIPLE, packed_length
from engine.errors import OutOfMemory
from engine.planning import RunPlan
from engine.runtime.alone import run_alone
from engine.runtime.failure import StageFailure
from engine.runtime.lane import Lane
from engine.runtime.launch_state import ColdKey
from engine.runtime.serializer import Serializer
from engine.stages.drafter_fwd_bwd import DrafterForwardBackward
from engine.stages.target_forward import TargetForward
from engine.target.loading import Target
from engine.training_parts import TrainingParts, pack_micro_batch

Shape = tuple[int, int]
"""(rows, length) of a micro-batch."""


@attrs.frozen
class Readied:
    """What a warm-up came to."""

    forwards: int
    """Shapes that a target ran."""
    packed_rows: int
    """Lengths of packed rows that the drafters ran."""
    tuned: int
    """Keys that were benchmarked; those that an earlier run had tuned are none."""
    retries: int
    """Tunings that ran out of memory and were tried once more."""
    seconds: float
    graphs: int = 0
    """CUDA graphs that targets captured, over all lanes."""

    def __str__(self) -> str:
        return (
            f"warm-up: {self.forwards} target shapes, {self.packed_rows} lengths of packed rows, "
            f"{self.tuned} keys tuned, "
            + (f"{self.graphs} graphs captured, " if self.graphs else "")
            + f"{self.seconds:.1f} s"
            + (f"; {self.retries} tunings ran out of memory and were tried once more" if self.retries else "")
        )


@attrs.frozen(eq=False, kw_only=True)
class WarmUp:
    """Runs what lanes will run, with made-up tokens."""

    parts: TrainingParts
    lanes: Mapping[str, Lane]
    serializer: Serializer
    forward: TargetForward | None
    """The run's stages; None where a plugin runs one of its own."""
    drafter: DrafterForwardBackward | None
    kinds: frozenset[str] = frozenset({"cuda"})
    """Kinds of device whose lanes have something to get ready."""

    def run(self, say: Callable[[str], None]) -> Readied | None:
        """Get everything ready; None where no lane is on such a device.

        Args:
            say: takes a line per key tuned and per packed row compiled.

        Raises:
            StageFailure: of whatever cause; out of memory comes with who held it and what lowers it.
        """
        graph = self.parts.plan.graph
        targets = [self.lanes[lane.name] for lane in graph.target_lanes]
        targets = [lane for lane in targets if lane.device.type in self.kinds]
        drafters = [self.lanes[lane.name] for lane in graph.drafter_lanes]
        drafters = [lane for lane in drafters if lane.device.type in self.kinds]
        if not targets and not drafters:
            return None
        begin = time.perf_counter()
        before = self.serializer.counts()
        forwards, rows = target_shapes(self.parts), packed_rows(self.parts.plan.train)
        with _told(self.serializer, say):
            if self.forward is not None:
                forward = self.forward
                keeping = [lane for lane in targets if preparing(forward.targets[lane.name])]
                for lane, shapes in _one_per_device(targets, forwards, keeping):
                    self._alone(lane, partial(self._targets, lane, shapes))
            if self.drafter is not None:
                for lane in drafters:
                    for batch in rows:
                        self._alone(lane, partial(self._drafter, lane, batch, say))
        counts = self.serializer.counts() - before
        seconds = time.perf_counter() - begin
        walks = [getattr(target, "walk", None) for target in self.parts.targets]
        graphs = sum(len(getattr(walk, "captured", ())) for walk in walks)
        return Readied(
            len(forwards), len(rows), counts.cold_keys, counts.out_of_memory_retries, seconds, graphs
        )

    def _alone(self, lane: Lane, work: Callable[[], None]) -> None:
        try:
            run_alone(lane, "warm-up", work, list(self.lanes.values()))
        except StageFailure as failure:
            if failure.exit_code == OutOfMemory.exit_code:
                failure.advise(self.parts.plan.memory.advice(str(lane.device)))
            raise

    def _targets(self, lane: Lane, shapes: Sequence[Shape]) -> None:
        assert self.forward is not None
        for rows, length in shapes:
            ready_shape(self.forward.targets[lane.name], rows, length, lane.device)
            lane.synchronize()

    def _drafter(self, lane: Lane, batch: MicroBatch, say: Callable[[str], None]) -> None:
        assert self.drafter is not None
        begin = time.perf_counter()
        plan = self.parts.plan
        shape = (*batch.input_ids.shape, plan.drafter_config.hidden_size)
        dtype = getattr(torch, plan.schedule.target.dtype)
        taps = [
            torch.randn(shape, device=lane.device, dtype=dtype) for _ in plan.drafter_config.target_layer_ids
        ]
        row, packed = pack_micro_batch(self.parts, batch, taps)
        del taps
        self.drafter.ready(lane, batch, row, packed)
        lane.synchronize()
        say(
            f"{lane.name}: drafter ready for packed rows of {row.length}, {time.perf_counter() - begin:.1f} s"
        )


def ready_shape(target: Target, rows: int, length: int, device: torch.device) -> None:
    """Have a target tune and compile what a shape needs, and capture it where it keeps graphs.

    Call it on the target's lane, as the run will; the device may not be through when it returns.
    """
    prepare = preparing(target)
    if prepare is not None:
        prepare(rows, length)
    else:
        target.forward_taps(torch.zeros(rows, length, dtype=torch.int64).to(device))


def preparing(target: Target) -> Callable[[int, int], None] | None:
    """What gets a shape ready where each lane needs each of them, as a walk that keeps graphs does.

    A stranger's target may have no walk at all.
    """
    prepare: Callable[[int, int], None] | None = getattr(getattr(target, "walk", None), "prepare", None)
    return prepare


def target_shapes(parts: TrainingParts) -> list[Shape]:
    """What the targets will see, evaluation included, the largest first: it is the one that may not fit."""
    return planned_shapes(parts.plan)


def planned_shapes(run: RunPlan) -> list[Shape]:
    """`target_shapes` of a run that is not loaded yet."""
    plans = [plan for plan in (run.train, run.held_out) if plan is not None]
    shapes = {shape for plan in plans for shape in plan.statistics().shapes}
    return sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))


def packed_rows(batches: BatchPlan) -> list[MicroBatch]:
    """A made-up micro-batch for each length of packed row that any epoch can bring, the longest first."""
    return list(rows_by_length(batches).values())


def rows_by_length(batches: BatchPlan) -> dict[int, MicroBatch]:
    """`packed_rows` by their lengths."""
    found: dict[int, MicroBatch] = {}
    for (rows, length), (fewest, most) in batches.token_ranges().items():
        for slots in range(packed_length(fewest), packed_length(most) + 1, ROW_MULTIPLE):
            if slots not in found:
                found[slots] = made_up(rows, length, min(slots, most))
    return {slots: found[slots] for slots in sorted(found, reverse=True)}


def made_up(rows: int, length: int, tokens: int) -> MicroBatch:
    """A micro-batch of zeros with so many real tokens, spread over its rows, all but the first supervised."""
    lengths = torch.full((rows,), tokens // rows)
    lengths[: tokens % rows] += 1
    position = torch.arange(length)
    return MicroBatch(
        index=0,
        epoch=0,
        document_ids=torch.arange(rows),
        lengths=lengths,
        input_ids=torch.zeros(rows, length, dtype=torch.int64),
        loss_mask=(position > 0) & (position < lengths[:, None]),
    )


def _one_per_device(
    lanes: Sequence[Lane], shapes: Sequence[Shape], keeping: Sequence[Lane]
) -> Iterator[tuple[Lane, Sequence[Shape]]]:
    """The first lane with all shapes, and the first one of each other device with the largest.

    Args:
        keeping: lanes that keep graphs of their own, each with all shapes.
    """
    seen: set[torch.device] = set()
    for lane in lanes:
        if lane in keeping:
            yield lane, shapes
        elif lane.device not in seen:
            yield lane, shapes[:1] if seen else shapes
        seen.add(lane.device)


@contextmanager
def _told(serializer: Serializer, say: Callable[[str], None]) -> Iterator[None]:
    """Say each key that is tuned inside the block."""

    def tell(cold: ColdKey) -> None:
        say(f"tuned {cold.kernel} {cold.key}, {cold.seconds:.1f} s")

    before, serializer.on_cold = serializer.on_cold, tell
    try:
        yield
    finally:
        serializer.on_cold = before
