"""The target's own tokens: what it says after each prefix, through whatever runs its layers."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from decoding_targets import tiny_target
from safetensors.torch import load_file, save_file
from served_runs import served_project
from small_runs import EOS, MASK, PAD, VOCAB
from test_fused_target import random_target
from torch import Tensor
from transformers import AutoConfig, AutoModel

from engine.data.shards import write_documents
from engine.dflash.configuration import FULL, SLIDING
from engine.dflash.speculation import decode_alone
from engine.errors import NonFinite
from engine.evaluate import evaluate_checkpoint
from engine.run import run
from engine.schedule import load_schedule
from engine.target.fused_layers import why_not
from engine.target.fused_operations import torch_operations
from engine.target.fused_walk import fused_walk
from engine.target.loading import Target, load_target
from engine.target.own_tokens import own_tokens_and_taps
from engine.target.truncation import resumed_view
from tools.quality_curve import evaluations

KINDS = ["qwen3_5_text", "qwen3"]


def ids_and_mask(target: Target, rows: int = 3, length: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, target.summary.vocab_size, (rows, length), generator=generator)
    return ids, torch.rand(ids.shape, generator=generator) < 0.6


def whole(target: Target, ids: Tensor, wanted: Tensor) -> Tensor:
    """By all logits at once."""
    said = torch.cat([ids[:, :1], target.logits(ids).argmax(-1)[:, :-1]], 1)
    return torch.where(wanted, said, ids)


@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_they_are_what_the_target_says_after_each_prefix(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_target(tmp_path, kind, keep_head=True)
    ids, wanted = ids_and_mask(target)
    monkeypatch.setattr("engine.target.own_tokens.PLACES_AT_ONCE", 7)
    products: list[int] = []
    head = target.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, given, logits: products.append(logits.shape[0]))
    own, taps = own_tokens_and_taps(target, ids, wanted)
    handle.remove()
    assert max(products) == 7 and sum(products) == int(wanted[:, 1:].sum())
    assert torch.equal(own, whole(target, ids, wanted)) and not torch.equal(own, ids)
    assert all(torch.equal(*pair) for pair in zip(taps, target.forward_taps(ids), strict=True))
    for place in (5, 39):
        after = target.logits(ids[:1, :place])[0, -1].argmax()
        assert own[0, place] == (after if wanted[0, place] else ids[0, place])
    none, _ = own_tokens_and_taps(target, ids, torch.zeros_like(wanted))
    assert torch.equal(none, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_gives_the_taps_and_the_modules_last_layers_go_on_from_them(tmp_path: Path, kind: str) -> None:
    plain = random_target(tmp_path, kind, keep_head=True)
    ids, wanted = ids_and_mask(plain)
    before = {name: len(part._forward_pre_hooks) for name, part in plain.model.named_modules()}
    fused = attrs.evolve(plain, walk=fused_walk(plain, torch_operations()))
    layers: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda module, given, output: layers.append(output))
        for layer in plain.model.base_model.layers
    ]
    own, taps = own_tokens_and_taps(fused, ids, wanted)
    for handle in handles:
        handle.remove()
    assert len(layers) == len(handles) - 1 - plain.target_layer_ids[-1]  # and none of those that the walk ran
    assert torch.equal(own, whole(plain, ids, wanted))
    assert all(torch.equal(*pair) for pair in zip(taps, fused.forward_taps(ids), strict=True))
    assert before == {name: len(part._forward_pre_hooks) for name, part in plain.model.named_modules()}

    class Moved:  # a walk whose last tap is another text's
        def __call__(self, input_ids: Tensor) -> list[Tensor]:
            return plain.forward_taps(input_ids.flip(0))

        def kernels(self) -> dict[str, str]:
            return {}

    said, _ = own_tokens_and_taps(attrs.evolve(plain, walk=Moved()), ids, torch.ones_like(wanted))
    assert torch.equal(said[:, 1:], whole(plain, ids.flip(0), torch.ones_like(wanted))[:, 1:])


@pytest.mark.parametrize("row", [0, 1, 2])
def test_logits_that_are_nan_in_any_chunk_are_told(
    tmp_path: Path, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_target(tmp_path, "qwen3", keep_head=True)
    ids, wanted = ids_and_mask(target)
    monkeypatch.setattr("engine.target.own_tokens.PLACES_AT_ONCE", 7)

    def spoilt(module: torch.nn.Module, given: Any, states: Tensor) -> Tensor:
        return states.index_fill(0, torch.tensor([row]), torch.nan)

    target.model.get_input_embeddings().register_forward_hook(spoilt)
    with pytest.raises(NonFinite, match="NaN"):
        own_tokens_and_taps(target, ids, wanted)


@pytest.mark.parametrize("kind", ["mixed-sliding", "all-sliding"])
def test_behind_a_walk_over_an_architecture_that_is_not_known_the_whole_module_speaks(
    tmp_path: Path, kind: str
) -> None:
    plain = tiny_target(tmp_path, kind)
    ids, wanted = ids_and_mask(plain)
    assert why_not(plain.model)

    class Walk:  # its taps are no states to go on from
        def __call__(self, input_ids: Tensor) -> list[Tensor]:
            return [torch.full_like(tap, 3.0) for tap in plain.forward_taps(input_ids)]

        def kernels(self) -> dict[str, str]:
            return {}

    own, taps = own_tokens_and_taps(attrs.evolve(plain, walk=Walk()), ids, wanted)
    assert torch.equal(own, whole(plain, ids, wanted))
    assert len(taps) == len(plain.target_layer_ids) and all(bool((tap == 3).all()) for tap in taps)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_the_last_layers_go_on_with_their_own_kinds_and_masks_wherever_they_begin(
    kind: str, attention: str
) -> None:
    layers = [SLIDING, FULL, FULL, SLIDING, SLIDING, FULL]
    own: dict[str, Any] = {"qwen3": {"use_sliding_window": True}, "gemma3_text": {"query_pre_attn_scalar": 8}}
    settings = AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
        layer_types=layers,
        **own[kind],
    )
    torch.manual_seed(0)
    base = AutoModel.from_config(settings, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    ids = torch.randint(1, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[1, 12:] = ids[2, 5:] = 0
    outputs: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda module, given, output: outputs.append(output))
        for layer in base.layers
    ]
    with torch.no_grad():
        expected = base(input_ids=ids, use_cache=False).last_hidden_state
        for handle in handles:
            handle.remove()
        for first in range(1, len(layers)):
            view = resumed_view(base, len(layers), first, outputs[first - 1])
            config: Any = view.config
            assert config.layer_types == layers[first:] and config._attn_implementation == attention
            resumed = view(input_ids=ids, use_cache=False).last_hidden_state
            torch.testing.assert_close(resumed, expected, atol=1e-6, rtol=1e-6)
    assert settings.layer_types == layers and len(base.layers) == len(layers)


def test_training_and_evaluate_accept_the_same_where_answers_were_sampled(tmp_path: Path) -> None:
    project = served_project(tmp_path)
    file = tmp_path / "target/model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= 30.0  # a target that is sure of some tokens; its greedy text stays
    save_file(weights, file)
    target = load_target(
        tmp_path / "target",
        target_layer_ids=[0],
        dtype=torch.float32,
        device=torch.device("cpu"),
        keep_head=True,
    )
    random = np.random.default_rng(4)
    prompts = [random.integers(0, PAD, int(random.integers(3, 9))).tolist() for _ in range(12)]
    answers = decode_alone(target, prompts, max_new_tokens=24, stop=[EOS], temperature=1.0, seed=3)
    answers = [[1 if token in (PAD, MASK) else token for token in answer] for answer in answers]
    rows = [([*p, *a], [0] * len(p) + [1] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    write_documents(tmp_path / "sampled", rows, vocab_size=VOCAB)
    schedule = load_schedule(
        project,
        [f"data.held_out={tmp_path}/sampled", "run.steps=40", "run.eval_every=40", "train.lr=2e-2"],
    )
    last = evaluations(run(schedule, output=tmp_path / "run").folder.path)[-1]
    walk = evaluate_checkpoint(tmp_path / "run", device="cpu", decodes=False).walk
    assert walk and 0.4 < walk.target_agreement < 0.7 and walk.acceptance.accepted_length > 1.1
    assert last["accepted_length"] == walk.acceptance.accepted_length
    assert last["held_out_loss"] == pytest.approx(walk.loss, rel=1e-4)
