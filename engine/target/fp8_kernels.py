"""What stands between 8-bit matrix products, each with the quantisation of its result in the same kernel.

A program owns a token: it computes the token's values in float32, finds the largest, and writes 8-bit
values with their scale. Written in bfloat16 and quantised afterwards, every activation would be moved
twice more, half of what 8-bit products save. Block sizes are fixed rather than tuned: a token's row is
large enough that they all wait for memory alike.
"""

# A kernel's arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.target.fp8 import LARGEST, QuantizedRows
from engine.target.fused_operations import Norm
from engine.target.swiglu_kernel import sigmoid

PIECE = 4096
"""Elements of a row that SwiGLU holds at a time; its rows are longer than registers are many."""

NO_GATE, SIGMOID, NORM_SILU = 0, 1, 2


@triton.jit
def _add_norm_kernel(
    branch,
    residual,
    total,
    weight,
    plain,
    values,
    scales,
    eps,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    KEEP_PLAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    at = row * WIDTH + place
    x = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        x += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, x.to(total.dtype.element_ty), mask=inside)
    x *= 1 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    x *= tl.load(weight + place, mask=inside, other=0.0)
    if KEEP_PLAIN:
        tl.store(plain + at, x.to(plain.dtype.element_ty), mask=inside)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / LARGEST
    tl.store(values + at, (x * (1 / scale)).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _swiglu_kernel(gate, up, values, scales, LARGEST: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((PIECE,), dtype=tl.float32)
    for begin in range(0, WIDTH, PIECE):
        place = begin + tl.arange(0, PIECE)
        x = tl.load(gate + row * WIDTH + place, mask=place < WIDTH, other=0.0).to(tl.float32)
        y = tl.load(up + row * WIDTH + place, mask=place < WIDTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x * sigmoid(x) * y))
    scale = tl.maximum(tl.max(largest, 0), 1e-12) / LARGEST
    tl.store(scales + row, scale)
    inverse = 1 / scale
    for begin in range(0, WIDTH, PIECE):  # once more from the cache
        place = begin + tl.arange(0, PIECE)
        x = tl.load(gate + row * WIDTH + place, mask=place < WIDTH, other=0.0).to(tl.float32)
        y = tl.load(up + row * WIDTH + place, mask=place < WIDTH, other=0.0).to(tl.float32)
        z = x * sigmoid(x) * y * inverse
        tl.store(values + row * WIDTH + place, z.to(values.dtype.element_ty), mask=place < WIDTH)


@triton.jit
def _heads_kernel(
    x,
    gate,
    weight,
    values,
    scales,
    x_row,
    x_head,
    gate_row,
    gate_head,
    eps,
    LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    place = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (head < HEADS) & (place < WIDTH)
    y = tl.load(x + row * x_row + head * x_head + place, mask=inside, other=0.0).to(tl.float32)
    if KIND == 2:
        norm = 1 / tl.sqrt(tl.sum(y * y, 1) / WIDTH + eps)
        y *= norm[:, None] * tl.load(weight + place, mask=place < WIDTH, other=0.0)
    if KIND > 0:
        at = gate + row * gate_row + head * gate_head + place
        g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        y *= sigmoid(g)
        if KIND == 2:
            y *= g
    scale = tl.maximum(tl.max(tl.max(tl.abs(y), 1), 0), 1e-12) / LARGEST
    to = values + (row * HEADS + head) * WIDTH + place
    tl.store(to, (y * (1 / scale)).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def _room(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty((rows, 1), dtype=torch.float32, device=device)


def add_norm(
    branch: Tensor | None, residual: Tensor, norm: Norm, plain: bool
) -> tuple[QuantizedRows, Tensor]:
    """As `Operations.add_norm`, quantised."""
    rows, width = residual.shape
    values, scales = _room(rows, width, residual.device)
    kept = torch.empty_like(residual) if plain else None
    total = residual if branch is None else torch.empty_like(residual)
    _add_norm_kernel[(rows,)](
        branch,
        residual,
        total,
        norm.weight,
        kept,
        values,
        scales,
        norm.eps,
        LARGEST=LARGEST,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        HAS_BRANCH=branch is not None,
        KEEP_PLAIN=plain,
        num_warps=8,
    )
    return QuantizedRows(values, scales, kept), total


def swiglu(gate: Tensor, up: Tensor) -> QuantizedRows:
    """As `Operations.swiglu`, quantised."""
    rows, width = gate.shape
    values, scales = _room(rows, width, gate.device)
    _swiglu_kernel[(rows,)](gate, up, values, scales, LARGEST=LARGEST, WIDTH=width, PIECE=PIECE, num_warps=8)
    return QuantizedRows(values, scales)


def gated_norm(x: Tensor, gate: Tensor, norm: Norm) -> QuantizedRows:
    """As `Operations.gated_norm`, quantised."""
    return _heads(x, gate, norm, NORM_SILU)


def gate_heads(x: Tensor, gate: Tensor | None) -> QuantizedRows:
    """As `Operations.gate_heads`, quantised."""
    return _heads(x, gate, None, NO_GATE if gate is None else SIGMOID)


def _heads(x: Tensor, gate: Tensor | None, norm: Norm | None, kind: int) -> QuantizedRows:
    rows, heads, width = x.shape
    values, scales = _room(rows, heads * width, x.device)
    _heads_kernel[(rows,)](
        x,
        gate,
        None if norm is None else norm.weight,
        values,
        scales,
        x.stride(0),
        x.stride(1),
        0 if gate is None else gate.stride(0),
        0 if gate is None else gate.stride(1),
        0.0 if norm is None else norm.eps,
        LARGEST=LARGEST,
        HEADS=heads,
        WIDTH=width,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_WIDTH=triton.next_power_of_2(width),
        KIND=kind,
        num_warps=8,
    )
    return QuantizedRows(values, scales)
