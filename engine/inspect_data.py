"""`python -m engine inspect`: look at data before training on it.

Prepared folders, Arrow and Parquet files are read as a run would read them. Conversations are turned
into documents first, by the same code as `prepare`, in a folder that goes away again. With a schedule
come the figures that depend on its settings: what is cut, what is too short, how many anchors a
document gets. A folder that `prepare` split is looked at part by part.
"""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import attrs
import numpy as np
import orjson
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from engine.builtin import TINY_HYBRID, resolve
from engine.data.batches import BatchPlan
from engine.data.chat import decode, load_tokenizer, tokenizer_fingerprint
from engine.data.documents import Document, Documents, open_documents
from engine.data.inspection import (
    Distribution,
    Inspection,
    Limits,
    distribution,
    inspect_documents,
    inspect_limits,
    sample,
)
from engine.data.preparation import prepare
from engine.data.report import SKIPPED_FILE, Report
from engine.dflash.anchors import share_anchors, valid_anchor_slots
from engine.dflash.packing import pack_row
from engine.errors import DataError, InputError
from engine.schedule import Schedule
from engine.target.configuration import read_target_config

_MICRO_BATCHES = 64  # of the first epoch, whose anchors are shared out
_BAR = 40


@attrs.frozen
class AnchorFigures:
    """How the anchor slots of a schedule's micro-batches are shared out."""

    micro_batches: int
    """That were looked at, from the beginning of the first epoch."""
    max_anchors: int
    available: Distribution
    """Valid anchors of a document."""
    given: Distribution
    """Anchors that a document gets in an epoch."""
    unused: float
    """Share of slots that no document wants."""
    epochs_to_cover: float
    """Valid anchors over anchors drawn: epochs until as many were drawn as there are."""


@attrs.frozen
class Looked:
    """All that was found."""

    figures: Inspection
    limits: Limits | None
    anchors: AnchorFigures | None
    report: Report | None
    """Of the preparation, for conversations."""
    samples: list[Document]
    tokenizer: PreTrainedTokenizerBase | None


