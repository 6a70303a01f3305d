"""The default feature path: taps side by side in one tensor [T, taps·H], one projection.

The largest matrix product is the quickest, and one tensor is one copy between devices. Its price is
that the concatenation exists beside the taps it was made of; `split_fc` avoids that.
"""

from collections.abc import Sequence

import attrs
from torch import Tensor

from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import Drafter
from engine.dflash.packing import PackedRow, pack_taps
from engine.hookspecs import hookimpl


@attrs.frozen(kw_only=True)
class Options:
    """None."""


@attrs.frozen
class ConcatenatedTaps:
    hidden_size: int

    def pack(self, taps: Sequence[Tensor], row: PackedRow) -> tuple[Tensor, ...]:
        return (pack_taps(list(taps), row),)  # [T, taps·H]

    def tap_views(self, packed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return packed[0].split(self.hidden_size, dim=1)

    def context(self, drafter: Drafter, packed: tuple[Tensor, ...]) -> Tensor:
        return drafter.context(packed[0])


class Concat:
    @hookimpl
    def make_feature_path(self, config: DrafterConfig) -> ConcatenatedTaps:
        return ConcatenatedTaps(config.hidden_size)


def make(options: Options) -> Concat:
    return Concat()
