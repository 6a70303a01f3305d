"""One prompt answered by target and drafter together, printed as it comes.

The answer goes to standard output, the rest to standard error, so that a pipe gets the text alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from engine.decoded_sample import AnswerPrinter, TextStream
from engine.dflash.speculation import Decoded, speculate
from engine.errors import InputError
from engine.served_pair import ServedPair, chosen_device, earlier_tuning, load_pair


def generate(
    path: Path,
    prompt: str,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = True,
    template: Mapping[str, Any] | None = None,
    target: str | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
    output: Console,
    notes: Console,
) -> Decoded:
    """Answer a prompt and print the answer while it is decoded, the drafter's tokens in colour.

    Args:
        path: a checkpoint, or a run's folder. target, trust_remote_code, device: see `load_pair`.
        max_new_tokens: of the answer. temperature: 0 is greedy. seed: of the sampling.
        chat: render the prompt by the chat template of the target's tokenizer; otherwise it is continued.
        template: variables for the template, such as `{"enable_thinking": False}`.
        output: takes the answer. notes: takes progress, and what the answer came to.

    Raises:
        InputError: of the kind that fits, where checkpoint, target, device or prompt cannot be used.
    """

    def say(line: str) -> None:
        notes.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    if not prompt:  # known before anything is loaded
        raise InputError("--prompt is empty: give some text to answer, or to go on with")
    name = chosen_device(device)
    with earlier_tuning(name, say):
        pair = load_pair(path, target=target, trust_remote_code=trust_remote_code, device=name, say=say)
        if pair.schedule is not None and pair.schedule.train.zero_taps:
            say("this drafter was trained without the target's states: here it gets them, and accepts little")
        ids = prompt_ids(pair, prompt, chat=chat, template=template)
        if len(ids) + max_new_tokens > (limit := pair.target.summary.max_position_embeddings):
            raise InputError(
                f"--max-new-tokens {max_new_tokens}: with a prompt of {len(ids)} tokens that is more than "
                f"the target's {limit} positions; lower it"
            )
        printer = AnswerPrinter(output, TextStream(pair.tokenizer, list(ids)), pair.stop)
        (decoded,) = speculate(
            pair.target,
            pair.drafter,
            [ids],
            max_new_tokens=max_new_tokens,
            stop=pair.stop,
            temperature=temperature,
            seed=seed,
            on_tokens=lambda _, tokens, drafted: printer.add(tokens, drafted),
        )
        printer.end()
        say(printer.summary(decoded, pair.config.block_size))
        if decoded.tokens[-1] not in pair.stop:
            say(f"the answer reached --max-new-tokens {max_new_tokens}")
        return decoded


def prompt_ids(
    pair: ServedPair, prompt: str, *, chat: bool, template: Mapping[str, Any] | None = None
) -> list[int]:
    """A prompt as the target reads it.

    Raises:
        InputError: it is empty, holds the mask token, or the template refuses it.
    """
    tokenizer: PreTrainedTokenizerBase = pair.tokenizer
    folder = pair.target.summary.folder
    text = prompt
    if chat:
        if tokenizer.chat_template is None:
            raise InputError(f"{folder}: its tokenizer has no chat template; give --no-chat")
        try:
            text = str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    tokenize=False,
                    add_generation_prompt=True,
                    **(template or {}),
                )
            )
        except jinja2.TemplateError as error:
            raise InputError(f"--prompt: the chat template of {folder} refuses it: {error}") from error
    elif template:
        raise InputError("--template sets variables of the chat template, and --no-chat leaves it out")
    ids: list[int] = list(tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"])
    if not ids:
        raise InputError("--prompt is empty: give some text to go on with")
    if pair.config.mask_token_id in ids:
        raise InputError(
            f"--prompt: holds the drafter's mask token {pair.config.mask_token_id}, which it would take for "
            "a slot to be filled"
        )
    return ids
