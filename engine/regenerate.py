"""`prepare --answers target`: loads the target that is to write the answers.

What an answer depends on (weights, sampling, limits) goes into the manifest and into the name of the
file in which answers are kept, so that answers of two settings cannot be mixed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.builtin import resolve
from engine.data.chat import Tokens
from engine.data.regeneration import AnswerWriter
from engine.devices import available_devices
from engine.errors import InputError, TargetError
from engine.target.configuration import read_target_config
from engine.target.fingerprint import config_fingerprint, weights_fingerprint
from engine.target.generation import decode_alone
from engine.target.loading import Target, load_target
from engine.target.sampling import check_temperature
from engine.target_agreement import documents_agreement


def requested_writer(
    answers: str, target: str | None, settings: Mapping[str, Any], say: Callable[[str], None]
) -> AnswerWriter | None:
    """The target that a command line asks to write the answers; None where it asks for none.

    Args:
        answers: of `--answers`. target: of `--target`.
        settings: what was given of `load_answer_writer`'s arguments; None where it was not.

    Raises:
        InputError: flags that go with a target are given without one, or the other way round.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if answers == "target":
        if target is None:
            raise InputError("--answers target: whose answers? Give the target's folder with --target")
        return load_answer_writer(resolve(target), say=say, **given)
    flags = ["target"] * (target is not None) + list(given)
    if flags:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
        raise InputError(f"{named}: only with --answers target, which lets a target write the answers")
    return None


def load_answer_writer(
    folder: Path,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 1024,
    batch: int = 32,
    seed: int = 0,
    device: str | None = None,
    dtype: str = "bfloat16",
    trust_remote_code: bool = False,
    say: Callable[[str], None],
) -> AnswerWriter:
    """Load a target that answers.

    Args:
        folder: of the target.
        temperature: 0 takes the most likely token; above it, tokens are drawn.
        max_new_tokens: of an answer, its end included.
        batch: prompts side by side.
        seed: of the draws; each is a function of it, the prompt and the place.
        device: a GPU where there is one, by default.
        dtype: the one the target will be served in.

    Raises:
        TargetError: the folder cannot be used, or says nowhere what ends an answer.
        InputError: the device is not there, or the temperature cannot be used.
    """
    check_temperature(temperature)  # before minutes of loading
    summary = read_target_config(folder)
    if not summary.eos_token_ids:
        raise TargetError(
            f"{folder}: neither config.json nor generation_config.json nor the tokenizer names an "
            "eos_token_id, so no answer would ever end; add it to generation_config.json"
        )
    there = available_devices()
    if device is not None and device not in there:
        raise InputError(f"--device {device}: no such device here; there are {', '.join(there)}")
    place = torch.device(device or there[min(1, len(there) - 1)])  # the CPU stands first
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


def answer_writer(
    target: Target,
    facts: dict[str, Any],
    *,
    temperature: float,
    max_new_tokens: int,
    batch: int,
    seed: int,
) -> AnswerWriter:
    """A loaded target as the writer of answers; `facts` name it and its settings."""
    stop = frozenset(target.summary.eos_token_ids)

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        return decode_alone(
            target,
            prompts,
            max_new_tokens=most,
            stop=stop,
            temperature=temperature,
            seed=seed,
            rows_at_once=batch,
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
        batch=batch,
        facts=facts,
        agreement=agreement,
    )
