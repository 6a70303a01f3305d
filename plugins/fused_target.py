"""The target's layers in fused kernels: norms with their residual additions, convolution, gates, rotary.

A Hugging Face module runs each of these as several kernels with copies between them, which is a third
of a 27 B hybrid's forward on an H200. Here the layers are walked by the engine's own code over the module's
weights; nothing is copied, and the module stays usable.

Before it is used, the walk is compared on each device with the module it replaces, both against float32:
kernels that are right on one GPU have been wrong on another.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import attrs
from torch import nn

from engine.errors import DifferenceFound, TargetError
from engine.hookspecs import hookimpl
from engine.runtime.lane import Lane
from engine.target.fused_check import PathError, fused_errors, tells_of_kernels
from engine.target.fused_layers import why_not
from engine.target.fused_operations import Operations, gpu_operations, torch_operations
from engine.target.fused_walk import fused_walk
from engine.target.loading import Target
from engine.toml_tables import Bounds

KEEPS_NUMBERS = True
"""But for rounding; so a run may go on with it or without it."""


@attrs.frozen(kw_only=True)
class Options:
    """Where it is used, and how exact it has to be."""

    on: Literal["auto", "gpu", "all", "never"] = "auto"
    """`auto`: on GPUs, for targets that it knows. `gpu` and `all` are for these devices, and an error for
    other targets; on a CPU the walk runs in plain PyTorch."""
    tolerance: Annotated[float, Bounds(at_least=1.0)] = 1.1
    """How much larger than the module's own a layer's error against float32 may be."""


class FusedTarget:
    def __init__(self, options: Options) -> None:
        self.options = options
        self._made: dict[nn.Module, Target] = {}  # lanes on one device share a model, and so a walk

    @hookimpl
    def wrap_target(self, target: Target, lane: Lane) -> Target | None:
        on = self.options.on
        on_gpu = lane.device.type == "cuda"
        if on == "never" or (on != "all" and not on_gpu):
            return None
        if target.model not in self._made:
            self._made[target.model] = self._fused(target, on_gpu)
        return self._made[target.model]

    def _fused(self, target: Target, on_gpu: bool) -> Target:
        reason = why_not(target.model)
        operations: Operations | None = None
        if reason is None:
            try:
                operations = gpu_operations() if on_gpu else torch_operations()
            except ImportError as error:
                reason = f"FLA's kernels cannot be imported ({error})"
        if operations is None:
            if self.options.on == "auto":
                return attrs.evolve(target, notes=noted(target, fused_target=f"not used: {reason}"))
            raise TargetError(
                f"the target cannot be fused: {reason}; leave plugins.fused_target out, or set its "
                f'on = "auto" to use it where it can be (on = "{self.options.on}")'
            )
        walk = fused_walk(target, operations)
        errors = fused_errors(target, walk, self.options.tolerance)
        if bad := [error for error in errors if error.bad]:
            raise DifferenceFound(
                f"the fused target on {target.device} is further from float32 than the module is: "
                f"{'; '.join(f'{error}, at most {error.allowed:.2e}' for error in bad)}. Update "
                'Triton and flash-linear-attention, or name plugins.fused_target with on = "never"'
            )
        # In float32 it was judged by the module's own kernels, which nobody has compared with anything yet.
        walk = attrs.evolve(walk, checked=tells_of_kernels(target.dtype))
        return attrs.evolve(target, walk=walk, notes=noted(target, fused_target=told(errors)))


def noted(target: Target, **more: str) -> Mapping[str, str]:
    """A target's notes and some more."""
    return {**target.notes, **more}


def told(errors: list[PathError]) -> str:
    """What a check found, for the start-up print."""
    return f"relative error against float32: {', '.join(map(str, errors))}"


def make(options: Options) -> FusedTarget:
    return FusedTarget(options)
