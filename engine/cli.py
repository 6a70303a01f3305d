"""Commands. Each imports what it needs when it runs, so that `--help` is quick."""

import os
import sys
import threading
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from engine.bench_cli import bench_app
from engine.errors import EngineError, InputError, ScheduleError, exit_code_of, words

app = typer.Typer(
    help="Trains DFlash speculative-decoding drafters against a frozen target.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")

ScheduleFile = Annotated[Path, typer.Argument(metavar="SCHEDULE", help="a TOML file, see schedules/")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="any field, such as train.lr=3e-4")
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="a checkpoint, or a run's folder: its latest")
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="the target, where the checkpoint's schedule does not find it")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda:<n>; a GPU if there is one")]


@app.command("run")
def run_command(
    schedule: ScheduleFile,
    set_: Overrides = None,
    steps: Annotated[int | None, typer.Option(min=1, help="stop after this many steps")] = None,
    output: Annotated[Path | None, typer.Option(help="the run's folder")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --output")] = False,
    allow_drift: Annotated[
        bool, typer.Option("--allow-drift", help="resume although data, target or recipe differ")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the run in --output")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="one loop without lanes, to compare with")] = False,
    force: Annotated[bool, typer.Option("--force", help="start although memory will not do")] = False,
    max_hours: Annotated[
        float | None, typer.Option(min=0, help="finish the step and save after so long; exit code 0")
    ] = None,
) -> None:
    """Train a drafter."""
    from engine.interrupts import Interrupted
    from engine.run import run
    from engine.schedule import load_schedule

    before = set(threading.enumerate())
    try:
        run(
            load_schedule(schedule, set_ or []),
            steps=steps,
            output=output,
            resume=resume,
            allow_drift=allow_drift,
            overwrite=overwrite,
            plain=plain,
            force=force,
            max_hours=max_hours,
        )
    except Interrupted as interrupted:  # typer would make any of them 130
        sys.stderr.write(f"interrupted: {interrupted}\n")
        _leave(interrupted.exit_code, stuck=_others(before))


@app.command()
def check(schedule: ScheduleFile, set_: Overrides = None) -> None:
    """Check a schedule against target, data and devices, and print what it comes to; runs nothing."""
    from engine.planning import plan_run
    from engine.report import print_plan, wide_console
    from engine.schedule import load_schedule

    plan = plan_run(load_schedule(schedule, set_ or []))
    sys.stdout.write(plan.schedule.to_toml())
    print_plan(plan, wide_console())


@app.command()
def prepare(
    inputs: Annotated[list[Path], typer.Argument(metavar="JSONL…")],
    output: Annotated[Path, typer.Option(help="folder for the prepared documents")],
    tokenizer: Annotated[
        str | None, typer.Option(help="a tokenizer's folder, or builtin:tiny-hybrid; else the target's")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="cut longer ones at the end")] = None,
    held_out: Annotated[float | None, typer.Option(help="share split off by answer")] = None,
    show: Annotated[int, typer.Option(min=0, help="print this many rows, supervised tokens marked")] = 0,
    max_bad: Annotated[float, typer.Option(min=0, max=1, help="share of bad rows that stops it")] = 0.01,
    answers: Annotated[
        Literal["all", "last", "target"],
        typer.Option(help="supervise all answers, or the last one; or let the target write them"),
    ] = "all",
    template: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="for the chat template, e.g. enable_thinking=false"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace what is in --output")] = False,
    target: Annotated[str | None, typer.Option(help="with --answers target: its folder")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="of its answers; 0, the default: the most likely tokens")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="of an answer; 1024")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="prompts answered side by side; 32")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="of the draws; 0")] = None,
    device: Annotated[str | None, typer.Option(help="of the target: cpu or cuda:<n>")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option(help="of the target; bfloat16")
    ] = None,
) -> None:
    """Turn JSONL conversations into documents for training."""
    from engine.builtin import resolve
    from engine.data.preparation import prepare as prepare_documents
    from engine.regenerate import requested_writer
    from engine.toml_text import apply_override

    template_options: dict[str, Any] = {}
    for option in template or []:
        apply_override(template_options, option)
    settings = {
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "batch": batch,
        "seed": seed,
        "device": device,
        "dtype": dtype,
    }
    writer = requested_writer(answers, target, settings, lambda line: typer.echo(line, err=True))
    folder = tokenizer or target
    if folder is None:
        raise InputError("--tokenizer: needed, the folder of the target's tokenizer")
    prepare_documents(
        inputs,
        resolve(folder),
        output,
        max_length=max_length,
        held_out=held_out,
        show=show,
        max_bad=max_bad,
        answers="all" if answers == "target" else answers,
        template_options=template_options,
        answer_writer=writer,
        overwrite=overwrite,
    )


