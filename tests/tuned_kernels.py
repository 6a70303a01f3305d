"""Triton's own autotuner around kernels that compute nothing, and threads that launch them together."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner, Config


def scale(x, y, n, BLOCK):
    """What the autotuner takes a kernel's name from."""


class Kernel:
    """Stands where a compiled function does; `body` gets the arguments of all launches and benchmarks."""

    arg_names = ("x", "y", "n", "BLOCK")

    def __init__(self, body: Callable[..., Any] | None = None) -> None:
        self.fn = scale
        self.body = body

    def run(self, x, y, n, BLOCK, **options):
        if self.body is not None:
            self.body(x, y, n)


def one_call(call: Callable[[], None], quantiles: Any) -> list[float]:
    """A benchmark."""
    call()
    return [1.0, 1.0, 1.0]


def tuner(
    body: Callable[..., Any] | None = None,
    *,
    benchmark: Callable[..., list[float]] = one_call,
    kind: type = Autotuner,
    restore: list[str] | None = None,
    warm: tuple[int, ...] = (),
    **options: Any,
) -> Any:
    """An autotuner with three configurations and the key `n`; `warm` are values of `n` that are tuned."""
    configs = [Config({"BLOCK": block}) for block in (16, 32, 64)]
    made = kind(Kernel(body), Kernel.arg_names, configs, ["n"], None, restore, do_bench=benchmark, **options)
    made.cache_results = False
    for n in warm:
        made.cache[(n,)] = configs[0]
    return made


@triton.autotune(configs=[Config({"BLOCK": block}) for block in (16, 32, 64)], key=["n"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def add_one(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """A real function, for the stub driver."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) + 1, mask=offsets < n)


def together(*works: Callable[[], Any], patience: float = 30.0) -> list[BaseException]:
    """Run each in its own thread, all at once; returns what they raised. They must come to an end."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        try:
            start.wait(patience)
            work()
        except BaseException as error:
            raised.append(error)

    threads = [
        threading.Thread(target=run, args=(work,), name=f"worker-{number}", daemon=True)
        for number, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return raised


def race(make: Callable[..., Any], patience: float = 0.2) -> list[BaseException]:
    """One thread tunes a key while another launches one that is tuned; returns what they died of.

    `make(benchmark=…, warm=(1,))` makes the kernel, or hands one out that was there before.
    """
    benchmarking, launched = threading.Event(), threading.Event()

    def benchmark(call, quantiles):
        call()
        if not benchmarking.is_set():
            benchmarking.set()
            launched.wait(patience)
        return [1.0, 1.0, 1.0]

    kernel = make(benchmark=benchmark, warm=(1,))

    def tune():
        try:
            kernel.run(0, 0, 2, grid=(1,))
        finally:
            benchmarking.set()

    def launch():
        benchmarking.wait(30)
        try:
            kernel.run(0, 0, 1, grid=(1,))
        finally:
            launched.set()

    return together(tune, launch)


@contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """How long a thread keeps the interpreter while others want it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
