"""A trained run whose documents its own target wrote, with a tokenizer: something to decode with.

A target of random weights soon repeats itself, so that a small drafter learns its text in a few steps.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from small_runs import EOS, MASK, PAD, SCHEDULE, VOCAB, write_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.data.shards import write_documents
from engine.dflash.speculation import decode_alone
from engine.run import run
from engine.schedule import load_schedule
from engine.target.loading import Target, load_target

WORDS = [f"w{number}" for number in range(PAD)] + ["<pad>", "<eos>", "<mask>"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} w1{% endif %}"


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """A word per id, so that texts can be read off."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", mask_token="<mask>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def write_target(folder: Path, *, seed: int = 5) -> Target:
    """A hybrid target of random weights on the disk."""
    write_config(folder)
    target = load_target(
        folder,
        target_layer_ids=[0, 1, 2],
        dtype=torch.float32,
        device=torch.device("cpu"),
        init="random",
        keep_head=True,
        seed=seed,
    )
    with torch.no_grad():
        target.lm_head[[PAD, MASK]] = 0.0  # what it says may be trained on
    weights = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return target


def write_answered(target: Target, root: Path, *, tokens: int = 24) -> None:
    """Random prompts and what the target says to them, each answer once; a few are held out."""
    random = np.random.default_rng(1)
    prompts = [random.integers(0, PAD, int(random.integers(3, 9))).tolist() for _ in range(100)]
    answers = decode_alone(target, prompts, max_new_tokens=tokens, stop=[EOS])
    distinct = {tuple(answer): prompt for prompt, answer in zip(prompts, answers, strict=True)}
    rows = [([*p, *a], [0] * len(p) + [1] * len(a)) for a, p in distinct.items()]
    write_documents(root / "held_out", rows[:12], vocab_size=VOCAB)
    write_documents(root / "train", rows[12:], vocab_size=VOCAB)


def served_project(root: Path) -> Path:
    """Target, tokenizer, documents and schedule in a folder; returns the schedule's path."""
    target = write_target(root / "target")
    write_tokenizer(root / "target")
    write_answered(target, root)
    path = root / "served.toml"
    text = SCHEDULE.format(root=root).replace('init = "random"', 'init = "checkpoint"')
    path.write_text(text + '[[plugin]]\nuse = "plugins.muon"\n')
    return path


def served_run(root: Path, *overrides: str) -> Path:
    """Train on `served_project`; returns the run's folder."""
    schedule = load_schedule(
        served_project(root), ["run.steps=30", "train.lr=2e-2", "run.eval_every=30", *overrides]
    )
    return run(schedule, output=root / "run").folder.path


__all__ = ["MASK", "served_project", "served_run", "write_answered", "write_target", "write_tokenizer"]
