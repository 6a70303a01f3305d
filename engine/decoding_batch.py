"""How many prompts are decoded together: as many as a GPU has room for, since launches bound the rest.

A row of a batch costs what the target remembers of its text, copies of that while it is verified and rolled
back, and with a drafter its context's keys and values and the taps of its prompt, all by its longest text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.target.cached_forward import prefill, row_bytes

if TYPE_CHECKING:
    from engine.dflash.configuration import DrafterConfig
    from engine.target.loading import Target

TOGETHER_ON_CPU = 32
"""More make a CPU no faster, and wait longer for their slowest."""

MOST_TOGETHER = 256
"""More rows than these no longer hide in a forward's launches."""

COPIES = 4
"""Of what is remembered of a row, at the worst: itself, grown, copied for a verification, rolled back."""

SHARE_OF_FREE_MEMORY = 0.5
"""The rest is for activations, logits, and what fragments."""


def rows_together(
    target: Target, prompt: list[int], length: int, drafter: tuple[DrafterConfig, int] | None = None
) -> int:
    """How many prompts to decode together: a power of two, 1 where even one will hardly fit.

    Args:
        prompt: any, to be read once; it tells what a row's states weigh.
        length: tokens of the longest text, prompt and answer.
        drafter: its configuration and its bytes per element, where one drafts.
    """
    if target.device.type != "cuda":
        return TOGETHER_ON_CPU
    weight = row_weight(target, prompt, length, drafter)
    torch.cuda.empty_cache()  # what earlier work and that prompt left is free, and must be seen to be
    free, _ = torch.cuda.mem_get_info(target.device)
    return rows_with_room(int(free), weight)


def row_weight(
    target: Target, prompt: list[int], length: int, drafter: tuple[DrafterConfig, int] | None = None
) -> int:
    """Bytes that stay of a text of `length` tokens; arguments as in `rows_together`."""
    rows, _, _ = prefill(target, [prompt])
    return row_bytes(rows, length) + (length * drafter_token_bytes(*drafter) if drafter else 0)


def drafter_token_bytes(config: DrafterConfig, e: int) -> int:
    """What a drafter's side keeps of a token: keys and values of every layer, and its taps in turn."""
    keys_and_values = 2 * config.layers * config.kv_heads * config.head_dim
    return e * (keys_and_values + len(config.target_layer_ids) * config.hidden_size)


def rows_with_room(free: int, weight: int) -> int:
    """The power of two, between 1 and `MOST_TOGETHER`, of rows of that weight that so much memory takes."""
    room = int(free * SHARE_OF_FREE_MEMORY) // (COPIES * weight)
    return min(MOST_TOGETHER, 1 << max(room, 1).bit_length() - 1)
