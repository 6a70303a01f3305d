"""What a target's layers are made of, as a table of functions: plain PyTorch, or fused GPU kernels.

The walk over the layers (`fused_walk`) says in which order things happen and knows no kernel; this table
says how each is done. In plain PyTorch everything between two matrix products is computed in float32 and
rounded once, which is what the kernels do as well, so the plain table is both the path on a CPU and the
kernels' reference.

FLA gives the delta rule and the norm; its forward functions are called directly, since autograd functions
would keep arguments for a backward pass that a frozen target never has, and cost Python time that many lanes
share. What else stands between products is the project's own: each such kernel only waits for memory, so it
has one fixed shape, where FLA's are tuned over dozens when a run starts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPLACED = ("norm", "gated_norm", "causal_conv1d_fn", "chunk_gated_delta_rule", "swiglu", "rotary", "linear")
"""The operations that a walk has functions of its own for, under the names of `bound_kernels`."""

Rows = Any
"""What a projection reads: a Tensor [tokens, width], or its quantised form."""

Projection = Callable[[Rows], Tensor]
"""[tokens, in] → [tokens, out]."""


@attrs.frozen(eq=False)
class Norm:
    """An RMSNorm: `x / sqrt(mean(x²) + eps) * weight`."""

    weight: Tensor
    """float32 [D]; one is added already where the model keeps weights around zero."""
    eps: float


@attrs.frozen(eq=False, kw_only=True)
class Operations:
    """The functions of one path. Tensors are in the target's dtype and need no gradient."""

    names: Mapping[str, str]
    """What each is, for the start-up print."""

    add_norm: Callable[[Tensor | None, Tensor, Norm, bool], tuple[Rows, Tensor]]
    """(branch [N, H] or None, residual [N, H], norm, plain) → (normed rows, branch + residual). `plain`: a
    `small_projection` reads the rows too."""
    swiglu: Callable[[Tensor, Tensor], Rows]
    """(gate, up), both [N, I] → silu(gate) * up."""
    convolve: Callable[[Tensor, Tensor, int, int, int], tuple[Tensor, Tensor, Tensor]]
    """(x [B, T, D], whose rows may lie apart; weight [W, D]; channels of all queries, which are as many as of
    all keys; of all values; of a key head) → silu of the causal depthwise convolution as q, k [B, T, keys]
    and v [B, T, values], contiguous, each head of q and k of unit length."""
    delta_rule: Callable[..., Tensor]
    """(q, k [B, T, Hk, K] of unit length; v [B, T, Hv, V]; raw decay and beta [B, T, Hv]; A_log, dt_bias
    float32 [Hv]) → [B, T, Hv, V], with the Gated DeltaNet's gates."""
    gated_norm: Callable[[Tensor, Tensor, Norm], Rows]
    """(x, gate, both [N, heads, d]; norm) → norm(x) * silu(gate), [N, heads·d]."""
    rotate: Callable[[Tensor, Norm | None, Tensor, Tensor], Tensor]
    """(x [N, heads, d], whose rows and heads may lie apart; norm over d, or None; cos, sin float32 [T, R])
    → normed and rotated, contiguous. Row n stands at position n mod T; dimensions from R on stay."""
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(q [B, T, heads, d]; k, v [B, T, kv_heads, d]; scale) → causal attention [B, T, heads, d]."""
    gate_heads: Callable[[Tensor, Tensor | None], Rows]
    """(x [N, heads, d], gate [N, heads, d] or None) → x * sigmoid(gate), [N, heads·d]."""
    projection: Callable[[nn.Linear], Projection]
    """A linear layer of the model as a projection; its weight is shared, not copied."""
    small_projection: Callable[[nn.Linear, nn.Linear], Projection]
    """Two small linear layers as one, outputs side by side."""


def torch_operations() -> Operations:
    """Plain PyTorch, for any device."""
    return Operations(
        names=dict.fromkeys(REPLACED, "torch (fused walk, reference)") | {"attention": "sdpa"},
        add_norm=add_norm,
        swiglu=swiglu,
        convolve=convolve,
        delta_rule=delta_rule,
        gated_norm=gated_norm,
        rotate=rotate,
        attend=attend,
        gate_heads=gate_heads,
        projection=shared_projection,
        small_projection=side_by_side,
    )


def normed(x: Tensor, norm: Norm) -> Tensor:
    """float32 [..., D] → float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def add_norm(branch: Tensor | None, residual: Tensor, norm: Norm, plain: bool) -> tuple[Tensor, Tensor]:
    whole = residual.float() if branch is None else branch.float() + residual.float()
    return normed(whole, norm).to(residual.dtype), residual if branch is None else whole.to(residual.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def convolve(
    x: Tensor, weight: Tensor, key_width: int, value_width: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    padded = F.pad(x.float().transpose(1, 2), (weight.shape[0] - 1, 0))  # [B, D, W - 1 + T]
    mixed = F.conv1d(padded, weight.float().t().unsqueeze(1), groups=weight.shape[1])
    q, k, v = F.silu(mixed).transpose(1, 2).split([key_width, key_width, value_width], dim=2)
    q, k = (unit(part.unflatten(2, (-1, key_dim))).flatten(2) for part in (q, k))
    return q.to(x.dtype).contiguous(), k.to(x.dtype).contiguous(), v.to(x.dtype).contiguous()


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """Token by token: S ← e^g·S, S ← S + k·(β(v - kᵀS))ᵀ, o = qᵀS / sqrt(K)."""
    share = v.shape[2] // k.shape[2]
    g = (-A_log.exp() * F.softplus(decay.float() + dt_bias)).exp()  # [B, T, Hv]
    beta = beta.float().sigmoid()
    q, k = (x.float().repeat_interleave(share, dim=2) for x in (q, k))  # [B, T, Hv, K]
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])  # [B, Hv, K, V]
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None]
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - seen))
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, state)
    return out


