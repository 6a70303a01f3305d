"""A target over the growing ends of several sequences, with the means to take tokens back.

What the target remembers of each sequence is held apart from transformers' caches (`row_cache`),
so a forward that is not kept leaves no trace. Keys and values are kept by position: rows may differ
in length, and a mask and position ids say what is there. The recurrent and convolution states of a
hybrid exist for one position only, the last one a forward saw; cropping cannot bring back an earlier
one, and padding on the left would change them.

So a hybrid's rows stop at a position that is certainly kept. What was committed behind it is
pending: it is fed again in front of each block that is verified, padded on the right only, where
nothing real can see it. When a row has a block's worth of pending tokens, one forward moves its
states over them. That costs at most two forwards per verification however differently the rows
of a batch accept, where replaying each row's own count would cost one forward per distinct count.
A row whose whole input was accepted takes the states of the verification itself.

On a GPU a small forward is as long as its launches, whatever its tokens. There more is left pending
before it is moved, as long as a verification stays small: about four forwards for three verifications.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from engine.errors import EngineError
from engine.target.decoding_kernels import any_shape, shapes_cost
from engine.target.loading import Target
from engine.target.row_cache import FULL, SLIDING, StoredLayer, fresh_layers, joined, stored, with_slots
from engine.target.truncation import capturing_taps

LAUNCH_BOUND = 2048
"""Verifications with pending tokens stay under so many tokens. A 27 B hybrid's forward on an H200 is as long
as its launches at 1,000, and twice as long here; a smaller target's is launches alone."""

BLOCKS_PENDING = 4
"""So many blocks' worth at the most: what is pending is computed again by every verification."""

Mask = Tensor | dict[str, Tensor | None] | None
"""One for all layers, one per kind of layer, or plain causal."""


@attrs.define(eq=False)
class TargetRows:
    """Sequences under way, and what the target remembers of them."""

    target: Target
    layers: list[StoredLayer]
    lengths: list[int]
    """Tokens of each row whose states are held."""
    pending: list[list[int]]
    """Committed tokens behind these; always empty for a target without recurrent states."""

    @property
    def has_states(self) -> bool:
        return any(layer.states for layer in self.layers)


@attrs.define(eq=False)
class Forward:
    """One forward over the ends of some rows; nothing of it is kept unless asked for."""

    logits: Tensor
    """[n, kept, V]: of the last `kept` positions."""
    taps: Tensor
    """[n, Q, taps·H], side by side in the order of the layers."""
    layers: list[Any]
    """The caches after it, in transformers' classes; new keys stand behind `slots`."""
    slots: int


@attrs.frozen(eq=False)
class Verification:
    """The target's answer to a block per row."""

    logits: Tensor
    """[rows, B, V]; slot k predicts what follows the block's token k."""
    taps: Tensor
    """[rows, B, taps·H] of the block's tokens."""
    blocks: list[list[int]]
    forward: Forward


@torch.no_grad()
def prefill(target: Target, prompts: Sequence[Sequence[int]]) -> tuple[TargetRows, Tensor, list[Tensor]]:
    """Read prompts; those of equal length together, so that nothing is padded.

    Args:
        target: loaded with `keep_head`.
        prompts: ids, at least one each.

    Returns:
        The rows in the prompts' order, the next token's logits [rows, V], and each prompt's taps
        [length, taps·H].

    Raises:
        EngineError: the target has no head.
        TargetError: a cache of this architecture cannot be rolled back by this module.
    """
    if not target.has_head:
        raise EngineError("decoding needs the target's last layers and head; load it with keep_head")
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(row)
    order = [row for members in groups.values() for row in members]
    logits, taps, groups_of_layers = [], [], []
    for members in groups.values():
        tokens = torch.tensor([list(prompts[row]) for row in members], device=target.device)
        fresh = fresh_layers(target.model.config)
        result = _forward(target, fresh, tokens, [0] * len(members), 0, kept=1)
        logits.append(result.logits[:, -1])
        taps += list(result.taps)
        groups_of_layers.append([stored(layer) for layer in result.layers])
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=target.device)
    rows = TargetRows(
        target,
        [joined(parts, back) for parts in zip(*groups_of_layers, strict=True)],
        [len(prompt) for prompt in prompts],
        [[] for _ in prompts],
    )
    return rows, torch.cat(logits)[back], [taps[at] for at in back.tolist()]


