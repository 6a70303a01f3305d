"""Tuning and compiling that a step should not have needed: counted for metrics, told to the log.

After the warm-up every kernel is tuned and every row length compiled. A key that is cold all the same
costs seconds with all other lanes waiting, so it is named with the stage and the micro-batch that
brought it; a hole in the warm-up or a shape that no plan foresaw shows here first.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from engine.runtime.failure import Place
from engine.runtime.launch_state import ColdKey
from engine.runtime.serializer import Serializer


class LaunchWatch:
    """Figures and lines of a stretch of steps; lanes add, the main thread takes."""

    def __init__(
        self,
        serializer: Serializer,
        places: Callable[[], Mapping[str, Place]],
        eager_forwards: Sequence[Counter[tuple[int, int]]] = (),
    ) -> None:
        """
        Args:
            places: what each lane is at.
            eager_forwards: of each target that keeps CUDA graphs, the forwards for which it had none, by
                shape; a lane counts them up.
        """
        self._serializer = serializer
        self._places = places
        self._eager_forwards = eager_forwards
        self._notices: deque[str] = deque()
        serializer.on_cold = self._cold
        self._keys, self._graphs = 0, 0
        self._eager: Counter[tuple[int, int]] = Counter()
        self.begin()

    def begin(self) -> None:
        """Count from here on: what came before, a warm-up or an evaluation, belongs to no step."""
        self._keys = self._serializer.counts().cold_keys
        self._graphs = graphs_compiled()
        self._eager = sum((counted.copy() for counted in self._eager_forwards), Counter())

    def _cold(self, cold: ColdKey) -> None:
        place = self._places().get(cold.thread)
        where = f"{place} on {cold.thread}" if place else cold.thread
        self._notices.append(
            f"tuned {cold.kernel} {cold.key} in {cold.seconds:.1f} s, unforeseen, at {where}"
        )

    def step(self) -> dict[str, int]:
        """`cold_keys` and `recompiles` since the last call, for a row of metrics.jsonl.

        With targets that keep CUDA graphs, `eager_forwards` too.
        """
        keys, graphs, eager = self._keys, self._graphs, self._eager
        self.begin()
        if self._graphs > graphs:
            self._notices.append(f"compiled {self._graphs - graphs} graphs, unforeseen")
        row = {"cold_keys": self._keys - keys, "recompiles": self._graphs - graphs}
        if not self._eager_forwards:
            return row
        new = self._eager - eager
        if new:
            shapes = ", ".join(f"{rows} × {length}" for rows, length in sorted(new))
            self._notices.append(f"{new.total()} target forwards without a graph, of {shapes} tokens")
        return row | {"eager_forwards": new.total()}

    def notices(self) -> list[str]:
        """Lines that came up since the last call."""
        lines = []
        while self._notices:
            lines.append(self._notices.popleft())
        return lines


def graphs_compiled() -> int:
    """Graphs that torch.compile has traced in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds, and not there means none
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
