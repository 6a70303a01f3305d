"""What the measurements of `bench` share: the schedule that is measured, the targets' variants, the output.

Everything is measured in one process with random weights and random tokens: speed hangs on shapes, not on
meaning. A schedule says what runs (taps, drafter, token budget, plugins); by default it is the one for
Qwen3.6-27B on one GPU, and `--config` puts another target's shape into it, the drafter's layers staying
as they are; a built-in target that a schedule is shipped for brings that one along. What a figure is
compared with, the plain variant and the floor, is measured in the same process, in turns with it.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import orjson
import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from engine.builtin import QWEN3_6_27B, TINY_HYBRID, resolve
from engine.data.shards import write_documents
from engine.environment import environment
from engine.errors import DiskError, InputError
from engine.run import tuning_results
from engine.schedule import Drafter, Schedule, load_schedule
from engine.target.configuration import read_json, read_target_config, text_section
from engine.target.taps import default_target_layer_ids

SCHEDULES = Path(__file__).parents[1] / "schedules"
SCHEDULE_OF = {
    QWEN3_6_27B: SCHEDULES / "qwen3_6_27b_1gpu.toml",
    TINY_HYBRID: SCHEDULES / "sequential_target_parallel_drafter.toml",
}
"""What is measured of a built-in target where no schedule is named."""

CPU_WEIGHTS = 300_000_000
"""A target of more weights is not run on a CPU: a forward of it would take minutes."""

CPU_DRAFTER_STEP = 3e11
"""Operations with weights in a drafter's micro-batch; with more of them it takes minutes on a CPU."""

Figures = dict[str, Any]


@attrs.frozen(kw_only=True)
class Bench:
    """What is to be measured."""

    what: str
    schedule: Schedule
    """Of random weights, without held-out documents."""
    config: str
    """As it was asked for."""
    device: torch.device
    folder: Path
    """For what has to lie in a file while it is measured."""
    console: Console

    def say(self, line: str) -> None:
        """A line about progress, on standard error."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def facts(self) -> Figures:
        """What belongs to every figure: machine, versions, shape."""
        here = environment()
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        return {
            "what": self.what,
            "config": self.config,
            "device": gpu or "cpu",
            "dtype": self.schedule.target.dtype,
            "versions": here["versions"],
        }


@contextmanager
def opened(
    what: str,
    *,
    config: str | None,
    schedule: Path | None,
    overrides: Sequence[str],
    layers: int | None = None,
) -> Iterator[Bench]:
    """Read the schedule that is measured; a folder for temporary files goes at the end.

    Args:
        config: a target's folder or built-in name, in place of the schedule's; of the default schedule it
            is Qwen3.6-27B's.
        layers: measure the first so many decoder layers of the target, with taps spread over them.

    Raises:
        InputError: a schedule or configuration that cannot be, or a target too large for a CPU.
    """
    path = schedule or SCHEDULE_OF.get(config or QWEN3_6_27B, SCHEDULE_OF[QWEN3_6_27B])
    if schedule is None and not path.exists():
        raise InputError(f"bench: {path.name} is not installed with the package; give one with --schedule")
    read = load_schedule(path, list(overrides))
    if config is None:
        config = QWEN3_6_27B if schedule is None else read.target.path
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as temporary:
        folder = Path(temporary)
        target = attrs.evolve(read.target, path=config, init="random")
        if layers is not None:
            target = attrs.evolve(target, path=str(_first_layers(resolve(config), layers, folder / "target")))
        drafter = _fitting(read.drafter, resolve(target.path), as_written=schedule is not None)
        data = attrs.evolve(read.data, path=str(folder / "documents"), held_out=None)
        read = attrs.evolve(read, target=target, drafter=drafter, data=data)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cpu":
            _refuse_large_target(resolve(target.path), config)
            if what in ("drafter", "run"):
                _refuse_large_drafter(read, path)
        torch.set_num_threads(read.run.cpu_threads)
        transformers.logging.set_verbosity_error()  # as in a run, where it speaks of missing packages
        console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
        bench = Bench(what=what, schedule=read, config=config, device=device, folder=folder, console=console)
        with tuning_results(bench.say) if device.type == "cuda" else nullcontext():
            yield bench


def _first_layers(config: Path, layers: int, folder: Path) -> Path:
    """A folder with a target's configuration cut to its first layers."""
    summary = read_target_config(config)
    if not 3 <= layers <= summary.layers:
        raise InputError(f"--layers {layers}: {config.name} has {summary.layers} layers, and 3 are the least")
    settings = read_json(config / "config.json")
    text = dict(text_section(settings))
    text["num_hidden_layers"] = layers
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:layers]
    nested = next((key for key, value in settings.items() if value == text_section(settings)), None)
    folder.mkdir()
    whole = text if nested is None else settings | {nested: text}
    (folder / "config.json").write_bytes(orjson.dumps(whole))
    return folder


