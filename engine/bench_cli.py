"""The commands of `bench`; each imports what it needs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(
    help="Measures target, drafter, launches or whole runs against their floors and their plain variants.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Config = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="a target's configuration; builtin:qwen3.6-27b by default"),
]
ScheduleFile = Annotated[
    Path | None,
    typer.Option("--schedule", metavar="FILE", help="taps, drafter, data; qwen3_6_27b_1gpu by default"),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="any field of the schedule")
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="NAME", help="measured too, on top of the defaults; may be repeated"),
]
Layers = Annotated[int | None, typer.Option(min=3, help="the target's first layers alone")]
Length = Annotated[int, typer.Option(min=1, help="tokens of a row")]
Tokens = Annotated[int, typer.Option(min=1, help="tokens of a call, padding included")]
Repeats = Annotated[int, typer.Option(min=1, help="timed rounds")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all figures there")]


@bench_app.command("target")
def target_command(
    config: Config = None,
    schedule: ScheduleFile = None,
    set_: Overrides = None,
    tokens: Tokens = 8192,
    length: Length = 1024,
    layers: Layers = None,
    plugin: Plugins = None,
    repeats: Repeats = 6,
    json: JsonFile = None,
) -> None:
    """The target's forward: the Hugging Face module, the default plugins, and plugins that are named."""
    from engine.bench import opened
    from engine.bench_target import bench_target

    with opened("target", config=config, schedule=schedule, overrides=set_ or [], layers=layers) as bench:
        bench_target(bench, tokens=tokens, length=length, plugins=plugin or [], repeats=repeats, json=json)


@bench_app.command("drafter")
def drafter_command(
    config: Config = None,
    schedule: ScheduleFile = None,
    set_: Overrides = None,
    tokens: Annotated[int, typer.Option(min=1, help="slots of the context")] = 8192,
    length: Annotated[int, typer.Option(min=1, help="tokens of a document")] = 1024,
    plugin: Plugins = None,
    repeats: Repeats = 6,
    json: JsonFile = None,
) -> None:
    """The drafter's forward and backward: as it is built, and as the schedule's plugins compile it."""
    from engine.bench import opened
    from engine.bench_drafter import bench_drafter

    with opened("drafter", config=config, schedule=schedule, overrides=set_ or []) as bench:
        bench_drafter(bench, tokens=tokens, length=length, plugins=plugin or [], repeats=repeats, json=json)


@bench_app.command("launch")
def launch_command(
    config: Config = None,
    schedule: ScheduleFile = None,
    set_: Overrides = None,
    tokens: Annotated[int, typer.Option(min=1, help="of the forward whose launching is timed")] = 64,
    pair_tokens: Annotated[int, typer.Option(min=1, help="of the forwards of two threads")] = 256,
    layers: Layers = None,
    plugin: Plugins = None,
    repeats: Repeats = 10,
    json: JsonFile = None,
) -> None:
    """Python's time per target forward, and two threads on two GPUs beside one alone."""
    from engine.bench import opened
    from engine.bench_launch import bench_launch

    with opened("launch", config=config, schedule=schedule, overrides=set_ or [], layers=layers) as bench:
        bench_launch(
            bench, tokens=tokens, pair_tokens=pair_tokens, plugins=plugin or [], repeats=repeats, json=json
        )


@bench_app.command("run")
def run_command(
    config: Config = None,
    schedule: ScheduleFile = None,
    set_: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="measured, after three that are not")] = 10,
    gpus: Annotated[int | None, typer.Option(min=1, help="target and drafter on each of so many")] = None,
    documents: Annotated[int, typer.Option(min=1, help="how many")] = 400,
    length: Annotated[int | None, typer.Option(min=2, help="of all; random ones otherwise")] = None,
    layers: Layers = None,
    plugin: Plugins = None,
    json: JsonFile = None,
) -> None:
    """Steps of a run on lanes, optimizer included, and what share of them goes to what."""
    from engine.bench import opened
    from engine.bench_run import bench_run, document_lengths

    with opened("run", config=config, schedule=schedule, overrides=set_ or [], layers=layers) as bench:
        lengths = document_lengths(bench.schedule, documents, length)
        bench_run(bench, steps=steps, gpus=gpus, lengths=lengths, plugins=plugin or [], json=json)
