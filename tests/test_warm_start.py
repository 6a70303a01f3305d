"""Going on from an earlier drafter: every tensor taken or refused, every stated setting compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
import torch
from blocks import CPU, shared_weights, small_config, small_drafter
from safetensors.torch import load_file, save_file
from small_runs import MASK, assembled, small_project

from engine.dflash.configuration import FULL, SLIDING, DrafterConfig
from engine.dflash.drafter import build_drafter
from engine.dflash.export import write_drafter
from engine.dflash.training import SharedWeights
from engine.errors import CheckpointError, InputError, NonFinite, ScheduleError
from engine.export_speculators import Verifier, write_speculators
from engine.planning import plan_run
from engine.schedule import load_schedule
from engine.target.loading import load_target
from engine.target_copies import compare_copy
from engine.warm_start import RENAMED, check_warm_start, read_earlier, warm_start

FULL_ONLY = small_config(layer_types=(FULL, FULL))
MIXED = small_config()
SHARED = shared_weights()


def weights_of(config: DrafterConfig) -> dict[str, torch.Tensor]:
    drafter = small_drafter(config, seed=7)
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


def alter_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = orjson.loads(path.read_bytes())
    change(config)
    path.write_bytes(orjson.dumps(config))


def alter_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def ours(folder: Path, config: DrafterConfig) -> None:
    write_drafter(folder, config, weights_of(config))


def published(folder: Path, config: DrafterConfig) -> None:
    """As released ones look: keys left to their readers' defaults, one rope form, keys of Hugging Face's."""
    ours(folder, config)

    def thin_out(stated: dict[str, Any]) -> None:
        for key in ("is_causal", "rope_parameters", "use_sliding_window", "max_window_layers"):
            stated.pop(key, None)
        if set(stated["layer_types"]) == {FULL}:
            del stated["layer_types"]
        del stated["dflash_config"]["block_size"]
        stated |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "5.15.0"}

    alter_config(folder, thin_out)


def speculators(folder: Path, config: DrafterConfig) -> None:
    write_speculators(folder, config, weights_of(config), Verifier(name_or_path="x", architectures=("Y",)))


def torchspec(folder: Path, config: DrafterConfig) -> None:
    """Its own names, every setting at the top, `num_target_layers` for the taps, the embedding beside."""
    back = {new: old for old, new in RENAMED.items()}
    weights = {back.get(name, name): weight for name, weight in weights_of(config).items()}
    save_file(
        {**weights, "embed_tokens.weight": SHARED.embed_tokens.bfloat16()}, folder / "model.safetensors"
    )
    stated = config.to_server_json()
    for key in ("dflash_config", "layer_types", "is_causal", "sliding_window", "rope_parameters"):
        stated.pop(key, None)
    stated |= {
        "num_target_layers": len(config.target_layer_ids),
        "target_num_hidden_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "_torchspec_version": "0",
    }
    (folder / "config.json").write_bytes(orjson.dumps(stated))


LAYOUTS = {
    "ours": (ours, MIXED, "dflash"),
    "published, mixed": (published, MIXED, "dflash"),
    "published, full": (published, FULL_ONLY, "dflash"),
    "speculators": (speculators, FULL_ONLY, "speculators"),
    "speculators, sliding": (speculators, small_config(layer_types=(SLIDING,) * 2), "speculators"),
    "speculators, sliding both ways": (
        speculators,
        small_config(layer_types=(SLIDING,) * 2, is_causal=False),
        "speculators",
    ),
    "torchspec": (torchspec, FULL_ONLY, "torchspec"),
}
Writer = Callable[[Path, DrafterConfig], None]


@pytest.mark.parametrize("writer, config, layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_tensor_of_every_layout_is_taken_and_told(
    tmp_path: Path, writer: Writer, config: DrafterConfig, layout: str
) -> None:
    writer(tmp_path, config)
    drafter = build_drafter(config, CPU, torch.float32)
    lines = warm_start(drafter, tmp_path, SHARED)
    assert read_earlier(tmp_path).layout == layout and layout in lines[0]
    for name, weight in weights_of(config).items():
        assert torch.equal(drafter.get_parameter(name), weight), name
    in_file = load_file(tmp_path / "model.safetensors")
    for name in in_file:
        assert sum(f" {name} " in line for line in lines) == 1, name
    assert sum("taken:" in line for line in lines) == len(weights_of(config))


def test_torchspecs_names_are_told_beside_ours(tmp_path: Path) -> None:
    torchspec(tmp_path, FULL_ONLY)
    lines = "\n".join(warm_start(build_drafter(FULL_ONLY, CPU, torch.float32), tmp_path, SHARED))
    assert "taken: context_proj.weight [32, 64] float32 as fc.weight" in lines
    assert "left: embed_tokens.weight [61, 32] bfloat16, the target's own, and equal to it" in lines


def test_a_window_that_no_layer_has_is_of_no_matter(tmp_path: Path) -> None:
    published(tmp_path, FULL_ONLY)
    alter_config(tmp_path, lambda stated: stated.update(sliding_window=2048))
    check_warm_start(tmp_path, FULL_ONLY)


def test_what_a_file_does_not_state_is_told(tmp_path: Path) -> None:
    ours(tmp_path, MIXED)
    alter_config(tmp_path, lambda stated: stated.pop("num_target_layers"))
    lines = warm_start(build_drafter(MIXED, CPU, torch.float32), tmp_path, SHARED)
    assert lines[-1] == "  not stated there, so the schedule's: num_target_layers"
    torchspec(tmp_path, FULL_ONLY)
    alter_config(tmp_path, lambda stated: stated.pop("mask_token_id"))
    lines = warm_start(build_drafter(FULL_ONLY, CPU, torch.float32), tmp_path, SHARED)
    assert lines[-1] == "  not stated there, so the schedule's: mask_token_id"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"mask_token_id": 5}, "its mask_token_id is 60, and the schedule's drafter has 5"),
        ({"target_layer_ids": (2, 4)}, r"its target_layer_ids is \[1, 3\], and .* has \[2, 4\]"),
        ({"num_target_layers": 7}, "its num_target_layers is 6, and the schedule's drafter has 7"),
        ({"block_size": 8}, "its block_size is 4, and the schedule's drafter has 8"),
        ({"sliding_window": 7}, "its sliding_window is 6, and the schedule's drafter has 7"),
        ({"rope_theta": 1e6}, "its rope_theta is 10000.0, and the schedule's drafter has 1000000.0"),
        ({"rms_norm_eps": 1e-5}, "its rms_norm_eps is 1e-06, and the schedule's drafter has 1e-05"),
        ({"layer_types": (FULL, SLIDING)}, "its layer_types is"),
        ({"is_causal": False}, r"its causality inside a block is \[True, False\], and .* \[False, False\]"),
        ({"heads": 2, "head_dim": 32}, "its num_attention_heads is 4, and the schedule's drafter has 2"),
        ({"intermediate_size": 64}, r"up_proj.weight has shape \[48, 32\], and .* wants \[64, 32\]"),
        ({"layer_types": (SLIDING, FULL, FULL)}, "it lacks layers.2.mlp.up_proj.weight"),
        ({"layer_types": (SLIDING,)}, "layers.1.mlp.up_proj.weight belongs to no DFlash drafter"),
    ],
    ids=str,
)
def test_another_drafter_than_the_schedules_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    ours(tmp_path, MIXED)
    check_warm_start(tmp_path, MIXED)
    with pytest.raises(ScheduleError, match=words):
        check_warm_start(tmp_path, attrs.evolve(MIXED, **change))


@pytest.mark.parametrize("name", ["confidence_head.proj.weight", "markov_head.markov_w1.weight", "t2d"])
def test_a_tensor_left_over_stops_it(tmp_path: Path, name: str) -> None:
    ours(tmp_path, MIXED)
    alter_weights(tmp_path, lambda weights: weights.update({name: torch.zeros(3)}))
    with pytest.raises(ScheduleError, match=f"its {name} belongs to no DFlash drafter"):
        warm_start(build_drafter(MIXED, CPU, torch.float32), tmp_path, SHARED)


def test_a_tensor_missing_stops_it(tmp_path: Path) -> None:
    torchspec(tmp_path, FULL_ONLY)
    alter_weights(tmp_path, lambda weights: weights.pop("context_norm.weight"))
    with pytest.raises(ScheduleError, match="it lacks hidden_norm.weight"):
        warm_start(build_drafter(FULL_ONLY, CPU, torch.float32), tmp_path, SHARED)


@pytest.mark.parametrize("key", ["partial_rotary_factor", "mrope_section"])
def test_a_drafter_that_rotates_as_its_target_is_refused(tmp_path: Path, key: str) -> None:
    ours(tmp_path, MIXED)
    alter_config(tmp_path, lambda stated: stated["rope_parameters"].update({key: 0.25}))
    with pytest.raises(ScheduleError, match=f"has {key}, and a drafter here rotates every channel"):
        check_warm_start(tmp_path, MIXED)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PER_TYPE = {FULL: {"rope_theta": 5.0, "rope_type": "default"}}

OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "yarn": ({"rope_parameters": {"rope_theta": 1e4, **YARN}}, "rope_parameters has rope_type 'yarn'"),
    "scaling of its own": ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "parameters has factor"),
    "an older scaling": ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling has type"),
    "no table": ({"rope_scaling": "linear"}, "rope_scaling = linear: expected a table"),
    "two rotary bases": (
        {"rope_parameters": {"rope_theta": 5.0}},
        "rope_theta = 10000.0, and rope_parameters",
    ),
    "one rotary base, another": (
        {"rope_theta": None, "rope_scaling": {"rope_theta": 5.0}},
        "rope_scaling has 5.0",
    ),
    "a base per kind of layer": (
        {"rope_theta": None, "rope_parameters": PER_TYPE},
        f"rope_parameters has {FULL}",
    ),
    "gelu": ({"hidden_act": "gelu"}, "its hidden_act is gelu, and the schedule's drafter has silu"),
    "biases": ({"attention_bias": True}, "its attention_bias is True"),
    "hidden size": ({"hidden_size": 64}, "its hidden_size is 64"),
    "MLP size": ({"intermediate_size": 64}, "its intermediate_size is 64"),
    "head size": ({"head_dim": 999}, "its head_dim is 999"),
    "positions": ({"max_position_embeddings": 3}, "its max_position_embeddings is 3"),
    "layers": ({"num_hidden_layers": 3}, "its num_hidden_layers is 3"),
    "two block sizes": ({"block_size": 5}, "block_size is 5 and 4 at once"),
    "two masks": ({"mask_token_id": 5}, "mask_token_id is 5 and 60 at once"),
    "two sets of taps": ({"target_layer_ids": [1, 4]}, r"target_layer_ids is \[1, 4\] and \[1, 3\] at once"),
    "a window and none": ({"use_sliding_window": False}, "use_sliding_window is false, and layer_types"),
}


@pytest.mark.parametrize("change, words", OTHERWISE.values(), ids=OTHERWISE)
def test_a_file_that_says_something_else_than_is_computed_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    ours(tmp_path, MIXED)
    check_warm_start(tmp_path, MIXED)
    alter_config(tmp_path, lambda stated: stated.update(change))
    with pytest.raises(InputError, match=words):
        check_warm_start(tmp_path, MIXED)


@pytest.mark.parametrize(
    "write, change, words",
    [
        (torchspec, {"dflash_config": {"mask_token_id": 5}}, "mask_token_id is 60 and 5 at once"),
        (torchspec, {"dflash_config": {"target_layer_ids": [2]}}, r"target_layer_ids is \[1, 3\] and \[2\]"),
        (torchspec, {"target_hidden_size": 64}, "hidden_size is 32 and 64 at once"),
        (speculators, {"target_hidden_size": 64}, "hidden_size is 32 and 64 at once"),
    ],
)
def test_the_other_layouts_may_not_contradict_themselves_either(
    tmp_path: Path, write: Writer, change: dict[str, Any], words: str
) -> None:
    write(tmp_path, FULL_ONLY)
    alter_config(tmp_path, lambda stated: stated.update(change))
    with pytest.raises(CheckpointError, match=words):
        check_warm_start(tmp_path, FULL_ONLY)


def test_speculators_layers_are_compared_as_well(tmp_path: Path) -> None:
    speculators(tmp_path, FULL_ONLY)
    alter_config(
        tmp_path, lambda stated: stated["transformer_layer_config"]["rope_parameters"].update(**YARN)
    )
    with pytest.raises(ScheduleError, match="rope_parameters has rope_type 'yarn'"):
        check_warm_start(tmp_path, FULL_ONLY)


def test_a_tensor_under_both_its_names_stops_it(tmp_path: Path) -> None:
    ours(tmp_path, MIXED)
    alter_weights(
        tmp_path, lambda weights: weights.update({"context_proj.weight": weights["fc.weight"].clone()})
    )
    with pytest.raises(ScheduleError, match="its context_proj.weight and its fc.weight are the same tensor"):
        check_warm_start(tmp_path, MIXED)


def test_weights_that_are_no_floating_numbers_stop_it(tmp_path: Path) -> None:
    ours(tmp_path, MIXED)
    alter_weights(tmp_path, lambda weights: weights.update({"fc.weight": weights["fc.weight"].int()}))
    with pytest.raises(ScheduleError, match="its fc.weight is stored as I32; weights here are one of F64"):
        check_warm_start(tmp_path, MIXED)


@pytest.mark.parametrize("value, dtype", [(float("nan"), torch.bfloat16), (1e300, torch.float64)])
def test_weights_that_are_not_finite_stop_it(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    torchspec(tmp_path, FULL_ONLY)

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["context_proj.weight"] = weights["context_proj.weight"].to(dtype)
        weights["context_proj.weight"][3, 5] = value

    alter_weights(tmp_path, spoil)
    drafter = small_drafter(FULL_ONLY)
    before = drafter.get_parameter("fc.weight").clone()
    with pytest.raises(NonFinite, match="its context_proj.weight holds NaN or infinite values"):
        warm_start(drafter, tmp_path, SHARED)
    assert torch.equal(drafter.get_parameter("fc.weight"), before)


def test_an_embedding_that_is_not_the_targets_stops_it(tmp_path: Path) -> None:
    torchspec(tmp_path, FULL_ONLY)
    drafter = build_drafter(FULL_ONLY, CPU, torch.float32)
    other = SharedWeights(shared_weights(seed=9).embed_tokens, SHARED.lm_head)
    with pytest.raises(
        CheckpointError, match="embed_tokens.weight is not the target's, so it was trained for"
    ):
        warm_start(drafter, tmp_path, other)
    smaller = SharedWeights(SHARED.embed_tokens[:50], SHARED.lm_head)
    with pytest.raises(CheckpointError, match="is not the target's"):
        warm_start(drafter, tmp_path, smaller)


def test_a_copy_in_float16_is_the_targets_however_small_its_numbers_are() -> None:
    own = torch.randn(5_000, 8, generator=torch.Generator().manual_seed(0)) * 0.02
    own[4_500, 3] = 2e-6  # below what float16 holds in full
    shared = SharedWeights(own, own)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        told = compare_copy("lm_head.weight", own.to(dtype), shared, None, Path("drafter"))
        assert told == "the target's own, and equal to it"
        other = own.to(dtype, copy=True)
        other[4_999, 7] += 0.01  # the last of more rows than are compared at a time
        with pytest.raises(CheckpointError, match="is not the target's"):
            compare_copy("lm_head.weight", other, shared, None, Path("drafter"))


def speculators_with_copies(folder: Path, final_norm: torch.Tensor) -> None:
    """As that library may save one: the target's head under two names and its final norm beside it."""
    speculators(folder, FULL_ONLY)
    head = SHARED.lm_head.bfloat16()
    copies = {"lm_head.weight": head, "verifier_lm_head.weight": head.clone()}
    alter_weights(folder, lambda weights: weights.update(copies | {"verifier_norm.weight": final_norm}))


