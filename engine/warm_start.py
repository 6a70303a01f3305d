"""Going on from an earlier drafter: ours, a published one, or one of another trainer.

    dflash        config.json and tensors as SGLang, vLLM and the authors' runtime read them
    speculators   taps counted from the embedding's output, sizes in `transformer_layer_config`
    torchspec     `context_proj`, `context_norm`, `final_norm`, the target's embedding beside them

A warm start that misses a tensor or a setting trains on happily from a damaged drafter, so every tensor
in the file is taken, a copy of the target's own that is held against it, or refused, and every setting
that the file states has to be the schedule's. The configuration alone is read without torch: that much is
checked before anything expensive.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import orjson

from engine.dflash.configuration import (
    ACTIVATION,
    FULL,
    OF_TARGETS,
    ROPE_FORMS,
    SLIDING,
    DrafterConfig,
    rotary_problems,
)
from engine.errors import CheckpointError, NonFinite, ScheduleError
from engine.target.taps import default_target_layer_ids
from engine.target_copies import OF_THE_TARGET, compare_copy

if TYPE_CHECKING:
    from engine.dflash.drafter import Drafter
    from engine.dflash.training import SharedWeights
    from engine.tensor_file import TensorEntry

Layout = Literal["dflash", "speculators", "torchspec"]

RENAMED = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}
"""TorchSpec's names for what is not in a layer."""

INNER_KEYS = frozenset({"target_layer_ids", "mask_token_id", "block_size"})
"""What is read of `dflash_config`; other trainers keep windows, causality or further heads there."""

FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes, by the format's names, that hold weights as they are; others are indices, or want a scale."""


@attrs.frozen(kw_only=True)
class EarlierDrafter:
    """What a folder says, in the names of the `dflash` layout; a setting that it leaves out is absent."""

    folder: Path
    layout: Layout
    config: Mapping[str, Any]


def read_earlier(folder: Path) -> EarlierDrafter:
    """Read the configuration of an earlier drafter in any of the layouts.

    Raises:
        CheckpointError: there is none, it is not readable, it is no DFlash drafter's, or it says two things.
    """
    path = folder / "config.json"
    try:
        config = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            'no config.json there; give the folder of an exported drafter, or "fresh"'
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); export the drafter again") from error
    if isinstance(config, dict) and config.get("speculators_model_type") == "dflash":
        return EarlierDrafter(folder=folder, layout="speculators", config=_from_speculators(config, path))
    if isinstance(config, dict) and "target_num_hidden_layers" in config:
        return EarlierDrafter(folder=folder, layout="torchspec", config=_from_torchspec(config, path))
    if not isinstance(config, dict) or not isinstance(config.get("dflash_config"), dict):
        raise CheckpointError(f'{path} has no "dflash_config", so this is no exported DFlash drafter')
    inner = config["dflash_config"]
    return EarlierDrafter(folder=folder, layout="dflash", config=_completed(config, inner, path))


def _agreed(name: str, path: Path, *places: Mapping[str, Any]) -> Any:
    """What a file says under one name in several places; None where it does not.

    Which of two values a drafter was trained with, nobody can tell: its readers do not agree either.
    """
    stated = [place[name] for place in places if place.get(name) is not None]
    if any(value != stated[0] for value in stated):
        raise CheckpointError(
            f"{path}: {name} is {' and '.join(map(str, stated))} at once; find out which one it was trained "
            "with, and make the file say that"
        )
    return stated[0] if stated else None


