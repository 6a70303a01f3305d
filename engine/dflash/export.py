"""A drafter as the folder that servers read: `model.safetensors` and `config.json`.

Servers skip tensor names they do not know, in silence, so the set of names is asserted here on
the way out and on the way in: nothing missing, nothing left over. What a folder says is judged from
its files after writing, key by key, and not from the objects that they were written from.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.dflash.configuration import FULL, SLIDING, DrafterConfig
from engine.dflash.drafter import Drafter
from engine.errors import CheckpointError
from engine.tensor_file import DTYPES, TensorEntry, read_header, write_tensors

WEIGHTS = "model.safetensors"
CONFIG = "config.json"

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
    "block_size",
)
"""Keys that hold a positive number."""

FIXED = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
"""Keys whose value is the same in every folder."""

OTHERS = (
    "dtype",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "dflash_config",
)


def exported_names(layers: int) -> set[str]:
    """The 3 + 11·layers tensor names of the layout, and no others."""
    projections = [f"self_attn.{name}_proj" for name in "qkvo"]
    projections += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    each = [f"layers.{layer}.{name}.weight" for layer in range(layers) for name in projections + norms]
    return {"fc.weight", "hidden_norm.weight", "norm.weight", *each}


def check_names(names: set[str], layers: int, source: str) -> None:
    """Raise CheckpointError unless `names` is exactly the layout's set."""
    expected = exported_names(layers)
    if names != expected:
        missing, foreign = sorted(expected - names), sorted(names - expected)
        raise CheckpointError(
            f"{source}: a drafter of {layers} layers has {len(expected)} tensors; missing: "
            f"{', '.join(missing[:4]) or 'none'}; not of the layout: {', '.join(foreign[:4]) or 'none'}"
        )


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the layout, by name."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    width, kv_width = config.heads * head, config.kv_heads * head
    of_layers = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, width),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.layers):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layers.items()}
    return shapes


def check_layout(folder: Path) -> None:
    """Judge a folder by its files: every key of `config.json`, every tensor's name, shape and dtype.

    Raises:
        CheckpointError: everything that a server would stumble over or misread, one problem a line.
    """
    path = folder / CONFIG
    config = read_drafter_config(folder)  # names what is missing altogether
    header = read_header(folder / WEIGHTS)
    problems = list(layout_problems(orjson.loads(path.read_bytes())))
    problems += tensor_problems(header, config)
    if problems:
        raise CheckpointError("\n".join(f"{folder}: {problem}" for problem in problems))


def layout_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What in a `config.json` is not as the layout has it; the list of its keys is closed."""
    known = {*FIXED, *SIZES, *OTHERS}
    for key in sorted(known - config.keys()):
        yield f"{key} is missing"
    for key in sorted(config.keys() - known - {"is_causal"}):
        yield f"{key} is no key of the layout, and a server may act on it"
    if not known <= config.keys():
        return
    for key, value in FIXED.items():
        if config[key] != value:
            yield f"{key} = {config[key]}: expected {value}"
    for key in SIZES:
        if not isinstance(config[key], int) or config[key] < 1:
            yield f"{key} = {config[key]}: expected a positive number"
    inner, types = config["dflash_config"], config["layer_types"]
    if set(inner) != {"target_layer_ids", "mask_token_id", "block_size"}:
        yield f"dflash_config has {', '.join(sorted(inner))}: not the three keys that it should"
        return
    if inner["block_size"] != config["block_size"]:
        yield f"block_size = {config['block_size']}, and dflash_config has {inner['block_size']}"
    taps = inner["target_layer_ids"]
    if taps != sorted(set(taps)) or not taps or taps[0] < 0 or taps[-1] > config["num_target_layers"] - 2:
        yield f"target_layer_ids = {taps}: expected distinct, increasing layers up to the last but one"
    if not 0 <= inner["mask_token_id"] < config["vocab_size"]:
        yield f"mask_token_id = {inner['mask_token_id']}: not of the vocabulary"
    if len(types) != config["num_hidden_layers"] or not set(types) <= {FULL, SLIDING}:
        yield f"layer_types = {types}: expected one of the two kinds for each layer"
    slides = SLIDING in types
    if config["use_sliding_window"] is not slides or bool(config["sliding_window"]) is not slides:
        yield (
            f"sliding_window = {config['sliding_window']}, use_sliding_window = "
            f"{config['use_sliding_window']}: do not go with layer_types {types}"
        )
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    if config["rope_parameters"] != rope:
        yield f"rope_parameters = {config['rope_parameters']}: expected {rope}"
    uniform = len(set(types)) == 1
    if not uniform and "is_causal" in config:
        yield "is_causal is stated, and a mixed layout leaves it out"
    if uniform and not isinstance(config.get("is_causal"), bool):
        yield "is_causal is not stated, and a uniform layout states it"
    if uniform and config.get("is_causal") and not slides:
        yield "is_causal is true for layers that see their whole block"


def tensor_problems(header: Mapping[str, TensorEntry], config: DrafterConfig) -> Iterator[str]:
    """What in a file's header is not as the layout has it."""
    shapes = tensor_shapes(config)
    dtype = {str(known): name for known, name in DTYPES.items()}.get(f"torch.{config.dtype}")
    for name in sorted(shapes.keys() - header.keys()):
        yield f"{name} is missing"
    for name in sorted(header.keys() - shapes.keys()):
        yield f"{name} is no tensor of the layout, and a server would skip it in silence"
    for name in sorted(header.keys() & shapes.keys()):
        if header[name].shape != shapes[name]:
            yield f"{name} has shape {list(header[name].shape)}: expected {list(shapes[name])}"
        if header[name].dtype != dtype:
            yield f"{name} is stored as {header[name].dtype}, and config.json says {config.dtype}"


def write_drafter(
    folder: Path,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Write a servable drafter into an existing folder.

    Args:
        weights: by parameter name; stored in `config.dtype`.
        between: called between pieces of the file, see `engine.tensor_file`.

    Raises:
        CheckpointError: the names are not the layout's, the layout cannot be served, or what stands on
            the disk afterwards is not as it should be.
    """
    check_names(set(weights), config.layers, "this drafter")
    dtype = getattr(torch, config.dtype)
    stored = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    server = config.to_server_json()
    write_tensors(folder / WEIGHTS, stored, metadata={"format": "pt"}, between=between)
    (folder / CONFIG).write_bytes(orjson.dumps(server, option=orjson.OPT_INDENT_2) + b"\n")
    check_layout(folder)


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The configuration of an exported drafter; CheckpointError names the file that cannot be used."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; expected a drafter's folder")
    try:
        stated = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if isinstance(stated, dict) and "speculators_model_type" in stated:
        raise CheckpointError(
            f"{path}: a drafter in the speculators layout, which servers and drafter.init read; here give "
            "the run that it came from, or an export with --format dflash"
        )
    return DrafterConfig.from_server_json(stated, str(path))


def read_drafter_weights(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """The tensors of an exported drafter on the CPU, names asserted."""
    path = folder / WEIGHTS
    try:
        weights = load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: no {WEIGHTS}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: corrupt: {error}") from error
    check_names(set(weights), config.layers, str(path))
    return weights


@torch.no_grad()
def fill_drafter(drafter: Drafter, weights: dict[str, Tensor], source: str) -> None:
    """Copy weights into a drafter, in its own dtype and on its own device.

    Raises:
        CheckpointError: a tensor has another shape than the drafter's.
    """
    for name, parameter in drafter.named_parameters():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(weights[name].shape)}; "
                f"the schedule's drafter wants {tuple(parameter.shape)}"
            )
        parameter.copy_(weights[name])
