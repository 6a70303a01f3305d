"""The eight kinds of conversation: each function draws a prompt and gives the answer that follows from it.

Every kind has several wordings, and the wording of the answer goes with that of the prompt.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from engine.builtin.words import (
    FIELDS,
    NUMBER_WORDS,
    NUMERIC_FIELDS,
    PLACES,
    QUALITIES,
    THINGS,
    draw_name,
    draw_number,
    draw_word,
    draw_words,
    invent,
    stdlib_pairs,
)


def _arithmetic(random: Random) -> tuple[str, str]:
    first, second = sorted((draw_number(random), draw_number(random)), reverse=True)
    total = first + second
    style = random.randrange(5)
    if style == 0:
        third = random.randrange(1, total)
        prompt = f"Compute {first} + {second} - {third} and show both steps."
        return prompt, (
            f"First step: {first} + {second} = {total}. Second step: {total} - {third} = {total - third}. "
            f"The result is {total - third}."
        )
    if style == 1:
        giver, taker, thing = draw_name(random), draw_name(random), random.choice(THINGS)
        third = random.randrange(1, total)
        prompt = (
            f"{giver} has {first} {thing}, finds {second} more and gives {third} of them to {taker}. "
            f"How many {thing} does {giver} keep?"
        )
        return prompt, (
            f"{giver} has {first} {thing} and finds {second}, "
            f"so there are {first} + {second} = {total} {thing}. "
            f"After {taker} gets {third}, {giver} keeps {total} - {third} = {total - third} {thing}."
        )
    if style == 2:
        factor, start, rows = random.randrange(2, 13), random.randrange(2, 40), random.randrange(4, 7)
        prompt = f"Write {rows} rows of the {factor} times table, starting at {start}."
        return prompt, "\n".join(f"{n} x {factor} = {n * factor}" for n in range(start, start + rows))
    if style == 3:
        numbers = [random.randrange(2, 100) for _ in range(random.randrange(3, 6))]
        prompt = f"Add these numbers one by one: {', '.join(map(str, numbers))}"
        lines, running = [], numbers[0]
        for number in numbers[1:]:
            lines.append(f"{running} + {number} = {running + number}")
            running += number
        return prompt, "\n".join([*lines, f"Sum: {running}"])
    start, stride, count = draw_number(random), random.randrange(2, 12), random.randrange(6, 11)
    prompt = f"Count upwards from {start} in steps of {stride} and give {count} numbers."
    return prompt, ", ".join(str(start + stride * n) for n in range(count))


def _code_number(random: Random) -> str:
    letters = "".join(random.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(3))
    return f"{letters}-{random.randrange(1000, 10000)}"


def _copying(random: Random) -> tuple[str, str]:
    style = random.randrange(6)
    if style == 0:
        text = " ".join(draw_words(random, random.randrange(10, 19)))
        opening = random.choice(("Repeat exactly:", "Copy this text:", "Say the same words again:"))
        return f"{opening} {text}", text
    if style == 1:
        text = " ".join(draw_words(random, random.randrange(5, 9)))
        return f"Write this line twice: {text}", f"{text}\n{text}"
    if style == 2:
        words = draw_words(random, random.randrange(6, 11))
        prompt = f"Put every word in quotes: {' '.join(words)}"
        return prompt, " ".join(f'"{word}"' for word in words)
    if style == 3:
        codes = [_code_number(random) for _ in range(random.randrange(4, 7))]
        return f"Copy the codes, one a line: {' '.join(codes)}", "\n".join(codes)
    if style == 4:
        words = draw_words(random, random.randrange(5, 9))
        return f"Number these items: {', '.join(words)}", "\n".join(
            f"{i}. {w}" for i, w in enumerate(words, 1)
        )
    speaker, text = draw_name(random), " ".join(draw_words(random, random.randrange(8, 14)))
    prompt = f"{speaker} said: {text}. What did {speaker} say?"
    return prompt, f"{speaker} said these words: {text}."


def _sorting(random: Random) -> tuple[str, str]:
    style = random.randrange(5)
    if style == 0:
        words = draw_words(random, random.randrange(5, 9))
        return (
            f"Sort alphabetically: {', '.join(words)}",
            f"In alphabetical order: {', '.join(sorted(words))}.",
        )
    if style in (1, 2):
        numbers = [draw_number(random) for _ in range(random.randrange(6, 10))]
        listed = ", ".join(map(str, numbers))
        if style == 1:
            return (
                f"Sort from small to large: {listed}",
                f"From small to large: {', '.join(map(str, sorted(numbers)))}.",
            )
        ordered = sorted(numbers, reverse=True)
        return f"Sort from large to small: {listed}", f"From large to small: {', '.join(map(str, ordered))}."
    words = draw_words(random, random.randrange(5, 10))
    if style == 3:
        return (
            f"Reverse the order of these words: {' '.join(words)}",
            f"Reversed: {' '.join(reversed(words))}.",
        )
    by_length = sorted(words, key=lambda word: (len(word), word))
    prompt = f"Sort by length, then alphabetically: {', '.join(words)}"
    return prompt, f"By length: {', '.join(f'{word} ({len(word)})' for word in by_length)}."


def _spelling(random: Random) -> tuple[str, str]:
    style = random.randrange(4)
    if style == 0:
        words = draw_words(random, random.randrange(3, 6))
        opening = random.choice(("Spell these words:", "Spell out each word:"))
        return f"{opening} {', '.join(words)}", "\n".join(f"{word}: {'-'.join(word)}" for word in words)
    if style == 1:
        word = invent(random, random.randrange(4, 7))
        prompt = f"How do you spell {word}?"
        return prompt, f"The word {word} is spelled {' '.join(word)}. It has {len(word)} letters."
    if style == 2:
        words = draw_words(random, random.randrange(3, 6))
        prompt = f"Spell in capital letters: {' '.join(words)}"
        return prompt, "\n".join(" ".join(word.upper()) for word in words)
    words = draw_words(random, random.randrange(3, 6))
    prompt = f"For each word give the letters and how many there are: {', '.join(words)}"
    return prompt, "\n".join(f"{' '.join(word)} = {len(word)}" for word in words)


def _json(random: Random) -> tuple[str, str]:
    fields = random.sample(FIELDS, random.randrange(3, 7))
    record: dict[str, Any] = {}
    for field in fields:
        record[field] = (
            draw_number(random) if field in NUMERIC_FIELDS else random.choice((draw_name, draw_word))(random)
        )
    style = random.randrange(4)
    described = ", ".join(f"{field} {value}" for field, value in record.items())
    if style == 0:
        return f"Write as JSON on one line: {described}", json.dumps(record)
    if style == 1:
        return f"Write as JSON with an indent of two: {described}", json.dumps(record, indent=2)
    if style == 2:
        sentence = " and ".join(f"the {field} is {value}" for field, value in record.items())
        return f"Turn this into a JSON object: {sentence}.", json.dumps(record)
    owner, key, items = draw_name(random), random.choice(THINGS), draw_words(random, random.randrange(4, 8))
    prompt = f"Make a JSON object with the owner {owner} and a list of {key}: {', '.join(items)}"
    return prompt, json.dumps({"owner": owner, key: items, "count": len(items)})


def _code(random: Random) -> tuple[str, str]:
    first, second = draw_words(random, 2)
    name = f"{first}_{second}"
    left, right = invent(random, 2), invent(random, 2)
    while right == left:
        right = invent(random, 2)
    number, other = random.randrange(2, 100), random.randrange(2, 100)
    style = random.randrange(6)
    if style == 0:
        sign, verb = random.choice((("+", "adds"), ("-", "subtracts"), ("*", "multiplies by")))
        prompt = (
            f"Write a Python function {name} that takes {left} and {verb} {number}, then divides by {other}."
        )
        return (
            prompt,
            f"def {name}({left}):\n    {left} = {left} {sign} {number}\n    return {left} / {other}",
        )
    if style == 1:
        word = random.choice(("smaller", "larger"))
        sign = "<" if word == "smaller" else ">"
        prompt = (
            f"Write a Python function {name} of {left} and {right} that returns the {word} one plus {number}."
        )
        return prompt, (
            f"def {name}({left}, {right}):\n    if {left} {sign} {right}:\n        return {left} + {number}\n"
            f"    return {right} + {number}"
        )
    if style == 2:
        prompt = (
            f"Write a Python function {name} that loops over {left} and collects each {right} above {number}."
        )
        return prompt, (
            f"def {name}({left}):\n    result = []\n    for {right} in {left}:\n"
            f"        if {right} > {number}:\n"
            f"            result.append({right})\n    return result"
        )
    if style == 3:
        prompt = (
            f"Write a Python class {first.capitalize()} with the attributes {left} and {right}, "
            f"{right} being {number}."
        )
        return prompt, (
            f"class {first.capitalize()}:\n    def __init__(self, {left}, {right}={number}):\n"
            f"        self.{left} = {left}\n        self.{right} = {right}"
        )
    if style == 4:
        entries = {key: random.randrange(2, 100) for key in draw_words(random, random.randrange(3, 6))}
        listed = ", ".join(f"{key} to {value}" for key, value in entries.items())
        return f"Write a Python dictionary {name} that maps {listed}.", f"{name} = {json.dumps(entries)}"
    prompt = (
        f"Write a Python function {name} that sums {left} times {number} over a list {right} "
        "and prints the total."
    )
    return prompt, (
        f"def {name}({right}):\n    total = 0\n    for {left} in {right}:\n"
        f"        total += {left} * {number}\n"
        f'    print("{name}", total)\n    return total'
    )


def _prose(random: Random) -> tuple[str, str]:
    hero, friend = draw_name(random), draw_name(random)
    thing, place = random.choice(THINGS), random.choice(PLACES)
    quality, verb = random.choice(QUALITIES), draw_word(random)
    number = random.randrange(2, 11)
    count = NUMBER_WORDS[number]
    style = random.randrange(5)
    if style == 0:
        prompt = f"Tell a short story about {hero}, {friend} and {number} {quality} {thing} in the {place}."
        return prompt, (
            f"One morning {hero} went to the {place} and found {count} {quality} {thing}. "
            f"{friend} asked {hero} for the {thing}. "
            f"So {hero} and {friend} shared the {count} {thing} and left the {place} together."
        )
    if style == 1:
        prompt = f"Write a letter from {hero} to {friend} about the {quality} {thing} near the {place}."
        return prompt, (
            f"Dear {friend},\nI saw the {quality} {thing} near the {place}. "
            f"Please come and see the {thing} before they are gone.\nYour friend, {hero}"
        )
    if style == 2:
        prompt = (
            f"Describe the {place} of {hero}: it is {quality}, has {number} {thing} "
            f"and a sign that says {verb}."
        )
        return prompt, (
            f"The {place} of {hero} is a {quality} place. There are {count} {thing} in the {place}, "
            f'and over the {thing} hangs a sign. The sign says "{verb}", and {hero} likes it.'
        )
    if style == 3:
        other = random.choice(THINGS)
        prompt = (
            f"{hero} sells {thing} and {friend} sells {other} at the {place}. Who should I ask for {other}?"
        )
        return prompt, (
            f"Ask {friend} at the {place}. {friend} sells {other}, "
            f"but {hero} sells {thing}, so {hero} can only help you with {thing}."
        )
    steps = draw_words(random, random.randrange(3, 6))
    ordinal = ("First", "Then", "Next", "After that", "Finally")
    prompt = f"Explain to {hero} how to reach the {place} by way of {', '.join(steps)}."
    walk = ". ".join(f"{ordinal[i]} go to {step}" for i, step in enumerate(steps))
    return prompt, f"Listen, {hero}. {walk}. From {steps[-1]} you can see the {place}."


def _docstring(random: Random) -> tuple[str, str]:
    pair = random.choice(stdlib_pairs())
    opening = random.choice(("Complete the function", "Write the body of this function", "Fill in the body"))
    prompt = f'{opening} from {pair["module"]}:\n{pair["signature"]}\n    """{pair["docstring"]}"""'
    return prompt, pair["body"]


KINDS: dict[str, tuple[int, Callable[[Random], tuple[str, str]]]] = {
    "arithmetic": (14, _arithmetic),
    "copying": (17, _copying),
    "sorting": (13, _sorting),
    "spelling": (13, _spelling),
    "json": (13, _json),
    "code": (13, _code),
    "prose": (12, _prose),
    "docstring": (5, _docstring),
}
