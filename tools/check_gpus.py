"""Run what needs real GPUs: every check a process with a time limit and a log that is written as it goes.

    python -m tools.check_gpus LOGS                    # all groups that this machine has the GPUs for
    python -m tools.check_gpus LOGS tests schedules    # some of them

The checks of one wave run side by side, waves one after another. A check that passes its limit gets
SIGABRT, upon which Python writes every thread's stack into its log, and counts as failed. Each
prints its last lines; exit code 7 when one failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

DEMO_CHANGES = ("run.log_every=5", "data.max_eval_documents=20")
LARGE = (
    "target.path=builtin:qwen3.6-27b",
    "target.init=random",
    "data.path={logs}/documents",
    "data.held_out=0.02",
    "data.max_eval_documents=2",
    "run.eval_every=0",
    "run.save_every=0",
)
KILL_AFTER_S = 10


@attrs.frozen
class Check:
    """One process; `{logs}` in its words is the folder of logs."""

    name: str
    words: list[str]
    limit_s: int
    gpus: int = 1
    expected: int = 0
    """The exit code that is right."""

    def command(self, logs: Path) -> list[str]:
        return [sys.executable, *(word.replace("{logs}", str(logs)) for word in self.words)]


def run_of(name: str, schedule: str, changes: Sequence[str], steps: int, limit_s: int, gpus: int) -> Check:
    """A run of a shipped schedule into a folder of its own. Changes are --set's, or flags."""
    file = schedule if schedule.endswith(".toml") else f"schedules/{schedule}.toml"
    words = ["-m", "engine", "run", file, "--steps", str(steps)]
    words += ["--output", f"{{logs}}/{name}"]
    for change in changes:
        words += [change] if change.startswith("--") else ["--set", change]
    return Check(name, words, limit_s, gpus)


def demo(name: str, schedule: str, *changes: str, gpus: int = 2) -> Check:
    """50 steps with the built-in target."""
    return run_of(name, schedule, [*DEMO_CHANGES, *changes], 50, 240, gpus)


def killed(name: str, schedule: str) -> Check:
    """50 steps with the built-in target, killed twice on the way and resumed."""
    words = ["-m", "tools.kill_and_resume", f"schedules/{schedule}.toml", f"{{logs}}/{name}", "--kills", "2"]
    for change in (*DEMO_CHANGES, "run.save_every=10"):
        words += ["--set", change]
    return Check(name, [*words, "--", "--steps", "50"], 400, 2)


def large(name: str, schedule: str, *changes: str, gpus: int, steps: int = 16) -> Check:
    """Qwen3.6-27B's shape with random weights on random documents."""
    return run_of(name, schedule, [*LARGE, *changes], steps, 420, gpus)


def compared(name: str, reference: str = "plain") -> Check:
    """The losses of two runs, step by step."""
    words = ["-m", "tools.compare_losses", f"{{logs}}/{reference}", f"{{logs}}/{name}"]
    return Check(f"{name}-losses", words, 60)


def lanes(targets: Sequence[int], drafters: Sequence[int]) -> str:
    """A change that puts lanes on the GPUs of these numbers."""

    def listed(numbers: Sequence[int]) -> str:
        return ", ".join(f'"cuda:{number}"' for number in numbers)

    return f"devices={{targets = [{listed(targets)}], drafters = [{listed(drafters)}]}}"


def stressed(mode: str) -> Check:
    """Every mode keeps launches apart but `none`, which is there to show that stress finds the race."""
    words = ["-m", "engine", "stress", "--seconds", "90", "--mode", mode]
    return Check(f"stress-{mode}", words, 280, gpus=2, expected=7 if mode == "none" else 0)


