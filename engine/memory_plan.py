"""What a run needs on each device, worked out from configurations before anything is loaded.

A device holds weights and optimizer state all the time, and in turns what a phase of a lane adds:
the target's widest layer, the blocks' activations up to the vocabulary chunk, the backward pass,
the optimizer's sums. Lanes of one device run side by side, so their worst phases are added up; within
a lane only the worst phase counts; the plain loop, where nothing overlaps, stays below. The target's
kernels are benchmarked when they are cold, and for a small model that is most of the peak.

Totals are what `torch.cuda.max_memory_allocated` reports. The CUDA context and loaded kernels lie
beside that allocator and are stated apart. On a CPU, where the reference kernels run and
temporaries are less predictable, a plan is rough.

The formulas of target and drafter are in `memory_sizes.py`; what plugins change is theirs to say.
"""

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from rich.table import Table

from engine.builtin import resolve
from engine.devices import resolve_attention
from engine.dflash.configuration import DrafterConfig
from engine.dflash.packing import packed_length
from engine.memory_sizes import DrafterLane, Item, TargetMemory, WrapTargetMemory, target_forward_bytes
from engine.schedule import Schedule
from engine.target.configuration import TargetSummary, read_json, text_section
from engine.target.loading import load_target

GB = 1e9

CUDA_CONTEXT = 700_000_000
"""Context and loaded kernels of one process on one GPU; seen by `nvidia-smi`, not by the allocator."""

CUBLAS_WORKSPACE = 32 << 20
"""cuBLAS takes this from the allocator per thread and stream that multiplies (Hopper; less before)."""

TUNING_BUFFER = 256 << 20
"""Triton's benchmark writes a buffer of this size between two timings, to empty the cache."""

ADVICE = {
    "data.token_budget": "lower data.token_budget ({token_budget}): target activations, taps and context",
    "data.max_anchors": "lower data.max_anchors ({max_anchors}): drafter activations",
    "depth": "lower the transfer stage's depth ({depth}): packed taps that wait",
    "train.loss_chunk": "lower train.loss_chunk ({loss_chunk}): logits that exist at a time",
    "train.gradient_dtype": 'set train.gradient_dtype = "bfloat16": half the gradient sums or less',
    "train.checkpointing": "set train.checkpointing = true: one layer's activations instead of all",
    "drafter.dtype": 'set drafter.dtype = "bfloat16": half the drafter\'s activations',
    "target.dtype": 'set target.dtype = "bfloat16": half the target',
    "more drafters": "name more devices in devices.drafters ({drafters}): they share out masters and moments",
    "devices": "give target and drafter devices of their own in devices.targets and devices.drafters",
}


@attrs.frozen
class MemoryPlan:
    """Items per device and phase. Sizes are bytes here and GB (10^9 bytes) wherever they are shown."""

    phases: dict[str, dict[str, tuple[Item, ...]]]
    """Device to phase (`loading`, `warm-up` or `first forward`, `training`) to what is there at its peak."""
    outside: dict[str, int]
    """Device to bytes beside PyTorch's allocator, in no total."""
    values: dict[str, object]
    """What the schedule says now, for the advice."""

    @property
    def devices(self) -> list[str]:
        return list(self.phases)

    def peak_phase(self, device: str) -> str:
        """The phase that needs most."""
        return max(self.phases[device], key=lambda phase: _sum(self.phases[device][phase]))

    def items(self, device: str) -> tuple[Item, ...]:
        """What is allocated at the device's peak, as the table lists it."""
        return self.phases[device][self.peak_phase(device)]

    def total(self, device: str) -> int:
        """Allocated bytes at the peak; to be compared with `torch.cuda.max_memory_allocated`."""
        return _sum(self.items(device))

    def largest(self, device: str) -> list[Item]:
        """The device's items, the largest first."""
        return sorted(self.items(device), key=lambda item: item.bytes, reverse=True)

    def advice(self, device: str) -> list[str]:
        """What lowers the device's largest items, most effective first; names schedule keys."""
        keys = dict.fromkeys(key for item in self.largest(device) for key in item.keys)
        return [ADVICE[key].format(**self.values) for key in keys]

    def table(self) -> Table:
        """A row per item, a section per device; for a terminal."""
        table = Table(title="memory at the peak, planned", caption="GB of 10^9 bytes")
        table.add_column("device")
        table.add_column("what")
        table.add_column("GB", justify="right")
        for device in self.devices:
            for number, item in enumerate(self.items(device)):
                table.add_row(device if not number else "", item.what, in_gb(item.bytes))
            table.add_row(
                "", f"allocated, {self.peak_phase(device)}", in_gb(self.total(device)), style="bold"
            )
            if self.outside[device]:
                table.add_row("", "CUDA context and kernels, beside it", in_gb(self.outside[device]))
            table.add_section()
        return table


