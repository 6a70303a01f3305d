"""silu(gate) * up over flat memory: the one operation between an MLP's matrix products.

It moves more bytes than everything else between products together, and memory is all it waits for. Gate and
up are both whole products, so element n of one stands at place n of the other: no row, no column, no
division, only 16-byte loads. One block size is as fast as any that fills the loads, so nothing is tuned.
"""

# A kernel's arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import EngineError

BLOCK = 4096
"""Elements of a program: four 16-byte loads of each input per thread, in flight at once."""


@triton.jit
def sigmoid(x):
    """As exact as `tl.sigmoid` in half its instructions, which would otherwise bound the kernels that use it.

    A division guards against divisors near the ends of the range, where 1 + e^-x never is; the inverse root
    does not, and squared it is the quotient.
    """
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))  # log2(e)
    return root * root


@triton.jit
def swiglu_kernel(gate, up, out, elements, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    inside = place < elements
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (x * sigmoid(x) * y).to(out.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `Operations.swiglu`, in float32 with one rounding.

    Raises:
        EngineError: the two are not of one shape, or not contiguous; copying them would hide what it costs.
    """
    if gate.shape != up.shape or not (gate.is_contiguous() and up.is_contiguous()):
        raise EngineError(
            f"SwiGLU reads a contiguous gate and up of one shape, and got {tuple(gate.shape)} with strides "
            f"{gate.stride()} and {tuple(up.shape)} with strides {up.stride()}; give it whole products"
        )
    out = torch.empty_like(gate)
    elements = gate.numel()
    swiglu_kernel[(triton.cdiv(elements, BLOCK),)](gate, up, out, elements, BLOCK=BLOCK, num_warps=4)
    return out
