"""The folder that servers read, name by name and key by key."""

from pathlib import Path

import orjson
import pytest
import torch
from blocks import CPU, small_config
from safetensors import safe_open
from safetensors.torch import save_file

from engine.dflash.configuration import FULL, SLIDING, DrafterConfig
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.export import (
    exported_names,
    fill_drafter,
    read_drafter_config,
    read_drafter_weights,
    write_drafter,
)
from engine.errors import CheckpointError, ScheduleError


def drafter_of(config: DrafterConfig) -> Drafter:
    drafter = build_drafter(config, CPU, torch.float32)
    drafter.initialise(4)
    return drafter


def written(folder: Path, config: DrafterConfig) -> Drafter:
    drafter = drafter_of(config)
    write_drafter(folder, config, dict(drafter.named_parameters()))
    return drafter


def test_exactly_the_layouts_tensors_are_written(tmp_path: Path) -> None:
    written(tmp_path, small_config(layer_types=(FULL,) * 3))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == 3 + 11 * 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < names
    assert {name for name in names if name.startswith("layers.2.")} == {
        f"layers.2.{part}.weight"
        for part in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        )
    }


def test_config_states_what_servers_need_and_nothing_of_the_target(tmp_path: Path) -> None:
    config = small_config(rope_theta=1e7, max_position_embeddings=262_144)
    written(tmp_path, config)
    saved = orjson.loads((tmp_path / "config.json").read_bytes())
    assert saved["architectures"] == ["DFlashDraftModel"] and saved["model_type"] == "qwen3"
    assert saved["dflash_config"] == {"target_layer_ids": [1, 3], "mask_token_id": 60, "block_size": 4}
    assert saved["block_size"] == 4 and saved["num_target_layers"] == 6
    assert saved["rope_theta"] == 1e7
    assert saved["rope_parameters"] == {"rope_theta": 1e7, "rope_type": "default"}
    assert saved["layer_types"] == [SLIDING, FULL]
    assert saved["sliding_window"] == 6 and saved["use_sliding_window"] is True
    assert saved["max_position_embeddings"] == 262_144 and saved["tie_word_embeddings"] is False
    assert saved["dtype"] == "float32"
    assert "partial_rotary_factor" not in saved and "mrope_section" not in str(saved)


@pytest.mark.parametrize(
    "layer_types, is_causal, stated",
    [
        ((FULL, FULL), None, False),
        ((SLIDING,), None, True),
        ((SLIDING,), False, False),
        ((SLIDING, FULL), None, "absent"),
    ],
)
def test_causality_is_stated_for_uniform_layouts_and_left_out_of_mixed_ones(
    tmp_path: Path, layer_types: tuple[str, ...], is_causal: bool | None, stated: object
) -> None:
    config = small_config(layer_types=layer_types, is_causal=is_causal)
    written(tmp_path, config)
    assert orjson.loads((tmp_path / "config.json").read_bytes()).get("is_causal", "absent") == stated
    back = read_drafter_config(tmp_path)
    assert [back.causal_in_block(kind) for kind in layer_types] == [
        config.causal_in_block(kind) for kind in layer_types
    ]


def test_a_mixed_layout_trained_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be served"):
        written(tmp_path, small_config(is_causal=False))
    with pytest.raises(ScheduleError, match="full_attention layer sees its whole block"):
        small_config(is_causal=True)


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    config = small_config()
    drafter = written(tmp_path, config)
    assert read_drafter_config(tmp_path) == config
    other = build_drafter(config, CPU, torch.float32)
    fill_drafter(other, read_drafter_weights(tmp_path, config), "export")
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))


def test_both_rope_forms_are_read(tmp_path: Path) -> None:
    written(tmp_path, small_config(rope_theta=1e7))
    path = tmp_path / "config.json"
    saved = orjson.loads(path.read_bytes())
    for dropped in ("rope_theta", "rope_parameters"):
        path.write_bytes(orjson.dumps({key: value for key, value in saved.items() if key != dropped}))
        assert read_drafter_config(tmp_path).rope_theta == 1e7


@pytest.mark.parametrize("change", [("lm_head.weight", True), ("fc.weight", False)])
def test_a_tensor_too_many_or_too_few_stops_the_export_and_the_import(
    tmp_path: Path, change: tuple[str, bool]
) -> None:
    name, add = change
    config = small_config()
    weights = dict(drafter_of(config).named_parameters())
    weights = weights | {name: torch.zeros(2, 2)} if add else {k: v for k, v in weights.items() if k != name}
    with pytest.raises(CheckpointError, match=name):
        write_drafter(tmp_path, config, weights)
    save_file({k: v.detach().contiguous() for k, v in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        read_drafter_weights(tmp_path, config)


def test_names_are_asserted_for_every_depth() -> None:
    assert all(len(exported_names(layers)) == 3 + 11 * layers for layers in (1, 5, 8))


def test_a_targets_rotary_settings_are_refused(tmp_path: Path) -> None:
    written(tmp_path, small_config())
    path = tmp_path / "config.json"
    saved = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps(saved | {"partial_rotary_factor": 0.25}))
    with pytest.raises(CheckpointError, match="partial_rotary_factor belongs to a target"):
        read_drafter_config(tmp_path)


def test_torn_files_are_named(tmp_path: Path) -> None:
    config = small_config()
    written(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:500])
    with pytest.raises(CheckpointError, match="model.safetensors: corrupt"):
        read_drafter_weights(tmp_path, config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: not JSON"):
        read_drafter_config(tmp_path)


def test_the_drafters_own_sizes_never_come_from_the_target() -> None:
    # Qwen3.6-27B's drafter: 1.730 B trainable parameters, as the contract states.
    config = DrafterConfig(
        hidden_size=5120,
        intermediate_size=17408,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=248_320,
        block_size=16,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        mask_token_id=248_070,
        layer_types=(SLIDING,) * 4 + (FULL,),
        sliding_window=2048,
        rope_theta=1e7,
        max_position_embeddings=262_144,
    )
    with torch.device("meta"):
        drafter = Drafter(config)
    assert round(sum(p.numel() for p in drafter.parameters()) / 1e9, 3) == 1.730
    assert {name for name, _ in drafter.named_parameters()} == exported_names(5)