@app.command("inspect")
def inspect_command(
    data: Annotated[str, typer.Argument(metavar="DATA", help="prepared documents, Arrow, Parquet or JSONL")],
    schedule: Annotated[Path | None, typer.Option(help="adds what its settings make of them")] = None,
    set_: Overrides = None,
    tokenizer: Annotated[str | None, typer.Option(help="a tokenizer's folder; else the target's")] = None,
    samples: Annotated[int, typer.Option(min=0, help="documents to show in full")] = 2,
    json: Annotated[bool, typer.Option("--json", help="the figures as JSON, without samples")] = False,
) -> None:
    """Look at data: lengths, answers, duplicates, what is cut, anchors, and coloured samples."""
    from engine.inspect_data import inspect_data
    from engine.schedule import load_schedule

    if schedule is None and set_:
        raise ScheduleError("--set changes a schedule's keys; give the schedule too")
    inspect_data(
        data,
        load_schedule(schedule, set_ or []) if schedule else None,
        tokenizer=tokenizer,
        samples=samples,
        as_json=json,
        output=sys.stdout,
    )


@app.command("evaluate")
def evaluate_command(
    checkpoint: Checkpoint,
    prompts: Annotated[int, typer.Option(min=1, help="held-out documents, at most")] = 200,
    data: Annotated[str | None, typer.Option(help="instead of the schedule's held-out documents")] = None,
    target: TargetOption = None,
    device: DeviceOption = None,
    walk: Annotated[bool, typer.Option("--walk/--no-walk", help="score and walk the answers")] = True,
    decoding: Annotated[
        bool, typer.Option("--decoding/--no-decoding", help="decode, with the drafter and without")
    ] = True,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="of the sampling")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="prompts decoded together")] = 32,
    png: Annotated[Path | None, typer.Option(help="draw a chart")] = None,
    json: Annotated[Path | None, typer.Option(help="write the figures")] = None,
) -> None:
    """Measure accepted length, and speed beside the target alone; exit code 7 where output differs."""
    from rich.console import Console

    from engine.evaluate import check_output, evaluate_checkpoint
    from engine.evaluation_report import draw, print_report, write_json

    notes = Console(stderr=True)
    report = evaluate_checkpoint(
        checkpoint,
        prompts=prompts,
        data=data,
        target=target,
        device=device,
        walks=walk,
        decodes=decoding,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch=batch,
        say=lambda line: notes.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    print_report(report, Console())
    if json:
        write_json(report, json)
    if png:
        draw(report, png)
    check_output(report)


@app.command("generate")
def generate_command(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="what to answer")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of the answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="of the sampling")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="render the prompt by the target's chat template")
    ] = True,
    template: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="for the chat template, e.g. enable_thinking=false"),
    ] = None,
    target: TargetOption = None,
    device: DeviceOption = None,
) -> None:
    """Answer a prompt by speculative decoding; on a terminal the drafter's tokens are coloured."""
    from rich.console import Console

    from engine.generate import generate
    from engine.toml_text import apply_override

    options: dict[str, Any] = {}
    for option in template or []:
        apply_override(options, option)
    generate(
        checkpoint,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        template=options,
        target=target,
        device=device,
        output=Console(),
        notes=Console(stderr=True),
    )


@app.command("export")
def export_command(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where to; made")],
    format_: Annotated[
        Literal["dflash", "speculators"],
        typer.Option("--format", help="as SGLang and vLLM read it, or as the speculators library does"),
    ] = "dflash",
    target: TargetOption = None,
    target_name: Annotated[
        str | None, typer.Option(help="what the card calls it, such as its Hub name; else its path")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the export in DIR")] = False,
) -> None:
    """Write a drafter as a folder that servers load, and compare what they would compute with training."""
    from engine.export import export

    export(
        checkpoint,
        folder,
        layout=format_,
        target=target,
        target_name=target_name,
        overwrite=overwrite,
        say=lambda line: typer.echo(line, err=True),
    )


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="reference files")],
    device: Annotated[str, typer.Option(help="cpu or cuda:<n>")] = "cpu",
    attention: Annotated[str, typer.Option(help="dense or flex")] = "dense",
    compiled: Annotated[bool, typer.Option("--compiled", help="as plugins.lazy_compile compiles")] = False,
) -> None:
    """Recompute reference files; exit code 7 where the difference is beyond the tolerance."""
    from engine.verify import verify_files

    verify_files(files, device_name=device, attention=attention, compiled=compiled)


