"""A GPU that is nearly full before the first kernel is tuned: a second try with what was freed, or the story.

Each case is a run of its own with empty caches, split taps on copy streams, and a plugin that fills the
GPU's memory after the target is loaded and before anything is tuned.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEFT_MB = 300
LIMIT_S = 100

FILLING = '''
"""Fills the GPU to {left} MB, with memory that is {kind}."""
import attrs
import torch
from engine.hookspecs import hookimpl

CHUNK = 1 << 30

@attrs.frozen(kw_only=True)
class Options:
    """None."""

class Fill:
    @hookimpl
    def wrap_target(self, target, lane):
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(lane.device)[0]
        chunks, rest = divmod(free - {left} * 1_000_000, CHUNK)
        with lane.active():  # in pieces that can be given back one by one
            sizes = [CHUNK] * chunks + [rest]
            kept = [torch.empty(size, dtype=torch.uint8, device=lane.device) for size in sizes]
        if {held}:
            self.kept = kept
        print("left", torch.cuda.mem_get_info(lane.device)[0] // 1_000_000, "MB", flush=True)

def make(options):
    return Fill()
'''


def run_on_a_full_gpu(tmp_path: Path, *, held: bool) -> subprocess.CompletedProcess[str]:
    plugin = tmp_path / "fill.py"
    plugin.write_text(
        FILLING.format(left=LEFT_MB, held=held, kind="held" if held else "cached and can be given back")
    )
    schedule = tmp_path / "full.toml"
    base = Path("schedules/pipelined.toml").read_text()
    schedule.write_text(base + f'[[plugin]]\nuse = "plugins.split_fc"\n[[plugin]]\nuse = "{plugin}"\n')
    caches = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "DFLASH_ENGINE_CACHE": str(tmp_path / "engine"),
        "FLA_CACHE_RESULTS": "0",
    }
    words = [
        sys.executable,
        "-m",
        "engine",
        "run",
        str(schedule),
        "--steps",
        "2",
        "--output",
        str(tmp_path / "run"),
    ]
    words += [
        "--set",
        'devices={targets=["cuda:0"], drafters=["cuda:0"]}',
        "--set",
        "data.max_eval_documents=1",
    ]
    return subprocess.run(words, env=os.environ | caches, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_that_is_only_cached_is_given_back_and_the_run_trains(tmp_path: Path) -> None:
    done = run_on_a_full_gpu(tmp_path, held=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "keys tuned" in done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_that_is_held_ends_the_run_with_who_holds_it(tmp_path: Path) -> None:
    done = run_on_a_full_gpu(tmp_path, held=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 3
    assert "warm-up on target.0@cuda:0" in done.stderr and "who held memory then:" in done.stderr
    assert "target.0@cuda:0 1" in done.stderr  # the lane holds the hundred gigabytes and more
    assert not (tmp_path / "run").exists()
