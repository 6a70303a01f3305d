"""`doctor`: what is wrong with this machine, before a run finds out.

Most of what ruins a run on a rented machine is not in the run: a Triton that torch was not built
against, an FLA that no longer imports and is replaced by something slow in silence, GPUs of two kinds,
a cache folder of root's, a disk for three checkpoints. Each is one line here, `ok`, `warn` or `fail`,
with what cures it. Nothing is changed, no weights are read, and no check can keep another from
running. With a schedule, the checks know the run: its target, devices, checkpoints and memory.

The checks stand in `doctor_versions.py` (what pairs with what), `doctor_kernels.py` (FLA's import,
operations, launches), `doctor_devices.py` and `doctor_links.py` (GPUs) and `doctor_machine.py`
(caches, compilers, processors, disk); here they are put in order and printed.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine import doctor_devices, doctor_kernels, doctor_links, doctor_machine, doctor_versions
from engine.disk_space import checkpoints, free_disk
from engine.doctor_findings import Finding, examined, gigabytes, told
from engine.errors import DifferenceFound, InputError, OutOfMemory

if TYPE_CHECKING:
    from engine.planning import RunPlan
    from engine.runtime.graph import LaneSpec

Check = Callable[[], Iterable[Finding]]

REPORT = (
    *("python", "versions", "pairs", "driver", "gpus", "architectures", "links", "copies"),
    *("fla import", "kernels", "launch race", "caches", "tuning results"),
    *("compilers", "processor cores", "main memory", "disk", "schedule"),
)
"""The checks in the order in which they are told; they are done in another."""

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    schedule: Path | None,
    overrides: Sequence[str] = (),
    *,
    as_json: bool = False,
    console: Console | None = None,
) -> tuple[Finding, ...]:
    """Examine this machine and print what was found.

    Args:
        schedule: a schedule to examine it for; overrides: of its keys, as for a run.
        as_json: write JSON to standard output instead of a table.
        console: where the table goes; standard output by default.

    Returns:
        All findings, none of which is a `fail`.

    Raises:
        InputError: overrides without a schedule.
        DifferenceFound: something failed; everything was printed before.
    """
    if schedule is None and overrides:
        raise InputError("--set changes a schedule's keys; give the schedule too")
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    findings = examine(schedule, overrides)
    failed = [finding.subject for finding in findings if finding.state == "fail"]
    if as_json:
        sys.stdout.write(to_json(findings) + "\n")
    else:
        print_findings(findings, console)
    if failed:
        raise DifferenceFound(
            f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}; each says what cures it"
        )
    return tuple(findings)


def examine(schedule: Path | None, overrides: Sequence[str] = ()) -> list[Finding]:
    """All findings about this machine, in the order of the report."""
    installed = doctor_versions.read_installed()
    broken = examined("imports", _broken_imports)
    if broken:
        # Everything else needs these two; what pairs with what is told from metadata alone.
        driver = doctor_devices.read_driver() is not None
        facts: dict[str, Check] = {
            "python": lambda: doctor_versions.python_findings(installed, **doctor_versions.gil_facts()),
            "versions": lambda: doctor_versions.version_findings(installed),
            "pairs": lambda: doctor_versions.pair_findings(installed, gpus=driver),
        }
        return [*(each for name, check in facts.items() for each in examined(name, check)), *broken]

    import torch

    gpus: list[doctor_devices.Gpu] = []
    found = {"driver": examined("driver", lambda: _driver(torch.version.cuda, gpus))}
    on_gpus = bool(gpus)
    planned = _Planned(schedule, overrides)
    found["schedule"] = examined("schedule", planned.findings)
    plan = planned.plan
    # Only now: its context on a GPU would be taken for somebody else's memory.
    with doctor_kernels.imports_started() as importing:
        checks: dict[str, Check] = {
            "python": lambda: doctor_versions.python_findings(installed, **doctor_versions.gil_facts()),
            "versions": lambda: doctor_versions.version_findings(installed, torch.version.cuda),
            "pairs": lambda: doctor_versions.pair_findings(installed, gpus=on_gpus),
            "gpus": lambda: doctor_devices.gpu_findings(gpus, [lane.device for lane in _lanes(plan)]),
            "architectures": lambda: _architectures(gpus),
            "links": lambda: doctor_links.link_findings(gpus, doctor_links.read_topology()),
            "copies": lambda: doctor_links.probe_peers(gpus),
            "kernels": lambda: _kernels(plan, on_gpus),
            "launch race": lambda: _race(plan, installed),
            "caches": lambda: _caches(on_gpus),
            "tuning results": doctor_machine.tuning_findings,
            "compilers": lambda: doctor_machine.compiler_findings(gpus=on_gpus),
            "processor cores": lambda: _processors(plan),
            "main memory": lambda: _memory(plan),
            "disk": lambda: _disk(plan),
            # Waited for when all else is done.
            "fla import": lambda: _imports(importing, installed, on_gpus),
        }
        for name, check in checks.items():
            found[name] = examined(name, check)
    return [finding for name in REPORT for finding in found[name]]


def _broken_imports() -> Iterator[Finding]:
    for package in ("torch", "transformers"):
        try:
            module = importlib.import_module(package)
        except Exception as error:
            cure = f"pip install --force-reinstall {package}, with what it needs as told above"
            yield Finding(f"{package} import", "fail", told(error), cure)
            return
    # What it would say about missing packages is said here, once and in words.
    module.logging.set_verbosity_error()


def _driver(cuda: str | None, gpus: list[doctor_devices.Gpu]) -> Iterator[Finding]:
    """The driver's findings; fills in the GPUs."""
    driver = doctor_devices.read_driver()
    yield from doctor_devices.driver_findings(driver, cuda, doctor_devices.cuda_error())
    gpus.extend(doctor_devices.read_gpus())


