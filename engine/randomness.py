"""Stateless randomness: numbers that are a function of their keys and of nothing else.

Order, anchors and noise must come out the same whatever the threads, devices and neighbours did
before, so there is no generator whose state could be advanced by somebody else. A number is the
splitmix64 finaliser applied to its keys one after the other, in 64-bit integer arithmetic that
wraps around, which torch computes alike on every device.
"""

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts signed integers arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _finalise(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def stateless_hash(*keys: int | Tensor) -> Tensor:
    """Hash integer keys, in order, into uniformly spread 63-bit numbers.

    Args:
        keys: integers or int64 tensors that broadcast against each other.

    Returns:
        int64, values in [0, 2^63), of the keys' broadcast shape, on the tensors' device.
    """
    device = next((key.device for key in keys if isinstance(key, Tensor)), torch.device("cpu"))
    state = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        if not isinstance(key, Tensor):
            key = ((key + (1 << 63)) % (1 << 64)) - (1 << 63)
        state = _finalise(state + key + _GOLDEN)
    return _shift_right(state, 1)


def stateless_uniform(*keys: int | Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1) with 24 random bits each; keys as in `stateless_hash`."""
    return _shift_right(stateless_hash(*keys), 39).to(torch.float32) * 2.0**-24