def _fitting(drafter: Drafter, folder: Path, *, as_written: bool) -> Drafter:
    """The drafter with taps that the target is deep enough for, and a mask token of its vocabulary.

    Args:
        as_written: the mask token is the user's own, and wrong if it is not in the vocabulary.
    """
    summary = read_target_config(folder)
    taps = drafter.target_layer_ids
    if taps is None or taps[-1] > summary.layers - 2:
        taps = tuple(default_target_layer_ids(summary.layers, len(taps or range(drafter.layers))))
    mask = drafter.mask_token_id if as_written else min(drafter.mask_token_id, summary.vocab_size - 1)
    return attrs.evolve(drafter, target_layer_ids=taps, mask_token_id=mask)


def _refuse_large_target(folder: Path, config: str) -> None:
    """On a CPU."""
    summary = read_target_config(folder)
    text = text_section(read_json(folder / "config.json"))
    width = summary.hidden_size
    layer = 3 * width * int(text.get("intermediate_size") or 4 * width) + 4 * width**2
    weights = 2 * summary.vocab_size * width + summary.layers * layer
    if weights > CPU_WEIGHTS:
        raise InputError(
            f"bench: {config} has about {in_words(weights)} weights and torch sees no GPU here; run "
            "it where there is one, or measure a small target with --config FOLDER and --schedule FILE"
        )


def _refuse_large_drafter(schedule: Schedule, path: Path) -> None:
    """On a CPU."""
    drafter = schedule.drafter
    hidden = read_target_config(resolve(schedule.target.path)).hidden_size
    mlp = 3 * hidden * (drafter.intermediate_size or 4 * hidden)
    attention = 2 * hidden * (drafter.heads + drafter.kv_heads) * drafter.head_dim
    weights = drafter.layers * (mlp + attention)
    slots = schedule.data.max_anchors * drafter.block_size
    if 6 * weights * slots > CPU_DRAFTER_STEP:  # forward, and two products backward
        raise InputError(
            f"bench: the drafter of {path.name} has about {in_words(weights)} weights and fills "
            f"{schedule.data.max_anchors:,} × {drafter.block_size} slots, and torch sees no GPU here; name a "
            "schedule with a smaller one, as by --schedule schedules/colocated.toml"
        )


def write_made_up_documents(bench: Bench, lengths: Sequence[int], *, seed: int = 0) -> None:
    """Documents of random tokens where the schedule looks for them; a fifth of each is prompt."""
    schedule = bench.schedule
    vocab_size = read_target_config(resolve(schedule.target.path)).vocab_size
    random = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        ids = random.integers(0, vocab_size - 1, length)
        ids += ids >= schedule.drafter.mask_token_id  # which occurs in none
        prompt = max(length // 5, 1)
        rows.append((ids.tolist(), [0] * prompt + [1] * (length - prompt)))
    write_documents(Path(schedule.data.path), rows, vocab_size=vocab_size)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are figures."""
    made = Table(box=box.SIMPLE)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def show(
    figures: Figures, title: str, tables: Sequence[Table], notes: Sequence[str], json: Path | None
) -> None:
    """Print title, tables and notes on standard output; write all figures to a file, if one was asked for.

    Raises:
        DiskError: the file cannot be written.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    for one in tables:
        console.print(one)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        try:
            json.parent.mkdir(parents=True, exist_ok=True)
            json.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
        except OSError as error:
            raise DiskError(f"--json {json}: cannot be written: {error.strerror}") from error


def in_words(count: float) -> str:
    """A large number, three digits or so: 27.4 billion."""
    size, name = (1e9, "billion") if count >= 1e9 else (1e6, "million") if count >= 1e6 else (1e3, "thousand")
    return f"{count / size:.3g} {name}"


def per_second(rate: float) -> str:
    """Operations per second in a unit that leaves digits to read."""
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def number(value: float | None, digits: int = 1) -> str:
    """A figure for a table; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"
