"""Sizes and conventions of one drafter, as far as its weights and its servers are concerned.

The list is closed on purpose. A drafter that inherits its target's attention shape or rotary
settings still trains, and then serves at an accepted length of one; so a field that is not named
here cannot reach a drafter.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from engine.errors import CheckpointError, ScheduleError

SLIDING = "sliding_attention"
FULL = "full_attention"

ACTIVATION = "silu"
"""Of every drafter's MLP."""

OF_TARGETS = ("partial_rotary_factor", "mrope_section")
"""Rotary keys that a target may have and a drafter may not."""

ROPE_FORMS = ("rope_parameters", "rope_scaling")
"""Tables of rotary settings, of newer and of older files; the base may also stand beside them."""


@attrs.frozen(kw_only=True)
class DrafterConfig:
    """One drafter. Sizes in elements, positions in tokens."""

    hidden_size: int
    """H: the target's hidden size, since embedding and head are the target's."""
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    """V: the target's."""
    block_size: int
    """B: slots per block, the anchor's own slot included."""
    target_layer_ids: tuple[int, ...]
    """The taps: target layers, counted from 0, whose outputs are the context."""
    num_target_layers: int
    """The target's true depth, which the servers need to place the taps."""
    mask_token_id: int
    layer_types: tuple[str, ...]
    """One of `full_attention` or `sliding_attention` per drafter layer."""
    sliding_window: int | None = None
    """W: a key is visible to a sliding layer when q_pos - k_pos < W."""
    is_causal: bool | None = None
    """Visibility inside a block; None: sliding layers causal, full layers bidirectional."""
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    dtype: str = "float32"
    """What the exported weights are stored in."""

    def __attrs_post_init__(self) -> None:
        unknown = sorted(set(self.layer_types) - {SLIDING, FULL})
        if unknown or not self.layer_types:
            raise ScheduleError(
                f"drafter.layer_types = {list(self.layer_types)}: each layer is {SLIDING!r} or {FULL!r}"
            )
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ScheduleError("drafter.sliding_window: a sliding layer needs a window of at least 1 token")
        if self.heads % self.kv_heads:
            raise ScheduleError(
                f"drafter.kv_heads = {self.kv_heads}: {self.heads} heads cannot be shared out over them"
            )
        if self.is_causal and FULL in self.layer_types:
            raise ScheduleError(
                "drafter.is_causal = true: a full_attention layer sees its whole block, "
                "and no server reads it otherwise; leave the key out or make every layer sliding"
            )

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def causal_in_block(self, layer_type: str) -> bool:
        """Whether slot k of a layer of this type sees only the slots up to k."""
        return layer_type == SLIDING and self.is_causal is not False

    def to_server_json(self) -> dict[str, Any]:
        """The `config.json` that SGLang, vLLM and the authors' runtime read.

        Raises:
            CheckpointError: a mixed layout whose sliding layers were trained bidirectional; no
                server has a key for it, so it would be served causal.
        """
        kinds = set(self.layer_types)
        causality: dict[str, Any] = {}
        if len(kinds) == 1:
            causality["is_causal"] = self.causal_in_block(self.layer_types[0])
        elif self.is_causal is not None:
            raise CheckpointError(
                f"is_causal = {self.is_causal} with sliding and full layers mixed: servers take such a "
                "drafter's sliding layers as causal, so this one cannot be served; train it without the key"
            )
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": self.dtype,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window if SLIDING in kinds else None,
            "use_sliding_window": SLIDING in kinds,
            "max_window_layers": self.layers,
            "tie_word_embeddings": False,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
                "block_size": self.block_size,
            },
            **causality,
        }

    @classmethod
    def from_server_json(cls, config: dict[str, Any], source: str = "config.json") -> "DrafterConfig":
        """Read a drafter's `config.json`; both rope forms are understood.

        Raises:
            CheckpointError: a key is missing, one that only a target has is present, two places differ,
                or a drafter here would compute something else.
        """
        tables = [config, *(config.get(form) for form in ROPE_FORMS)]
        foreign = [key for key in OF_TARGETS if any(isinstance(it, dict) and key in it for it in tables)]
        if foreign:
            raise CheckpointError(
                f"{source}: {', '.join(foreign)} belongs to a target; a drafter rotates every channel"
            )
        if problem := next(_problems(config), None):
            raise CheckpointError(f"{source}: {problem}")
        try:
            taps = config["dflash_config"]
            theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
            return cls(
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                vocab_size=config["vocab_size"],
                block_size=config.get("block_size") or taps["block_size"],
                target_layer_ids=tuple(taps["target_layer_ids"]),
                num_target_layers=config["num_target_layers"],
                mask_token_id=taps["mask_token_id"],
                layer_types=tuple(config["layer_types"]),
                sliding_window=config.get("sliding_window"),
                # A uniform layout states what a mixed one leaves out; both come back as trained.
                is_causal=None if config.get("is_causal", True) else _not_causal(config["layer_types"]),
                rope_theta=float(theta),
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                max_position_embeddings=config["max_position_embeddings"],
                dtype=config.get("dtype", "float32"),
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{source}: not a drafter's configuration, {error} is missing") from error


def rotary_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What a `config.json` says of rotary positions and no drafter here computes, or says in two ways.

    Here all layers turn alike, by one base and without scaling. The keys of `OF_TARGETS` are the caller's.
    """
    bases = {"rope_theta": config.get("rope_theta")}
    for form in ROPE_FORMS:
        table = config.get(form) or {}
        if not isinstance(table, dict):
            yield f"{form} = {table}: expected a table"
            continue
        bases[form] = table.get("rope_theta")
        kinds = [key for key in ("rope_type", "type") if table.get(key) not in (None, "default")]
        for key in kinds:
            yield f"{form} has {key} {table[key]!r}, and a drafter here knows 'default' alone"
        for key in sorted(table.keys() - {"rope_theta", "rope_type", "type", *OF_TARGETS}):
            if not kinds:  # whose own keys these would be
                yield f"{form} has {key}, and a drafter here turns all layers alike and scales no position"
    stated = [(place, base) for place, base in bases.items() if base is not None]
    for place, base in stated[1:]:
        if base != stated[0][1]:
            yield f"{stated[0][0]} = {stated[0][1]}, and {place} has {base}"


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    yield from rotary_problems(config)
    for key, value in (("hidden_act", ACTIVATION), ("attention_bias", False)):
        if config.get(key) not in (None, value):
            yield f"{key} = {config[key]}: expected {value}"
    inner, size = config.get("dflash_config"), config.get("block_size")
    if size and isinstance(inner, dict) and inner.get("block_size", size) != size:
        yield f"block_size = {size}, and dflash_config has {inner['block_size']}"


def _not_causal(layer_types: list[str]) -> bool | None:
    return False if SLIDING in layer_types else None
