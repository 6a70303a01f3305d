"""Whether two threads may launch one autotuned kernel at the same time, found out by letting two do it.

Triton's autotuner keeps the arguments of the current launch on an object that all threads share, and
forgets them when any launch ends. So: one thread tunes a new key, and while its benchmark runs,
another launches a key that is tuned already. Unprotected, the first one then finds its arguments
gone, every time and on every release so far; no luck of thread switching enters. The class that
runs is Triton's own, around a kernel that does nothing, so neither a GPU nor a compiler is needed.
Protected, it is over in a few milliseconds.
"""

import threading
from collections.abc import Callable
from typing import Any

from engine.errors import EngineError

THREADS = "race-probe"
"""What the names of the probe's threads begin with; its launches are nobody's."""

PATIENCE_S = 30.0


class _Kernel:
    """The least that the autotuner takes for a kernel."""

    arg_names = ("x", "n", "BLOCK")

    def __init__(self) -> None:
        self.fn = _nothing

    def run(self, *arguments: Any, **options: Any) -> None:
        pass


def _nothing(x: Any, n: Any, BLOCK: Any) -> None:
    pass


def probe(timeout: float = 0.2) -> BaseException | None:
    """Let two threads race on Triton's autotuner as it is now.

    Args:
        timeout: seconds that the tuning thread waits, in its benchmark, for the other one's launch. A
            serializer that keeps whole launches apart makes it wait that long; every other ends at once.

    Returns:
        What one of the threads died of; None when such launches are safe.

    Raises:
        EngineError: a launch fails with no other beside it, so that a race would show nothing.
        ImportError: there is no Triton.
    """
    import triton
    from triton.runtime.autotuner import Autotuner, Config

    benchmarking, launched = threading.Event(), threading.Event()
    racing = False

    def benchmark(call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        if racing and not benchmarking.is_set():
            benchmarking.set()
            launched.wait(timeout)
        return [1.0, 1.0, 1.0]

    def tuner() -> Any:
        kernel = _Kernel()
        configs = [Config({"BLOCK": block}) for block in (16, 32, 64)]
        made = Autotuner(kernel, kernel.arg_names, configs, ["n"], None, None, do_bench=benchmark)
        made.cache_results = False  # a result read from disk would be no benchmark
        return made

    def tune() -> None:
        try:
            shared.run(x=0, n=2, grid=(1,))
        finally:
            benchmarking.set()

    def launch() -> None:
        benchmarking.wait(PATIENCE_S)
        try:
            shared.run(x=0, n=1, grid=(1,))
        finally:
            launched.set()

    shared: Any = None
    try:
        shared = tuner()
        alone = _together(lambda: shared.run(x=0, n=1, grid=(1,)))
    except (TypeError, AttributeError) as error:
        alone = error
    if alone is not None:
        raise EngineError(
            f"the race probe does not fit Triton {triton.__version__}: one launch alone already fails with "
            f"{type(alone).__name__}: {alone}; install a Triton of 3.6 to 3.9"
        ) from alone
    racing = True
    return _together(tune, launch)


def _together(*calls: Callable[[], None]) -> BaseException | None:
    """Run each in a thread of its own; returns the first thing that one of them raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # whatever it is, it is the finding
            raised.append(error)

    threads = [
        threading.Thread(target=run, args=(call,), name=f"{THREADS}-{number}", daemon=True)
        for number, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if not raised and any(thread.is_alive() for thread in threads):
        return TimeoutError(f"two launches wait for each other since {PATIENCE_S:g} s")
    return raised[0] if raised else None