def target_files(folder: Path, **tensors: torch.Tensor) -> torch.Tensor:
    """What a target's checkpoint has around its final norm; returns that norm."""
    folder.mkdir()
    norm = torch.randn(MIXED.hidden_size, generator=torch.Generator().manual_seed(4))
    stored = {
        "model.language_model.embed_tokens.weight": SHARED.embed_tokens,
        "model.language_model.norm.weight": norm,
        "model.language_model.layers.0.input_layernorm.weight": norm + 1,
        "model.visual.norm.weight": norm + 2,
        "mtp.norm.weight": norm + 3,
    }
    save_file(stored | tensors, folder / "model.safetensors")
    return norm


def test_the_targets_head_and_final_norm_are_compared_under_the_verifiers_names(tmp_path: Path) -> None:
    norm = target_files(tmp_path / "target")
    speculators_with_copies(tmp_path, norm.bfloat16())
    drafter = build_drafter(FULL_ONLY, CPU, torch.float32)
    lines = warm_start(drafter, tmp_path, SHARED, tmp_path / "target")
    for name in ("lm_head", "verifier_lm_head", "verifier_norm"):
        (line,) = [line for line in lines if f" {name}.weight " in line]
        assert line.startswith("  left: ") and line.endswith("the target's own, and equal to it")