def _sum(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


def in_gb(size: int) -> str:
    """Bytes as GB of 10^9, three digits or so."""
    return f"{size / GB:.{1 if size >= 10 * GB else 2 if size >= GB / 10 else 3}f}"


def plan_memory(
    schedule: Schedule,
    summary: TargetSummary,
    drafter_config: DrafterConfig,
    *,
    targets: Sequence[str],
    drafters: Sequence[str],
    depth: int,
    shapes: Sequence[tuple[int, int]],
    optimizer_bytes: int,
    wrapped: WrapTargetMemory = lambda memory, target, device: memory,
    split_fc: bool = False,
    tuned: bool = False,
    warms_up: bool = True,
) -> MemoryPlan:
    """Plan the memory of every device of a run.

    Args:
        targets, drafters: one device name per lane; names may repeat.
        depth: micro-batches that a drafter lane may have waiting.
        shapes: (rows, length) of the micro-batches that occur, as in `BatchStatistics.shapes`.
        optimizer_bytes: of the optimizer's state for all masters.
        wrapped: what the run's plugins make of the target's memory.
        split_fc: taps are kept apart and projected one by one.
        tuned: the kernels' tuning results are on disk already, so nothing is benchmarked.
        warms_up: kernels are benchmarked before training, as lanes do, and not when a shape first comes.

    Raises:
        TargetError: the target's configuration cannot be built.
    """
    run = _Run(
        schedule=schedule,
        summary=summary,
        config=drafter_config,
        targets=targets,
        drafters=drafters,
        depth=depth,
        tokens=max(rows * length for rows, length in shapes),
        longest=max(length for _, length in shapes),
        optimizer_bytes=optimizer_bytes,
        split_fc=split_fc,
        tuned=tuned,
        text=text_section(read_json(summary.folder / "config.json")),
    )
    target = load_target(
        resolve(schedule.target.path),
        target_layer_ids=drafter_config.target_layer_ids,
        dtype=_dtype(schedule.target.dtype),
        device=torch.device("meta"),
        init="random",
        keep_head=schedule.keeps_whole_target,
        trust_remote_code=schedule.target.trust_remote_code,
    )
    weights = sum(parameter.nbytes for parameter in target.model.parameters())
    phases: dict[str, dict[str, tuple[Item, ...]]] = {}
    for device in dict.fromkeys((*targets, *drafters)):
        lanes = targets.count(device), drafters.count(device)
        forward = target_forward_bytes(run.text, run.tokens, run.target_e, fused=device.startswith("cuda"))
        held = TargetMemory(loaded=weights, weights=weights, forward=forward)
        held = wrapped(held, target, torch.device(device)) if lanes[0] else held
        first, training = _device_items(run, device, *lanes, held)
        tuning = [Item("benchmarks of cold kernels", TUNING_BUFFER)] if run.tunes(device) else []
        if warms_up:  # lane by lane, every shape tuned on one device, before there are moments and sums
            before, again = "warm-up", []
            alone, _ = _device_items(run, device, min(lanes[0], 1), lanes[1], held)
            ready = alone + (tuning if device == targets[0] else [])
        else:  # a new number of rows is a new key: the target tunes again while drafters train
            before, again = "first forward", tuning if len({rows for rows, _ in shapes}) > 1 else []
            ready = first + tuning
        named = {"training": training + again, before: ready}
        if held.loaded > held.weights:
            beside = _drafter_items(run, device, lanes[1])[0] if lanes[1] else []
            named["loading"] = [Item("target weights as they are loaded", held.loaded), *beside]
        phases[device] = {name: tuple(item for item in items if item.bytes) for name, items in named.items()}
    return MemoryPlan(
        phases=phases,
        outside={device: CUDA_CONTEXT if device.startswith("cuda") else 0 for device in phases},
        values={
            "token_budget": schedule.data.token_budget,
            "max_anchors": schedule.data.max_anchors,
            "loss_chunk": schedule.train.loss_chunk,
            "depth": depth,
            "drafters": len(drafters),
        },
    )


@attrs.frozen(kw_only=True)
class _Run:
    """What the items of every device depend on."""

    schedule: Schedule
    summary: TargetSummary
    config: DrafterConfig
    targets: Sequence[str]
    drafters: Sequence[str]
    depth: int
    tokens: int
    """Padded tokens of the largest micro-batch."""
    longest: int
    optimizer_bytes: int
    split_fc: bool
    tuned: bool
    text: Mapping[str, object]
    """The text part of the target's `config.json`."""

    @property
    def target_e(self) -> int:
        return _dtype(self.schedule.target.dtype).itemsize

    @property
    def drafter_e(self) -> int:
        return _dtype(self.schedule.drafter.dtype).itemsize

    @property
    def packed_length(self) -> int:
        return packed_length(self.tokens)

    @property
    def taps_width(self) -> int:
        return len(self.config.target_layer_ids) * self.summary.hidden_size

    def apart(self, device: str) -> tuple[str, ...]:
        """The advice to part target and drafter, where they share a GPU."""
        shared = device in self.targets and device in self.drafters and device != "cpu"
        return ("devices",) if shared else ()

    def tunes(self, device: str) -> bool:
        """Whether the target's kernels are benchmarked there: those of the gated delta rule are."""
        on_gpu = device.startswith("cuda") and device in self.targets
        return on_gpu and "linear_num_value_heads" in self.text and not self.tuned


def _device_items(
    run: _Run, device: str, n: int, m: int, target: TargetMemory
) -> tuple[list[Item], list[Item]]:
    """What a device with `n` target and `m` drafter lanes holds from the first forward on, and that with
    what training adds."""
    first, added = [], []
    if n:
        held, more = _target_items(run, device, n, target)
        first += held
        added += more
    if m:
        if not n or run.drafter_e != run.target_e:
            tables = 1 if run.summary.tie_word_embeddings else 2
            copies = tables * run.summary.vocab_size * run.summary.hidden_size
            first.append(Item("embedding and head for the drafters", copies * run.drafter_e))
        held, more = _drafter_items(run, device, m)
        first += held
        added += more
    # The main thread evaluates, before the first step too, on a stream of its own.
    first += _workspaces(device, "evaluation", run.schedule.data.held_out is not None)
    first += _workspaces(device, "target", n)
    added += _workspaces(device, "drafter", 2 * m)  # autograd multiplies in a thread of its own
    return first, first + added


def _workspaces(device: str, role: str, threads: int) -> list[Item]:
    size = threads * CUBLAS_WORKSPACE if device.startswith("cuda") else 0
    return [Item(f"cuBLAS workspaces, {role}", size)]


def _target_items(run: _Run, device: str, lanes: int, target: TargetMemory) -> tuple[list[Item], list[Item]]:
    """The target lanes of a device: what a forward takes, and what waits behind it in training.
    The weights are there once for all of them."""
    # Every drafter lane's waiting micro-batches, shared out over the target lanes, and one being packed.
    waiting = -(-len(run.drafters) * run.depth // len(run.targets)) + 1
    taps = run.tokens * run.taps_width * run.target_e
    packed = run.packed_length * run.taps_width * max(run.target_e, run.drafter_e)
    whole = run.schedule.keeps_whole_target
    layers = run.summary.layers if whole else max(run.config.target_layer_ids) + 1
    to_bfloat16 = ("target.dtype",) if run.target_e == 4 else ()
    held = [
        Item(
            f"target weights ({layers} layers, embedding, head; {run.schedule.target.dtype})"
            + ("" if target.weights == target.loaded else ", as plugins change them"),
            target.weights,
            (*to_bfloat16, *run.apart(device)),
        ),
        Item("target forward, widest layer", lanes * target.forward, ("data.token_budget", *to_bfloat16)),
        Item("recordings of the target's forward", lanes * target.recorded, ("data.token_budget",)),
        Item("taps of the rows in flight", lanes * taps, ("data.token_budget",)),
    ]
    keys = ("depth", "data.token_budget")
    return held, [Item(f"packed taps, {waiting} per target lane", lanes * waiting * packed, keys)]


def _drafter_items(run: _Run, device: str, lanes: int) -> tuple[list[Item], list[Item]]:
    """The drafter lanes of a device: what is there from the start, and what the first step adds."""
    schedule = run.schedule
    lane = DrafterLane(
        config=run.config,
        e=run.drafter_e,
        context=run.packed_length,
        longest=run.longest,
        anchors=schedule.data.max_anchors,
        chunk=schedule.train.loss_chunk,
        state=run.optimizer_bytes,
        lanes=len(run.drafters),
        turns=-(-schedule.train.micro_batches // len(run.drafters)),
        noise=schedule.train.context_noise > 0,
        checkpointing=schedule.train.checkpointing,
        wide=schedule.train.gradient_dtype == "float32",
        split_fc=run.split_fc,
        flex=resolve_attention(schedule.drafter.attention, device) == "flex",
        fused_norm=device.startswith("cuda"),
    )
    # Advice that would change nothing is left out: drafters are capped at the step's micro-batches.
    to_bfloat16 = ("drafter.dtype",) if lane.own else ()
    more = ("more drafters",) if len(run.drafters) < schedule.train.micro_batches else ()
    apart = run.apart(device)
    held = [
        Item(f"drafter weights ({schedule.drafter.dtype})", lanes * lane.weights, apart),
        Item("master weights (float32)", lanes * lane.masters, (*more, *apart)),
    ]
    added = []
    if device not in run.targets:  # copies may run ahead of the drafter by the whole depth
        arriving = lanes * run.depth * run.packed_length * run.taps_width * run.drafter_e
        added.append(Item("packed taps that arrive", arriving, ("depth", "data.token_budget")))
    worst = max(lane.phases(to_bfloat16), key=_sum)
    added += [Item("optimizer state (float32)", lanes * lane.moments, (*more, *apart))]
    added += [attrs.evolve(item, bytes=lanes * item.bytes) for item in worst]
    return held, added


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
