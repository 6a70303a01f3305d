"""A run from schedule to result: plan, load, train on lanes, evaluate, write.

The order is the order in which things may fail cheaply: the plan reads small files, the memory that
is free is compared with the memory that is needed, the folder is made and probed, and only then are
weights loaded. A run that fails before its first step leaves no folder behind.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import attrs
import torch
import transformers
from rich.console import Console

from engine.checkpoint_writer import CheckpointWriter, Written
from engine.decoded_sample import print_sample
from engine.device_trust import check_attention, check_kernels, probed_links
from engine.dflash.decoding import Evaluation
from engine.disk_space import check_first_room
from engine.drift import run_facts
from engine.environment import environment
from engine.guard import Guard
from engine.heartbeat import Heartbeat
from engine.interrupts import Interrupted
from engine.lanes import open_run_lanes
from engine.memory_free import cap_gpu_memory, check_fits, free_memory
from engine.memory_plan import GB
from engine.panel import make_panel
from engine.plain import PlainTrainer, target_forward
from engine.planning import plan_run
from engine.report import Reporter, loading_bar, print_plan, print_result, wide_console
from engine.resume import Resume, find_resume, restore_run
from engine.run_folder import RunFolder, check_run_folder, create_run_folder
from engine.run_lock import RunLock
from engine.runtime.tuning_cache import TuningCache, cache_folder, fingerprint
from engine.schedule import Schedule
from engine.shape_buckets import shape_buckets
from engine.stretches import train_in_stretches
from engine.target.loading import Target
from engine.target.taps import check_taps
from engine.target_agreement import report_agreement
from engine.training_parts import TrainingParts, load_parts, peak_memory


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
    allow_drift: bool = False,
    overwrite: bool = False,
    plain: bool = False,
    force: bool = False,
    max_hours: float | None = None,
    console: Console | None = None,
) -> RunResult:
    """Train a drafter as a schedule says.

    Args:
        steps: stop after this many steps; the learning rate still ends where the schedule says.
        output: the run's folder, instead of a new one in `run.output_dir`.
        resume: go on with the run in `output`. overwrite: remove it first.
        allow_drift: resume although data, target or recipe are not those of that run.
        plain: train in one loop without lanes, on the first target's and the first drafter's device.
        force: go on although the memory plan says that it cannot fit.
        max_hours: from now; then the step under way is finished and saved, and the run ends.

    Raises:
        EngineError: of the kind that fits; its exit code is the command's.
        Interrupted: SIGINT or SIGTERM asked for the end; after a step, everything is saved.
    """
    console = console or wide_console()
    with ExitStack() as held:
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        guard = held.enter_context(Guard(schedule.run.stall_seconds, max_hours, say))
        lock = held.enter_context(RunLock(say))
        if output is not None:
            lock.take(output)
        return _run(
            schedule,
            lock,
            held,
            guard,
            console,
            steps=steps,
            output=output,
            resume=resume,
            allow_drift=allow_drift,
            overwrite=overwrite,
            plain=plain,
            force=force,
        )


def _run(
    schedule: Schedule,
    lock: RunLock,
    held: ExitStack,
    guard: Guard,
    console: Console,
    *,
    steps: int | None,
    output: Path | None,
    resume: bool,
    allow_drift: bool,
    overwrite: bool,
    plain: bool,
    force: bool,
) -> RunResult:
    """`run` with its folder locked, or locking the numbered one that it makes.

    Args:
        held: closes whatever is entered into it, before the lock.
    """
    check_run_folder(output, resume=resume, overwrite=overwrite)
    torch.set_num_threads(schedule.run.cpu_threads)
    plan = plan_run(schedule, one_lane_each=plain)
    print_plan(plan, console, steps)
    console.print(str(shape_buckets(plan)), highlight=False, soft_wrap=True)
    most = None if schedule.run.gpu_memory_gb is None else int(schedule.run.gpu_memory_gb * GB)
    check_fits(plan.memory, free_memory(plan.memory.devices, most), force)
    cap_gpu_memory(plan.memory.devices, most)
    facts = run_facts(plan)
    folder = create_run_folder(
        schedule.run.output_dir, schedule.name, output, resume=resume, overwrite=overwrite
    )
    lock.take(folder.path)
    folder = attrs.evolve(folder, made=(*lock.made, *folder.made))
    say = guard.say
    resumed = find_resume(folder, plan, facts, allow_drift=allow_drift, say=say) if resume else Resume()
    last = min(plan.total_steps, steps or plan.total_steps)
    heartbeat = held.enter_context(Heartbeat(folder, say))
    heartbeat.planned(resumed.step, last, resumed.checkpoint)
    guard.keeps(folder, heartbeat)
    tuned = held.enter_context(tuning_results(say)) if plan.on_gpus else None
    try:
        check_first_room(plan, folder.path, say)
        links = probed_links(plan.devices, say)
        # On a CPU it would say that packages are not installed, which they are; what runs is printed.
        transformers.logging.set_verbosity_error()
        with loading_bar(console) as progress:
            parts = load_parts(
                plan, lambda line: console.print(line, markup=False, highlight=False), progress, links
            )
        if resume:
            restore_run(resumed, folder, parts, say)
        check_targets = partial(_check_targets, parts, tuple(parts.targets), say)
        if plain:
            check_targets()
        trainer = PlainTrainer(parts) if plain else open_run_lanes(parts, check_targets)
        heartbeat.state("warming-up")
        readied = trainer.warm_up(say)
        if readied:
            say(str(readied))
        check_attention(parts, say)
        agreement = report_agreement(parts, facts["target weights (fingerprint)"], say)
        if tuned:
            tuned.save()
    except BaseException as error:  # whatever it was: a run without a first step is no run
        heartbeat.end_with(error)
        if not resume:
            folder.discard()
        raise
    folder.write_schedule(plan.schedule.to_toml())
    folder.write_environment(
        environment()
        | {
            "kernels": parts.targets[0].kernels(),
            "links": parts.links.facts(),
            "target_agreement": agreement,
        }
    )
    panel = make_panel(last, console, log_every=schedule.run.log_every)
    report = Reporter(folder, panel, plan.host, last, heartbeat)
    heartbeat.watch(list(map(str, plan.devices)), trainer.places, report.busy)
    try:
        plan.host.tell(
            "run_started", schedule=plan.schedule, folder=folder.path, first_step=resumed.step, last_step=last
        )
        told = partial(_tell_checkpoint, report)
        with CheckpointWriter(
            folder, parts, facts=facts, drift=resumed.drift, told=told, say=report.message
        ) as writer:
            trained = train_in_stretches(parts, trainer, report, writer, guard, resumed, last)
        with guard.watchdog.over("telling plugins of the end"):
            plan.host.tell("run_finished", step=trained.step, folder=folder.path)
    except Interrupted as interrupted:  # no step was begun, or it would have been finished
        report.status("stopped", exit_code=interrupted.exit_code, error=str(interrupted))
        plan.host.tell_failure(interrupted)
        if not resume:
            folder.discard()
        raise
    except BaseException as error:
        report.failed(error, trainer.drain())
        plan.host.tell_failure(error)
        raise
    finally:
        panel.close()
    if trained.step >= last:
        report.status("done")
    else:
        _end_early(guard, report, trained.step, last)
    result = RunResult(
        folder=folder,
        checkpoint=trained.checkpoint,
        steps=trained.step,
        before=trained.before,
        after=trained.after,
        tokens_per_s=statistics.median(report.speeds) if report.speeds else None,
        peak_memory=peak_memory(plan.devices),
    )
    print_result(result.before, result.after, report, console)
    if result.tokens_per_s:
        memory = "".join(f", peak {gb:.1f} GB on {device}" for device, gb in result.peak_memory.items())
        console.print(f"{result.tokens_per_s:,.0f} tokens/s (median step){memory}", highlight=False)
    console.print(f"checkpoint: {result.checkpoint}", markup=False, highlight=False, soft_wrap=True)
    if result.steps < last:
        guard.interrupts.check()
    else:
        with guard.watchdog.over("decoding a sample"):
            print_sample(parts, result.checkpoint, console)
    return result


@contextmanager
def tuning_results(say: Callable[[str], None]) -> Iterator[TuningCache]:
    """What earlier runs tuned, for this one; what it tunes is kept, however it ends."""
    tuned = TuningCache(fingerprint(), cache_folder(), say)
    tuned.install()
    try:
        yield tuned
    finally:
        tuned.save()
        tuned.uninstall()


def _end_early(guard: Guard, report: Reporter, step: int, last: int) -> None:
    """Say why a run ends in good order before its last step."""
    asked = guard.asked
    why = asked.why if asked else "asked to end"
    report.folder.log(f"{why}: step {step} of {last} is done and saved; go on with --resume")
    guard.say(f"{why}: step {step} of {last} is done and saved; go on with --resume")
    report.status("stopped", exit_code=asked.exit_code if asked else 0, error=why)


def _tell_checkpoint(report: Reporter, written: Written) -> None:
    report.folder.log(str(written))
    report.checkpoint(written.step, written.path)


def _check_targets(parts: TrainingParts, loaded: Sequence[Target], say: Callable[[str], None]) -> None:
    """Once plugins have wrapped the targets: what then runs is what has to be right."""
    check_kernels(parts, say, loaded)
    _check_first_taps(parts)


def _check_first_taps(parts: TrainingParts) -> None:
    """Captured states are trusted once they were seen to be states, not zeros or constants."""
    batch = parts.plan.train.micro_batch(0)
    check_taps(target_forward(parts, batch), batch.lengths.tolist())
