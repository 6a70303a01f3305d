"""The arithmetic of a target's forward and of a drafter's step, counted from their configurations.

A multiplication and an addition count as two operations. Counted is what has to be computed: every
matrix product of the layers up to the last tap, the causal half of the scores, the gated delta rule in
its chunked form; of the drafter no recomputation, no head for slot 0, no gradient of what is frozen.
Element-wise work is not counted: it is what a floor is there to show.
"""

from typing import Any

import attrs
import torch
from torch import nn

from engine.dflash.anchors import Anchors
from engine.dflash.attention_mask import visible_runs
from engine.dflash.configuration import DrafterConfig
from engine.dflash.packing import PackedRow
from engine.errors import InputError
from engine.target.truncation import decoder_layers

CHUNK = 64
"""Tokens that the gated delta rule's kernels take at a time."""

HYBRID_TYPES = ("qwen3_5_text", "qwen3_next")


@attrs.frozen(kw_only=True)
class Operations:
    """Floating-point operations by kind."""

    linear: float
    """Products with weights."""
    attention: float
    delta_rule: float = 0.0
    head: float = 0.0
    """Products with the vocabulary's matrix."""

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.delta_rule + self.head

    def ms(self, rate: float) -> dict[str, float]:
        """Milliseconds at `rate` operations per second, by kind and in total; without kinds of none."""
        counts = attrs.asdict(self) | {"total": self.total}
        return {kind: count / rate * 1e3 for kind, count in counts.items() if count}


def target_operations(model: Any, layers: int, *, rows: int, length: int) -> Operations:
    """A target's forward over right-padded rows, up to its last tap.

    Args:
        model: the Hugging Face causal model; its configuration is counted.
        layers: how many decoder layers run.

    Raises:
        InputError: an architecture whose modules hold other weights than counted here.
    """
    config = model.config
    tokens = rows * length
    kinds = layer_kinds(config)[:layers]
    weights = [_layer_weights(config, kind) for kind in kinds]
    _, modules = decoder_layers(model.base_model, len(layer_kinds(config)))
    for number, (count, module) in enumerate(zip(weights, modules, strict=False)):
        found = sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
        if found != count:
            raise InputError(
                f"bench: layer {number} of a {config.model_type} holds {found:,} weights in linear layers, "
                f"and a {kinds[number]} layer of its configuration comes to {count:,}; floors are known of "
                "hybrids of the Qwen3.5 family and of dense Qwen3 and Llama"
            )
    full = kinds.count("full_attention")
    heads, size = config.num_attention_heads, _head_size(config)
    delta = 0.0
    if full < len(kinds):
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        # Of a chunk and a value head: q kᵀ, k kᵀ, the inverse with keys and with values, scores with values;
        # then keys, queries and corrections with the state. The small triangular inverse is left out.
        per_token = CHUNK * (6 * keys + 4 * values) + 6 * keys * values
        delta = float(per_token * config.linear_num_value_heads * tokens * (len(kinds) - full))
    return Operations(
        linear=2.0 * sum(weights) * tokens,
        attention=2.0 * rows * length**2 * heads * size * full,  # two products, half of each
        delta_rule=delta,
    )


def layer_kinds(config: Any) -> list[str]:
    """`linear_attention` or `full_attention` of each decoder layer.

    Raises:
        InputError: another kind, whose operations are not known here.
    """
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if other := set(kinds) - {"linear_attention", "full_attention"}:
        raise InputError(
            f"bench: a {config.model_type} has layers of type {', '.join(sorted(other))}; floors are known "
            "of full_attention and linear_attention layers"
        )
    return kinds


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _layer_weights(config: Any, kind: str) -> int:
    """Weights of one decoder layer's matrices."""
    hidden = config.hidden_size
    mlp = 3 * hidden * config.intermediate_size
    if kind == "linear_attention":
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        read = 2 * keys + 2 * values + 2 * config.linear_num_value_heads  # q, k, v, z, b, a
        return int(hidden * read + values * hidden + mlp)
    queries = config.num_attention_heads * _head_size(config)
    shared = config.num_key_value_heads * _head_size(config)
    gate = queries if config.model_type in HYBRID_TYPES else 0
    return int(hidden * (queries + gate + 2 * shared) + queries * hidden + mlp)


def drafter_operations(config: DrafterConfig, row: PackedRow, anchors: Anchors) -> Operations:
    """A drafter's forward and backward over the blocks at `anchors`, without recomputation.

    A product with a trained weight costs three: forward, gradient of its input, gradient of the weight.
    Taps need no gradient, nor do the frozen embeddings that the first layer reads.
    """
    slots, context = anchors.count * config.block_size, row.length  # N·B, T
    hidden, width = config.hidden_size, config.heads * config.head_dim
    shared = 2 * config.kv_heads * config.head_dim
    per_slot = 2 * hidden * width + 3 * hidden * config.intermediate_size + hidden * shared
    layers = 6.0 * config.layers * (slots * per_slot + context * hidden * shared)
    first_inputs = 2.0 * slots * hidden * (width + shared)  # q, k and v of frozen embeddings
    fc = 4.0 * context * len(config.target_layer_ids) * hidden**2
    pairs = sum(_pairs(config, row, anchors, kind) for kind in config.layer_types)
    predicted = anchors.count * (config.block_size - 1)
    return Operations(
        linear=layers - first_inputs + fc,
        # Two products forward and five backward; the scores among these are needed again there.
        attention=14.0 * pairs * width,
        head=4.0 * predicted * hidden * config.vocab_size,
    )


def _pairs(config: DrafterConfig, row: PackedRow, anchors: Anchors, kind: str) -> int:
    """Queries by visible keys of one layer."""
    runs = visible_runs(anchors, row.starts, row.length, config, kind)
    seen = (runs.context_end - runs.context_begin) + (runs.block_end - runs.block_begin)
    return int(torch.clamp(seen, min=0).sum())
