"""A run from schedule to result: plan, load, train on lanes, evaluate, write.

The order is the order in which things may fail cheaply: the plan reads small files, the memory that
is free is compared with the memory that is needed, the folder is made and probed, and only then are
weights loaded. A run that fails before its first step leaves no folder behind.

Training goes in stretches of steps on the lanes. Between two stretches all lanes are idle, and this
thread evaluates and saves; within one it writes the rows of finished steps.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
import transformers
from rich.console import Console

from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.data.batches import BatchPlan
from engine.dflash.decoding import Evaluation
from engine.environment import environment
from engine.errors import CheckpointError
from engine.lanes import open_run_lanes
from engine.memory_free import cap_gpu_memory, check_fits, free_memory
from engine.memory_plan import GB
from engine.panel import make_panel
from engine.plain import PlainTrainer, evaluate_held_out, target_forward
from engine.planning import plan_run
from engine.report import Reporter, loading_bar, print_plan, print_result, wide_console
from engine.run_folder import RunFolder, check_run_folder, create_run_folder
from engine.runtime.failure import Place, StageFailure
from engine.runtime.tuning_cache import TuningCache, cache_folder, fingerprint
from engine.schedule import Schedule
from engine.target.taps import check_taps
from engine.training_parts import TrainingParts, load_parts, peak_memory
from engine.warm_up import Readied


class Trainer(Protocol):
    """What trains stretches of steps: lanes, or the plain loop."""

    def warm_up(self, say: Callable[[str], None]) -> Readied | None:
        """Tune and compile what the steps will launch; None where there is nothing to do."""

    def train(self, first: int, last: int, on_step: Callable[[dict[str, Any]], None]) -> int:
        """Run steps [first, last), hand on each one's row; returns the step to go on with."""

    def notices(self) -> list[str]:
        """Lines for the log that came up since the last call."""

    def drain(self) -> list[dict[str, Any]]:
        """Rows of timings.jsonl that are complete."""

    def flush(self) -> list[dict[str, Any]]:
        """The rest of them, waiting for the devices."""


@attrs.frozen(kw_only=True)
class RunResult:
    """What a finished run leaves."""

    folder: RunFolder
    checkpoint: Path
    steps: int
    before: Evaluation | None
    after: Evaluation | None
    tokens_per_s: float | None
    """Median over the steps; the first ones compile and warm up."""
    peak_memory: dict[str, float]
    """Of allocated GPU memory, GB by device."""


def run(
    schedule: Schedule,
    *,
    steps: int | None = None,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    plain: bool = False,
    force: bool = False,
    console: Console | None = None,
) -> RunResult:
    """Train a drafter as a schedule says.

    Args:
        steps: stop after this many steps; the learning rate still ends where the schedule says.
        output: the run's folder, instead of a new one in `run.output_dir`.
        resume: go on with the run in `output`. overwrite: remove it first.
        plain: train in one loop without lanes, on the first target's and the first drafter's device.
        force: go on although the memory plan says that it cannot fit.

    Raises:
        EngineError: of the kind that fits; its exit code is the command's.
    """
    console = console or wide_console()
    check_run_folder(output, resume=resume, overwrite=overwrite)
    torch.set_num_threads(schedule.run.cpu_threads)
    plan = plan_run(schedule, one_lane_each=plain)
    print_plan(plan, console)
    most = None if schedule.run.gpu_memory_gb is None else int(schedule.run.gpu_memory_gb * GB)
    check_fits(plan.memory, free_memory(plan.memory.devices, most), force)
    cap_gpu_memory(plan.memory.devices, most)
    folder = create_run_folder(
        schedule.run.output_dir, schedule.name, output, resume=resume, overwrite=overwrite
    )
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    tuned = TuningCache(fingerprint(), cache_folder(), say) if plan.on_gpus else None
    try:
        if tuned:
            tuned.install()
        # On a CPU it would say that packages are not installed, which they are; what runs is printed.
        transformers.logging.set_verbosity_error()
        with loading_bar(console) as progress:
            parts = load_parts(
                plan, lambda line: console.print(line, markup=False, highlight=False), progress
            )
        start = _restore(folder, parts) if resume else 0
        _check_first_taps(parts)
        trainer = PlainTrainer(parts) if plain else open_run_lanes(parts)
        readied = trainer.warm_up(say)
        if readied:
            say(str(readied))
        if tuned:
            tuned.save()
    except BaseException:  # whatever it was: a run without a first step is no run
        if not resume:
            folder.discard()
        raise
    folder.write_schedule(plan.schedule.to_toml())
    folder.write_environment(environment() | {"kernels": parts.targets[0].kernels()})
    last = min(plan.total_steps, steps or plan.total_steps)
    panel = make_panel(last, console, log_every=schedule.run.log_every)
    report = Reporter(folder, panel, plan.host, last)
    try:
        plan.host.tell(
            "run_started", schedule=plan.schedule, folder=folder.path, first_step=start, last_step=last
        )
        result = _train(parts, trainer, folder, report, start, last)
        plan.host.tell("run_finished", step=last, folder=folder.path)
    except BaseException as error:
        report.failed(error, trainer.drain())
        plan.host.tell_failure(error)
        raise
    finally:
        panel.close()
        if tuned:
            tuned.save()
            tuned.uninstall()
    report.status("done")
    print_result(result.before, result.after, report, console)
    if result.tokens_per_s:
        memory = "".join(f", peak {gb:.1f} GB on {device}" for device, gb in result.peak_memory.items())
        console.print(f"{result.tokens_per_s:,.0f} tokens/s (median step){memory}", highlight=False)
    console.print(f"checkpoint: {result.checkpoint}", markup=False, highlight=False, soft_wrap=True)
    return result


