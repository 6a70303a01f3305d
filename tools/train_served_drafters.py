"""Train the small drafters of the tests that decode from exported files, in a minute or two on one core.

For a dense and for a hybrid target, both tiny and of random weights, one sample is made: prompts of a token
and the target's own answers, chosen for never being a close call, so that no machine's rounding changes it.
Drafters of full layers and of mixed ones are trained on it through a whole run, and exported. Two more are
trained with a fault planted in the training code; they learn as well, and must serve badly.
What is written: each target's folder with `sample.json` in it, and each drafter's.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from engine.data.shards import write_documents
from engine.export import export
from engine.run import run
from engine.schedule import structure
from engine.target.loading import Target, load_target

VOCAB, MASK, PAD, EOS = 64, 63, 62, 61
BLOCK = 8
ANSWER = 1 + 2 * BLOCK
"""Tokens of an answer: behind the prefill's own, a perfect drafter's verifications commit whole blocks."""
DOCUMENTS = 8
"""Several that begin differently, and with the least context there is: of one text that was learnt by heart
any few states tell the place, so a drafter that relies on a state too many would not be found out."""
WINDOW = 12
STEPS = 300
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # smaller ones soon repeat themselves
}
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    },
}
LAYERS = {
    "full": ["full_attention", "full_attention"],
    "mixed": ["sliding_attention", "full_attention"],
}


def write_target(folder: Path, kind: str, seed: int) -> Target:
    """Draw a target, round its weights to bfloat16 as they are stored, and write it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SIZES | TARGETS[kind], indent=2) + "\n")
    drawn = read_target(folder, init="random", seed=seed)
    with torch.no_grad():
        drawn.lm_head[[MASK, PAD, EOS]] = 0.0  # what it says may be trained on, and never ends
    weights = {name: value.bfloat16().contiguous() for name, value in drawn.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return read_target(folder)


def read_target(folder: Path, **options: Any) -> Target:
    """A target with its head, in float32 on the CPU."""
    return load_target(
        folder,
        target_layer_ids=[0, 2, 4],
        dtype=torch.float32,
        device=torch.device("cpu"),
        keep_head=True,
        **options,
    )


@torch.no_grad()
def choose_sample(target: Target) -> tuple[list[list[int]], list[list[int]], float]:
    """The prompts of one token to which the target's answers are the least doubtful.

    Returns:
        Prompts, greedy answers, and the smallest gap of the two top logits anywhere in them.
    """
    tokens, gaps = torch.arange(EOS)[:, None], torch.full((EOS,), torch.inf)
    for _ in range(ANSWER):
        top = target.logits(tokens)[:, -1].topk(2)
        gaps = torch.minimum(gaps, top.values[:, 0] - top.values[:, 1])
        tokens = torch.cat([tokens, top.indices[:, :1]], dim=1)
    best = gaps.topk(DOCUMENTS)
    rows = tokens[best.indices]
    return rows[:, :1].tolist(), rows[:, 1:].tolist(), float(best.values[-1])


def schedule_of(root: Path, target: Path, layout: str) -> dict[str, Any]:
    """The run that learns the sample by heart; `root` holds it."""
    sliding = {"sliding_window": WINDOW} if layout == "mixed" else {}
    return {
        "devices": {"targets": ["cpu"], "drafters": ["cpu"]},
        "run": {"output_dir": str(root / "runs"), "seed": 3, "steps": STEPS, "save_every": 0},
        "target": {"path": str(target), "dtype": "float32"},
        "drafter": {
            "layers": 2,
            "layer_types": LAYERS[layout],
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 16,
            "intermediate_size": 64,
            "block_size": BLOCK,
            "target_layer_ids": [0, 2, 4],
            "mask_token_id": MASK,
            "dtype": "float32",
            **sliding,
        },
        "data": {
            "path": str(root / "one"),
            "token_budget": 32 * DOCUMENTS,
            "max_length": 32,
            "length_bucket": 32,
            "max_anchors": ANSWER * DOCUMENTS,
        },
        "train": {"lr": 1e-2, "min_lr": 1e-3},
        "plugin": [{"use": "plugins.muon"}],
    }


@contextmanager
def shifted_labels() -> Iterator[None]:
    """Plant a fault: slot k learns the token at a + k + 1."""
    from engine.dflash import training

    right = training.blocks_at

    def shifted(row: Any, anchors: Any, **sizes: int) -> Any:
        blocks = right(row, anchors, **sizes)
        blocks.labels[:, :-1] = blocks.labels[:, 1:].clone()
        blocks.supervised[:, :-1] &= blocks.supervised[:, 1:].clone()
        blocks.supervised[:, -1] = False
        return blocks

    with patch.object(training, "blocks_at", shifted):
        yield


@contextmanager
def leaked_anchor() -> Iterator[None]:
    """Plant a fault: blocks see the target's state at the anchor itself, which no server has."""
    from engine.dflash import attention

    right = attention.visible_runs

    def leaking(*arguments: Any) -> Any:
        runs = right(*arguments)
        runs.context_end.add_(1)
        return runs

    with patch.object(attention, "visible_runs", leaking):
        yield


FAULTS: dict[str, Callable[[], Any]] = {"shifted_labels": shifted_labels, "leaked_anchor": leaked_anchor}


def write_sample(root: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """The sample as documents for training."""
    rows = [
        ([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    write_documents(root / "one", rows, vocab_size=VOCAB)


def train(root: Path, target: Path, layout: str, out: Path) -> float:
    """Train on the sample in `root`, export; returns the last step's loss."""
    schedule = structure(schedule_of(root, target, layout), name=out.name)
    result = run(schedule, output=root / "runs" / out.name, plain=True)
    rows = [json.loads(line) for line in (result.folder.path / "metrics.jsonl").read_text().splitlines()]
    export(result.checkpoint, out, target_name=target.name)
    (out / "README.md").unlink()  # it names the folder that this ran in
    return float(rows[-1]["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(arguments.out, ignore_errors=True)
    for kind in TARGETS:
        folder = arguments.out / f"{kind}_target"
        target = write_target(folder, kind, seed=5)
        prompts, answers, gap = choose_sample(target)
        print(f"{kind}: smallest gap {gap:.3f}")
        (folder / "sample.json").write_text(json.dumps({"prompts": prompts, "answers": answers}) + "\n")
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            write_sample(root, prompts, answers)
            for layout in LAYERS:
                loss = train(root, folder, layout, arguments.out / f"{kind}_{layout}")
                print(f"{kind}_{layout}: loss {loss:.4f}")
            if kind == "hybrid":
                for fault, planted in FAULTS.items():
                    with planted():
                        loss = train(root, folder, "mixed", arguments.out / fault)
                    print(f"{fault}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
