"""The commands about trained drafters: `evaluate`, `generate` and `export`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from engine.command_choices import one_of

served_app = typer.Typer()

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="a checkpoint, or a run's folder: its latest")
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="the target, where the checkpoint's schedule does not find it")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="run model code that stands in the folder of --target")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda:<n>; a GPU if there is one")]


@served_app.command("evaluate")
def evaluate_command(
    checkpoint: Checkpoint,
    prompts: Annotated[int, typer.Option(min=1, help="held-out documents, at most")] = 200,
    data: Annotated[str | None, typer.Option(help="instead of the schedule's held-out documents")] = None,
    target: TargetOption = None,
    trust_remote_code: TrustOption = False,
    device: DeviceOption = None,
    walk: Annotated[bool, typer.Option("--walk/--no-walk", help="score and walk the answers")] = True,
    decoding: Annotated[
        bool, typer.Option("--decoding/--no-decoding", help="decode, with the drafter and without")
    ] = True,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="of the sampling")] = 0,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="prompts decoded together; else 32, on a GPU as many as have room"),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="draw a chart")] = None,
    json: Annotated[Path | None, typer.Option(help="write the figures")] = None,
) -> None:
    """Measure accepted length, and speed beside the target alone; exit code 7 where output differs."""
    from rich.console import Console

    from engine.evaluate import check_output, evaluate_checkpoint
    from engine.evaluation_report import check_places, print_report, write_files

    check_places(json, png)
    notes = Console(stderr=True)
    report = evaluate_checkpoint(
        checkpoint,
        prompts=prompts,
        data=data,
        target=target,
        trust_remote_code=trust_remote_code,
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
    write_files(report, json, png)
    check_output(report)


@served_app.command("generate")
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
    trust_remote_code: TrustOption = False,
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
        trust_remote_code=trust_remote_code,
        device=device,
        output=Console(),
        notes=Console(stderr=True),
    )


@served_app.command("export")
def export_command(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where to; made")],
    format_: Annotated[
        Literal["dflash", "speculators"],
        typer.Option(
            "--format",
            help="as SGLang and vLLM read it, or as the speculators library does",
            **one_of("dflash", "speculators"),
        ),
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
