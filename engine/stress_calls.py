"""What `stress` launches: the operations of a Gated DeltaNet layer, on shapes that keep changing.

The operations are FLA's, with the sizes of Qwen3.6-27B, so that a layer's real kernels are tuned and
launched: convolution, L2 norm, cumulative decay, the gated delta rule and the gated norm; forward only,
as of a frozen target. What makes a key cold is the batch size, the number of 65,536-row pieces, the
dtype, packing and carried states; each round brings other shapes, and round by round more of these.

Values are a function of their place alone, so that two threads, two devices and two processes get the
same bits without a generator's state. The same call must then give the same output bits. Under the stub
driver nothing is computed; there a call is known by what it launched.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.errors import InputError
from engine.runtime.stub_driver import Launch

KEY_HEADS, VALUE_HEADS, HEAD = 16, 48, 128
CONVOLUTION, CHANNELS = 4, (2 * KEY_HEADS + VALUE_HEADS) * HEAD
CHUNK = 64
TOKENS = 8_192  # of a call at most: its largest tensor has 170 MB
PERIOD = 1_048_573  # a prime, so that no row of a tensor equals its neighbour
LENGTHS = (65, 700, 2_100, 5_000, 8_000)  # upper ends of the ranges that lengths come from

Operation = Callable[["Form", torch.device], tuple[Tensor, ...]]


@attrs.frozen
class Form:
    """One set of shapes."""

    batch: int
    length: int
    dtype: str
    """A torch dtype's name."""
    boundaries: tuple[int, ...] | None = None
    """Of packed documents: from 0 to `length`, strictly increasing; the batch is 1 then."""
    state: bool = False
    """Whether the gated delta rule starts from a state and returns one."""

    def __str__(self) -> str:
        packed = f" packed {len(self.boundaries) - 1}" if self.boundaries else ""
        return f"{self.dtype} [{self.batch}, {self.length}]{packed}{' with states' if self.state else ''}"


@attrs.frozen
class Call:
    """One operation on one set of shapes."""

    operation: str
    form: Form

    def __str__(self) -> str:
        return f"{self.operation} {self.form}"


def forms_of_round(number: int) -> list[Form]:
    """The shapes of a round, from its number alone: one set at first, then packed, then other dtypes.

    They begin small since a key's first tuning compiles every configuration, which takes a minute or two
    with an empty cache folder.
    """
    draw = random.Random(number)
    forms = [_unpacked(draw, "bfloat16", state=False)]
    if number >= 1:
        length = draw.randint(200, 6_000)
        cuts = draw.sample(range(1, length), draw.randint(1, 5))
        forms.append(Form(1, length, "bfloat16", (0, *sorted(cuts), length)))
    if number >= 2:
        forms.append(_unpacked(draw, "float16", state=number % 2 == 0))
    if number >= 3:
        forms.append(_unpacked(draw, "bfloat16", state=number % 2 == 1))
    return forms


