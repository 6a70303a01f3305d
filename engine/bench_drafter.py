"""`bench drafter`: one micro-batch's forward and backward through the drafter, against its arithmetic.

Measured is what a lane does per micro-batch up to the gradients: anchors, masks, blocks, loss, backward.
Masters and optimizer are no part of it, nor of the peak. `plain` is the drafter as it is built, with
FlexAttention compiled on a GPU, since uncompiled it would not fit; the other variant is what the
schedule's plugins make of it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from engine.bench import Bench, Figures, in_words, number, per_second, show, table, write_made_up_documents
from engine.bench_floor import drafter_operations
from engine.bench_measure import Reading, Work, in_turns, product_rate, product_size, product_work
from engine.bench_variants import plugin_use
from engine.dflash.anchors import draw_anchors
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.packing import PackedRow, pack_row
from engine.dflash.training import SharedWeights, training_loss
from engine.errors import InputError, is_out_of_memory
from engine.planning import RunPlan, plan_run
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.schedule import Devices, Plugin

FLOOR, PLAIN, PLUGINS = "product", "plain", "plugins"


def bench_drafter(
    bench: Bench, *, tokens: int, length: int, plugins: list[str], repeats: int, json: Path | None
) -> Figures:
    """Measure, print a table, and return all figures.

    Args:
        tokens: of the context; documents of `length` tokens fill it.
        plugins: loaded besides the schedule's.
        repeats: timed rounds.

    Raises:
        InputError: tokens that are no whole documents.
    """
    length = min(length, tokens)
    if tokens % length:
        raise InputError(f"--tokens {tokens}: no whole documents of --length {length}; give a multiple of it")
    plan = _plan(bench, tokens, length, plugins)
    lane = Lane(LaneSpec("drafter", 0, str(bench.device)))
    serializer = Serializer(bench.schedule.serialize.launches)
    serializer.install()
    batch = plan.train.micro_batch(0)
    row = pack_row(batch.input_ids, batch.loss_mask, batch.lengths, batch.document_ids)
    anchors = draw_anchors(row, seed=plan.recipe.seed, epoch=0, max_anchors=plan.recipe.max_anchors)
    floor = drafter_operations(plan.drafter_config, row, anchors)
    notes = [f"{anchors.used} of {anchors.count} anchor slots used, context {row.length}"]
    with lane.active():
        shared = _random_shared(plan, bench.device)
        drafters = {PLAIN: _random_drafter(plan, bench.device)}
        wraps = plan.host.answering("wrap_drafter")
        if wraps:
            drafters[PLUGINS] = plan.host.wrap(
                "wrap_drafter", _random_drafter(plan, bench.device), lane=lane, serializer=serializer
            )
            notes.append(f"{PLUGINS}: {', '.join(plugin.name for plugin in wraps)}")
        else:
            notes.append(f"no plugin wraps the drafter, so {PLAIN} stands alone")
        yardstick = product_work(bench.device, plan.compute_dtype)
        works = {FLOOR: yardstick}
        for name in reversed(list(drafters)):  # what may not fit comes last
            work = _step(plan, drafters[name], shared, row)
            bench.say(f"getting {name} ready for a context of {row.length}")
            if _fits(name, lane, work, notes):
                works[name] = work
            else:
                del drafters[name]
        readings = in_turns(lane, works, repeats=repeats, lead_in=yardstick, say=bench.say)
    rate = product_rate(readings.pop(FLOOR), bench.device)
    floor_ms = floor.ms(rate)
    weights = sum(parameter.numel() for parameter in next(iter(drafters.values())).parameters())
    # Each variant has a drafter, and gradients from its own call on until its next one.
    others = 2 * weights * plan.compute_dtype.itemsize * (len(drafters) - 1)
    others += 2 * product_size(bench.device) ** 2 * plan.compute_dtype.itemsize
    measured = [
        _row(name, readings[name], floor_ms["total"], others=others)
        for name in (PLAIN, PLUGINS)
        if name in readings
    ]
    plain_ms = readings[PLAIN].ms if PLAIN in readings else None
    for figures_row in measured:
        figures_row["times_plain"] = None if plain_ms is None else plain_ms / figures_row["ms"]
    figures = bench.facts() | {
        "context": row.length,
        "anchors": anchors.count,
        "block_size": plan.drafter_config.block_size,
        "parameters": weights,
        "compute_dtype": plan.schedule.drafter.dtype,
        "product_tflops": rate / 1e12,
        "operations": attrs.asdict(floor) | {"total": floor.total},
        "floor_ms": floor_ms,
        "variants": measured,
        "notes": notes,
    }
    _show(bench, figures, notes, json)
    return figures


def _show(bench: Bench, figures: Figures, notes: Sequence[str], json: Path | None) -> None:
    rows = [
        [
            row["variant"],
            number(row["ms"]),
            number(row["times_floor"], 2),
            number(row["times_plain"], 2),
            number(row["host_ms"]),
            number(row["peak_gb"]),
        ]
        for row in figures["variants"]
    ]
    title = (
        f"drafter of {bench.config}, {in_words(figures['parameters'])} parameters, forward and "
        f"backward, context {figures['context']:,}, {figures['anchors']} × {figures['block_size']}"
    )
    floor_ms = figures["floor_ms"]
    parts = ", ".join(f"{kind} {ms:,.1f}" for kind, ms in floor_ms.items() if kind != "total")
    floors = (
        f"floor {floor_ms['total']:,.1f} ms ({parts}) at {per_second(figures['product_tflops'] * 1e12)}, "
        "the rate of a product of the same run"
    )
    headings = ["variant", "ms", "× floor", "faster than plain", "host ms", "peak GB"]
    show(figures, title, [table(headings, rows)], [floors, *notes], json)


def _row(name: str, reading: Reading, floor_ms: float, *, others: float) -> Figures:
    """A variant's figures; its peak without what belongs to the other variant and to the yardstick."""
    row = {"variant": name, **attrs.asdict(reading), "times_floor": reading.ms / floor_ms}
    if reading.peak_gb is not None:
        row["peak_gb"] = reading.peak_gb - others / 1e9
    return row


