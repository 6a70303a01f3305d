"""Tuning and compiling that a step should not have needed: counted for metrics, told to the log.

After the warm-up every kernel is tuned and every row length compiled. A key that is cold all the same
costs seconds with all other lanes waiting, so it is named with the stage and the micro-batch that
brought it; a hole in the warm-up or a shape that no plan foresaw shows here first.
"""

import sys
from collections import deque
from collections.abc import Callable, Mapping

from engine.runtime.failure import Place
from engine.runtime.launch_state import ColdKey
from engine.runtime.serializer import Serializer


class LaunchWatch:
    """Figures and lines of a stretch of steps; lanes add, the main thread takes."""

    def __init__(self, serializer: Serializer, places: Callable[[], Mapping[str, Place]]) -> None:
        """
        Args:
            places: what each lane is at.
        """
        self._serializer = serializer
        self._places = places
        self._notices: deque[str] = deque()
        serializer.on_cold = self._cold
        self._keys, self._graphs = 0, 0
        self.begin()

    def begin(self) -> None:
        """Count from here on: what came before, a warm-up or an evaluation, belongs to no step."""
        self._keys = self._serializer.counts().cold_keys
        self._graphs = graphs_compiled()

    def _cold(self, cold: ColdKey) -> None:
        place = self._places().get(cold.thread)
        where = f"{place} on {cold.thread}" if place else cold.thread
        self._notices.append(
            f"tuned {cold.kernel} {cold.key} in {cold.seconds:.1f} s, unforeseen, at {where}"
        )

    def step(self) -> dict[str, int]:
        """`cold_keys` and `recompiles` since the last call, for a row of metrics.jsonl."""
        keys, graphs = self._keys, self._graphs
        self.begin()
        if self._graphs > graphs:
            self._notices.append(f"compiled {self._graphs - graphs} graphs, unforeseen")
        return {"cold_keys": self._keys - keys, "recompiles": self._graphs - graphs}

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
