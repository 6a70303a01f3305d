"""From people's JSONL to documents: every row is kept exactly or left out with a reason.

Rows are conversations (`messages` or `conversations`, a list or JSON text of one, with
`role`/`content` or `from`/`value`) or tokens (`prompt_ids` and `answer_ids`, taken as they are: the
only exact form for answers a template would rewrite). One bad row costs one row; more than a set
share of them means that the file or the template isn't what its owner thinks, and stops the work.
The output folder appears only when everything went well.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from engine.data.answer_file import AnswerFile
from engine.data.asked_rows import Part
from engine.data.chat import (
    BadRow,
    ChatTemplate,
    Message,
    Tokens,
    load_tokenizer,
    parse_messages,
    parse_row,
    parse_token_row,
    tokenizer_fingerprint,
    vocabulary_size,
)
from engine.data.documents import in_held_out
from engine.data.fresh_folder import fresh_folder, refuse_or_replace
from engine.data.input_lines import chunks, list_inputs
from engine.data.regeneration import AnswerCounts, AnswerWriter, RegeneratingReader, settings_of
from engine.data.report import Report, Skipped, print_report, show_document, write_skipped
from engine.data.shards import ShardWriter, answer_id, content_id, first_label
from engine.errors import DataError

DUPLICATE = "duplicate of an earlier row"
NOTHING_LEFT = "no supervised token within max_length"
_CHUNK_ROWS = 256  # rows tokenized at once: enough for the tokenizer's threads, little to hold


def prepare(
    inputs: Sequence[Path | str],
    tokenizer_folder: Path | str,
    output: Path | str,
    *,
    max_length: int | None = None,
    held_out: float | None = None,
    show: int = 0,
    max_bad: float = 0.01,
    overwrite: bool = False,
    answers: Literal["all", "last"] = "all",
    template_options: Mapping[str, Any] | None = None,
    answer_writer: AnswerWriter | None = None,
    console: Console | None = None,
) -> Report:
    """Turn JSONL files into a folder of documents, print what was kept, and return the report.

    Args:
        inputs: JSONL files, or folders of `*.jsonl`.
        tokenizer_folder: a local tokenizer; its chat template is needed for conversations only.
        output: the folder to write. With `held_out` it gets `train` and `held_out` in it.
        max_length: longer documents are cut at the end, in tokens.
        held_out: share to hold out, by answer: no held-out answer occurs in training.
        show: print this many documents with their supervised tokens marked.
        max_bad: share of bad rows above which the work stops. Duplicates aren't bad.
        overwrite: replace documents that `output` holds.
        answers: supervise "all" answers of a conversation or the "last" one only.
        template_options: variables for the chat template, e.g. `{"enable_thinking": False}`.
        answer_writer: writes all answers anew, in place of those in the files. What it wrote is kept
            beside `output` until the folder is whole, also when this is killed.

    Raises:
        DataError: a file is missing or empty, too many rows are bad, none is left, a held-out side is
            empty, or the output can't be written; nothing is left behind.
        DiskError: writing fails under way.
    """
    files = list_inputs(inputs)
    _refuse_out_of_range(max_length, held_out, max_bad)
    console = console or Console()
    output = Path(output)
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    reader: _RowReader | RegeneratingReader
    report = Report(output, held_out=held_out)
    parts = ["train"] if held_out is None else ["train", "held_out"]
    sources: dict[str, dict[str, Any]] = {
        part: {"files": [file.name for file in files], "part": part} for part in parts
    }
    seen: set[int] = set()
    # Several batches at once, so that prompts of like length meet in one.
    at_once = max(_CHUNK_ROWS, 8 * answer_writer.batch if answer_writer else 0)
    with (
        contextlib.ExitStack() as kept,
        fresh_folder(output, overwrite) as partial,
        contextlib.ExitStack() as stack,
    ):
        if answer_writer is None:
            reader = _RowReader(tokenizer_folder, answers, template_options)
        else:
            reader = RegeneratingReader(
                tokenizer_folder,
                template_options,
                answer_writer,
                kept.enter_context(AnswerFile(output, settings_of(answer_writer, max_length), say)),
                max_length=max_length,
                console=console,
            )
            asked = reader.count(chain.from_iterable(chunks(files, at_once)), output)
            _refuse_bad(asked, files, reader.folder, max_bad)  # before hours of answering
        writers = {
            part: ShardWriter(
                partial if held_out is None else partial / part,
                tokenizer_fingerprint=reader.fingerprint,
                vocab_size=reader.vocab_size,
                source=sources[part],
                shown_as=output if held_out is None else output / part,
            )
            for part in parts
        }
        for writer in writers.values():
            stack.callback(writer.close)
        for lines in chunks(files, at_once):
            documents = _keep(reader.read(lines), max_length, seen, report)
            aside = np.zeros(len(documents), dtype=bool)
            if held_out is not None:
                answered = [answer_id(row.input_ids, row.loss_mask) for row in documents]
                aside = in_held_out(np.array(answered, dtype=np.int64), held_out)
            for row, held in zip(documents, aside.tolist(), strict=True):
                writers["held_out" if held else "train"].add(row.input_ids, row.loss_mask)
                report.kept += 1
                if report.kept <= show:
                    show_document(row, report.kept, reader.tokenizer, console)
            if report.rows == len(report.skipped) == at_once and max_bad < 1.0:
                break  # not one usable row in the first chunk: the rest can wait until that is explained
        _refuse_bad(report, files, reader.folder, max_bad)
        if isinstance(reader, RegeneratingReader):
            facts = reader.facts()
            for source in sources.values():  # the writers hold them, and write them when they finish
                source["answers"] = facts
        for part, writer in writers.items():
            if writer.rows == 0:
                raise DataError(
                    f"{output}: held_out = {held_out} leaves {part} without a document of {report.kept}; "
                    "choose another share or give more distinct answers"
                )
            report.manifests[part] = writer.finish()
        write_skipped(partial, report)
    print_report(report, console)
    if isinstance(reader, RegeneratingReader):
        say(reader.summary())
    return report


def answer_part(
    inputs: Sequence[Path | str],
    tokenizer_folder: Path | str,
    output: Path | str,
    part: Part,
    *,
    max_length: int | None = None,
    held_out: float | None = None,
    max_bad: float = 0.01,
    overwrite: bool = False,
    template_options: Mapping[str, Any] | None = None,
    answer_writer: AnswerWriter,
    console: Console | None = None,
) -> AnswerCounts:
    """Let the target answer one part of the rows, and keep its answers beside `output` for `prepare`.

    Parts can be answered at once, by processes that know nothing of each other. `prepare` with the same
    arguments takes their answers, writes those that are missing, and makes the documents.

    Args:
        part: which rows. The other arguments are those of `prepare`: what it would refuse is refused
            here, before hours of answering.

    Raises:
        DataError: as `prepare`.
        DiskError: writing fails under way.
    """
    files, output, console = list_inputs(inputs), Path(output), console or Console()
    _refuse_out_of_range(max_length, held_out, max_bad)
    refuse_or_replace(output, overwrite)
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    # A part's rows stand among those of the others, and are to fill batches too.
    at_once = max(_CHUNK_ROWS, 8 * answer_writer.batch) * part.of
    with AnswerFile(output, settings_of(answer_writer, max_length), say, part) as kept:
        reader = RegeneratingReader(
            tokenizer_folder,
            template_options,
            answer_writer,
            kept,
            max_length=max_length,
            console=console,
            part=part,
        )
        asked = reader.count(chain.from_iterable(chunks(files, at_once)), output)
        _refuse_bad(asked, files, reader.folder, max_bad)
        for lines in chunks(files, at_once):
            reader.read(lines)
    say(reader.summary())
    return reader.counts


class _RowReader:
    """Lines to tokens, with a tokenizer whose template is looked at when the first conversation comes."""

    def __init__(
        self, folder: Path | str, answers: Literal["all", "last"], options: Mapping[str, Any] | None
    ) -> None:
        self.folder = str(folder)
        self.tokenizer = load_tokenizer(folder)
        self.vocab_size = vocabulary_size(self.tokenizer)
        self.fingerprint = tokenizer_fingerprint(self.tokenizer)
        self._answers = answers
        self._options = options
        self._template: ChatTemplate | None = None

    def read(self, lines: list[tuple[str, bytes]]) -> list[tuple[str, Tokens | BadRow]]:
        """Each line's tokens, or why there are none."""
        found: dict[str, Tokens | BadRow] = {}
        conversations: dict[str, list[Message]] = {}
        for where, line in lines:
            try:
                row = parse_row(line)
                tokens = parse_token_row(row, self.vocab_size)
                if tokens is None:
                    conversations[where] = parse_messages(row)
                else:
                    found[where] = tokens
            except BadRow as bad:
                found[where] = bad
        if conversations:
            if self._template is None:
                self._template = ChatTemplate(
                    self.tokenizer, self.folder, answers=self._answers, options=self._options
                )
            tokenized = self._template.tokenize(list(conversations.values()))
            found.update(zip(conversations, tokenized, strict=True))
        return [(where, found[where]) for where, _ in lines]


