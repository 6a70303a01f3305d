"""Speculative decoding: the drafter proposes a block, the target checks it in one forward.

    block    = [last committed token, mask, mask, …]            at the first position without a state
    drafts   = lm_head(drafter(block, context before it))       slots 1 … B-1
    answers  = target([last committed token, drafts])           slot k says what follows token k
    commit     the leading drafts that the target accepts, and one token of its own behind them

At temperature 0 a draft is accepted when it is the target's most likely token, so what comes out is
the target's own greedy text. Above 0 drafts are drawn from the drafter's distribution q at that
temperature and accepted with probability min(1, p/q); the first rejected one is drawn again from
what p has over q, so every token has the target's distribution p exactly. The slots of a block are
drawn independently of each other, so a discarded draft has had no part in any decision, and the
same uniform number may serve that place again.

Between rounds the newest token's states are unknown, to the drafter as to the target: it is the
anchor of the next block, and the context ends before it.
"""

from collections.abc import Callable, Collection, Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.dflash.drafter import Drafter
from engine.dflash.drafter_cache import ContextCache
from engine.dflash.training import SharedWeights
from engine.errors import InputError
from engine.target.cached_forward import commit, prefill, select, verify
from engine.target.generation import Difference, decode_alone, explain_difference
from engine.target.loading import Target
from engine.target.sampling import (
    ACCEPT,
    CHOOSE,
    DRAFT,
    check_request,
    choose,
    draw,
    most_likely,
    probabilities,
    prompt_key,
    uniform,
)

__all__ = ["Decoded", "Difference", "decode_alone", "explain_difference", "speculate"]

ROWS_AT_ONCE = 64
"""Prompts decoded side by side: enough to fill a GPU, few enough for a long context's keys."""

OnTokens = Callable[[int, list[int], int], None]


@attrs.frozen
class Decoded:
    """One prompt's continuation."""

    tokens: list[int] = attrs.Factory(list)
    """New tokens, the stop token included; the first is the prefill's."""
    acceptance: list[int] = attrs.Factory(list)
    """Tokens committed by each verification, the target's own included, none past the end: they
    and the first token add up to `tokens`."""
    drafted: list[int] = attrs.Factory(list)
    """How many of these the drafter had proposed."""


@torch.no_grad()
def speculate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
    rows_at_once: int = ROWS_AT_ONCE,
) -> list[Decoded]:
    """Continue prompts with a target and its drafter.

    Args:
        target: loaded with `keep_head` and the drafter's taps, on the drafter's device.
        prompts: token ids, at least one each; lengths may differ.
        max_new_tokens: at most this many tokens each, the stop token included.
        stop: ids that end an answer.
        temperature: 0 for greedy decoding.
        seed: of the draws; what is drawn for a prompt depends on it and on the prompt alone, up to
            rounding, which differs between batches of different sizes.
        on_tokens: called with (prompt's index, tokens committed, how many of them the drafter
            proposed), as soon as they are; the prefill's token is told with 0.
        rows_at_once: prompts decoded side by side.

    Raises:
        InputError: an empty prompt, or a drafter that does not belong to this target.
        EngineError: the target has no head.
        TargetError: its architecture's cache cannot be rolled back.
    """
    check_request(prompts, max_new_tokens, temperature)
    _check_pair(target, drafter)
    weight = drafter.fc.weight
    shared = SharedWeights(target.embed_tokens, target.lm_head).to(weight.device, weight.dtype)
    results = [Decoded() for _ in prompts]
    # Prompts of like lengths side by side: fewer prefills, less masked attention.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), rows_at_once):
        batch = _Batch(
            target=target,
            drafter=drafter,
            shared=shared,
            prompts=prompts,
            indices=order[first : first + rows_at_once],
            results=results,
            max_new_tokens=max_new_tokens,
            stop=frozenset(stop),
            temperature=temperature,
            seed=seed,
            on_tokens=on_tokens,
        )
        _decode(batch)
    return results


@attrs.define(eq=False, kw_only=True)
class _Batch:
    """Prompts that are decoded side by side, and what was asked for them."""

    target: Target
    drafter: Drafter
    shared: SharedWeights
    prompts: Sequence[Sequence[int]]
    indices: list[int]
    """Of the rows still under way, in their order."""
    results: list[Decoded]
    max_new_tokens: int
    stop: frozenset[int]
    temperature: float
    seed: int
    on_tokens: OnTokens | None

    def keys(self) -> Tensor:
        """What stands for each row's prompt in its draws, int64 [rows]."""
        return torch.tensor([prompt_key(self.prompts[i]) for i in self.indices], device=self.target.device)

    def places(self) -> Tensor:
        """The place in its answer that each row comes to next, int64 [rows]."""
        return torch.tensor([len(self.results[i].tokens) for i in self.indices], device=self.target.device)

    def committed(self, row: int, tokens: list[int], drafted: int, verified: bool = True) -> bool:
        """Note a row's new tokens up to its end; returns whether it goes on."""
        index = self.indices[row]
        result = self.results[index]
        tokens = tokens[: self.max_new_tokens - len(result.tokens)]
        ends = [at for at, token in enumerate(tokens) if token in self.stop]
        if ends:
            tokens = tokens[: ends[0] + 1]
        drafted = min(drafted, len(tokens))
        result.tokens.extend(tokens)
        if verified:
            result.acceptance.append(len(tokens))
            result.drafted.append(drafted)
        if self.on_tokens is not None:
            self.on_tokens(index, tokens, drafted)
        return not ends and len(result.tokens) < self.max_new_tokens


