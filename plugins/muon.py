"""Muon for the matrices, AdamW for the norms: torch's own of both, as one optimizer.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal one, so that every
direction of the matrix moves alike. A small drafter learns about twice as much in a step with it; each
step costs five times three products of the matrix's size. Updates are scaled to the size of AdamW's
(`match_rms_adamw`), so that `train.lr` means the same under both.
"""

from collections.abc import Callable
from typing import Annotated, Any

import attrs
import torch

from engine.hookspecs import hookimpl
from engine.schedule import Train
from engine.toml_tables import Bounds


@attrs.frozen(kw_only=True)
class Options:
    """Of Muon; AdamW's betas and the weight decay are the schedule's."""

    momentum: Annotated[float, Bounds(at_least=0, below=1)] = 0.95
    """Share of the last momentum that stays, Nesterov's form."""
    iterations: Annotated[int, Bounds(at_least=1, below=100)] = 5
    """Newton-Schulz iterations towards the orthogonal matrix."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers behind one interface; their groups and their state are these."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update what each part holds. State that was put here, by a resume, goes to its part."""
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    if parameter in self.state:
                        part.state[parameter] = self.state[parameter]
            part.step(closure)
            for parameter, state in part.state.items():
                self.state[parameter] = state


class Muon:
    def __init__(self, options: Options) -> None:
        self.options = options

    @hookimpl
    def make_optimizer(
        self, parameters: dict[str, torch.nn.Parameter], train: Train
    ) -> torch.optim.Optimizer:
        matrices = [weight for weight in parameters.values() if weight.dim() == 2]
        vectors = [weight for weight in parameters.values() if weight.dim() != 2]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                momentum=self.options.momentum,
                ns_steps=self.options.iterations,
                weight_decay=train.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            parts.append(muon)
        if vectors:
            # Norm weights are scales around one: decay would pull them to zero.
            parts.append(torch.optim.AdamW(vectors, betas=train.betas, weight_decay=0.0, fused=True))
        return MuonAndAdamW(parts)

    @hookimpl
    def optimizer_state_bytes(self, shape: torch.Size) -> int:
        return (4 if len(shape) == 2 else 8) * shape.numel()  # a matrix has its momentum alone


def make(options: Options) -> Muon:
    return Muon(options)
