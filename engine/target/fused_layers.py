"""The layers of a target as straight functions over tokens, built from the Hugging Face modules' weights.

The residual stream and the output of the last branch travel apart, so that every addition happens inside
the norm that follows it. Activations are [tokens, width]; only convolution, recurrence and attention see
rows and length. Matrices are the modules' own; what is made anew (norm weights in float32, the two gates'
projections as one) comes to a few megabytes.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from engine.target.fused_operations import Norm, Operations, Projection, Rows

ZERO_CENTRED_NORMS = {"qwen3_5_text": True, "qwen3": False, "llama": False}
"""The text models whose layers these are, and whether their RMSNorms multiply by 1 + weight."""

CHANGING_FREQUENCIES = ("dynamic", "longrope")


@attrs.frozen(eq=False)
class Batch:
    """What the layers know of a batch besides its activations."""

    rows: int
    length: int
    cos: Tensor
    """float32 [length, rotary]"""
    sin: Tensor


@attrs.frozen(eq=False)
class Attention:
    """Causal attention with grouped heads and rotary positions; normed and gated where the model is."""

    operations: Operations
    q: Projection
    k: Projection
    v: Projection
    out: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    head_dim: int
    scale: float
    gated: bool
    """Each head's query is projected beside its gate."""
    reads_plain = False

    def __call__(self, x: Rows, batch: Batch) -> Tensor:
        operations, d = self.operations, self.head_dim
        q, gate = self.q(x).unflatten(1, (-1, (1 + self.gated) * d)), None  # [N, heads, d or 2d]
        if self.gated:
            q, gate = q.split(d, dim=2)
        q = operations.rotate(q, self.q_norm, batch.cos, batch.sin)
        k = operations.rotate(self.k(x).unflatten(1, (-1, d)), self.k_norm, batch.cos, batch.sin)
        v = self.v(x).unflatten(1, (-1, d))  # [N, kv_heads, d]
        q, k, v = (part.unflatten(0, (batch.rows, batch.length)) for part in (q, k, v))
        out = operations.attend(q, k, v, self.scale)  # [B, T, heads, d]
        return self.out(operations.gate_heads(out.flatten(0, 1), gate))


@attrs.frozen(eq=False)
class GatedDeltaNet:
    """A linear-attention layer: short convolution, gated delta rule, gated norm."""

    operations: Operations
    qkv: Projection
    z: Projection
    gates: Projection
    """Outputs decay and beta side by side."""
    out: Projection
    filters: Tensor
    """The convolution's weights [W, D], tap by tap, for queries, keys and values side by side."""
    norm: Norm
    A_log: Tensor
    dt_bias: Tensor
    keys: int
    values: int
    """Channels of all heads."""
    key_dim: int
    value_dim: int
    """Of one head."""
    reads_plain = True

    def __call__(self, x: Rows, batch: Batch) -> Tensor:
        operations, shape = self.operations, (batch.rows, batch.length)
        mixed = self.qkv(x).unflatten(0, shape)  # [B, T, 2·keys + values]
        q, k, v = operations.convolve(mixed, self.filters, self.keys, self.values, self.key_dim)
        q, k = (part.unflatten(2, (-1, self.key_dim)) for part in (q, k))  # [B, T, Hk, K]
        v = v.unflatten(2, (-1, self.value_dim))  # [B, T, Hv, V]
        decay, beta = self.gates(x).unflatten(0, shape).chunk(2, dim=2)  # [B, T, Hv]
        out = operations.delta_rule(q, k, v, decay, beta, self.A_log, self.dt_bias)
        z = self.z(x).unflatten(1, (-1, self.value_dim))  # [N, Hv, V]
        return self.out(operations.gated_norm(out.flatten(0, 1), z, self.norm))


