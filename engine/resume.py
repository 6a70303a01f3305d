"""Going on with a run: from which checkpoint, whether it is the same run, and putting it back.

What can refuse a resume is read first, from small files: it is known before a target is loaded.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson

from engine.checkpoint import Cursor, restore
from engine.checkpoint_folder import clear_leftovers, find_whole
from engine.dflash.decoding import Evaluation
from engine.drift import OPTIMIZER, differences
from engine.errors import CheckpointError
from engine.planning import RunPlan
from engine.run_folder import LATEST, RunFolder
from engine.training_parts import TrainingParts

Say = Callable[[str], None]


@attrs.frozen(kw_only=True)
class Resume:
    """Where a run goes on."""

    step: int = 0
    """Steps that are done."""
    checkpoint: Path | None = None
    """None where the run begins: a new one, or one that was killed before its first checkpoint."""
    cursor: Cursor | None = None
    differences: list[str] = attrs.field(factory=list)
    """What is not as it was, where the run was told to go on nevertheless."""

    @property
    def drift(self) -> list[dict[str, Any]]:
        """For the next cursor: every resume that went on with differences, with its step."""
        earlier: list[dict[str, Any]] = self.cursor["drift"] if self.cursor else []
        now = [{"step": self.step, "differences": self.differences}] if self.differences else []
        return [*earlier, *now]


def find_resume(
    folder: RunFolder, plan: RunPlan, facts: Mapping[str, Any], *, allow_drift: bool, say: Say
) -> Resume:
    """Clear up after a kill, choose a whole checkpoint, and compare it with what is to be run.

    Args:
        facts: of this plan, see `engine.drift.run_facts`.
        allow_drift: go on although data, target or recipe differ.
        say: takes lines about what was skipped or removed.

    Raises:
        CheckpointError: no checkpoint is whole, or the run would not be continued; lists the differences.
    """

    def log(line: str) -> None:
        say(line)
        folder.log(line)

    latest = folder.checkpoints / LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise CheckpointError(
            f"{latest}: is a folder and no link, as a copy that followed links leaves it; remove it, the "
            "checkpoints beside it are looked through"
        )
    for line in clear_leftovers(folder):
        log(line)
    found = find_whole(folder, lambda line: log(f"warning: {line}"))
    if found is None:
        log("no checkpoint was written yet: the run begins again")
        return Resume()
    path, cursor = found
    lines = differences(cursor["schedule"], cursor["facts"], plan, facts)
    if lines and not allow_drift:
        raise CheckpointError(
            f"{path}: resuming would not continue that run; it differs in\n  "
            + "\n  ".join(lines)
            + "\nundo that, or give --allow-drift to go on with what differs"
        )
    return Resume(step=cursor["step"], checkpoint=path, cursor=cursor, differences=lines)


def restore_run(resume: Resume, folder: RunFolder, parts: TrainingParts, say: Say) -> None:
    """Put masters and moments back, and cut the rows that will be written again.

    Raises:
        CheckpointError: the checkpoint is another drafter's, or a row of the run's files is damaged.
    """
    if resume.checkpoint is None or resume.cursor is None:
        folder.cut_metrics_after(-1)
        return
    anew = any(line.startswith(f"{OPTIMIZER}:") for line in resume.differences)
    restore(resume.checkpoint, resume.cursor, parts, keep_optimizer=not anew)
    folder.cut_metrics_after(resume.step)
    lines = [f"resumed from {resume.checkpoint.name}"]
    lines += [f"drift: {line}" for line in resume.differences]
    if anew:
        lines.append("drift: the optimizer's state begins anew, since another one kept it")
    for line in lines:
        say(line)
        folder.log(line)
    if resume.differences:
        folder.append_metrics({"step": resume.step, "drift": resume.differences})


FIRST = {"accuracy": "held_out_accuracy", "block_prefix": "held_out_block_prefix"}
"""Figures of an evaluation that a row of metrics.jsonl names otherwise, since a step's row has them too."""

COUNTS = ("verifications", "documents")


def first_row(evaluation: Evaluation) -> dict[str, float]:
    """The row of metrics.jsonl before the first step: every figure, so that a resumed run can show them."""
    figures = attrs.asdict(evaluation)
    return evaluation.row() | {FIRST.get(name, name): figures[name] for name in (*FIRST, *COUNTS)}


def first_evaluation(folder: RunFolder) -> Evaluation | None:
    """The drafter before its first step on held-out text, as `first_row` wrote it down; None without one."""
    path = folder.path / "metrics.jsonl"
    if not path.exists():
        return None
    names = {field.name: FIRST.get(field.name, field.name) for field in attrs.fields(Evaluation)}
    with path.open("rb") as file:
        for line in file:
            row = orjson.loads(line)
            if row["step"]:
                return None
            if all(name in row for name in names.values()):
                given: dict[str, Any] = {key: row[name] for key, name in names.items()}
                # NaN, of an evaluation without a single verification, has no other JSON than null.
                unknown = {key: math.nan for key, value in given.items() if value is None}
                return Evaluation(**(given | unknown))
    return None