def _keep(
    rows: list[tuple[str, Tokens | BadRow]], max_length: int | None, seen: set[int], report: Report
) -> list[Tokens]:
    """The rows to write, cut to `max_length`; the others are counted in the report."""
    kept: list[Tokens] = []
    for where, documents in groupby(rows, key=lambda row: row[0]):  # a row may give several
        report.rows += 1
        before, reasons = len(kept), []
        for _, row in documents:
            if isinstance(row, BadRow):
                reasons.append(row.reason)
                report.skipped.append(Skipped(where, row.reason, row.detail, row.template))
                continue
            cut = max_length is not None and len(row.input_ids) > max_length
            if cut:
                row = Tokens(row.input_ids[:max_length], row.loss_mask[:max_length])
            identity = content_id(row.input_ids, row.loss_mask)
            if first_label(row.loss_mask) < 0:
                reasons.append(NOTHING_LEFT)
            elif identity in seen:
                reasons.append(DUPLICATE)
            else:
                seen.add(identity)
                report.cut += cut
                kept.append(row)
        if len(kept) > before:
            report.rows_kept += 1
            report.left_out.update(reasons)
        else:
            report.dropped[reasons[0]] += 1
    return kept


def _refuse_out_of_range(max_length: int | None, held_out: float | None, max_bad: float) -> None:
    if held_out is not None:
        in_held_out(np.zeros(0, dtype=np.int64), held_out)  # refuses a share out of range
    if not 0.0 <= max_bad <= 1.0:
        raise DataError(f"max_bad = {max_bad}: a share lies between 0 and 1")
    if max_length is not None and max_length < 2:
        raise DataError(f"max_length = {max_length}: a document has 2 tokens at least, prompt and answer")


def _refuse_bad(report: Report, files: list[Path], folder: str, max_bad: float) -> None:
    names = ", ".join(map(str, files))
    if report.rows == 0:
        raise DataError(f"{names}: no rows, only blank lines")
    bad = report.skipped
    if report.kept and len(bad) <= max_bad * report.rows:
        return
    reasons = "; ".join(f"{count} × {reason}" for reason, count in report.dropped.most_common())
    first = "".join(f"\n  {row}" for row in bad[:5])
    if len(bad) == report.rows and all(row.template for row in bad):
        raise DataError(
            f"{folder}: this tokenizer's chat template doesn't let the answers be located in any of "
            f"the {report.rows} rows read from {names} ({reasons}); use a template with {{% generation %}} "
            f"marks, template options that leave answers alone, or rows of prompt_ids and answer_ids{first}"
        )
    if not report.kept:
        raise DataError(f"{names}: none of the {report.rows} rows read can be kept ({reasons}){first}")
    raise DataError(
        f"{names}: {len(bad)} of {report.rows} rows are bad, more than max_bad = {max_bad} ({reasons}); "
        f"mend the file or raise max_bad (--max-bad){first}"
    )
