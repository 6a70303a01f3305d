"""A drafter's cache fills the blocks of training, whatever was committed, rejected and let go before."""

import random

import pytest
import torch
from blocks import row_of, run_blocks, shared_weights, small_config, small_drafter, taps_of

from engine.dflash.configuration import FULL, SLIDING
from engine.dflash.drafter_cache import ContextCache


@pytest.mark.parametrize("is_causal", [None, False])
@pytest.mark.parametrize("window", [6, 2])  # the block has four slots
@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)])
def test_a_block_on_a_grown_context_equals_the_block_of_training(
    layer_types: tuple[str, ...], window: int, is_causal: bool | None
) -> None:
    sliding = {"sliding_window": window} if SLIDING in layer_types else {}
    config = small_config(layer_types=layer_types, is_causal=is_causal, **sliding)
    lengths, anchors = [20, 13, 17], [9, 1, 16]
    row = row_of(*((length, 1) for length in lengths))
    taps = taps_of(row)
    begins = row.starts.tolist()
    trained = run_blocks(config, row, taps, [begin + at for begin, at in zip(begins, anchors, strict=True)])

    context = ContextCache(small_drafter(config), len(lengths))
    for piece in range(0, max(anchors), 5):  # as verifications would commit it
        context.extend(
            [
                taps[begin + piece : begin + max(piece, min(piece + 5, at))]
                for begin, at in zip(begins, anchors, strict=True)
            ]
        )
        rejected = torch.full((len(lengths), config.block_size, config.hidden_size), float(piece + 1))
        context.fill_blocks(rejected)  # each verification fills a block; none of it may stay
    assert context.lengths == anchors
    block = torch.full((len(lengths), config.block_size), config.mask_token_id)
    block[:, 0] = row.input_ids[torch.tensor(begins) + torch.tensor(anchors)]
    served = context.fill_blocks(shared_weights().embed_tokens[block])
    torch.testing.assert_close(served, trained, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [6, 2])
@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)])
def test_rows_that_were_extended_filled_and_selected_in_any_order_are_as_fresh_ones(
    layer_types: tuple[str, ...], window: int
) -> None:
    config = small_config(
        layer_types=layer_types, **({"sliding_window": window} if SLIDING in layer_types else {})
    )
    drafter = small_drafter(config)
    width = config.hidden_size * len(config.target_layer_ids)
    for seed in range(3):
        drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)

        def states(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        texts = [states(length, width) for length in (1, 30, 7, 12, 3)]
        cache = ContextCache(drafter, len(texts))
        cache.extend(texts)
        for step in range(10):
            block = states(len(texts), config.block_size, config.hidden_size)
            filled = cache.fill_blocks(block)
            assert cache.lengths == [len(text) for text in texts]
            for text, own, found in zip(texts, block, filled, strict=True):
                fresh = ContextCache(drafter, 1)
                fresh.extend([text])
                torch.testing.assert_close(found, fresh.fill_blocks(own[None])[0], atol=1e-4, rtol=1e-4)
            if step % 3 == 1:  # in another order, after the first time with a row less
                chosen = drawn.sample(range(len(texts)), len(texts) - (step > 1))
                cache.select(chosen)
                texts = [texts[row] for row in chosen]
            longer = 90 if step == 5 else 4  # once beyond the room that there is
            new = [states(drawn.randint(0, longer), width) for _ in texts]
            cache.extend(new)
            texts = [torch.cat(both) for both in zip(texts, new, strict=True)]
