"""Compare the ways from taps to context features, and from GPU to GPU: milliseconds and peak memory.

    python -m tools.measure_feature_paths                # Qwen3.6-27B's shape: 5 taps of 8,192 × 5,120
    python -m tools.measure_feature_paths --json

Concatenated taps (`concat`) against separate ones (`split_fc`): packing, projection forward and
backward. With a second GPU, `plain_copy` against `async_copy`: a drafter lane that multiplies for
some milliseconds per micro-batch while the next one's taps arrive; the same work without copies is
the floor. One process, warm, medians; inputs are random; peaks are above what was there before.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import orjson
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import build_drafter
from engine.dflash.packing import pack_row
from engine.hookspecs import FeaturePath
from engine.hookspecs import Transfer as TransferStrategy
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.parcel import Parcel
from plugins.async_copy import CopyOnCopyStreams
from plugins.concat import ConcatenatedTaps
from plugins.plain_copy import CopyOnComputeStream
from plugins.split_fc import SeparateTaps

WARM_UP, REPEATS, BATCHES = 5, 20, 12
PRODUCT = 8192
"""A matrix product of this size, some milliseconds, stands for the drafter's step."""


def median_ms(work: Callable[[], object]) -> float:
    """Device time of one call."""
    times = []
    for number in range(WARM_UP + REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        if number >= WARM_UP:
            times.append(first.elapsed_time(last))
    return statistics.median(times)


def peak_gb(work: Callable[[], object]) -> float:
    """What one call allocates at most, above what is there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def measure_features(tokens: int, hidden: int, taps: int) -> list[dict]:
    """Packing and projection of both feature paths, bfloat16, on the first GPU."""
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=128,
        heads=2,
        kv_heads=1,
        head_dim=64,
        vocab_size=32,
        block_size=2,
        target_layer_ids=tuple(range(taps)),
        num_target_layers=taps + 2,
        mask_token_id=1,
        layer_types=("full_attention",),
        sliding_window=None,
        is_causal=None,
    )
    drafter = build_drafter(config, torch.device("cuda:0"), torch.bfloat16)
    drafter.initialise(0)
    drafter.requires_grad_(True)
    rows, length = 4, tokens // 4
    lengths = torch.full((rows,), length)
    row = pack_row(
        torch.zeros(rows, length, dtype=torch.int64),
        torch.ones(rows, length, dtype=torch.bool),
        lengths,
        torch.arange(rows),
    )
    states = [torch.randn(rows, length, hidden, device="cuda:0", dtype=torch.bfloat16) for _ in range(taps)]
    paths: dict[str, FeaturePath] = {"concat": ConcatenatedTaps(hidden), "split_fc": SeparateTaps()}
    gradient = torch.randn(row.length, hidden, device="cuda:0", dtype=torch.bfloat16)
    measured = []
    for name, path in paths.items():
        packed = path.pack(states, row)

        def project(path: FeaturePath = path, packed: tuple[Tensor, ...] = packed) -> None:
            drafter.zero_grad()
            path.context(drafter, packed).backward(gradient)

        def pack(path: FeaturePath = path) -> None:
            path.pack(states, row)

        for what, work in (("pack", pack), ("project, forward and backward", project)):
            measured.append({"what": what, "with": name, "ms": median_ms(work), "peak_gb": peak_gb(work)})
        del packed
    return measured


def measure_copies(tokens: int, hidden: int, taps: int) -> list[dict]:
    """Per micro-batch on a drafter lane: one product, and taps that arrive from the other GPU."""
    source, drafter = Lane(LaneSpec("target", 0, "cuda:0")), Lane(LaneSpec("drafter", 0, "cuda:1"))
    with source.active():
        states = torch.randn(tokens, taps * hidden, device="cuda:0", dtype=torch.bfloat16)
    with drafter.active():
        left = torch.randn(PRODUCT, PRODUCT, device="cuda:1", dtype=torch.bfloat16)
        right = torch.randn(PRODUCT, PRODUCT, device="cuda:1", dtype=torch.bfloat16)
    strategies: dict[str, TransferStrategy | None] = {
        "no copy": None,
        "plain_copy": CopyOnComputeStream(),
        "async_copy": CopyOnCopyStreams({}),
    }

    def ms_per_batch(strategy: TransferStrategy | None) -> float:
        torch.cuda.synchronize("cuda:0")
        with drafter.active():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            waiting: Parcel | None = None
            for _ in range(BATCHES):
                if strategy is not None:
                    with source.active():
                        parcel = Parcel.made(source, (states,))
                    waiting = strategy.receive(drafter, parcel)  # launched before the product, used after it
                left @ right
                if waiting is not None:
                    waiting.take(drafter)
            last.record()
            last.synchronize()
        return first.elapsed_time(last) / BATCHES

    measured = []
    for name, strategy in strategies.items():
        times = [ms_per_batch(strategy) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        measured.append(
            {"what": "product and transfer", "with": name, "ms": statistics.median(times), "peak_gb": None}
        )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("measuring needs a GPU, and torch sees none\n")
        sys.exit(2)
    measured = measure_features(options.tokens, options.hidden, options.taps)
    if torch.cuda.device_count() > 1:
        measured += measure_copies(options.tokens, options.hidden, options.taps)
    if options.json:
        sys.stdout.write(orjson.dumps(measured).decode() + "\n")
        return
    table = Table("what", "with", "ms", "peak, GB", title=torch.cuda.get_device_name(0))
    for entry in measured:
        peak = "" if entry["peak_gb"] is None else f"{entry['peak_gb']:.2f}"
        table.add_row(entry["what"], entry["with"], f"{entry['ms']:.3f}", peak)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
