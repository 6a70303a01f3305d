"""A fused walk whose large matrix products run in 8 bits (e4m3).

A weight is quantised once, with a scale per output channel; an activation whenever a group of projections
reads it, with a scale per token. Both kinds of scale multiply the product's rows and columns from outside,
so nothing of the sum is lost but the operands' own rounding. What decides over how far a state reaches
(the delta rule's two gates), the norms, the recurrence and attention stay as they are; embedding and head
are not touched.
"""

from collections.abc import Callable

import attrs
import torch
from torch import Tensor, nn

from engine.target import fused_operations
from engine.target.fused_operations import Norm, Operations, Projection
from engine.target.fused_walk import FusedWalk, fused_walk, on_device, walked_layers
from engine.target.loading import Target

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
KEPT = ("in_proj_a", "in_proj_b")
"""The linear layers of a target that stay in its own dtype."""

MULTIPLE = 16
"""What both sides of a weight have to be multiples of, for the GPU's 8-bit product."""


@attrs.frozen(eq=False)
class QuantizedRows:
    """Activations [N, D] as `values * scales`."""

    values: Tensor
    """e4m3 [N, D]"""
    scales: Tensor
    """float32 [N, 1]"""
    plain: Tensor | None = None
    """The same unquantised, where a small projection reads them."""


Product = Callable[[QuantizedRows, Tensor, Tensor, torch.dtype], Tensor]
"""(rows; weight e4m3 [out, in]; its scales float32 [out, 1]; dtype) → [N, out]."""


def quantized(x: Tensor, plain: Tensor | None = None) -> QuantizedRows:
    """Quantise [N, D] by rows."""
    x = x.float()
    scales = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return QuantizedRows((x / scales).to(E4M3), scales, plain)


def scaled_product(rows: QuantizedRows, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The GPU's 8-bit product, with fast accumulation."""
    out: Tensor = torch._scaled_mm(
        rows.values,
        weight.t(),
        scale_a=rows.scales,
        scale_b=scales.t(),
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return out


def emulated_product(rows: QuantizedRows, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers from a float32 product, on any device."""
    return (rows.values.float() @ weight.float().t() * rows.scales * scales.t()).to(dtype)


@attrs.frozen(eq=False)
class Fp8Projection:
    """A linear layer in 8 bits."""

    weight: Tensor
    """e4m3 [out, in]"""
    scales: Tensor
    """float32 [out, 1]"""
    bias: Tensor | None
    dtype: torch.dtype
    product: Product

    def __call__(self, rows: QuantizedRows) -> Tensor:
        out = self.product(rows, self.weight, self.scales, self.dtype)
        return out if self.bias is None else out + self.bias


def fp8_operations(base: Operations, *, on_gpu: bool, release: bool) -> Operations:
    """An operations table whose projections are in 8 bits and whose other functions quantise for them.

    Args:
        base: what stays as it is comes from here.
        on_gpu: fused kernels and the GPU's product; else plain PyTorch.
        release: take a layer's weight from the model once it is quantised, which leaves the model's own
            forward without it.
    """
    product: Product = scaled_product if on_gpu else emulated_product

    @torch.no_grad()
    def projection(linear: nn.Linear) -> Projection:
        rows = quantized(linear.weight)
        made = Fp8Projection(rows.values, rows.scales, linear.bias, linear.weight.dtype, product)
        if release:
            linear.weight.data = linear.weight.new_empty(0)
        return made

    def small_projection(first: nn.Linear, second: nn.Linear) -> Projection:
        project = base.small_projection(first, second)
        return lambda rows: project(rows.plain)

    table = _kernels(base) if on_gpu else _plain(base)
    return attrs.evolve(table, projection=projection, small_projection=small_projection)


def _kernels(base: Operations) -> Operations:
    from engine.target import fp8_kernels as kernels

    where = kernels.__name__
    return attrs.evolve(
        base,
        names={
            **base.names,
            "norm": f"{where}.add_norm",
            "gated_norm": f"{where}.gated_norm",
            "swiglu": f"{where}.swiglu",
            "linear": "torch._scaled_mm (e4m3, a scale per row)",
        },
        add_norm=kernels.add_norm,
        swiglu=kernels.swiglu,
        gated_norm=kernels.gated_norm,
        gate_heads=kernels.gate_heads,
    )


def _plain(base: Operations) -> Operations:
    def add_norm(
        branch: Tensor | None, residual: Tensor, norm: Norm, plain: bool
    ) -> tuple[QuantizedRows, Tensor]:
        x, total = fused_operations.add_norm(branch, residual, norm, plain)
        return quantized(x, x if plain else None), total

    return attrs.evolve(
        base,
        names={**base.names, "linear": "torch (e4m3 emulated in float32)"},
        add_norm=add_norm,
        swiglu=lambda gate, up: quantized(fused_operations.swiglu(gate, up)),
        gated_norm=lambda x, gate, norm: quantized(fused_operations.gated_norm(x, gate, norm)),
        gate_heads=lambda x, gate: quantized(fused_operations.gate_heads(x, gate)),
    )


def unfit(walk: FusedWalk) -> str | None:
    """Why a walk's products cannot run in 8 bits on its GPU; None if they can."""
    if torch.cuda.get_device_capability(walk.device) < (8, 9):
        name = torch.cuda.get_device_name(walk.device)
        return f"{name} ({walk.device}) has no 8-bit matrix products; those from Ada and Hopper on have"
    for name, part in walk.model.base_model.named_modules():
        if isinstance(part, nn.Linear) and not name.endswith(KEPT):
            if part.in_features % MULTIPLE or part.out_features % MULTIPLE:
                return f"{name} is {part.out_features} × {part.in_features}, no multiples of {MULTIPLE}"
            if part.weight.dtype != torch.bfloat16:
                return f"{name} is {part.weight.dtype}; 8-bit products with a scale per row return bfloat16"
    return None


def quantised_layers(target: Target) -> list[nn.Linear]:
    """The linear layers of a walk over a target that run in 8 bits."""
    named = [part for layer in walked_layers(target) for part in layer.named_modules()]
    return [part for name, part in named if isinstance(part, nn.Linear) and not name.endswith(KEPT)]


def quantised_bytes(linear: nn.Linear) -> int:
    """What a layer's weight takes in 8 bits, scales included."""
    return linear.weight.numel() + 4 * linear.out_features


def fp8_walk(target: Target, walk: FusedWalk, *, release: bool) -> FusedWalk:
    """The walk over a fused target in 8 bits.

    Args:
        target: whose weights `walk` uses.
        release: as `fp8_operations`; `walk` cannot be used afterwards.
    """
    on_gpu = target.device.type == "cuda"
    with on_device(target.device):
        made = fused_walk(target, fp8_operations(walk.operations, on_gpu=on_gpu, release=release))
    return attrs.evolve(made, checked=walk.checked)