def sliced(name: str, layout: str, mode: str) -> Check:
    """200 micro-batches of a 12-layer slice of Qwen3.6-27B on two targets; a small drafter, no evaluation."""
    changes = [
        "target.path={logs}/slice",
        "target.init=random",
        "data.path={logs}/documents",
        "run.save_every=0",
        "drafter.layers=1",
        'drafter.layer_types=["sliding_attention"]',
        "drafter.target_layer_ids=[1, 3, 5, 7, 9]",
        "data.max_anchors=128",
        "run.log_every=10",
        f"serialize.launches={mode}",
        lanes([0, 1], [1] if layout == "pipelined" else [0, 1]),
    ]
    if layout == "sequential":
        changes += ["stage.target-forward.exclusive=target-forward"]
    return run_of(name, "{logs}/slice/schedule.toml", changes, 50, 200, 2)


WITHOUT_HELD_OUT = (
    "import pathlib, sys; text = pathlib.Path('schedules/qwen3_6_27b_4gpu.toml').read_text(); "
    "pathlib.Path(sys.argv[1]).write_text(''.join(line for line in text.splitlines(True) "
    "if not line.startswith(('held_out', 'eval_every'))))"
)

SEQUENTIAL = "sequential_target_parallel_drafter"
SPEED_PLUGINS = {
    "speed-off": (('"plugins.fused_target"\non = "never"',)),
    "speed-on": ('"plugins.lazy_compile"', '"plugins.graph_target"'),
    "speed-fp8": ('"plugins.lazy_compile"', '"plugins.fp8_target"', '"plugins.graph_target"'),
}
"""What stands under [[plugin]] in three schedules that are otherwise the demo's."""

WRITE_SPEED_SCHEDULES = (
    "import pathlib, sys; from tools.check_gpus import SEQUENTIAL, SPEED_PLUGINS as plugins; "
    "text = pathlib.Path(f'schedules/{SEQUENTIAL}.toml').read_text().partition('[[plugin]]')[0]; "
    "[pathlib.Path(sys.argv[1], f'{name}.toml').write_text(text + ''.join(f'[[plugin]]\\nuse = {one}\\n' "
    "for one in used)) for name, used in plugins.items()]"
)


def at_speed(name: str) -> Check:
    """30 steps of the demo in bfloat16 on one GPU, with some of the speed plugins."""
    changes = [*DEMO_CHANGES, "target.dtype=bfloat16", "drafter.dtype=bfloat16", "run.eval_every=0"]
    return run_of(name, f"{{logs}}/{name}.toml", [*changes, lanes([0], [0])], 30, 200, 1)


