"""Which implementation a target's operations are bound to, and keeping GPU kernels off the CPU.

transformers binds Gated DeltaNet and its convolution once, while a model file is imported: to FLA
and causal_conv1d if they can be imported, whether or not there is a GPU, else to plain PyTorch, and
it swallows every import error on the way. Both directions hurt: without a GPU the first forward
fails inside Triton, and with one a broken FLA makes the run many times slower without a word. So
the packages are hidden while a model file is imported on a machine without CUDA; calls with CPU
tensors are routed to the plain functions where a GPU machine loads a target on its CPU, or where
somebody else imported the file first; and what was bound can be read and printed.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

CUDA_ONLY_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")

SLOW_PATH = "torch (reference, slow on a GPU)"
CPU_PATH = "torch (reference)"

_ROUTED = "routed_by_device"


@contextmanager
def gpu_packages_hidden() -> Iterator[None]:
    """Make packages of CUDA kernels unimportable inside the block, if the machine has no CUDA.

    With CUDA there, nothing is done. What was imported before is there again afterwards; blocks may
    be nested.
    """
    if torch.cuda.is_available():
        yield
        return
    absent = object()
    before: dict[str, Any] = {name: sys.modules.get(name, absent) for name in CUDA_ONLY_PACKAGES}
    try:
        for name in CUDA_ONLY_PACKAGES:
            sys.modules[name] = None  # type: ignore[assignment]  # the import system's sign for "not there"
        yield
    finally:
        for name, module in before.items():
            if module is absent:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@attrs.frozen
class Binding:
    """One operation of a model file: its wrapper's name there, and the functions it chose between."""

    module: ModuleType
    attribute: str
    operation: str
    chosen: Callable[..., Any]
    plain: Callable[..., Any]
    routed: bool
    """Whether calls with CPU tensors go to the plain function."""

    def on_kernel(self, device: torch.device) -> bool:
        """Whether calls with this device's tensors run something other than the plain function."""
        return self.chosen is not self.plain and not (self.routed and device.type == "cpu")


def bindings(model: nn.Module) -> list[Binding]:
    """The operations of a model's files that choose between a kernel and a plain PyTorch function."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    found = []
    for module in sorted(modules, key=lambda module: module.__name__):
        for attribute, value in list(vars(module).items()):
            routed = getattr(value, _ROUTED, False)
            wrapper = inspect.unwrap(value, stop=_is_binding) if callable(value) else value
            if _is_binding(wrapper):
                cells = _cells(wrapper)
                operation, chosen, plain = (
                    cells["func_name"],
                    cells["implementation"],
                    cells["torch_function"],
                )
                found.append(Binding(module, attribute, operation, chosen, plain, routed))
    return found


def _cells(function: FunctionType) -> dict[str, Any]:
    closure = function.__closure__ or ()
    return {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, closure, strict=True)
    }


def _is_binding(value: Any) -> bool:
    wanted = {"func_name", "implementation", "torch_function"}
    return isinstance(value, FunctionType) and wanted <= set(value.__code__.co_freevars)


def route_cpu_calls_to_torch(model: nn.Module) -> None:
    """Let the model's operations take their plain PyTorch functions whenever they get CPU tensors.

    Calls with tensors of other devices go where they went before. Changes the model files' functions
    that are bound to something else, for every model of these files; a second call changes nothing.
    """
    for binding in bindings(model):
        if binding.routed or binding.chosen is binding.plain:
            continue
        before = vars(binding.module)[binding.attribute]
        setattr(binding.module, binding.attribute, _by_device(before, binding.plain))


def _by_device(elsewhere: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    known = frozenset(inspect.signature(plain).parameters)

    @functools.wraps(elsewhere)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if first.device.type != "cpu":
            return elsewhere(*args, **kwargs)
        return plain(*args, **{name: value for name, value in kwargs.items() if name in known})

    setattr(call, _ROUTED, True)
    return call


def bound_kernels(model: nn.Module) -> dict[str, str]:
    """What each operation of the model runs as, for the start-up print and `environment.json`.

    Returns:
        Operation (`chunk_gated_delta_rule`, `causal_conv1d_fn`, `attention`, `norm`, …) to the
        function's full name, or to `torch (reference…)` where transformers' plain version is taken;
        on a GPU the latter says that it is slow.
    """
    device = next(model.parameters()).device
    plain = CPU_PATH if device.type == "cpu" else SLOW_PATH
    kernels: dict[str, str] = {}
    for binding in bindings(model):
        takes_plain = not binding.on_kernel(device)
        kernels[binding.operation] = plain if takes_plain else _full_name(binding.chosen)
    config = getattr(model, "config", None)
    kernels["attention"] = str(getattr(config, "_attn_implementation", None) or "eager")
    for part in model.modules():
        kind = type(part).__name__
        if "Norm" in kind:
            operation = "gated_norm" if "Gated" in kind else "norm"
            kernels.setdefault(operation, _full_name(part.forward))
    return kernels


def _full_name(function: Callable[..., Any]) -> str:
    qualified = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{qualified}"