def _completed(config: Mapping[str, Any], inner: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Fill in what published files leave to their readers' defaults; what stands twice has to agree."""
    whole = dict(config)
    size = _agreed("block_size", path, config, inner)
    taps = dict(inner)
    taps |= {name: _agreed(name, path, config, inner) for name in ("target_layer_ids", "mask_token_id")}
    layers, depth = config.get("num_hidden_layers"), config.get("num_target_layers")
    if taps.get("target_layer_ids") is None and layers and depth:
        taps["target_layer_ids"] = default_target_layer_ids(depth, layers)
    hidden = _agreed("hidden_size", path, config, {"hidden_size": config.get("target_hidden_size")})
    whole |= {"hidden_size": hidden, "block_size": size, "dflash_config": taps}
    if not whole.get("layer_types") and layers:
        whole["layer_types"] = [FULL] * layers
    if SLIDING in (whole.get("layer_types") or ()) and whole.get("use_sliding_window") is False:
        raise CheckpointError(f"{path}: use_sliding_window is false, and layer_types has layers that slide")
    return whole


def _from_speculators(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    layer = dict(config.get("transformer_layer_config") or {})
    if config.get("draft_vocab_size") != layer.get("vocab_size"):
        raise CheckpointError(
            f"{path}: draft_vocab_size is {config.get('draft_vocab_size')} of {layer.get('vocab_size')} "
            "tokens, and a drafter here predicts all of them; use one with the whole vocabulary"
        )
    if config.get("sample_from_anchor"):
        raise CheckpointError(
            f"{path}: sample_from_anchor is true: slot 0 predicts there, and here slot k predicts the token "
            "k places on; use a drafter that was trained without it"
        )
    inner = {
        "target_layer_ids": [number - 1 for number in config.get("aux_hidden_state_layer_ids") or []],
        "mask_token_id": config.get("mask_token_id"),
    }
    types = layer.get("layer_types") or [FULL] * layer.get("num_hidden_layers", 0)
    if config.get("sliding_window_non_causal") and set(types) != {FULL}:
        layer["is_causal"] = False
    size, hidden = _agreed("block_size", path, config, layer), config.get("target_hidden_size")
    return _completed(layer | {"block_size": size, "target_hidden_size": hidden}, inner, path)


def _from_torchspec(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """There, `num_target_layers` counts the taps and every setting stands at the top."""
    depth, inner = config["target_num_hidden_layers"], dict(config.get("dflash_config") or {})
    if config.get("target_layer_ids") is None and inner.get("target_layer_ids") is None:
        inner["target_layer_ids"] = default_target_layer_ids(depth, config["num_target_layers"])
    return _completed({**config, "num_target_layers": depth}, inner, path)


def check_warm_start(folder: Path, config: DrafterConfig) -> None:
    """Compare an earlier drafter's settings, tensor names and shapes with the drafter that is to go on.

    Reads the configuration and the weights' header.

    Raises:
        ScheduleError: everything that differs, one problem a line.
        CheckpointError: the folder cannot be read, or its configuration says two things.
    """
    from engine.tensor_file import read_header

    earlier = read_earlier(folder)
    stated = _settings_of(earlier.config)
    problems = [
        f"its {name} is {stated[name]}, and the schedule's drafter has {value}"
        for name, value in _settings(config).items()
        if stated.get(name) is not None and stated[name] != value
    ]
    foreign = [key for key in OF_TARGETS if key in _all_keys(earlier.config)]
    if foreign:
        problems.append(f"its config.json has {', '.join(foreign)}, and a drafter here rotates every channel")
    problems += [f"its {problem}" for problem in rotary_problems(earlier.config)]
    problems += _left_over(earlier.config["dflash_config"], _settings(config))
    problems += _tensor_problems(read_header(folder / "model.safetensors"), config)
    if problems:
        key = f"drafter.init = {orjson.dumps(str(folder)).decode()}"
        raise ScheduleError("\n".join(f"{key}: {problem}" for problem in problems))


def _left_over(inner: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Keys of `dflash_config` that nobody here reads, unless they say null or what the schedule says."""
    return [
        f"its dflash_config has {name} = {value}, which is not read here and may change what a drafter "
        "computes; if it doesn't, remove it from that config.json"
        for name, value in sorted(inner.items())
        if name not in INNER_KEYS and value is not None and (name not in settings or settings[name] != value)
    ]


def _settings(config: DrafterConfig) -> dict[str, Any]:
    """What decides what a drafter computes, by the names in its `config.json`."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "head_dim": config.head_dim,
        "hidden_act": ACTIVATION,
        "attention_bias": False,
        "max_position_embeddings": config.max_position_embeddings,
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "causality inside a block": [config.causal_in_block(kind) for kind in config.layer_types],
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
    }


def _settings_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of each of those; None where it is silent."""
    settings = dict(found)
    settings |= {name: found["dflash_config"].get(name) for name in ("target_layer_ids", "mask_token_id")}
    tables = [found, *(found.get(form) for form in ROPE_FORMS)]
    bases = [table["rope_theta"] for table in tables if isinstance(table, dict) and table.get("rope_theta")]
    settings["rope_theta"] = float(bases[0]) if bases else None
    types = found.get("layer_types") or []
    sliding = [kind != FULL for kind in types]
    settings["sliding_window"] = found.get("sliding_window") if any(sliding) else None
    if types:
        stated = found.get("is_causal")
        settings["causality inside a block"] = sliding if stated is None else [bool(stated)] * len(types)
    return settings


def _all_keys(config: Mapping[str, Any]) -> set[str]:
    keys = set(config)
    for value in config.values():
        keys |= _all_keys(value) if isinstance(value, dict) else set()
    return keys


def _tensor_problems(header: Mapping[str, TensorEntry], config: DrafterConfig) -> list[str]:
    from engine.dflash.export import tensor_shapes

    expected = tensor_shapes(config)
    problems = [
        f"its {old} and its {new} are the same tensor of a drafter, which can take one"
        for old, new in RENAMED.items()
        if old in header and new in header
    ]
    header = {RENAMED.get(name, name): entry for name, entry in header.items()}
    problems += [f"it lacks {name}" for name in sorted(expected.keys() - header.keys())]
    problems += [
        f"its {name} belongs to no DFlash drafter, and nothing may be left over"
        for name in sorted(header.keys() - expected.keys() - OF_THE_TARGET)
    ]
    problems += [
        f"its {name} has shape {list(header[name].shape)}, and the schedule's drafter wants {list(shape)}"
        for name, shape in expected.items()
        if name in header and header[name].shape != shape
    ]
    problems += [
        f"its {name} is stored as {header[name].dtype}; weights here are one of {', '.join(FLOATING)}"
        for name in expected
        if name in header and header[name].dtype not in FLOATING
    ]
    return problems


def warm_start(
    drafter: Drafter, folder: Path, shared: SharedWeights, target: Path | None = None
) -> list[str]:
    """Fill a drafter with an earlier one's weights, in its own dtype and on its own device.

    Args:
        shared: the target's embedding and head; copies in the file have to be these.
        target: the folder of the target's weights, for a copy of its final norm; None where they are drawn.

    Returns:
        A line for every tensor in the file and for every setting that the file does not state.

    Raises:
        ScheduleError, CheckpointError: as `check_warm_start`, or a copy is another target's.
        NonFinite: a tensor holds a NaN or, in float32, an infinity.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from engine.dflash.export import fill_drafter

    check_warm_start(folder, drafter.config)
    earlier = read_earlier(folder)
    path = folder / "model.safetensors"
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    lines = [f"drafter.init: {folder} in the {earlier.layout} layout"]
    taken = {}
    for name, tensor in stored.items():
        what = f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        if name in OF_THE_TARGET:
            lines.append(f"  left: {what}, {compare_copy(name, tensor, shared, target, path)}")
            continue
        if not bool(tensor.float().isfinite().all()):
            raise NonFinite(f"{path}: its {name} holds NaN or infinite values; take an earlier checkpoint")
        new = RENAMED.get(name, name)
        taken[new] = tensor
        lines.append(f"  taken: {what}" + (f" as {new}" if new != name else ""))
    fill_drafter(drafter, taken, str(path))
    stated = _settings_of(earlier.config)
    unstated = [name for name in _settings(drafter.config) if stated.get(name) is None]
    if SLIDING not in drafter.config.layer_types:
        unstated = [name for name in unstated if name != "sliding_window"]
    if unstated:
        lines.append(f"  not stated there, so the schedule's: {', '.join(unstated)}")
    return lines
