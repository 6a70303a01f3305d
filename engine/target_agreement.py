"""How far a run's labels are the target's own words, told before training begins.

A drafter is trained on tokens of the data and judged by tokens of the target. Where the two differ it
learns what will never be accepted, and no loss curve shows it. Target agreement is the share of
supervised tokens that equal the target's own most likely ones given all before them: near 1 for
answers that the target wrote greedily, lower where it sampled, under 0.6 for most other text.

It costs a forward or two of the whole target. A run whose targets end at the last tap cannot measure it;
what the documents' manifest says about their author is told instead.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from torch import Tensor

from engine.builtin import resolve
from engine.data.batches import BatchPlan
from engine.data.manifest import read_manifest
from engine.errors import DataError
from engine.target.loading import Target
from engine.target.own_tokens import own_tokens_and_taps
from engine.training_parts import TrainingParts

LOW = 0.6
TOKENS = 8192  # real ones: one forward at the usual budget


@attrs.frozen
class Agreement:
    """Supervised tokens that the target would have chosen, of all that were looked at."""

    agreed: int
    supervised: int
    documents: int

    @property
    def share(self) -> float:
        """In [0, 1]; NaN where nothing is supervised."""
        return self.agreed / self.supervised if self.supervised else float("nan")

    def facts(self) -> dict[str, Any]:
        """For environment.json."""
        return {"agreed": self.agreed, "supervised": self.supervised, "share": self.share}

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(
            self.agreed + other.agreed,
            self.supervised + other.supervised,
            self.documents + other.documents,
        )


def rows_agreement(target: Target, input_ids: Tensor, loss_mask: Tensor) -> Agreement:
    """Agreement over right-padded rows.

    Args:
        target: with its head.
        input_ids: int64 [rows, length].
        loss_mask: bool [rows, length], False on padding. A row's first token is not looked at.

    Raises:
        EngineError, NonFinite: as `own_tokens_and_taps`.
    """
    ids, supervised = input_ids.to(target.device), loss_mask[:, 1:].bool().to(target.device)
    own, _ = own_tokens_and_taps(target, ids, loss_mask.bool())
    agreed = int((own == ids)[:, 1:][supervised].sum())
    return Agreement(agreed, int(supervised.sum()), input_ids.shape[0])


def measure_agreement(target: Target, batches: BatchPlan, tokens: int = TOKENS) -> Agreement:
    """Agreement over the first micro-batches of a plan, as many as it takes for so many real tokens."""
    found, seen = Agreement(0, 0, 0), 0
    for index in range(batches.per_epoch):
        batch = batches.micro_batch(index)
        found += rows_agreement(target, batch.input_ids, batch.loss_mask)
        seen += batch.tokens
        if seen >= tokens:
            break
    return found


def report_agreement(parts: TrainingParts, weights: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and tell the agreement of a run's documents, held-out ones where there are any.

    Args:
        weights: fingerprint of the run's target.
        say: takes a line, and another one that warns.

    Returns:
        What environment.json keeps.
    """
    plan, target = parts.plan, parts.targets[0]
    held_out = plan.held_out is not None
    data = plan.schedule.data
    answers = answers_of(data.held_out if held_out and isinstance(data.held_out, str) else data.path)
    own = answers is not None and answers.get("weights") == weights
    if answers is None:
        author = "the data does not say who wrote the answers"
    elif own:
        author = "the data's manifest says that this target wrote the answers"
    else:
        author = f"the data's manifest says that another target wrote the answers: {answers.get('target')}"
    facts: dict[str, Any] = {"documents": "held out" if held_out else "training", "answers": author}
    if target.has_head:
        found = measure_agreement(target, plan.held_out or plan.train)
        share: float | None = found.share
        facts |= {"measured": True, **found.facts()}
        say(
            f"target agreement {found.share:.3f}: so many of {found.supervised:,} supervised tokens in "
            f"{found.documents} {facts['documents']} documents are what the target would say"
        )
    else:
        share = answers.get("agreement") if own and answers else None
        facts |= {"measured": False, "share": share}
        known = "" if share is None else f"; it was {share:.3f} when they were prepared"
        say(f"target agreement: not measured, for this target is cut behind its last tap; {author}{known}")
    if share is not None and share < LOW:
        say(
            f"warning: {share:.0%} of the labels are what this target would say, less than {LOW:.0%}: the "
            "drafter learns text that the target will reject; let the target write the answers (`prepare "
            "--answers target`)"
        )
    return facts


def answers_of(path: str) -> Mapping[str, Any] | None:
    """What the manifest of a data folder says about who wrote its answers; None where it says nothing."""
    folder = resolve(path)
    try:
        manifest = read_manifest(folder)
    except DataError:  # of a plugin's data source, which opened it and knows what it means
        return None
    answers = manifest.source.get("answers") if manifest else None
    return answers if isinstance(answers, Mapping) else None


def documents_agreement(target: Target, documents: Iterable[tuple[Tensor, Tensor]]) -> tuple[int, int]:
    """Agreed and supervised tokens of documents, int64 [L] and bool [L] each, one at a time."""
    found = Agreement(0, 0, 0)
    for input_ids, loss_mask in documents:
        found += rows_agreement(target, input_ids[None], loss_mask[None])
    return found.agreed, found.supervised
