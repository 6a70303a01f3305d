"""Draw loss and accepted length of some runs, one beside the other.

python -m tools.plot_runs runs/a runs/control --labels "with taps" "taps zeroed" --png docs/demo.png
"""

import argparse
from pathlib import Path

import matplotlib
import orjson

matplotlib.use("Agg")
from matplotlib import pyplot

SMOOTHED = 15  # steps in a running mean: micro-batches of short and long documents differ by a nat


def series(run: Path, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column of a run's metrics.jsonl."""
    rows = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    kept = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in kept], [row[key] for row in kept]


def running_mean(values: list[float]) -> list[float]:
    """Mean of the last `SMOOTHED` values at each place."""
    return [sum(values[max(0, i - SMOOTHED + 1) : i + 1]) / min(i + 1, SMOOTHED) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--labels", nargs="+")
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args()
    figure, (losses, lengths) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for run, label in zip(options.runs, options.labels or map(str, options.runs), strict=True):
        steps, values = series(run, "loss")
        (line,) = losses.plot(steps, running_mean(values), label=f"{label}, training")
        steps, values = series(run, "held_out_loss")
        losses.plot(steps, values, "o", color=line.get_color(), label=f"{label}, held out")
        lengths.plot(*series(run, "accepted_length"), "o-", color=line.get_color(), label=label)
    losses.set(xlabel="step", ylabel="loss, nats per token")
    lengths.set(xlabel="step", ylabel="accepted length, held-out answers", ylim=(0.9, None))
    for axes in (losses, lengths):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(options.png, dpi=110)


if __name__ == "__main__":
    main()
