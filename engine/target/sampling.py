"""Choosing tokens: the most likely one, or one drawn at a temperature.

A draw is the inverse of the cumulative distribution at one uniform number, and that number is a
function of (seed, prompt, place in the answer, purpose). So what is drawn for a prompt does not
depend on which prompts are decoded beside it or in which order. Cumulative sums are float64, for
over a vocabulary of 250,000 a float32 sum would lose the small probabilities at its end.

`argmax` takes NaN for the largest number and a search among NaN finds something too, so overflown
logits would pass for text: every choice checks what it chooses from, at the cost of one scalar that
the host waits for, shortly before it reads the tokens anyway.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.errors import InputError, NonFinite
from engine.randomness import stateless_hash

DRAFT, ACCEPT, CHOOSE = 0, 1, 2
"""What a uniform number is for: a drafted token, its acceptance, a token of the target's own."""

LEAST_TEMPERATURE = 1e-4
"""Below it only near ties are left to chance, which rounding decides; far below, the division overflows."""


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


def most_likely(logits: Tensor, places: Tensor | None = None) -> Tensor:
    """Index of the largest of logits [..., V], int64 [...]; the first one where several are equal.

    Args:
        places: int64, of the tokens in their answers, broadcast against [...]; only for the message.

    Raises:
        NonFinite: a logit is NaN or +inf, or all of a row are -inf.
    """
    found = logits.argmax(-1)
    _require(logits.gather(-1, found[..., None]).squeeze(-1).isfinite(), "logits", places)
    return found


def draw(weights: Tensor, numbers: Tensor, places: Tensor | None = None) -> Tensor:
    """Draw an index of each distribution.

    Args:
        weights: [..., V], not negative, not all zero; they need not add up to one.
        numbers: float64 [...], uniform in [0, 1).
        places: as of `most_likely`.

    Returns:
        int64 [...]; an index of weight zero is never drawn.

    Raises:
        NonFinite: weights are NaN or infinite, or all of a distribution are zero.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    _require((total.isfinite() & (total > 0)).squeeze(-1), "probabilities", places)
    # The largest float64 under 1 times a total is still rounded to less than it: an index is always found.
    return torch.searchsorted(cumulative, numbers[..., None] * total, right=True).squeeze(-1)


def choose(logits: Tensor, temperature: float, seed: int, keys: Tensor, places: Tensor) -> Tensor:
    """The target's own next tokens [rows]: the most likely at temperature 0, else drawn.

    Args:
        logits: [rows, V]; keys, places: int64 [rows], as in `uniform`.

    Raises:
        NonFinite: logits that nothing can be chosen from; names row and place.
    """
    if temperature == 0:
        return most_likely(logits, places)
    return draw(probabilities(logits, temperature), uniform(seed, keys, places, CHOOSE), places)


def _require(sound: Tensor, what: str, places: Tensor | None) -> None:
    """Raise where one of bool [...] is false; waits for the device."""
    if bool(sound.all()):
        return
    bad = sound.logical_not()
    first = bad.nonzero()[0].tolist()
    where = f"row {first[0]}" if first else "one row"
    where += f", slot {first[1]}" if len(first) > 1 else ""
    if places is not None:
        where += f", token {int(places.expand(sound.shape)[tuple(first)])} of its answer"
    raise NonFinite(
        f"no token can be chosen: the {what} at {where} are not finite ({int(bad.sum())} of {sound.numel()} "
        "such rows); look for weights that are not finite, or load the model in a wider dtype"
    )


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> None:
    """Refuse what no decoding can be asked for.

    Raises:
        InputError: an empty prompt, fewer than one token, or a temperature as in `check_temperature`.
    """
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {number} has no tokens; decoding needs at least one to go on from")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens = {max_new_tokens}: at least 1 token has to be asked for")
    check_temperature(temperature)


def check_temperature(temperature: float) -> None:
    """InputError for one that is negative, not finite, or so near to 0 that 0 is meant."""
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < float("inf"):
        raise InputError(
            f"temperature = {temperature}: 0 takes the most likely token (greedy), and tokens are drawn from "
            f"{LEAST_TEMPERATURE:g} on; give 0 or more than that"
        )
