"""A Gated DeltaNet's short convolution of queries, keys and values in one launch.

The three stand side by side in one product, whose rows are read where they are. A program takes one key
head's width, so that the whole head is at hand and scaling it to unit length costs no pass of its own. Each
thread walks a few tokens of its channels and keeps the last three in registers: a value is loaded and widened
once rather than once per tap, without which this would wait for arithmetic and not for memory. What comes
out are three contiguous tensors, as the delta rule's kernels want them, in one allocation.
"""

# A kernel's arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import EngineError
from engine.target.swiglu_kernel import sigmoid

TILE = 1024
"""Elements of a step: one 16-byte load of bfloat16 for each thread of 4 warps."""

STEPS = 8
"""Tokens that a thread walks; it reads three more in front of them."""

TAPS = 4


@triton.jit
def _tokens(x, time, length, stride, inside):
    there = (time >= 0) & (time < length)  # zeros in front of a row, never the row before
    return tl.load(x + time * stride, mask=there & inside, other=0.0).to(tl.float32)


@triton.jit
def _walk(
    x,
    weight,
    out,
    stride,
    length,
    first,
    inside,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    # Loaded in a tile's shape, a thread gets the factors of its own channels without an exchange.
    w0 = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(weight + CHANNELS, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight + 2 * CHANNELS, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(weight + 3 * CHANNELS, mask=inside, other=0.0).to(tl.float32)
    x0 = _tokens(x, first - 3, length, stride, inside)
    x1 = _tokens(x, first - 2, length, stride, inside)
    x2 = _tokens(x, first - 1, length, stride, inside)
    for step in tl.static_range(STEPS):
        time = first + step
        x3 = _tokens(x, time, length, stride, inside)
        y = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
        y *= sigmoid(y)
        if UNIT:
            y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
        tl.store(out + time * WIDTH, y.to(out.dtype.element_ty), mask=(time < length) & inside)
        x0 = x1
        x1 = x2
        x2 = x3


@triton.jit(do_not_specialize=["length"])
def convolution_kernel(
    x,
    weight,
    out,
    row_stride,
    token_stride,
    length,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
):
    begin = tl.program_id(0) * HEAD
    lane = tl.program_id(1).to(tl.int64) * LANES + tl.arange(0, LANES)
    row = tl.program_id(2).to(tl.int64)
    rows = tl.num_programs(2).to(tl.int64)
    first = (lane * STEPS)[:, None]
    channel = begin + tl.arange(0, HEAD)[None, :]
    inside = (channel < CHANNELS) & (first < length)
    x += row * row_stride + channel
    weight += channel + first * 0
    # Queries and keys are KEYS channels each, values the rest; each part begins where the one before ends.
    if begin < 2 * KEYS:
        part = tl.where(begin < KEYS, 0, KEYS)
        to = out + (rows * length * part + row * length * KEYS) + (channel - part)
        _walk(x, weight, to, token_stride, length, first, inside, CHANNELS, KEYS, STEPS, True)
    else:
        VALUES: tl.constexpr = CHANNELS - 2 * KEYS
        to = out + (rows * length * 2 * KEYS + row * length * VALUES) + (channel - 2 * KEYS)
        _walk(x, weight, to, token_stride, length, first, inside, CHANNELS, VALUES, STEPS, False)


def convolve(
    x: Tensor, weight: Tensor, key_width: int, value_width: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `Operations.convolve`; the three results share an allocation.

    Raises:
        EngineError: a head is no power of two wide, which a tile has to be; the convolution has other than
            four taps; or x or weight lie in memory in a way that the kernel does not read.
    """
    rows, length, channels = x.shape
    if key_dim & (key_dim - 1) or key_dim > TILE:
        raise EngineError(
            f"the convolution's tiles are one key head wide, and a tile a power of two up to {TILE}; these "
            f"heads have {key_dim} channels"
        )
    if channels != 2 * key_width + value_width or key_width % key_dim:
        raise EngineError(
            f"{channels} channels are not two times {key_width} and {value_width}, or {key_width} are no "
            f"whole heads of {key_dim}"
        )
    if weight.shape != (TAPS, channels) or not weight.is_contiguous() or x.stride(2) != 1:
        raise EngineError(
            f"the convolution reads {TAPS} taps of {channels} channels side by side; its weight is "
            f"{tuple(weight.shape)} with strides {weight.stride()}, x has strides {x.stride()}"
        )
    out = torch.empty(rows * length * channels, dtype=x.dtype, device=x.device)
    lanes = TILE // key_dim
    convolution_kernel[(triton.cdiv(channels, key_dim), triton.cdiv(length, lanes * STEPS), rows)](
        x,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        length,
        CHANNELS=channels,
        KEYS=key_width,
        HEAD=key_dim,
        LANES=lanes,
        STEPS=STEPS,
        num_warps=4,
    )
    sizes = [rows * length * width for width in (key_width, key_width, value_width)]
    q, k, v = (part.view(rows, length, -1) for part in out.split(sizes))
    return q, k, v
