"""One lane at work while all others are idle: what is to be done before a run, on the run's own threads.

Compilers and tuners remember things per thread and per stream, so what they are to have ready is run
where the run will ask for it: in a thread named and set up as the lane's worker will be.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence

from engine.errors import EngineError
from engine.runtime.failure import Place, StageFailure, held_at
from engine.runtime.lane import Lane


def run_alone(lane: Lane, stage: str, work: Callable[[], None], lanes: Sequence[Lane]) -> None:
    """Call `work` in a thread of the lane and wait until its device is through.

    Args:
        stage: how a failure calls it.
        lanes: all of the run's, to tell who holds memory where it runs out.

    Raises:
        StageFailure: what `work` raised is its cause.
        EngineError: the thread came to no end that it could tell of.
    """
    failures: list[BaseException] = []
    held: list[str] = []
    finished = threading.Event()

    def worker() -> None:
        try:
            with lane.active():
                work()
                lane.synchronize()
            finished.set()
        except BaseException as error:  # whatever it was, it belongs to the caller
            failures.append(error)
            held.extend(held_at(error, lanes))
        finally:
            lane.abandon_spans()

    # As the scheduler's threads: in a copy of this context, by the lane's name.
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(worker,), name=lane.name, daemon=True
    )
    thread.start()
    thread.join()
    if failures:
        raise StageFailure(Place(stage=stage), lane.name, failures[0], {}, held) from failures[0]
    if not finished.is_set():
        raise EngineError(f"{stage} on {lane.name}: its thread ended before the work was done")
