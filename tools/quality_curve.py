"""How good a run's drafter was after how many steps: a chart, and the same as a Markdown table.

python -m tools.quality_curve runs/latest --png docs/quality.png --table docs/quality_table.md

The points are the run's own evaluations, so `run.eval_every` decides how many there are. With
`--evaluation FILE`, what `python -m engine evaluate RUN --json FILE` measured by decoding is added.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson
from matplotlib.figure import Figure

from tools.plot_runs import running_mean, series

COLUMNS = {
    "loss": "training loss, nats",
    "held_out_loss": "held-out loss, nats",
    "accepted_length": "accepted length",
}


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl that hold an evaluation, the one before the first step included.

    Their training loss is the running mean of the steps before, as it is drawn.
    """
    steps, losses = series(run, "loss")
    smooth = dict(zip(steps, running_mean(losses), strict=True))
    rows = (orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines())
    return [
        {name: row.get(name) for name in ("step", *COLUMNS)} | {"loss": smooth.get(row["step"])}
        for row in rows
        if row.get("held_out_loss") is not None
    ]


def markdown(rows: list[dict[str, Any]], evaluation: dict[str, Any] | None) -> str:
    """The evaluations as a table, and below it what decoding came to."""
    lines = [f"| step | {' | '.join(COLUMNS.values())} |", "|---:" * (1 + len(COLUMNS)) + "|"]
    for row in rows:
        values = ("–" if row[name] is None else f"{row[name]:.3f}" for name in COLUMNS)
        lines.append(f"| {row['step']:,} | {' | '.join(values)} |")
    if evaluation and (decoding := evaluation["decoding"]):
        lines += [
            "",
            f"Decoding {decoding['prompts']} held-out prompts in batches of {decoding['batch']}: "
            f"accepted length {decoding['acceptance']['accepted_length']:.2f} of {evaluation['block_size']}, "
            f"{decoding['tokens_per_s']:,.0f} tokens/s, the target alone "
            f"{decoding['alone_tokens_per_s']:,.0f}.",
        ]
    return "\n".join(lines) + "\n"


def draw(run: Path, rows: list[dict[str, Any]], path: Path) -> None:
    """Loss on the left, accepted length on the right."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    losses, lengths = figure.subplots(1, 2)
    steps, values = series(run, "loss")
    losses.plot(steps, running_mean(values), label="training")
    marks = [row["step"] for row in rows]
    losses.plot(marks, [row["held_out_loss"] for row in rows], "o-", label="held out")
    losses.set(xlabel="step", ylabel="loss, nats per token")
    losses.legend(frameon=False)
    lengths.plot(*series(run, "accepted_length"), "o-")
    lengths.set(xlabel="step", ylabel="accepted length, held-out answers", ylim=(0.9, None))
    for axes in (losses, lengths):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--png", type=Path, help="the chart")
    parser.add_argument("--table", type=Path, help="the table; without it, it is printed")
    parser.add_argument("--evaluation", type=Path, help="what evaluate --json wrote")
    options = parser.parse_args()
    rows = evaluations(options.run)
    if not rows:
        parser.error(f"{options.run}: no evaluation in metrics.jsonl; set run.eval_every and data.held_out")
    measured = orjson.loads(options.evaluation.read_bytes()) if options.evaluation else None
    table = markdown(rows, measured)
    if options.png:
        draw(options.run, rows, options.png)
    if options.table:
        options.table.write_text(table, encoding="utf-8")
    else:
        sys.stdout.write(table)


if __name__ == "__main__":
    main()