@attrs.define
class _Planned:
    """A schedule's plan, if it plans."""

    path: Path | None
    overrides: Sequence[str]
    plan: "RunPlan | None" = None

    def findings(self) -> Iterator[Finding]:
        """That it plans, and that its memory fits."""
        if self.path is None:
            return
        from engine.memory_free import check_fits, free_memory
        from engine.planning import plan_run
        from engine.schedule import load_schedule

        try:
            self.plan = plan = plan_run(load_schedule(self.path, self.overrides))
        except InputError as error:
            cure = "change the schedule as it says; `python -m engine check` says it again, sooner"
            yield Finding("schedule", "fail", f"{type(error).__name__}: {error}", cure)
            return
        lanes = ", ".join(lane.name for lane in plan.graph.lanes)
        yield Finding("schedule", "ok", f"plans: {plan.total_steps} steps on {lanes}")
        free = free_memory(plan.memory.devices)
        try:
            check_fits(plan.memory, free)
        except (InputError, OutOfMemory) as error:
            problem, _, cures = str(error).partition("\n")
            yield Finding("device memory", "fail", problem, cures.strip() or "lower data.token_budget")
            return
        shown = [
            f"{device}: {gigabytes(plan.memory.total(device) + plan.memory.outside[device])} needed, "
            f"{gigabytes(free[device]) if device in free else 'unknown'} free"
            for device in plan.memory.devices
        ]
        yield Finding("device memory", "ok", "; ".join(shown))


def _lanes(plan: "RunPlan | None") -> "Sequence[LaneSpec]":
    return plan.graph.lanes if plan else ()


def _architectures(gpus: Sequence[doctor_devices.Gpu]) -> Iterable[Finding]:
    import torch

    if not gpus:
        return ()
    known = doctor_devices.read_triton_architectures()
    return doctor_devices.architecture_findings(gpus, torch.cuda.get_arch_list(), known)


def _kernels(plan: "RunPlan | None", gpus: bool) -> Iterator[Finding]:
    on_gpu = gpus if plan is None else any(lane.device != "cpu" for lane in plan.graph.target_lanes)
    folder = None if plan is None else plan.target_folder
    trusted = plan is not None and plan.schedule.target.trust_remote_code
    kernels = doctor_kernels.target_kernels(folder, trust_remote_code=trusted)
    return doctor_kernels.kernel_findings(kernels, on_gpu=on_gpu)


def _imports(
    importing: "subprocess.Popen[str]", installed: doctor_versions.Installed, gpus: bool
) -> Iterator[Finding]:
    imported = {each.package: each for each in doctor_kernels.imports_of(importing)}
    return doctor_kernels.import_findings(imported, installed.versions, gpus=gpus)


def _race(plan: "RunPlan | None", installed: doctor_versions.Installed) -> Iterator[Finding]:
    mode = plan.schedule.serialize.launches if plan else "tune"
    return doctor_kernels.race_findings(mode, triton=installed.version("triton"))


def _caches(gpus: bool) -> Iterator[Finding]:
    for name, path in doctor_machine.cache_folders().items():
        needed = gpus and name != "engine"
        yield from doctor_machine.cache_findings(name, doctor_machine.look_through(path), needed=needed)


def _processors(plan: "RunPlan | None") -> Iterator[Finding]:
    threads = plan.schedule.run.cpu_threads if plan else 1
    lanes = [lane.device for lane in _lanes(plan)]
    return doctor_machine.processor_findings(doctor_machine.usable_cores(), lanes, threads)


def _memory(plan: "RunPlan | None") -> Iterator[Finding]:
    from engine.memory_free import free_memory

    available = doctor_machine.available_memory(free_memory(["cpu"]).get("cpu"))
    return doctor_machine.memory_findings(available, checkpoints(plan)[0] if plan else None)


def _disk(plan: "RunPlan | None") -> Iterator[Finding]:
    folder = Path(plan.schedule.run.output_dir if plan else ".").absolute()
    size, count = checkpoints(plan) if plan else (None, 0)
    return doctor_machine.disk_findings(folder, free_disk(folder), size, count)


def to_json(findings: Sequence[Finding]) -> str:
    """The report for programs."""
    counts: dict[str, Any] = {state: sum(each.state == state for each in findings) for state in STYLES}
    report = counts | {"findings": [attrs.asdict(finding) for finding in findings]}
    return orjson.dumps(report, option=orjson.OPT_INDENT_2).decode()


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """The report for people: a line a finding, its cure below it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=40)
    table.add_column(overflow="fold")
    for finding in findings:
        told = Text(finding.found)
        if finding.cure:
            told.append(f"\n→ {finding.cure}", style="bold")
        table.add_row(Text(finding.state, style=STYLES[finding.state]), Text(finding.subject), told)
    console.print(table)
    counts = ", ".join(f"{sum(each.state == state for each in findings)} {state}" for state in STYLES)
    console.print(counts, highlight=False)
