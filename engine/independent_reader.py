"""An exported drafter read a second time, the way a server reads it: from its two files alone.

The training model and this reader share no code. What a server would take from `config.json` (which
layers slide, what is causal, how much of a head is rotated, which layers are tapped) is taken from there
and nowhere else, so that a key that says something other than what was trained shows in the logits. It
reads the layout of SGLang, vLLM and the authors' runtime, and the one of the speculators library, and
computes one block at a time without caches.

Sums are taken in the training model's order, since the exporter compares the two bit for bit in float32.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError


@attrs.frozen(eq=False, kw_only=True)
class ServedDrafter:
    """A folder's drafter, computing in float32 on the CPU. Sizes in elements, positions in tokens."""

    weights: Mapping[str, Tensor]
    """By the names in the file, in the dtype of the file."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    """Channels of a head that rotate."""
    rope_theta: float
    norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    """Per layer; None: everything before the anchor is seen."""
    causal: tuple[bool, ...]
    """Per layer: whether slot k sees only the slots up to k."""

    def weight(self, name: str) -> Tensor:
        """A tensor in float32.

        A copy always: a matrix product's last bits depend on how its operands lie in memory, and a
        tensor out of a file lies where the file put it.
        """
        return self.weights[f"{name}.weight"].to(torch.float32, copy=True)


def read_served(folder: Path) -> ServedDrafter:
    """Read `config.json` and `model.safetensors`.

    Raises:
        CheckpointError: a file or a key is missing, or they do not fit each other.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read as a server reads it: {error}") from error
    try:
        drafter = _served(config, weights)
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path}: a server finds no {error} there") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    unread = set(weights) - _read_names(drafter.layers)
    absent = _read_names(drafter.layers) - set(weights)
    if unread or absent:
        raise CheckpointError(
            f"{folder}: a server looks for tensors that are not there ({_some(absent)}) "
            f"and skips some that are ({_some(unread)})"
        )
    return drafter


def _served(config: dict[str, Any], weights: Mapping[str, Tensor]) -> ServedDrafter:
    if "speculators_model_type" in config:
        # That library counts hidden states, of which the embedding's is number 0, and not layers.
        taps = [number - 1 for number in config["aux_hidden_state_layer_ids"]]
        mask, block_size = config["mask_token_id"], config["block_size"]
        # vLLM makes one answer for all layers of this flag.
        override: bool | None = not config["sliding_window_non_causal"]
        layer: dict[str, Any] = config["transformer_layer_config"]
    else:
        inner = config["dflash_config"]
        taps, mask = inner["target_layer_ids"], inner["mask_token_id"]
        block_size = config["block_size"]
        override = config.get("is_causal")
        layer = config
        if inner.get("block_size", block_size) != block_size:
            raise ValueError(f"block_size is {block_size} and {inner['block_size']} at once")
    types = layer["layer_types"]
    if len(types) != layer["num_hidden_layers"]:
        raise ValueError(f"{len(types)} layer_types for {layer['num_hidden_layers']} layers")
    sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and not layer["sliding_window"]:
        raise ValueError("layers slide, and sliding_window says nothing")
    for key, value in (("hidden_act", "silu"), ("attention_bias", False)):
        if layer.get(key, value) != value:
            raise ValueError(f"{key} is {layer[key]}, and this reader computes {value}")
    ropes = [layer.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    for rope in ropes:
        scaled = {rope.get("rope_type", "default"), rope.get("type", "default")} - {"default"}
        tables = [kind for kind, table in rope.items() if isinstance(table, dict)]
        if scaled or tables:
            raise ValueError(
                f"positions turn by {', '.join([*scaled, *tables])}; this reader knows 'default'"
            )
    thetas = {float(table["rope_theta"]) for table in (layer, *ropes) if "rope_theta" in table}
    if len(thetas) != 1:
        raise ValueError(f"rope_theta is {' and '.join(map(str, sorted(thetas))) or 'nowhere'}")
    partial = next((x for it in (layer, *ropes) if (x := it.get("partial_rotary_factor"))), 1.0)
    return ServedDrafter(
        weights=weights,
        layers=len(types),
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        rotated=int(layer["head_dim"] * partial),
        rope_theta=thetas.pop(),
        norm_eps=layer["rms_norm_eps"],
        block_size=block_size,
        mask_token_id=mask,
        target_layer_ids=tuple(taps),
        windows=tuple(layer["sliding_window"] if slides else None for slides in sliding),
        causal=tuple(slides if override is None else bool(override) for slides in sliding),
    )


def _read_names(layers: int) -> set[str]:
    names = ["fc", "hidden_norm", "norm"]
    for number in range(layers):
        for part in ("input_layernorm", "post_attention_layernorm"):
            names.append(f"layers.{number}.{part}")
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            names.append(f"layers.{number}.self_attn.{part}")
        for part in ("gate_proj", "up_proj", "down_proj"):
            names.append(f"layers.{number}.mlp.{part}")
    return {f"{name}.weight" for name in names}


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:4]) or "none"


