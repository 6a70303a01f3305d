"""`prepare --answers target`: loads the target that is to write the answers.

What an answer depends on (weights, sampling, limits) goes into the manifest and into the name of the
file in which answers are kept, so that answers of two settings cannot be mixed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.builtin import resolve
from engine.data.chat import Tokens, load_tokenizer, tokenizer_fingerprint, vocabulary_size
from engine.data.regeneration import AnswerWriter
from engine.decoding_batch import MOST_TOGETHER, TOGETHER_ON_CPU, rows_together
from engine.errors import InputError, TargetError
from engine.served_pair import Say, chosen_device, earlier_tuning
from engine.target.configuration import TargetSummary, read_target_config
from engine.target.fingerprint import config_fingerprint, weights_fingerprint
from engine.target.generation import decode_alone
from engine.target.loading import Target, load_target
from engine.target.sampling import check_temperature
from engine.target_agreement import documents_agreement

LIKE_LENGTHS = 256
"""Tokens: how many texts have room is found out for multiples of it."""


@contextmanager
def requested_writer(
    answers: str,
    target: str | None,
    settings: Mapping[str, Any],
    say: Say,
    *,
    tokenizer: str | None = None,
    part: str | None = None,
) -> Iterator[AnswerWriter | None]:
    """The target that a command line asks to write the answers; None where it asks for none.

    While it answers, earlier tuning of this machine is used and new tuning is kept.

    Args:
        answers: of `--answers`. target: of `--target`. tokenizer: of `--tokenizer`. part: of `--part`.
        settings: what was given of `load_answer_writer`'s arguments; None where it was not.

    Raises:
        InputError: flags that go with a target are given without one, or the other way round; or, of the
            kind that fits, the target cannot be used.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if answers == "target":
        if target is None:
            raise InputError("--answers target: whose answers? Give the target's folder with --target")
        given["device"] = chosen_device(given.get("device"))
        own = resolve(tokenizer) if tokenizer is not None else None
        with earlier_tuning(given["device"], say):
            yield load_answer_writer(resolve(target), tokenizer=own, say=say, **given)
        return
    flags = ["target"] * (target is not None) + list(given) + ["part"] * (part is not None)
    if flags:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
        raise InputError(f"{named}: only with --answers target, which lets a target write the answers")
    yield None


def load_answer_writer(
    folder: Path,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 1024,
    batch: int | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str = "bfloat16",
    trust_remote_code: bool = False,
    tokenizer: Path | None = None,
    say: Say,
) -> AnswerWriter:
    """Load a target that answers.

    Args:
        folder: of the target.
        temperature: 0 takes the most likely token; above it, tokens are drawn.
        max_new_tokens: of an answer, its end included.
        batch: prompts side by side; None: 32, on a GPU as many as have room, up to 256.
        seed: of the draws; each is a function of it, the prompt and the place.
        device: a GPU where there is one, by default.
        dtype: the one the target will be served in.
        trust_remote_code: run model code that stands in the folder.
        tokenizer: a folder that prompts are to be tokenized by, where that is not the target's own.

    Raises:
        TargetError: the folder cannot be used, or says nowhere what ends an answer.
        InputError: the device is not there, the temperature cannot be used, or the tokenizer is another's.
    """
    check_temperature(temperature)  # before minutes of loading
    summary = read_target_config(folder)
    if not summary.eos_token_ids:
        raise TargetError(
            f"{folder}: neither config.json nor generation_config.json nor the tokenizer names an "
            "eos_token_id, so no answer would ever end; add it to generation_config.json"
        )
    if tokenizer is not None:
        check_tokenizer(tokenizer, summary)
    place = torch.device(chosen_device(device))
    if place.type == "cpu":  # it would say that packages are not installed, which no CPU can use
        transformers.logging.set_verbosity_error()
    target = load_target(
        folder,
        target_layer_ids=[0],
        dtype=getattr(torch, dtype),
        device=place,
        keep_head=True,
        trust_remote_code=trust_remote_code,
        progress=say,
    )
    facts: dict[str, Any] = {
        "target": folder.resolve().name,
        "weights": weights_fingerprint(folder),
        "config": config_fingerprint(folder),
        "dtype": dtype,
        "temperature": temperature,
        "seed": seed if temperature else None,  # nothing is drawn without a temperature
    }
    return answer_writer(
        target,
        facts,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch=batch,
        seed=seed,
    )


def check_tokenizer(folder: Path, summary: TargetSummary) -> None:
    """Refuse a tokenizer that is not the target's: prompts would be other text to it than they are.

    A target's folder may hold no tokenizer; then all that can be told is that the ids fit.

    Raises:
        InputError: its ids mean something else to the target, or nothing at all.
    """
    tokenizer, target = load_tokenizer(folder), Path(summary.folder)
    if not any((target / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        if (ids := vocabulary_size(tokenizer)) > summary.vocab_size:
            raise InputError(
                f"--tokenizer {folder}: has {ids} ids, and the vocabulary of the target {target} ends "
                f"at {summary.vocab_size - 1}; give the tokenizer that the target was trained with"
            )
        return
    given, wanted = tokenizer_fingerprint(tokenizer), tokenizer_fingerprint(load_tokenizer(target))
    if given != wanted:
        raise InputError(
            f"--tokenizer {folder}: its vocabulary ({given}) is not that of the target {target} "
            f"({wanted}), which would read other text and whose documents no run would take; leave "
            "--tokenizer out, and the target's own is used"
        )


def answer_writer(
    target: Target,
    facts: dict[str, Any],
    *,
    temperature: float,
    max_new_tokens: int,
    batch: int | None,
    seed: int,
) -> AnswerWriter:
    """A loaded target as the writer of answers; `facts` name it and its settings, `batch` is none of them."""
    stop = frozenset(target.summary.eos_token_ids)

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        return decode_alone(
            target,
            prompts,
            max_new_tokens=most,
            stop=stop,
            temperature=temperature,
            seed=seed,
            rows_at_once=len(prompts),
        )

    def agreement(documents: Sequence[Tokens]) -> tuple[int, int]:
        return documents_agreement(
            target,
            ((torch.from_numpy(row.input_ids), torch.from_numpy(row.loss_mask)) for row in documents),
        )

    return AnswerWriter(
        decode=decode,
        stop=stop,
        positions=target.summary.max_position_embeddings,
        max_new_tokens=max_new_tokens,
        batch=batch or (MOST_TOGETHER if target.device.type == "cuda" else TOGETHER_ON_CPU),
        room=None if batch else rows_with_room(target),
        facts=facts,
        agreement=agreement,
    )


def rows_with_room(target: Target) -> Callable[[list[int], int], int]:
    """How many prompts a device has room for, as `AnswerWriter.room` asks; found once for like lengths."""
    known: dict[int, int] = {}

    def room(prompt: list[int], length: int) -> int:
        longest = -(-length // LIKE_LENGTHS) * LIKE_LENGTHS
        if longest not in known:
            torch.cuda.empty_cache()  # what earlier batches left is free, and must be seen to be
            known[longest] = rows_together(target, prompt, longest)
        return known[longest]

    return room
