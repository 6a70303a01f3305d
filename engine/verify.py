"""`verify`: recompute reference files and say how far this code is from them.

A reference file holds a drafter's weights, one training step's inputs, and the loss, hidden states
and gradients that somebody else's released code computed from them in float32. Relative error is
`max|Δ| / max|reference|`. On a CPU with the flex backend only the forward pass is compared, since
FlexAttention has no backward there. What runs is the drafter as it is, or compiled as a run compiles it.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import attrs
import orjson
import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.devices import available_devices
from engine.dflash.anchors import Anchors, anchors_at
from engine.dflash.attention import Backend
from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.export import fill_drafter
from engine.dflash.objective import BlockWeights, block_loss, decay_weights, dpace_weights
from engine.dflash.packing import PackedRow, pack_row, pack_taps
from engine.dflash.training import Recipe, SharedWeights, drafter_blocks
from engine.errors import DifferenceFound, InputError
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from plugins.concat import ConcatenatedTaps
from plugins.lazy_compile import LazyCompile, Options

FORWARD_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
GRADIENT_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}


@attrs.frozen
class Reference:
    """One reference file, read."""

    tensors: dict[str, Tensor]
    config: DrafterConfig
    objective: dict[str, Any]


@attrs.frozen
class Comparison:
    """Relative errors of one reference file; gradient errors are None where none were computed."""

    file: str
    loss: float
    hidden: float
    accuracy: float
    gradient: float | None
    worst_gradient: str | None
    tolerance: tuple[float, float]
    """(loss and hidden, gradients)"""

    @property
    def passed(self) -> bool:
        forward = max(self.loss, self.hidden, self.accuracy) < self.tolerance[0]  # NaN fails
        return forward and (self.gradient is None or self.gradient < self.tolerance[1])


def read_reference(path: Path) -> Reference:
    """Read a reference file.

    Raises:
        InputError: missing, corrupt, or not a training reference.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such reference file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Reference(
            tensors,
            DrafterConfig.from_server_json(orjson.loads(metadata["config"]), str(path)),
            orjson.loads(metadata["objective"]),
        )
    except (SafetensorError, orjson.JSONDecodeError) as error:
        raise InputError(f"{path}: corrupt reference file: {error}") from error
    except KeyError as error:
        raise InputError(
            f"{path}: not a training reference, its metadata lacks {error}; "
            "expected one laid out as tests/golden/README.md describes"
        ) from error


