"""Micro-batches: documents of similar length under a token budget, in an order that is a function.

A document's length is rounded up to a multiple of `length_bucket` and a micro-batch never mixes
buckets. That wastes at most a bucket per row, bounds the number of shapes a compiled kernel sees,
and makes the number of micro-batches per epoch a function of the lengths alone. The price: each
bucket may end an epoch with a micro-batch that isn't full.

Nothing is drawn from a generator. Within a bucket documents are sorted by a hash of (seed, epoch,
content id), and the micro-batches of all buckets by a hash of (seed, epoch, their documents). So
micro-batch `i` can be asked for at any time, by a run that was never stopped or by one that resumes,
and it does not matter in which file or row a document stands.
"""

import numpy as np
import torch
from attrs import field, frozen
from rich.table import Table
from torch import Tensor

from engine.data.documents import Documents
from engine.errors import DataError
from engine.randomness import stateless_hash

PAD_ID = 0


@frozen(eq=False)
class MicroBatch:
    """Documents side by side, right-padded: causal layers can't see padding that comes after them."""

    index: int
    """Number from the start of the run, over epochs."""
    epoch: int
    document_ids: Tensor
    """int64 [rows]: content ids. Equal documents share theirs, so tell rows apart by row, not by this."""
    lengths: Tensor
    """int64 [rows]: real tokens of each row, after cutting."""
    input_ids: Tensor
    """int64 [rows, length], `PAD_ID` on padding."""
    loss_mask: Tensor
    """bool [rows, length], True where supervised, False on padding."""

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.lengths.sum())

    @property
    def padding(self) -> int:
        """Padded positions."""
        return self.input_ids.numel() - self.tokens


@frozen
class Spread:
    """Smallest, mean and largest value over the micro-batches of an epoch."""

    min: int
    mean: float
    max: int


@frozen
class BatchStatistics:
    """What an epoch looks like; rows, shapes and sums are those of every epoch, the rest of epoch 0."""

    documents: int
    micro_batches: int
    rows: Spread
    tokens: Spread
    padding: Spread
    cut: int
    """Documents longer than `max_length`, cut at the end."""
    skipped: int
    """Documents without a supervised token left after cutting; they are in no micro-batch."""
    shapes: list[tuple[int, int]] = field(factory=list)
    """Distinct (rows, length), sorted."""

    def table(self) -> Table:
        """The statistics for a terminal."""
        table = Table(title=f"{self.documents} documents in {self.micro_batches} micro-batches per epoch")
        for heading in ("per micro-batch", "min", "mean", "max"):
            table.add_column(heading, justify="left" if heading == "per micro-batch" else "right")
        for name, spread in (("rows", self.rows), ("tokens", self.tokens), ("padding", self.padding)):
            table.add_row(name, str(spread.min), f"{spread.mean:.1f}", str(spread.max))
        table.caption = (
            f"{self.cut} documents cut at the end, {self.skipped} without a supervised token skipped, "
            f"{len(self.shapes)} shapes"
        )
        return table


