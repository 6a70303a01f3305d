"""The default masks and attention of the blocks: dense on any device, FlexAttention on GPUs.

Both are in `engine.dflash.attention`, with the rules of who sees whom beside them in
`attention_mask.py`; a plugin that builds masks another way keeps to the same rules.
"""

import attrs

from engine.dflash.attention import prepare_attention
from engine.dflash.configuration import DrafterConfig
from engine.hookspecs import AttentionBuilder, hookimpl


@attrs.frozen(kw_only=True)
class Options:
    """None: `drafter.attention` chooses between the two."""


class BlockAttention:
    @hookimpl
    def make_attention(self, config: DrafterConfig) -> AttentionBuilder:
        return prepare_attention


def make(options: Options) -> BlockAttention:
    return BlockAttention()
