"""What a target itself says at places of given texts, and its taps there, by one forward.

This is the one answer to that question: training's evaluation and `evaluate` walk with these tokens, and
target agreement counts them. Logits exist for the places that are asked for, some at a time, so that one
long document costs no more than many short ones.

Where something else runs the layers (`Target.walk`: fused kernels, 8-bit products), it runs them here too,
as far as it goes, which is to the last tap. From there the module's own last layers go on, so what is said
is what follows from the taps that the drafter is given.
"""

import torch
from torch import Tensor

from engine.errors import EngineError, NonFinite
from engine.target.decoding_kernels import any_shape
from engine.target.fused_layers import why_not
from engine.target.loading import Target
from engine.target.truncation import capturing_taps, resumed_view

PLACES_AT_ONCE = 1024
"""Places whose logits exist at once: 0.5 GB at a vocabulary of 248,320 in bfloat16."""


@torch.no_grad()
def own_tokens_and_taps(target: Target, input_ids: Tensor, wanted: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The target's most likely token at each wanted place, given the text before it, and its taps.

    Args:
        target: with its head.
        input_ids: int64 [rows, length], right-padded, on the target's device.
        wanted: bool [rows, length], False on padding. Nothing predicts a row's first token, which is
            never looked at.

    Returns:
        int64 [rows, length]: the target's token where it was wanted and the given one elsewhere; and one
        [rows, length, H] per tap. All on the target's device.

    Raises:
        EngineError: the target was cut behind its last tap.
        NonFinite: a logit is NaN.
    """
    if not target.has_head:
        raise EngineError("the target's own tokens were asked of one cut behind its last tap; use keep_head")
    hidden, taps = _last_states(target, input_ids)
    wanted = wanted[:, 1:].to(input_ids.device)
    states = hidden[:, :-1][wanted]  # [n, H]
    del hidden
    head = target.model.get_output_embeddings()
    said, broken = [], torch.zeros((), dtype=torch.bool, device=input_ids.device)
    for some in states.split(PLACES_AT_ONCE):
        # Caps and scales that some models put on logits keep their order, so the product will do.
        best, chosen = head(some).max(-1)
        said.append(chosen)
        broken |= best.isnan().any()
    if broken:
        raise NonFinite("the target's logits are NaN; compare its kernels with PyTorch's")
    own = input_ids.clone()
    if said:
        own[:, 1:][wanted] = torch.cat(said)
    return own, taps


def _last_states(target: Target, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The states [rows, length, H] behind the final norm, and the taps."""
    base = target.model.base_model
    if target.walk is not None:
        taps = target.walk(input_ids)
        if why_not(target.model) is None:  # an architecture whose layers read the one before and nothing else
            first = target.target_layer_ids[-1] + 1
            base = resumed_view(base, target.model.config.num_hidden_layers, first, taps[-1])
        with any_shape(target.model, target.device):  # the warm-up tuned the walk's kernels, not the module's
            return base(input_ids=input_ids, use_cache=False).last_hidden_state, taps
    with capturing_taps(len(target.target_layer_ids)) as captured:
        hidden: Tensor = base(input_ids=input_ids, use_cache=False).last_hidden_state
    return hidden, captured
