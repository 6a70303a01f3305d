"""A drafter's attention in use against the dense one, forward and backward, on random queries and keys.

FlexAttention is compiled on the machine that runs it, for shapes that only this run may have, so its
code is compared before its gradients are trusted. The dense backend computes in float32 what the
backend in use computes in the drafter's dtype, with the same masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.dflash.anchors import Anchors
from engine.dflash.attention import Attention, Backend, prepare_attention
from engine.dflash.configuration import DrafterConfig
from engine.dflash.packing import PackedRow

if TYPE_CHECKING:
    from engine.hookspecs import AttentionBuilder

ATTENTION_TOLERANCE = {"output": 2e-2, "gradient": 4e-2}
"""Of ‖Δ‖ / ‖dense‖. bfloat16 rounds probabilities and results by 2e-3 each, and a backward pass subtracts
numbers that were rounded so; a wrong tile is off by tenths."""

INPUTS = ("q", "context_k", "context_v", "block_k", "block_v")


def attention_errors(
    builder: AttentionBuilder,
    backend: Backend,
    row: PackedRow,
    anchors: Anchors,
    config: DrafterConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    backward: bool = True,
    seed: int = 0,
) -> dict[tuple[str, str], float]:
    """Relative errors of a backend on one packed row's masks.

    Args:
        builder, backend: what a run attends with.
        dtype: of queries and keys; the reference is float32.
        backward: compare gradients too; FlexAttention has none on a CPU.

    Returns:
        (layer type, `output` or `gradient of <input>`) to ‖Δ‖ / ‖reference‖; infinite where a number is
        not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    queries = anchors.count * config.block_size
    shapes = {name: (row.length, config.kv_heads, config.head_dim) for name in INPUTS[1:3]}
    shapes |= {name: (queries, config.kv_heads, config.head_dim) for name in INPUTS[3:]}
    shapes["q"] = (queries, config.heads, config.head_dim)
    given = {name: torch.randn(shapes[name], generator=generator).to(device, dtype) for name in INPUTS}
    direction = torch.randn(shapes["q"], generator=generator).to(device, dtype)
    attend = builder(backend, anchors, row.starts, row.length, config, device)
    dense = prepare_attention("dense", anchors, row.starts, row.length, config, device)
    errors = {}
    for kind in dict.fromkeys(config.layer_types):
        results, references = (
            _run(attention, kind, {name: value.to(to) for name, value in given.items()}, direction, backward)
            for attention, to in ((attend, dtype), (dense, torch.float32))
        )
        for what, reference in references.items():
            errors[kind, what] = _relative(results[what], reference)
    return errors


def tolerance(what: str) -> float:
    """The bound for one of the keys of `attention_errors`."""
    return ATTENTION_TOLERANCE[what.partition(" ")[0]]


def _run(
    attention: Attention, kind: str, given: dict[str, Tensor], direction: Tensor, backward: bool
) -> dict[str, Tensor]:
    inputs = {name: value.detach().requires_grad_(backward) for name, value in given.items()}
    output = attention(kind, *(inputs[name] for name in INPUTS))
    found = {"output": output.detach()}
    if backward:
        gradients = torch.autograd.grad(output, list(inputs.values()), direction.to(output.dtype))
        found |= {f"gradient of {name}": value for name, value in zip(inputs, gradients, strict=True)}
    return found


def _relative(result: Tensor, reference: Tensor) -> float:
    reference = reference.double()
    error = torch.linalg.vector_norm(result.double() - reference)
    error = float(error / torch.linalg.vector_norm(reference).clamp(min=1e-30))
    return error if error == error else float("inf")
