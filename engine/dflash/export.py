"""A drafter as the folder that servers read: `model.safetensors` and `config.json`.

Servers skip tensor names they do not know, in silence, so the set of names is asserted here on
the way out and on the way in: nothing missing, nothing left over.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import Drafter
from engine.errors import CheckpointError
from engine.tensor_file import write_tensors

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


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
        CheckpointError: the names are not the layout's, or the layout cannot be served.
    """
    check_names(set(weights), config.layers, "this drafter")
    dtype = getattr(torch, config.dtype)
    stored = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    server = config.to_server_json()
    write_tensors(folder / WEIGHTS, stored, metadata={"format": "pt"}, between=between)
    (folder / CONFIG).write_bytes(orjson.dumps(server, option=orjson.OPT_INDENT_2) + b"\n")


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The configuration of an exported drafter; CheckpointError names the file that cannot be used."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; expected a drafter's folder")
    try:
        return DrafterConfig.from_server_json(orjson.loads(path.read_bytes()), str(path))
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error


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