def _restore(folder: RunFolder, parts: TrainingParts) -> int:
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        raise CheckpointError(f"{folder.path}: no checkpoint to resume from; start again with --overwrite")
    step = load_checkpoint(checkpoint, parts)
    folder.cut_metrics_after(step)
    return step


def _check_first_taps(parts: TrainingParts) -> None:
    """Captured states are trusted once they were seen to be states, not zeros or constants."""
    batch = parts.plan.train.micro_batch(0)
    check_taps(target_forward(parts, batch), batch.lengths.tolist())


def _train(
    parts: TrainingParts, trainer: Trainer, folder: RunFolder, report: Reporter, start: int, last: int
) -> RunResult:
    plan, schedule = parts.plan, parts.plan.schedule
    before = after = None
    report.status("running")
    if plan.held_out and not start:
        before = _evaluate(parts, plan.held_out, 0)
        report.evaluated(0, before.row())
    checkpoint = None
    step = start
    while step < last:
        end = min(last, _next_stop(step, schedule.run.eval_every), _next_stop(step, schedule.run.save_every))
        evaluates = plan.held_out is not None and (end == last or _due(end, schedule.run.eval_every))
        stretch = _Stretch(report, trainer, end, evaluates)
        step = trainer.train(step, end, stretch.finished)
        if stretch.held_back is not None and plan.held_out:
            after = _evaluate(parts, plan.held_out, step)
            report.step(stretch.held_back | after.row(), trainer.drain())
            report.evaluated(step, after.row())
        report.timings(trainer.flush())
        if step == last or _due(step, schedule.run.save_every):
            checkpoint = save_checkpoint(folder, parts, step)
            report.checkpoint(step, checkpoint)
    if checkpoint is None:
        checkpoint = folder.latest_checkpoint()
        if checkpoint is None:
            raise CheckpointError(f"{folder.path}: nothing to do: the run is at step {start} of {last}")
        report.message(f"nothing to do: step {start} of {last} is already done")
    return RunResult(
        folder=folder,
        checkpoint=checkpoint,
        steps=last,
        before=before,
        after=after,
        tokens_per_s=statistics.median(report.speeds) if report.speeds else None,
        peak_memory=peak_memory(plan.devices),
    )


def _evaluate(parts: TrainingParts, held_out: BatchPlan, step: int) -> Evaluation:
    """Evaluate after `step` steps; what fails says so. Lanes are idle."""
    try:
        return evaluate_held_out(parts, held_out)
    except Exception as error:
        place = Place(stage=f"evaluation of held-out documents after step {step}")
        raise StageFailure(place, "the main thread", error, {}) from error


@attrs.define
class _Stretch:
    """Steps between two stops. The last one's row waits for the evaluation, whose figures it will bear."""

    report: Reporter
    trainer: Trainer
    end: int
    evaluates: bool
    held_back: dict[str, Any] | None = None
    clock: float = attrs.field(factory=time.perf_counter)

    def finished(self, row: dict[str, Any]) -> None:
        """Report a step; its speed is its tokens over the time since the one before."""
        for line in self.trainer.notices():
            self.report.message(f"step {row['step']}: {line}")
        now = time.perf_counter()
        row |= {"tokens_per_s": row["tokens"] / (now - self.clock)}
        self.clock = now
        if self.evaluates and row["step"] == self.end:
            self.held_back = row
        else:
            self.report.step(row, self.trainer.drain())


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _next_stop(step: int, every: int) -> int:
    """The next step after `step` that is a multiple of `every`; far away where it is 0."""
    return (step // every + 1) * every if every else 1 << 62