def _plan(bench: Bench, tokens: int, length: int, plugins: list[str]) -> RunPlan:
    """A plan whose first micro-batch fills a context of `tokens` slots."""
    schedule, device = bench.schedule, str(bench.device)
    schedule = attrs.evolve(
        schedule,
        layout=None,
        devices=Devices(targets=(device,), drafters=(device,)),
        data=attrs.evolve(schedule.data, token_budget=tokens, max_length=length, length_bucket=length),
        plugin=(*schedule.plugin, *(Plugin(use=plugin_use(name)) for name in plugins)),
        train=attrs.evolve(schedule.train, micro_batches=1),
    )
    write_made_up_documents(bench, [length] * (tokens // length))
    return plan_run(schedule)


def _random_shared(plan: RunPlan, device: torch.device) -> SharedWeights:
    """Frozen embedding and head of the target's size."""
    shape = (plan.drafter_config.vocab_size, plan.drafter_config.hidden_size)
    embed_tokens, lm_head = (
        torch.empty(shape, device=device, dtype=plan.compute_dtype).normal_(std=0.02) for _ in range(2)
    )
    return SharedWeights(embed_tokens, embed_tokens if plan.summary.tie_word_embeddings else lm_head)


def _random_drafter(plan: RunPlan, device: torch.device) -> Drafter:
    drafter = build_drafter(plan.drafter_config, device, plan.compute_dtype)
    drafter.requires_grad_(True)
    drafter.initialise(plan.schedule.run.seed)
    return drafter


def _step(plan: RunPlan, drafter: Drafter, shared: SharedWeights, row: PackedRow) -> Work:
    """Forward and backward over fresh random taps."""
    batch = plan.train.micro_batch(0)
    shape = (*batch.input_ids.shape, plan.drafter_config.hidden_size)
    device = shared.lm_head.device

    def inputs() -> Any:
        drafter.zero_grad(set_to_none=True)
        taps = [
            torch.randn(shape, device=device, dtype=plan.compute_dtype)
            for _ in plan.drafter_config.target_layer_ids
        ]
        return plan.recipe.features.pack(taps, row)

    def call(packed: Any) -> list[torch.Tensor]:
        loss, _ = training_loss(drafter, shared, packed, row, epoch=0, recipe=plan.recipe)
        loss.loss_sum.backward()
        return [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]

    return Work(inputs=inputs, call=call)


def _fits(name: str, lane: Lane, work: Work, notes: list[str]) -> bool:
    """Run a work once for what it compiles; whether memory sufficed, which only the plain one may fail to."""
    try:
        work.call(work.inputs())
        lane.synchronize()
        return True
    except Exception as error:
        if name != PLAIN or not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    notes.append(f"{PLAIN} does not fit into memory here and is left out")
    return False
