"""The context projection tap by tap: Σ_j taps_j · W_jᵀ, where W_j are the column slices of `fc.weight`.

It is the same function as projecting the concatenation, with the sums in another order, and no tensor
[T, taps·H] exists: each tap is packed, moved and multiplied by itself, [T, H]. In exchange there are
as many products as taps, each of which reads and writes the result. Below float32 the partial sums
are rounded to the compute dtype between the taps.
"""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import Drafter
from engine.dflash.packing import PackedRow, pack_taps
from engine.hookspecs import hookimpl

KEEPS_NUMBERS = True
"""But for rounding; so a run may go on with it or without it."""


@attrs.frozen(kw_only=True)
class Options:
    """None."""


class SeparateTaps:
    def pack(self, taps: Sequence[Tensor], row: PackedRow) -> tuple[Tensor, ...]:
        return tuple(pack_taps([tap], row) for tap in taps)  # each [T, H]

    def tap_views(self, packed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return packed

    def context(self, drafter: Drafter, packed: tuple[Tensor, ...]) -> Tensor:
        return drafter.hidden_norm(split_projection(packed, drafter.fc.weight))


def split_projection(taps: Sequence[Tensor], weight: Tensor) -> Tensor:
    """Σ_j taps_j · W_jᵀ.

    Args:
        taps: as many [T, H] as the weight has slices.
        weight: [out, taps·H]; the slices are views, so its gradient is that of the whole.

    Returns:
        [T, out] in the taps' dtype.
    """
    first, *others = zip(taps, weight.split([tap.shape[1] for tap in taps], dim=1), strict=True)
    out = first[0] @ first[1].t()
    for tap, columns in others:
        out = torch.addmm(out, tap, columns.t())
    return out


class SplitFc:
    @hookimpl
    def make_feature_path(self, config: DrafterConfig) -> SeparateTaps:
        return SeparateTaps()


def make(options: Options) -> SplitFc:
    return SplitFc()
