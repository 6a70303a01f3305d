"""What bounds a run: the lanes with the most to do, and the stage that keeps them.

The largest busy share alone misleads twice. Target lanes may be 70 % in one stage while drafter
lanes, with two stages of 50 %, have no time left: so roles are compared before stages. And lanes
that take turns in an exclusive stage are each idle most of the time, while the stage itself never
rests: so a stage that never ran on two lanes at once counts like a lane of its own.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from engine.timing_rows import Spans

ROLE_ORDER = ("target", "drafter")
NEVER_TOGETHER = 1.01
"""Lanes took turns in a stage when their times add up to no more than this times their union."""

Array = NDArray[np.float64]


@attrs.frozen(kw_only=True)
class Bound:
    """What the run's speed hangs on.

    The load of a role is the mean busy share of its lanes; or, where that is more, the share of the
    wall time in which any of its lanes was in a stage that its lanes took turns in.
    """

    role: str
    lanes: int
    load: float
    stage: str
    """The role's largest stage, or the one in which its lanes took turns."""
    stage_share: float
    """That stage's share of the wall time: mean over the lanes, or of any lane where they took turns."""
    in_turns: bool
    next: str | None
    """What has the next load: another role, or in a run of one role the next stage; None without either."""
    next_load: float
    margin: float
    """Between the two, as a share of the wall time: of loads, or in a run of one role of its stages."""

    def sentence(self) -> str:
        """What bounds the run, by how much, and what was computed."""
        lanes = f"the {self.lanes} {self.role} lanes" if self.lanes > 1 else f"the {self.role} lane"
        are = "are" if self.lanes > 1 else "is"
        if self.in_turns:
            text = f"{lanes} took turns in it, and one of them was in it {self.load:.1%} of the wall time"
        else:
            on_average = " on average" if self.lanes > 1 else ""
            text = f"{lanes} {are} busy {self.load:.1%} of the wall time{on_average}"
            text += f", {self.stage_share:.1%} in this stage"
        if self.next is not None:
            text += f"; next is {self.next} with {self.next_load:.1%}, {100 * self.margin:.1f} points less"
        return f"bound by {self.stage}: {text}"


@attrs.frozen
class Shares:
    """Measures intervals in unix seconds against the window [begin, begin + wall]."""

    begin: float
    wall: float

    def union(self, start: Array, end: Array) -> float:
        """Share of the wall time that the intervals cover; what lies outside is cut off."""
        if not start.size:
            return 0.0
        # Relative to the window, where a double resolves far less than the microsecond of unix seconds.
        low, high = (np.clip(side - self.begin, 0, self.wall) for side in (start, end))
        return min(1.0, union_length(low, high) / self.wall)


def union_length(start: Array, end: Array) -> float:
    """Length of the union of the intervals [start, end]."""
    order = np.argsort(start, kind="stable")  # quick on rows that are nearly in order, as these are
    start = start[order]
    reached = np.maximum.accumulate(end[order])
    before = np.concatenate(([-math.inf], reached[:-1]))
    return float(np.clip(reached - np.maximum(start, before), 0, None).sum())


def find_bound(whole: Spans, share: Shares, busy: Mapping[str, float]) -> Bound:
    """Compare roles, then the stages of the one with the most to do.

    Args:
        whole: spans of stages, without parts.
        busy: busy share of each lane, by name.
    """
    lane_role = np.array([role_of(lane) for lane in whole.lanes])
    roles = sorted({role_of(lane) for lane in busy}, key=lane_key)
    bounds = [
        _bound_within(
            whole.where((lane_role == role)[whole.lane]),
            share,
            role,
            [load for lane, load in busy.items() if role_of(lane) == role],
        )
        for role in roles
    ]
    bounds.sort(key=lambda bound: bound.load, reverse=True)
    if len(bounds) == 1:
        return bounds[0]
    first, second = bounds[:2]
    return attrs.evolve(
        first,
        next=f"the {second.role} lanes" if second.lanes > 1 else f"the {second.role} lane",
        next_load=second.load,
        margin=first.load - second.load,
    )


def _bound_within(spans: Spans, share: Shares, role: str, busy: Sequence[float]) -> Bound:
    """The bound among the stages of one role."""
    load, in_turns = sum(busy) / len(busy), False
    by_stage: dict[int, list[float]] = {}
    for stage, _, members in spans.groups():
        group = spans.where(members)
        by_stage.setdefault(stage, []).append(share.union(group.start, group.end))
    means = {stage: sum(shares) / len(busy) for stage, shares in by_stage.items()}
    largest = max(means, key=means.__getitem__)
    for stage, shares in by_stage.items():
        group = spans.where(spans.stage == stage)
        of_any = share.union(group.start, group.end)
        if len(shares) > 1 and sum(shares) <= NEVER_TOGETHER * of_any and of_any > load:
            load, largest, in_turns = of_any, stage, True
    stage_share = load if in_turns else means.pop(largest)
    means.pop(largest, None)
    following = max(means, key=means.__getitem__, default=None)
    next_load = means[following] if following is not None else 0.0
    return Bound(
        role=role,
        lanes=len(busy),
        load=load,
        stage=spans.stages[largest],
        stage_share=stage_share,
        in_turns=in_turns,
        next=None if following is None else spans.stages[following],
        next_load=next_load,
        margin=stage_share - next_load,
    )


def lane_key(lane: str) -> tuple[Any, ...]:
    """Sorts targets before drafters before the rest, and lane 2 before lane 10."""
    role = role_of(lane)
    place = ROLE_ORDER.index(role) if role in ROLE_ORDER else len(ROLE_ORDER)
    return (place, *(part.zfill(12) if part.isdecimal() else part for part in re.split(r"(\d+)", lane)))


def role_of(lane: str) -> str:
    """`target` of `target.0@cuda:0`; a name without an index is a role by itself."""
    return lane.partition(".")[0]
