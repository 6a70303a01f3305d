"""Whether all drafters still have the same weights: replicas compared by checksum every so many steps.

Each step ends with every drafter having the same weights, bit for bit, and the next one's update hides
whatever happened to a replica in between. So the weights that computed a step's gradients are summed up
before the update, at every step, on the drafter's own device and without waiting for it; the sums of the
steps since the last comparison are folded into one number a parameter. Every `run.check_every` steps
these numbers meet. So one flipped bit is found although a later step has healed it.

The sum is one of integers, exact in any order: rows as words of up to 64 bits, modulo 2^64, each row's
sum times an odd number of its own. A change of one word always changes it, and so do rows that changed
places. It reads the weights once.
"""

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from engine.errors import DifferenceFound
from engine.runtime.lane import Lane
from engine.runtime.parcel import Meeting, Parcel
from engine.training_parts import DrafterPart

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

FOLD = 6364136223846793005
"""Odd, so that no step's sum is lost when it is multiplied in; a constant of linear generators."""


@attrs.define(eq=False)
class ReplicaCheck:
    """What each lane's weights came to since the last comparison."""

    drafters: Mapping[str, DrafterPart]
    """By lane."""
    every: int
    """Steps between two comparisons; 0: never."""
    _folded: dict[str, Tensor] = attrs.field(factory=dict, init=False)
    """By lane: int64 [parameters] on its device."""

    def __call__(self, lane: Lane, step: int, meeting: Meeting) -> None:
        """Take in the weights of step `step`, counted from 0, before they are updated; compare when due.

        Called by all drafter lanes, inside the barrier.

        Raises:
            DifferenceFound: names the first parameter that differs, and the lanes.
        """
        if not self.every or len(self.drafters) < 2:
            return
        sums = checksums(self.drafters[lane.name].masters.parameters.values())
        before = self._folded.get(lane.name)
        folded = sums if before is None else before * FOLD + sums
        if (step + 1) % self.every:
            self._folded[lane.name] = folded
            return
        self._folded.pop(lane.name, None)
        met = meeting.exchange(lane, Parcel.made(lane, {}, folded.tolist()))
        self._compare(step, [parcel.note for parcel in met])

    def _compare(self, step: int, told: Sequence[Sequence[int]]) -> None:
        names = list(next(iter(self.drafters.values())).masters.parameters)
        differing = [name for name, *each in zip(names, *told, strict=True) if len(set(each)) > 1]
        if not differing:
            return
        place = names.index(differing[0])
        lanes: dict[int, list[str]] = {}
        for lane, sums in zip(self.drafters, told, strict=True):
            lanes.setdefault(sums[place], []).append(lane)
        groups = [" and ".join(group) for group in sorted(lanes.values(), key=len, reverse=True)]
        keeper = next(lane for lane, part in self.drafters.items() if differing[0] in part.masters.weights)
        since = max(step + 1 - self.every, 0)
        raise DifferenceFound(
            f"step {step + 1}: replicas of the drafter differ in {len(differing)} of {len(names)} "
            f"parameters, first in {differing[0]}: {' differs from '.join(reversed(groups))}; {keeper} keeps "
            f"its master. Steps after {since} may have trained on wrong weights: probe the devices with "
            f"`python -m engine doctor`, and resume from a checkpoint of step {since} or before"
        )


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """A checksum of each tensor's bytes, int64 [tensors] on their device; nothing waits for it."""
    return torch.stack([_checksum(tensor.detach()) for tensor in tensors])


def _checksum(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    row_bytes = rows.shape[1] * rows.element_size()
    word = next(word for word in WORDS if row_bytes % word.itemsize == 0)
    sums = rows.contiguous().view(word).sum(1, dtype=torch.int64)  # [rows]
    return (sums * torch.arange(1, 2 * sums.numel(), 2, device=sums.device)).sum()
