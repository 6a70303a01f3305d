"""Answers written by the target itself, in place of those that stand in the data.

A drafter learns to foretell its target, so a label is right only where the target wrote it. Each turn
is answered in the context that a server would give it: the conversation so far, with the answers as
the target wrote them, through the chat template with its generation prompt. A document is those
prompt ids and the raw answer ids; what was generated is never rendered again. Where a later prompt
does not begin with what was said so far (templates drop earlier thinking, tokenizers split a text in
another way than it was generated), the turn begins a document of its own.

Hours of a large model are at stake, so batches are kept as they come (`answer_file.py`) and the same
command takes them up again. Which prompts share a batch follows from the rows and from how many are
answered together, not from what was answered before. Sampling draws from seed, prompt and place; what
the company in a batch can still change is the last bits of the logits, and with them a choice between
two tokens that are as good as equal.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jinja2
from rich.console import Console

from engine.data.answer_file import AnswerFile
from engine.data.answer_progress import AnswerProgress
from engine.data.asked_rows import Conversation, Part, parse_asked
from engine.data.chat import (
    BadRow,
    ChatTemplate,
    Message,
    Tokens,
    decode,
    load_tokenizer,
    tokenizer_fingerprint,
    vocabulary_size,
)
from engine.data.report import Report, Skipped, counted
from engine.errors import EngineError

Decode = Callable[[list[list[int]], int], list[list[int]]]
"""Continues prompts: `decode(prompts, most)` gives the new ids of each, `most` at most, the end included."""

_MEASURED_DOCUMENTS = 32


@attrs.frozen(kw_only=True)
class AnswerWriter:
    """The target that answers, and how."""

    decode: Decode
    stop: frozenset[int]
    """Ids that end an answer."""
    positions: int
    """Tokens that the target can hold, prompt and answer together."""
    max_new_tokens: int
    """Of an answer, its end included."""
    batch: int
    """Prompts that are answered side by side, at most."""
    room: Callable[[list[int], int], int] | None = None
    """How many have room, 1 at least: `room(prompt, length)`, by any of the prompts and the tokens of the
    longest text, answer included. None: `batch` always have."""
    facts: Mapping[str, Any]
    """Of target and sampling, for the manifest: other facts, other answers."""
    agreement: Callable[[Sequence[Tokens]], tuple[int, int]]
    """Of some documents: supervised tokens that are the target's most likely ones, and all of them."""


@attrs.define
class AnswerCounts:
    """What was written."""

    answers: int = 0
    resumed: int = 0
    """Those of an earlier attempt."""
    unfinished: int = 0
    """Those that reached a limit: they are kept without an end, and their conversation ends there."""
    split: int = 0
    """Documents begun because a prompt did not continue what had been said."""
    tokens: int = 0


def settings_of(writer: AnswerWriter, max_length: int | None) -> dict[str, Any]:
    """All that an answer depends on besides its prompt."""
    return {**_limits(writer), "max_length": max_length}


def _limits(writer: AnswerWriter) -> dict[str, Any]:
    """Who answers, and what ends an answer; stop ids may change while weights and configuration do not."""
    return {**writer.facts, "max_new_tokens": writer.max_new_tokens, "stop": sorted(writer.stop)}