def _decode(batch: _Batch) -> None:
    rows, logits, taps = prefill(batch.target, [batch.prompts[index] for index in batch.indices])
    context = ContextCache(batch.drafter, len(batch.indices))
    context.extend(taps)
    del taps
    keys = batch.keys()
    anchors = choose(logits, batch.temperature, batch.seed, keys, batch.places())  # [rows]
    going = [
        row for row, token in enumerate(anchors.tolist()) if batch.committed(row, [token], 0, verified=False)
    ]
    while going:
        if len(going) < len(batch.indices):
            batch.indices = [batch.indices[row] for row in going]
            select(rows, going)
            context.select(going)
            at = torch.tensor(going, device=keys.device)
            keys, anchors = keys[at], anchors[at]
        drafts, proposal = _draft(batch, context, anchors, keys)
        verification = verify(rows, torch.cat([anchors[:, None], drafts], 1))
        leading, own = _accept(batch, drafts, proposal, verification.logits, keys)
        counts = [count + 1 for count in leading.tolist()]  # the anchor's state is known now
        commit(rows, verification, counts)
        context.extend([taps[:count] for taps, count in zip(verification.taps, counts, strict=True)])
        anchors = own
        going = [
            row
            for row, (row_drafts, token) in enumerate(zip(drafts.tolist(), own.tolist(), strict=True))
            if batch.committed(row, row_drafts[: counts[row] - 1] + [token], counts[row] - 1)
        ]


def _draft(
    batch: _Batch, context: ContextCache, anchors: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Fill a block behind each anchor [rows].

    Returns:
        Drafts int64 [rows, B-1], and above temperature 0 the distributions [rows, B-1, V] that they
        were drawn from.
    """
    config = batch.drafter.config
    block = torch.full((len(anchors), config.block_size), config.mask_token_id, device=anchors.device)
    block[:, 0] = anchors
    hidden = context.fill_blocks(batch.shared.embed_tokens[block])  # [rows, B, H]
    logits = F.linear(hidden[:, 1:], batch.shared.lm_head)  # [rows, B-1, V]
    places = batch.places()[:, None] + torch.arange(config.block_size - 1, device=anchors.device)
    if batch.temperature == 0:
        return most_likely(logits, places), None
    proposal = probabilities(logits, batch.temperature)
    return draw(proposal, uniform(batch.seed, keys[:, None], places, DRAFT), places), proposal


def _accept(
    batch: _Batch, drafts: Tensor, proposal: Tensor | None, logits: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Compare drafts with the target's answer.

    Args:
        drafts: int64 [rows, B-1]; proposal: what they were drawn from, [rows, B-1, V].
        logits: the target's, [rows, B, V].

    Returns:
        The number of leading drafts accepted and the target's own token behind them, int64 [rows] each.
    """
    row = torch.arange(len(drafts), device=drafts.device)
    first = batch.places()
    if proposal is None:
        blocks = first[:, None] + torch.arange(logits.shape[1], device=drafts.device)
        own = most_likely(logits, blocks)  # [rows, B]
        leading = (drafts == own[:, :-1]).cumprod(1).sum(1)
        return leading, own[row, leading]
    p = probabilities(logits, batch.temperature)  # [rows, B, V]
    places = first[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
    p_draft = p[:, :-1].gather(2, drafts[..., None]).squeeze(2).double()
    q_draft = proposal.gather(2, drafts[..., None]).squeeze(2).double()
    accepted = uniform(batch.seed, keys[:, None], places, ACCEPT) * q_draft < p_draft
    leading = accepted.cumprod(1).sum(1)
    p_next = p[row, leading]  # [rows, V]
    rejected = leading < drafts.shape[1]
    q_next = proposal[row, leading.clamp(max=drafts.shape[1] - 1)] * rejected[:, None]
    residual = (p_next - q_next).clamp(min=0)
    # Where p and q are the same up to rounding, nothing may be left over.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    return leading, draw(residual, uniform(batch.seed, keys, first + leading, CHOOSE))


def _check_pair(target: Target, drafter: Drafter) -> None:
    config = drafter.config
    for what, ours, theirs in (
        ("taps", list(config.target_layer_ids), list(target.target_layer_ids)),
        ("hidden_size", config.hidden_size, target.summary.hidden_size),
        ("vocab_size", config.vocab_size, target.summary.vocab_size),
        ("device", str(drafter.fc.weight.device), str(target.device)),
    ):
        if ours != theirs:
            raise InputError(
                f"the drafter's {what} {ours} and the target's {theirs} differ; load the target that the "
                "drafter was trained for, with the drafter's target_layer_ids, on the drafter's device"
            )
