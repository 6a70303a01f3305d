"""`bench launch`: what Python a target's forward costs, and how two threads share the one lock.

With 64 tokens a forward is over on the device before its kernels are launched, so that launching is all it
takes. Two threads on two GPUs with a few more tokens show whether lanes hold each other up: a lane that
waits for the lock is slower beside another than alone.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from engine.bench import Bench, Figures, number, show, table
from engine.bench_measure import in_turns
from engine.bench_target import layers_in_words
from engine.bench_variants import (
    Variant,
    as_it_is,
    default_variant,
    load_bare_target,
    plugin_variant,
    weight_bytes,
)
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.runtime.side_by_side import side_by_side
from engine.target.loading import copy_target

GRAPHS = "plugins.graph_target"


def bench_launch(
    bench: Bench,
    *,
    tokens: int,
    pair_tokens: int,
    plugins: list[str],
    repeats: int,
    json: Path | None,
) -> Figures:
    """Measure, print a table, and return all figures.

    Args:
        tokens: of the forward whose launching is timed.
        pair_tokens: of the forwards of two threads.
        plugins: measured on top of the default ones, besides `plugins.graph_target`.
    """
    gpus = torch.cuda.device_count() if bench.device.type == "cuda" else 0
    devices = [bench.device] if gpus < 2 else [torch.device("cuda", 0), torch.device("cuda", 1)]
    serializer = Serializer(bench.schedule.serialize.launches)
    serializer.install()
    lanes = [Lane(LaneSpec("target", number, str(device))) for number, device in enumerate(devices)]
    bench.say(f"loading {bench.config} with random weights on {', '.join(map(str, devices))}")
    targets = _load(bench, devices)
    whole = weight_bytes(targets[0])
    notes = []
    if len(devices) < 2:
        found = "one GPU" if gpus else "no GPU"
        notes.append(f"two threads on two GPUs were not measured: there is {found} here")
    measured = []
    for name, make in _makers(plugins):
        if weight_bytes(targets[0]) != whole:  # the plugin before has taken them for its own form
            targets.clear()
            targets = _load(bench, devices)
        variants = [make(target, lane, serializer) for target, lane in zip(targets, lanes, strict=True)]
        present = [variant for variant in variants if variant is not None]
        if not present:
            notes.append(f"{name} leaves this target as it is")
            continue
        measured.append(_measure(bench, name, present, tokens, pair_tokens, repeats))
        del variants, present
    figures = bench.facts() | {
        "tokens": tokens,
        "pair_tokens": pair_tokens,
        "layers": max(targets[0].target_layer_ids) + 1,
        "variants": measured,
        "notes": notes,
    }
    headings = ["variant", "host ms", "ms"]
    headings += ["alone ms", "two at once ms", "× slower"] * (len(devices) > 1)
    rows = []
    for row in measured:
        cells = [row["variant"], number(row["host_ms"], 2), number(row["ms"], 2)]
        if len(devices) > 1:
            cells += [number(row["alone_ms"], 2), number(row["together_ms"], 2), number(row["slower"], 2)]
        rows.append(cells)
    layers = layers_in_words(figures["layers"], targets[0].summary.layers)
    title = f"launching a target forward, {bench.config}, {layers}, {tokens} tokens"
    if len(devices) > 1:
        title += f"; two threads on two GPUs, {pair_tokens} tokens"
    show(figures, title, [table(headings, rows)], notes, json)
    return figures


Make = Callable[[Any, Lane, Serializer], Variant | None]


def _load(bench: Bench, devices: list[torch.device]) -> list[Any]:
    """The same target on each device."""
    first = load_bare_target(bench, devices[0])
    return [first, *(copy_target(first, device) for device in devices[1:])]


def _makers(plugins: list[str]) -> list[tuple[str, Make]]:
    """The variants by name: as it is, the defaults, graphs, and what was named."""
    makers: list[tuple[str, Make]] = [
        ("Hugging Face", lambda target, lane, serializer: as_it_is(target, lane)),
        ("default", default_variant),
    ]
    for names in [GRAPHS, *(name for name in plugins if name not in (GRAPHS, "graph_target"))]:

        def make(target: Any, lane: Lane, serializer: Serializer, names: str = names) -> Variant | None:
            return plugin_variant(names, target, lane, serializer)

        makers.append((names, make))
    return makers


def _measure(
    bench: Bench, name: str, variants: list[Variant], tokens: int, pair_tokens: int, repeats: int
) -> Figures:
    """One variant: alone on its lane, and with two of them side by side."""
    bench.say(f"measuring {name}")
    first = variants[0]
    with first.lane.active():
        first.ready(1, tokens)
        reading = in_turns(first.lane, {name: first.work(1, tokens)}, repeats=repeats)[name]
    row: Figures = {"variant": name, **attrs.asdict(reading)}
    if len(variants) < 2:
        return row
    for variant in variants:
        with variant.lane.active():
            variant.ready(1, pair_tokens)

    def calls(variant: Variant) -> Callable[[], float]:
        def work() -> float:
            works = {name: variant.work(1, pair_tokens)}
            return in_turns(variant.lane, works, repeats=repeats)[name].ms

        return work

    alone = [side_by_side({variant.lane: calls(variant)}, "bench")[variant.lane] for variant in variants]
    together = side_by_side({variant.lane: calls(variant) for variant in variants}, "bench")
    row["alone_ms"] = statistics.mean(alone)
    row["together_ms"] = statistics.mean(together.values())
    row["slower"] = row["together_ms"] / row["alone_ms"]
    return row
