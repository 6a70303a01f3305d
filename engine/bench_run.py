"""`bench run`: whole steps on lanes, optimizer included, and where their time goes.

The run is the engine's own, from plan to warm-up to lanes, with random weights and documents of random
lengths; what is left out is what does not belong to a step: evaluation, checkpoints, the run's folder.
Figures are of the steps behind the first ones, in which memory is taken and caches fill.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from engine.bench import Bench, Figures, number, show, table, write_made_up_documents
from engine.bench_variants import plugin_use
from engine.device_trust import probed_links
from engine.errors import InputError
from engine.lanes import open_run_lanes
from engine.memory_free import check_fits, free_memory
from engine.planning import RunPlan, plan_run
from engine.runtime.timing import Span
from engine.schedule import Devices, Plugin, Schedule
from engine.shape_buckets import shape_buckets
from engine.stage_times import StageTimes, summarise
from engine.training_parts import load_parts, peak_memory

FIRST_STEPS = 3
"""Left out: compilers and allocators settle in them."""

SHORTEST = 0.15
"""Of `data.max_length`, for the random lengths of documents."""

COPIES = ("transfer",)
PACKING = ("pack",)


def bench_run(
    bench: Bench,
    *,
    steps: int,
    gpus: int | None,
    lengths: Sequence[int],
    plugins: list[str],
    json: Path | None,
) -> Figures:
    """Train for some steps, print a table, and return all figures.

    Args:
        steps: measured, after those that are left out.
        gpus: run target and drafter on each of so many; the schedule's own devices where it is None.
        lengths: of the documents, which decide how many shapes occur and how much is padding.
        plugins: loaded besides the schedule's.

    Raises:
        InputError: more GPUs than there are, or memory that will not do.
        EngineError: of the kind that fits.
    """
    plan = _plan(bench, gpus, lengths, plugins)
    bench.say(f"{', '.join(lane.name for lane in plan.graph.lanes)}; {shape_buckets(plan)}")
    check_fits(plan.memory, free_memory(plan.memory.devices), False)
    masks = MaskTimes(plan.recipe.attention)
    plan = attrs.evolve(plan, recipe=attrs.evolve(plan.recipe, attention=masks))
    rows: list[Figures] = []

    def finished(row: Figures) -> None:
        rows.append(row)
        bench.say(f"step {row['step']}: loss {row['loss']:.3f}, {row['tokens']:,} tokens")

    parts = load_parts(plan, bench.say, links=probed_links(plan.devices, bench.say))
    lanes = open_run_lanes(parts)
    readied = lanes.warm_up(bench.say)
    bench.say(str(readied) if readied else "no warm-up on a CPU")
    lanes.train(0, FIRST_STEPS + steps, finished)
    times = summarise(lanes.flush(), first_step=FIRST_STEPS + 1)
    measured = rows[FIRST_STEPS:]
    lines = lanes.notices()
    shares = time_shares(times, masks.seconds(times.begin), len(plan.devices))
    figures = bench.facts() | {
        "lanes": [lane.name for lane in plan.graph.lanes],
        "plugins": [plugin.use for plugin in plan.schedule.plugin],
        "micro_batches": plan.graph.micro_batches,
        "token_budget": plan.schedule.data.token_budget,
        "shapes": shape_buckets(plan).row(),
        "steps": len(measured),
        "tokens": times.tokens,
        "padding": sum(row["padding"] for row in measured),
        "seconds": times.wall_s,
        "tokens_per_s": times.tokens_per_s,
        "ms_per_step": times.wall_s * 1e3 / len(measured),
        "shares": shares,
        "stages": [attrs.asdict(stage) for stage in times.stages],
        "cold_keys": sum(row["cold_keys"] for row in measured),
        "recompiles": sum(row["recompiles"] for row in measured),
        "peak_memory": peak_memory(plan.devices),
        "losses": [row["loss"] for row in rows],
        "notices": lines,
    }
    _show(bench, figures, times, json)
    return figures


def document_lengths(schedule: Schedule, documents: int, length: int | None) -> list[int]:
    """Tokens of each document: all alike, or drawn between a share of `data.max_length` and all of it."""
    if length is not None:
        return [length] * documents
    most = schedule.data.max_length
    random = np.random.default_rng(schedule.run.seed)
    return random.integers(max(int(most * SHORTEST), 2), most + 1, documents).tolist()


def _plan(bench: Bench, gpus: int | None, lengths: Sequence[int], plugins: list[str]) -> RunPlan:
    schedule = bench.schedule
    if gpus is not None:
        here = torch.cuda.device_count()
        if gpus > here:
            raise InputError(f"--gpus {gpus}: torch sees {here} here")
        names = tuple(f"cuda:{index}" for index in range(gpus))
        schedule = attrs.evolve(schedule, layout=None, devices=Devices(targets=names, drafters=names))
    write_made_up_documents(bench, lengths)
    schedule = attrs.evolve(
        schedule,
        plugin=(*schedule.plugin, *(Plugin(use=plugin_use(name)) for name in plugins)),
    )
    return plan_run(schedule)


class MaskTimes:
    """Builds masks as the run's own builder does, and takes the time."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build
        self.spans: list[Span] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        device = next(value for value in (*arguments, *named.values()) if isinstance(value, torch.device))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        lane = threading.current_thread().name
        span = Span(stage="masks", lane=lane, micro_batch=None, step=None, stream=stream)
        built = self._build(*arguments, **named)
        span.end()
        self.spans.append(span)
        return built

    def seconds(self, begin: float) -> float:
        """Over the calls since `begin`, unix seconds, of device or host, whichever was longer in each."""
        total = 0.0
        for span in (span for span in self.spans if span.start >= begin):
            span.synchronize()
            row = span.row()
            total += max(row["device_ms"], row["host_ms"]) * 1e-3
        return total


