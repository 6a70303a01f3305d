"""What a preparation tells: rows kept and dropped by reason, lengths, bad rows, and documents to look at.

Counts by reason are the part people need when a run learns nothing: a quarter of the rows dropped
as "empty answer" explains more than any loss curve. Looking at three rendered documents with their
supervised tokens marked finds a wrong template before the GPUs are rented.
"""

from collections import Counter
from itertools import groupby
from pathlib import Path

import attrs
import orjson
from attrs import define, field, frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from engine.data.chat import Tokens, decode
from engine.data.manifest import Manifest
from engine.errors import DiskError

SKIPPED_FILE = "skipped.jsonl"
_LISTED = 10


@frozen
class Skipped:
    """A bad row: where it stands (`file:line`), why it can't be used, and the particulars."""

    where: str
    reason: str
    detail: str
    template: bool
    """Whether the chat template may be at fault, not the row."""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@define
class Report:
    """What became of the rows read."""

    output: Path
    rows: int = 0
    rows_kept: int = 0
    """Rows that gave a document; together with `dropped` these are all rows."""
    kept: int = 0
    """Documents written: more than rows where a turn became a document of its own."""
    cut: int = 0
    """Documents that were longer than `max_length`."""
    dropped: Counter[str] = field(factory=Counter)
    """Rows by reason: the bad ones, and good ones that are duplicates or have nothing to learn."""
    left_out: Counter[str] = field(factory=Counter)
    """Documents that kept rows gave besides, by the reason they were not written."""
    skipped: list[Skipped] = field(factory=list)
    """The bad rows alone."""
    held_out: float | None = None
    """The share that was asked for."""
    manifests: dict[str, Manifest] = field(factory=dict)
    """Of "train" and, where a held-out part was asked for, of "held_out"."""

    def tables(self) -> list[Table]:
        """Rows by fate, and lengths of what was written, for a terminal."""
        fate = Table(title=f"{self.rows} rows read")
        fate.add_column("rows")
        fate.add_column("number", justify="right")
        fate.add_row("kept", str(self.rows_kept))
        if self.kept != self.rows_kept or self.left_out:
            fate.add_row("  documents these gave", str(self.kept))
        fate.add_row("  of these cut to max_length", str(self.cut))
        for reason, count in self.left_out.most_common():
            fate.add_row(f"  documents left out of them: {reason}", str(count))
        for reason, count in self.dropped.most_common():
            fate.add_row(f"dropped: {reason}", str(count))
        sizes = Table(title="documents written")
        sizes.add_column("")
        for part in self.manifests:
            sizes.add_column(part, justify="right")
        written = list(self.manifests.values())
        for name in ("documents", "tokens", "supervised_tokens"):
            sizes.add_row(name.replace("_", " "), *(str(getattr(manifest, name)) for manifest in written))
        for name in ("min", "mean", "median", "p95", "max"):
            numbers = (f"{getattr(manifest.lengths, name):.0f}" for manifest in written)
            sizes.add_row(f"length, {name}", *numbers)
        return [fate, sizes]

    def shares(self) -> str | None:
        """What was held out beside what was asked for; None where nothing was."""
        if self.held_out is None or "held_out" not in self.manifests:
            return None
        documents = self.manifests["held_out"].documents
        found = documents / self.kept
        text = f"held out: {documents:,} of {counted(self.kept, 'document')}, {found:.1%}"
        text += f"; {self.held_out:.1%} were asked for"
        if abs(found - self.held_out) > self.held_out / 2:
            text += ", and the split by answer misses it where answers are few or often the same"
        return text


def counted(count: int, what: str) -> str:
    """A number with its noun, in the plural but for one."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def write_skipped(folder: Path, report: Report) -> None:
    """Write the bad rows beside the documents, a line each, so that none is lost to a long terminal."""
    lines = b"".join(orjson.dumps(attrs.asdict(bad)) + b"\n" for bad in report.skipped)
    try:
        (folder / SKIPPED_FILE).write_bytes(lines)
    except OSError as error:
        raise DiskError(f"{report.output / SKIPPED_FILE}: cannot be written ({error})") from error


def print_report(report: Report, console: Console) -> None:
    """Print the tables and the first bad rows."""
    for table in report.tables():
        console.print(table)
    if shares := report.shares():
        console.print(Text(shares), soft_wrap=True)
    for bad in report.skipped[:_LISTED]:
        console.print(Text(f"skipped {bad}"))
    if len(report.skipped) > _LISTED:
        rest = len(report.skipped) - _LISTED
        console.print(Text(f"and {rest} more bad rows, all listed in {report.output / SKIPPED_FILE}"))


def show_document(row: Tokens, number: int, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print a document, its supervised tokens underlined in colour or, off a terminal, in [[ ]]."""
    text = Text(f"document {number}: {len(row.input_ids)} tokens, {int(row.loss_mask.sum())} supervised\n")
    pairs = zip(row.loss_mask.tolist(), row.input_ids.tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[0]):
        piece = decode(tokenizer, [token for _, token in run])
        if supervised and console.is_terminal:
            text.append(piece, style="underline green")
        else:
            text.append(f"[[{piece}]]" if supervised else piece)
    console.print(text, soft_wrap=True)
