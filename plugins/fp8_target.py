"""The frozen target's matrix products in 8 bits, with a scale per token and per output channel.

For GPUs from Ada and Hopper on, where such a product takes little more than half the time of a bfloat16
one. The drafter learns from what the taps then are, so a server should run the target in the same way.
Weights are quantised when the run starts, and the originals are freed, unless the run keeps the whole target
to evaluate (`run.eval_every` and held-out documents): both then lie side by side. How far the taps move is
measured at start, against the bfloat16 walk, and noted; `max_error` bounds it.
"""

from typing import Annotated, Literal

import attrs
import torch
from torch import nn

from engine.errors import DifferenceFound, InputError
from engine.hookspecs import hookimpl
from engine.memory_sizes import TargetMemory
from engine.runtime.lane import Lane
from engine.target.fp8 import fp8_walk, quantised_bytes, quantised_layers, unfit
from engine.target.fused_check import layer_errors, outputs_of_all_layers, random_tokens, relative_error
from engine.target.fused_walk import FusedWalk
from engine.target.loading import Target
from engine.toml_tables import Bounds


@attrs.frozen(kw_only=True)
class Options:
    """Where it is used, and how far the taps may move."""

    on: Literal["gpu", "all"] = "gpu"
    """`all`: on a CPU too, where 8-bit products are emulated, slowly: to see what they do to training."""
    max_layer_error: Annotated[float, Bounds(above=0.0)] = 0.25
    """Of what a layer adds, given the same input, against bfloat16: relative, root mean square over tokens.
    Three bits of mantissa make it a few hundredths, a wrong scale about one."""
    max_error: Annotated[float, Bounds(above=0.0)] | None = None
    """Of the taps' relative error against bfloat16. It grows over the layers by what the weights make of it,
    most with random ones, so it is told and only judged where this is set."""


class Fp8Target:
    def __init__(self, options: Options) -> None:
        self.options = options
        self._made: dict[nn.Module, Target] = {}  # lanes on one device share a model, and so a walk

    @hookimpl
    def wrap_target(self, target: Target, lane: Lane) -> Target | None:
        if self.options.on == "gpu" and lane.device.type != "cuda":
            return None
        if target.model not in self._made:
            self._made[target.model] = self._quantised(target)
        return self._made[target.model]

    @hookimpl
    def wrap_target_memory(
        self, memory: TargetMemory, target: Target, device: torch.device
    ) -> TargetMemory | None:
        if self.options.on == "gpu" and device.type != "cuda":
            return None
        layers = quantised_layers(target)
        freed = 0 if target.has_head else sum(layer.weight.nbytes for layer in layers)
        return attrs.evolve(memory, weights=memory.weights - freed + sum(map(quantised_bytes, layers)))

    def _quantised(self, target: Target) -> Target:
        walk = target.walk if isinstance(target, Target) else None
        if not isinstance(walk, FusedWalk):
            said = target.notes.get("fused_target", "plugins.fused_target did not come before it")
            raise InputError(
                f"8-bit products are made of a fused target's projections, and this target is not fused "
                f"({said}). Let plugins.fused_target come first, with its `on` fitting {target.device}, or "
                "leave plugins.fp8_target out"
            )
        if target.device.type == "cuda" and (reason := unfit(walk)):
            raise InputError(f"{reason}; leave plugins.fp8_target out")
        ids = random_tokens(target, seed=0)
        outputs = outputs_of_all_layers(walk, ids)
        # Evaluation decodes with the module itself where the whole target is there.
        quantised = fp8_walk(target, walk, release=not target.has_head)
        expected = [outputs[layer] for layer in target.target_layer_ids]
        errors = [relative_error(tap, plain) for tap, plain in zip(quantised(ids), expected, strict=True)]
        worst = max(layer_errors(quantised, outputs), default=0.0)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)  # lanes read the weights on streams of their own
        told = ", ".join(
            f"tap of layer {layer} {error:.2e}"
            for layer, error in zip(target.target_layer_ids, errors, strict=True)
        )
        told = f"{told}; of one layer {worst:.2e} at most"
        options = self.options
        for what, error, most in (
            ("max_error", max(errors), options.max_error),
            ("max_layer_error", worst, options.max_layer_error),
        ):
            if error == float("inf") or (most is not None and error > most):
                raise DifferenceFound(
                    f"8-bit products move the taps on {target.device} too far from bfloat16: {told}; "
                    f"plugins.fp8_target's {what} is {'unset' if most is None else format(most, 'g')}; leave "
                    "the plugin out, or allow more"
                )
        notes = {**target.notes, "fp8_target": f"relative error against bfloat16: {told}"}
        return attrs.evolve(target, walk=quantised, notes=notes)


def make(options: Options) -> Fp8Target:
    return Fp8Target(options)
