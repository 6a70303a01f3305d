"""A run from schedule to result: plan, load, train, evaluate, write.

The order is the order in which things may fail cheaply: the plan reads small files, the folder is
made and probed, and only then are weights loaded. A run that fails before its first step leaves
no folder behind.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from rich.console import Console
from rich.table import Table

from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.dflash.decoding import Evaluation
from engine.dflash.drafter import build_drafter
from engine.dflash.export import fill_drafter, read_drafter_config, read_drafter_weights
from engine.dflash.masters import Masters
from engine.dflash.training import SharedWeights
from engine.environment import environment
from engine.errors import CheckpointError
from engine.panel import Panel, make_panel
from engine.plain import Training, evaluate_held_out, peak_memory, target_forward, train_step
from engine.planning import RunPlan, plan_run
from engine.run_folder import RunFolder, create_run_folder
from engine.schedule import Schedule
from engine.target.loading import load_target
from engine.target.taps import check_taps


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
    console: Console | None = None,
) -> RunResult:
    """Train a drafter as a schedule says.

    Args:
        steps: stop after this many steps; the learning rate still ends where the schedule says.
        output: the run's folder, instead of a new one in `run.output_dir`.
        resume: go on with the run in `output`. overwrite: remove it first.

    Raises:
        EngineError: of the kind that fits; its exit code is the command's.
    """
    console = console or Console(stderr=True)
    torch.set_num_threads(schedule.run.cpu_threads)
    plan = plan_run(schedule)
    print_plan(plan, console)
    folder = create_run_folder(
        schedule.run.output_dir, schedule.name, output, resume=resume, overwrite=overwrite
    )
    try:
        training = assemble(plan, folder.append_timings, console)
        start = _restore(folder, training) if resume else 0
        _check_first_taps(training)
    except BaseException:  # whatever it was: a run without a first step is no run
        if not resume:
            folder.discard()
        raise
    folder.write_schedule(plan.schedule.to_toml())
    folder.write_environment(environment() | {"kernels": training.target.kernels()})
    last = min(plan.total_steps, steps or plan.total_steps)
    panel = make_panel(last, console, log_every=schedule.run.log_every)
    report = _Reporter(folder, panel, last)
    try:
        result = _train(training, folder, report, start, last)
    except BaseException as error:
        report.status("failed", error=f"{type(error).__name__}: {error}")
        folder.log(f"failed: {type(error).__name__}: {error}")
        raise
    finally:
        panel.close()
    report.status("done")
    print_result(result, console)
    return result


def assemble(plan: RunPlan, record_timing: Callable[[dict[str, Any]], None], console: Console) -> Training:
    """Load the target and make the drafter; nothing is written."""
    schedule = plan.schedule
    # On a CPU it would say that packages are not installed, which they are; what runs is printed below.
    transformers.logging.set_verbosity_error()
    target = load_target(
        plan.target_folder,
        target_layer_ids=plan.drafter_config.target_layer_ids,
        dtype=getattr(torch, schedule.target.dtype),
        device=plan.target_device,
        init=schedule.target.init,
        trust_remote_code=schedule.target.trust_remote_code,
        seed=schedule.run.seed,
        progress=lambda line: console.print(line, markup=False, highlight=False),
    )
    kernels = "; ".join(f"{operation}: {kernel}" for operation, kernel in target.kernels().items())
    console.print(f"kernels: {kernels}", markup=False, highlight=False)
    drafter = build_drafter(plan.drafter_config, plan.drafter_device, plan.compute_dtype)
    drafter.requires_grad_(True)
    if schedule.drafter.init == "fresh":
        drafter.initialise(schedule.run.seed)
    else:
        earlier = Path(schedule.drafter.init)
        fill_drafter(drafter, read_drafter_weights(earlier, read_drafter_config(earlier)), str(earlier))
    shared = SharedWeights(target.embed_tokens.detach(), target.lm_head.detach())
    return Training(
        plan=plan,
        target=target,
        shared=shared.to(plan.drafter_device, plan.compute_dtype),
        drafter=drafter,
        masters=Masters(drafter, betas=schedule.train.betas, weight_decay=schedule.train.weight_decay),
        record_timing=record_timing,
    )


def _restore(folder: RunFolder, training: Training) -> int:
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        raise CheckpointError(f"{folder.path}: no checkpoint to resume from; start again with --overwrite")
    step = load_checkpoint(checkpoint, training)
    folder.cut_metrics_after(step)
    return step


def _check_first_taps(training: Training) -> None:
    """Captured states are trusted once they were seen to be states, not zeros or constants."""
    batch = training.plan.train.micro_batch(0)
    check_taps(target_forward(training, batch), batch.lengths.tolist())


@attrs.define
class _Reporter:
    """Feeds panel, metrics.jsonl and status.json from the same rows."""

    folder: RunFolder
    panel: Panel
    last: int
    row: dict[str, Any] = attrs.field(factory=dict)
    speeds: list[float] = attrs.field(factory=list)

    def step(self, row: dict[str, Any]) -> None:
        self.row = row
        self.speeds.append(row["tokens_per_s"])
        self.folder.append_metrics(row)
        self.panel.step(row)
        self.status("running")

    def message(self, text: str) -> None:
        self.folder.log(text)
        self.panel.message(text)

    def status(self, state: str, **facts: Any) -> None:
        figures = {key: self.row.get(key) for key in ("step", "loss", "tokens_per_s")}
        self.folder.write_status(
            {"state": state, "pid": os.getpid(), "time": time.time(), "last_step": self.last}
            | figures
            | facts
        )


def _train(training: Training, folder: RunFolder, report: _Reporter, start: int, last: int) -> RunResult:
    plan, schedule = training.plan, training.plan.schedule
    before = after = None
    report.status("running")
    if plan.held_out and not start:
        before = evaluate_held_out(training, plan.held_out)
        folder.append_metrics({"step": 0, **before.row()})
        report.message(f"before training: {_sentence(before)}")
    checkpoint = None
    for step in range(start, last):
        done = step + 1
        row = train_step(training, step)
        at_end = done == last
        if plan.held_out and (at_end or (schedule.run.eval_every and done % schedule.run.eval_every == 0)):
            after = evaluate_held_out(training, plan.held_out)
            row |= after.row()
        report.step(row)
        if at_end or (schedule.run.save_every and done % schedule.run.save_every == 0):
            checkpoint = save_checkpoint(folder, training, done)
            folder.log(f"checkpoint {checkpoint.name}")
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
        peak_memory=peak_memory(plan),
    )


def _sentence(evaluation: Evaluation) -> str:
    return (
        f"accepted length {evaluation.accepted_length:.2f}, held-out loss {evaluation.held_out_loss:.4f} "
        f"over {evaluation.documents} held-out documents"
    )


def print_plan(plan: RunPlan, console: Console) -> None:
    """What is about to happen: devices, sizes, steps, batches."""
    config = plan.drafter_config
    console.print(
        f"target {plan.summary.model_type}, {plan.summary.layers} layers, "
        f"taps {list(config.target_layer_ids)}, on {plan.target_device}; drafter {config.layers} layers, "
        f"block {config.block_size}, on {plan.drafter_device}, attention {plan.backend}; "
        f"{plan.total_steps} steps",
        markup=False,
        highlight=False,
    )
    for name, batches in (("training", plan.train), ("held out", plan.held_out)):
        if batches:
            table = batches.statistics().table()
            table.title = f"{name}: {table.title}"
            console.print(table)


def print_result(result: RunResult, console: Console) -> None:
    """Held-out loss and accepted length before and after, and where the checkpoint is."""
    if result.after:
        table = Table(title="held-out documents")
        for heading in ("", "before", "after"):
            table.add_column(heading, justify="right" if heading else "left")
        for name in ("accepted_length", "held_out_loss", "accuracy", "block_prefix"):
            figures = [
                f"{getattr(evaluation, name):.4f}" if evaluation else "–"
                for evaluation in (result.before, result.after)
            ]
            table.add_row(name.replace("_", " "), *figures)
        console.print(table)
    if result.tokens_per_s:
        memory = "".join(f", peak {gb:.1f} GB on {device}" for device, gb in result.peak_memory.items())
        console.print(f"{result.tokens_per_s:,.0f} tokens/s (median step){memory}", highlight=False)
    console.print(f"checkpoint: {result.checkpoint}", markup=False, highlight=False, soft_wrap=True)
