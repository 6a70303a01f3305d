"""float32 master weights: gradient sums, the optimizer's update, and the way back.

bfloat16 weights lose updates smaller than 1/256 of themselves, which at these learning rates is
most of them; so the optimizer works on float32 copies. A drafter that computes in float32 is its
own master and nothing is copied.

Micro-batches add unnormalised gradients of `Σ w·CE`, in their order, in float32. A step divides the
sums once by `Σ w` over all of them, checks that they are finite, clips, and updates. Several drafters
share the masters out at parameter borders: each keeps and updates some, receives the others'
gradients for these, and sends the new weights around. One drafter alone goes through the same
functions, so that the plain loop and a lane compute the same bits.

Sums may also stay in bfloat16, where the backward pass leaves them: micro-batches then add up in
bfloat16, the drafters' sums still in float32, and the optimizer is given float32 gradients of some
parameters at a time. For a drafter of 1.7 B parameters that is 10 GB less than float32 sums beside
the gradients of a backward pass.

A gradient of that size is read from memory as seldom as can be: once for its norm, and once for dividing
and clipping, which are one factor.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.dflash.drafter import Drafter
from engine.errors import CheckpointError, NonFinite

NORM_OVERFLOWS = "the norm of the whole gradient overflows, while every number of it is finite"

PIECE = 1 << 28
"""float32 gradients that exist at a time beside sums in bfloat16: 1.1 GB."""

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


def read_norms(norms: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars of a device as numbers, by one copy; waits for the device."""
    return dict(zip(norms, torch.stack(list(norms.values())).tolist(), strict=True)) if norms else {}


def total_norm(norms: Mapping[str, float], names: Sequence[str]) -> float:
    """Norm of the whole gradient from the norms of its parameters, taken in the order of `names`."""
    return float(torch.linalg.vector_norm(torch.tensor([norms[name] for name in names])))


def step_factor(norm: float, weight_sum: float, clip: float) -> float:
    """What gradient sums are multiplied with: divided by `Σ w`, and the whole no longer than `clip`.

    Args:
        norm: of the divided sums.
    """
    return min(1.0, clip / (norm + 1e-6)) / weight_sum


def _added(given: Sequence[Tensor]) -> Tensor:
    """Sums of one parameter added up in float32, in their order; one alone is itself."""
    if len(given) == 1:
        return given[0]
    total = given[0].float() + given[1]
    for other in given[2:]:
        total += other
    return total


def _scaled(given: Sequence[Tensor], factor: float) -> Tensor:
    """A new float32 gradient of sums in the drafter's dtype."""
    if len(given) == 1:
        # A float32 tensor of one dimension makes the product float32, in one pass; a number would not.
        return given[0] * torch.full((1,), factor, dtype=torch.float32, device=given[0].device)
    return _added(given).mul_(factor)


class Masters:
    """The master weights that one drafter keeps, and the gradient sums of all its parameters."""

    def __init__(
        self,
        drafter: Drafter,
        make_optimizer: MakeOptimizer,
        names: Sequence[str] | None = None,
        *,
        gradient_dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            make_optimizer: called with the kept masters.
            names: of the parameters whose masters are kept here; all by default.
            gradient_dtype: of the sums over a step's micro-batches; float32, or the drafter's own.
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
        self.wide = gradient_dtype == torch.float32
        """Whether sums are float32; else they are the parameters' own gradients."""
        self._sums: dict[str, Tensor] = {}
        self._received: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the drafter's gradients to the sums; where these are float32, clear the gradients."""
        if not self.wide:
            return  # autograd adds the next micro-batch's to them
        into, added = [], []
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if name in self._sums:
                into.append(self._sums[name])
                added.append(parameter.grad)
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None
        if into:
            torch._foreach_add_(into, added)

    def sums(self) -> dict[str, Tensor]:
        """The gradient sums of every parameter that has one; the step begins anew after it."""
        if self.wide:
            sums, self._sums = self._sums, {}
            return sums
        given = {name: one.grad for name, one in self.parameters.items() if one.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return given

    @torch.no_grad()
    def receive(self, sums: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Take in the drafters' sums for the kept masters; nothing waits for the device.

        Args:
            sums: of all drafters, in their order, on this device; only kept names are read. Those of one
                drafter alone are nobody else's, and are used up.

        Returns:
            The norm of each kept parameter's sum, float32 scalars.
        """
        given = {name: [one[name] for one in sums if name in one] for name in self.weights}
        self._received = {name: each for name, each in given.items() if each}
        if self.wide:
            self._received = {name: [_added(each)] for name, each in self._received.items()}
        if not self._received:
            return {}
        if all(len(each) == 1 for each in self._received.values()):
            totals = [each[0] for each in self._received.values()]
            norms = list(torch._foreach_norm(totals, 2, torch.float32))
        else:  # one at a time, or all of them would be there in float32
            norms = [torch.linalg.vector_norm(_added(each)) for each in self._received.values()]
        return dict(zip(self._received, norms, strict=True))

    @torch.no_grad()
    def update(self, factor: float, *, lr: float) -> None:
        """Multiply the received sums and update the kept masters and their parameters.

        Args:
            factor: what divides by `Σ w` and clips, from `step_factor`.
        """
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        pieces = [list(self._received)] if self.wide else self._pieces()
        for names in pieces:
            given = [self._received.pop(name) for name in names]
            if self.wide:
                gradients = [each[0] for each in given]
                torch._foreach_mul_(gradients, factor)
            else:
                gradients = [_scaled(each, factor) for each in given]
            del given
            weights = [self.weights[name] for name in names]
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            del gradients
            self.optimizer.step()
            for weight in weights:
                weight.grad = None
            if not self.own:
                served: list[Tensor] = [self.parameters[name] for name in names]
                torch._foreach_copy_(served, [weight.detach() for weight in weights])

    def _pieces(self) -> list[list[str]]:
        """The received names in runs of at most `PIECE` numbers, or of one parameter that is larger."""
        pieces: list[list[str]] = []
        room = 0
        for name, [first, *_] in self._received.items():
            if not pieces or first.numel() > room:
                pieces.append([])
                room = PIECE
            pieces[-1].append(name)
            room -= first.numel()
        return pieces

    @torch.no_grad()
    def first_bad(self, norms: Mapping[str, float]) -> str | None:
        """The first received sum that is not finite, in words; None where all are."""
        for name in (name for name, norm in norms.items() if not math.isfinite(norm)):
            total = _added(self._received[name])
            bad = int((~torch.isfinite(total)).sum())
            if bad:
                return f"gradient of {name} is not finite ({bad:,} of {total.numel():,} numbers)"
        return None

    def step(self, weight_sum: float, *, lr: float, clip: float) -> float:
        """The whole update where one drafter keeps everything; returns the norm before clipping.

        Raises:
            NonFinite: names the first parameter whose gradient is not finite. Nothing is updated, and
                the next step begins anew.
        """
        norms = read_norms(self.receive([self.sums()]))
        norm = total_norm(norms, [name for name in self.parameters if name in norms]) / weight_sum
        if not math.isfinite(norm):
            bad = self.first_bad(norms)
            self.discard()
            raise NonFinite(bad or NORM_OVERFLOWS)
        self.update(step_factor(norm, weight_sum, clip), lr=lr)
        return norm

    def discard(self) -> None:
        """Drop the gradients of a step that updates nothing."""
        self._sums, self._received = {}, {}
        for parameter in self.parameters.values():
            parameter.grad = None

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