def inspect_data(
    data: str,
    schedule: Schedule | None,
    *,
    tokenizer: str | None = None,
    samples: int = 2,
    as_json: bool = False,
    output: TextIO,
) -> None:
    """Print what some data is like.

    Args:
        data: documents as a run takes them, or JSONL conversations, or a folder of them; or a folder with
            the parts `train` and `held_out`, which are shown one after the other.
        schedule: adds the figures of its settings.
        tokenizer: to show text; by default the schedule's target's, or the built-in one where it fits.
        samples: documents to show in full.
        as_json: figures as one object, and no samples; of two parts, each below its name in `parts`.

    Raises:
        InputError: of the kind that fits.
    """
    parts = _parts(resolve(data))
    names = [f"{data}/{part}" for part in parts] or [data]
    if as_json:
        found = [_figures(name, look(name, schedule, tokenizer=tokenizer, samples=samples)) for name in names]
        whole = {"data": data, "parts": dict(zip(parts, found, strict=True))} if parts else found[0]
        output.write(orjson.dumps(whole, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    console = Console(file=output, width=None if output.isatty() else 120)
    for name in names:
        if parts:
            console.print(name, style="bold", markup=False, highlight=False, soft_wrap=True)
        print_looked(look(name, schedule, tokenizer=tokenizer, samples=samples), console)


def _parts(path: Path) -> list[str]:
    """The folders that `prepare` made where it split the documents; none of other data."""
    if not path.is_dir() or any(file.name != SKIPPED_FILE for file in path.glob("*.jsonl")):
        return []
    return [part for part in ("train", "held_out") if _prepared(path / part)]


def _figures(data: str, looked: Looked) -> dict[str, Any]:
    """What was found, for JSON."""
    return {
        "data": data,
        **attrs.asdict(looked.figures),
        "limits": attrs.asdict(looked.limits) if looked.limits else None,
        "anchors": attrs.asdict(looked.anchors) if looked.anchors else None,
        "rows": _rows(looked.report) if looked.report else None,
    }


def look(data: str, schedule: Schedule | None, *, tokenizer: str | None, samples: int) -> Looked:
    """Open, read and count; raises as `inspect_data`."""
    target = resolve(schedule.target.path) if schedule else None
    summary = read_target_config(target) if target else None
    folder = resolve(tokenizer) if tokenizer is not None else target
    with _opened(resolve(data), folder, schedule, summary.vocab_size if summary else None) as (
        documents,
        report,
    ):
        read = sample(documents)
        return Looked(
            figures=inspect_documents(documents, read),
            limits=None
            if schedule is None
            else inspect_limits(
                documents,
                read,
                max_length=schedule.data.max_length,
                block_size=schedule.drafter.block_size,
            ),
            anchors=None if schedule is None else anchor_figures(documents, schedule),
            report=report,
            samples=read[:samples],
            tokenizer=_tokenizer(documents, folder, asked=tokenizer is not None) if samples else None,
        )


@contextmanager
def _opened(
    path: Path, tokenizer: Path | None, schedule: Schedule | None, vocab_size: int | None
) -> Iterator[tuple[Documents, Report | None]]:
    """Documents behind a path, those of conversations for as long as the block lasts."""
    mask_token_id = schedule.drafter.mask_token_id if schedule else None
    if path.suffix != ".jsonl" and not (path.is_dir() and any(path.glob("*.jsonl")) and not _prepared(path)):
        yield open_documents(path, vocab_size=vocab_size, mask_token_id=mask_token_id), None
        return
    if tokenizer is None:
        raise InputError(f"{path}: conversations; give --tokenizer or --schedule, to see them as tokens")
    with tempfile.TemporaryDirectory() as scratch:
        documents = Path(scratch) / "documents"
        report = prepare([path], tokenizer, documents, max_bad=1.0, console=Console(file=io.StringIO()))
        yield open_documents(documents, vocab_size=vocab_size, mask_token_id=mask_token_id), report


def _prepared(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def _tokenizer(documents: Documents, folder: Path | None, *, asked: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer to show text with: of that folder, or the built-in one where the manifest names it."""
    wanted = documents.manifest.tokenizer_fingerprint if documents.manifest else None
    if folder is None:
        builtin = load_tokenizer(resolve(TINY_HYBRID)) if wanted else None
        return builtin if builtin and tokenizer_fingerprint(builtin) == wanted else None
    if not asked and not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        return None
    tokenizer = load_tokenizer(folder)
    if wanted is not None and tokenizer_fingerprint(tokenizer) != wanted:
        raise DataError(
            f"{documents.path}: prepared with another tokenizer than that of {folder}; its ids would be "
            "shown as other words; name the right one with --tokenizer"
        )
    return tokenizer


def anchor_figures(documents: Documents, schedule: Schedule) -> AnchorFigures:
    """Share out the anchors of the first micro-batches, as a run would in its first epoch."""
    settings = schedule.data
    batches = BatchPlan(
        documents,
        token_budget=settings.token_budget,
        max_length=settings.max_length,
        length_bucket=settings.length_bucket,
        seed=schedule.run.seed,
    )
    looked_at = min(_MICRO_BATCHES, batches.per_epoch)
    available: list[int] = []
    given: list[int] = []
    for index in range(looked_at):
        batch = batches.micro_batch(index)
        row = pack_row(batch.input_ids, batch.loss_mask, batch.lengths, batch.document_ids)
        valid = torch.bincount(row.document[valid_anchor_slots(row)], minlength=len(batch.lengths)).tolist()
        available += valid
        given += share_anchors(valid, settings.max_anchors)
    spread = [distribution(np.array(values, dtype=np.int64)) for values in (available, given)]
    assert spread[0] is not None and spread[1] is not None
    return AnchorFigures(
        micro_batches=looked_at,
        max_anchors=settings.max_anchors,
        available=spread[0],
        given=spread[1],
        unused=1 - sum(given) / (looked_at * settings.max_anchors),
        epochs_to_cover=sum(available) / sum(given),
    )


def print_looked(looked: Looked, console: Console) -> None:
    """Tables, histograms of lengths and answers, and samples with their supervised tokens marked."""
    figures = looked.figures
    if looked.report:
        console.print(looked.report.tables()[0])
    table = Table(title=f"{figures.documents:,} documents, {figures.tokens:,} tokens", title_justify="left")
    columns = ("min", "p5", "p25", "median", "mean", "p75", "p95", "p99", "max")
    for heading in ("", *columns):
        table.add_column(heading, justify="right" if heading else "left")
    spreads: list[tuple[str, Distribution | None]] = [
        ("length, tokens", figures.lengths),
        ("supervised tokens", figures.supervised),
        ("answers", figures.answers),
        ("length of an answer", figures.answer_lengths),
    ]
    if looked.anchors:
        spreads += [("valid anchors", looked.anchors.available), ("anchors per epoch", looked.anchors.given)]
    for name, spread in spreads:
        if spread:
            numbers = (getattr(spread, column) for column in columns)
            table.add_row(
                name,
                *(f"{number:,.1f}" if isinstance(number, float) else f"{number:,}" for number in numbers),
            )
    console.print(table)
    for line in _sentences(looked):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    _print_histogram("length, tokens", figures.lengths, console)
    for number, document in enumerate(looked.samples, 1):
        show_tokens(document, number, looked.tokenizer, console)


def _sentences(looked: Looked) -> Iterator[str]:
    figures, duplicates = looked.figures, looked.figures.duplicates
    of_read = "" if figures.read == figures.documents else f" (of {figures.read:,} that were read)"
    yield f"supervised: {figures.supervised_share:.1%} of the tokens{of_read}"
    yield f"without anything to learn: {figures.nothing_to_learn:,} documents"
    yield (
        f"duplicates: {duplicates.whole:,} whole, {duplicates.same_answer:,} with an answer that occurs "
        f"before; {duplicates.same_prompt:,} with a prompt that occurs before, {duplicates.near:,} of them "
        f"with the same beginning of the answer{of_read}"
    )
    if limits := looked.limits:
        yield (
            f"data.max_length = {limits.max_length:,}: {limits.cut:,} documents cut "
            f"({limits.cut_tokens:,} tokens), {limits.skipped:,} left out, their answers lying behind it or "
            "nowhere"
        )
        yield (
            f"drafter.block_size = {limits.block_size}: {limits.short:,} documents have no answer that fills "
            f"a block{of_read}"
        )
    if anchors := looked.anchors:
        yield (
            f"data.max_anchors = {anchors.max_anchors}: {anchors.unused:.1%} of the slots unused, "
            f"{anchors.epochs_to_cover:.1f} epochs until as many anchors were drawn as there are valid ones "
            f"(of {anchors.micro_batches} micro-batches)"
        )


def _print_histogram(name: str, spread: Distribution, console: Console) -> None:
    most = max(count for _, _, count in spread.histogram)
    lines = [name]
    for low, high, count in spread.histogram:
        edge = f"{low:,}" if low == high else f"{low:,}–{high:,}"
        lines.append(f"{edge:>15} {'█' * -(-count * _BAR // most)} {count:,}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def show_tokens(
    document: Document, number: int, tokenizer: PreTrainedTokenizerBase | None, console: Console
) -> None:
    """Print a document: supervised tokens green or, off a terminal, in [[ ]], special ones set apart.

    Without a tokenizer its ids are printed.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} if tokenizer else set()
    text = Text(
        f"document {number}: {len(document.input_ids)} tokens, {int(document.loss_mask.sum())} supervised\n"
    )
    pairs = zip(document.loss_mask.tolist(), document.input_ids.tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[0]):
        text.append("" if console.is_terminal or not supervised else "[[")
        for is_special, piece in groupby((token for _, token in run), key=special.__contains__):
            ids = list(piece)
            words = decode(tokenizer, ids) if tokenizer else "".join(f" {token}" for token in ids)
            style = f"{'green' if supervised else 'default'}{' reverse' if is_special else ''}"
            text.append(words, style=style)
        text.append("" if console.is_terminal or not supervised else "]]")
    console.print(text, soft_wrap=True, highlight=False)


def _rows(report: Report) -> dict[str, Any]:
    return {"read": report.rows, "kept": report.rows_kept, "dropped": dict(report.dropped)}
