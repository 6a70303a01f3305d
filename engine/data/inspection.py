"""What documents are like, before a GPU is rented for them: lengths, answers, duplicates.

Lengths and whole duplicates come from the columns that stand beside the lists and cover every
document. Whatever needs tokens is read from a sample, drawn by a hash of the content, so that two
looks at the same data show the same figures; reading also checks every document that it meets.

A document is a *near duplicate* when an earlier one has the same prompt and begins its answer alike:
a data set made by asking many times, or by changing a few last words, shows here and not among the
whole duplicates. Counting from a document's beginning instead would mistake a common system prompt
for it.
"""

import attrs
import numpy as np
import torch

from engine.data.documents import Document, Documents
from engine.data.shards import hash63
from engine.randomness import stateless_hash

READ = 20_000  # documents of a sample: a second or two, and shares within half a percent
_ALIKE = 16  # first answer tokens that near duplicates share
_BINS = 12


@attrs.frozen
class Distribution:
    """Whole numbers, one per document."""

    min: int
    p5: int
    p25: int
    median: int
    mean: float
    p75: int
    p95: int
    p99: int
    max: int
    histogram: list[tuple[int, int, int]]
    """First and last value of a bin, and how many fall into it."""


@attrs.frozen
class Duplicates:
    """Documents beyond the first of their kind, counted once each."""

    whole: int
    """The same tokens and mask, of all documents."""
    same_answer: int
    """The same supervised tokens, of all documents."""
    same_prompt: int
    """The same tokens before the first answer, of those read."""
    near: int
    """The same prompt, and the first answer begins alike, of those read."""


@attrs.frozen
class Inspection:
    """Figures of some documents."""

    documents: int
    tokens: int
    lengths: Distribution
    read: int
    """Documents whose tokens were read; what follows is about them."""
    supervised_share: float
    """Of all tokens read."""
    supervised: Distribution
    """Tokens of a document that are learnt."""
    answers: Distribution
    """Runs of supervised tokens in a document."""
    answer_lengths: Distribution | None
    """Of those runs; None where there is none."""
    nothing_to_learn: int
    """Documents without a supervised token after the first position, of all."""
    duplicates: Duplicates


@attrs.frozen
class Limits:
    """What a schedule's settings leave of the documents."""

    max_length: int
    cut: int
    """Documents that are longer, of all that have something to learn."""
    cut_tokens: int
    """That go with it, of all documents."""
    skipped: int
    """Documents without a supervised token within `max_length`."""
    block_size: int
    short: int
    """Documents of those read whose longest answer fills no block: fewer tokens than its `block_size - 1`
    labels."""


def distribution(values: np.ndarray) -> Distribution | None:
    """Percentiles and a histogram of integers [n]; None where n is 0."""
    if not len(values):
        return None
    p5, p25, median, p75, p95, p99 = np.percentile(
        values, [5, 25, 50, 75, 95, 99], method="closest_observation"
    ).tolist()
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // _BINS)
    counts = np.bincount((values - low) // width)
    histogram = [
        (low + place * width, min(low + (place + 1) * width - 1, high), count)
        for place, count in enumerate(counts.tolist())
    ]
    return Distribution(
        low,
        int(p5),
        int(p25),
        int(median),
        float(values.mean()),
        int(p75),
        int(p95),
        int(p99),
        high,
        histogram,
    )


def sample(documents: Documents, size: int = READ) -> list[Document]:
    """So many documents, in an order that depends on their content alone; all where there are fewer.

    Raises:
        DataError: one of them is damaged; names file and row.
    """
    order = stateless_hash(torch.from_numpy(documents.content_ids)).argsort(stable=True)[:size]
    return [documents.document(index) for index in order.tolist()]


def inspect_documents(documents: Documents, read: list[Document]) -> Inspection:
    """Figures of documents, of which some were read (at least one)."""
    runs = [answer_lengths(document.loss_mask) for document in read]
    supervised = np.array([run.sum() for run in runs], dtype=np.int64)
    prompts, beginnings = [], []
    for document in read:
        first = int(document.loss_mask.argmax()) if document.loss_mask.any() else len(document.loss_mask)
        ids = np.ascontiguousarray(document.input_ids, dtype="<i4")
        prompts.append(hash63(ids[:first].data))
        beginnings.append(hash63(prompts[-1].to_bytes(8), ids[first : first + _ALIKE].data))
    return Inspection(
        documents=len(documents),
        tokens=int(documents.lengths.sum()),
        lengths=_distribution(documents.lengths),
        read=len(read),
        supervised_share=float(supervised.sum() / sum(len(document.input_ids) for document in read)),
        supervised=_distribution(supervised),
        answers=_distribution(np.array([len(run) for run in runs], dtype=np.int64)),
        answer_lengths=distribution(np.concatenate(runs)),
        nothing_to_learn=int((documents.first_labels < 0).sum()),
        duplicates=Duplicates(
            whole=_repeated(documents.content_ids),
            same_answer=_repeated(documents.answer_ids),
            same_prompt=_repeated(np.array(prompts, dtype=np.int64)),
            near=_repeated(np.array(beginnings, dtype=np.int64)),
        ),
    )


def inspect_limits(documents: Documents, read: list[Document], *, max_length: int, block_size: int) -> Limits:
    """What `max_length` cuts off and what is too short for a block."""
    labels = documents.first_labels
    learnable = (labels > 0) & (labels < max_length)
    longest = [answer_lengths(document.loss_mask[:max_length]).max(initial=0) for document in read]
    return Limits(
        max_length=max_length,
        cut=int((learnable & (documents.lengths > max_length)).sum()),
        cut_tokens=int((documents.lengths - max_length).clip(min=0).sum()),
        skipped=int((~learnable).sum()),
        block_size=block_size,
        short=sum(int(length) < block_size - 1 for length in longest),
    )


def answer_lengths(loss_mask: np.ndarray) -> np.ndarray:
    """Lengths of the runs of supervised tokens in bool [L], int64 [answers]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], loss_mask, [False]])))
    return edges[1::2] - edges[::2]


def _distribution(values: np.ndarray) -> Distribution:
    found = distribution(values)
    assert found is not None, "documents that were opened are never none"
    return found


def _repeated(ids: np.ndarray) -> int:
    return len(ids) - len(np.unique(ids))