def unit(x: Tensor) -> Tensor:
    """[..., D] scaled to unit length; the constant is FLA's."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_norm(x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
    return (normed(x.float(), norm) * F.silu(gate.float())).to(x.dtype).flatten(1)


def rotate(x: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor) -> Tensor:
    whole = x.float() if norm is None else normed(x.float(), norm)  # [N, heads, d]
    length, rotary = cos.shape
    turning, staying = whole.unflatten(0, (-1, length)).split([rotary, x.shape[-1] - rotary], dim=-1)
    first, second = turning.chunk(2, dim=-1)  # [B, T, heads, rotary / 2]
    turned = turning * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return torch.cat([turned, staying], dim=-1).flatten(0, 1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, T, d]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def gate_heads(x: Tensor, gate: Tensor | None) -> Tensor:
    gated = x if gate is None else (x.float() * gate.float().sigmoid()).to(x.dtype)
    return gated.flatten(1)


def shared_projection(linear: nn.Linear) -> Projection:
    return partial(F.linear, weight=linear.weight, bias=linear.bias)


def side_by_side(first: nn.Linear, second: nn.Linear) -> Projection:
    return partial(F.linear, weight=torch.cat([first.weight, second.weight]))


def gpu_operations() -> Operations:
    """FLA's norm and delta rule, PyTorch's flash attention, and the project's own kernels between them.

    Raises:
        ImportError: FLA or Triton is not there, or of a version whose functions have moved.
    """
    from fla.modules.norm.layernorm import layer_norm_fwd
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from engine.target import convolution_kernel, fused_gates, rotary_kernel, swiglu_kernel

    def add_norm(branch: Tensor | None, residual: Tensor, norm: Norm, plain: bool) -> tuple[Tensor, Tensor]:
        x, rest = (residual, None) if branch is None else (branch, residual)
        y, _, _, whole = layer_norm_fwd(x, norm.weight, None, norm.eps, residual=rest, is_rms_norm=True)
        return y, whole

    def delta_rule(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor
    ) -> Tensor:
        out: Tensor = chunk_gated_delta_rule(
            q,
            k,
            v,
            decay,
            beta,
            use_qk_l2norm_in_kernel=False,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
        )[0]
        return out

    return Operations(
        names={
            "norm": "fla.modules.norm.layernorm.layer_norm_fwd",
            "gated_norm": "engine.target.fused_gates.gated_norm",
            "causal_conv1d_fn": "engine.target.convolution_kernel.convolve",
            "chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
            "swiglu": "engine.target.swiglu_kernel.swiglu",
            "rotary": "engine.target.rotary_kernel.norm_and_rotate",
            "attention": "sdpa",
            "linear": "torch.nn.functional.linear",
        },
        add_norm=add_norm,
        swiglu=swiglu_kernel.swiglu,
        convolve=convolution_kernel.convolve,
        delta_rule=delta_rule,
        gated_norm=fused_gates.gated_norm,
        rotate=rotary_kernel.norm_and_rotate,
        attend=attend,
        gate_heads=fused_gates.gate_heads,
        projection=shared_projection,
        small_projection=side_by_side,
    )
