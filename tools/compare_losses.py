"""Compare the losses of two runs step by step: a GPU with a CPU, one schedule with another.

    python -m tools.compare_losses runs/a runs/b

Micro-batches and anchors must be the same. Each step's loss must agree within `--step`, the mean over
all steps within `--mean`, both relative. Exit code 7 where one does not, 2 where nothing can be compared.
"""

import argparse
import sys
from pathlib import Path

import orjson

SAME = ("tokens", "anchors", "lr")


def training_rows(run: Path) -> list[dict]:
    """The rows of a run's training steps."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    try:
        rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}; give a run's folder or its metrics.jsonl\n")
        sys.exit(2)
    except orjson.JSONDecodeError as error:
        sys.stderr.write(f"{path}: {error}\n")
        sys.exit(2)
    return [row for row in rows if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2)
    parser.add_argument("--step", type=float, default=0.02, help="largest difference of a step (%(default)s)")
    parser.add_argument("--mean", type=float, default=0.005, help="of the means (%(default)s)")
    options = parser.parse_args()
    sides = [training_rows(run) for run in options.runs]
    pairs = list(zip(*sides, strict=False))
    if not pairs:
        sys.stderr.write("no step is in both runs\n")
        sys.exit(2)
    errors = []
    for one, other in pairs:
        for key in SAME:
            if one[key] != other[key]:
                sys.stderr.write(f"step {one['step']}: {key} is {one[key]} and {other[key]}\n")
                sys.exit(7)
        errors.append(abs(other["loss"] - one["loss"]) / one["loss"])
    means = [sum(pair[side]["loss"] for pair in pairs) / len(pairs) for side in (0, 1)]
    mean_error = abs(means[1] - means[0]) / means[0]
    print(f"{len(pairs)} steps, means {means[0]:.4f} and {means[1]:.4f}")
    if any(errors):
        print(f"worst step {max(errors):.2e}, mean {mean_error:.2e}")
    else:
        print("all losses equal, bit for bit")
    sys.exit(0 if max(errors) <= options.step and mean_error <= options.mean else 7)


if __name__ == "__main__":
    main()
