"""The target's forward as CUDA graphs, one per shape: a forward costs Python one launch instead of thousands.

It pays where Python is what lanes wait for: many lanes in one process, small micro-batches, few cores. At
8,192 tokens a single GPU computes for longer than its launches take, and gains nothing.

Shapes are recorded while the run warms up, the largest first, which are those of the full micro-batches.
What does not fit under `shapes` or `memory_gb`, or was not foreseen, runs as it did without this plugin, and
is counted in metrics.jsonl as `eager_forwards`. Every graph is compared with the forward that it stands for
when it is recorded, bit for bit. It wraps whatever was wrapped before, so name it last.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated

import attrs
import torch
from torch import Tensor

from engine.errors import DifferenceFound
from engine.hookspecs import hookimpl
from engine.memory_sizes import TargetMemory
from engine.runtime.graph_capture import CapturedCall, LaneGraphs
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.target.loading import Target
from engine.toml_tables import Bounds

Shape = tuple[int, int]

KEEPS_NUMBERS = True
"""But for rounding; so a run may go on with it or without it."""


@attrs.frozen(kw_only=True)
class Options:
    """How much is recorded, by each target lane."""

    shapes: Annotated[int, Bounds(at_least=1)] = 32
    """Most shapes, (rows, length); a run prints how many it has."""
    memory_gb: Annotated[float, Bounds(above=0)] | None = None
    """No more is recorded once a lane's graphs take so many 10^9 bytes, which the first may do already. Left
    out: as much as they need, about what one forward of the largest shape holds."""


@attrs.define(eq=False)
class GraphWalk:
    """Stands in for a target's forward on one lane."""

    inner: Target
    lane: Lane
    serializer: Serializer
    options: Options
    graphs: LaneGraphs
    captured: dict[Shape, CapturedCall] = attrs.field(factory=dict)
    eager: Counter[Shape] = attrs.field(factory=Counter)
    """Forwards that were not replays, by shape, preparing left out."""

    def __call__(self, input_ids: Tensor) -> list[Tensor]:
        shape = (input_ids.shape[0], input_ids.shape[1])
        captured = self.captured.get(shape)
        if captured is None:
            self.eager[shape] += 1
            return self.inner.forward_taps(input_ids)
        return captured.replay(input_ids)

    def prepare(self, rows: int, length: int) -> None:
        """Record the forward of a shape, after it was tuned and compiled; on the lane, in a warm-up.

        Raises:
            DifferenceFound: the graph's taps have other bits than the forward's.
            EngineError: the forward cannot be recorded.
        """
        shape = (rows, length)
        if shape in self.captured:
            return
        # No other lane compiles between the first call, which may, and the recording.
        with self.serializer.compiling(self.lane):
            ids, others = (self._random_ids(shape) for _ in range(2))
            taps = self.inner.forward_taps(ids)
            if len(self.captured) >= self.options.shapes or self._full():
                return
            expected = self.inner.forward_taps(others)
            what = f"the target's forward of {rows} × {length} tokens on {self.lane.name}"
            captured = self.graphs.capture(self.inner.forward_taps, ids, taps, what)
            captured.spoil()
            _check_bits(what, captured.replay(others), expected, self.inner.forward_taps, others)
        self.captured[shape] = captured

    def _full(self) -> bool:
        most = self.options.memory_gb
        return most is not None and self.graphs.bytes >= most * 1e9

    def _random_ids(self, shape: Shape) -> Tensor:
        return torch.randint(0, self.inner.summary.vocab_size, shape, device=self.lane.device)

    def kernels(self) -> Mapping[str, str]:
        inner = {} if self.inner.walk is None else self.inner.walk.kernels()
        held = f"{len(self.captured)} shapes, {self.graphs.bytes / 1e9:.1f} GB"
        return {**inner, "graphs": f"{held} on {self.lane.name}"}


def _check_bits(
    what: str,
    replayed: list[Tensor],
    expected: list[Tensor],
    forward: Callable[[Tensor], list[Tensor]],
    ids: Tensor,
) -> None:
    different = [tap for tap, pair in enumerate(zip(replayed, expected, strict=True)) if not _same(*pair)]
    if not different:
        return
    again = all(_same(one, other) for one, other in zip(forward(ids), expected, strict=True))
    cause = (
        "the forward itself gives the same bits every time, so a kernel cannot be recorded"
        if again
        else "but the forward itself gives other bits each time: some kernel of it is not deterministic"
    )
    raise DifferenceFound(
        f"{what}, recorded as a CUDA graph, has other bits than as it is in tap {different[0]}: {cause}; "
        "leave plugins.graph_target out"
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class GraphTarget:
    def __init__(self, options: Options) -> None:
        self.options = options

    @hookimpl
    def wrap_target(self, target: Target, lane: Lane, serializer: Serializer) -> Target:
        if lane.device.type != "cuda":
            note = f"not used: {lane.device} has no CUDA graphs"
            return attrs.evolve(target, notes={**target.notes, "graph_target": note})
        walk = GraphWalk(target, lane, serializer, self.options, LaneGraphs(lane, serializer))
        return attrs.evolve(target, walk=walk)

    @hookimpl
    def wrap_target_memory(self, memory: TargetMemory, device: torch.device) -> TargetMemory | None:
        if device.type != "cuda":
            return None
        # The largest shape comes first and later ones share its memory, so a bound cuts off none of it.
        return attrs.evolve(memory, recorded=memory.recorded + memory.forward)


def make(options: Options) -> GraphTarget:
    return GraphTarget(options)
