"""Kernels that count their benchmarks, and starts of a run that tune them."""

import importlib.util

import torch

from engine.runtime.tuning_cache import TuningCache

HERE = "one GPU-triton3"

# The last configuration to be benchmarked wins, so that a winner is never what an untuned kernel runs.
KERNELS = """
import itertools

import triton
import triton.language as tl

benchmarks = []
falling = itertools.count(1000, -1)


def do_bench(call, quantiles):
    call()
    benchmarks.append(next(falling))
    return [float(benchmarks[-1])] * 3


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 32) for warps in (2, 4)]


@triton.autotune(configs=CONFIGS, key=["n", "flag"], do_bench=do_bench)
@triton.jit
def scale(x, n, flag, BLOCK: tl.constexpr):
    tl.store(x, n)


@triton.autotune(configs=CONFIGS[:3], key=["n"], do_bench=do_bench)
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def shift(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    tl.store(x, n)
"""


class Kept(TuningCache):
    """With the lines it said."""

    def __init__(self, folder, fingerprint=HERE):
        self.lines = []
        super().__init__(fingerprint, folder, self.lines.append)


def load_kernels(folder, source=KERNELS):
    """The kernels as a process of its own would have them: new objects of the same source."""
    path = folder / "kernels_under_test.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernels_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(kernel, *arguments):
    """Returns the configuration that ran."""
    kernel[(1,)](torch.zeros(4), *arguments)
    return kernel.best_config


def start(folder, source=KERNELS, fingerprint=HERE, *, keys=(64, 128)):
    """What a start does: install, launch, save. Returns its cache, benchmarks and winners of `scale`."""
    kernels, kept = load_kernels(folder, source), Kept(folder, fingerprint)
    kept.install()
    try:
        winners = [launch(kernels.scale, n, True) for n in keys]
        kept.save()
    finally:
        kept.uninstall()
    return kept, len(kernels.benchmarks), [(winner.kwargs["BLOCK"], winner.num_warps) for winner in winners]
