"""Queries or keys normed and rotated in one pass, from wherever a projection left them.

A gated attention's projection leaves each head's query beside its gate, so heads lie two widths apart;
the kernel reads through that and writes contiguous heads, as attention wants them. A program takes all
heads of one token: they share a position, and the rotation's other half of a head is read again from
the cache instead of being shuffled between threads.
"""

# A kernel's arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.target.fused_operations import Norm


@triton.jit
def norm_and_rotate_kernel(
    x,
    y,
    weight,
    cos,
    sin,
    row_stride,
    head_stride,
    length,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    place = tl.arange(0, BLOCK_WIDTH)
    inside = (heads < HEADS) & (place < WIDTH)[None, :]
    head = x + row * row_stride + heads * head_stride
    whole = tl.load(head + place[None, :], mask=inside, other=0.0).to(tl.float32)

    turns = place < ROTARY
    first = place < ROTARY // 2
    other = tl.where(first, place + ROTARY // 2, place - ROTARY // 2)
    across = tl.load(head + other[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)

    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(whole * whole, 1) / WIDTH + eps)
        whole *= scale[:, None] * tl.load(weight + place, mask=place < WIDTH, other=0.0)[None, :]
        across *= scale[:, None] * tl.load(weight + other, mask=turns, other=0.0)[None, :]

    angle = (row % length) * ROTARY + place
    along = tl.load(cos + angle, mask=turns, other=1.0)
    turned = tl.load(sin + angle, mask=turns, other=0.0)
    turned = tl.where(first, -turned, turned)
    out = whole * along[None, :] + across * turned[None, :]
    to = y + (row * HEADS + heads) * WIDTH + place[None, :]
    tl.store(to, out.to(y.dtype.element_ty), mask=inside)


def norm_and_rotate(x: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """As `Operations.rotate`; x [N, heads, d] with neighbouring elements of a head side by side."""
    rows, heads, width = x.shape
    y = torch.empty((rows, heads, width), dtype=x.dtype, device=x.device)
    norm_and_rotate_kernel[(rows,)](
        x,
        y,
        None if norm is None else norm.weight,
        cos,
        sin,
        x.stride(0),
        x.stride(1),
        cos.shape[0],
        0.0 if norm is None else norm.eps,
        HEADS=heads,
        WIDTH=width,
        ROTARY=cos.shape[1],
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_WIDTH=triton.next_power_of_2(width),
        HAS_NORM=norm is not None,
        num_warps=8 if heads > 4 else 2,
    )
    return y
