"""Training as stretches of steps, with what happens between them.

Between two stretches all lanes are idle, and this thread evaluates and saves; within one it writes the
rows of finished steps.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import attrs

from engine.checkpoint_writer import CheckpointWriter
from engine.data.batches import BatchPlan
from engine.dflash.decoding import Evaluation
from engine.dflash.finite import BadStepsInARow
from engine.errors import CheckpointError, EngineError
from engine.guard import Guard
from engine.plain import evaluate_held_out
from engine.report import Reporter
from engine.resume import Resume, first_evaluation, first_row
from engine.runtime.failure import Place, StageFailure
from engine.runtime.watchdog import Watched
from engine.training_parts import TrainingParts
from engine.warm_up import Readied


class Trainer(Protocol):
    """What trains stretches of steps: lanes, or the plain loop."""

    def warm_up(self, say: Callable[[str], None]) -> Readied | None:
        """Tune and compile what the steps will launch; None where there is nothing to do."""

    def train(self, first: int, last: int, on_step: Callable[[dict[str, Any]], None]) -> int:
        """Run steps [first, last), hand on each one's row; returns the step to go on with."""

    def request_stop(self) -> None:
        """End when the step under way is done; from any thread."""

    @property
    def watched(self) -> Watched:
        """What tells how the lanes get on."""

    def places(self) -> dict[str, Place]:
        """What each lane is at, for any thread that asks."""

    def notices(self) -> list[str]:
        """Lines for the log that came up since the last call."""

    def drain(self) -> list[dict[str, Any]]:
        """Rows of timings.jsonl that are complete."""

    def flush(self) -> list[dict[str, Any]]:
        """The rest of them, waiting for the devices."""


@attrs.frozen
class Trained:
    """How far training came."""

    step: int
    checkpoint: Path
    before: Evaluation | None
    after: Evaluation | None


def train_in_stretches(
    parts: TrainingParts,
    trainer: Trainer,
    report: Reporter,
    writer: CheckpointWriter,
    guard: Guard,
    resumed: Resume,
    last: int,
) -> Trained:
    """Train to step `last`, or to where the guard asks for an end; evaluate and save on the way.

    Raises:
        EngineError: of the kind that fits.
    """
    plan, schedule, folder, start = parts.plan, parts.plan.schedule, report.folder, resumed.step
    before = first_evaluation(folder) if start else None
    after = None
    if plan.held_out and not start:
        report.status("evaluating")
        with guard.watchdog.over("evaluation") as further:
            before = _evaluate(parts, plan.held_out, 0, further)
        with guard.watchdog.over("reporting an evaluation"):
            report.evaluated(0, first_row(before))
    checkpoint = None
    step = saved = start
    while step < last:
        end = min(last, _next_stop(step, schedule.run.eval_every), _next_stop(step, schedule.run.save_every))
        if guard.asked is not None:  # while things were set up; a run has a step at least
            end = step + 1
        evaluates = plan.held_out is not None and (end == last or _due(end, schedule.run.eval_every))
        stretch = _Stretch(report, trainer, writer, guard, end, evaluates)
        report.status("running")
        try:
            with guard.stepping(trainer):
                step = trainer.train(step, end, stretch.finished)
        except EngineError as failure:
            _save_last_good(failure, saved, writer, guard, report)
            raise
        if stretch.held_back is not None and plan.held_out:
            report.status("evaluating")
            with guard.watchdog.over("evaluation") as further:
                after = _evaluate(parts, plan.held_out, step, further)
            with guard.watchdog.over("reporting an evaluation"):
                report.step(stretch.held_back | after.row(), trainer.drain())
                report.evaluated(step, after.row())
        with guard.watchdog.over("waiting for the devices"):
            report.timings(trainer.flush())
        ends = step == last or (guard.asked is not None and step > start)
        if step > saved and (ends or _due(step, schedule.run.save_every)):
            report.status("saving")
            with guard.watchdog.over("saving a checkpoint"):
                checkpoint, saved = writer.save(step, wait=ends), step
        if ends:
            break
    if checkpoint is None:
        checkpoint = resumed.checkpoint
        if checkpoint is None:
            raise CheckpointError(f"{folder.path}: nothing to do: the run is at step {start} of {last}")
        report.message(f"nothing to do: step {start} of {last} is already done")
    return Trained(step, checkpoint, before, after)


def _evaluate(
    parts: TrainingParts, held_out: BatchPlan, step: int, further: Callable[[], None]
) -> Evaluation:
    """Evaluate after `step` steps; what fails says so. Lanes are idle.

    Args:
        further: called at each micro-batch, so that the watchdog sees it go on.
    """
    try:
        return evaluate_held_out(parts, held_out, further)
    except Exception as error:
        place = Place(stage=f"evaluation of held-out documents after step {step}")
        raise StageFailure(place, "the main thread", error, {}) from error


@attrs.define
class _Stretch:
    """Steps between two stops. The last one's row waits for the evaluation, whose figures it will bear."""

    report: Reporter
    trainer: Trainer
    writer: CheckpointWriter
    guard: Guard
    end: int
    evaluates: bool
    held_back: dict[str, Any] | None = None
    clock: float = attrs.field(factory=time.perf_counter)

    def finished(self, row: dict[str, Any]) -> None:
        """Report a step; its speed is its tokens over the time since the one before."""
        with self.guard.watchdog.over("reporting a step"):
            self._report(row)

    def _report(self, row: dict[str, Any]) -> None:
        if "not_finite" in row:
            self.report.message(f"step {row['step']} was skipped: {row['not_finite']}")
        for line in self.trainer.notices():
            self.report.message(f"step {row['step']}: {line}")
        now = time.perf_counter()
        row |= {"tokens_per_s": row["tokens"] / (now - self.clock)}
        self.clock = now
        if 0 < row["grad_norm"] < math.inf:
            self.writer.prepare()
        if self.evaluates and row["step"] == self.end:
            self.held_back = row
        else:
            self.report.step(row, self.trainer.drain())
        self.writer.check()


def _save_last_good(
    failure: EngineError, saved: int, writer: CheckpointWriter, guard: Guard, report: Reporter
) -> None:
    """Where steps were skipped until there were too many, what was learnt before them is kept."""
    cause = failure.__cause__
    if not isinstance(cause, BadStepsInARow) or cause.last_good <= saved:
        return
    guard.watchdog.pardon()
    report.status("saving")
    with guard.watchdog.over("saving a checkpoint"):
        writer.save(cause.last_good, wait=True)


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _next_stop(step: int, every: int) -> int:
    """The next step after `step` that is a multiple of `every`; far away where it is 0."""
    return (step // every + 1) * every if every else 1 << 62
