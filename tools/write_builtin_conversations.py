"""Let the built-in target write the conversations that ship with it, into `engine/builtin/conversations`.

Prompts come from behind the text the target was trained on and only from the share whose right
answers were set aside, so every one is new to it. Answers are what it says, right or wrong, decoded
greedily in float32 on the CPU: a drafter learns to foretell this target, not the truth. Prompts of
one length are decoded together. A document is the prompt's ids and the raw answer ids, the end token
included and supervised; nothing is rendered twice.

    python -m tools.write_builtin_conversations
    python -m tools.write_builtin_conversations --prompts 40000 --output data     # more to train on

More prompts begin with those that ship, and an answer's own hash says whether it is held out: what was held
out before is in no larger training set.

The numbers of the conversations stand in each manifest under `source`, in the order of the rows, so
that `engine.builtin.text.conversation` gives back the prompt's text, its kind and the right answer.
"""

import argparse
import inspect
import json
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.builtin import HELD_OUT, TINY_HYBRID, TRAIN, resolve
from engine.builtin.text import Conversation, conversation, is_set_aside
from engine.builtin.tokenizer import render_prompt
from engine.builtin.words import ambiguous_bodies
from engine.data.chat import load_tokenizer, tokenizer_fingerprint
from engine.data.documents import write_documents
from engine.target.loading import load_target
from engine.target_agreement import rows_agreement

# Behind the text of training and that of its accuracy figures.
FIRST_INDEX = 2_000_000
LONGEST_ANSWER = 160
HELD_OUT_SHARE = 13  # one answer in this many
BATCH_ROWS = 128


def fresh_prompts(seed: int, wanted: int) -> dict[int, Conversation]:
    """`wanted` conversations the target never saw, by number; no right answer occurs twice."""
    chosen: dict[int, Conversation] = {}
    answers = set(ambiguous_bodies())  # their prompts may stand in the training text with another answer
    index = FIRST_INDEX
    while len(chosen) < wanted:
        one = conversation(seed, index)
        if is_set_aside(one.answer) and one.answer not in answers:
            answers.add(one.answer)
            chosen[index] = one
        index += 1
    return chosen


def is_held_out(answer: list[int]) -> bool:
    return zlib.crc32(np.array(answer, dtype="<i4").tobytes()) % HELD_OUT_SHARE == 0


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompts: Tensor, max_new_tokens: int, eos: int | Sequence[int]
) -> list[list[int]]:
    """Continue each prompt with the model's most likely token until it ends the answer itself.

    By the model's own cache and prompts of equal length, so nothing is padded: padding on the left would
    corrupt the recurrent states, and padding on the right would stand between prompt and answer.

    Args:
        model: a causal LM of transformers, in evaluation mode.
        prompts: int64 `[rows, length]`, all of the same length, on the model's device.
        max_new_tokens: at most this many tokens a row, the end token included.
        eos: the id or ids that end an answer.

    Returns:
        The new ids of each row, the end token included; a row without one reached the limit.
    """
    # transformers renamed the argument: 5.24's models know both names and warn about the old one.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ends = torch.as_tensor([eos] if isinstance(eos, int) else list(eos), device=prompts.device)
    answers: list[list[int]] = [[] for _ in range(prompts.shape[0])]
    running = set(range(prompts.shape[0]))
    cache, step_input = None, prompts
    for _ in range(max_new_tokens):
        output = model(step_input, use_cache=True, logits_to_keep=1, **{cache_name: cache})
        cache = output[cache_name]
        chosen = output.logits[:, -1].argmax(-1)  # [rows]
        ended = torch.isin(chosen, ends).tolist()
        for row, token in enumerate(chosen.tolist()):
            if row in running:
                answers[row].append(token)
        running = {row for row in running if not ended[row]}
        if not running:
            break
        # Ended rows ride along: taking rows out of a hybrid's cache costs more than it saves here.
        step_input = chosen[:, None]
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=5600)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="instead of the package's own folder")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    output: Path | None = arguments.output

    folder = resolve(TINY_HYBRID)
    training = json.loads((folder / "training.json").read_text())
    tokenizer = load_tokenizer(folder)
    target = load_target(
        folder, target_layer_ids=[0], dtype=torch.float32, device=torch.device("cpu"), keep_head=True
    )
    model = target.model
    end = tokenizer.eos_token_id
    chosen = fresh_prompts(training["seed"], arguments.prompts)
    prompts = {
        index: tokenizer(render_prompt(one.prompt), add_special_tokens=False).input_ids
        for index, one in chosen.items()
    }
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for index, ids in prompts.items():
        by_length[len(ids)].append(index)

    begun, answers, agreed, supervised = time.monotonic(), {}, 0, 0
    for length, indices in sorted(by_length.items()):
        for at in range(0, len(indices), BATCH_ROWS):
            group = indices[at : at + BATCH_ROWS]
            written = greedy(model, torch.tensor([prompts[index] for index in group]), LONGEST_ANSWER, end)
            ended = {index: answer for index, answer in zip(group, written, strict=True) if answer[-1] == end}
            answers.update(ended)
            if not ended:
                continue
            longest = length + max(map(len, ended.values()))
            rows = [prompts[index] + answer for index, answer in ended.items()]
            ids = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
            position = torch.arange(longest)
            mask = (position >= length) & (position < torch.tensor([len(row) for row in rows])[:, None])
            counts = rows_agreement(target, ids, mask)
            agreed, supervised = agreed + counts.agreed, supervised + counts.supervised
        print(f"length {length}: {len(answers)} answers in {time.monotonic() - begun:.0f} s", flush=True)

    right, seen = Counter[str](), Counter[str]()
    for index, answer in answers.items():
        seen[chosen[index].kind] += 1
        right[chosen[index].kind] += tokenizer.decode(answer[:-1]) == chosen[index].answer
    kept: dict[bool, list[int]] = {False: [], True: []}
    for index in sorted(answers):
        kept[is_held_out(answers[index])].append(index)
    for name, held_out in ((TRAIN, False), (HELD_OUT, True)):
        manifest = write_documents(
            output / Path(name).name if output else resolve(name),
            (
                (prompts[index] + answers[index], [0] * len(prompts[index]) + [1] * len(answers[index]))
                for index in kept[held_out]
            ),
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            vocab_size=model.config.vocab_size,
            source={
                "text_seed": training["seed"],
                "conversations": kept[held_out],
                "target_sha256": training["sha256"],
            },
            overwrite=True,
        )
        print(f"{name}: {manifest.documents} documents, {manifest.tokens} tokens")
    print(
        f"without an end: {len(chosen) - len(answers)}; agreement {agreed / supervised:.6f} of {supervised}"
    )
    print(f"different answers: {len(set(map(tuple, answers.values())))} of {len(answers)}")
    print({kind: f"{right[kind]} of {seen[kind]}" for kind in sorted(seen)})


if __name__ == "__main__":
    main()