def test_a_head_of_the_verifiers_that_is_not_the_targets_stops_it(tmp_path: Path) -> None:
    norm = target_files(tmp_path / "target")
    speculators_with_copies(tmp_path, norm)
    other = {"verifier_lm_head.weight": shared_weights(seed=9).lm_head}
    alter_weights(tmp_path, lambda weights: weights.update(other))
    with pytest.raises(
        CheckpointError, match=r"verifier_lm_head.weight is not the target's, so it was trained for"
    ):
        warm_start(build_drafter(FULL_ONLY, CPU, torch.float32), tmp_path, SHARED, tmp_path / "target")


def test_a_final_norm_that_is_not_the_targets_stops_it(tmp_path: Path) -> None:
    norm = target_files(tmp_path / "target")
    speculators_with_copies(tmp_path, norm.flip(0))
    with pytest.raises(
        CheckpointError, match=r"verifier_norm.weight is not the target's, so it was trained for"
    ):
        warm_start(build_drafter(FULL_ONLY, CPU, torch.float32), tmp_path, SHARED, tmp_path / "target")


def test_a_final_norm_that_cannot_be_compared_is_told_as_that(tmp_path: Path) -> None:
    second = {"model.language_model.other_norm.weight": torch.ones(MIXED.hidden_size)}
    speculators_with_copies(tmp_path, target_files(tmp_path / "target", **second))
    for target, why in ((None, "weights are drawn"), (tmp_path / "target", "is the final norm is not clear")):
        lines = warm_start(build_drafter(FULL_ONLY, CPU, torch.float32), tmp_path, SHARED, target)
        (line,) = [line for line in lines if " verifier_norm.weight " in line]
        assert "not compared: " in line and why in line and "equal" not in line


