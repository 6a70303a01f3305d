"""The target's kernels against the plain PyTorch functions that they stand for.

On GPU generations that a kernel was not tried on, kernels have returned NaN or wrong numbers in
silence. So before a run, each device's target reads a few hundred tokens, and every operation that its
model file bound to a kernel is computed once more by the plain function in float32, from the arguments
that the kernel was given: the run's own heads, weights and dtype. One call of each operation is
compared, the first.

A fused target has kernels of its own, which were compared with float32 when it was made; where that was
done in bfloat16, the module's are not compiled for a comparison, if nothing else will run them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.errors import EngineError, is_out_of_memory
from engine.target.fused_walk import FusedWalk
from engine.target.kernels import Binding, bindings
from engine.target.loading import Target

ROWS, TOKENS = 2, 256
"""Two rows, or what passes from one to the other would not show; four chunks of the gated delta rule's
kernels each, and no tail that is padded."""

KERNEL_TOLERANCE = 2e-2
"""Of ‖kernel - plain‖ / ‖plain‖. bfloat16 rounds a result by 2e-3 and a chunk's inner products by as much
again; kernels that are wrong are off by tenths, or NaN."""


@attrs.frozen
class KernelError:
    """How far one operation is from its plain function."""

    operation: str
    kernel: str
    device: torch.device
    error: float
    """Relative, of the worst of its results; infinite where one is not finite."""

    @property
    def bad(self) -> bool:
        return not self.error <= KERNEL_TOLERANCE

    def __str__(self) -> str:
        return (
            f"{self.operation} ({self.kernel}) on {self.device} is {self.error:.2g} from plain PyTorch "
            f"(at most {KERNEL_TOLERANCE:g})"
        )


def compared_already(target: Target) -> bool:
    """Whether a target's forward is a fused walk that was compared with float32, or a recording of one."""
    walk = getattr(target, "walk", None)
    while (inner := getattr(walk, "inner", None)) is not None:
        walk = inner.walk
    return isinstance(walk, FusedWalk) and walk.checked


def has_kernels(target: Target) -> bool:
    """Whether an operation of a target's module runs as a kernel."""
    return any(binding.on_kernel(target.device) for binding in bindings(target.model))


@torch.no_grad()
def kernel_errors(target: Target, seed: int = 0) -> list[KernelError]:
    """Compare each operation of a target that runs as a kernel; empty where all run as plain PyTorch.

    Other threads must not use the target's model files meanwhile: their functions are replaced by ones
    that compare, until this returns.

    Args:
        target: with its forward as loaded.
        seed: of the random tokens.

    Raises:
        EngineError: a kernel failed; names operation and device. Out of memory passes as it is.
    """
    kernels = [binding for binding in bindings(target.model) if binding.on_kernel(target.device)]
    if not kernels:
        return []
    generator = torch.Generator().manual_seed(seed)
    tokens = min(TOKENS, target.summary.max_position_embeddings)
    ids = torch.randint(0, target.summary.vocab_size, (ROWS, tokens), generator=generator)
    found: dict[str, KernelError] = {}
    with _comparing(kernels, target.device, found):
        target.forward_taps(ids.to(target.device))
    return list(found.values())


@contextmanager
def _comparing(kernels: list[Binding], device: torch.device, found: dict[str, KernelError]) -> Iterator[None]:
    """Let the first call of each operation inside the block be compared."""
    before = [vars(binding.module)[binding.attribute] for binding in kernels]
    try:
        for binding, call in zip(kernels, before, strict=True):
            setattr(binding.module, binding.attribute, _compared(binding, call, device, found))
        yield
    finally:
        for binding, call in zip(kernels, before, strict=True):
            setattr(binding.module, binding.attribute, call)


def _compared(
    binding: Binding, call: Callable[..., Any], device: torch.device, found: dict[str, KernelError]
) -> Callable[..., Any]:
    known = frozenset(signature(binding.plain).parameters)
    kernel = f"{binding.chosen.__module__}.{getattr(binding.chosen, '__qualname__', binding.operation)}"

    def compared(*args: Any, **kwargs: Any) -> Any:
        if binding.operation in found:
            return call(*args, **kwargs)
        # Before the kernel runs, which may write into what it is given.
        plain_args = [_float32(value) for value in args]
        plain_kwargs = {name: _float32(value) for name, value in kwargs.items() if name in known}
        try:
            result = call(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a kernel's fault shows here rather than anywhere later
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise EngineError(
                f"{binding.operation} ({kernel}) on {device} failed at its first call: "
                f"{type(error).__name__}: {error}"
            ) from error
        error_of = relative_error(_tensors(result), _tensors(binding.plain(*plain_args, **plain_kwargs)))
        found[binding.operation] = KernelError(binding.operation, kernel, device, error_of)
        return result

    return compared


def relative_error(results: list[Tensor], references: list[Tensor]) -> float:
    """The largest ‖result - reference‖ / ‖reference‖; infinite where a number is not finite."""
    worst = 0.0
    # A kernel may return a state that was not asked for, behind what it was called for.
    for result, reference in zip(results, references, strict=False):
        reference = reference.double()
        error = torch.linalg.vector_norm(result.double() - reference)
        error = float(error / torch.linalg.vector_norm(reference).clamp(min=1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _float32(value: Any) -> Any:
    return value.float().clone() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tensors(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [value for value in results if isinstance(value, Tensor)]
