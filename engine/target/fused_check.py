"""Whether a fused walk computes what the Hugging Face modules do, judged by float32.

Two bfloat16 paths never agree bit for bit, and how far they may be apart depends on the layer. So both
are compared with the same layers in float32, on the modules' plain PyTorch functions: each layer by itself
from the same input, so that nothing hides behind errors made earlier, and the taps after the whole way.
The fused error may be a tenth larger than the unfused one, not more. Float32 weights exist for one layer
at a time.

In bfloat16 the modules run on their plain functions too: what is wanted of them is how much this dtype
rounds, which plain functions tell as well as kernels, and no kernel is compiled that the run won't use. In
float32 they run as they are bound. Kernels multiply in TF32 there, a thousand times coarser than plain
PyTorch, and no plain function tells how far that takes a layer. What both have wrong would cancel then, so
a layer has a bound of its own as well.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from inspect import signature
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from engine.errors import EngineError, is_out_of_memory
from engine.target.fused_layers import Batch, positions
from engine.target.fused_walk import FusedWalk, on_device, walked_layers
from engine.target.kernel_check import KERNEL_TOLERANCE
from engine.target.kernels import Binding, bindings
from engine.target.loading import Target

ROWS, TOKENS = 2, 128
"""Two rows, so that states crossing from one to the next would show; two chunks of the delta rule each."""

DEPTH_ALLOWANCE = 2.0
"""On the taps only: errors of tens of layers grow into one another, and which of two equally good paths ends
closer is chance. What a layer does wrong shows in the layer; here it would show by tenths, were the residual
stream carried wrongly."""

FLOORS = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-4}
"""Relative errors that are rounding alone, and no reason to call a path worse than another."""

MOST_OF_A_LAYER = KERNEL_TOLERANCE
"""In float32, whatever the module's error is. TF32 takes a gated delta rule's layer 3e-4 away on an H200."""


@attrs.frozen
class PathError:
    """Relative errors against float32: root mean square over tokens of ‖x - reference‖ / ‖reference‖."""

    what: str
    """A kind of layer, or a tap."""
    fused: float
    unfused: float
    allowed: float
    """What `fused` may be."""

    @property
    def bad(self) -> bool:
        return not (math.isfinite(self.fused) and self.fused <= self.allowed)

    def __str__(self) -> str:
        return f"{self.what} {self.fused:.2e} ({self.unfused:.2e} unfused)"


def tells_of_kernels(dtype: torch.dtype) -> bool:
    """Whether plain functions round as a dtype's kernels do, so that no kernel has to run to judge a walk."""
    return dtype != torch.float32


@torch.no_grad()
def fused_errors(target: Target, walk: FusedWalk, tolerance: float, seed: int = 0) -> list[PathError]:
    """Compare every layer and every tap of a walk, and of the modules, with float32.

    Other threads must not use the target meanwhile. Needs room for one layer in float32.

    Args:
        target: with its forward as loaded.
        tolerance: how much larger a fused error may be than the unfused one.
        seed: of the random tokens.

    Returns:
        One entry per kind of layer, then one per tap.

    Raises:
        EngineError: a kernel of the walk failed, or in float32 one of the module. Out of memory passes as
            it is.
    """
    ids = random_tokens(target, seed)
    calls: list[LayerCall] = []
    layers = walked_layers(target)
    plainly = tells_of_kernels(target.dtype)
    as_judged = _plain_functions(target.model) if plainly else nullcontext()
    with on_device(target.device), as_judged, _recorded(layers, calls):
        taps = _first_run("the Hugging Face module", target.forward_taps, ids)
    fused_taps = _first_run("the fused target", walk, ids, ', or name plugins.fused_target with on = "never"')

    floor = FLOORS[target.dtype]
    most = math.inf if plainly else MOST_OF_A_LAYER
    with on_device(target.device), _plain_functions(target.model), _exact_products():
        angles = positions(walk.model, ids.shape[1], target.device)
        batch = Batch(ROWS, ids.shape[1], *angles)
        kinds: dict[str, list[tuple[float, float]]] = {}
        precise: dict[int, Tensor] = {}
        stream = calls[0].x.float()
        for number, (layer, fused, call) in enumerate(zip(layers, walk.layers, calls, strict=True)):
            reference = _in_float32(layer, call, angles)
            expected = reference(call.x.float())
            branch, residual, _ = fused(None, call.x.flatten(0, 1), batch)
            out = (residual + branch).view_as(call.x)
            pair = relative_error(out, expected), relative_error(call.out, expected)
            kinds.setdefault(fused.kind, []).append(pair)
            stream = reference(stream)
            if number in target.target_layer_ids:
                precise[number] = stream
    found = []
    for kind, pairs in kinds.items():
        errors = _rms([pair[0] for pair in pairs]), _rms([pair[1] for pair in pairs])
        found.append(_judged(kind, *errors, tolerance, floor, most))
    for layer_id, tap, fused_tap in zip(target.target_layer_ids, taps, fused_taps, strict=True):
        errors = relative_error(fused_tap, precise[layer_id]), relative_error(tap, precise[layer_id])
        found.append(_judged(f"tap of layer {layer_id}", *errors, tolerance * DEPTH_ALLOWANCE, floor))
    return found


