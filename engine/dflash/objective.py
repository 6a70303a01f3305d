"""Cross-entropy of the blocks, weighted, with the vocabulary never held whole.

The head is frozen, so all that the backward pass needs of a row of logits is its gradient with
respect to one hidden vector. That vector, softmax(logits) - onehot(label) times the head, is
formed while the logits of a few rows exist; nothing of the vocabulary's size survives the
forward pass and nothing is computed twice. It is kept per row unweighted, because some
objectives (D-PACE) know a row's weight only when the whole block's entropies are known.

`L = Σ w·CE / Σ w` is a quotient of sums over every micro-batch and drafter of a step, so what is
returned, and back-propagated, is the numerator; the optimizer divides once.
"""

import math
from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

BlockWeights = Callable[[Tensor, Tensor], Tensor]
"""(cross_entropy float32 [N, B-1], detached; supervised bool [N, B-1]) → weights float32 [N, B-1]"""


def decay_weights(gamma: float | None) -> BlockWeights:
    """w_k = exp(-(k-1)/γ) on supervised slots; equal weights where γ is None."""

    def weights(cross_entropy: Tensor, supervised: Tensor) -> Tensor:
        k = torch.arange(cross_entropy.shape[1], device=cross_entropy.device)
        decay = torch.ones_like(cross_entropy) if gamma is None else torch.exp(-k / gamma)
        return decay * supervised

    return weights


def dpace_weights(alpha: float) -> BlockWeights:
    """D-PACE (arXiv 2605.18810): a slot weighs as much as the tokens that stand or fall with it.

    q_k = exp(-CE_k), s_k = (1-α) q_k + α (1 where unsupervised), C_k = Π_{j≤k} s_j and
    w_k = Σ_{m≥k, m supervised} C_m.
    """

    def weights(cross_entropy: Tensor, supervised: Tensor) -> Tensor:
        survival = (1 - alpha) * torch.exp(-cross_entropy) + alpha
        reached = torch.where(supervised, survival, 1.0).cumprod(1) * supervised  # C_m of valid m
        return reached.flip(1).cumsum(1).flip(1) * supervised

    return weights


ChunkSoftmax = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor | None]]
"""(logits [C, V] in the head's dtype, free to be overwritten; labels int64 [C]; whether to form gradients) →
cross-entropy float32 [C], argmax int64 [C], softmax(logits) - onehot(labels) [C, V] in the logits' dtype"""


