"""The drafter: a few Qwen3-style layers that read the target's taps.

    context = hidden_norm(fc(concat(taps)))                       computed once, read by every layer
    x       = embed([token at the anchor, mask, mask, …])         the blocks
    x       = x + attention(input_layernorm(x), context)          k, v of context and block; q of the block
    x       = x + mlp(post_attention_layernorm(x))
    hidden  = norm(x)                                             the target's lm_head makes tokens of it

The module tree is the exported layout: its parameter names are the names servers read. Embedding
and head are the target's and are not part of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.dflash.attention import Attention
from engine.dflash.configuration import DrafterConfig
from engine.dflash.objective import ChunkSoftmax, chunk_softmax


def rotary(positions: Tensor, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [P], float32 [P, 1, head_dim]; every channel rotates.

    The frequencies are made here, in float32, so that no cast of the module can round them.
    """
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = config.rope_theta ** (-channels / config.head_dim)
    angles = positions.to(torch.float32)[:, None] * frequencies  # [P, head_dim / 2]
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [P, heads, head_dim] in float32; the result has x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class DrafterAttention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, position: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [P, H] → k and v [P, kv_heads, head_dim]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(k, *position), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        block_position: tuple[Tensor, Tensor],
        context_position: tuple[Tensor, Tensor],
        layer_type: str,
        attention: Attention,
    ) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [N·B, heads, d]
        q = rotate(q, *block_position)
        context_k, context_v = self.keys_values(context, context_position)  # [T, kv, d]
        block_k, block_v = self.keys_values(x, block_position)  # [N·B, kv, d]
        out = attention(layer_type, q, context_k, context_v, block_k, block_v)
        return self.o_proj(out.flatten(1))


class DrafterMLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DrafterMLP(config)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        block_position: tuple[Tensor, Tensor],
        context_position: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor:
        h = self.input_layernorm(x)
        x = x + self.self_attn(h, context, block_position, context_position, self.layer_type, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable part. Build on `torch.device("meta")` and `initialise` to place it elsewhere."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, kind) for kind in config.layer_types)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.softmax: ChunkSoftmax = chunk_softmax
        """How logits become entropies behind the head; what compiles a drafter may put a kernel here."""

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fresh weights: ones for norms, normal with deviation 1/√(inputs) for matrices.

        That keeps the size of what passes through a layer at any width: at 5,120 it is the usual 0.014,
        at the built-in target's 192 the usual would be far too small to learn from. Drawn on the CPU
        parameter by parameter from the seed, so that every device and every compute dtype starts from
        the same numbers.
        """
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
                )

    def context(self, taps: Tensor) -> Tensor:
        """Concatenated taps [T, taps·H] → the context features [T, H] that every layer reads."""
        return self.hidden_norm(self.fc(taps))

    def forward(
        self,
        block_embeddings: Tensor,
        context: Tensor,
        block_positions: Tensor,
        context_positions: Tensor,
        attention: Attention,
        *,
        checkpointing: bool = False,
    ) -> Tensor:
        """Fill the blocks in one pass.

        Args:
            block_embeddings: [N·B, H], the target's embeddings of the block input.
            context: [T, H], what `context` makes of the taps.
            block_positions: int64 [N·B]; context_positions: int64 [T]; within each document.
            attention: from `prepare_attention`, made for this micro-batch.
            checkpointing: keep each layer's input alone and run the layer again in the backward pass.

        Returns:
            [N·B, H] after the final norm; slot k of a block predicts the token at anchor + k.
        """
        block_position = rotary(block_positions, self.config)
        context_position = rotary(context_positions, self.config)
        x = block_embeddings
        for layer in self.layers:
            given = (x, context, block_position, context_position, attention)
            if checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*given)
        return self.norm(x)


def build_drafter(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> Drafter:
    """An unfilled drafter on a device; fill it with `initialise` or from a checkpoint."""
    with torch.device("meta"):
        drafter = Drafter(config).to(dtype)
    return drafter.to_empty(device=device)
