"""A drafter as the folder that the speculators library loads, and vLLM through it.

The tensors are those of the other layout; the configuration says the same things in other places. Two
of them are traps. That library counts hidden states, of which the embedding's output is number 0, so a
tap on layer i is `i + 1` there. And it has one flag for causality, which it applies to sliding layers
and vLLM to every layer: a uniform drafter can be described so that both are right, a mixed one cannot.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch
from torch import Tensor

from engine.dflash.configuration import DrafterConfig
from engine.dflash.export import CONFIG, WEIGHTS, check_names, tensor_problems
from engine.errors import CheckpointError
from engine.tensor_file import read_header, write_tensors

LIBRARY_VERSION = "0.9.0"
"""The release whose layout this is."""


@attrs.frozen(kw_only=True)
class Verifier:
    """The target as the library will look for it: it takes embedding and head from there."""

    name_or_path: str
    """A Hub name or a folder."""
    architectures: tuple[str, ...]
    """As the target's `config.json` names them."""


def to_speculators_json(config: DrafterConfig, verifier: Verifier) -> dict[str, Any]:
    """The `config.json` of that layout.

    Raises:
        CheckpointError: a layout with sliding and full layers, which vLLM would serve wrongly from it.
    """
    if len(set(config.layer_types)) > 1:
        raise CheckpointError(
            "the speculators layout has one flag for causality, and vLLM applies it to sliding and full "
            "layers alike, so this mixed drafter would be served otherwise than it was trained; export it "
            "with --format dflash, which vLLM and SGLang read layer by layer"
        )
    server = config.to_server_json()
    here = ("architectures", "dtype", "block_size", "dflash_config", "num_target_layers", "is_causal")
    layer = {name: value for name, value in server.items() if name not in here}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": LIBRARY_VERSION,
        "dtype": config.dtype,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,  # slot 0 predicts nothing
        "sliding_window_non_causal": not server["is_causal"],
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
    }


def write_speculators(
    folder: Path, config: DrafterConfig, weights: Mapping[str, Tensor], verifier: Verifier
) -> None:
    """Write a drafter in that layout into an existing folder, and judge the file that was written.

    Args:
        weights: by parameter name; stored in `config.dtype`. Embedding and head stay the target's.

    Raises:
        CheckpointError: as `to_speculators_json`, or the tensors are not a drafter's.
    """
    check_names(set(weights), config.layers, "this drafter")
    described = to_speculators_json(config, verifier)
    dtype = getattr(torch, config.dtype)
    stored = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    write_tensors(folder / WEIGHTS, stored, metadata={"format": "pt"})
    (folder / CONFIG).write_bytes(orjson.dumps(described, option=orjson.OPT_INDENT_2) + b"\n")
    problems = list(tensor_problems(read_header(folder / WEIGHTS), config))
    if problems:
        raise CheckpointError("\n".join(f"{folder}: {problem}" for problem in problems))