def relative_error(value: Tensor, reference: Tensor) -> float:
    """max|Δ| / max|reference|; NaN never compares as small."""
    value, reference = value.detach().double().cpu(), reference.double()
    return float((value - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


def pack_reference(reference: Reference) -> tuple[PackedRow, Tensor, Anchors, Tensor]:
    """A reference's rows as one packed row.

    Returns:
        the row, its taps [T, taps·H], the anchors, and the index [used] of each used anchor among
        the reference's `rows · N` slots.
    """
    tensors = reference.tensors
    rows, length = tensors["input_ids"].shape
    lengths = torch.full((rows,), length)
    row = pack_row(tensors["input_ids"], tensors["loss_mask"], lengths, torch.arange(rows))
    taps = list(tensors["target_hidden"].split(reference.config.hidden_size, dim=-1))
    slots = (tensors["anchors"] + row.starts[:, None]).flatten()
    valid = tensors["anchor_valid"].bool().flatten().nonzero().squeeze(1)
    order = valid[slots[valid].argsort(stable=True)]
    return row, pack_taps(taps, row), anchors_at(row, slots[order], slots.numel()), order


def _weights(objective: dict[str, Any]) -> BlockWeights:
    if objective["loss"] == "dpace":
        return dpace_weights(objective["dpace_alpha"])
    return decay_weights(objective["gamma"])


def compare(
    path: Path, *, device: torch.device, backend: Backend, wrap: Callable[[Drafter], Drafter] | None = None
) -> Comparison:
    """Recompute one reference in float32 on a device and a backend.

    Args:
        wrap: what compiles the drafter, in place.
    """
    reference = read_reference(path)
    config, tensors, objective = reference.config, reference.tensors, reference.objective
    row, taps, anchors, order = pack_reference(reference)
    drafter = build_drafter(config, device, torch.float32)
    weights = {
        name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")
    }
    fill_drafter(drafter, weights, str(path))
    with_gradients = not (device.type == "cpu" and backend == "flex")
    drafter.requires_grad_(with_gradients)
    drafter = wrap(drafter) if wrap else drafter
    shared = SharedWeights(tensors["embed_tokens"].to(device), tensors["lm_head"].to(device))
    recipe = Recipe(
        features=ConcatenatedTaps(config.hidden_size),
        weights=_weights(objective),
        backend=backend,
        chunk=64,
        max_anchors=anchors.count,
        seed=0,
    )
    context = recipe.features.context(drafter, (taps.to(device),))
    hidden, blocks = drafter_blocks(drafter, shared, context, row, anchors, recipe)
    result = block_loss(
        hidden,
        shared.lm_head,
        blocks.labels,
        blocks.supervised,
        weights=recipe.weights,
        chunk=recipe.chunk,
        used=anchors.used,
        softmax=drafter.softmax,
    )
    # The reference's D-PACE divides by its number of documents, everything else by Σ w.
    divisor = row.document_ids.numel() if objective["loss"] == "dpace" else result.weight_sum
    loss = result.loss_sum / divisor
    gradient, worst = None, None
    if with_gradients:
        loss.backward()
        errors = {
            name: relative_error(parameter.grad, tensors[f"grad.{name}"])
            if parameter.grad is not None
            else float("nan")
            for name, parameter in drafter.named_parameters()
        }
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        gradient = errors[worst]
    size, width = config.block_size, config.hidden_size
    expected = tensors["drafter_hidden"].reshape(-1, size, width)[order]
    accuracy = result.right.sum() / result.supervised.sum()
    return Comparison(
        file=path.name,
        loss=relative_error(loss, tensors["loss"]),
        hidden=relative_error(hidden.view(-1, size, width)[: anchors.used], expected),
        accuracy=relative_error(accuracy, tensors["accuracy"]),
        gradient=gradient,
        worst_gradient=worst,
        tolerance=(FORWARD_TOLERANCE[device.type], GRADIENT_TOLERANCE[device.type]),
    )


def _compiled(lane: Lane, drafter: Drafter) -> Drafter:
    return LazyCompile(Options()).wrap_drafter(drafter, lane, Serializer("none")) or drafter


def verify_files(files: Sequence[Path], *, device_name: str, attention: str, compiled: bool = False) -> None:
    """Compare reference files and print a table.

    Args:
        compiled: by `plugins.lazy_compile`.

    Raises:
        InputError: a device, backend or file that cannot be used.
        DifferenceFound: at least one file is beyond its tolerance.
    """
    if device_name not in (known := available_devices()):
        raise InputError(f"--device {device_name}: no such device here; there are {', '.join(known)}")
    backend = next((known for known in get_args(Backend) if known == attention), None)
    if backend is None:
        raise InputError(f"--attention {attention}: known are {' and '.join(get_args(Backend))}")
    # TF32 products are three digits short of the tolerance.
    torch.set_float32_matmul_precision("highest")
    how = f"{attention}, compiled" if compiled else attention
    table = Table(title=f"relative errors on {device_name}, {how}")
    for heading in ("file", "loss", "hidden", "accuracy", "worst gradient", "of", ""):
        table.add_column(heading, justify="left" if heading in ("file", "of", "") else "right")
    failed = []
    lane = Lane(LaneSpec("drafter", 0, device_name))
    wrap = partial(_compiled, lane) if compiled else None
    for path in files:
        with lane.active():
            result = compare(path, device=lane.device, backend=backend, wrap=wrap)
        gradient = "–" if result.gradient is None else f"{result.gradient:.1e}"
        figures = [f"{value:.1e}" for value in (result.loss, result.hidden, result.accuracy)]
        verdict = "ok" if result.passed else "beyond tolerance"
        table.add_row(result.file, *figures, gradient, result.worst_gradient or "forward only", verdict)
        if not result.passed:
            failed.append(result.file)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if failed:
        forward, backward = result.tolerance
        raise DifferenceFound(
            f"{len(failed)} of {len(files)} references differ by more than {forward:g} "
            f"(loss, hidden, accuracy) or {backward:g} (gradients): {', '.join(failed)}"
        )
