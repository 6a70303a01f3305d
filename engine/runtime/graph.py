"""What runs where: stages in an order, lanes of two roles, and which lane gets which micro-batch.

Work crosses once, from target lanes to drafter lanes, and ends each step in one barrier stage that
all drafter lanes run. Micro-batch `i` belongs to target lane `i mod N` and to drafter lane
`(i mod m) mod M`, where a step has `m` micro-batches: a static assignment, so that neither thread
timing nor a resume changes who computes what. Everything that can be wrong with a graph is found
here, before a thread is started.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import attrs

from engine.errors import ScheduleError

Role = Literal["target", "drafter"]
ROLES: tuple[Role, ...] = get_args(Role)
DEFAULT_DEPTH = 1


class GraphError(ScheduleError):
    """Stages and lanes that do not make a graph which can run."""


@attrs.frozen
class StageSpec:
    """One kind of work and its place."""

    name: str
    role: Role
    after: tuple[str, ...] = ()
    """Names of the stages that come before it, for the same micro-batch."""
    exclusive: str | None = None
    """Stages with the same word never run at once, on any lanes, launching and device work included."""
    barrier: bool = False
    """Run once a step by every drafter lane, when its micro-batches of that step are through."""
    depth: int | None = None
    """How many micro-batches a drafter lane may have waiting; one stage of the drafters may say so."""


@attrs.frozen
class LaneSpec:
    """A worker thread's place: its role, its number within the role, its device."""

    role: Role
    index: int
    device: str

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}@{self.device}"


@attrs.frozen(kw_only=True)
class Graph:
    """A graph that can run; made by `build_graph`."""

    stages: tuple[StageSpec, ...]
    """In the order in which a micro-batch meets them; the barrier is the last."""
    target_lanes: tuple[LaneSpec, ...]
    drafter_lanes: tuple[LaneSpec, ...]
    micro_batches: int
    """Per step, over all drafter lanes."""
    depth: int

    @property
    def lanes(self) -> tuple[LaneSpec, ...]:
        return self.target_lanes + self.drafter_lanes

    @property
    def target_stages(self) -> tuple[StageSpec, ...]:
        return tuple(stage for stage in self.stages if stage.role == "target")

    @property
    def drafter_stages(self) -> tuple[StageSpec, ...]:
        """The drafters' stages per micro-batch, without the barrier."""
        return tuple(stage for stage in self.stages if stage.role == "drafter" and not stage.barrier)

    @property
    def barrier(self) -> StageSpec:
        return self.stages[-1]

    def step_of(self, micro_batch: int) -> int:
        return micro_batch // self.micro_batches

    def target_lane_of(self, micro_batch: int) -> LaneSpec:
        return self.target_lanes[micro_batch % len(self.target_lanes)]

    def drafter_lane_of(self, micro_batch: int) -> LaneSpec:
        return self.drafter_lanes[micro_batch % self.micro_batches % len(self.drafter_lanes)]

    def micro_batches_of(self, lane: LaneSpec, first_step: int, last_step: int) -> list[int]:
        """The micro-batches of a lane in steps [first_step, last_step), ascending."""
        owner = self.target_lane_of if lane.role == "target" else self.drafter_lane_of
        numbers = range(first_step * self.micro_batches, last_step * self.micro_batches)
        return [number for number in numbers if owner(number) == lane]


def build_graph(stages: Sequence[StageSpec], lanes: Sequence[LaneSpec], micro_batches: int) -> Graph:
    """Check stages and lanes and bring the stages into order.

    Args:
        stages: in the order in which they were written; it decides wherever `after` leaves it open.
        lanes: target and drafter lanes, in any order; within a role their order counts.
        micro_batches: per step, over all drafter lanes.

    Raises:
        GraphError: what cannot run, one problem a line.
    """
    problems = [*_stage_problems(stages), *_lane_problems(lanes, micro_batches)]
    if problems:
        raise GraphError("\n".join(problems))
    ordered = _in_order(stages)
    problems = [*_crossing_problems(ordered), *_barrier_problems(ordered)]
    if problems:
        raise GraphError("\n".join(problems))
    depths = [stage.depth for stage in ordered if stage.depth is not None]
    return Graph(
        stages=tuple(ordered),
        target_lanes=tuple(lane for lane in lanes if lane.role == "target"),
        drafter_lanes=tuple(lane for lane in lanes if lane.role == "drafter"),
        micro_batches=micro_batches,
        depth=depths[0] if depths else DEFAULT_DEPTH,
    )