@torch.no_grad()
def block_logits(
    drafter: ServedDrafter, taps: Tensor, anchor_token: int, embed_tokens: Tensor, lm_head: Tensor
) -> Tensor:
    """Logits of the block whose anchor is the token behind those whose states are known.

    Args:
        taps: [T, taps·H], states of the T positions before the anchor, concatenated in the order of
            `target_layer_ids`; the anchor's position is T.
        embed_tokens: [V, H]; lm_head: [V', H].

    Returns:
        float32 [B, V']; row k predicts the token at T + k, so row 0 means nothing.
    """
    size, before = drafter.block_size, taps.shape[0]
    projected = F.linear(taps.float(), drafter.weight("fc"))
    context = _norm(projected, drafter.weight("hidden_norm"), drafter.norm_eps)  # [T, H]
    ids = torch.tensor([anchor_token] + [drafter.mask_token_id] * (size - 1))
    x = embed_tokens[ids].float()  # [B, H]
    positions = torch.arange(before + size)
    turned = _turns(drafter, positions)  # [T + B, 1, rotated]
    for number in range(drafter.layers):
        at = f"layers.{number}"
        h = _norm(x, drafter.weight(f"{at}.input_layernorm"), drafter.norm_eps)
        x = x + _attention(drafter, number, h, context, turned)
        h = _norm(x, drafter.weight(f"{at}.post_attention_layernorm"), drafter.norm_eps)
        gate = F.silu(F.linear(h, drafter.weight(f"{at}.mlp.gate_proj")))
        up = F.linear(h, drafter.weight(f"{at}.mlp.up_proj"))
        x = x + F.linear(gate * up, drafter.weight(f"{at}.mlp.down_proj"))
    hidden = _norm(x, drafter.weight("norm"), drafter.norm_eps)
    return F.linear(hidden, lm_head.float())


def _attention(
    drafter: ServedDrafter, number: int, h: Tensor, context: Tensor, turned: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention of a block to the context and to itself; h [B, H], context [T, H] → [B, H]."""
    at, before, size = f"layers.{number}.self_attn", context.shape[0], h.shape[0]
    cos, sin = turned

    def heads(x: Tensor, name: str, count: int) -> Tensor:
        return F.linear(x, drafter.weight(f"{at}.{name}_proj")).view(-1, count, drafter.head_dim)

    def keys(x: Tensor, part: slice) -> Tensor:
        k = _norm(heads(x, "k", drafter.kv_heads), drafter.weight(f"{at}.k_norm"), drafter.norm_eps)
        return _turn(k, cos[part], sin[part])

    own = slice(before, before + size)
    q = _norm(heads(h, "q", drafter.heads), drafter.weight(f"{at}.q_norm"), drafter.norm_eps)
    q = _turn(q, cos[own], sin[own])  # [B, heads, d]
    k = torch.cat([keys(context, slice(0, before)), keys(h, own)])  # [T + B, kv, d]
    v = torch.cat([heads(context, "v", drafter.kv_heads), heads(h, "v", drafter.kv_heads)])
    group = drafter.heads // drafter.kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))

    seen = sees(drafter, number, before)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=seen[None, None]
    )
    return F.linear(out[0].transpose(0, 1).flatten(1), drafter.weight(f"{at}.o_proj"))


def sees(drafter: ServedDrafter, number: int, before: int) -> Tensor:
    """Which keys each slot of a block sees in a layer, with `before` tokens before the anchor.

    Returns:
        bool [B, before + B]: the context's keys, then the block's own; True: seen.
    """
    size = drafter.block_size
    key, query = torch.arange(before + size)[None], torch.arange(before, before + size)[:, None]
    seen = torch.ones(size, before + size, dtype=torch.bool)
    if drafter.causal[number]:
        seen &= key <= query
    window = drafter.windows[number]
    if window is not None:
        seen &= query - key < window
    return seen


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _turns(drafter: ServedDrafter, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [P, 1, rotated]."""
    pairs = torch.arange(0, drafter.rotated, 2, dtype=torch.float32)
    angles = torch.outer(positions.float(), torch.pow(drafter.rope_theta, -pairs / drafter.rotated))
    both = torch.cat([angles, angles], dim=1)[:, None]
    return both.cos(), both.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of x [P, heads, d]; the others pass."""
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = cos.shape[-1] // 2
    swapped = torch.cat([-turning[..., half:], turning[..., :half]], dim=-1)
    return torch.cat([turning * cos + swapped * sin, rest], dim=-1)


@torch.no_grad()
def decode(
    drafter: ServedDrafter, model: Any, prompt: Sequence[int], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding as it is defined, without a cache anywhere.

    Args:
        model: the target, a causal LM of transformers on the CPU.

    Returns:
        The new tokens, and how many each verification committed, the target's own included; the first
        token is the prefill's and counts for none.
    """
    tokens, acceptance = list(prompt), []
    end = len(prompt) + max_new_tokens
    tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    embed_tokens, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    while len(tokens) < end:
        known = torch.tensor([tokens[:-1]])  # the newest token's states are not known yet
        states = model(known, use_cache=False, output_hidden_states=True).hidden_states
        taps = torch.cat([states[layer + 1][0] for layer in drafter.target_layer_ids], dim=-1)
        drafts = block_logits(drafter, taps, tokens[-1], embed_tokens, lm_head)[1:].argmax(-1).tolist()
        checked = model(torch.tensor([tokens + drafts]), use_cache=False).logits[0, len(tokens) - 1 :]
        answers = checked.argmax(-1).tolist()
        right = 0
        while right < len(drafts) and drafts[right] == answers[right]:
            right += 1
        committed = answers[: right + 1][: end - len(tokens)]
        tokens += committed
        acceptance.append(len(committed))
    return tokens[len(prompt) :], acceptance
