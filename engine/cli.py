"""Commands. Each imports what it needs when it runs, so that `--help` is quick."""

import os
import sys
import threading
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from engine.bench_cli import bench_app
from engine.data_cli import data_app
from engine.errors import EngineError, ScheduleError, exit_code_of, words
from engine.served_cli import served_app

app = typer.Typer(
    help="Trains DFlash speculative-decoding drafters against a frozen target.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app)
app.add_typer(served_app)
app.add_typer(bench_app, name="bench")

ScheduleFile = Annotated[Path, typer.Argument(metavar="SCHEDULE", help="a TOML file, see schedules/")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="any field, such as train.lr=3e-4")
]


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