class RegeneratingReader:
    """Lines to tokens, as `preparation` reads them, with every answer written by the target."""

    def __init__(
        self,
        folder: Path | str,
        options: Mapping[str, Any] | None,
        writer: AnswerWriter,
        file: AnswerFile,
        *,
        max_length: int | None,
        console: Console,
        part: Part | None = None,
    ) -> None:
        """
        Args:
            folder: of the tokenizer; its chat template is needed for conversations only.
            options: variables for the chat template.
            file: where answers are kept; open.
            max_length: of a document, in tokens: no answer goes beyond it.
            part: answer its rows alone, and give documents of no other.
        """
        self.folder = str(folder)
        self.tokenizer = load_tokenizer(folder)
        self.vocab_size = vocabulary_size(self.tokenizer)
        self.fingerprint = tokenizer_fingerprint(self.tokenizer)
        self.counts = AnswerCounts()
        self._options = dict(options or {})
        self._writer, self._file = writer, file
        self._longest = min(writer.positions, max_length or writer.positions)
        self._template: ChatTemplate | None = None
        self._measured: list[Tokens] = []
        self._agreement: float | None = None
        self._console, self._part = console, part
        self._progress = AnswerProgress(0, 0, console)

    def count(self, lines: Iterable[tuple[str, bytes]], output: Path) -> Report:
        """Say how many answers are asked for, before the first of them is written.

        Args:
            lines: all that will be read. output: for the report.

        Returns:
            The rows that ask nothing; there may be more that turn out bad, never fewer.
        """
        report = Report(output)
        asked = mine = 0
        for where, line in lines:
            report.rows += 1
            try:
                talk = self._parse(where, line)
            except BadRow as bad:
                report.skipped.append(Skipped(where, bad.reason, bad.detail, bad.template))
                report.dropped[bad.reason] += 1
                continue
            report.kept += 1
            asked += talk.answers_left
            mine += talk.answers_left if self._falls_here(talk) else 0
        there = min(self._file.usable, mine)
        self._progress = AnswerProgress(mine, there, self._console)
        share = "" if self._part is None else f", {mine:,} of them in part {self._part}"
        self._console.print(
            f"{counted(report.rows, 'row')} to give {counted(asked, 'answer')}{share}; {there:,} are there",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return report

    def _falls_here(self, talk: Conversation) -> bool:
        return self._part is None or self._part.has(talk)

    def read(self, lines: Sequence[tuple[str, bytes]]) -> list[tuple[str, Tokens | BadRow]]:
        """The documents of each line, or why there are none; most lines give one."""
        found: list[BadRow | Conversation] = []
        for where, line in lines:
            try:
                found.append(self._parse(where, line))
            except BadRow as bad:
                found.append(bad)
        talks = [row for row in found if isinstance(row, Conversation) and self._falls_here(row)]
        while waiting := [talk for talk in talks if talk.waits]:
            self._answer(waiting)
        self._progress.end()
        rows: list[tuple[str, Tokens | BadRow]] = []
        for (where, _), row in zip(lines, found, strict=True):
            if isinstance(row, BadRow):
                rows.append((where, row))
            elif row.bad is not None:
                rows.append((where, row.bad))
            else:
                rows.extend((where, document) for document in row.documents)
                self._measured.extend(row.documents[: _MEASURED_DOCUMENTS - len(self._measured)])
        return rows

    def facts(self) -> dict[str, Any]:
        """Whose answers these are and what they came to, for the manifest."""
        if self._agreement is None and self._measured:
            agreed, supervised = self._writer.agreement(self._measured)
            self._agreement = agreed / supervised if supervised else None
        counts = attrs.asdict(self.counts, filter=lambda field, _: field.name != "resumed")
        return {**_limits(self._writer), **counts, "agreement": self._agreement}

    def summary(self) -> str:
        """The same as a sentence."""
        counts = self.counts
        found = f", {counts.resumed:,} of them by an earlier attempt or part" if counts.resumed else ""
        agreement = "" if self._agreement is None else f"; target agreement {self._agreement:.3f}"
        return (
            f"{counted(counts.answers, 'answer')} of {counted(counts.tokens, 'token')} by the target{found}; "
            f"{counts.unfinished:,} reached a limit and lack an end; {counted(counts.split, 'turn')} began "
            f"another document, the prompt being no continuation{agreement}"
        )

    def _parse(self, where: str, line: bytes) -> Conversation:
        talk = parse_asked(where, line, self.vocab_size)
        if talk.prompt is None and self._template is None:
            self._template = ChatTemplate(self.tokenizer, self.folder, options=self._options)
        return talk

    def _answer(self, talks: Sequence[Conversation]) -> None:
        """Write the next answer of every conversation."""
        prompts: dict[tuple[int, ...], list[Conversation]] = {}
        for talk in talks:
            try:
                prompt = self._prompt(talk)
            except BadRow as bad:
                self._progress.passed(talk.answers_left)
                talk.bad = bad
                continue
            if len(prompt) >= self._longest:
                self._stop_before(talk, prompt)
            else:
                prompts.setdefault(tuple(prompt), []).append(talk)
        # Prompts of one length decode together best; the ids only make the order one of content.
        ordered = sorted(prompts, key=lambda prompt: (len(prompt), prompt))
        begin = 0
        while begin < len(ordered):
            batch = ordered[begin : begin + self._writer.batch]
            batch = batch[: self._together(batch)]
            self._answer_batch([(prompt, prompts[prompt]) for prompt in batch])
            begin += len(batch)

    def _together(self, prompts: Sequence[tuple[int, ...]]) -> int:
        """How many of these, the shortest first, have room beside the longest that is among them."""
        room, count = self._writer.room, len(prompts)

        def length(prompt: Sequence[int]) -> int:
            return min(len(prompt) + self._writer.max_new_tokens, self._longest)

        while room is not None and count > room(list(last := prompts[count - 1]), length(last)):
            count -= 1
        return count

    def _answer_batch(self, batch: Sequence[tuple[tuple[int, ...], list[Conversation]]]) -> None:
        missing = [list(prompt) for prompt, _ in batch if self._file.get(prompt) is None]
        if missing:
            rooms = [min(self._writer.max_new_tokens, self._longest - len(prompt)) for prompt in missing]
            written = self._writer.decode(missing, max(rooms))
            if len(written) != len(missing) or not all(written):
                raise EngineError(f"{len(missing)} prompts gave {len(written)} answers, some may be empty")
            self._file.add(missing, [answer[:room] for answer, room in zip(written, rooms, strict=True)])
        fresh = len(missing)
        for prompt, talks in batch:
            answer = self._file.get(prompt)
            assert answer is not None
            for talk in talks:
                before = talk.answers_left
                self._said(talk, list(prompt), answer)
                self._progress.passed(before - talk.answers_left)
        self.counts.resumed += len(batch) - fresh
        tokens = sum(len(self._file.get(prompt) or ()) for prompt in missing)
        self._progress.tell(fresh, len(batch) - fresh, tokens)

    def _said(self, talk: Conversation, prompt: list[int], answer: list[int]) -> None:
        """Add an answer, and what stands before it, to a conversation's documents."""
        if max(answer) >= self.vocab_size:
            talk.bad = BadRow("the target wrote an id that the tokenizer lacks", str(max(answer)))
            return
        ended = answer[-1] in self._writer.stop
        self.counts.answers += 1
        self.counts.tokens += len(answer)
        self.counts.unfinished += not ended
        if prompt[: len(talk.ids)] != talk.ids:
            self.counts.split += 1
            place = talk.place
            talk.close()
            talk.place = place
        talk.mask += [False] * (len(prompt) - len(talk.ids)) + [True] * len(answer)
        talk.ids = prompt + answer
        text = decode(self.tokenizer, answer[: len(answer) - ended])
        talk.turns[talk.place] = Message("assistant", text)
        talk.advance()
        if not ended or not talk.waits:
            talk.close()

    def _stop_before(self, talk: Conversation, prompt: list[int]) -> None:
        """No room for another answer; without one so far, the row has nothing to learn."""
        self._progress.passed(talk.answers_left)
        if not talk.ids and len(prompt) >= self._writer.positions:
            talk.bad = BadRow("prompt longer than the target can hold", f"{len(prompt)} tokens")
            return
        if not talk.ids:
            talk.ids, talk.mask = prompt, [False] * len(prompt)
        talk.close()

    def _prompt(self, talk: Conversation) -> list[int]:
        """Ids of the conversation so far with the template's generation prompt, as a server renders it."""
        if talk.prompt is not None:
            return talk.prompt
        turns = [{"role": turn.role, "content": turn.content} for turn in talk.turns[: talk.place]]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **self._options
            )
        except jinja2.TemplateError as error:
            raise BadRow("the template refuses the conversation", str(error), template=True) from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