def _unpacked(draw: random.Random, dtype: str, *, state: bool) -> Form:
    longest = draw.choice(LENGTHS)
    length = draw.randint(longest // 3, longest)
    return Form(draw.randint(1, max(1, min(4, TOKENS // length))), length, dtype, state=state)


def calls_of_round(number: int, operations: Sequence[str]) -> list[Call]:
    """Every operation on every set of shapes of a round, in a fixed order."""
    return [Call(operation, form) for form in forms_of_round(number) for operation in operations]


def values(*shape: int, dtype: str, device: torch.device, salt: int = 0) -> Tensor:
    """Numbers in [-1, 1) that look random, from each element's place and `salt`.

    Returns:
        a tensor of this shape; on a CPU, where only the stub launches, one that was never written.
    """
    wanted = getattr(torch, dtype)
    if device.type == "cpu":
        return torch.empty(shape, dtype=wanted)
    count = torch.Size(shape).numel()
    places = torch.arange(salt, salt + min(count, PERIOD), device=device)
    mixed = (places * 2_654_435_761) ^ (places * 40_503 >> 7)
    once = ((mixed >> 9 & 0xFFFF).float() / 32_768 - 1).to(wanted)
    return once.repeat(-(-count // PERIOD))[:count].view(shape)


def _boundaries(form: Form, device: torch.device) -> Tensor | None:
    """A new tensor for every call, as every new micro-batch brings one: FLA remembers them by identity."""
    if form.boundaries is None:
        return None
    return torch.tensor(form.boundaries, dtype=torch.int32, device=device)


def load_operations() -> dict[str, Operation]:
    """FLA's operations by name.

    Raises:
        InputError: FLA cannot be imported.
    """
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.modules.norm.l2norm import l2norm_fwd
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.utils import chunk_local_cumsum
    except Exception as error:  # an FLA that does not fit its Triton fails in many ways
        raise InputError(
            f"FLA cannot be imported, so there is nothing to stress: {type(error).__name__}: {error}; "
            "`python -m engine doctor` says which versions go together"
        ) from error

    def gated_delta_rule(form: Form, device: torch.device) -> tuple[Tensor, ...]:
        batch, length, dtype = form.batch, form.length, form.dtype
        boundaries = _boundaries(form, device)
        documents = batch if form.boundaries is None else len(form.boundaries) - 1
        shape = (documents, VALUE_HEADS, HEAD, HEAD)
        decay = values(batch, length, VALUE_HEADS, dtype="float32", device=device, salt=3)
        output, state = chunk_gated_delta_rule(
            q=values(batch, length, KEY_HEADS, HEAD, dtype=dtype, device=device),
            k=values(batch, length, KEY_HEADS, HEAD, dtype=dtype, device=device, salt=1),
            v=values(batch, length, VALUE_HEADS, HEAD, dtype=dtype, device=device, salt=2),
            g=-decay.abs(),
            beta=values(batch, length, VALUE_HEADS, dtype=dtype, device=device, salt=4).sigmoid(),
            initial_state=values(*shape, dtype="float32", device=device, salt=5) if form.state else None,
            output_final_state=form.state,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=boundaries,
        )
        return (output,) if state is None else (output, state)

    def convolution(form: Form, device: torch.device) -> tuple[Tensor, ...]:
        output, _ = causal_conv1d(
            x=values(form.batch, form.length, CHANNELS, dtype=form.dtype, device=device),
            weight=values(CHANNELS, CONVOLUTION, dtype=form.dtype, device=device, salt=1),
            activation="silu",
            cu_seqlens=_boundaries(form, device),
        )
        return (output,)

    def gated_norm(form: Form, device: torch.device) -> tuple[Tensor, ...]:
        rows = form.batch * form.length * VALUE_HEADS
        output = rms_norm_gated(
            values(rows, HEAD, dtype=form.dtype, device=device),
            values(rows, HEAD, dtype=form.dtype, device=device, salt=1),
            values(HEAD, dtype=form.dtype, device=device, salt=2),
            None,
        )
        return (output,)

    def l2_norm(form: Form, device: torch.device) -> tuple[Tensor, ...]:
        inputs = values(form.batch, form.length, KEY_HEADS, HEAD, dtype=form.dtype, device=device)
        return tuple(l2norm_fwd(inputs))

    def cumulative_decay(form: Form, device: torch.device) -> tuple[Tensor, ...]:
        decay = values(form.batch, form.length, VALUE_HEADS, dtype="float32", device=device)
        return (chunk_local_cumsum(decay, CHUNK, cu_seqlens=_boundaries(form, device)),)

    return {
        "gated-delta-rule": gated_delta_rule,
        "convolution": convolution,
        "l2-norm": l2_norm,
        "gated-norm": gated_norm,
        "cumulative-decay": cumulative_decay,
    }


def tensor_difference(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> str | None:
    """Where two results of one call differ in their bits, in words; None where they do not.

    They may lie on different devices. A NaN is equal to itself here.
    """
    if len(ours) != len(reference):
        return f"{len(ours)} tensors, and {len(reference)}"
    for index, (one, other) in enumerate(zip(ours, reference, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"output {index}: {list(one.shape)} {one.dtype}, and {list(other.shape)} {other.dtype}"
        if one.device != other.device:
            one, other = one.cpu(), other.cpu()  # through the host: peer copies can be at fault as well
        unequal = _bits(one) != _bits(other)
        if count := int(unequal.sum()):
            gap = (one[unequal].double() - other[unequal].double()).abs().max()
            return f"output {index}: {count:,} of {one.numel():,} elements, by up to {float(gap):.3g}"
    return None


def _bits(tensor: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(whole[tensor.element_size()])


def launch_difference(ours: Sequence[Launch], reference: Sequence[Launch]) -> str | None:
    """The first launch in which two lists differ, in words; None where they are the same.

    A launch is compared by kernel, grid, compile options and arguments (integer contents included).
    """
    for index, (one, other) in enumerate(zip(ours, reference, strict=False)):
        if one.kernel != other.kernel:
            return f"launch {index}: {one.kernel}, and {other.kernel}"
        mine: Mapping[str, Any] = {"grid": one.grid, **dict(one.options), **dict(one.arguments)}
        theirs: Mapping[str, Any] = {"grid": other.grid, **dict(other.options), **dict(other.arguments)}
        unlike = [name for name in mine if mine[name] != theirs.get(name)]
        if unlike:
            shown = ", ".join(f"{name} {mine[name]!r} and {theirs.get(name)!r}" for name in unlike[:3])
            return f"launch {index}, {one.kernel}: {shown}"
    if len(ours) != len(reference):
        return f"{len(ours)} launches, and {len(reference)}"
    return None


def not_finite(outputs: Sequence[Tensor]) -> str | None:
    """Which output holds a NaN or an infinity, in words; None where none does."""
    for index, output in enumerate(outputs):
        if count := int((~output.isfinite()).sum()):
            return f"output {index}: {count:,} of {output.numel():,} elements are not finite"
    return None
