"""`export`: every rule of the layout, the comparison with training, both layouts, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from blocks import TAPS, shared_weights, small_config, small_drafter
from safetensors.torch import load_file, save_file

from engine.dflash.configuration import FULL, SLIDING, DrafterConfig
from engine.dflash.drafter import Drafter
from engine.dflash.export import check_layout, read_drafter_config, write_drafter
from engine.errors import CheckpointError, DifferenceFound, EngineError
from engine.export_comparison import compare_with_training, training_logits
from engine.export_speculators import Verifier, to_speculators_json, write_speculators
from engine.independent_reader import ServedDrafter, block_logits, read_served

LAYOUTS = {"full": (FULL, FULL), "mixed": (SLIDING, FULL), "sliding": (SLIDING, SLIDING)}
VERIFIER = Verifier(name_or_path="some/target", architectures=("Qwen3ForCausalLM",))


def uneven(config: DrafterConfig) -> Drafter:
    """A drafter none of whose weights can be mistaken for another."""
    drafter = small_drafter(config)
    with torch.no_grad():
        for number, parameter in enumerate(drafter.parameters()):
            if parameter.dim() == 1:
                parameter.copy_(
                    torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)) + 0.5
                )
    return drafter


def weights_of(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


def written(folder: Path, **changes: object) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    config = small_config(**changes)
    weights = weights_of(uneven(config))
    folder.mkdir(exist_ok=True)
    write_drafter(folder, config, weights)
    return config, weights


def alter(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = orjson.loads(path.read_bytes())
    change(config)
    path.write_bytes(orjson.dumps(config))


# The layout's rules


@pytest.mark.parametrize("layers", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_written_keeps_every_rule(tmp_path: Path, layers: tuple[str, ...]) -> None:
    written(tmp_path, layer_types=layers)
    check_layout(tmp_path)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["Qwen3ForCausalLM"]}, "architectures = "),
    "another model type": ({"model_type": "qwen3_5_text"}, "model_type = qwen3_5_text"),
    "tied embeddings": ({"tie_word_embeddings": True}, "tie_word_embeddings = True: expected False"),
    "biases": ({"attention_bias": True}, "attention_bias = True"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings = 0: expected a positive"),
    "two block sizes": ({"block_size": 8}, "block_size = 8, and dflash_config has 4"),
    "a tap on the last layer": ({"num_target_layers": 4}, r"target_layer_ids = \[1, 3\]"),
    "a mask outside": ({"vocab_size": 60}, "mask_token_id = 60: not of the vocabulary"),
    "no window": ({"sliding_window": None}, "sliding_window"),
    "a window unused": ({"use_sliding_window": False}, "use_sliding_window = False: do not go with"),
    "two rotary bases": ({"rope_theta": 1e6}, "rope_theta = 1000000.0, and rope_parameters has 10000.0"),
    "one rotary form": ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = "),
    "scaled positions": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has "),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = gelu: expected silu"),
    "causality of a mixed layout": ({"is_causal": False}, "is_causal"),
    "a key of the target": ({"mrope_interleaved": True}, "mrope_interleaved is no key of the layout"),
    "a dtype that is not stored": ({"dtype": "bfloat16"}, "is stored as F32, and config.json says bfloat16"),
}


@pytest.mark.parametrize("change, words", BROKEN.values(), ids=BROKEN)
def test_each_broken_rule_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    written(tmp_path)
    alter(tmp_path, lambda config: config.update(change))
    with pytest.raises(EngineError, match=words):
        check_layout(tmp_path)


@pytest.mark.parametrize("key", sorted(small_config().to_server_json().keys() - {"is_causal"}))
def test_each_missing_key_is_named(tmp_path: Path, key: str) -> None:
    written(tmp_path)
    alter(tmp_path, lambda config: config.pop(key))
    with pytest.raises(EngineError, match=f"{key}|not a drafter's configuration"):
        check_layout(tmp_path)


@pytest.mark.parametrize(
    "layers, stated", [((FULL, FULL), True), ((FULL, FULL), None), ((SLIDING,) * 2, None)]
)
def test_a_uniform_layout_states_its_causality(
    tmp_path: Path, layers: tuple[str, ...], stated: bool | None
) -> None:
    written(tmp_path, layer_types=layers)
    alter(tmp_path, lambda config: config.update(is_causal=stated))
    with pytest.raises(CheckpointError, match="is_causal is"):
        check_layout(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda weights: weights.update({"embed_tokens.weight": torch.zeros(61, 32)}),
            "embed_tokens.weight is no",
        ),
        (lambda weights: weights.pop("layers.1.self_attn.k_norm.weight"), "k_norm.weight is missing"),
        (lambda weights: weights.update({"norm.weight": torch.ones(31)}), r"norm.weight has shape \[31\]"),
        (
            lambda weights: weights.update({"norm.weight": torch.ones(32).half()}),
            "norm.weight is stored as F16",
        ),
    ],
    ids=["left over", "missing", "shape", "dtype"],
)
def test_each_wrong_tensor_is_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    _, weights = written(tmp_path)
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        check_layout(tmp_path)


@pytest.mark.parametrize("dropped", [None, "rope_theta", "rope_parameters"])
def test_transformers_reads_the_rotary_base_of_either_form(tmp_path: Path, dropped: str | None) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

    written(tmp_path, rope_theta=1e7)
    alter(tmp_path, lambda config: config.pop(dropped) if dropped else None)
    config = Qwen3Config.from_pretrained(tmp_path)
    frequencies = Qwen3RotaryEmbedding(config).inv_freq
    assert frequencies.shape == (8,)  # every pair of a head of 16 channels
    assert torch.allclose(frequencies, 1e7 ** (-torch.arange(0, 16, 2) / 16), rtol=1e-6)
    assert config.layer_types == [SLIDING, FULL] and config.sliding_window == 6
    assert config.head_dim == 16 and not config.tie_word_embeddings
    assert read_served(tmp_path).rope_theta == 1e7


# The second implementation


@pytest.mark.parametrize("layers", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_implementation_agrees_bit_for_bit(
    tmp_path: Path, layers: tuple[str, ...], dtype: str
) -> None:
    config, weights = written(tmp_path, layer_types=layers, dtype=dtype)
    assert compare_with_training(tmp_path, config, weights) >= 2


def one_bit(weights: dict[str, torch.Tensor], name: str) -> None:
    flat = weights[name].flatten()
    flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))
    weights[name] = flat.view_as(weights[name])


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.1.self_attn.k_norm.weight", "layers.0.mlp.up_proj.weight"]
)
def test_one_bit_of_one_weight_is_found(tmp_path: Path, name: str) -> None:
    config, weights = written(tmp_path)
    one_bit(weights, name)
    with pytest.raises(DifferenceFound, match="logits differ from the training model's by up to"):
        compare_with_training(tmp_path, config, weights)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 7},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"is_causal": True},
        {"layer_types": [FULL, FULL]},
        {"layer_types": [FULL, SLIDING]},
        {"rms_norm_eps": 1e-5},
        {"partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_a_setting_that_was_not_trained_is_found(tmp_path: Path, change: dict[str, Any]) -> None:
    config, weights = written(tmp_path)
    alter(tmp_path, lambda stated: stated.update(change))
    with pytest.raises(DifferenceFound, match="logits differ"):
        compare_with_training(tmp_path, config, weights)


@pytest.mark.parametrize("trained, served", [(16_384, 16_383), (16_384, 16_385), (10_000, 16_384)])
def test_a_window_longer_than_any_context_compared_is_found(
    tmp_path: Path, trained: int, served: int
) -> None:
    config, weights = written(tmp_path, sliding_window=trained, max_position_embeddings=32_768)
    compare_with_training(tmp_path, config, weights)
    alter(tmp_path, lambda stated: stated.update(sliding_window=served))
    with pytest.raises(DifferenceFound, match="slot . of a block .* in layer 0, and in training it did"):
        compare_with_training(tmp_path, config, weights)


def test_a_long_window_where_none_was_trained_is_found(tmp_path: Path) -> None:
    config, weights = written(tmp_path, layer_types=(FULL, FULL), max_position_embeddings=32_768)
    slides = {"layer_types": [FULL, SLIDING], "sliding_window": 16_384, "is_causal": False}
    alter(tmp_path, lambda stated: stated.update(slides))
    with pytest.raises(DifferenceFound, match="doesn't see position 0 in layer 1, and in training it did"):
        compare_with_training(tmp_path, config, weights)


@pytest.mark.parametrize("layers", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rotary_base_that_is_a_hundredth_off_is_found_in_every_layout(
    tmp_path: Path, layers: tuple[str, ...]
) -> None:
    config, weights = written(tmp_path, layer_types=layers, max_position_embeddings=32_768)
    base = 1.01 * config.rope_theta
    rope = {"rope_theta": base, "rope_parameters": {"rope_theta": base, "rope_type": "default"}}
    alter(tmp_path, lambda stated: stated.update(rope))
    with pytest.raises(DifferenceFound, match="logits differ"):
        compare_with_training(tmp_path, config, weights)


@pytest.mark.parametrize(
    "window, positions, longest",
    [
        (None, 32_768, 3_072),
        (6, 32_768, 3_072),
        (16_384, 32_768, 3_072),
        (4_000, 32_768, 4_002),
        (6, 512, 508),
    ],
)
def test_a_context_of_a_few_thousand_tokens_is_always_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None, positions: int, longest: int
) -> None:
    layers = (SLIDING, FULL) if window else (FULL, FULL)
    config, weights = written(
        tmp_path, layer_types=layers, sliding_window=window, max_position_embeddings=positions
    )
    lengths = []

    def recorded(served: ServedDrafter, taps: torch.Tensor, *others: Any) -> torch.Tensor:
        lengths.append(len(taps))
        return block_logits(served, taps, *others)

    monkeypatch.setattr("engine.export_comparison.block_logits", recorded)
    compare_with_training(tmp_path, config, weights)
    assert lengths[:2] == [1, 5 if window == 6 else 12] and max(lengths) == longest


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
            "positions turn by yarn",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "positions turn by linear"),
        ({"rope_parameters": {FULL: {"rope_theta": 5.0}}}, f"positions turn by {FULL}"),
        ({"rope_scaling": {"rope_theta": 5.0}}, "rope_theta is 5.0 and 10000.0"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"attention_bias": True}, "attention_bias is True"),
    ],
    ids=str,
)
def test_what_neither_implementation_computes_is_refused_by_both(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    written(tmp_path)
    alter(tmp_path, lambda stated: stated.update(change))
    with pytest.raises(CheckpointError, match=words):
        read_served(tmp_path)
    with pytest.raises(CheckpointError):
        read_drafter_config(tmp_path)


def test_other_taps_and_another_mask_are_found(tmp_path: Path) -> None:
    config, weights = written(tmp_path)
    for change in ({"target_layer_ids": [2, 4]}, {"mask_token_id": 3}):
        write_drafter(tmp_path, config, weights)
        alter(tmp_path, lambda stated, change=change: stated["dflash_config"].update(change))
        with pytest.raises(DifferenceFound, match=f"a server reads {next(iter(change))}"):
            compare_with_training(tmp_path, config, weights)


def test_the_second_implementation_shares_no_code_with_training() -> None:
    source = Path(sys.modules["engine.independent_reader"].__file__ or "").read_text()
    assert [line for line in source.splitlines() if "import" in line and "engine" in line] == [
        "from engine.errors import CheckpointError"
    ]


# The speculators layout


@pytest.mark.parametrize("layers, causal", [("full", False), ("sliding", True)])
def test_the_speculators_layout_says_the_same_in_its_own_places(
    tmp_path: Path, layers: str, causal: bool
) -> None:
    config = small_config(layer_types=LAYOUTS[layers])
    weights = weights_of(uneven(config))
    write_speculators(tmp_path, config, weights, VERIFIER)
    stated = orjson.loads((tmp_path / "config.json").read_bytes())
    assert stated["speculators_model_type"] == "dflash" and stated["architectures"] == ["DFlashDraftModel"]
    assert stated["aux_hidden_state_layer_ids"] == [2, 4]  # that library counts the embedding's output
    assert stated["sliding_window_non_causal"] is not causal and stated["sample_from_anchor"] is False
    assert stated["draft_vocab_size"] == 61 and stated["mask_token_id"] == 60 and stated["block_size"] == 4
    method = stated["speculators_config"]["proposal_methods"][0]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 3)
    assert stated["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    layer = stated["transformer_layer_config"]
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == config.rope_theta
    assert layer["model_type"] == "qwen3" and "dflash_config" not in layer and "is_causal" not in layer
    assert set(load_file(tmp_path / "model.safetensors")) == set(weights)  # embedding and head: the target's
    assert compare_with_training(tmp_path, config, weights) >= 2


def test_a_mixed_layout_has_no_speculators_form() -> None:
    with pytest.raises(CheckpointError, match="one flag for causality.*--format dflash"):
        to_speculators_json(small_config(), VERIFIER)


@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_the_released_library_loads_it_and_computes_the_same(tmp_path: Path, layers: str) -> None:
    dflash = pytest.importorskip(
        "speculators.models.dflash", reason="the speculators package is not installed"
    )
    # A window that nothing falls out of: the library measures it from the anchor, servers from the slot.
    config = small_config(layer_types=LAYOUTS[layers], sliding_window=64 if layers == "sliding" else None)
    drafter, shared = uneven(config), shared_weights()
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_bytes(
        orjson.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 6})
    )
    given = {"model.embed_tokens.weight": shared.embed_tokens, "lm_head.weight": shared.lm_head}
    save_file({**given, "model.norm.weight": torch.ones(32)}, target / "model.safetensors")
    folder = tmp_path / "exported"
    folder.mkdir()
    verifier = Verifier(name_or_path=str(target), architectures=("Qwen3ForCausalLM",))
    write_speculators(folder, config, weights_of(drafter), verifier)

    model = dflash.DFlashDraftModel.from_pretrained(str(folder))
    for name, weight in weights_of(drafter).items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert torch.equal(model.embed_tokens.weight, shared.embed_tokens)
    assert list(model.target_layer_ids) == [2, 4] and model.config.block_size == 4

    before, token = 9, 5
    taps = torch.randn(before, TAPS * 32, generator=torch.Generator().manual_seed(4))
    ours = training_logits(drafter, taps, token, shared.embed_tokens, shared.lm_head)
    with torch.no_grad():
        context = model.hidden_norm(model.fc(taps))[None]
        x = model.embed_tokens(torch.tensor([[token, *[config.mask_token_id] * 3]]))
        places = model.rotary_emb(x, torch.arange(before + 4)[None])
        mask = torch.ones(4, before + 4, dtype=torch.bool)
        if layers == "sliding":
            mask = mask.tril(before)
        for layer in model.layers:
            layer.self_attn.config._attn_implementation = "sdpa"
            x = layer(
                target_hidden=context,
                hidden_states=x,
                attention_mask=mask[None, None],
                position_embeddings=places,
            )
        theirs = model.lm_head(model.norm(x))[0]
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(ours.abs().max()))
