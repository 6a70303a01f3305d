"""What a target remembers of sequences, layer by layer, outside of transformers' cache objects.

A forward with a cache changes that cache, and of a linear layer's states nothing older is left. So
what is remembered stands here, one row per sequence, and each forward is given cache objects of
transformers' own classes that hold views or copies of it. These objects are copied from those of
the first forward, so that whatever else a version of transformers keeps on them is there too.
"""

import copy
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from engine.errors import TargetError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@attrs.define(eq=False)
class StoredLayer:
    """What one layer remembers. Layers of attention have keys and values, linear ones states."""

    template: Any
    """The layer's cache object in transformers' class, to be copied for each forward."""
    keys: Tensor | None
    """[rows, kv_heads, slots, head_dim]; slots are positions, those past a row's end hold anything."""
    values: Tensor | None
    states: dict[str, dict[int, Tensor]]
    """`conv_states` and `recurrent_states` by their number in the layer, each [rows, ...]."""

    def given(self, rows: Tensor | None, slots: int, owned: bool) -> Any:
        """A cache object of these rows (None: all), cut to `slots`. `owned`: it may write into the states."""
        layer = copy.copy(self.template)
        if self.keys is not None and self.values is not None:
            keys, values = self.keys[:, :, :slots], self.values[:, :, :slots]
            layer.keys, layer.values = (keys, values) if rows is None else (keys[rows], values[rows])
        for name, states in self.states.items():
            given = {
                number: (state if owned else state.clone()) if rows is None else state[rows]
                for number, state in states.items()
            }
            setattr(layer, name, {**getattr(layer, name), **given})
        return layer


def fresh_layers(config: Any) -> list[Any]:
    """Empty caches of all layers, as far as this module can take tokens back from them.

    Raises:
        TargetError: another kind of layer or of attention.
    """
    layers = DynamicCache(config=config).layers
    foreign = {type(layer).__name__ for layer in layers} - {
        kind.__name__ for kind in (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
    }
    foreign |= set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING, LINEAR}
    if config._attn_implementation not in ("sdpa", "eager"):
        foreign.add(f"{config._attn_implementation} attention, which takes no mask")
    if foreign:
        raise TargetError(
            f"{config.model_type}: decoding can take tokens back from full, sliding and linear attention, "
            f"this target has {', '.join(sorted(foreign))}; measure the drafter by the walk alone"
        )
    # transformers' sliding layer forgets what left the window, also when the token that pushed it
    # out is taken back; here the mask alone knows of windows.
    return [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in layers]


def stored(layer: Any) -> StoredLayer:
    """Take the tensors out of a filled cache layer; what is left of it is the template."""
    template = copy.copy(layer)
    states = {}
    for name in ("conv_states", "recurrent_states"):
        if hasattr(layer, name):
            states[name] = {at: state for at, state in getattr(layer, name).items() if state is not None}
            setattr(template, name, dict.fromkeys(getattr(layer, name)))
    if hasattr(layer, "keys"):
        template.keys = template.values = None
    return StoredLayer(template, getattr(layer, "keys", None), getattr(layer, "values", None), states)


def joined(parts: Sequence[StoredLayer], order: Tensor) -> StoredLayer:
    """One layer's memory of several groups of rows, put into another order."""

    def attended(tensors: list[Tensor]) -> Tensor:
        slots = max(tensor.shape[2] for tensor in tensors)
        return torch.cat([with_slots(tensor, slots) for tensor in tensors])[order]

    first = parts[0]
    keys = [part.keys for part in parts if part.keys is not None]
    values = [part.values for part in parts if part.values is not None]
    states = {
        name: {
            number: torch.cat([part.states[name][number] for part in parts])[order]
            for number in first.states[name]
        }
        for name in first.states
    }
    return StoredLayer(
        first.template, attended(keys) if keys else None, attended(values) if values else None, states
    )


def with_slots(tensor: Tensor, slots: int) -> Tensor:
    """[rows, heads, slots, d] with at least so many slots; nobody looks at what new ones hold."""
    missing = slots - tensor.shape[2]
    return tensor if missing <= 0 else torch.nn.functional.pad(tensor, (0, 0, 0, missing))
