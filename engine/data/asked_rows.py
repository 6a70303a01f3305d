"""Rows as questions: what a target is asked by each, whatever answers stand beside them.

Many processes can share a file's questions without knowing of each other: which part a row falls to
follows from what is asked first in it. All turns of a conversation stay together, since each needs the
answers before it, and so do rows that ask the same. The hash leaves each part the same mix of lengths.
"""

import math
import re
from typing import Any, Self

import attrs
import numpy as np
import orjson

from engine.data.chat import BadRow, Message, Tokens, parse_messages, parse_row, parse_token_row
from engine.data.shards import hash63
from engine.errors import InputError


@attrs.frozen
class Part:
    """One of several shares of the rows."""

    number: int
    """From 1."""
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`2/8`, as on a command line; InputError where it is none."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of:
            raise InputError(f"--part {text}: a part is I/N, the I-th of N, with I from 1 to N, such as 2/8")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def share_of(self, other: "Part | None") -> float:
        """Of the rows of another part, or of all (None), the share that falls to this one too."""
        if other is None:
            return 1 / self.of
        common = math.gcd(self.of, other.of)
        return common / self.of if (self.number - other.number) % common == 0 else 0.0

    def has(self, row: "Conversation") -> bool:
        """Whether a row falls to this part."""
        return row.identity % self.of == self.number - 1


@attrs.define(eq=False)
class Conversation:
    """A row under way: what was said, and the documents that this makes."""

    where: str
    turns: list[Message]
    """Answers of the source are still in here, to be replaced one after the other."""
    prompt: list[int] | None
    """Of a row that gives ids."""
    ids: list[int] = attrs.field(factory=list)
    mask: list[bool] = attrs.field(factory=list)
    documents: list[Tokens] = attrs.field(factory=list)
    bad: BadRow | None = None
    place: int = -1
    """The answer that is next; after the last one, past the end."""
    identity: int = 0
    """A function of what is asked first."""

    def __attrs_post_init__(self) -> None:
        self.advance()
        asked: list[Any] = self.prompt or [[turn.role, turn.content] for turn in self.turns[: self.place]]
        self.identity = hash63(orjson.dumps(asked))

    def advance(self) -> None:
        """Go to the next answer."""
        places = range(self.place + 1, len(self.turns))
        self.place = next((p for p in places if self.turns[p].role == "assistant"), len(self.turns))

    @property
    def waits(self) -> bool:
        """Whether an answer is to be written."""
        return self.bad is None and self.place < len(self.turns)

    @property
    def answers_left(self) -> int:
        """Answers to be written, the next one included."""
        return sum(turn.role == "assistant" for turn in self.turns[self.place :]) if self.waits else 0

    def close(self) -> None:
        """No more answers: what stands so far is the last document."""
        self.documents.append(Tokens(np.array(self.ids, dtype=np.int64), np.array(self.mask, dtype=bool)))
        self.ids, self.mask, self.place = [], [], len(self.turns)


def parse_asked(where: str, line: bytes, vocab_size: int) -> Conversation:
    """What a line asks; BadRow where it asks nothing that can be answered."""
    row = parse_row(line)
    if "prompt_ids" in row:  # an answer beside them is not looked at
        tokens = parse_token_row({"prompt_ids": row["prompt_ids"], "answer_ids": [0]}, vocab_size)
        if tokens is not None:
            return Conversation(where, [Message("assistant", "")], tokens.input_ids[:-1].tolist())
    return Conversation(where, parse_messages(_with_answers_blanked(row)), None)


def _with_answers_blanked(row: dict[str, Any]) -> dict[str, Any]:
    """A row with a stand-in for each answer, and one behind a last question: what they said is not used."""
    key = next((name for name in ("messages", "conversations") if row.get(name) is not None), None)
    if key is None:
        return row
    turns = row[key]
    if isinstance(turns, str):
        try:
            turns = orjson.loads(turns)
        except orjson.JSONDecodeError:
            return row
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return row
    blank = {"role": "assistant", "content": "-"}
    roles = [turn.get("role", turn.get("from")) for turn in turns]
    answered = [
        blank if role in ("assistant", "gpt") else turn for role, turn in zip(roles, turns, strict=True)
    ]
    if roles and roles[-1] in ("user", "human"):
        answered.append(blank)
    return {key: answered}
