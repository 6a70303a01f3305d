"""One micro-batch through the drafter: what every loop, threaded or not, runs between two steps."""

import attrs
import torch
from torch import Tensor

from engine.dflash.anchors import Anchors, Blocks, blocks_at, draw_anchors
from engine.dflash.attention import Backend, prepare_attention
from engine.dflash.drafter import Drafter
from engine.dflash.objective import BlockLoss, BlockWeights, block_loss
from engine.dflash.packing import PackedRow
from engine.randomness import stateless_uniform


@attrs.frozen(eq=False)
class SharedWeights:
    """The target's frozen embedding and head on a drafter's device, in its compute dtype."""

    embed_tokens: Tensor
    """[V, H]"""
    lm_head: Tensor
    """[V, H]; may be the same tensor"""

    def to(self, device: torch.device, dtype: torch.dtype) -> "SharedWeights":
        """Copies where something has to change; tied weights stay one tensor."""
        embed_tokens = self.embed_tokens.to(device, dtype)
        tied = self.lm_head is self.embed_tokens
        return SharedWeights(embed_tokens, embed_tokens if tied else self.lm_head.to(device, dtype))


def add_context_noise(
    taps: Tensor, row: PackedRow, *, deviation: float, seed: int, epoch: int, hidden_size: int
) -> Tensor:
    """Uniform noise of a given standard deviation on packed taps, the same however they are split.

    Each number is a function of (seed, epoch, document, tap, position, channel). The tail keeps its
    zeros. taps: [T, taps·H]; returns the same shape and dtype.
    """
    if not deviation:
        return taps
    half_width = deviation * 3**0.5  # a uniform variable on [-h, h] deviates by h / √3
    real = row.document >= 0
    key = torch.where(real, row.document_ids[row.document.clamp(min=0)], 0).to(taps.device)
    position = row.position.to(taps.device)
    channel = torch.arange(hidden_size, device=taps.device)
    noisy = taps.clone()
    for tap, columns in enumerate(noisy.split(hidden_size, dim=1)):
        noise = stateless_uniform(seed, epoch, key[:, None], tap, position[:, None], channel)
        columns += ((2 * noise - 1) * half_width * real.to(taps.device)[:, None]).to(taps.dtype)
    return noisy


def drafter_blocks(
    drafter: Drafter,
    shared: SharedWeights,
    taps: Tensor,
    row: PackedRow,
    anchors: Anchors,
    *,
    backend: Backend,
) -> tuple[Tensor, Blocks]:
    """Run the drafter on the blocks at `anchors`.

    Args:
        taps: [T, taps·H] on the drafter's device, in its dtype.

    Returns:
        hidden [N·B, H] after the final norm, and the blocks (CPU tensors) it was run on.
    """
    config, device = drafter.config, taps.device
    blocks = blocks_at(row, anchors, block_size=config.block_size, mask_token_id=config.mask_token_id)
    attention = prepare_attention(backend, anchors, row.starts, row.length, config, device)
    embeddings = shared.embed_tokens[blocks.input_ids.flatten().to(device)]  # [N·B, H]
    hidden = drafter(
        embeddings,
        taps,
        blocks.positions.flatten().to(device),
        row.position.to(device),
        attention,
    )
    return hidden, blocks


def drafter_loss(
    drafter: Drafter,
    shared: SharedWeights,
    taps: Tensor,
    row: PackedRow,
    anchors: Anchors,
    *,
    backend: Backend,
    weights: BlockWeights,
    chunk: int,
) -> BlockLoss:
    """Loss and hits of the blocks at `anchors`; arguments as in `drafter_blocks` and `block_loss`."""
    hidden, blocks = drafter_blocks(drafter, shared, taps, row, anchors, backend=backend)
    labels, supervised = blocks.labels.to(hidden.device), blocks.supervised.to(hidden.device)
    return block_loss(hidden, shared.lm_head, labels, supervised, weights=weights, chunk=chunk)


def training_loss(
    drafter: Drafter,
    shared: SharedWeights,
    taps: Tensor,
    row: PackedRow,
    *,
    seed: int,
    epoch: int,
    max_anchors: int,
    context_noise: float,
    backend: Backend,
    weights: BlockWeights,
    chunk: int,
) -> tuple[BlockLoss, Anchors]:
    """Draw this epoch's anchors and noise, and score the blocks. Backward is the caller's."""
    anchors = draw_anchors(row, seed=seed, epoch=epoch, max_anchors=max_anchors)
    taps = add_context_noise(
        taps,
        row,
        deviation=context_noise,
        seed=seed,
        epoch=epoch,
        hidden_size=drafter.config.hidden_size,
    )
    loss = drafter_loss(drafter, shared, taps, row, anchors, backend=backend, weights=weights, chunk=chunk)
    return loss, anchors
