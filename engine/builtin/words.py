"""Words, names and numbers to make prompts from, and the frozen functions of Python's standard library.

Everything is drawn from the generator that is handed in, with calls whose results are the same in
every Python version the package runs on.
"""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

STDLIB_PAIRS = Path(__file__).with_name("stdlib_pairs.jsonl")

_LEXICON_SIZE = 700
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FIELDS = (
    "name", "city", "color", "size", "price", "count", "owner", "title", "year", "code", "status", "level",
    "weight", "score", "team", "street", "material", "model", "version", "language",
)  # fmt: skip
NUMERIC_FIELDS = frozenset(("size", "price", "count", "year", "level", "weight", "score"))
THINGS = (
    "apples", "lamps", "stones", "books", "coins", "ropes", "boats", "keys", "maps", "shells", "boxes",
    "candles", "letters", "bottles", "wheels", "drums", "feathers", "ladders", "pencils", "baskets",
)  # fmt: skip
PLACES = (
    "harbour", "market", "library", "forest", "station", "garden", "bridge", "tower", "island", "village",
    "museum", "castle", "valley", "workshop", "lighthouse", "square",
)  # fmt: skip
QUALITIES = (
    "quiet", "golden", "broken", "heavy", "tiny", "strange", "green", "ancient", "bright", "empty", "warm",
    "narrow", "famous", "gentle", "hidden", "wooden",
)  # fmt: skip


@cache
def stdlib_pairs() -> tuple[dict[str, str], ...]:
    """The frozen functions: `module`, `signature`, `docstring`, `body`."""
    return tuple(json.loads(line) for line in STDLIB_PAIRS.read_text(encoding="utf-8").splitlines())


@cache
def ambiguous_bodies() -> frozenset[str]:
    """Bodies whose module, signature and docstring another frozen function shares, such as a sibling class's.

    What is asked for is then not clear from the prompt. They are part of what the built-in target was
    trained on, so they stay in the text; nothing that ships is made from them.
    """
    asked = [(pair["module"], pair["signature"], pair["docstring"]) for pair in stdlib_pairs()]
    times = Counter(asked)
    return frozenset(pair["body"] for pair, key in zip(stdlib_pairs(), asked, strict=True) if times[key] > 1)


@cache
def lexicon() -> tuple[str, ...]:
    """Common lower-case words of three to nine letters from the frozen docstrings, in alphabetical order."""
    counts: Counter[str] = Counter()
    for pair in stdlib_pairs():
        counts.update(word for word in pair["docstring"].split() if word.isalpha() and word.islower())
    ranked = sorted((word for word in counts if 3 <= len(word) <= 9), key=lambda word: (-counts[word], word))
    return tuple(sorted(ranked[:_LEXICON_SIZE]))


def invent(random: Random, syllables: int) -> str:
    """A pronounceable word that no dictionary has, so that it can only be read off the prompt."""
    parts = [random.choice("bdfgklmnprstvz") + random.choice("aeiou") for _ in range(syllables)]
    return "".join(parts) + (random.choice("nrlsk") if random.randrange(2) else "")


def draw_word(random: Random) -> str:
    return random.choice(lexicon()) if random.randrange(10) < 6 else invent(random, random.randrange(2, 4))


def draw_words(random: Random, count: int) -> list[str]:
    """`count` different words."""
    chosen: list[str] = []
    while len(chosen) < count:
        word = draw_word(random)
        if word not in chosen:
            chosen.append(word)
    return chosen


def draw_name(random: Random) -> str:
    return invent(random, random.randrange(2, 4)).capitalize()


def draw_number(random: Random) -> int:
    """Mostly two and three digits, which keeps sums within a small model's reach."""
    return random.randrange(2, 100) if random.randrange(2) else random.randrange(100, 1000)
