"""Timing for `bench`: works in turns on one lane, warm, medians.

Clocks and temperatures of a GPU drift by some per cent within a minute. So works that are to be compared
are never timed one after another: every round times each of them once, and what is reported is each
one's median over the rounds. Every call gets fresh random inputs, its outputs are checked once for
numbers that are not finite and then overwritten with NaN, so that a work that hands out old results
shows.

The yardstick is a large matrix product on random numbers, timed in the same rounds: its rate is what the
arithmetic of a model could run at, and the floor is the model's operations at that rate.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.errors import NonFinite
from engine.runtime.lane import Lane

PRODUCT = 8192
"""Rows, columns and depth of the yardstick on a GPU."""

PRODUCT_ON_CPU = 512

IN_A_ROW = 12
"""Products of one timing: one alone would see the clocks of an idle device."""


@attrs.frozen(eq=False, kw_only=True)
class Work:
    """Something to time."""

    inputs: Callable[[], Any] = lambda: None
    """Makes what a call is given; not timed."""
    call: Callable[[Any], Any]
    """What it returns may hold tensors: they are checked and overwritten."""
    calls: int = 1
    """How many operations one call stands for."""


@attrs.frozen(kw_only=True)
class Reading:
    """Of one operation of a work; times in milliseconds."""

    ms: float
    """Median, until the device is through."""
    least_ms: float
    most_ms: float
    host_ms: float
    """Median, until everything is launched."""
    peak_gb: float | None
    """Most that was allocated on the device (10^9 bytes), weights included; None on a CPU."""
    repeats: int


def in_turns(
    lane: Lane,
    works: Mapping[str, Work],
    *,
    repeats: int,
    warm_up: int = 2,
    lead_in: Work | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Reading]:
    """Time works in turns; call it with the lane active.

    Args:
        repeats: timed rounds; `warm_up` rounds before them are not counted.
        lead_in: launched right before each call on a GPU, so that the device is at work when the call
            begins, as it is in a run, and does not wait for the host's first launches. The host's time is
            then taken from a call of its own on an idle device.
        say: takes a line per round.

    Raises:
        NonFinite: an output holds a NaN or an infinity; names the work.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    peaks = dict.fromkeys(works, 0.0)
    on_gpu = lane.device.type == "cuda"
    for number in range(warm_up + repeats):
        took: list[str] = []
        for name, work in works.items():
            inputs = work.inputs()
            lane.synchronize()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(lane.device)
            device_ms, host_ms = _timed(lane, name, work, inputs)
            if on_gpu:
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(lane.device) / 1e9)
                if lead_in is not None:
                    del inputs
                    inputs = work.inputs()
                    lane.synchronize()
                    lead_in.call(None)
                    device_ms, _ = _timed(lane, name, work, inputs)
            del inputs
            took.append(f"{name} {device_ms / work.calls:,.1f} ms")
            if number >= warm_up:
                times[name].append((device_ms / work.calls, host_ms / work.calls))
        kind = f"round {number - warm_up + 1} of {repeats}" if number >= warm_up else f"warm-up {number + 1}"
        say(f"{kind}: {', '.join(took)}")
    return {
        name: Reading(
            ms=statistics.median(device for device, _ in taken),
            least_ms=min(device for device, _ in taken),
            most_ms=max(device for device, _ in taken),
            host_ms=statistics.median(host for _, host in taken),
            peak_gb=peaks[name] if on_gpu else None,
            repeats=len(taken),
        )
        for name, taken in times.items()
    }


def _timed(lane: Lane, name: str, work: Work, inputs: Any) -> tuple[float, float]:
    """Milliseconds of device and host for one call."""
    span = lane.begin(name, micro_batch=None, step=None)
    outputs = work.call(inputs)
    lane.end(span)
    span.synchronize()
    row = span.row()
    spoil(name, _tensors(outputs))
    return row["device_ms"], row["host_ms"]


@torch.no_grad()
def spoil(name: str, outputs: Sequence[Tensor]) -> None:
    """Overwrite outputs with NaN once they were seen to be finite.

    Raises:
        NonFinite: they are not; names the work.
    """
    for tensor in outputs:
        if tensor.is_floating_point():
            if not bool(tensor.isfinite().all()):
                raise NonFinite(f"bench: an output of {name} holds a NaN or an infinity")
            tensor.fill_(torch.nan)


def _tensors(outputs: Any) -> list[Tensor]:
    found = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [value for value in found if isinstance(value, Tensor)]


def product_size(device: torch.device) -> int:
    """Rows, columns and depth of the yardstick."""
    return PRODUCT if device.type == "cuda" else PRODUCT_ON_CPU


def product_work(device: torch.device, dtype: torch.dtype) -> Work:
    """The yardstick: square products of random matrices."""
    size = product_size(device)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def call(_: Any) -> None:
        for _ in range(IN_A_ROW):
            left @ right

    return Work(call=call, calls=IN_A_ROW)


def product_rate(reading: Reading, device: torch.device) -> float:
    """Operations per second of the yardstick; a multiplication and an addition are two."""
    return 2 * product_size(device) ** 3 / (reading.ms * 1e-3)