@app.command("plugins")
def plugins_command(
    schedule: Annotated[Path | None, typer.Argument(metavar="[SCHEDULE]", help="with its plugins")] = None,
    set_: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Show which plugin answers which hook, in which order, and each plugin's options."""
    import orjson
    from rich.console import Console

    from engine.plugin_host import load_plugins
    from engine.plugin_report import describe_plugins, print_plugins
    from engine.schedule import load_schedule

    if schedule is None and set_:
        raise ScheduleError("--set changes a schedule's keys; give the schedule too")
    host = load_plugins(load_schedule(schedule, set_ or []).plugin if schedule else ())
    if json:
        described = orjson.dumps(describe_plugins(host), option=orjson.OPT_INDENT_2, default=str)
        sys.stdout.write(described.decode() + "\n")
    else:
        print_plugins(host, Console())


@app.command("doctor")
def doctor_command(
    schedule: Annotated[Path | None, typer.Argument(metavar="[SCHEDULE]", help="checked as well")] = None,
    set_: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Check versions, GPUs, kernels, caches and disk; exit code 7 where something would fail."""
    from engine.doctor import doctor

    doctor(schedule, set_ or [], as_json=json)


@app.command("status")
def status_command(
    run: Annotated[
        Path, typer.Argument(metavar="[RUN]", help="a run's folder, or the folder of runs")
    ] = Path("runs/latest"),
    watch: Annotated[bool, typer.Option("--watch", help="go on until the run is over")] = False,
    json: Annotated[bool, typer.Option("--json", help="one object; a line each with --watch")] = False,
) -> None:
    """Show how a run is: its state, speed, lanes, memory and last checkpoint, from its folder alone.

    It is dead when its process is gone or silent for 90 seconds. Exit code: 0 under way or done, 1 failed,
    2 no status to read, 5 dead; of a stopped run, its own: 130 or 143 after a signal.
    """
    from engine.status import show_status

    raise typer.Exit(show_status(run, watch=watch, as_json=json, output=sys.stdout))


@app.command("stress")
def stress_command(
    seconds: Annotated[float, typer.Option(min=1, help="how long; 300 from empty caches")] = 90,
    mode: Annotated[str, typer.Option(help="tune, launch, stage, or none to see the race")] = "tune",
    devices: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="one thread each; a name may repeat")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="the report as JSON")] = False,
) -> None:
    """Hammer FLA's kernels from several threads and compare every output with one thread's."""
    from rich.console import Console

    from engine.stress import stress

    stress(
        seconds, mode=mode, devices=devices.split(",") if devices else None, console=Console(), as_json=json
    )


def main() -> None:
    """Run a command; a failure's cause decides the exit code."""
    from engine.plugin_host import register_installed_commands

    before = set(threading.enumerate())
    try:
        register_installed_commands(app)
        app()
    except EngineError as error:
        _leave(_report(error), stuck=(*getattr(error, "stuck", ()), *_others(before)))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = exit_code_of(error)
        if code == EngineError.exit_code:
            traceback.print_exc()
        else:
            sys.stderr.write(f"{type(error).__name__}: {words(error)}\n")
        _leave(code, stuck=_others(before))


def _leave(code: int, stuck: Sequence[str]) -> NoReturn:
    """Exit; past lanes that sit in a kernel or a compiler, whose threads no exit would get by."""
    if stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _others(before: Collection[threading.Thread]) -> list[str]:
    """Names of the command's threads still at work, in a compiler or a disk's call; no exit gets by them."""
    return [thread.name for thread in threading.enumerate() if thread not in before]


def _report(error: EngineError) -> int:
    if error.exit_code == EngineError.exit_code:
        traceback.print_exc()
    sys.stderr.write(f"{type(error).__name__}: {words(error)}\n")
    return error.exit_code
