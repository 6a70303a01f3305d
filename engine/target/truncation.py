"""Cutting a target down to what the taps need, and tapping it.

The states behind the last tap are never used in training, so layers after it, the final norm and
the head's product are not computed; at 64 layers with the last tap at 61 this saves three
hundredths of the run's largest cost and the memory of two layers. The cut happens in the
configuration, before the model is built, so that what is not needed is never allocated or read.
Where the whole model has to stay (evaluation decodes with it), the cut is a second view of the
same modules.

Taps are taken by forward hooks, which leave the Hugging Face code as it is. A hook writes into the
list of the call that is going on, found through a context variable: every worker thread has its
own, so lanes that share one target on a device never see each other's states.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError, TargetError

_CAPTURED: ContextVar[list[Tensor] | None] = ContextVar("captured_taps", default=None)

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def truncated_settings(settings: dict[str, Any], layers: int, kept: int) -> dict[str, Any]:
    """A model's settings with only its first layers.

    Args:
        settings: what `config.to_dict()` gives; not changed.
        layers: decoder layers these settings describe.
        kept: how many of them stay, counted from the first.

    Returns:
        A copy with the number of layers and every per-layer list (`layer_types` and its like) cut.
    """
    cut = copy.deepcopy(settings)
    cut["num_hidden_layers"] = kept
    if "n_layer" in cut:
        cut["n_layer"] = kept
    for key, value in settings.items():
        if key.endswith(("layer_types", "_layers")) and isinstance(value, list) and len(value) == layers:
            cut[key] = value[:kept]
    return cut


def decoder_layers(base: nn.Module, layers: int) -> tuple[str, nn.ModuleList]:
    """The attribute of a base model that holds its decoder layers, and the list itself.

    Raises:
        TargetError: there is no list of that many modules, or more than one.
    """
    found = [
        (name, part)
        for name, part in base.named_children()
        if isinstance(part, nn.ModuleList) and len(part) == layers
    ]
    if len(found) != 1:
        lists = [
            f"{name} ({len(part)})" for name, part in base.named_children() if isinstance(part, nn.ModuleList)
        ]
        raise TargetError(
            f"{type(base).__name__}: one list of {layers} decoder layers was expected, "
            f"found {', '.join(lists) or 'none'}; this architecture cannot be tapped"
        )
    return found[0]


def drop_final_norm(base: nn.Module) -> None:
    """Put an identity where the base model's final norm stands, in place."""
    for name in _FINAL_NORMS:
        if isinstance(getattr(base, name, None), nn.Module):
            setattr(base, name, nn.Identity())


def truncated_view(base: nn.Module, config: Any, layers: int, kept: int) -> nn.Module:
    """The first `kept` layers of a base model without its final norm, sharing every module with it.

    Args:
        base: the whole base model, of `layers` decoder layers; not changed.
        config: its configuration with `kept` layers.

    Returns:
        A module to be called like `base`; its last hidden state is the output of layer `kept - 1`.
    """
    name, modules = decoder_layers(base, layers)
    view = copy.copy(base)
    # The shallow copy shares the dictionary of children: without one of its own, cutting the view
    # would cut the whole model.
    view.__dict__["_modules"] = dict(base._modules)
    setattr(view, name, nn.ModuleList(list(modules)[:kept]))
    view.config = config
    # Without it the masks of sliding layers would be left out: each layer plain causal, in silence.
    whole: Any = base.config
    config._attn_implementation = whole._attn_implementation
    drop_final_norm(view)
    return view


def resumed_view(base: nn.Module, layers: int, first: int, states: Tensor) -> nn.Module:
    """The last layers of a base model with its final norm, going on from given states.

    Each layer has to read what the one before it gave, and nothing else of earlier layers.

    Args:
        base: the whole base model, of `layers` decoder layers; not changed.
        first: the layer to go on with.
        states: [rows, length, H], the output of layer `first - 1`.

    Returns:
        A module to be called like `base`, with the ids that the states are of: they say how long it is.
    """
    name, modules = decoder_layers(base, layers)
    resumed = copy.copy(modules[first])
    # Hooks of its own: the layer that other threads run stays as it is.
    resumed._forward_pre_hooks = OrderedDict()
    resumed._forward_pre_hooks_with_kwargs = OrderedDict()
    resumed.register_forward_pre_hook(lambda module, given: (states, *given[1:]))
    view = copy.copy(base)
    view.__dict__["_modules"] = dict(base._modules)
    setattr(view, name, nn.ModuleList([resumed, *list(modules)[first + 1 :]]))
    whole: Any = base.config
    settings = whole.to_dict() | {"num_hidden_layers": layers - first}
    for key, value in whole.to_dict().items():
        if key.endswith(("layer_types", "_layers")) and isinstance(value, list) and len(value) == layers:
            settings[key] = value[first:]
    config = type(whole).from_dict(settings)
    config._attn_implementation = whole._attn_implementation
    view.config = config
    return view


def install_taps(layers: nn.ModuleList, target_layer_ids: Sequence[int]) -> None:
    """Hook the tapped layers, so that `captured_taps` can collect their outputs."""

    def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        captured = _CAPTURED.get()
        if captured is not None:
            captured.append(output[0] if isinstance(output, tuple) else output)

    for layer in target_layer_ids:
        layers[layer].register_forward_hook(keep)


@torch.no_grad()
def captured_taps(view: nn.Module, input_ids: Tensor, count: int) -> list[Tensor]:
    """Run a truncated view over right-padded rows and return the outputs of its tapped layers.

    No mask is passed: with causal layers nothing to the right reaches a real token.

    Args:
        view: from `truncated_view`, its layers hooked by `install_taps`.
        input_ids: int64 [rows, length].
        count: how many taps were installed.

    Returns:
        `count` tensors [rows, length, H] in the order of the layers, in the target's dtype; they
        need no gradient and may be used in a graph that does.
    """
    with capturing_taps(count) as captured:
        view(input_ids=input_ids, use_cache=False)
    return captured


@contextmanager
def capturing_taps(count: int) -> Iterator[list[Tensor]]:
    """Collect the outputs of tapped layers that run inside the block, in the order of the layers.

    Raises:
        EngineError: another number than `count` ran.
    """
    captured: list[Tensor] = []
    token = _CAPTURED.set(captured)
    try:
        yield captured
    finally:
        _CAPTURED.reset(token)
    if len(captured) != count:
        raise EngineError(f"{len(captured)} of {count} tapped layers ran; was a layer skipped or replaced?")
