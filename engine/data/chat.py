"""From conversations to tokens and masks, with every answer located exactly.

Three rules hold. Spans are found by token boundaries, never by a pattern over rendered text. A span
must decode to the answer as it stands in the data: many templates trim answers or drop and add
thinking blocks, and a drafter trained on such rewritten answers never meets them when it serves.
A row for which any of this fails is refused with a reason; nothing is guessed.

A template with `{% generation %}` marks says itself which tokens are the assistant's. For others
each answer's prompt is rendered with the generation prompt, as a server renders it, and must be a
prefix of the whole conversation, in text and in tokens; the same goes for the prompt with the answer
after it. The end-of-turn token behind an answer is supervised, since the model generates it too;
whatever the template adds after that token is not.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
import orjson
from attrs import frozen
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.errors import DataError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
# Parts of an answer that stand outside `content`: leaving them out would train on another answer.
_OUTSIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class BadRow(Exception):
    """A row that can't be used. `reason` is one of a few phrases to count by, `detail` is for this row."""

    def __init__(self, reason: str, detail: str = "", *, template: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.template = template  # whether the template, not the row, may be at fault


@frozen
class Message:
    """One turn; `role` is system, user or assistant."""

    role: str
    content: str


@frozen(eq=False)
class Tokens:
    """A row as tokens: int64 [L] and bool [L], True where supervised."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder; DataError where there is none. Nothing is downloaded."""
    if not Path(folder).is_dir():
        raise DataError(f"{folder}: no such tokenizer folder")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: holds no tokenizer that can be loaded ({error})") from error
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a tokenizer's vocabulary with its ids: two that agree give tokens the same meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.blake2b(orjson.dumps(vocabulary), digest_size=16).hexdigest()


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of tokens, special ones included, nothing tidied."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id the tokenizer can give."""
    return max(tokenizer.get_vocab().values()) + 1


def parse_row(line: bytes) -> dict[str, Any]:
    """A line of JSONL as an object; BadRow when it is none."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadRow("not JSON", str(error)) from error
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", f"a {type(row).__name__}")
    return row


def parse_token_row(row: Mapping[str, Any], vocab_size: int) -> Tokens | None:
    """A row of `prompt_ids` and `answer_ids`, joined as they are; None when it has neither."""
    if "prompt_ids" not in row and "answer_ids" not in row:
        return None
    for name in ("prompt_ids", "answer_ids"):
        ids = row.get(name)
        if not isinstance(ids, list) or any(type(entry) is not int for entry in ids):
            raise BadRow("prompt_ids and answer_ids must be lists of integers", name)
        if not ids:
            raise BadRow("empty answer" if name == "answer_ids" else "empty prompt")
        if min(ids) < 0 or max(ids) >= vocab_size:
            outside = next(entry for entry in ids if not 0 <= entry < vocab_size)
            raise BadRow("token id outside the vocabulary", f"{outside} is not in [0, {vocab_size})")
    prompt, answer = row["prompt_ids"], row["answer_ids"]
    mask = np.zeros(len(prompt) + len(answer), dtype=bool)
    mask[len(prompt) :] = True
    return Tokens(np.array(prompt + answer, dtype=np.int64), mask)


def parse_messages(row: Mapping[str, Any]) -> list[Message]:
    """The conversation of a row: `messages` or `conversations`, a list or JSON text of one."""
    turns = next((row[name] for name in ("messages", "conversations") if row.get(name) is not None), None)
    if turns is None:
        raise BadRow("no conversation", "neither messages nor conversations nor prompt_ids and answer_ids")
    if isinstance(turns, str):
        try:
            turns = orjson.loads(turns)
        except orjson.JSONDecodeError as error:
            raise BadRow("conversation is no list", f"text that is not JSON: {error}") from error
    if not isinstance(turns, list) or not turns:
        raise BadRow("conversation is no list", "empty" if turns == [] else f"a {type(turns).__name__}")
    messages = [_parse_message(turn) for turn in turns]
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        raise BadRow("no answer")
    if messages[0].role == "assistant":
        raise BadRow("an answer without a prompt before it")
    if any(not answer.content.strip() for answer in answers):
        raise BadRow("empty answer")
    return messages


def _parse_message(turn: object) -> Message:
    if not isinstance(turn, dict):
        raise BadRow("a turn is no object", f"a {type(turn).__name__}")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow("unknown role", f"{name!r}; known are {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, str):
        raise BadRow("content is not text", f"a {type(content).__name__} from {name}")
    outside = [key for key in _OUTSIDE_CONTENT if turn.get(key)]
    if outside:
        raise BadRow("part of an answer outside its content", ", ".join(outside))
    return Message(role, content)


class ChatTemplate:
    """A tokenizer's chat template, turning conversations into tokens with their answers marked.

    Args:
        tokenizer: with a chat template.
        name: what messages call it, usually its folder.
        answers: supervise "all" answers of a conversation or the "last" one only.
        options: variables handed to the template, e.g. `{"enable_thinking": False}`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        answers: Literal["all", "last"] = "all",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        template = tokenizer.chat_template
        if not isinstance(template, str):
            found = "none" if template is None else f"several: {', '.join(template)}"
            raise DataError(f"{name}: one chat template is needed and the tokenizer has {found}")
        self.name = name
        self.has_generation_marks = _GENERATION_MARK.search(template) is not None
        self._tokenizer = tokenizer
        self._answers = answers
        self._options = dict(options or {})
        self._special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}

    def tokenize(self, conversations: Sequence[Sequence[Message]]) -> list[Tokens | BadRow]:
        """Tokens of each conversation, or why it can't be used. Many at once, for the tokenizer's threads."""
        if self.has_generation_marks:
            return [self._attempt_marked(messages) for messages in conversations]
        texts: list[str] = []
        drafts: list[list[str] | BadRow] = []
        for messages in conversations:
            try:
                prefixes = self._render_prefixes(messages)
            except BadRow as bad:
                drafts.append(bad)
            else:
                drafts.append(prefixes)
                texts.extend(prefixes)
        ids = iter(self._encode(texts))
        found: list[Tokens | BadRow] = []
        for messages, draft in zip(conversations, drafts, strict=True):
            if isinstance(draft, BadRow):
                found.append(draft)
                continue
            try:
                found.append(self._mask_prefixes(messages, [next(ids) for _ in draft]))
            except BadRow as bad:
                found.append(bad)
        return found

    def _decode(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, ids)

    def _supervised(self, messages: Sequence[Message]) -> list[int]:
        places = [place for place, message in enumerate(messages) if message.role == "assistant"]
        return places if self._answers == "all" else places[-1:]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def _apply(self, messages: Sequence[Message], **settings: Any) -> Any:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(turns, **self._options, **settings)
        except jinja2.TemplateError as error:
            raise BadRow("the template refuses the conversation", str(error), template=True) from error

    def _render_prefixes(self, messages: Sequence[Message]) -> list[str]:
        """The whole conversation, then per supervised answer its prompt and its prompt with the answer."""
        whole = self._apply(messages, tokenize=False)
        texts = [whole]
        for place in self._supervised(messages):
            prompt = self._apply(messages[:place], tokenize=False, add_generation_prompt=True)
            if not whole.startswith(prompt):
                raise BadRow("the template rewrites a prompt once answered", f"turn {place}", template=True)
            answer = messages[place].content
            if not whole.startswith(answer, len(prompt)):
                shown = whole[len(prompt) : len(prompt) + 40]
                raise BadRow(
                    "the template changes the answer", f"turn {place} becomes {shown!r}", template=True
                )
            texts += [prompt, prompt + answer]
        return texts

    def _mask_prefixes(self, messages: Sequence[Message], ids: list[list[int]]) -> Tokens:
        whole, borders, places = ids[0], ids[1:], self._supervised(messages)
        mask = np.zeros(len(whole), dtype=bool)
        for place, prompt, answered in zip(places, borders[::2], borders[1::2], strict=True):
            for edge, part in (("starts", prompt), ("ends", answered)):
                if whole[: len(part)] != part:
                    raise BadRow(f"an answer {edge} inside a token", f"turn {place}", template=True)
            if not self._decodes_to(prompt, whole[len(prompt) : len(answered)], messages[place].content):
                raise BadRow("the tokenizer changes the answer", f"turn {place}", template=True)
            end = len(answered)
            if end < len(whole) and whole[end] in self._special:
                end += 1
            mask[len(prompt) : end] = True
        return Tokens(np.array(whole, dtype=np.int64), mask)

    def _attempt_marked(self, messages: Sequence[Message]) -> Tokens | BadRow:
        try:
            return self._mask_marked(messages)
        except BadRow as bad:
            return bad

    def _mask_marked(self, messages: Sequence[Message]) -> Tokens:
        encoded = self._apply(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        mask = np.array(encoded["assistant_masks"], dtype=bool)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
        spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        answers = [messages[place].content for place in self._supervised(messages)]
        if self._answers == "last" and spans:
            mask[: spans[-1][0]] = False
            spans = spans[-1:]
        if len(spans) != len(answers):
            detail = f"{len(answers)} answers and {len(spans)} marked spans"
            raise BadRow("the template's marks don't match the answers", detail, template=True)
        for (start, end), answer in zip(spans, answers, strict=True):
            self._check_span(ids[:start].tolist(), ids[start:end].tolist(), answer)
        return Tokens(ids, mask)

    def _check_span(self, before: list[int], span: list[int], answer: str) -> None:
        # Marks may take in the end of the turn: special tokens and white space, nothing else.
        tail = len(span)
        while tail and not self._decodes_to(before, span[:tail], answer):
            last = span[tail - 1]
            ends_turn = last in self._special or not self._decode([last]).strip()
            tail = tail - 1 if ends_turn else 0
        if not tail:
            shown = self._decode(span)[:40]
            raise BadRow("the template changes the answer", f"marked is {shown!r}", template=True)

    def _decodes_to(self, before: list[int], span: list[int], answer: str) -> bool:
        if self._decode(span) == answer:
            return True
        # Tokenizers that write a word's space before it drop that space at the start of a text.
        return self._decode(before + span) == self._decode(before) + answer