def _first_run(
    what: str, forward: Callable[[Tensor], list[Tensor]], ids: Tensor, otherwise: str = ""
) -> list[Tensor]:
    try:
        taps = forward(ids)
        if ids.device.type == "cuda":
            torch.cuda.synchronize(ids.device)  # a kernel's fault shows here rather than anywhere later
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise EngineError(
            f"{what} on {ids.device} failed at its first call: {type(error).__name__}: {error}. "
            f"Update Triton and flash-linear-attention{otherwise}"
        ) from error
    return taps


def outputs_of_all_layers(walk: FusedWalk, input_ids: Tensor) -> list[Tensor]:
    """What every layer of a walk puts out, [rows, length, H] each."""
    return attrs.evolve(walk, target_layer_ids=tuple(range(len(walk.layers))))(input_ids)


@torch.no_grad()
def layer_errors(walk: FusedWalk, outputs: Sequence[Tensor]) -> list[float]:
    """Relative errors of what each layer but the first adds to its input, as `relative_error`.

    Args:
        outputs: of all layers of a walk over the same target that is taken to be right; each is the next
            layer's input, so that errors do not grow from layer to layer.
    """
    rows, length, _ = outputs[0].shape
    errors = []
    with on_device(walk.device):
        batch = Batch(rows, length, *positions(walk.model, length, walk.device))
        for layer, x, expected in zip(walk.layers[1:], outputs, outputs[1:], strict=False):
            branch, residual, _ = layer(None, x.flatten(0, 1), batch)
            out = (residual + branch).view_as(x)
            errors.append(relative_error(out.float() - x.float(), expected.float() - x.float()))
    return errors


def random_tokens(target: Target, seed: int) -> Tensor:
    """int64 [2, 128] on the target's device, fewer where its positions end earlier."""
    tokens = min(TOKENS, target.summary.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, target.summary.vocab_size, (ROWS, tokens), generator=generator)
    return ids.to(target.device)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """Root mean square over tokens of ‖x - reference‖ / ‖reference‖; each token counts alike, since a few
    have states hundreds of times larger than the rest. Infinite where a number is not finite."""
    reference = reference.double()
    lengths = torch.linalg.vector_norm(reference, dim=-1).clamp(min=1e-30)
    errors = torch.linalg.vector_norm(x.double() - reference, dim=-1) / lengths
    error = float(errors.square().mean().sqrt())
    return error if error == error else float("inf")


def _judged(
    what: str, fused: float, unfused: float, tolerance: float, floor: float, most: float = math.inf
) -> PathError:
    return PathError(what, fused, unfused, min(tolerance * max(unfused, floor), most))


def _rms(errors: Sequence[float]) -> float:
    return (sum(error * error for error in errors) / len(errors)) ** 0.5


@attrs.frozen(eq=False)
class LayerCall:
    """How a model called one of its decoder layers."""

    x: Tensor
    """[rows, length, H]"""
    arguments: dict[str, Any]
    out: Tensor


@contextmanager
def _recorded(layers: Sequence[nn.Module], calls: list[LayerCall]) -> Iterator[None]:
    """Append each layer's call to `calls` while the block runs the model."""

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        calls.append(LayerCall(x, rest, out[0] if isinstance(out, tuple) else out))

    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_hook(record, with_kwargs=True)
            hooks.callback(hook.remove)
        yield


def _in_float32(
    layer: nn.Module, call: LayerCall, angles: tuple[Tensor, Tensor]
) -> Callable[[Tensor], Tensor]:
    """A layer with float32 weights, to be called on inputs like that of `call`."""
    precise = copy.deepcopy(layer).float()
    arguments = {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in call.arguments.items()
    }
    arguments["position_embeddings"] = tuple(angle[None] for angle in angles)

    def run(x: Tensor) -> Tensor:
        out = precise(x, **arguments)
        return out[0] if isinstance(out, tuple) else out

    return run


@contextmanager
def _plain_functions(model: nn.Module) -> Iterator[None]:
    """Let the model's operations run as the plain PyTorch functions that its file has for them."""
    chosen = bindings(model)
    before = [vars(binding.module)[binding.attribute] for binding in chosen]
    try:
        for binding in chosen:
            setattr(binding.module, binding.attribute, _plain(binding))
        yield
    finally:
        for binding, call in zip(chosen, before, strict=True):
            setattr(binding.module, binding.attribute, call)


def _plain(binding: Binding) -> Callable[..., Any]:
    known = frozenset(signature(binding.plain).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        return binding.plain(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call


@contextmanager
def _exact_products() -> Iterator[None]:
    """float32 matrix products in float32, whatever the process allows otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
