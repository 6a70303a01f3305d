"""Which target layers are tapped, and whether what was tapped can be trained on.

Tap `i` is the output of decoder layer `i`, counted from 0, before the target's final norm. The
last layer is left out: its output is all but the prediction itself, and servers refuse it. The two
functions about ids are plain Python, because a schedule is checked before torch is imported;
`check_taps` is called on a run's first micro-batch, where a target that was put together wrongly
still shows as something other than a drafter that never learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.errors import NonFinite, ScheduleError, TargetError

if TYPE_CHECKING:
    from torch import Tensor

# Mean root-mean-square of a token's state. Real targets stay between a few hundredths (an embedding
# nothing was added to) and a few hundred (attention sinks); the band is a hundred times wider.
RMS_BAND = (1e-4, 1e4)

# Fewer tokens than this may well be one token repeated, whose states are rightly all alike.
TOKENS_THAT_MUST_DIFFER = 16


def _spread(first: int, last: int, count: int) -> list[int]:
    if count == 1:
        return [(first + last) // 2]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def _are_taps(ids: Sequence[int], layers: int) -> bool:
    inside = all(0 <= layer <= layers - 2 for layer in ids)
    return inside and all(a < b for a, b in zip(ids, ids[1:], strict=False))


def default_target_layer_ids(layers: int, drafter_layers: int) -> list[int]:
    """The taps of a drafter whose schedule names none: one per drafter layer, evenly spread.

    Args:
        layers: decoder layers of the target.
        drafter_layers: layers of the drafter, at least 1.

    Returns:
        Distinct, increasing layer ids in [0, layers - 2]: from 1 to `layers - 3` where these are
        distinct, else over the whole range; the middle layer for a drafter of one layer.

    Raises:
        TargetError: the target is too shallow for that many taps.
    """
    if drafter_layers < 1:
        raise ScheduleError(f"drafter.layers = {drafter_layers}: a drafter has at least 1 layer")
    usual = [layers // 2] if drafter_layers == 1 else _spread(1, layers - 3, drafter_layers)
    for ids in (usual, _spread(0, layers - 2, drafter_layers)):
        if _are_taps(ids, layers):
            return ids
    raise TargetError(
        f"a target of {layers} layers has {max(layers - 1, 0)} that can be tapped (all but the last), "
        f"and the drafter's {drafter_layers} layers ask for {drafter_layers}: set drafter.target_layer_ids "
        "to fewer taps or drafter.layers lower"
    )


def check_target_layer_ids(ids: Sequence[int], layers: int) -> None:
    """Refuse taps that are not distinct, increasing and in [0, layers - 2].

    Raises:
        ScheduleError: names the first id that cannot be, by its place in the schedule.
    """
    key = "drafter.target_layer_ids"
    if not ids:
        raise ScheduleError(f"{key} = []: a drafter needs at least one tap")
    for place, layer in enumerate(ids):
        if not 0 <= layer <= layers - 2:
            lie = f"so taps lie in 0…{layers - 2}" if layers > 1 else "so none can be tapped"
            raise ScheduleError(f"{key}[{place}] = {layer}: the target has {layers} layers, {lie}")
        if place and layer <= ids[place - 1]:
            raise ScheduleError(
                f"{key}[{place}] = {layer}: {key}[{place - 1}] is {ids[place - 1]}, "
                "and taps are distinct and increasing"
            )


def check_taps(
    taps: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    target_layer_ids: Sequence[int] | None = None,
    padded_length: int | None = None,
) -> None:
    """Refuse captured states that no drafter can learn from. Padding is not looked at.

    Reads every tap once and synchronises with its device once.

    Args:
        taps: one [rows, length, H] per tapped layer, right-padded, any floating dtype.
        lengths: real tokens of each row, on the host.
        target_layer_ids: the layers' numbers, to name a tap by in errors.
        padded_length: the length of the rows that went into the target, if it is to be compared.

    Raises:
        NonFinite: a state is NaN or infinite.
        TargetError: shapes unlike the prompt's; states all zero, all alike, or of absurd size.
    """
    import torch

    def name(place: int) -> str:
        layer = "" if target_layer_ids is None else f" (target layer {target_layer_ids[place]})"
        return f"tap {place}{layer}"

    if not taps or not lengths:
        raise TargetError(f"captured states: {len(taps)} taps of {len(lengths)} rows, nothing to look at")
    if target_layer_ids is not None and len(taps) != len(target_layer_ids):
        raise TargetError(f"captured states: {len(taps)} taps came for layers {list(target_layer_ids)}")
    rows, length, hidden_size = taps[0].shape
    for place, tap in enumerate(taps):
        expected = (len(lengths), length if padded_length is None else padded_length, hidden_size)
        if tuple(tap.shape) != expected:
            raise TargetError(
                f"{name(place)} has shape {list(tap.shape)}, the prompts ask for {list(expected)}"
            )
    for row, tokens in enumerate(lengths):
        if not 1 <= tokens <= length:
            raise TargetError(
                f"row {row} has {tokens} real tokens, its captured states have {length} positions"
            )

    tokens = sum(lengths)
    device = taps[0].device
    real = torch.arange(length, device=device) < torch.tensor(list(lengths), device=device).unsqueeze(
        1
    )  # [rows, length]
    measured = []
    for tap in taps:
        states = tap.detach()[real].float()  # [tokens, H]
        rms = states.square().mean(dim=1).sqrt()  # [tokens]
        measured.append(
            torch.stack(
                [
                    states.isfinite().all().float(),
                    states.abs().amax(),
                    (states != states[0]).any().float(),
                    rms.mean(),
                ]
            )
        )
    for place, (finite, largest, differ, rms_mean) in enumerate(torch.stack(measured).tolist()):
        if not finite:
            bad = int((~taps[place][real].isfinite()).any(dim=1).sum())
            raise NonFinite(
                f"{name(place)}: the states of {bad} of {tokens} tokens are NaN or infinite; "
                "compare the target's kernels with their plain PyTorch path, and its weights with the source"
            )
        if largest == 0:
            raise TargetError(
                f"{name(place)}: the states of all {tokens} tokens are zero; are the weights loaded?"
            )
        if not differ and tokens >= TOKENS_THAT_MUST_DIFFER:
            raise TargetError(
                f"{name(place)}: all {tokens} tokens have the same state; are the weights loaded, "
                "and do the documents hold more than one token repeated?"
            )
        if not RMS_BAND[0] <= rms_mean <= RMS_BAND[1]:
            raise TargetError(
                f"{name(place)}: the states' mean root-mean-square is {rms_mean:.3g}, outside "
                f"{RMS_BAND[0]:g}…{RMS_BAND[1]:g}; were the weights loaded into the layers they belong to?"
            )