@torch.no_grad()
def step(rows: TargetRows, tokens: Tensor) -> Tensor:
    """Commit one token [rows] to every row; returns the next token's logits [rows, V]."""
    if any(rows.pending):
        raise EngineError("step() was called between a verification and its end; verify and commit instead")
    everyone = list(range(len(rows.lengths)))
    forward = _continue(rows, None, tokens[:, None], kept=1)
    _keep(rows, forward, everyone, everyone, [1] * len(everyone))
    return forward.logits[:, -1]


@torch.no_grad()
def verify(rows: TargetRows, blocks: Tensor) -> Verification:
    """What the target would say after each token of a block per row; the rows stay as they are.

    Args:
        blocks: int64 [rows, B], the last committed token and the drafted ones behind it.
    """
    size = blocks.shape[1]
    most = max(map(len, rows.pending))
    tokens, place = blocks, None
    if most:
        # Padding is any real id: nothing that is read depends on it.
        padded = [pending + [0] * (most + size - len(pending)) for pending in rows.pending]
        begins = torch.tensor([len(pending) for pending in rows.pending], device=blocks.device)
        place = begins[:, None] + torch.arange(size, device=blocks.device)  # [rows, B]
        tokens = torch.tensor(padded, device=blocks.device).scatter(1, place, blocks)  # [rows, most + B]
    kept = most - min(map(len, rows.pending)) + size
    forward = _continue(rows, None, tokens, kept=kept, owned=False)
    logits, taps = forward.logits, forward.taps
    if place is not None:
        row = torch.arange(len(rows.lengths), device=blocks.device)[:, None]
        logits, taps = logits[row, place - (tokens.shape[1] - kept)], taps[row, place]
    return Verification(logits, taps, blocks.tolist(), forward)