def _stage_problems(stages: Sequence[StageSpec]) -> Iterator[str]:
    names = Counter(stage.name for stage in stages)
    for name, count in names.items():
        if count > 1:
            yield f"stage {name}: named {count} times; a stage stands in a schedule once"
    for stage in stages:
        if stage.role not in ROLES:
            yield f'stage {stage.name}: lane = "{stage.role}" is unknown; lanes are {" and ".join(ROLES)}'
        for name in stage.after:
            if name not in names:
                yield f"stage {stage.name}: comes after {name}, and there is no such stage; {_known(names)}"
        if stage.depth is not None and stage.depth < 1:
            yield (
                f"stage {stage.name}: depth = {stage.depth}; a drafter lane must be able to have a "
                "micro-batch waiting, so at least 1"
            )
        elif stage.depth is not None and (stage.role != "drafter" or stage.barrier):
            yield (
                f"stage {stage.name}: depth says how many micro-batches wait for a drafter lane; "
                "write it at a drafter stage that is no barrier"
            )
    deep = [stage.name for stage in stages if stage.depth is not None]
    if len(deep) > 1:
        yield f"stages {', '.join(deep)}: each has a depth, and a drafter lane has one inbox; keep one"
    for role in ROLES:
        if not any(stage.role == role and not stage.barrier for stage in stages):
            yield f"no stage per micro-batch runs on the {role} lanes; {_known(names)}"


def _known(names: Counter[str]) -> str:
    return f"there are {', '.join(names) or 'none'}"


def _lane_problems(lanes: Sequence[LaneSpec], micro_batches: int) -> Iterator[str]:
    if micro_batches < 1:
        yield f"micro_batches = {micro_batches}: a step has at least one"
    for lane in lanes:
        if lane.role not in ROLES:
            yield f'lane {lane.name}: role "{lane.role}" is unknown; roles are {" and ".join(ROLES)}'
    for (kind, index), count in Counter((lane.role, lane.index) for lane in lanes).items():
        if count > 1:
            yield f"lane {kind}.{index}: named {count} times; number the lanes of a role"
    for role in ROLES:
        if not any(lane.role == role for lane in lanes):
            yield f"no {role} lane: name a device for it"
    drafters = sum(lane.role == "drafter" for lane in lanes)
    if drafters > micro_batches >= 1:
        yield (
            f"{drafters} drafter lanes share {micro_batches} micro-batches per step, so some would idle; "
            "name fewer devices or raise micro_batches"
        )


def _in_order(stages: Sequence[StageSpec]) -> list[StageSpec]:
    """Topological order; among stages that are free, targets first, barriers last, then as written."""
    ranks = {
        stage.name: (stage.role != "target", stage.barrier, number) for number, stage in enumerate(stages)
    }
    by_name = {stage.name: stage for stage in stages}
    missing = {stage.name: set(stage.after) for stage in stages}
    free = [(ranks[name], name) for name, before in missing.items() if not before]
    heapq.heapify(free)
    ordered = []
    while free:
        _, done = heapq.heappop(free)
        ordered.append(by_name[done])
        for name, before in missing.items():
            if done in before:
                before.remove(done)
                if not before:
                    heapq.heappush(free, (ranks[name], name))
    if len(ordered) < len(stages):
        circle = _a_cycle({name: before for name, before in missing.items() if before})
        raise GraphError(
            f"stages {' → '.join(circle)} wait for each other; take one `after` out of the cycle"
        )
    return ordered


def _a_cycle(missing: dict[str, set[str]]) -> list[str]:
    """One cycle, from a stage back to itself, in the order of the flow."""
    path = [min(missing)]
    while path[-1] not in path[:-1]:
        path.append(min(name for name in missing[path[-1]] if name in missing))
    return path[path.index(path[-1]) :][::-1]


def _crossing_problems(ordered: Sequence[StageSpec]) -> Iterator[str]:
    by_name = {stage.name: stage for stage in ordered}
    for stage in ordered:
        for name in stage.after:
            if stage.role == "target" and by_name[name].role == "drafter":
                yield (
                    f"stage {stage.name} runs on the target lanes after {name} on the drafter lanes; "
                    "work crosses from targets to drafters once"
                )


def _barrier_problems(ordered: Sequence[StageSpec]) -> Iterator[str]:
    barriers = [stage for stage in ordered if stage.barrier]
    if len(barriers) != 1:
        found = ", ".join(stage.name for stage in barriers) or "none"
        yield f"barrier stages: {found}; a step ends in exactly one (barrier = true, as at optimizer)"
    for barrier in barriers:
        if barrier.role != "drafter":
            yield f'stage {barrier.name}: a barrier holds the drafter lanes together; write lane = "drafter"'
        if barrier.exclusive is not None:
            yield (
                f"stage {barrier.name}: all drafter lanes run a barrier together, so "
                f'exclusive = "{barrier.exclusive}" would stop it for good; take it out'
            )
        for stage in ordered:
            if barrier.name in stage.after:
                yield f"stage {stage.name} comes after the barrier {barrier.name}, which must be the last"
