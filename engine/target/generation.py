"""What a target says by itself: its greedy or sampled text, and where two such texts part.

`decode_alone` takes any prompts, keeps what the target remembers in rows of their own lengths
(`cached_forward`), and lets rows that have ended go.

Two ways to the same logits round differently, so two greedy texts may part where the two most
likely tokens are all but equal. `explain_difference` tells such a place from a fault.
"""

from collections.abc import Collection, Sequence

import attrs
import torch

from engine.errors import InputError
from engine.target.cached_forward import prefill, select, step
from engine.target.decoding_kernels import any_shape
from engine.target.loading import Target
from engine.target.sampling import check_request, choose, prompt_key

ROWS_AT_ONCE = 64
"""Prompts decoded side by side."""

NEAR_TIE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-7, torch.float32: 2.0**-18, torch.float64: 2.0**-18}
"""Logits closer than this share of the largest one may change places by rounding. The built-in
target's logits differ by 2**-6.3 in bfloat16 and by 2**-20 in float32 between a verification and a
forward without a cache, and two logits differ independently. Models keep norms and rotary angles
in float32 whatever the dtype, so float64 gains nothing."""


@torch.no_grad()
def decode_alone(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
    rows_at_once: int = ROWS_AT_ONCE,
) -> list[list[int]]:
    """Continue prompts token by token with the target's own choices.

    Args:
        target: loaded with `keep_head`.
        prompts: token ids, at least one each; lengths may differ.
        max_new_tokens: at most this many tokens each, the stop token included.
        stop: ids that end an answer.
        temperature: 0 for the most likely token; above 0 it is drawn.
        seed: of the draws; what is drawn for a prompt depends on it and on the prompt alone, up to
            rounding, which differs between batches of different sizes.

    Returns:
        The new ids of each prompt, the stop token included.

    Raises:
        InputError: an empty prompt, no token asked for, a temperature below zero.
        EngineError: the target has no head.
    """
    check_request(prompts, max_new_tokens, temperature)
    ends = frozenset(stop)
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), rows_at_once):
        indices = order[first : first + rows_at_once]
        keys = torch.tensor([prompt_key(prompts[index]) for index in indices], device=target.device)
        rows, logits, _ = prefill(target, [prompts[index] for index in indices])
        for place in range(max_new_tokens):
            chosen = choose(logits, temperature, seed, keys, torch.full_like(keys, place))  # [rows]
            for index, token in zip(indices, chosen.tolist(), strict=True):
                answers[index].append(token)
            going = [row for row, index in enumerate(indices) if answers[index][-1] not in ends]
            if not going or place == max_new_tokens - 1:
                break
            if len(going) < len(indices):
                indices = [indices[row] for row in going]
                select(rows, going)
                at = torch.tensor(going, device=keys.device)
                keys, chosen = keys[at], chosen[at]
            logits = step(rows, chosen)
    return answers


@attrs.frozen
class Difference:
    """Where two continuations of a prompt part, and what the target thinks there."""

    place: int
    """Index of the first token that differs, counted from the prompt's end."""
    ours: int | None
    """None: this continuation ended before."""
    alone: int | None
    top: tuple[int, int]
    """The target's two most likely tokens there, by one forward without a cache."""
    logits: tuple[float, float]
    bound: float
    """Logits that are closer than this may change places by rounding."""
    near_tie: bool
    """Whether both tokens are within the bound of the most likely one."""

    @property
    def gap(self) -> float:
        """The difference of the two top logits."""
        return self.logits[0] - self.logits[1]

    def __str__(self) -> str:
        verdict = "a near tie" if self.near_tie else "not a tie"
        return (
            f"token {self.place} is {self.ours}, the target alone says {self.alone}; its two top logits "
            f"there (tokens {self.top[0]} and {self.top[1]}) are {self.gap:.3g} apart: {verdict}, "
            f"the bound is {self.bound:.3g}"
        )


@torch.no_grad()
def explain_difference(
    target: Target, prompt: Sequence[int], ours: Sequence[int], alone: Sequence[int]
) -> Difference | None:
    """Compare two greedy continuations of a prompt; None where they are the same.

    Args:
        target: loaded with `keep_head`.
        ours, alone: new tokens, as from speculation and from `decode_alone`.
    """
    common = next((at for at, pair in enumerate(zip(ours, alone, strict=False)) if pair[0] != pair[1]), None)
    if common is None:
        if len(ours) == len(alone):
            return None
        common = min(len(ours), len(alone))
    if not len(prompt):
        raise InputError("the prompt has no tokens, so nothing can be said about what follows it")
    ids = torch.tensor([[*prompt, *ours[:common]]], device=target.device)
    with any_shape(target.model, target.device):  # every text has another length
        output = target.model(input_ids=ids, use_cache=False, logits_to_keep=1)
    logits = output.logits[0, -1].double()  # [V]
    values, tokens = logits.topk(2)
    bound = NEAR_TIE[target.dtype] * float(logits.abs().max())
    said = [sequence[common] if common < len(sequence) else None for sequence in (ours, alone)]
    near = all(token is not None and float(values[0] - logits[token]) <= bound for token in said)
    first, second = tokens.tolist()
    return Difference(
        place=common,
        ours=said[0],
        alone=said[1],
        top=(first, second),
        logits=(float(values[0]), float(values[1])),
        bound=bound,
        near_tie=near,
    )
