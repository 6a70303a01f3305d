"""float32 master weights: gradient sums, AdamW, and the way back into the compute dtype.

bfloat16 weights lose updates smaller than 1/256 of themselves, which at these learning rates is
most of them; so the optimizer works on float32 copies. A drafter that computes in float32 is its
own master and nothing is copied.

Micro-batches add unnormalised gradients of `Σ w·CE`, in their order, in float32. A step divides the
sums once by `Σ w` over all of them, checks that they are finite, clips, and updates.
"""

import math

import torch
from torch import Tensor

from engine.dflash.drafter import Drafter
from engine.errors import CheckpointError, NonFinite


def learning_rate(step: int, total_steps: int, *, lr: float, min_lr: float, warmup: float) -> float:
    """Linear warm-up over a share of all steps, then a cosine to `min_lr`; a function of the step alone."""
    rising = math.ceil(warmup * total_steps)
    if step < rising:
        return lr * (step + 1) / rising
    progress = (step - rising) / max(total_steps - 1 - rising, 1)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


class Masters:
    """Master weights and AdamW's state of one drafter, by the drafter's parameter names."""

    def __init__(self, drafter: Drafter, *, betas: tuple[float, float], weight_decay: float) -> None:
        self.parameters = dict(drafter.named_parameters())
        self.own = all(parameter.dtype == torch.float32 for parameter in self.parameters.values())
        if self.own:
            self.weights = self.parameters
        else:
            self.weights = {
                name: torch.nn.Parameter(parameter.detach().float())
                for name, parameter in self.parameters.items()
            }
        # Norm weights are scales around one: decay would pull them to zero.
        matrices = [weight for weight in self.weights.values() if weight.dim() > 1]
        vectors = [weight for weight in self.weights.values() if weight.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=betas,
            fused=True,
        )

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the drafter's gradients to the float32 sums and clear them."""
        if self.own:
            return  # autograd has added them already
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            weight = self.weights[name]
            if weight.grad is None:
                weight.grad = parameter.grad.float()
            else:
                weight.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def step(self, weight_sum: float, *, lr: float, clip: float) -> float:
        """Divide by Σ w, check, clip, update, write back; returns the gradient norm before clipping.

        Raises:
            NonFinite: names the first parameter whose gradient is not finite. Nothing is updated.
        """
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        torch._foreach_div_(gradients, weight_sum)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise NonFinite(self._first_bad())
        torch.nn.utils.clip_grads_with_norm_(list(self.weights.values()), clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not self.own:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.weights[name])
        return float(norm)

    def _first_bad(self) -> str:
        for name, weight in self.weights.items():
            if weight.grad is not None and not torch.isfinite(weight.grad).all():
                bad = int((~torch.isfinite(weight.grad)).sum())
                return f"gradient of {name} is not finite ({bad:,} of {weight.numel():,} numbers)"
        return "the norm of all gradients overflows float32, though each gradient is finite"

    def discard(self) -> None:
        """Drop the sums of a step in which nothing was supervised."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and step counters as flat tensors, for a checkpoint."""
        out = {}
        for name, weight in self.weights.items():
            out[f"master.{name}"] = weight.detach()
            out.update({f"{key}.{name}": value for key, value in self.optimizer.state[weight].items()})
        return out

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; step counters keep their type.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        left = dict(state)
        for name, weight in self.weights.items():
            saved = left.pop(f"master.{name}", None)
            if saved is None or saved.shape != weight.shape:
                found = "missing" if saved is None else f"of shape {tuple(saved.shape)}"
                raise CheckpointError(f"master.{name} is {found}; expected {tuple(weight.shape)}")
            weight.copy_(saved)
            self.parameters[name].copy_(weight)
            moments = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in left:
                    # AdamW's fused kernels want their counters beside the weights.
                    moments[key] = left.pop(f"{key}.{name}").to(weight.device, copy=True)
            if moments:
                self.optimizer.state[weight] = moments
        if left:
            raise CheckpointError(f"optimizer state for unknown parameters: {', '.join(sorted(left)[:3])} …")