@attrs.frozen(eq=False)
class FusedLayer:
    """A decoder layer."""

    operations: Operations
    kind: str
    """`full_attention` or `linear_attention`."""
    input_norm: Norm
    mixer: Attention | GatedDeltaNet
    mlp_norm: Norm
    gate: Projection
    up: Projection
    down: Projection

    def __call__(
        self, branch: Tensor | None, residual: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One layer.

        Args:
            branch: [N, H], to be added to `residual` before anything else; None in front of the first layer.
            residual: [N, H]

        Returns:
            branch and residual, whose sum is this layer's output, and the sum that came in: the output of
            the layer before.
        """
        operations = self.operations
        x, entered = operations.add_norm(branch, residual, self.input_norm, self.mixer.reads_plain)
        x, residual = operations.add_norm(self.mixer(x, batch), entered, self.mlp_norm, False)
        return self.down(operations.swiglu(self.gate(x), self.up(x))), residual, entered


def why_not(model: Any) -> str | None:
    """Why the layers of a Hugging Face causal model cannot be built here; None if they can."""
    config = model.config
    if config.model_type not in ZERO_CENTRED_NORMS:
        return f"{config.model_type} is none of the architectures it knows ({', '.join(ZERO_CENTRED_NORMS)})"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act}, it knows silu"
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention", "linear_attention"}:
        return f"there are {' and '.join(sorted(others))} layers, it knows full and linear attention"
    if "linear_attention" in kinds:
        if (width := config.linear_key_head_dim) & (width - 1):
            return f"its linear attention's key heads have {width} channels, it knows powers of two"
        if config.linear_conv_kernel_dim != 4:
            return f"its convolutions have {config.linear_conv_kernel_dim} taps, it knows 4"
    rope = getattr(model.base_model.rotary_emb, "rope_type", "default")
    if rope in CHANGING_FREQUENCIES:
        return f"rotary frequencies change with the length ({rope})"
    kinds = {type(part).__name__ for part in model.base_model.modules() if isinstance(part, nn.Linear)}
    if kinds != {"Linear"}:
        return f"its projections are {' and '.join(sorted(kinds))}, it knows torch's Linear"
    return None


def fused_layers(model: Any, layers: Sequence[Any], operations: Operations) -> tuple[FusedLayer, ...]:
    """Build layers over a model's own weights; the model stays as it is.

    Args:
        model: a causal model for which `why_not` found nothing.
        layers: its decoder layers, or the first of them.
    """
    centred = ZERO_CENTRED_NORMS[model.config.model_type]
    return tuple(_layer(layer, operations, centred) for layer in layers)


def _layer(layer: Any, operations: Operations, centred: bool) -> FusedLayer:
    linear = hasattr(layer, "linear_attn")
    return FusedLayer(
        operations=operations,
        kind="linear_attention" if linear else "full_attention",
        input_norm=_norm(layer.input_layernorm, centred),
        mixer=_delta_net(layer.linear_attn, operations)
        if linear
        else _attention(layer.self_attn, operations, centred),
        mlp_norm=_norm(layer.post_attention_layernorm, centred),
        gate=operations.projection(layer.mlp.gate_proj),
        up=operations.projection(layer.mlp.up_proj),
        down=operations.projection(layer.mlp.down_proj),
    )


def _norm(module: Any, centred: bool) -> Norm:
    weight = module.weight.detach().float()
    return Norm(
        weight=weight + 1 if centred else weight.clone(),
        eps=module.eps if hasattr(module, "eps") else module.variance_epsilon,
    )


def _attention(module: Any, operations: Operations, centred: bool) -> Attention:
    d, project = module.head_dim, operations.projection
    return Attention(
        operations=operations,
        q=project(module.q_proj),
        k=project(module.k_proj),
        v=project(module.v_proj),
        out=project(module.o_proj),
        q_norm=_norm(module.q_norm, centred) if hasattr(module, "q_norm") else None,
        k_norm=_norm(module.k_norm, centred) if hasattr(module, "k_norm") else None,
        head_dim=d,
        scale=module.scaling,
        gated=module.q_proj.out_features == 2 * module.o_proj.in_features,
    )


def _delta_net(module: Any, operations: Operations) -> GatedDeltaNet:
    project = operations.projection
    return GatedDeltaNet(
        operations=operations,
        qkv=project(module.in_proj_qkv),
        z=project(module.in_proj_z),
        gates=operations.small_projection(module.in_proj_a, module.in_proj_b),
        out=project(module.out_proj),
        filters=module.conv1d.weight.detach().squeeze(1).t().contiguous(),
        norm=_norm(module.norm, centred=False),
        A_log=module.A_log.detach().float(),
        dt_bias=module.dt_bias.detach().float(),
        keys=module.key_dim,
        values=module.value_dim,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
    )


def positions(model: Any, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the model's rotary positions 0 … length - 1, float32 [length, rotary]."""
    like = torch.empty((), dtype=torch.float32, device=device)
    rotary = model.base_model.rotary_emb
    places = torch.arange(length, device=device)[None]  # [1, length]
    if hasattr(rotary, "mrope_section"):  # height and width of an image stand beside the place; text has one
        places = places.expand(3, 1, length)
    cos, sin = rotary(like, places)
    return cos[0], sin[0]
