"""One micro-batch through the drafter: what every loop, threaded or not, runs between two steps.

What may be exchanged (how taps become context, who builds the masks, what a slot weighs) stands in a
`Recipe`, so that these functions are the same whichever strategies a schedule chose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from engine.dflash.anchors import Anchors, Blocks, blocks_at, draw_anchors
from engine.dflash.attention import Backend, prepare_attention
from engine.dflash.drafter import Drafter
from engine.dflash.objective import BlockLoss, BlockWeights, block_loss
from engine.dflash.packing import PackedRow, sent
from engine.randomness import stateless_uniform

if TYPE_CHECKING:
    from engine.hookspecs import AttentionBuilder, FeaturePath

Packed = tuple[Tensor, ...]
"""A micro-batch's taps of T slots, as the feature path packed them; the first dimension is T."""


@attrs.frozen(eq=False)
class SharedWeights:
    """The target's frozen embedding and head on a drafter's device, in its compute dtype."""

    embed_tokens: Tensor
    """[V, H]"""
    lm_head: Tensor
    """[V, H]; may be the same tensor"""

    def to(
        self,
        device: torch.device,
        dtype: torch.dtype,
        move: Callable[[Tensor, torch.device], Tensor] = Tensor.to,
    ) -> SharedWeights:
        """Copies where something has to change; tied weights stay one tensor.

        Args:
            move: brings a tensor to a device.
        """
        embed_tokens = move(self.embed_tokens, device).to(dtype)
        tied = self.lm_head is self.embed_tokens
        return SharedWeights(embed_tokens, embed_tokens if tied else move(self.lm_head, device).to(dtype))


@attrs.frozen(kw_only=True)
class Recipe:
    """What decides a micro-batch's loss besides the weights and the text."""

    features: FeaturePath
    weights: BlockWeights
    backend: Backend
    attention: AttentionBuilder = prepare_attention
    chunk: int
    """Slots whose logits exist at a time; part of the numbers' meaning."""
    max_anchors: int
    seed: int
    context_noise: float = 0.0
    """Standard deviation of uniform noise on the taps, in training."""
    checkpointing: bool = False
    """Whether a layer's activations are computed again in the backward pass rather than kept."""


def add_context_noise(
    packed: Packed, row: PackedRow, *, features: FeaturePath, deviation: float, seed: int, epoch: int
) -> Packed:
    """Uniform noise of a given standard deviation on packed taps, the same however they are split.

    Each number is a function of (seed, epoch, document, tap, position, channel). The tail keeps its
    zeros. The result is new tensors; what was packed is left alone.
    """
    if not deviation:
        return packed
    half_width = deviation * 3**0.5  # a uniform variable on [-h, h] deviates by h / √3
    device = packed[0].device
    real = row.document >= 0
    key = torch.where(real, row.document_ids[row.document.clamp(min=0)], 0)
    key, position, real = sent([key, row.position, real], device)
    noisy = tuple(tensor.clone() for tensor in packed)
    for tap, values in enumerate(features.tap_views(noisy)):  # [T, H]
        channel = torch.arange(values.shape[1], device=device)
        noise = stateless_uniform(seed, epoch, key[:, None], tap, position[:, None], channel)
        values += ((2 * noise - 1) * half_width * real[:, None]).to(values.dtype)
    return noisy


def drafter_blocks(
    drafter: Drafter, shared: SharedWeights, context: Tensor, row: PackedRow, anchors: Anchors, recipe: Recipe
) -> tuple[Tensor, Blocks]:
    """Run the drafter on the blocks at `anchors`.

    Args:
        context: [T, H], from the recipe's feature path.

    Returns:
        hidden [N·B, H] after the final norm, and the blocks it was run on, on its device.
    """
    config, device = drafter.config, context.device
    blocks = blocks_at(row, anchors, block_size=config.block_size, mask_token_id=config.mask_token_id)
    *on_device, context_positions = sent(
        [blocks.input_ids, blocks.positions, blocks.labels, blocks.supervised, row.position], device
    )
    blocks = Blocks(*on_device)
    attention = recipe.attention(recipe.backend, anchors, row.starts, row.length, config, device)
    hidden = drafter(
        shared.embed_tokens[blocks.input_ids.flatten()],  # [N·B, H]
        context,
        blocks.positions.flatten(),
        context_positions,
        attention,
        checkpointing=recipe.checkpointing,
    )
    return hidden, blocks


def drafter_loss(
    drafter: Drafter, shared: SharedWeights, context: Tensor, row: PackedRow, anchors: Anchors, recipe: Recipe
) -> BlockLoss:
    """Loss and hits of the blocks at `anchors`; arguments as in `drafter_blocks`."""
    hidden, blocks = drafter_blocks(drafter, shared, context, row, anchors, recipe)
    return block_loss(
        hidden,
        shared.lm_head,
        blocks.labels,
        blocks.supervised,
        weights=recipe.weights,
        chunk=recipe.chunk,
        used=anchors.used,
        softmax=drafter.softmax,
    )


def training_loss(
    drafter: Drafter, shared: SharedWeights, packed: Packed, row: PackedRow, *, epoch: int, recipe: Recipe
) -> tuple[BlockLoss, Anchors]:
    """Draw this epoch's anchors and noise, and score the blocks. Backward is the caller's."""
    anchors = draw_anchors(row, seed=recipe.seed, epoch=epoch, max_anchors=recipe.max_anchors)
    packed = add_context_noise(
        packed,
        row,
        features=recipe.features,
        deviation=recipe.context_noise,
        seed=recipe.seed,
        epoch=epoch,
    )
    context = recipe.features.context(drafter, packed)
    return drafter_loss(drafter, shared, context, row, anchors, recipe), anchors
