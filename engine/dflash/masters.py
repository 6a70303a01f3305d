"""float32 master weights: gradient sums, the optimizer's update, and the way back.

bfloat16 weights lose updates smaller than 1/256 of themselves, which at these learning rates is
most of them; so the optimizer works on float32 copies. A drafter that computes in float32 is its
own master and nothing is copied.

Micro-batches add unnormalised gradients of `Σ w·CE`, in their order, in float32. A step divides the
sums once by `Σ w` over all of them, checks that they are finite, clips, and updates. Several drafters
share the masters out at parameter borders: each keeps and updates some, receives the others'
gradients for these, and sends the new weights around. One drafter alone goes through the same
functions, so that the plain loop and a lane compute the same bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.dflash.drafter import Drafter
from engine.errors import CheckpointError, NonFinite

NORM_OVERFLOWS = "the norm of the whole gradient is not finite, while each parameter's is"

MakeOptimizer = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of some master weights, by parameter name."""


def learning_rate(step: int, total_steps: int, *, lr: float, min_lr: float, warmup: float) -> float:
    """Linear warm-up over a share of all steps, then a cosine to `min_lr`; a function of the step alone."""
    rising = math.ceil(warmup * total_steps)
    if step < rising:
        return lr * (step + 1) / rising
    progress = (step - rising) / max(total_steps - 1 - rising, 1)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def share_out(sizes: Mapping[str, int], shares: int) -> list[list[str]]:
    """Parameter names in `shares` runs of about equal size, in their order; a run may be empty."""
    total = sum(sizes.values())
    runs: list[list[str]] = [[] for _ in range(shares)]
    before = 0
    for name, size in sizes.items():
        middle = before + size / 2
        runs[min(int(middle * shares / total), shares - 1)].append(name)
        before += size
    return runs


def total_norm(norms: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Norm of the whole gradient from the norms of its parameters, taken in the order of `names`."""
    return torch.linalg.vector_norm(torch.stack([norms[name] for name in names]))


class Masters:
    """The master weights that one drafter keeps, and the float32 gradient sums of all its parameters."""

    def __init__(
        self, drafter: Drafter, make_optimizer: MakeOptimizer, names: Sequence[str] | None = None
    ) -> None:
        """
        Args:
            make_optimizer: called with the kept masters.
            names: of the parameters whose masters are kept here; all by default.
        """
        self.parameters: dict[str, nn.Parameter] = dict(drafter.named_parameters())
        self.names = list(self.parameters) if names is None else list(names)
        self.own = all(parameter.dtype == torch.float32 for parameter in self.parameters.values())
        self.weights = {
            name: parameter if self.own else nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
            if name in set(self.names)
        }
        self.optimizer = make_optimizer(dict(self.weights)) if self.weights else None
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the drafter's gradients to the float32 sums and clear them."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if name in self._sums:
                self._sums[name] += parameter.grad
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None

    def sums(self) -> dict[str, Tensor]:
        """The float32 gradient sums of every parameter that has one; the step begins anew after it."""
        sums, self._sums = self._sums, {}
        return sums

    @torch.no_grad()
    def receive(self, sums: Sequence[Mapping[str, Tensor]], weight_sum: float) -> dict[str, Tensor]:
        """Add up the drafters' sums for the kept masters and divide once.

        Args:
            sums: of all drafters, in their order, on this device; only kept names are read.
            weight_sum: Σ w over every micro-batch of the step.

        Returns:
            The norm of each kept parameter's gradient, float32 scalars.
        """
        norms = {}
        for name, weight in self.weights.items():
            given = [one[name] for one in sums if name in one]
            if not given:
                continue
            total = given[0]
            for other in given[1:]:
                total = total + other
            # The sums of one drafter are nobody else's; those of several were added into a new tensor.
            weight.grad = total.div_(weight_sum)
            norms[name] = torch.linalg.vector_norm(weight.grad)
        return norms

    @torch.no_grad()
    def update(self, norm: Tensor, *, lr: float, clip: float) -> None:
        """Clip to a norm of the whole gradient and update the kept masters and their parameters.

        Args:
            norm: finite, on the masters' device.
        """
        if self.optimizer is None:
            return
        nn.utils.clip_grads_with_norm_(list(self.weights.values()), clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not self.own:
            for name, weight in self.weights.items():
                self.parameters[name].copy_(weight)

    def first_bad(self, norms: Mapping[str, float]) -> str | None:
        """The first kept parameter whose gradient is not finite, in words; None where all are."""
        for name in (name for name, norm in norms.items() if not math.isfinite(norm)):
            gradient = self.weights[name].grad
            if gradient is not None:
                bad = int((~torch.isfinite(gradient)).sum())
                return f"gradient of {name} is not finite ({bad:,} of {gradient.numel():,} numbers)"
        return None

    def step(self, weight_sum: float, *, lr: float, clip: float) -> float:
        """The whole update where one drafter keeps everything; returns the norm before clipping.

        Raises:
            NonFinite: names the first parameter whose gradient is not finite. Nothing is updated, and
                the next step begins anew.
        """
        norms = self.receive([self.sums()], weight_sum)
        norm = total_norm(norms, [name for name in self.parameters if name in norms])
        if not torch.isfinite(norm):
            bad = self.first_bad({name: float(one) for name, one in norms.items()})
            self.discard()
            raise NonFinite(bad or NORM_OVERFLOWS)
        self.update(norm, lr=lr, clip=clip)
        return float(norm)

    def discard(self) -> None:
        """Drop the gradients of a step that updates nothing."""
        self._sums = {}
        for weight in self.weights.values():
            weight.grad = None

    def state(self) -> dict[str, Tensor]:
        """Kept masters and their optimizer state as flat tensors `<key>.<parameter>`, for a checkpoint."""
        out = {}
        for name, weight in self.weights.items():
            out[f"master.{name}"] = weight.detach()
            state = self.optimizer.state[weight] if self.optimizer else {}
            out.update({f"{key}.{name}": value for key, value in state.items()})
        return out

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restore kept masters and their optimizer state from all drafters' states; fill the drafter.

        Raises:
            CheckpointError: a master is missing or has another shape, or a tensor belongs to no parameter.
        """
        state: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        for full_name, tensor in saved.items():
            key, _, name = full_name.partition(".")
            if name not in state:
                raise CheckpointError(f"{full_name}: the checkpoint holds it, and there is no such parameter")
            state[name][key] = tensor
        for name, parameter in self.parameters.items():
            master = state[name].pop("master", None)
            if master is None or master.shape != parameter.shape:
                found = "missing" if master is None else f"of shape {tuple(master.shape)}"
                raise CheckpointError(f"master.{name} is {found}; expected {tuple(parameter.shape)}")
            parameter.copy_(master)
            if name in self.weights:
                self.weights[name].copy_(master)
                if state[name] and self.optimizer:
                    # The optimizer's fused kernels want their step counters beside the weights.
                    self.optimizer.state[self.weights[name]] = {
                        key: tensor.to(parameter.device, copy=True) for key, tensor in state[name].items()
                    }
