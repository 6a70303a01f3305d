"""Greedy decoding of a target, and how far given answers agree with it.

Rows of equal prompt length are decoded together with the model's own cache, so nothing is padded:
padding on the left would corrupt the recurrent states of a hybrid target, and padding on the right
would stand between prompt and answer.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompts: Tensor, max_new_tokens: int, eos: int | Sequence[int]
) -> list[list[int]]:
    """Continue each prompt with the model's most likely token until it ends the answer itself.

    Args:
        model: a causal LM of transformers, in evaluation mode.
        prompts: int64 `[rows, length]`, all of the same length, on the model's device.
        max_new_tokens: at most this many tokens a row, the end token included.
        eos: the id or ids that end an answer.

    Returns:
        The new ids of each row, the end token included; a row without one reached the limit.
    """
    # transformers renamed the argument: 5.24's models know both names and warn about the old one.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ends = torch.as_tensor([eos] if isinstance(eos, int) else list(eos), device=prompts.device)
    answers: list[list[int]] = [[] for _ in range(prompts.shape[0])]
    running = set(range(prompts.shape[0]))
    cache, step_input = None, prompts
    for _ in range(max_new_tokens):
        output = model(step_input, use_cache=True, logits_to_keep=1, **{cache_name: cache})
        cache = output[cache_name]
        chosen = output.logits[:, -1].argmax(-1)  # [rows]
        ended = torch.isin(chosen, ends).tolist()
        for row, token in enumerate(chosen.tolist()):
            if row in running:
                answers[row].append(token)
        running = {row for row in running if not ended[row]}
        if not running:
            break
        # Ended rows ride along: taking rows out of a hybrid's cache costs more than it saves here.
        step_input = chosen[:, None]
    return answers


@torch.inference_mode()
def target_agreement(model: PreTrainedModel, input_ids: Tensor, loss_mask: Tensor) -> float:
    """Share of the supervised tokens that are the model's own most likely ones, given all before them.

    Args:
        model: a causal LM of transformers, in evaluation mode.
        input_ids: int64 `[rows, length]`, right-padded.
        loss_mask: `[rows, length]`, non-zero where a token is supervised; zero on padding. A document's
            first token is never counted, since nothing predicts it.

    Returns:
        A number in [0, 1]; NaN where nothing is supervised.
    """
    agreed, supervised = agreement_counts(model, input_ids, loss_mask)
    return agreed / supervised if supervised else float("nan")


@torch.inference_mode()
def agreement_counts(model: PreTrainedModel, input_ids: Tensor, loss_mask: Tensor) -> tuple[int, int]:
    """Numerator and denominator of `target_agreement`, to be summed over batches."""
    logits = model(input_ids, use_cache=False).logits  # [rows, length, V]
    supervised = loss_mask[:, 1:].bool()
    agreed = (logits[:, :-1].argmax(-1) == input_ids[:, 1:]) & supervised
    return int(agreed.sum()), int(supervised.sum())
