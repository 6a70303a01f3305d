"""Several lanes at work at once for a while, each in a thread of its own: what they cost one another.

A run's lanes go through the scheduler. What is compared here needs no stages: the same calls by one lane
alone and by several together, from a common start.
"""

import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import EngineError
from engine.runtime.failure import Place, StageFailure
from engine.runtime.lane import Lane

START_S = 600.0
"""For as long a lane waits for the others to be ready."""


def side_by_side(works: Mapping[Lane, Callable[[], Any]], stage: str) -> dict[Lane, Any]:
    """Call each lane's work in a thread of that lane, all from the same moment on; what they returned.

    Args:
        stage: how a failure calls it.

    Raises:
        StageFailure: of the first lane that failed; the others were waited for.
        EngineError: a lane came to no end that it could tell of.
    """
    start = threading.Barrier(len(works))
    results: dict[Lane, Any] = {}
    failures: list[tuple[Lane, BaseException]] = []

    def worker(lane: Lane, work: Callable[[], Any]) -> None:
        try:
            with lane.active():
                start.wait(START_S)
                results[lane] = work()
                lane.synchronize()
        except BaseException as error:  # whatever it was, it belongs to the caller
            failures.append((lane, error))
            start.abort()
        finally:
            lane.abandon_spans()

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(worker, lane, work), name=lane.name, daemon=True
        )
        for lane, work in works.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        lane, error = failures[0]
        raise StageFailure(Place(stage=stage), lane.name, error, {}) from error
    if missing := [lane.name for lane in works if lane not in results]:
        raise EngineError(f"{stage}: the threads of {', '.join(missing)} ended before their work was done")
    return results
