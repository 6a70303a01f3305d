"""Kernels that take any shape as it comes: decoding on a GPU brings a new one with nearly every forward.

Three things cost time once per shape, and in training are over after the warm-up. FLA's chunked delta
rule tunes its cumulative sum for each number of rows, and five more kernels for each way in which states
come and go, a fraction of a second to many seconds a key. cuDNN's attention, which PyTorch prefers on
Hopper, plans anew for each number of rows, queries and keys, up to tenths of a second a plan. While rows
end and texts grow, that is a plan per token and a key per number of rows left.

So inside `any_shape` short inputs take FLA's recurrent kernel, the one that a single token takes anyway. It
is not tuned at all, and is compiled three times: for a walk, for a prompt, and for what follows it.
Attention takes PyTorch's other kernels, which are compiled already. Longer inputs keep the chunked rule:
token by token each would take as many turns as it has tokens, one after another.

Padding rows and lengths to few sizes would leave a handful of keys to tune, seconds each, and would
compute for nobody. On a CPU nothing of this is needed, and nothing is changed.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.target.kernels import Binding, bindings

TOKENS_IN_TURN = 512
"""Inputs of up to so many tokens go token by token. A turn of the kernel is in the order of a microsecond, by
estimate, so a layer waits for as long as Python needs to launch it."""

CHUNKED, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"

_ACTIVE: ContextVar[bool] = ContextVar("any_shape", default=False)

_BY_LENGTH = "_delta_rule_by_length"


@contextmanager
def any_shape(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside the block this thread's forwards of a model on a GPU need no tuning and no plans per shape.

    Args:
        model: the target's; its file's functions learn to look at an input's length, for good, and do so
            inside such blocks alone.
    """
    if not shapes_cost(device):
        yield
        return
    if not vars(model).get(_BY_LENGTH):
        route_by_length(model, device)
        setattr(model, _BY_LENGTH, True)
    token = _ACTIVE.set(True)
    try:
        with any_shape_attention(device):
            yield
    finally:
        _ACTIVE.reset(token)


@contextmanager
def any_shape_attention(device: torch.device) -> Iterator[None]:
    """Inside the block attention on a GPU is not cuDNN's. PyTorch keeps that choice for the process: what
    other threads launch meanwhile is as right, by another kernel."""
    if not shapes_cost(device):
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def shapes_cost(device: torch.device) -> bool:
    """Whether a new shape costs more than its arithmetic there."""
    return device.type == "cuda"


def route_by_length(model: nn.Module, device: torch.device) -> None:
    """Let the chunked rule of the model's files be the recurrent one for short inputs in `any_shape`.

    Where a file has no recurrent kernel nothing is changed; a second call changes nothing.
    """
    found: dict[tuple[ModuleType, str], Binding] = {
        (binding.module, binding.operation): binding for binding in bindings(model) if tuned(binding, device)
    }
    for (module, operation), chunked in found.items():
        recurrent = found.get((module, RECURRENT))
        function = vars(module)[chunked.attribute]
        if operation == CHUNKED and recurrent is not None and not getattr(function, _BY_LENGTH, False):
            setattr(module, chunked.attribute, _by_length(function, module, recurrent.attribute))


def tuned(binding: Binding, device: torch.device) -> bool:
    """Whether an operation runs as a kernel there, and not as plain PyTorch, which takes any shape."""
    return binding.on_kernel(device)


def _by_length(chunked: Callable[..., Any], module: ModuleType, recurrent: str) -> Callable[..., Any]:
    @functools.wraps(chunked)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if _ACTIVE.get() and first.shape[1] <= TOKENS_IN_TURN:  # [rows, length, heads, d]
            return vars(module)[recurrent](*args, **kwargs)
        return chunked(*args, **kwargs)

    setattr(call, _BY_LENGTH, True)
    return call