def chunk_softmax(
    logits: Tensor, labels: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The reference of a `ChunkSoftmax`, on any device: in float32, operation by operation."""
    dtype, logits, label = logits.dtype, logits.float(), labels[:, None]
    predicted = logits.argmax(-1)
    log_sum = logits.logsumexp(-1, keepdim=True)
    cross_entropy = (log_sum - logits.gather(1, label)).squeeze(1)
    if not with_gradient:
        return cross_entropy, predicted, None
    probability = logits.sub_(log_sum).exp_()
    probability.scatter_add_(1, label, torch.full_like(log_sum, -1.0))
    return cross_entropy, predicted, probability.to(dtype)


class _HeadCrossEntropy(torch.autograd.Function):
    """Per-row cross-entropy through a frozen head; see the module's opening."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        chunk: int,
        needed: int,
        softmax: ChunkSoftmax,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        computed = min(rows, -(-needed // chunk) * chunk)
        cross_entropy = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        predicted = torch.empty(rows, dtype=torch.int64, device=hidden.device)
        gradient = torch.empty_like(hidden) if with_gradient else None
        for start in range(0, computed, chunk):
            part = slice(start, min(start + chunk, rows))
            # [chunk, V]; its only reference is handed over, so that no two chunks' logits exist at once.
            cross_entropy[part], predicted[part], change = softmax(
                F.linear(hidden[part], head), labels[part], with_gradient
            )
            if gradient is not None and change is not None:
                torch.mm(change, head, out=gradient[part])
            del change
        for left in (cross_entropy, predicted, gradient):
            if left is not None:
                left[computed:] = 0
        ctx.mark_non_differentiable(predicted)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return cross_entropy, predicted

    @staticmethod
    def backward(ctx, grad_cross_entropy: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_cross_entropy[:, None]).to(gradient.dtype), *([None] * 6)


def head_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    chunk: int,
    *,
    needed: int | None = None,
    softmax: ChunkSoftmax = chunk_softmax,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and argmax of `hidden @ headᵀ`, a chunk of rows at a time.

    Args:
        hidden: [rows, H]; differentiable.
        head: [V, H], frozen: no gradient is formed for it.
        labels: int64 [rows].
        chunk: rows whose logits exist at one time; part of the numbers' meaning.
        needed: how many rows, the first ones, anybody asks for; all by default. Chunks of the others are
            left out and their entropies are 0; every product keeps its shape.

    Returns:
        cross_entropy: float32 [rows], differentiable. predicted: int64 [rows].
    """
    with_gradient = torch.is_grad_enabled() and hidden.requires_grad
    needed = hidden.shape[0] if needed is None else needed
    return _HeadCrossEntropy.apply(hidden, head, labels, chunk, needed, softmax, with_gradient)


@attrs.frozen
class BlockLoss:
    """What the blocks of one micro-batch say about the drafter, on its device."""

    loss_sum: Tensor
    """Σ w·CE, float32 scalar; differentiable."""
    weight_sum: Tensor
    """Σ w, float32 scalar."""
    right: Tensor
    """bool [N, B-1]: a supervised slot whose argmax is its label."""
    supervised: Tensor
    """bool [N, B-1]."""
    predicted: Tensor
    """int64 [N, B-1]: the drafter's most likely tokens."""


def block_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    supervised: Tensor,
    *,
    weights: BlockWeights,
    chunk: int,
    used: int | None = None,
    softmax: ChunkSoftmax = chunk_softmax,
) -> BlockLoss:
    """Loss and hits of N blocks. Slot 0, which predicts nothing, never reaches the head.

    Args:
        hidden: [N·B, H], the drafter's output.
        head: [V, H]. labels: int64 [N, B-1]; supervised: bool [N, B-1]; all on hidden's device.
        used: how many blocks, the first ones, hold an anchor; all by default. Of the others only those
            that share a chunk with these reach the head.
    """
    blocks, slots = labels.shape
    rows = hidden.view(blocks, slots + 1, -1)[:, 1:].reshape(blocks * slots, -1)
    needed = None if used is None else used * slots
    cross_entropy, predicted = head_cross_entropy(
        rows, head, labels.flatten(), chunk, needed=needed, softmax=softmax
    )
    cross_entropy = cross_entropy.view(blocks, slots)
    w = weights(cross_entropy.detach(), supervised)
    predicted = predicted.view(blocks, slots)
    right = (predicted == labels) & supervised
    return BlockLoss((w * cross_entropy).sum(), w.sum(), right, supervised, predicted)


@attrs.define
class BlockCounts:
    """Sums behind the metrics of a step; numerators and denominators are added, never quotients.

    The sums stay on the drafter's device; only reading a property waits for it.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    right_by_slot: Tensor
    supervised_by_slot: Tensor
    prefix_sum: Tensor
    anchors: int = 0

    @classmethod
    def zeros(cls, block_size: int, device: torch.device) -> "BlockCounts":
        by_slot = torch.zeros(block_size - 1, dtype=torch.int64, device=device)
        scalar = torch.zeros((), dtype=torch.float64, device=device)
        return cls(scalar, scalar, by_slot, by_slot, by_slot.new_zeros(()))

    def add(self, loss: BlockLoss, used: int) -> None:
        """Take in one micro-batch of which the first `used` blocks hold an anchor."""
        right = loss.right[:used]
        self.loss_sum = self.loss_sum + loss.loss_sum.detach()
        self.weight_sum = self.weight_sum + loss.weight_sum
        self.right_by_slot = self.right_by_slot + right.sum(0)
        self.supervised_by_slot = self.supervised_by_slot + loss.supervised[:used].sum(0)
        self.prefix_sum = self.prefix_sum + leading_right(right).sum()
        self.anchors += used

    def __add__(self, other: "BlockCounts") -> "BlockCounts":
        """The sums of two drafters on one device."""
        return BlockCounts(
            self.loss_sum + other.loss_sum,
            self.weight_sum + other.weight_sum,
            self.right_by_slot + other.right_by_slot,
            self.supervised_by_slot + other.supervised_by_slot,
            self.prefix_sum + other.prefix_sum,
            self.anchors + other.anchors,
        )

    def cpu(self) -> "BlockCounts":
        """The sums on the CPU; waits for the device."""
        by_slot = torch.stack([self.right_by_slot, self.supervised_by_slot]).cpu()
        scalars = torch.stack([self.loss_sum, self.weight_sum, self.prefix_sum.double()]).cpu()
        return BlockCounts(scalars[0], scalars[1], by_slot[0], by_slot[1], scalars[2].long(), self.anchors)

    @property
    def loss(self) -> float:
        """Σ w·CE / Σ w in nats; NaN where nothing was supervised."""
        return float(self.loss_sum / self.weight_sum)

    @property
    def accuracy(self) -> float:
        return float(self.right_by_slot.sum() / self.supervised_by_slot.sum())

    @property
    def accuracy_by_slot(self) -> list[float]:
        """Share of right tokens at slots 1 … B-1; NaN where a slot was never supervised."""
        return (self.right_by_slot / self.supervised_by_slot).tolist()

    @property
    def block_prefix(self) -> float:
        """Mean number of leading right slots over the anchors, plus one."""
        return 1 + float(self.prefix_sum) / self.anchors if self.anchors else math.nan


def leading_right(right: Tensor) -> Tensor:
    """How many slots of each block are right before the first that is not: bool [N, B-1] → int64 [N]."""
    return right.long().cumprod(1).sum(1)
