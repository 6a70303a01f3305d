"""The parts of a run, loaded and in place: targets, drafters, and what they share.

A checkpoint is read from disk once; further target lanes get copies from device to device, and lanes
on one device share one target, since a forward changes nothing in it. Embedding and head live once
per device. Every drafter lane has a drafter of its own, and a share of the float32 masters.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.progress import Progress

from engine.data.batches import MicroBatch
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.finite import Reading
from engine.dflash.masters import Masters, share_out
from engine.dflash.objective import BlockCounts
from engine.dflash.packing import PackedRow, pack_row
from engine.dflash.training import Packed, Recipe, SharedWeights
from engine.planning import RunPlan
from engine.runtime.links import Links
from engine.target.loading import Target, copy_target
from engine.warm_start import warm_start


@attrs.define(eq=False)
class DrafterPart:
    """A drafter, the masters it keeps, and what the current step has come to so far."""

    drafter: Drafter
    masters: Masters
    shared: SharedWeights
    counts: BlockCounts
    tokens: int = 0
    padding: int = 0
    skipped: int = 0
    epoch: int = 0
    readings: list[Reading] = attrs.field(factory=list)
    """Of the step's micro-batches so far: whether their numbers are finite."""

    def count(self, batch: MicroBatch, used: int) -> None:
        """Take in a micro-batch of which `used` blocks held an anchor."""
        self.tokens += batch.tokens
        self.padding += batch.padding
        self.skipped += not used
        self.epoch = batch.epoch

    def begin_step(self) -> None:
        """Forget the figures of the last step."""
        size, device = self.drafter.config.block_size, self.counts.loss_sum.device
        self.counts = BlockCounts.zeros(size, device)
        self.tokens = self.padding = self.skipped = 0
        self.readings.clear()


@attrs.frozen(eq=False, kw_only=True)
class TrainingParts:
    """Everything that trains; lists are in lane order."""

    plan: RunPlan
    targets: list[Target]
    drafters: list[DrafterPart]
    links: Links = attrs.field(factory=Links)
    """How copies between devices travel."""

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """All master weights by the drafter's parameter names, wherever they are kept."""
        kept = {name: weight for part in self.drafters for name, weight in part.masters.weights.items()}
        return {name: kept[name] for name in self.drafters[0].masters.parameters}

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and optimizer state of all drafters, by name; shows nothing of how they are shared out."""
        return {name: value for part in self.drafters for name, value in part.masters.state().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` returned, whatever number of drafters wrote it."""
        for part in self.drafters:
            part.masters.load(state)


def load_parts(
    plan: RunPlan, say: Callable[[str], None], progress: Progress | None = None, links: Links | None = None
) -> TrainingParts:
    """Load the target, copy it to where it is needed, and make the drafters; nothing is written.

    Args:
        say: takes lines about progress.
        progress: a display that shows a bar instead, while files are read.
        links: how weights travel between devices, and all else later; directly by default.
    """
    links = links or Links()
    target_devices = [torch.device(lane.device) for lane in plan.graph.target_lanes]
    by_device = {target_devices[0]: _load_target(plan, target_devices[0], say, progress)}
    for device in target_devices:
        if device not in by_device:
            say(f"target: {target_devices[0]} → {device}")
            by_device[device] = copy_target(by_device[target_devices[0]], device, links.copy)
    source = by_device[target_devices[0]]
    drafter_devices = [torch.device(lane.device) for lane in plan.graph.drafter_lanes]
    shared: dict[torch.device, SharedWeights] = {}
    for device in dict.fromkeys(drafter_devices):
        given = shared_weights(by_device.get(device, source))
        shared[device] = given.to(device, plan.compute_dtype, links.to)
    return TrainingParts(
        plan=plan,
        targets=[by_device[device] for device in target_devices],
        drafters=make_drafters(plan, drafter_devices, shared, links, say),
        links=links,
    )


def shared_weights(target: Target) -> SharedWeights:
    """A target's embedding and head; one tensor where the target ties them."""
    embed_tokens = target.embed_tokens.detach()
    tied = target.lm_head is target.embed_tokens
    return SharedWeights(embed_tokens, embed_tokens if tied else target.lm_head.detach())


