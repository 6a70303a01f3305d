"""How often rounding alone makes a target's greedy text another one, and what that allows a drafter.

In a reduced precision two right ways to the same logits part where the two most likely tokens are all but
equal. How many prompts meet such a place depends on the target, the texts and how long they are, so no fixed
share tells rounding from a state that was rolled back slightly wrong. But the target decoding alone is such a
pair of ways too: with another number of rows together its products are summed in another order. Prompts that
differed with the drafter are decoded so once more, and as many that did not, and those count that differ from
what the target said alone before. Never more go together than did before, which was all that memory took.

A verification of a block rounds differently in more places than another number of rows does, so that twice
the measured number is expected of it at the most. Both numbers are counts of rare events, taken as Poisson
distributed: their difference D - 2N then varies by 2N + 4N, a prompt of the sample counting for as many as it
stands for, and three standard deviations are allowed on top.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import torch

from engine.errors import is_out_of_memory
from engine.target.generation import decode_alone
from engine.target.loading import Target

SAMPLE = 64
"""Prompts of either kind that are decoded again, at most."""

DEVIATIONS = 3

NEVER_MORE = 0.5
"""Share of the prompts that may differ, whatever was measured."""

UNMEASURED = 0.2
"""The same where nothing was measured: in full precision, whose near ties are all but exact ones."""

ALWAYS = 2
"""So many are let pass: of few prompts a share says nothing."""


@attrs.frozen(kw_only=True)
class RoundingNull:
    """What the target alone made of prompts that it decoded twice."""

    rows_together: tuple[int, ...]
    """At the second time, each number that occurred; none is the one that those prompts had before."""
    differing: int
    """Prompts whose text with the drafter was another one; of these were decoded again:"""
    differing_again: int
    differing_moved: int
    """And of these the target's own text was another one the second time."""
    others: int
    """The same of the prompts whose text with the drafter was the target's."""
    others_again: int
    others_moved: int

    @property
    def expected(self) -> float:
        """Of all prompts, those whose text another number of rows changes."""
        return sum(weight * moved for weight, moved in self._strata())

    @property
    def allowed(self) -> int:
        """How many prompts may differ with the drafter."""
        counted = 1 + sum(weight**2 * moved for weight, moved in self._strata())
        spread = 2 * (1 + self.expected) + 4 * counted
        most = math.floor(2 * self.expected + DEVIATIONS * math.sqrt(spread))
        return max(ALWAYS, min(most, math.floor(NEVER_MORE * (self.differing + self.others))))

    def _strata(self) -> list[tuple[float, int]]:
        """How many prompts each one that moved stands for, and how many moved."""
        kinds = (
            (self.differing, self.differing_again, self.differing_moved),
            (self.others, self.others_again, self.others_moved),
        )
        return [(of / max(again, 1), moved) for of, again, moved in kinds]


def is_reduced(dtype: torch.dtype) -> bool:
    """Whether rounding in this precision is large enough to part texts often."""
    return torch.finfo(dtype).bits < 32


def other_number(rows: int) -> int:
    """How many rows to decode together where it was `rows` before: fewer, as long as that takes no age."""
    if rows == 1:
        return 2
    return rows // 8 if rows >= 16 else rows // 2


def measure_null(
    target: Target,
    prompts: Sequence[Sequence[int]],
    alone: Mapping[int, list[int]],
    differing: Collection[int],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    groups: Sequence[Sequence[int]],
) -> RoundingNull | None:
    """Decode some prompts greedily by the target alone, as before but for the number of rows.

    Args:
        alone: by the prompt's number, what the target said alone.
        differing: the numbers of the prompts whose text with the drafter was another one.
        groups: the numbers of all prompts, as they went together before.

    Returns:
        None where memory ran out, which takes none of the figures that are there already.
    """
    first = sorted(differing)[:SAMPLE]
    others = [number for number in range(len(prompts)) if number not in differing]
    second = others[: len(first)]
    again: dict[int, list[int]] = {}
    together: set[int] = set()
    try:
        for numbers, rows in _regrouped(first + second, groups, spare=others[len(second) :]):
            texts = decode_alone(
                target,
                [prompts[number] for number in numbers],
                max_new_tokens=max_new_tokens,
                stop=stop,
                rows_at_once=rows,
            )
            again |= zip(numbers, texts, strict=True)
            together |= {min(rows, len(numbers) - start) for start in range(0, len(numbers), rows)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    moved = {number for number in first + second if again[number] != alone[number]}
    return RoundingNull(
        rows_together=tuple(sorted(together)),
        differing=len(differing),
        differing_again=len(first),
        differing_moved=len(moved.intersection(first)),
        others=len(others),
        others_again=len(second),
        others_moved=len(moved.intersection(second)),
    )


def _regrouped(
    chosen: Sequence[int], groups: Sequence[Sequence[int]], spare: Sequence[int]
) -> Iterator[tuple[list[int], int]]:
    """Chosen prompts by how many went together before, the last group's often fewer; and how many go now.

    A rest is smaller than either number, but for one prompt that was alone before: another one, which does
    not count, goes with it, of the `spare` ones or else itself.
    """
    before = {number: len(group) for group in groups for number in group}
    for rows in sorted({before[number] for number in chosen}):
        numbers = [number for number in chosen if before[number] == rows]
        if rows == 1 and len(numbers) % 2:
            numbers.append(next(iter(spare), numbers[-1]))
        yield numbers, other_number(rows)
