"""An exported drafter as a second implementation reads it, against the training model, bit for bit.

Logits of whole blocks are compared on random taps, with contexts from one token to a few thousand. What a
layer sees is compared around its window's edge as well, without weights and so at no cost: a window may be
longer than any context whose logits are worth computing, and has to be crossed all the same.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.dflash.anchors import Anchors
from engine.dflash.attention import prepare_attention
from engine.dflash.attention_mask import dense_mask, visible_runs
from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.export import fill_drafter
from engine.errors import DifferenceFound, NonFinite
from engine.independent_reader import ServedDrafter, block_logits, read_served, sees

LONGEST_CONTEXT = 8192
"""Tokens before an anchor in the comparison of logits, at most; a window is crossed where it is shorter."""

LONG_CONTEXT = 3072
"""Tokens before an anchor in one comparison at least, if positions reach so far: a rotary base that is
slightly wrong turns the first few hardly, and what is hardly there might be lost in a change of kernels."""

HEAD_ROWS = 64
"""Rows of the random head whose logits are compared: enough to see a difference of any hidden channel."""


def compare_with_training(folder: Path, config: DrafterConfig, weights: Mapping[str, Tensor]) -> int:
    """Compare an exported folder's logits with the training model's; returns how many blocks were.

    Both compute in float32 on the CPU, with the weights as they are stored. The head is a small random
    one and the embedding a random one, so that no target is needed.

    Raises:
        DifferenceFound: they differ anywhere by a bit, or a layer sees other keys around its window's edge;
            names the context's length, and the largest difference or the first key.
        NonFinite: the training model's are not finite.
    """
    drafter = build_drafter(config, torch.device("cpu"), torch.float32)
    dtype = getattr(torch, config.dtype)
    fill_drafter(drafter, {name: weight.to(dtype) for name, weight in weights.items()}, "this drafter")
    served = read_served(folder)
    for what in ("target_layer_ids", "block_size", "mask_token_id"):
        trained, read = getattr(config, what), getattr(served, what)
        if trained != read:
            raise DifferenceFound(f"{folder}: a server reads {what} {read}, and {trained} was trained")
    generator = torch.Generator().manual_seed(0)
    hidden = config.hidden_size
    # Overlapping rows: each differs from all others, at the memory of one vocabulary's column.
    embed_tokens = torch.randn(config.vocab_size + hidden, generator=generator).unfold(0, hidden, 1)
    head = torch.randn(HEAD_ROWS, hidden, generator=generator)
    compared = 0
    for before in _context_lengths(config):
        taps = torch.randn(before, len(config.target_layer_ids) * hidden, generator=generator)
        token = int(torch.randint(config.vocab_size, (), generator=generator))
        ours = training_logits(drafter, taps, token, embed_tokens, head)
        if not bool(ours.isfinite().all()):
            raise NonFinite(
                "the training model's own logits hold NaN or infinite values on random taps (context of "
                f"{before}), so its weights are of no use; export another checkpoint"
            )
        theirs = block_logits(served, taps, token, embed_tokens, head)
        if not torch.equal(ours, theirs):
            raise DifferenceFound(
                f"{folder}: read back with {before} tokens before the anchor, its logits differ from the "
                f"training model's by up to {float((ours - theirs).abs().max()):.3g} (of "
                f"{float(ours.abs().max()):.3g}); it would not be served as it was trained"
            )
        compared += 1
    _compare_masks(folder, config, served)
    return compared


def _compare_masks(folder: Path, config: DrafterConfig, served: ServedDrafter) -> None:
    """Compare what each layer sees where a context begins to be longer than a window, of either side."""
    windows = {window for window in (config.sliding_window, *served.windows) if window}
    edges = {min(window, config.max_position_embeddings) for window in windows}  # beyond, none is crossed
    for before in sorted({max(edge + more, 1) for edge in edges for more in (-1, 0, 1)}):
        anchors = Anchors(
            slot=torch.tensor([before]), document=torch.tensor([0]), position=torch.tensor([before]), used=1
        )
        keys = torch.arange(before + config.block_size)
        for number, kind in enumerate(config.layer_types):
            runs = visible_runs(anchors, torch.tensor([0]), before, config, kind)
            ours, theirs = dense_mask(runs, slice(None), keys), sees(served, number, before)
            if not torch.equal(ours, theirs):
                slot, key = (ours != theirs).nonzero()[0].tolist()
                does, trained = ("sees", "didn't") if theirs[slot, key] else ("doesn't see", "did")
                raise DifferenceFound(
                    f"{folder}: read back with {before} tokens before the anchor, slot {slot} of a block "
                    f"{does} position {key} in layer {number}, and in training it {trained}; window, layer "
                    "types or causality are not as they were trained"
                )


@torch.no_grad()
def training_logits(
    drafter: Drafter, taps: Tensor, anchor_token: int, embed_tokens: Tensor, lm_head: Tensor
) -> Tensor:
    """What the training model says of one block; arguments and result as `block_logits`."""
    config, before = drafter.config, taps.shape[0]
    anchors = Anchors(
        slot=torch.tensor([before]), document=torch.tensor([0]), position=torch.tensor([before]), used=1
    )
    attention = prepare_attention("dense", anchors, torch.tensor([0]), before, config, taps.device)
    ids = torch.full((config.block_size,), config.mask_token_id)
    ids[0] = anchor_token
    context_positions, positions = torch.arange(before), torch.arange(before, before + config.block_size)
    hidden = drafter(embed_tokens[ids], drafter.context(taps), positions, context_positions, attention)
    return torch.nn.functional.linear(hidden, lm_head)


def _context_lengths(config: DrafterConfig) -> Iterator[int]:
    lengths = {1, 3 * config.block_size}
    window = config.sliding_window
    if window and window + 2 <= LONGEST_CONTEXT:
        lengths |= {max(window - 1, 2), window + 2}
    if max(lengths) < LONG_CONTEXT:
        lengths.add(max(1, min(LONG_CONTEXT, config.max_position_embeddings - config.block_size)))
    yield from sorted(lengths)