def make_drafters(
    plan: RunPlan,
    devices: Sequence[torch.device],
    shared: Mapping[torch.device, SharedWeights],
    links: Links,
    say: Callable[[str], None],
) -> list[DrafterPart]:
    """A drafter per device named, all with the same weights, the masters shared out over them."""
    train, config = plan.schedule.train, plan.drafter_config
    parts: list[DrafterPart] = []
    for rank, device in enumerate(devices):
        drafter = build_drafter(config, device, plan.compute_dtype)
        drafter.requires_grad_(True)
        if parts:  # a copy is quicker than drawing or reading the same numbers again
            _copy(drafter, parts[0].drafter, links)
        elif plan.schedule.drafter.init == "fresh":
            drafter.initialise(plan.schedule.run.seed)
        else:
            stored = plan.schedule.target.init == "checkpoint"
            target = plan.summary.folder if stored else None
            for line in warm_start(drafter, Path(plan.schedule.drafter.init), shared[device], target):
                say(line)
        sizes = {name: parameter.numel() for name, parameter in drafter.named_parameters()}

        def make_optimizer(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = plan.host.choose(
                "make_optimizer", parameters=parameters, train=train
            )
            return optimizer

        masters = Masters(
            drafter,
            make_optimizer,
            share_out(sizes, len(devices))[rank],
            gradient_dtype=getattr(torch, train.gradient_dtype),
        )
        counts = BlockCounts.zeros(config.block_size, device)
        parts.append(DrafterPart(drafter, masters, shared[device], counts))
    return parts


@torch.no_grad()
def _copy(drafter: Drafter, first: Drafter, links: Links) -> None:
    for parameter, original in zip(drafter.parameters(), first.parameters(), strict=True):
        links.copy(parameter, original)


def _load_target(
    plan: RunPlan, device: torch.device, say: Callable[[str], None], progress: Progress | None
) -> Target:
    target: Target = plan.host.choose(
        "load_target",
        target=plan.schedule.target,
        folder=plan.target_folder,
        target_layer_ids=plan.drafter_config.target_layer_ids,
        device=device,
        seed=plan.schedule.run.seed,
        keep_head=plan.schedule.keeps_whole_target,
        progress=progress or say,
    )
    short = {name: ".".join(kernel.split(".")[-2:]) for name, kernel in target.kernels().items()}
    kernels = "; ".join(f"{operation}: {kernel}" for operation, kernel in short.items())
    say(f"kernels: {kernels}")
    return target


def pack_micro_batch(
    parts: TrainingParts, batch: MicroBatch, taps: list[torch.Tensor]
) -> tuple[PackedRow, Packed]:
    """The micro-batch as one row, its taps packed in the drafter's dtype on the target's device."""
    row = pack_row(batch.input_ids, batch.loss_mask, batch.lengths, batch.document_ids)
    packed = tuple(tensor.to(parts.plan.compute_dtype) for tensor in parts.recipe.features.pack(taps, row))
    if parts.plan.schedule.train.zero_taps:
        for tensor in packed:
            tensor.zero_()
    return row, packed


def step_row(
    parts: TrainingParts, step: int, norm: float, lr: float, counts: BlockCounts, trouble: str | None = None
) -> dict[str, Any]:
    """A step's row of metrics.jsonl, from the figures that its drafters gathered; speed is the caller's.

    Args:
        trouble: what was not finite, where the step was skipped for it.
    """
    drafters = parts.drafters
    row = {
        "step": step + 1,
        "epoch": max(part.epoch for part in drafters),
        "loss": counts.loss,
        "accuracy": counts.accuracy,
        "accuracy_by_slot": counts.accuracy_by_slot,
        "block_prefix": counts.block_prefix,
        "lr": lr,
        "grad_norm": norm,
        "tokens": sum(part.tokens for part in drafters),
        "padding": sum(part.padding for part in drafters),
        "anchors": counts.anchors,
        "skipped": sum(part.skipped for part in drafters),
        "bad_steps": int(trouble is not None),
        "peak_memory": peak_memory(parts.plan.devices),
    }
    return row if trouble is None else row | {"not_finite": trouble}


def peak_memory(devices: Sequence[torch.device]) -> dict[str, float]:
    """Peak of allocated GPU memory so far, GB (10^9 bytes) by device; empty on a CPU."""
    return {
        str(device): torch.cuda.max_memory_allocated(device) / 1e9
        for device in devices
        if device.type == "cuda"
    }
