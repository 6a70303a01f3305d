"""A hybrid target of four layers, random documents, and a schedule over both, for whole runs."""

import json
from pathlib import Path

import numpy as np
import torch

from engine.data.shards import write_documents
from engine.plain import PlainLoop
from engine.planning import plan_run
from engine.schedule import load_schedule
from engine.training_parts import TrainingParts, load_parts

VOCAB, MASK, EOS, PAD = 96, 95, 94, 93

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}

SCHEDULE = """
devices = "auto"
[run]
output_dir = "{root}/runs"
seed = 3
steps = 6
save_every = 3
eval_every = 3
[target]
path = "{root}/target"
init = "random"
dtype = "float32"
[drafter]
layers = 2
layer_types = ["sliding_attention", "full_attention"]
sliding_window = 16
heads = 2
kv_heads = 1
head_dim = 16
intermediate_size = 48
block_size = 4
target_layer_ids = [0, 1, 2]
mask_token_id = 95
dtype = "float32"
[data]
path = "{root}/train"
held_out = "{root}/held_out"
token_budget = 256
max_length = 96
length_bucket = 32
max_anchors = 12
[train]
lr = 1e-3
min_lr = 1e-4
gamma = 4.0
micro_batches = 2
"""


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HYBRID | changes))
    return folder


def write_random(folder: Path, *, seed: int, documents: int = 40, below: int = PAD) -> Path:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(documents):
        length = int(random.integers(6, 90))
        prompt = int(random.integers(1, length - 1))
        rows.append((random.integers(0, below, length).tolist(), [0] * prompt + [1] * (length - prompt)))
    write_documents(folder, rows, vocab_size=VOCAB)
    return folder


def small_project(root: Path) -> Path:
    """Target, documents and schedule in a folder; returns the schedule's path."""
    write_config(root / "target")
    write_random(root / "train", seed=1)
    write_random(root / "held_out", seed=2, documents=8)
    path = root / "small.toml"
    path.write_text(SCHEDULE.format(root=root))
    return path


ONE_LANE_EACH = 'devices={targets = ["cpu"], drafters = ["cpu"]}'


def assembled(project: Path, *overrides: str) -> TrainingParts:
    """The parts of a schedule."""
    torch.set_num_threads(1)
    return load_parts(plan_run(load_schedule(project, overrides)), lambda line: None)


def plain_loop(project: Path, *overrides: str) -> PlainLoop:
    """The plain loop over the parts of a schedule."""
    parts = assembled(project, ONE_LANE_EACH, *overrides)
    return PlainLoop(parts=parts, record_timing=lambda row: None)