class BatchPlan:
    """The micro-batches of a run over some documents, each a function of its number.

    Args:
        documents: what `open_documents` returned, or a selection.
        token_budget: padded tokens of a micro-batch, an upper bound.
        max_length: longer documents are cut at the end.
        length_bucket: rows are padded to a multiple of this.
        seed: of the order.

    Raises:
        DataError: a document alone exceeds the budget, or no document has anything to learn.
    """

    def __init__(
        self, documents: Documents, *, token_budget: int, max_length: int, length_bucket: int, seed: int
    ) -> None:
        for name, value in (
            ("token_budget", token_budget),
            ("max_length", max_length),
            ("length_bucket", length_bucket),
        ):
            if value < 1:
                raise DataError(f"data.{name} = {value}: must be at least 1")
        self._documents = documents
        self._seed = seed
        self._cut_lengths = np.minimum(documents.lengths, max_length)
        learnable = (documents.first_labels > 0) & (documents.first_labels < max_length)
        self._members = np.flatnonzero(learnable)
        if len(self._members) == 0:
            raise DataError(
                f"{documents.path}: no document has a supervised token within its first {max_length} tokens; "
                "raise data.max_length or look at the loss masks"
            )
        self._cut = int((documents.lengths[self._members] > max_length).sum())
        padded = -(-self._cut_lengths[self._members] // length_bucket) * length_bucket
        self._padded = padded  # [members]
        longest, tokens = int(padded.max()), int(self._cut_lengths[self._members].max())
        if longest > token_budget:
            raise DataError(
                f"{documents.path}: its longest document, {tokens} tokens, "
                f"is padded to {longest} and does not fit data.token_budget = {token_budget}; "
                "raise the budget or lower data.max_length or data.length_bucket"
            )
        # Per bucket, in ascending length: full micro-batches and then one with the rest.
        rows: list[int] = []
        lengths: list[int] = []
        buckets, counts = np.unique(padded, return_counts=True)
        for length, count in zip(buckets.tolist(), counts.tolist(), strict=True):
            full = token_budget // length
            sizes = [full] * (count // full) + ([count % full] if count % full else [])
            rows.extend(sizes)
            lengths.extend([length] * len(sizes))
        self._batch_rows = np.array(rows, dtype=np.int64)  # [per_epoch]
        self._batch_lengths = np.array(lengths, dtype=np.int64)  # [per_epoch]
        self._batch_starts = self._batch_rows.cumsum() - self._batch_rows
        self._order: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def per_epoch(self) -> int:
        """Micro-batches per epoch, the same for every epoch."""
        return len(self._batch_rows)

    @property
    def fingerprint(self) -> str:
        """Of the documents and their order, whatever the batches."""
        return self._documents.fingerprint

    def micro_batch(self, index: int) -> MicroBatch:
        """Read micro-batch `index` (≥ 0, over epochs); DataError when a document of it is damaged."""
        if index < 0:
            raise IndexError(f"micro-batch {index}: they count from 0")
        epoch, number, members = self._placed(index)
        rows, length = len(members), int(self._batch_lengths[number])
        input_ids = torch.full((rows, length), PAD_ID, dtype=torch.int64)
        loss_mask = torch.zeros((rows, length), dtype=torch.bool)
        for row, member in enumerate(members.tolist()):
            document = self._documents.document(member)
            end = int(self._cut_lengths[member])
            input_ids[row, :end] = torch.from_numpy(document.input_ids[:end])
            loss_mask[row, :end] = torch.from_numpy(document.loss_mask[:end])
        return MicroBatch(
            index=index,
            epoch=epoch,
            document_ids=torch.from_numpy(self._documents.content_ids[members]),
            lengths=torch.from_numpy(self._cut_lengths[members]),
            input_ids=input_ids,
            loss_mask=loss_mask,
        )

    def document_ids(self, index: int) -> list[int]:
        """Content ids of the documents of micro-batch `index`; nothing is read."""
        _, _, members = self._placed(index)
        ids: list[int] = self._documents.content_ids[members].tolist()
        return ids

    def _placed(self, index: int) -> tuple[int, int, np.ndarray]:
        """A micro-batch's epoch, its number among the batches by length, its documents' indexes [rows]."""
        epoch, place = divmod(index, self.per_epoch)
        order, batch_order = self._epoch_order(epoch)
        number = int(batch_order[place])
        start, rows = int(self._batch_starts[number]), int(self._batch_rows[number])
        return epoch, number, order[start : start + rows]

    def statistics(self) -> BatchStatistics:
        """Number and sizes of the micro-batches, from lengths alone: nothing is read."""
        order, _ = self._epoch_order(0)
        tokens = np.add.reduceat(self._cut_lengths[order], self._batch_starts)
        shapes = np.unique(np.stack([self._batch_rows, self._batch_lengths]), axis=1)
        return BatchStatistics(
            documents=len(self._members),
            micro_batches=self.per_epoch,
            rows=_spread(self._batch_rows),
            tokens=_spread(tokens),
            padding=_spread(self._batch_rows * self._batch_lengths - tokens),
            cut=self._cut,
            skipped=len(self._documents) - len(self._members),
            shapes=[(rows, length) for rows, length in shapes.T.tolist()],
        )

    def token_ranges(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each (rows, length), the fewest and the most real tokens that any epoch's order can give."""
        ranges = {}
        for rows, length in self.statistics().shapes:
            tokens = np.sort(self._cut_lengths[self._members[self._padded == length]])
            ranges[rows, length] = int(tokens[:rows].sum()), int(tokens[-rows:].sum())
        return ranges

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Document indexes [members] micro-batch by micro-batch, and the order [per_epoch] of those."""
        kept = self._order
        if kept is not None and kept[0] == epoch:
            return kept[1], kept[2]
        ids = torch.from_numpy(self._documents.content_ids[self._members])
        ranks = stateless_hash(self._seed, epoch, ids).numpy()
        # Equal ranks are equal documents, so the order among them changes no micro-batch.
        order = self._members[np.lexsort((ranks, self._padded))]
        # A sum is a function of the set of documents; hashing first keeps ids from cancelling out.
        parts = stateless_hash(torch.from_numpy(self._documents.content_ids[order])).numpy()
        keys = np.add.reduceat(parts, self._batch_starts)  # [per_epoch], wraps around
        batch_ranks = stateless_hash(self._seed, epoch, torch.from_numpy(keys)).numpy()
        batch_order = np.argsort(batch_ranks, kind="stable")
        self._order = (epoch, order, batch_order)
        return order, batch_order


def _spread(values: np.ndarray) -> Spread:
    return Spread(int(values.min()), float(values.mean()), int(values.max()))
