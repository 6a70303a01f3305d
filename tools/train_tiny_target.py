"""Train the built-in target on one GPU, in about six minutes on an H200.

The generated conversations are tokenized by worker processes first and put on the GPU whole, so
that a step is nothing but the model. A row is one conversation, padded at its end; rows of one
length class make a batch of a fixed number of tokens, so little of it is padding. Answers weigh 1 in
the loss, prompts little: what stands in a prompt is mostly chance.
Conversations whose answer is set aside are never seen; the accuracies printed are on those.

    python -m tools.train_tiny_target --out engine/builtin/tiny_hybrid

The learning rate follows a cosine over `--steps`, which `--budget-s` shortens when the machine is too
slow for it; the number of steps that were made is recorded and is what to ask for to repeat a run.
"""

import argparse
import hashlib
import inspect
import json
import math
import multiprocessing
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from engine.builtin.kinds import KINDS
from engine.builtin.text import conversation, is_set_aside
from engine.builtin.tokenizer import END, PAD, VOCABULARY, render_prompt, train_tokenizer

TOKENIZER_TEXTS = 40_000
LENGTH_CLASS = 32
PROMPT_WEIGHT = 0.1
PACE_STEPS = 100


@dataclass(frozen=True)
class Job:
    """A share of the text for one worker: the set aside conversations among `numbers`, or the others."""

    seed: int
    numbers: range
    set_aside: bool
    tokenizer_file: str


@dataclass(frozen=True)
class Rows:
    """Conversations of one length class: ids `[N, length]` and where each answer starts and ends, `[N]`."""

    ids: Tensor
    starts: Tensor
    ends: Tensor
    kinds: Tensor

    def to(self, device: str) -> "Rows":
        return Rows(*(tensor.to(device) for tensor in (self.ids, self.starts, self.ends, self.kinds)))


def configuration() -> Qwen3_5TextConfig:
    """Eight layers, every fourth of them full attention, 2.8 million weights."""
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_key_head_dim=32,
        linear_num_value_heads=4,
        linear_value_head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def quicken_delta_rule() -> None:
    """Bind the gated delta rule to plain PyTorch, in float32 and in chunks of a length class.

    Chunks of 64, the library's, would pad most rows here by half. FLA's backward refuses Hopper GPUs
    under Triton 3.4 to 3.7.0, and at this size it isn't missed; so a repeated run takes the same path
    wherever it runs.
    """
    forward = inspect.unwrap(modeling_qwen3_5.Qwen3_5GatedDeltaNet.forward)
    if "torch_chunk_gated_delta_rule" not in forward.__code__.co_names:
        raise SystemExit(f"transformers {version('transformers')} binds its kernels another way; take 5.24")
    plain = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    def in_short_chunks(query: Tensor, key: Tensor, value: Tensor, **options: object) -> object:
        with torch.autocast(query.device.type, enabled=False):
            return plain(query, key, value, chunk_size=LENGTH_CLASS, **options)

    modeling_qwen3_5.torch_chunk_gated_delta_rule = in_short_chunks


def fresh_model(seed: int) -> Qwen3_5ForCausalLM:
    """A model ready to be trained, in float32 on the CPU."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(configuration())
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            # The library's own start makes every head forget within a token or two. The usual one for
            # gated recurrences spreads the time steps from 0.001 to 0.1 instead.
            bias, rate = layer.linear_attn.dt_bias, layer.linear_attn.A_log
            steps = torch.exp(torch.rand(bias.shape) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
            with torch.no_grad():
                bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
                rate.copy_(torch.log(torch.rand(rate.shape) * 15 + 1))
    return model


def jobs_of(seed: int, numbers: range, set_aside: bool, tokenizer_file: Path) -> list[Job]:
    """Equal shares of the conversations `numbers`."""
    shares = [numbers[at : at + 4096] for at in range(0, len(numbers), 4096)]
    return [Job(seed, share, set_aside, str(tokenizer_file)) for share in shares]


def tokenized(job: Job) -> list[tuple[np.ndarray, int, int]]:
    """(ids, start of the answer, kind) of those of the job's conversations that it is for."""
    tokenizer = Tokenizer.from_file(job.tokenizer_file)
    end = tokenizer.token_to_id(END)
    kinds = list(KINDS)
    chosen = [conversation(job.seed, number) for number in job.numbers]
    chosen = [one for one in chosen if is_set_aside(one.answer) == job.set_aside]
    prompts = tokenizer.encode_batch([render_prompt(one.prompt) for one in chosen])
    answers = tokenizer.encode_batch([one.answer for one in chosen])
    return [
        (np.array([*prompt.ids, *answer.ids, end], dtype=np.int16), len(prompt.ids), kinds.index(one.kind))
        for one, prompt, answer in zip(chosen, prompts, answers, strict=True)
    ]


