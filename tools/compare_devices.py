"""Run the first steps of a schedule on a CPU in float32 and on a GPU in bfloat16, and compare.

    python tools/compare_devices.py schedules/sequential_target_parallel_drafter.toml --steps 50

Micro-batches and anchors must be the same; each step's loss must agree within `--tolerance`. Exit
code 7 where one does not.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import orjson

from engine.run import run
from engine.schedule import load_schedule


def losses(schedule: Path, steps: int, folder: Path, overrides: list[str]) -> list[dict]:
    """Rows of metrics.jsonl of a run's training steps."""
    run(
        load_schedule(schedule, [*overrides, "run.eval_every=0", "run.save_every=0", "run.log_every=1000"]),
        steps=steps,
        output=folder,
    )
    rows = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [row for row in rows if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("schedule", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tolerance", type=float, default=0.02, help="relative, for every step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            losses(
                options.schedule,
                options.steps,
                Path(folder) / device.replace(":", ""),
                [
                    f'devices={{targets = ["{device}"], drafters = ["{device}"]}}',
                    f"target.dtype={dtype}",
                    f"drafter.dtype={dtype}",
                ],
            )
            for device, dtype in (("cpu", "float32"), (options.device, "bfloat16"))
        ]
    worst = 0.0
    for cpu, gpu in zip(*sides, strict=True):
        for key in ("tokens", "anchors", "lr"):
            if cpu[key] != gpu[key]:
                sys.exit(f"step {cpu['step']}: {key} is {cpu[key]} on the CPU, {gpu[key]} on the GPU")
        error = abs(gpu["loss"] - cpu["loss"]) / cpu["loss"]
        worst = max(worst, error)
        print(f"step {cpu['step']:4d}  cpu {cpu['loss']:.4f}  gpu {gpu['loss']:.4f}  {error:.2%}")
    means = [sum(row["loss"] for row in side) / len(side) for side in sides]
    print(f"worst step {worst:.2%}; mean {means[0]:.4f} and {means[1]:.4f}")
    sys.exit(7 if not worst <= options.tolerance else 0)


if __name__ == "__main__":
    main()