def test_a_run_reads_the_final_norm_that_its_target_was_cut_in_front_of(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    whole = load_target(
        tmp_path / "target",
        target_layer_ids=(0, 1, 2),
        dtype=torch.float32,
        device=CPU,
        init="random",
        keep_head=True,
    ).model
    whole.model.norm.weight.copy_(torch.randn(whole.model.norm.weight.shape))
    weights = {name: weight.clone() for name, weight in whole.state_dict().items()}
    save_file(weights, tmp_path / "target" / "model.safetensors")
    sliding = 'drafter.layer_types=["sliding_attention", "sliding_attention"]'
    overrides = (
        sliding,
        f"drafter.init={tmp_path / 'earlier'}",
        "target.init=checkpoint",
        "run.eval_every=0",
    )
    config = plan_run(load_schedule(project, [sliding])).drafter_config
    (tmp_path / "earlier").mkdir()
    speculators(tmp_path / "earlier", config)
    copies = {"verifier_norm.weight": whole.model.norm.weight.detach().clone()}
    alter_weights(tmp_path / "earlier", lambda weights: weights.update(copies))
    assembled(project, *overrides)
    copies["verifier_norm.weight"][3] += 0.1
    alter_weights(tmp_path / "earlier", lambda weights: weights.update(copies))
    with pytest.raises(CheckpointError, match="verifier_norm.weight is not the target's"):
        assembled(project, *overrides)


@pytest.mark.parametrize("write", [ours, torchspec])
@pytest.mark.parametrize("key, value", [("causal", True), ("swa_window_size", 5), ("selector_rank", 8)])
def test_a_key_of_dflash_config_that_is_not_read_stops_it(
    tmp_path: Path, write: Writer, key: str, value: object
) -> None:
    write(tmp_path, FULL_ONLY)

    def add(stated: dict[str, Any]) -> None:
        stated["dflash_config"] = {**stated.get("dflash_config", {}), key: value}

    alter_config(tmp_path, add)
    with pytest.raises(ScheduleError, match=f"its dflash_config has {key} = {value}, which is not read here"):
        check_warm_start(tmp_path, FULL_ONLY)


def test_a_key_of_dflash_config_that_says_nothing_new_is_of_no_matter(tmp_path: Path) -> None:
    ours(tmp_path, MIXED)
    same = {"sliding_window": MIXED.sliding_window, "projector": None}
    alter_config(tmp_path, lambda stated: stated["dflash_config"].update(same))
    check_warm_start(tmp_path, MIXED)
    alter_config(tmp_path, lambda stated: stated["dflash_config"].update(sliding_window=7))
    with pytest.raises(ScheduleError, match="dflash_config has sliding_window = 7"):
        check_warm_start(tmp_path, MIXED)


def test_speculators_drafters_that_draft_otherwise_are_refused(tmp_path: Path) -> None:
    for change, words in (
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32 of 61 tokens"),
        ({"sample_from_anchor": True}, "sample_from_anchor is true: slot 0 predicts there"),
    ):
        speculators(tmp_path, FULL_ONLY)
        alter_config(tmp_path, lambda stated, change=change: stated.update(change))
        with pytest.raises(CheckpointError, match=words):
            check_warm_start(tmp_path, FULL_ONLY)


def test_taps_left_to_torchspecs_default_are_that_default(tmp_path: Path) -> None:
    config = attrs.evolve(FULL_ONLY, num_target_layers=12, target_layer_ids=(1, 9))
    torchspec(tmp_path, config)
    alter_config(tmp_path, lambda stated: stated.update(target_layer_ids=None))
    check_warm_start(tmp_path, config)
    with pytest.raises(ScheduleError, match=r"its target_layer_ids is \[1, 9\]"):
        check_warm_start(tmp_path, attrs.evolve(config, target_layer_ids=(1, 8)))


def test_a_plan_refuses_what_does_not_fit_before_anything_is_loaded(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    config = plan_run(load_schedule(project)).drafter_config
    write_drafter(earlier, config, weights_of(config))
    parts = assembled(project, f"drafter.init={earlier}")
    assert all(torch.equal(parts.masters[name], weight) for name, weight in weights_of(config).items())
    alter_weights(earlier, lambda weights: weights.update({"lm_bias": torch.zeros(MASK)}))
    with pytest.raises(ScheduleError, match='drafter.init = ".*earlier": its lm_bias belongs to no DFlash'):
        plan_run(load_schedule(project, [f"drafter.init={earlier}"]))
    alter_config(earlier, lambda stated: stated["dflash_config"].update(mask_token_id=1))
    with pytest.raises(
        ScheduleError, match="dflash_config.mask_token_id = 1, and drafter.mask_token_id is 95"
    ):
        plan_run(load_schedule(project, [f"drafter.init={earlier}"]))


def test_a_plan_goes_on_from_the_speculators_layout(tmp_path: Path) -> None:
    project = small_project(tmp_path)
    sliding = 'drafter.layer_types=["sliding_attention", "sliding_attention"]'
    config = plan_run(load_schedule(project, [sliding])).drafter_config
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    speculators(earlier, config)
    parts = assembled(project, sliding, f"drafter.init={earlier}")
    assert all(torch.equal(parts.masters[name], weight) for name, weight in weights_of(config).items())