def length_classes(jobs: list[Job], workers: int, device: str) -> dict[int, Rows]:
    """The rows of all jobs by padded length, on the device."""
    by_length: dict[int, list[tuple[np.ndarray, int, int]]] = defaultdict(list)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for share in pool.imap(tokenized, jobs):
            for one in share:
                by_length[-(-len(one[0]) // LENGTH_CLASS) * LENGTH_CLASS].append(one)
    classes = {}
    for length, of_length in sorted(by_length.items()):
        ids = np.zeros((len(of_length), length), dtype=np.int16)
        for padded, (row, _, _) in zip(ids, of_length, strict=True):
            padded[: len(row)] = row
        numbers = np.array([(start, len(row), kind) for row, start, kind in of_length], dtype=np.int16)
        classes[length] = Rows(torch.from_numpy(ids), *torch.from_numpy(numbers).unbind(1)).to(device)
    return classes


def batches_of_epoch(
    classes: dict[int, Rows], tokens_per_step: int, generator: torch.Generator
) -> list[tuple[int, Tensor]]:
    """(length, row numbers) of every full batch in random order; rows that fill none wait an epoch."""
    batches = []
    for length, rows in classes.items():
        order = torch.randperm(len(rows.ids), generator=generator)
        size = min(tokens_per_step // length, len(order))
        batches += [(length, order[at : at + size]) for at in range(0, len(order) - size + 1, size)]
    return [batches[at] for at in torch.randperm(len(batches), generator=generator).tolist()]


def weighted_loss(model: Qwen3_5ForCausalLM, rows: Rows, chosen: Tensor, device: str) -> Tensor:
    """Mean cross-entropy of a batch with prompts at their small weight."""
    ids = rows.ids[chosen].long()  # [R, L]
    position = torch.arange(1, ids.shape[1], device=device)  # of the predicted token
    weight = torch.where(position >= rows.starts[chosen, None], 1.0, PROMPT_WEIGHT)
    weight = weight * (position < rows.ends[chosen, None])  # [R, L - 1]
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(ids, use_cache=False).logits  # [R, L, V]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (losses * weight.flatten()).sum() / weight.sum()


@torch.inference_mode()
def exact_match(model: Qwen3_5ForCausalLM, classes: dict[int, Rows], device: str) -> dict[str, float]:
    """Share of answers by kind that greedy decoding gives letter by letter.

    One forward over the right answer tells: decoding gives it exactly where each of its tokens, the
    end included, is the most likely one after those before it.
    """
    right: defaultdict[int, int] = defaultdict(int)
    seen: defaultdict[int, int] = defaultdict(int)
    for length, rows in classes.items():
        size = max(1, 65536 // length)
        for chosen in torch.arange(len(rows.ids), device=device).split(size):
            ids = rows.ids[chosen].long()
            with torch.autocast(device, dtype=torch.bfloat16):
                guesses = model(ids, use_cache=False).logits[:, :-1].argmax(-1)
            position = torch.arange(1, length, device=device)
            answer = (position >= rows.starts[chosen, None]) & (position < rows.ends[chosen, None])
            whole = ((guesses == ids[:, 1:]) | ~answer).all(-1)
            for kind, good in zip(rows.kinds[chosen].tolist(), whole.tolist(), strict=True):
                seen[kind] += 1
                right[kind] += good
    return {name: round(right[kind] / seen[kind], 4) for kind, name in enumerate(KINDS) if seen[kind]}


def save(model: Qwen3_5ForCausalLM, out: Path, record: dict[str, object]) -> None:
    """The model's folder, weights in bfloat16, with a record of how it came about."""
    rounded = Qwen3_5ForCausalLM(model.config).bfloat16()
    rounded.load_state_dict(model.state_dict())
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config = GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0)
    rounded.save_pretrained(out)
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    (out / "training.json").write_text(json.dumps({**record, "sha256": digest}, indent=2) + "\n")


def prepared_tokenizer(options: argparse.Namespace) -> Path:
    """Put the tokenizer into the model's folder, trained first if none is given; its file."""
    if options.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    else:
        some = (conversation(options.seed, number) for number in range(TOKENIZER_TEXTS))
        tokenizer = train_tokenizer(
            text for one in some for text in ("user\n", "assistant\n", one.prompt, one.answer)
        )
    if tokenizer.convert_tokens_to_ids([PAD, END]) != [0, 2] or len(tokenizer) != VOCABULARY:
        raise SystemExit(
            f"{options.tokenizer}: not a tokenizer for this model ({VOCABULARY} ids, ends at 0 and 2)"
        )
    tokenizer.save_pretrained(options.out)
    return Path(options.out, "tokenizer.json")


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Linear over the first 3 % of the steps, then a cosine down to 2 % of the peak."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * min(1.0, (step + 1) / (0.03 * steps)) * cosine


def train(
    model: Qwen3_5ForCausalLM, classes: dict[int, Rows], unseen: dict[int, Rows], options: argparse.Namespace
) -> None:
    """Train, print and save as the options say; the model is on its device already."""
    device = options.device
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    generator = torch.Generator().manual_seed(options.seed)
    steps, step, tokens, epoch = options.steps, 0, 0, 0
    started = last_print = time.monotonic()
    while step < steps:
        epoch += 1
        for length, chosen in batches_of_epoch(classes, options.tokens_per_step, generator):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options.lr, step, steps)
            loss = weighted_loss(model, classes[length], chosen.to(device), device)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            tokens += length * len(chosen)
            if step == PACE_STEPS and options.budget_s < math.inf:
                loss.item()  # waits for the device
                steps = min(steps, int(options.budget_s * step / (time.monotonic() - started)))
                print(f"{steps} steps fit into {options.budget_s:.0f} s", flush=True)
            if step % PACE_STEPS == 0:
                value, now = loss.item(), time.monotonic()
                speed = PACE_STEPS * options.tokens_per_step / (now - last_print)
                last_print = now
                print(f"step {step} loss {value:.4f} {speed / 1e6:.2f} M tokens/s", flush=True)
            if step % options.eval_every == 0 or step == steps:
                accuracy = exact_match(model, unseen, device)
                print(f"step {step} exact {accuracy}", flush=True)
                record = {
                    "seed": options.seed,
                    "conversations": options.conversations,
                    "steps": step,
                    "of_steps": steps,
                    "tokens_per_step": options.tokens_per_step,
                    "tokens": tokens,
                    "lr": options.lr,
                    "prompt_weight": PROMPT_WEIGHT,
                    "epochs_begun": epoch,
                    "seconds": round(time.monotonic() - started),
                    "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                    "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
                    "exact_match_on_unseen": accuracy,
                }
                save(model, options.out, record)
                last_print = time.monotonic()
            if step == steps:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--tokenizer", type=Path, help="take this folder's tokenizer instead of training one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=1_800_000)
    parser.add_argument("--unseen", type=int, default=32_768, help="conversations to take unseen ones from")
    parser.add_argument("--steps", type=int, default=4200)
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds of training, at most")
    parser.add_argument("--tokens-per-step", type=int, default=65_536)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    begun = time.monotonic()
    file, count = prepared_tokenizer(options), options.conversations
    # Processes are forked before the GPU is touched. Evaluation text lies behind the training text and
    # is set aside by its answers as well.
    seen_jobs = jobs_of(options.seed, range(count), False, file)
    unseen_jobs = jobs_of(options.seed, range(count, count + options.unseen), True, file)
    unseen = length_classes(unseen_jobs, options.workers, "cpu")
    classes = length_classes(seen_jobs, options.workers, options.device)
    unseen = {length: rows.to(options.device) for length, rows in unseen.items()}
    sizes = {length: len(rows.ids) for length, rows in classes.items()}
    print(f"by length {sizes}, after {time.monotonic() - begun:.0f} s", flush=True)

    quicken_delta_rule()
    model = fresh_model(options.seed).to(options.device)
    print(f"{sum(p.numel() for p in model.parameters())} weights", flush=True)
    train(model, classes, unseen, options)


if __name__ == "__main__":
    main()
