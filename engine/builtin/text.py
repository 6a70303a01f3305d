"""Seeded conversations for the built-in target: one user prompt and the one right answer to it.

A drafter that reads hidden states is only worth training on text where those states know more than
the last token does. So nearly every answer here is made from its prompt: words to copy, letters to
spell, lists to sort, values to put into JSON, names to tell a story about. The answer is a function
of the prompt alone, and its wording follows the prompt's wording, so a target can learn to give
exactly this answer and a generated answer can be marked right or wrong. (A few functions of the
standard library are the exception, see `ambiguous_bodies`.)

Conversation `index` of a seed does not depend on any other: any process can make any part of the
text. One answer in eight, chosen by the answer's own hash, is set aside: the target never trains on
it, and the shipped prompts are taken from there.
"""

import zlib
from dataclasses import dataclass
from random import Random

from engine.builtin.kinds import KINDS

SET_ASIDE = 8  # one answer in this many is never trained on


@dataclass(frozen=True)
class Conversation:
    """One user turn and its one right answer."""

    kind: str
    prompt: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        """Both turns in the form that chat templates take."""
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]


def is_set_aside(answer: str) -> bool:
    """Whether the target must never see this answer in training."""
    return zlib.crc32(answer.encode()) % SET_ASIDE == 0


def conversation(seed: int, index: int) -> Conversation:
    """Conversation `index` of the endless text of `seed`, whatever was made before it."""
    random = Random(f"{seed}:{index}")
    kind = random.choices(list(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    prompt, answer = KINDS[kind][1](random)
    return Conversation(kind, prompt, answer)
