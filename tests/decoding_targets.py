"""Tiny targets to decode with, and drafts that are right as often as a test wants."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.builtin import HELD_OUT, TINY_HYBRID, resolve
from engine.builtin.tokenizer import MASK, VOCABULARY
from engine.data.chat import load_tokenizer
from engine.data.documents import open_documents
from engine.dflash import speculation
from engine.dflash.configuration import FULL, DrafterConfig
from engine.dflash.drafter import Drafter, build_drafter
from engine.randomness import stateless_uniform
from engine.target.loading import Target, load_target

CPU = torch.device("cpu")
TAPS = (0, 2)
EOS = 2
LAYER_KINDS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "all-sliding": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "mixed-sliding": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
}


def tiny_target(folder: Path, kind: str, vocabulary: int = 40, **changes: Any) -> Target:
    """A drawn float32 target of four layers whose next tokens depend on what was read."""
    settings = {
        "hidden_size": 32,
        "vocab_size": vocabulary,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        **LAYER_KINDS[kind],
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return load_target(
        folder, target_layer_ids=TAPS, dtype=torch.float32, device=CPU, init="random", keep_head=True, seed=3
    )


def drafter_for(target: Target, block_size: int = 8, **changes: Any) -> Drafter:
    """A fresh drafter of one layer."""
    settings: dict[str, Any] = {
        "hidden_size": target.summary.hidden_size,
        "intermediate_size": 48,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "vocab_size": target.summary.vocab_size,
        "block_size": block_size,
        "target_layer_ids": target.target_layer_ids,
        "num_target_layers": target.summary.layers,
        "mask_token_id": target.summary.vocab_size - 1,
        "layer_types": (FULL,),
        **changes,
    }
    drafter = build_drafter(DrafterConfig(**settings), target.device, target.dtype)
    drafter.initialise(0)
    return drafter


@cache
def builtin_target(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Target:
    return load_target(
        resolve(TINY_HYBRID), target_layer_ids=[1, 3, 5], dtype=dtype, device=device, keep_head=True
    )


@cache
def builtin_drafter(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Drafter:
    mask_token_id = load_tokenizer(resolve(TINY_HYBRID)).convert_tokens_to_ids(MASK)
    return drafter_for(builtin_target(dtype, device), mask_token_id=mask_token_id)


@cache
def held_out(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of the shipped conversations, and the answers that the target wrote to them."""
    documents = open_documents(resolve(HELD_OUT), vocab_size=VOCABULARY)
    rows = [documents.document(at) for at in range(count)]
    prompts = [row.input_ids[~row.loss_mask].tolist() for row in rows]
    return prompts, [row.input_ids[row.loss_mask].tolist() for row in rows]


def draft_from(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[Sequence[int]], wrong: float, vocabulary: int
) -> None:
    """Let drafts be these answers' tokens, each wrong with a probability, whatever the drafter says.

    So verifications accept every number of tokens, which few small drafters do.
    """

    def draft(batch: Any, context: Any, anchors: Tensor, keys: Tensor) -> tuple[Tensor, None]:
        slots = batch.drafter.config.block_size - 1
        drafts = []
        for index in batch.indices:
            place = len(batch.results[index].tokens)
            tokens = [*answers[index], *([EOS] * (place + slots))][place : place + slots]
            numbers = stateless_uniform(7, index, torch.arange(place, place + slots)).tolist()
            drafts.append(
                [
                    (token + 1) % vocabulary if number < wrong else token
                    for token, number in zip(tokens, numbers, strict=True)
                ]
            )
        return torch.tensor(drafts, device=anchors.device), None

    monkeypatch.setattr(speculation, "_draft", draft)


def counted_forwards(monkeypatch: pytest.MonkeyPatch, target: Target) -> Callable[[], int]:
    """How often the target's layers ran from here on."""
    calls: list[int] = []
    forward = target.model.base_model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(target.model.base_model, "forward", counting)
    return lambda: len(calls)