DEMO_RUNS = ("sequential", "pipelined", "colocated", "five-and-three")
GROUPS: dict[str, list[list[Check]]] = {
    "tests": [
        [Check("tests", ["-m", "pytest", "-q", "-m", "gpu and not slow", "-p", "no:cacheprovider"], 300)]
    ],
    "schedules": [
        [
            demo("plain", SEQUENTIAL, "--plain", gpus=1),
            demo("sequential", SEQUENTIAL),
            demo("pipelined", "pipelined"),
            demo("colocated", "colocated"),
            demo(
                "five-and-three",
                "pipelined",
                lanes([0, 1, 0, 1, 0], [1, 0, 1]),
                "train.micro_batches=3",
            ),
            run_of("thousand", "pipelined", ["run.steps=1000", "run.log_every=50"], 1000, 330, 2),
            demo("plain-of-three", SEQUENTIAL, "train.micro_batches=3", "--plain", gpus=1),
        ],
        [compared(name) for name in DEMO_RUNS[:3]] + [compared("five-and-three", "plain-of-three")],
    ],
    "documents": [
        [
            Check(
                "documents",
                ["-m", "tools.write_random_documents", "{logs}/documents", "--vocab-size", "248320"]
                + ["--below", "248000", "--documents", "400"],
                120,
            )
        ]
    ],
    "large-pipelined": [
        [large("large-pipelined", "qwen3_6_27b_4gpu", lanes([0], [1]), gpus=2)],
        [
            Check(
                "large-pipelined-report",
                [
                    "-m",
                    "tools.profile_report",
                    "{logs}/large-pipelined",
                    "--png",
                    "{logs}/large-pipelined.png",
                ],
                60,
            )
        ],
    ],
    "large-colocated": [
        [
            large("large-colocated", "qwen3_6_27b_1gpu", lanes([1], [1]), gpus=2, steps=4),
            Check("memory-cap", ["-m", "pytest", "-q", "-s", "tests/test_memory_cap.py"], 420),
        ]
    ],
    "trust": [
        [
            Check(
                "trust",
                ["-m", "pytest", "-q", "-s", "-m", "gpu", "tests/test_device_trust.py"]
                + ["tests/test_replica_check.py", "tests/test_resume_writer.py", "tests/test_heartbeat.py"],
                300,
                gpus=2,
            )
        ]
    ],
    "resume": [
        [demo("unbroken", "colocated", "run.save_every=10"), killed("again", "colocated")],
        [compared("again", "unbroken")],
    ],
    "speed-losses": [
        [Check("speed-schedules", ["-c", WRITE_SPEED_SCHEDULES, "{logs}"], 60)],
        [at_speed(name) for name in SPEED_PLUGINS],
        [compared(name, "speed-off") for name in ("speed-on", "speed-fp8")],
    ],
    "tuning-memory": [
        [Check("tuning-memory", ["-m", "pytest", "-q", "-s", "tests/test_tuning_memory.py"], 500)]
    ],
    "stress": [[stressed(mode) for mode in ("tune", "launch", "stage", "none")]],
    "doctor": [[Check("doctor", ["-m", "engine", "doctor", "schedules/pipelined.toml"], 120)]],
    "slice": [
        [
            Check(
                "target-slice",
                ["-m", "tools.write_target_slice", "builtin:qwen3.6-27b", "{logs}/slice", "--layers", "12"],
                60,
            )
        ],
        [Check("slice-schedule", ["-c", WITHOUT_HELD_OUT, "{logs}/slice/schedule.toml"], 60)],
        [sliced("slice-pipelined-first", "pipelined", "tune")],
        [sliced("slice-pipelined-tune", "pipelined", "tune")],
        [sliced("slice-sequential-tune", "sequential", "tune")],
        [sliced("slice-pipelined-stage", "pipelined", "stage")],
        [sliced("slice-sequential-stage", "sequential", "stage")],
    ],
    "feature-paths": [[Check("feature-paths", ["-m", "tools.measure_feature_paths"], 120)]],
}


def run_wave(checks: Sequence[Check], logs: Path) -> list[bool]:
    """Start all, wait for all, print how each ended; returns which passed."""
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    print(f"-- {', '.join(check.name for check in checks)}: {time.time():.1f} s since 1970", flush=True)
    running = []
    for check in checks:
        with open(logs / f"{check.name}.log", "wb") as log:
            running.append(subprocess.Popen(check.command(logs), stdout=log, stderr=log, env=environment))
    passed = []
    for check, process in zip(checks, running, strict=True):
        try:
            code: int | str = process.wait(max(check.limit_s - (time.monotonic() - begun), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            try:
                process.wait(KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                process.kill()
            code = f"stopped at {check.limit_s} s"
        passed.append(code == check.expected)
        tail = (logs / f"{check.name}.log").read_text(errors="replace").splitlines()[-6:]
        print(f"== {check.name}: {code}, {time.monotonic() - begun:.0f} s", *tail, sep="\n   ", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("logs", type=Path)
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP", help=", ".join(GROUPS))
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    there = torch.cuda.device_count()
    passed = []
    for name in options.groups or GROUPS:
        for wave in GROUPS[name]:
            fits = [check for check in wave if check.gpus <= there]
            for check in wave:
                if check not in fits:
                    print(f"== {check.name}: left out, needs {check.gpus} GPUs and {there} are here")
            passed += run_wave(fits, options.logs)
    sys.exit(0 if passed and all(passed) else 7)


if __name__ == "__main__":
    main()
