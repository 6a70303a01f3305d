"""Time and accuracy of the fused target and its 8-bit form on one GPU, beside the Hugging Face module.

    python -m tools.check_fused_target --layers 16

Takes the first layers of a target with random weights. Medians are of interleaved repetitions; the floor
is the same matrix products alone. `per 62` scales to the layers of Qwen3.6-27B up to its last tap.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import orjson
import torch
from torch import Tensor, nn

from engine.builtin import resolve
from engine.target.configuration import read_json
from engine.target.fp8 import fp8_walk
from engine.target.fused_check import fused_errors, random_tokens, relative_error
from engine.target.fused_operations import gpu_operations
from engine.target.fused_walk import fused_walk, walked_layers
from engine.target.loading import Target, load_target
from engine.target.truncation import truncated_settings

SHAPES = ((1, 8192), (8, 1024))
FULL = 62

Forward = Callable[[Tensor], Sequence[Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="builtin:qwen3.6-27b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--kernels", type=int, default=25, help="rows of the profiles")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    target = load_slice(options.target, options.layers, device)
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {options.layers} layers",
        flush=True,
    )

    fused = fused_walk(target, gpu_operations())
    quantised = fp8_walk(target, fused, release=False)
    paths: dict[str, Forward] = {"module": target.forward_taps, "fused": fused, "fp8": quantised}
    for name, forward in paths.items():
        begin = time.perf_counter()
        forward(made_up_ids(target, *SHAPES[0]))
        torch.cuda.synchronize()
        print(f"first forward of {name}: {time.perf_counter() - begin:.1f} s, tuning included", flush=True)
    print_times(target, paths, options.repetitions, options.layers)
    print_host_times(target, paths)
    ids = made_up_ids(target, *SHAPES[0])
    for name in ("fused", "fp8"):
        print_profile(name, paths[name], ids, options.kernels, options.layers)
    print_accuracy(target, paths)


def load_slice(name: str, layers: int, device: torch.device) -> Target:
    """The first layers of a target with random weights, tapped at the last one of them and on the way."""
    config = dict(read_json(resolve(name) / "config.json"))
    key = "text_config" if "text_config" in config else None
    text = config[key] if key else config
    # One layer more than is kept: a target's last layer is never tapped.
    cut = truncated_settings(text, text["num_hidden_layers"], layers + 1)
    config = {**config, key: cut} if key else cut
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(orjson.dumps(config))
        taps = sorted({0, layers // 2, layers - 1})
        target = load_target(
            folder, target_layer_ids=taps, dtype=torch.bfloat16, device=device, init="random"
        )
    with torch.no_grad():  # norms that do something
        for name, parameter in target.model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return target


def made_up_ids(target: Target, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.summary.vocab_size, (rows, length), generator=generator).to(target.device)


def print_accuracy(target: Target, paths: dict[str, Forward]) -> None:
    print("relative error against float32:")
    walk = paths["fused"]
    for error in fused_errors(target, walk, tolerance=1.1):  # type: ignore[arg-type]
        print(f"  {error}, ratio {error.fused / max(error.unfused, 1e-30):.3f}{'  BAD' if error.bad else ''}")
    ids = random_tokens(target, 0)
    errors = [relative_error(a, b) for a, b in zip(paths["fp8"](ids), walk(ids), strict=True)]
    print(f"  fp8 against fused, by tap: {', '.join(f'{error:.2e}' for error in errors)}", flush=True)


def print_times(target: Target, paths: dict[str, Forward], repetitions: int, layers: int) -> None:
    for rows, length in SHAPES:
        ids = made_up_ids(target, rows, length)
        runs: dict[str, Callable[[], object]] = {
            name: partial(forward, ids) for name, forward in paths.items()
        }
        runs["products"] = products(target, rows * length)
        medians = interleaved(runs, repetitions)
        floor = medians["products"]
        print(f"{rows} × {length}:")
        for name, ms in medians.items():
            rest = "" if name == "products" else f", {ms - floor:7.1f} beside the products"
            print(
                f"  {name:<9}{ms:8.1f} ms, per {FULL} layers {ms * FULL / layers:8.1f} ms{rest}", flush=True
            )


def products(target: Target, tokens: int) -> Callable[[], None]:
    """All linear layers of the slice on rows of the right width."""
    linears = [
        part for layer in walked_layers(target) for part in layer.modules() if isinstance(part, nn.Linear)
    ]
    inputs = {
        width: torch.randn(tokens, width, device=target.device, dtype=target.dtype)
        for width in {linear.in_features for linear in linears}
    }

    @torch.no_grad()
    def run() -> None:
        for linear in linears:
            linear(inputs[linear.in_features])

    return run


def interleaved(runs: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median milliseconds of each, taking turns, so that clocks and heat are the same for all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 2):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            if repetition >= 2:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


def print_host_times(target: Target, paths: dict[str, Forward]) -> None:
    ids = made_up_ids(target, 1, 64)
    layers = len(walked_layers(target))
    print("Python per forward of 64 tokens:")
    for name, forward in paths.items():
        times = []
        for _ in range(12):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            forward(ids)
            times.append((time.perf_counter() - begin) * 1e3)
        ms = statistics.median(times[2:])
        print(f"  {name:<9}{ms:8.1f} ms, per {FULL} layers {ms * FULL / layers:8.1f} ms", flush=True)


def print_profile(name: str, forward: Forward, ids: Tensor, most: int, layers: int) -> None:
    """Device time by kernel, of one forward."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    times = 2
    forward(ids)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            forward(ids)
        torch.cuda.synchronize()
    rows = [
        (event.self_device_time_total / 1e3 / times, event.count / times, event.key)
        for event in profile.key_averages()
        if event.self_device_time_total
    ]
    rows.sort(reverse=True)
    total, launches = sum(row[0] for row in rows), sum(row[1] for row in rows)
    print(f"{name}: {total:.1f} ms on the device in {launches:.0f} launches; ms, count, kernel:")
    for ms, count, kernel in rows[:most]:
        print(f"  {ms:8.2f} {count:6.0f}  {kernel[:100]}  ({ms * FULL / layers:.1f} per {FULL} layers)")
    print(f"  {sum(row[0] for row in rows[most:]):8.2f}         others", flush=True)


if __name__ == "__main__":
    main()
