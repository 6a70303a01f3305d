"""Which stages a schedule runs, on whose lanes, behind which others.

A schedule that names no stage has the five of every DFlash training. One that names some names
them all: five lines more in a file are easier to read than rules for merging. What stands here is
judged by the list alone; cycles, barriers and work that crosses lanes twice are judged by the
graph that is built of it, and whether anybody runs a stage of another name by the plugins.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import attrs

from engine.toml_tables import Bounds
from engine.toml_text import shown

Role = Literal["target", "drafter"]


@attrs.frozen(kw_only=True)
class Stage:
    """[[stage]]: one kind of work, and the lanes that do it."""

    name: str
    """One of the five, or a name that a plugin's `make_stage` answers to."""
    lane: Role
    """The role of the lanes that run it."""
    exclusive: str | None = None
    """Stages with the same word never run at once, on any lane: launching and device work are over
    before the next begins."""
    depth: Annotated[int, Bounds(at_least=1)] | None = None
    """Micro-batches that a drafter lane may have waiting; for the first stage on the drafter's lane.
    Left out: 1."""
    barrier: bool = False
    """Runs once per step, when all its micro-batches are through, on all lanes of the role together."""
    after: tuple[str, ...] | None = None
    """Stages that come before it; left out: the one above it in the list."""

    def table(self) -> dict[str, Any]:
        """As a table of a schedule, without what is left at its default."""
        return attrs.asdict(self, filter=lambda field, value: value != field.default)


DEFAULT_STAGES = (
    Stage(name="target-forward", lane="target", exclusive="target-forward"),
    Stage(name="pack", lane="target"),
    Stage(name="transfer", lane="drafter", depth=1),
    Stage(name="drafter-fwd-bwd", lane="drafter"),
    Stage(name="optimizer", lane="drafter", barrier=True),
)
"""The five stages of every training, as they run where a schedule names none."""


def predecessors(stages: Sequence[Stage]) -> dict[str, tuple[str, ...]]:
    """What each stage comes after, by name, with the stage above it where `after` was left out."""
    above = [(), *((stage.name,) for stage in stages)]
    return {
        stage.name: before if stage.after is None else stage.after
        for stage, before in zip(stages, above, strict=False)
    }


def credit_depth(stages: Sequence[Stage]) -> int:
    """How many micro-batches a drafter lane may have waiting."""
    return next((stage.depth or 1 for stage in stages if stage.lane == "drafter"), 1)


def stage_problems(stages: Sequence[Stage]) -> Iterator[str]:
    """What is wrong with a list of stages, one problem a line."""
    misnamed = list(_misnamed(stages))
    disorder = None if misnamed else _disorder(stages)
    yield from misnamed
    if disorder:
        yield disorder
    else:  # or a depth that seems misplaced would be its consequence
        entry = next((stage.name for stage in stages if stage.lane == "drafter"), None)
        for index, stage in enumerate(stages):
            if stage.depth is not None and stage.name != entry:
                yield (
                    f"stage[{index}].depth = {stage.depth}: {stage.name} takes nothing from another lane; "
                    f"give the depth to the first stage on the drafter's lane, {shown(entry or 'transfer')}"
                )
    for default in DEFAULT_STAGES:
        given = [(index, stage) for index, stage in enumerate(stages) if stage.name == default.name]
        if not given:
            yield (
                f"stage: {shown(default.name)} is missing; a schedule that names stages names all of "
                f"{', '.join(stage.name for stage in DEFAULT_STAGES)}"
            )
        for index, stage in given:
            if stage.lane != default.lane:
                yield (
                    f"stage[{index}].lane = {shown(stage.lane)}: {stage.name} runs on "
                    f"{default.lane} lanes, where its model is"
                )
            if stage.barrier != default.barrier:
                yield (
                    f"stage[{index}].barrier = {shown(stage.barrier)}: {stage.name} runs once per "
                    f"{'step' if default.barrier else 'micro-batch'}; write {shown(default.barrier)}"
                )


def _misnamed(stages: Sequence[Stage]) -> Iterator[str]:
    """Stages that are there twice, and predecessors that are not there."""
    names = [stage.name for stage in stages]
    for index, stage in enumerate(stages):
        key = f"stage[{index}]"
        if stage.name in names[:index]:
            yield f"{key}.name = {shown(stage.name)}: stands there twice; a stage runs once per micro-batch"
        for before in stage.after or ():
            if before == stage.name:
                yield f"{key}.after = {shown(stage.after)}: a stage cannot come after itself"
            elif before not in names:
                yield f"{key}.after = {shown(stage.after)}: no stage {shown(before)}{_nearest(before, names)}"


def _disorder(stages: Sequence[Stage]) -> str | None:
    """The first two of the five that run in the wrong order, in words; None where all are in order."""
    before = predecessors(stages)
    five = [stage.name for stage in DEFAULT_STAGES]
    for earlier, later in zip(five, five[1:], strict=False):
        if earlier not in before or later not in before or earlier in _ancestors(later, before):
            continue
        index = [stage.name for stage in stages].index(later)
        return (
            f"stage[{index}].name = {shown(later)}: it does not come after {shown(earlier)}, whose result it "
            f"takes; the five run in the order {', '.join(five)}, others between them"
        )
    return None


def _ancestors(name: str, before: Mapping[str, tuple[str, ...]]) -> set[str]:
    found: set[str] = set()
    ahead = [*before.get(name, ())]
    while ahead:
        stage = ahead.pop()
        if stage not in found:
            found.add(stage)
            ahead += before.get(stage, ())
    return found


def _nearest(name: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {shown(nearest[0])}?" if nearest else f"; there are {', '.join(names)}"
