"""Small drafters and packed rows that the tests of the contract share."""

import torch
from torch import Tensor

from engine.dflash.anchors import Anchors, anchors_at
from engine.dflash.configuration import FULL, SLIDING, DrafterConfig
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.objective import decay_weights
from engine.dflash.packing import PackedRow, pack_row
from engine.dflash.training import Recipe, SharedWeights, drafter_blocks
from plugins.concat import ConcatenatedTaps

VOCAB, HIDDEN, TAPS = 61, 32, 2
CPU = torch.device("cpu")


def small_config(**changes: object) -> DrafterConfig:
    layer_types = changes.pop("layer_types", (SLIDING, FULL))
    settings: dict[str, object] = dict(
        hidden_size=HIDDEN,
        intermediate_size=48,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        block_size=4,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        mask_token_id=VOCAB - 1,
        layer_types=layer_types,
        sliding_window=6 if SLIDING in layer_types else None,
        rope_theta=10_000.0,
        max_position_embeddings=512,
    )
    return DrafterConfig(**(settings | changes))  # type: ignore[arg-type]


def small_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    drafter = build_drafter(config, CPU, torch.float32)
    drafter.initialise(seed)
    with torch.no_grad():  # larger than fresh weights, so that every path matters
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return drafter


def shared_weights(seed: int = 1) -> SharedWeights:
    generator = torch.Generator().manual_seed(seed)
    return SharedWeights(
        torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator) * 0.2
    )


def row_of(*documents: tuple[int, int], seed: int = 2) -> PackedRow:
    """A packed row of documents given as (length, first supervised position)."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(length for length, _ in documents)
    ids = torch.randint(0, VOCAB - 1, (len(documents), longest), generator=generator)
    mask = torch.zeros(len(documents), longest, dtype=torch.bool)
    for number, (length, first) in enumerate(documents):
        mask[number, first:length] = True
    lengths = torch.tensor([length for length, _ in documents])
    return pack_row(ids, mask, lengths, torch.arange(100, 100 + len(documents)))


def taps_of(row: PackedRow, seed: int = 3) -> Tensor:
    taps = torch.randn(row.length, TAPS * HIDDEN, generator=torch.Generator().manual_seed(seed))
    return taps * (row.document >= 0)[:, None]


def recipe_of(**changes: object) -> Recipe:
    settings: dict[str, object] = dict(
        features=ConcatenatedTaps(HIDDEN),
        weights=decay_weights(4.0),
        backend="dense",
        chunk=16,
        max_anchors=12,
        seed=1,
    )
    return Recipe(**(settings | changes))  # type: ignore[arg-type]


def run_blocks(
    config: DrafterConfig, row: PackedRow, taps: Tensor, slots: list[int], count: int | None = None
) -> Tensor:
    """Hidden states [N, B, H] of blocks anchored at given slots of the row."""
    anchors: Anchors = anchors_at(row, torch.tensor(slots), count or len(slots))
    drafter = small_drafter(config)
    with torch.no_grad():
        hidden, _ = drafter_blocks(
            drafter, shared_weights(), drafter.context(taps), row, anchors, recipe_of()
        )
    return hidden.view(anchors.count, config.block_size, -1)