def time_shares(times: StageTimes, mask_seconds: float, devices: int) -> dict[str, float]:
    """What a step's time goes to besides the models' arithmetic, as shares of the devices' time.

    `waiting` is the time in which no lane of a device was busy. The four may overlap with other lanes' work
    on a device that several share, so that their sum is an upper bound of what they cost.
    """
    whole = times.wall_s * devices

    def of(names: Sequence[str]) -> float:
        return sum(s.mean_ms * s.count for s in times.stages if s.stage in names) / 1e3 / whole

    shared = {one.name.partition(" ")[0]: 1 - one.busy for one in times.devices}
    alone = {lane.name.rpartition("@")[2]: 1 - lane.busy for lane in times.lanes}
    idle = alone | shared
    shares = {
        "masks": mask_seconds / whole,
        "copies": of(COPIES),
        "packing": of(PACKING),
        "waiting": sum(idle.values()) / len(idle),
    }
    return shares | {"together": sum(shares.values())}


def _show(bench: Bench, figures: Figures, times: StageTimes, json: Path | None) -> None:
    shares = figures["shares"]
    peaks = ", ".join(f"{device} {gb:.1f} GB" for device, gb in figures["peak_memory"].items())
    rows = [
        ["tokens/s", number(figures["tokens_per_s"], 0)],
        ["ms per step", number(figures["ms_per_step"])],
        ["padding", f"{figures['padding'] / (figures['tokens'] + figures['padding']):.1%}"],
        *([name, f"{share:.1%}"] for name, share in shares.items()),
        ["kernels tuned, graphs compiled", f"{figures['cold_keys']}, {figures['recompiles']}"],
        *([["peak memory", peaks]] if peaks else []),
    ]
    title = f"{figures['steps']} steps of {figures['micro_batches']} micro-batches, {bench.config}"
    notes = [
        f"on {', '.join(figures['lanes'])}; {FIRST_STEPS} steps before them left out",
        figures["shapes"]["text"],
        *figures["notices"],
    ]
    show(figures, title, [table(["of the measured steps", ""], rows), times.table()], notes, json)