@torch.no_grad()
def commit(rows: TargetRows, verification: Verification, counts: Sequence[int]) -> None:
    """Keep the first `counts[row]` tokens of each row's verified block and forget the others."""
    everyone = list(range(len(rows.lengths)))
    if not rows.has_states:
        _keep(rows, verification.forward, everyone, everyone, counts)
        return
    size = len(verification.blocks[0])
    most = max(map(len, rows.pending))
    complete = [row for row in everyone if counts[row] == size and len(rows.pending[row]) == most]
    _keep(rows, verification.forward, complete, complete, [most + size] * len(complete))
    for row in everyone:
        rows.pending[row] += verification.blocks[row][: counts[row]]
    for row in complete:
        rows.pending[row] = []
    room = pending_room(rows.target.device, len(everyone), size)
    if max(map(len, rows.pending)) >= room:
        # With half of that moved, no row has as much as `room` left, and the next ones come together.
        ready = [row for row in everyone if len(rows.pending[row]) >= max(size, room // 2)]
        count = min(len(rows.pending[row]) for row in ready)
        tokens = torch.tensor([rows.pending[row][:count] for row in ready], device=rows.target.device)
        forward = _continue(rows, None if len(ready) == len(everyone) else ready, tokens, kept=1)
        _keep(rows, forward, ready, list(range(len(ready))), [count] * len(ready))
        for row in ready:
            del rows.pending[row][:count]


def pending_room(device: torch.device, rows: int, size: int) -> int:
    """How many tokens may be pending behind a hybrid's states before they are moved, at least a block's."""
    if not shapes_cost(device):
        return size
    return max(size, min(BLOCKS_PENDING * size, LAUNCH_BOUND // rows - size))


def row_bytes(rows: TargetRows, length: int) -> int:
    """What the target remembers of a row of so many tokens, in bytes, from that of rows under way."""
    total = 0
    for layer in rows.layers:
        if layer.keys is not None and layer.values is not None:
            total += sum(kept[0, :, :1].nbytes for kept in (layer.keys, layer.values)) * length
        total += sum(state[0].nbytes for states in layer.states.values() for state in states.values())
    return total


def select(rows: TargetRows, chosen: Sequence[int]) -> None:
    """Keep these rows, in this order, and forget the others."""
    at = torch.tensor(list(chosen), dtype=torch.int64, device=rows.target.device)
    rows.lengths = [rows.lengths[row] for row in chosen]
    rows.pending = [rows.pending[row] for row in chosen]
    slots = max(rows.lengths, default=0)
    for layer in rows.layers:
        if layer.keys is not None and layer.values is not None:
            layer.keys, layer.values = layer.keys[at, :, :slots], layer.values[at, :, :slots]
        for states in layer.states.values():
            states.update({number: state[at] for number, state in states.items()})


def _continue(
    rows: TargetRows, which: list[int] | None, tokens: Tensor, *, kept: int, owned: bool = True
) -> Forward:
    """Run tokens [n, Q] behind the held positions of some rows (None: all)."""
    lengths = rows.lengths if which is None else [rows.lengths[row] for row in which]
    slots = max(lengths)
    at = None if which is None else torch.tensor(which, device=rows.target.device)
    given = [layer.given(at, slots, owned) for layer in rows.layers]
    return _forward(rows.target, given, tokens, lengths, slots, kept=kept)


def _forward(
    target: Target, layers: list[Any], tokens: Tensor, lengths: list[int], slots: int, *, kept: int
) -> Forward:
    cache = DynamicCache(config=target.model.config)
    cache.layers = layers
    before = torch.tensor(lengths, device=tokens.device)[:, None]  # [n, 1]
    positions = before + torch.arange(tokens.shape[1], device=tokens.device)
    # transformers renamed the argument: 5.24's models know both names and warn about the old one.
    parameters = inspect.signature(target.model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    with (
        any_shape(target.model, target.device),
        capturing_taps(len(target.target_layer_ids)) as taps,
    ):
        output = target.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=_mask(target, before, slots, tokens.shape[1]),
            use_cache=True,
            logits_to_keep=kept,
            **{cache_name: cache},
        )
    return Forward(output.logits, torch.cat(taps, -1), layers, slots)


def _mask(target: Target, before: Tensor, slots: int, length: int) -> Mask:
    """What each new position sees of the held slots and of the new ones; None: plain causal.

    Args:
        before: int64 [n, 1], held positions of each row.
        slots: how many slots stand in front of the new ones.
    """
    config = target.model.config
    kinds = set(getattr(config, "layer_types", None) or [FULL])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is None and window is not None:
        kinds = {SLIDING}
    if not slots and SLIDING not in kinds:
        return None
    new = torch.arange(length, device=before.device)
    held = torch.arange(slots, device=before.device).expand(before.shape[0], slots)
    key = torch.cat([held, before + new], 1)[:, None, None]  # positions, [n, 1, 1, keys]
    query = (before + new)[:, None, :, None]  # [n, 1, Q, 1]
    there = torch.cat([held < before, torch.ones_like(before + new, dtype=torch.bool)], 1)[:, None, None]
    seen = there & (key <= query)  # [n, 1, Q, keys]
    masks: dict[str, Tensor | None] = {FULL: seen}
    if SLIDING in kinds and window is not None:
        masks[SLIDING] = seen & (query - key < window)
    if config._attn_implementation == "eager":  # which adds its mask to the scores
        lowest = torch.finfo(target.dtype).min
        masks = {
            kind: torch.zeros(mask.shape, dtype=target.dtype, device=mask.device).masked_fill(~mask, lowest)
            for kind, mask in masks.items()
            if mask is not None
        }
    attending = kinds & masks.keys()
    if len(attending) == 1:
        return masks[attending.pop()]
    return {kind: masks.get(kind) for kind in kinds}  # linear layers: no mask


def _keep(
    rows: TargetRows, forward: Forward, kept: Sequence[int], source: Sequence[int], counts: Sequence[int]
) -> None:
    """Take over what a forward computed for the first `counts[i]` tokens of its row `source[i]`.

    Recurrent states are taken as the forward left them, so where there are any, `counts` are all
    tokens that it was given.

    Args:
        kept: the rows' numbers here; source: their numbers in the forward.
    """
    if not kept:
        return
    device = rows.target.device
    places = [
        (row, rows.lengths[row] + token, at, forward.slots + token)
        for row, at, count in zip(kept, source, counts, strict=True)
        for token in range(count)
    ]
    to_row, to_slot, from_row, from_slot = torch.tensor(places, device=device).unbind(1)
    to, of = torch.tensor(list(kept), device=device), torch.tensor(list(source), device=device)
    for row, count in zip(kept, counts, strict=True):
        rows.lengths[row] += count
    slots = max(rows.lengths)
    for layer, after in zip(rows.layers, forward.layers, strict=True):
        if layer.keys is not None and layer.values is not None:
            if slots > layer.keys.shape[2]:  # in strides, or every step would copy everything
                room = slots + max(64, slots // 4)
                layer.keys, layer.values = with_slots(layer.keys, room), with_slots(layer.values, room)
            layer.keys[to_row, :, to_slot] = after.keys[from_row, :, from_slot]
            layer.values[to_row, :, to_slot] = after.values[from_row, :, from_slot]
        for name, states in layer.states.items():
            computed = getattr(after, name)
            for number, state in states.items():
                state[to] = computed[number][of]
