"""The commands about data, before a run: `prepare` and `inspect`."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from engine.command_choices import one_of
from engine.errors import InputError, ScheduleError

data_app = typer.Typer()

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="any field, such as train.lr=3e-4")
]


@data_app.command()
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
        typer.Option(
            help="supervise all answers, or the last one; or let the target write them",
            **one_of("all", "last", "target"),
        ),
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
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="prompts answered side by side; else 32, on a GPU as many as have room"),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="with --answers target: only answer the I-th of N parts of the rows; no documents are made, "
            "so --held-out and --show wait for the command without it",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="of the draws; 0")] = None,
    device: Annotated[str | None, typer.Option(help="of the target: cpu or cuda:<n>")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="of the target; bfloat16", **one_of("bfloat16", "float32")),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run model code that stands in the target's folder")
    ] = False,
) -> None:
    """Turn JSONL conversations into documents for training."""
    from engine.builtin import resolve
    from engine.data.asked_rows import Part
    from engine.data.preparation import answer_part
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
        "trust_remote_code": trust_remote_code or None,
    }

    def say(line: str) -> None:
        typer.echo(line, err=True)

    share = Part.parse(part) if part is not None else None
    with requested_writer(answers, target, settings, say, tokenizer=tokenizer, part=part) as writer:
        folder = tokenizer or target
        if folder is None:
            raise InputError("--tokenizer: needed, the folder of the target's tokenizer")
        if share is not None and writer is not None:
            answer_part(
                inputs,
                resolve(folder),
                output,
                share,
                max_length=max_length,
                held_out=held_out,
                max_bad=max_bad,
                template_options=template_options,
                answer_writer=writer,
                overwrite=overwrite,
            )
            return
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


@data_app.command("inspect")
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
