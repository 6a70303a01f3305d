"""A run's lanes: the graph of a schedule with its parts and its work in place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from engine.dflash.finite import BadStepsInARow, listed
from engine.dflash.packing import packed_length
from engine.errors import OutOfMemory
from engine.hookspecs import StageWork
from engine.launch_watch import LaunchWatch
from engine.memory_plan import MemoryPlan
from engine.runtime.failure import Place, StageFailure
from engine.runtime.lane import Lane, open_lanes
from engine.runtime.scheduler import Scheduler
from engine.runtime.serializer import Serializer
from engine.runtime.timing import Timings
from engine.runtime.watchdog import Watched
from engine.stages.drafter_fwd_bwd import DrafterForwardBackward
from engine.stages.optimizer import Optimizer
from engine.stages.pack import Pack
from engine.stages.target_forward import TargetForward
from engine.stages.transfer import Transfer
from engine.target.loading import Target
from engine.training_parts import TrainingParts
from engine.warm_up import Readied, WarmUp

Work = TypeVar("Work")

PARCEL_ALIGNMENT = 256  # bytes; what a lane's pinned ring rounds each tensor up to


@attrs.frozen(eq=False)
class RunLanes:
    """What runs a stretch of steps, and where its spans are collected."""

    scheduler: Scheduler
    timings: Timings
    serializer: Serializer
    warming: WarmUp
    watch: LaunchWatch
    memory: MemoryPlan

    def warm_up(
        self, say: Callable[[str], None], kinds: frozenset[str] = frozenset({"cuda"})
    ) -> Readied | None:
        """Tune and compile what the run will launch; None where there is nothing to do.

        Args:
            say: takes lines about progress.
            kinds: of devices whose lanes are got ready.

        Raises:
            StageFailure: of whatever cause.
        """
        if self.serializer.fallback:
            say(self.serializer.fallback)
        for line in dict.fromkeys(notes_of(target) for target in self.warming.parts.targets):
            if line:
                say(line)
        return attrs.evolve(self.warming, kinds=kinds).run(say)

    def train(self, first: int, last: int, on_step: Callable[[dict[str, Any]], None]) -> int:
        """Run steps [first, last) and hand on each one's row; returns the step to go on with.

        Raises:
            StageFailure: names stage, lane and micro-batch; where memory ran out, also who held it
                and which lines of the schedule lower that.
        """
        epochs: set[int] = set()
        self.watch.begin()

        def finished(step: int, rows: list[dict[str, Any]]) -> None:
            row = rows[0]
            if row["epoch"] not in epochs:
                epochs.add(row["epoch"])
                self.serializer.ensure()
            on_step(row | self.watch.step())

        try:
            return self.scheduler.run(first, last, finished)
        except StageFailure as failure:
            for line in self._documents(failure):
                failure.add(line)
            device = failure.lane.partition("@")[2]
            if failure.exit_code == OutOfMemory.exit_code and device in self.memory.devices:
                failure.advise(self.memory.advice(device))
            raise

    def _documents(self, failure: StageFailure) -> list[str]:
        """A line about the documents that a failed stage was at work on; none where they are told already."""
        graph, batches = self.scheduler.graph, self.warming.parts.plan.train
        known = failure.stage in {stage.name for stage in graph.stages}
        if not known or failure.step is None or isinstance(failure.__cause__, BadStepsInARow):
            return []
        numbers: Sequence[int] = [failure.micro_batch] if failure.micro_batch is not None else []
        if not numbers:
            numbers = range((failure.step - 1) * graph.micro_batches, failure.step * graph.micro_batches)
        return [listed([document for number in numbers for document in batches.document_ids(number)])]

    @property
    def watched(self) -> Watched:
        """What tells how the lanes get on."""
        return self.scheduler

    def request_stop(self) -> None:
        """End when the step under way is done; from any thread."""
        self.scheduler.request_stop()

    def places(self) -> dict[str, Place]:
        """What each lane is at, for any thread that asks."""
        return self.scheduler.places()

    def notices(self) -> list[str]:
        """Tuning and compiling that no warm-up foresaw, in words."""
        return self.watch.notices()

    def drain(self) -> list[dict[str, Any]]:
        """Rows of timings.jsonl that are complete."""
        return self.timings.drain()

    def flush(self) -> list[dict[str, Any]]:
        """The rest of them, waiting for the devices."""
        return self.timings.flush()


def open_run_lanes(parts: TrainingParts, check: Callable[[], None] | None = None) -> RunLanes:
    """Open the lanes, let plugins wrap what runs on them, and give every stage its work.

    Args:
        check: called once the parts are wrapped; what it tunes counts as foreseen.

    Raises:
        InputError: a stage that nobody runs, or a strategy that these devices cannot have.
        EngineError: kernel launches cannot be kept apart with this Triton.
    """
    plan, schedule = parts.plan, parts.plan.schedule
    timings = Timings()
    lanes = open_lanes(plan.graph.lanes, timings)
    for lane in lanes.values():
        lane.traced = schedule.run.nvtx
        lane.links = parts.links
    serializer = Serializer(schedule.serialize.launches)
    serializer.on_out_of_memory = lambda message: _synchronize(lanes)
    serializer.install()
    _wrap(parts, lanes, serializer)
    if check is not None:
        check()
    target_lanes = [lanes[lane.name] for lane in plan.graph.target_lanes]
    drafter_lanes = [lanes[lane.name] for lane in plan.graph.drafter_lanes]
    transfer = plan.host.choose(
        "make_transfer",
        target_lanes=target_lanes,
        drafter_lanes=drafter_lanes,
        parcel_bytes=largest_parcel(parts),
    )
    targets = {lane.name: target for lane, target in zip(target_lanes, parts.targets, strict=True)}
    drafters = {lane.name: part for lane, part in zip(drafter_lanes, parts.drafters, strict=True)}
    own: dict[str, StageWork] = {
        "target-forward": TargetForward(plan.train, targets, serializer),
        "pack": Pack(parts),
        "transfer": Transfer(transfer),
        "drafter-fwd-bwd": DrafterForwardBackward(parts, drafters, serializer),
        "optimizer": Optimizer(parts, drafters),
    }
    works = {stage.name: plan.stages.get(stage.name) or own[stage.name] for stage in schedule.stage}
    scheduler = Scheduler(plan.graph, works, serializer=serializer, timings=timings, lanes=lanes)
    warming = WarmUp(
        parts=parts,
        lanes=lanes,
        serializer=serializer,
        forward=_of(works["target-forward"], TargetForward),
        drafter=_of(works["drafter-fwd-bwd"], DrafterForwardBackward),
    )
    counted = [getattr(getattr(target, "walk", None), "eager", None) for target in targets.values()]
    watch = LaunchWatch(serializer, scheduler.places, [eager for eager in counted if eager is not None])
    return RunLanes(scheduler, timings, serializer, warming, watch, plan.memory)


def notes_of(target: Target) -> str:
    """What wrappers noted about a target, on a line; empty without any."""
    return "; ".join(f"{target.device}: {topic}: {note}" for topic, note in target.notes.items())


def _of(work: StageWork, kind: type[Work]) -> Work | None:
    """A stage's work where it is the engine's own, which can be warmed up."""
    return work if isinstance(work, kind) else None


def _synchronize(lanes: Mapping[str, Lane]) -> None:
    """Let every copy in flight end, so that its memory can be freed."""
    for lane in lanes.values():
        lane.synchronize()


def _wrap(parts: TrainingParts, lanes: Mapping[str, Lane], serializer: Serializer) -> None:
    """Let plugins stand between a lane and its model, for compiling or fusing."""
    host, graph = parts.plan.host, parts.plan.graph
    for rank, spec in enumerate(graph.target_lanes):
        target = parts.targets[rank]
        lane = lanes[spec.name]
        parts.targets[rank] = host.wrap("wrap_target", target, lane=lane, serializer=serializer)
    for rank, spec in enumerate(graph.drafter_lanes):
        part = parts.drafters[rank]
        lane = lanes[spec.name]
        part.drafter = host.wrap("wrap_drafter", part.drafter, lane=lane, serializer=serializer)


def largest_parcel(parts: TrainingParts) -> int:
    """Bytes of the largest parcel of the run, each tensor rounded up to the ring's alignment."""
    plan = parts.plan
    tokens = max(rows * length for rows, length in plan.train.statistics().shapes)
    each = packed_length(tokens) * plan.drafter_config.hidden_size * plan.compute_dtype.itemsize
    return len(plan.drafter_config.target_layer_ids) * (each + PARCEL_ALIGNMENT)
