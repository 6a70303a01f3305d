"""Choosing tokens: the most likely one, or one drawn at a temperature.

A draw is the inverse of the cumulative distribution at one uniform number, and that number is a
function of (seed, prompt, place in the answer, purpose). So what is drawn for a prompt does not
depend on which prompts are decoded beside it or in which order. Cumulative sums are float64, for
over a vocabulary of 250,000 a float32 sum would lose the small probabilities at its end.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.errors import InputError
from engine.randomness import stateless_hash

DRAFT, ACCEPT, CHOOSE = 0, 1, 2
"""What a uniform number is for: a drafted token, its acceptance, a token of the target's own."""


def prompt_key(prompt: Sequence[int]) -> int:
    """63 bits that stand for a prompt's ids in the draws for it."""
    digest = hashlib.blake2b(np.asarray(prompt, dtype="<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seed: int, keys: Tensor, places: Tensor, purpose: int) -> Tensor:
    """Uniform float64 numbers in [0, 1) with 53 random bits each.

    Args:
        keys: int64, from `prompt_key`.
        places: int64, which token of the answer is drawn, counted from 0; broadcasts against `keys`.
    """
    return (stateless_hash(seed, keys, places, purpose) >> 10).to(torch.float64) * 2.0**-53


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Softmax of logits [..., V] at a temperature, float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.softmax(wide / temperature, dim=-1)


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Draw an index of each distribution.

    Args:
        weights: [..., V], not negative, not all zero; they need not add up to one.
        numbers: float64 [...], uniform in [0, 1).

    Returns:
        int64 [...]; an index of weight zero is never drawn.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Rounded up to the total, a number would fall behind the last index of any weight.
    at = torch.minimum(numbers[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, at, right=True).squeeze(-1)


def choose(logits: Tensor, temperature: float, seed: int, keys: Tensor, places: Tensor) -> Tensor:
    """The target's own next tokens [rows]: the most likely at temperature 0, else drawn.

    Args:
        logits: [rows, V]; keys, places: int64 [rows], as in `uniform`.
    """
    if temperature == 0:
        return logits.argmax(-1)
    return draw(probabilities(logits, temperature), uniform(seed, keys, places, CHOOSE))


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> None:
    """Refuse what no decoding can be asked for.

    Raises:
        InputError: an empty prompt, fewer than one token, a temperature below zero.
    """
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {number} has no tokens; decoding needs at least one to go on from")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens = {max_new_tokens}: at least 1 token has to be asked for")
    if not 0 <= temperature < float("inf"):
        raise InputError(f"temperature = {temperature}: 0 takes the most likely token, above 0 draws")
