"""AdamW on the float32 masters, fused: one kernel for all parameters of a device.

Betas and weight decay are the schedule's `train.betas` and `train.weight_decay`. An update of one
parameter depends on no other, so masters can be shared out over drafters without changing a bit.
"""

import attrs
import torch

from engine.hookspecs import hookimpl
from engine.schedule import Train


@attrs.frozen(kw_only=True)
class Options:
    """None: the recipe stands in [train]."""


class AdamW:
    @hookimpl
    def make_optimizer(
        self, parameters: dict[str, torch.nn.Parameter], train: Train
    ) -> torch.optim.Optimizer:
        # Norm weights are scales around one: decay would pull them to zero.
        matrices = [weight for weight in parameters.values() if weight.dim() > 1]
        vectors = [weight for weight in parameters.values() if weight.dim() == 1]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": train.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=train.betas,
            fused=True,
        )

    @hookimpl
    def optimizer_state_bytes(self, shape: torch.Size) -> int:
        return 8 * shape.numel()  # two float32 moments


def make(options: Options) -> AdamW:
    return AdamW()
