"""`bench target`: the frozen target's forward, in each variant, against its arithmetic.

Ratios are to the Hugging Face module as it is, and to the floor: the operations of the layers up to the
last tap at the rate of a large matrix product of the same run. A variant in FP8 is compared with the same
floor, so that it may pass it.
"""

from pathlib import Path
from typing import Any

import attrs
import torch

from engine.bench import Bench, Figures, number, per_second, show, table
from engine.bench_floor import Operations, target_operations
from engine.bench_measure import Reading, in_turns, product_rate, product_work
from engine.bench_variants import (
    AS_IT_IS,
    DEFAULT,
    Variant,
    as_it_is,
    default_variant,
    load_bare_target,
    plugin_variant,
    weight_bytes,
)
from engine.errors import InputError
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer

FLOOR = "product"


def bench_target(
    bench: Bench, *, tokens: int, length: int, plugins: list[str], repeats: int, json: Path | None
) -> Figures:
    """Measure, print a table, and return all figures.

    Args:
        tokens: of a forward, rows × length.
        length: of a row; shortened to `tokens` where that is less.
        plugins: measured on top of the default ones, each by itself.
        repeats: timed rounds of each group.

    Raises:
        InputError: tokens that are no whole rows, or an architecture whose operations are not known.
        EngineError: what a plugin raises.
    """
    length = min(length, tokens)
    if tokens % length:
        raise InputError(f"--tokens {tokens}: no whole rows of --length {length}; give a multiple of it")
    shape = (tokens // length, length)
    lane = Lane(LaneSpec("target", 0, str(bench.device)))
    serializer = Serializer(bench.schedule.serialize.launches)
    serializer.install()
    with lane.active():
        bench.say(f"loading {bench.config} with random weights on {bench.device}")
        bare = load_bare_target(bench, bench.device)
        layers = max(bare.target_layer_ids) + 1
        floor = target_operations(bare.model, layers, rows=shape[0], length=shape[1])
        reference = _last_tap(bare, shape, bench.device)
        measured: list[Figures] = []
        notes: list[str] = []
        plain = as_it_is(bare, lane)
        default = default_variant(bare, lane, serializer)
        if default is None:
            notes.append("the default plugins leave this target as it is")
        group = [plain] if default is None else [plain, default]
        measured += _measure(bench, group, shape, floor, reference, repeats)
        whole = weight_bytes(bare)
        variant: Variant | None = None
        for names in plugins:
            if weight_bytes(bare) != whole:  # the plugin before has taken them for its own form
                group.clear()
                variant = default = None
                del plain, bare
                bare = load_bare_target(bench, bench.device)
                plain, default = as_it_is(bare, lane), default_variant(bare, lane, serializer)
            variant = plugin_variant(names, bare, lane, serializer)
            if variant is None:
                notes.append(f"{names} leaves this target as it is")
                continue
            group = [default or plain, variant] if weight_bytes(bare) == whole else [variant]
            measured += _measure(bench, group, shape, floor, reference, repeats)[-1:]
    return _report(bench, shape, layers, bare, floor, measured, notes, json)


def layers_in_words(run: int, whole: int) -> str:
    """How many decoder layers run, of a target that is cut behind its last tap."""
    return f"{run} layers" if run == whole else f"{run} of {whole} layers (cut behind the last tap)"


def _last_tap(target: Any, shape: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens and the plain variant's last tap of them, float32."""
    generator = torch.Generator().manual_seed(0)
    rows, length = min(shape[0], 2), min(shape[1], 256)
    ids = torch.randint(0, target.summary.vocab_size, (rows, length), generator=generator).to(device)
    return ids, target.forward_taps(ids)[-1].float()


def _measure(
    bench: Bench,
    variants: list[Variant],
    shape: tuple[int, int],
    floor: Operations,
    reference: tuple[torch.Tensor, torch.Tensor],
    repeats: int,
) -> list[Figures]:
    """Time variants in turns with the yardstick; a row for each."""
    lane = variants[0].lane
    for variant in variants:
        bench.say(f"getting {variant.name} ready for {shape[0]} × {shape[1]}")
        variant.ready(*shape)
    dtype = getattr(torch, bench.schedule.target.dtype)
    yardstick = product_work(bench.device, dtype)
    works = {FLOOR: yardstick}
    works |= {variant.name: variant.work(*shape) for variant in variants}
    readings = in_turns(lane, works, repeats=repeats, lead_in=yardstick, say=bench.say)
    rate = product_rate(readings[FLOOR], bench.device)
    rows = []
    for variant in variants:
        reading = readings[variant.name]
        row = _row(variant.name, reading, shape, floor, rate)
        row["difference"] = _difference(variant.target, reference)
        rows.append(row)
        bench.say(f"{variant.name}: {reading.ms:,.1f} ms, {row['tokens_per_s']:,.0f} tokens/s")
    return rows


def _row(name: str, reading: Reading, shape: tuple[int, int], floor: Operations, rate: float) -> Figures:
    floor_ms = floor.ms(rate)
    return {
        "variant": name,
        **attrs.asdict(reading),
        "tokens_per_s": shape[0] * shape[1] / (reading.ms * 1e-3),
        "product_tflops": rate / 1e12,
        "floor_ms": floor_ms,
        "of_floor": floor_ms["total"] / reading.ms,
    }


def _difference(target: Any, reference: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Of the last tap from the plain variant's, root-mean-square over root-mean-square."""
    ids, expected = reference
    found = target.forward_taps(ids)[-1].float()
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def _report(
    bench: Bench,
    shape: tuple[int, int],
    layers: int,
    bare: Any,
    floor: Operations,
    measured: list[Figures],
    notes: list[str],
    json: Path | None,
) -> Figures:
    plain_ms = next(row["ms"] for row in measured if row["variant"] == AS_IT_IS)
    for row in measured:
        row["times_plain"] = plain_ms / row["ms"]
    figures = bench.facts() | {
        "rows": shape[0],
        "length": shape[1],
        "layers": layers,
        "layers_of_target": bare.summary.layers,
        "taps": list(bare.target_layer_ids),
        "operations": attrs.asdict(floor) | {"total": floor.total},
        "variants": measured,
        "notes": notes,
    }
    rows = [
        [
            row["variant"],
            number(row["ms"]),
            number(row["tokens_per_s"], 0),
            number(row["times_plain"], 2),
            number(row["of_floor"], 2),
            number(row["peak_gb"]),
            f"{row['difference']:.1e}",
        ]
        for row in measured
    ]
    headings = ["variant", "ms", "tokens/s", "× HF", "of floor", "peak GB", "last tap off"]
    first = measured[0]
    parts = ", ".join(
        f"{kind.replace('_', ' ')} {ms:,.1f}" for kind, ms in first["floor_ms"].items() if kind != "total"
    )
    title = (
        f"target forward, {bench.config}, {layers_in_words(layers, bare.summary.layers)}, "
        f"{shape[0]} × {shape[1]} tokens, "
        f"{bench.schedule.target.dtype}"
    )
    floors = (
        f"floor {first['floor_ms']['total']:,.1f} ms ({parts}) at "
        f"{per_second(first['product_tflops'] * 1e12)}, "
        f"the rate of a product of the same run; {DEFAULT}: the engine's default plugins"
    )
    show(figures, title, [table(headings, rows)], [floors, *notes], json)
    return figures
