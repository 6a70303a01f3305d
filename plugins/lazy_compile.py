"""The drafter compiled, at the first step rather than at import: its layers, and the softmax behind its head.

A layer is compiled in two pieces, before and behind its attention. The attention is made anew for
every micro-batch and would have the compiler start over each time; on a GPU it is a compiled
FlexAttention of its own. All layers share the pieces' code, but for the first, whose input needs no
gradient. The first context length is compiled as it is, the second makes it a variable, and later
ones compile nothing of the layers.

What autograd keeps of a layer is settled by the compiler. It would keep whatever a product of the backward
pass reads; the normed inputs and the gated product of the MLP are one fused kernel away from what is kept
anyway, so they are made again: 2.3 GB less for a 27B target's drafter, for half a percent of its time.

Behind the head, the logits of some rows become entropies and gradients in a single kernel on a GPU
(`engine.dflash.softmax_kernel`).

Tracing must not run in two threads at once, and by default torch compiles a backward pass when it is
first needed, in a thread of autograd's. So no other lane compiles during a call with shapes that its
lane has not met, and its backward is compiled at once.
"""

import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, cast

import attrs
import torch
import torch._functorch.config
from torch import Tensor

from engine.dflash.attention import Attention
from engine.dflash.drafter import Drafter, DrafterLayer, rotate
from engine.errors import InputError
from engine.hookspecs import hookimpl
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer

KEEPS_NUMBERS = True
"""What it wraps computes the same but for rounding."""

Position = tuple[Tensor, Tensor]


@attrs.frozen(kw_only=True)
class Options:
    """What compiles."""

    on: Literal["all", "gpu"] = "all"
    """`gpu`: lanes on a CPU run uncompiled, so that one schedule serves machines with and without GPUs."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """`aot_eager` runs the traced graphs without generating code: to tell a wrong graph from wrong code."""
    recompute: bool = True
    """Make again in the backward pass what is one fused kernel away, rather than keep it."""


def before_attention(
    layer: DrafterLayer, x: Tensor, context: Tensor, block_position: Position, context_position: Position
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [N·B, H] and context [T, H] → q, context k and v, block k and v, as attention takes them."""
    attention = layer.self_attn
    x = layer.input_layernorm(x)
    q = attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, attention.head_dim)))  # [N·B, heads, d]
    context_k, context_v = attention.keys_values(context, context_position)
    block_k, block_v = attention.keys_values(x, block_position)
    return rotate(q, *block_position), context_k, context_v, block_k, block_v


def behind_attention(layer: DrafterLayer, x: Tensor, out: Tensor) -> Tensor:
    """The layer's input x and attention's output [N·B, heads, d] → the layer's output [N·B, H]."""
    x = x + layer.self_attn.o_proj(out.flatten(1))
    return x + layer.mlp(layer.post_attention_layernorm(x))


@attrs.define(eq=False)
class CompiledLayer:
    """Stands in for a layer's `forward`."""

    layer: DrafterLayer
    lane: Lane
    serializer: Serializer
    before: Callable[..., Any]
    behind: Callable[..., Any]
    recompute: bool
    met: set[tuple[Any, ...]] = attrs.field(factory=set)

    def __call__(
        self,
        x: Tensor,
        context: Tensor,
        block_position: Position,
        context_position: Position,
        attention: Attention,
    ) -> Tensor:
        key = (x.shape, context.shape, x.dtype, context.dtype, torch.is_grad_enabled())
        with ExitStack() as alone:
            if key not in self.met:
                alone.enter_context(self.serializer.compiling(self.lane))
                alone.enter_context(
                    torch._functorch.config.patch(
                        force_non_lazy_backward_lowering=True,
                        ban_recompute_materialized_backward=not self.recompute,
                    )
                )
            q, *keys_values = self.before(self.layer, x, context, block_position, context_position)
            x = self.behind(self.layer, x, attention(self.layer.layer_type, q, *keys_values))
        self.met.add(key)
        return x


class LazyCompile:
    def __init__(self, options: Options) -> None:
        self.options = options

    @hookimpl
    def wrap_drafter(self, drafter: Drafter, lane: Lane, serializer: Serializer) -> Drafter | None:
        if self.options.on == "gpu" and lane.device.type != "cuda":
            return None
        if self.options.backend == "inductor":
            check_compiler(lane.device.type)
        # Two context lengths on each of several devices, with and without gradient, pass the default.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        before, behind = (
            torch.compile(piece, fullgraph=True, backend=self.options.backend)
            for piece in (before_attention, behind_attention)
        )

        for layer in cast(list[DrafterLayer], list(drafter.layers)):
            compiled = CompiledLayer(layer, lane, serializer, before, behind, self.options.recompute)
            layer.forward = compiled  # type: ignore[method-assign]
        if lane.device.type == "cuda":
            # Imported where there is a GPU, and Triton with it.
            from engine.dflash.softmax_kernel import fused_softmax

            drafter.softmax = fused_softmax
        return drafter


def check_compiler(device: str) -> None:
    """Look for the compiler that generated code needs on a kind of device.

    Raises:
        InputError: there is none; names what to install.
    """
    language, variable, usual = ("C++", "CXX", ("g++",)) if device == "cpu" else ("C", "CC", ("gcc", "clang"))
    wanted = shlex.split(os.environ.get(variable, ""))[:1] or list(usual)
    if not any(shutil.which(name) for name in wanted):
        raise InputError(
            f"compiling for a {device} device needs a {language} compiler, and {' or '.join(wanted)} is "
            f"not on PATH; install one, point {variable} at it, or leave lazy_compile out"
        )


def make(options: Options) -> LazyCompile:
    return LazyCompile(options)
