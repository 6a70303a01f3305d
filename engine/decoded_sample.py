"""Decoded text with the drafter's share of it in colour, while it comes and at the end of a run.

Tokens are not characters: a byte-level token may be half of one, and some tokenizers write a word's space
with the word behind it. So text is handed out only once no later token can change it, decoded together
with the tokens before it.

The sample at a run's end is decoded from the files of the checkpoint, as a server would read them.
"""

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import attrs
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from engine.data.batches import BatchPlan
from engine.data.chat import decode, load_tokenizer
from engine.dflash.drafter import build_drafter
from engine.dflash.export import fill_drafter, read_drafter_config, read_drafter_weights
from engine.dflash.speculation import Decoded, speculate
from engine.errors import DifferenceFound, EngineError, InputError, is_out_of_memory
from engine.training_parts import TrainingParts

DRAFTED = "green"
SAMPLE_TOKENS = 96
PROMPT_SHOWN = 240  # characters of a prompt's end
UNFINISHED = "\ufffd"  # what a decoder puts where bytes of a character are missing


@attrs.define
class TextStream:
    """The text of a growing row of tokens, piece by piece."""

    tokenizer: PreTrainedTokenizerBase
    ids: list[int]
    """All tokens so far; those given at first are the context of the next and are not handed out."""
    begin: int = attrs.field(init=False, default=0)
    told: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.begin, self.told = max(0, len(self.ids) - 8), len(self.ids)

    def add(self, token: int) -> str:
        """The text that this token completes; empty where more tokens are needed for it."""
        self.ids.append(token)
        text = self._new()
        if not text or text.endswith(UNFINISHED):
            return ""
        self.begin, self.told = self.told, len(self.ids)
        return text

    def rest(self) -> str:
        """What is still held back: half a character, at the most."""
        text, self.told = self._new(), len(self.ids)
        return text

    def _new(self) -> str:
        known = decode(self.tokenizer, self.ids[self.begin : self.told])
        return decode(self.tokenizer, self.ids[self.begin :])[len(known) :]


@attrs.define
class AnswerPrinter:
    """Prints an answer as its tokens come: the drafter's in colour, the target's own plain."""

    console: Console
    stream: TextStream
    stop: Collection[int]
    drafted: int = 0
    """How many of the answer's tokens the drafter proposed."""
    tokens: int = 0
    begin: float = attrs.field(factory=time.perf_counter)

    def add(self, tokens: Sequence[int], drafted: int) -> None:
        """Print what one verification committed; the first `drafted` are the drafter's."""
        self.tokens += len(tokens)
        self.drafted += drafted
        for place, token in enumerate(tokens):
            if token not in self.stop:
                self._print(self.stream.add(token), place < drafted)

    def end(self) -> None:
        """Print what was held back, and end the line."""
        self._print(self.stream.rest() + "\n", False)

    def summary(self, decoded: Decoded, block_size: int) -> str:
        """What the answer came to, in a sentence; its seconds count from the printer's making."""
        seconds = time.perf_counter() - self.begin
        count = len(decoded.acceptance)
        if not count:
            return f"{self.tokens} tokens, none of them by a verification"
        return (
            f"accepted length {sum(decoded.acceptance) / count:.2f} of {block_size} over {count} "
            f"verifications; {self.drafted} of {self.tokens} tokens are the drafter's; "
            f"{self.tokens / seconds:,.0f} tokens/s"
        )

    def _print(self, text: str, drafted: bool) -> None:
        if not text:
            return
        if self.console.is_terminal:  # a model can write escape sequences like anything else
            text = "".join(char if char.isprintable() or char in "\n\t" else UNFINISHED for char in text)
        self.console.out(text, style=DRAFTED if drafted else None, highlight=False, end="")


def print_sample(parts: TrainingParts, checkpoint: Path, console: Console) -> None:
    """Decode the beginning of one held-out answer with a checkpoint's files, and print it.

    Where it cannot be done a line says why, and the run is none the worse for it: all that was asked of it
    is trained and saved by now.

    Raises:
        DifferenceFound: a check of the decoding failed, which nobody may overlook.
    """

    def say(line: str) -> None:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    target, plan = parts.targets[0], parts.plan
    folder = plan.target_folder
    if plan.held_out is None or not target.has_head:
        return say("no decoded sample: with run.eval_every and data.held_out the target is kept whole for it")
    if plan.schedule.train.zero_taps:
        return say("no decoded sample: this drafter was trained without the target's states")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return say(f"no decoded sample: {folder} holds no tokenizer")
    stop, positions = target.summary.eos_token_ids, target.summary.max_position_embeddings
    printer: AnswerPrinter | None = None
    try:
        prompt = _first_prompt(plan.held_out)
        room = min(SAMPLE_TOKENS, positions - len(prompt))
        if room < 1:
            raise InputError(f"a prompt of {len(prompt)} tokens fills the target's {positions} positions")
        tokenizer = load_tokenizer(folder)
        config = read_drafter_config(checkpoint)
        drafter = build_drafter(config, target.device, plan.compute_dtype)
        fill_drafter(drafter, read_drafter_weights(checkpoint, config), str(checkpoint))
        shown = printer = AnswerPrinter(console, TextStream(tokenizer, list(prompt)), stop)
        coloured = "; what the drafter said is in colour" if console.color_system else ""
        text = str(tokenizer.decode(prompt, skip_special_tokens=True)).strip()
        say(f"a held-out prompt and its answer with {checkpoint.name}{coloured}:")
        say(text if len(text) <= PROMPT_SHOWN else f"…{text[-PROMPT_SHOWN:]}")
        (decoded,) = speculate(
            target,
            drafter.requires_grad_(False),
            [prompt],
            max_new_tokens=room,
            stop=stop,
            on_tokens=lambda _, tokens, drafted: shown.add(tokens, drafted),
        )
    except DifferenceFound:
        raise
    except Exception as error:
        no_memory = is_out_of_memory(error)
        if not no_memory and not isinstance(error, EngineError):
            raise
        if printer is not None and printer.tokens:
            printer.end()  # the line that the failure cut short
        why = f"{target.device} has no memory left for it" if no_memory else str(error)
        return say(f"no decoded sample: {why}")
    printer.end()
    say(printer.summary(decoded, config.block_size))


def _first_prompt(held_out: BatchPlan) -> list[int]:
    """The tokens of a held-out document before its first answer."""
    batch = held_out.micro_batch(0)
    mask = batch.loss_mask[0].clone()
    mask[0] = False  # an answer begins behind something
    return [int(token) for token in batch.input_ids[0, : int(mask.int().argmax())]]
