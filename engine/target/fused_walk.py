"""From token ids to taps through fused layers, in place of the Hugging Face modules.

The tap of layer `i` is the sum that layer `i + 1` forms on its way in, so it costs nothing; only behind
the last layer an addition of its own is needed. A walk holds no state of a call: lanes that share a
device share a walk, and a second one over the same model is as good as the first.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.target.fused_layers import Batch, FusedLayer, fused_layers, positions
from engine.target.fused_operations import Operations
from engine.target.loading import Target
from engine.target.truncation import decoder_layers


@attrs.frozen(eq=False)
class FusedWalk:
    """A target's forward up to its last tap."""

    model: Any
    """The Hugging Face causal model that the embedding, the rotary positions and the matrices belong to."""
    layers: tuple[FusedLayer, ...]
    target_layer_ids: tuple[int, ...]
    operations: Operations
    device: torch.device
    checked: bool = False
    """Whether it was compared with float32, on this device."""

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> list[Tensor]:
        """As `Target.forward_taps`."""
        rows, length = input_ids.shape
        taps = []
        with on_device(self.device):
            batch = Batch(rows, length, *positions(self.model, length, self.device))
            branch: Tensor | None = None
            residual = F.embedding(input_ids.flatten(), self.model.get_input_embeddings().weight)  # [N, H]
            for number, layer in enumerate(self.layers):
                branch, residual, entered = layer(branch, residual, batch)
                if number - 1 in self.target_layer_ids:
                    taps.append(entered)
            if branch is not None:
                taps.append(residual + branch)
        return [tap.unflatten(0, (rows, length)) for tap in taps]

    def kernels(self) -> Mapping[str, str]:
        """What its operations run as."""
        return self.operations.names


def fused_walk(target: Target, operations: Operations) -> FusedWalk:
    """A walk over a target's own weights, as far as its last tap.

    Args:
        target: one for whose model `fused_layers.why_not` found nothing.
    """
    with on_device(target.device):
        return FusedWalk(
            model=target.model,
            layers=fused_layers(target.model, walked_layers(target), operations),
            target_layer_ids=target.target_layer_ids,
            operations=operations,
            device=target.device,
        )


def walked_layers(target: Target) -> list[nn.Module]:
    """The Hugging Face decoder layers up to the last tap."""
    _, layers = decoder_layers(target.model.base_model, target.model.config.num_hidden_layers)
    return list(layers)[: target.target_layer_ids[-1] + 1]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, where kernels are launched that do not look at their arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
