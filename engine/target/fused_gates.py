"""Gates over heads: a norm with its silu gate after the delta rule, a sigmoid gate after attention.

A program takes as many heads as fill its threads' loads, wherever they lie: a gate may stand beside the
query that it was projected with. Tile and warps are fixed: a tuner would compile thirty variants of a
kernel that only waits for memory, and time them anew for every batch size.
"""

# A kernel's arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.target.fused_operations import Norm
from engine.target.swiglu_kernel import sigmoid

TILE = 4096
"""Elements of a program, 32 for each thread of 4 warps."""


@triton.jit(do_not_specialize=["rows"])
def gate_kernel(
    x,
    gate,
    weight,
    out,
    x_token,
    x_head,
    gate_token,
    gate_head,
    rows,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # 32 bits, which divide quickly
    token, head = (row // HEADS).to(tl.int64)[:, None], (row % HEADS)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (place < WIDTH)
    y = tl.load(x + token * x_token + head * x_head + place, mask=inside, other=0.0).to(tl.float32)
    at = gate + token * gate_token + head * gate_head + place
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        y *= (1 / tl.sqrt(tl.sum(y * y, 1) / WIDTH + eps))[:, None]
        y *= tl.load(weight + place, mask=place < WIDTH, other=0.0) * g
    y *= sigmoid(g)
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + place, y.to(out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
    """As `Operations.gated_norm`; neighbouring elements of a head side by side."""
    return _gated(x, gate, norm)


def gate_heads(x: Tensor, gate: Tensor | None) -> Tensor:
    """As `Operations.gate_heads`; neighbouring elements of a head side by side."""
    return x.flatten(1) if gate is None else _gated(x, gate, None)


def _gated(x: Tensor, gate: Tensor, norm: Norm | None) -> Tensor:
    tokens, heads, width = x.shape
    block = triton.next_power_of_2(width)
    per_program = max(TILE // block, 1)
    out = torch.empty((tokens, heads * width), dtype=x.dtype, device=x.device)
    gate_kernel[(triton.cdiv(tokens * heads, per_program),)](
        x,
        gate,
        None if norm is None else norm.weight,
        out,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        tokens * heads,
        0.0 if norm is None else norm.eps,
        HEADS=heads,
        WIDTH=width,
        ROWS=per_program,
        BLOCK=block,
        HAS_NORM=norm is not None,
        num_warps=4,
    )
    return out
