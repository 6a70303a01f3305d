"""`stress`: do kernels launched from several threads give what they give alone?

One thread per GPU, each on a lane as in training, launches FLA's operations (see `stress_calls`). A
round begins by forgetting tuned keys, so that they are cold again, and goes through its calls several
times with short random pauses: now two threads meet on one cold key, now one launches what it knows
while another tunes. When they have ended, one thread alone repeats every call with the configurations
that were tuned, and every output must have the same bits: on its own GPU, and on the first one. A
round that found something is the last.

Without a GPU the same runs over the stub driver, where no output is computed: there each thread must
have launched the same kernels, configurations and arguments as the one alone.
"""

import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import attrs
import orjson
from rich.console import Console
from rich.table import Table

from engine.devices import available_devices, gpu_kinds
from engine.errors import DifferenceFound, InputError, OutOfMemory
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.runtime.stub_driver import Launch, kernels, stub_driver
from engine.stress_calls import launch_difference, load_operations, not_finite, tensor_difference
from engine.stress_rounds import Call, Ground, Stress, StressStalled, Worker, run_round

STALL_S = 300.0  # a first call may compile a hundred configurations
STUB = "stub:"
PACKAGES = ("torch", "triton", "flash-linear-attention")


def stress(
    seconds: float,
    *,
    mode: str,
    devices: Sequence[str] | None = None,
    console: Console,
    as_json: bool = False,
    rounds: int | None = None,
    stall_after: float = STALL_S,
) -> dict[str, Any]:
    """Launch from several threads for some time, compare with one thread, and print what was found.

    Args:
        seconds: after which no round begins, and no thread begins a call.
        mode: the serializer's; "none" shows the failures that the others keep off.
        devices: one thread each, so a name may repeat: `cuda:<n>`, or all `stub:<n>`. None: all GPUs,
            two threads on a single one; without a GPU two devices of the stub driver.
        console: for a line per round and the tables.
        as_json: write the report as JSON to standard output instead.
        rounds: end after so many, if they come before the time does.
        stall_after: seconds without progress.

    Returns:
        The report, as in the JSON.

    Raises:
        InputError: a device that is not there, an unknown mode, no FLA, or nothing that can be cold.
        DifferenceFound: errors in threads or differing results.
        OutOfMemory: a thread had too little memory, even with nobody else tuning.
        StressStalled: no progress; every thread's stack is on standard error by then.
    """
    if seconds <= 0:
        raise InputError(f"--seconds {seconds:g}: a stress takes some time; give a number above 0")
    workers = open_workers(devices)
    with ExitStack() as stack:
        state = _enter(stack, workers, mode, stall_after)
        begin = time.monotonic()
        try:
            while not state.findings and state.rounds != rounds:
                if state.rounds and time.monotonic() >= begin + seconds:
                    break
                run_round(state, begin + seconds)
                if not as_json:
                    console.print(_line(state))
        except StressStalled:
            stack.pop_all()  # what is patched stays so: a thread that is stuck may hold any lock
            raise
        report = _report(state, time.monotonic() - begin)
    if as_json:
        sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n")
        sys.stdout.flush()
    else:
        _print(report, console)
    _judge(state)
    return report


def open_workers(devices: Sequence[str] | None) -> list[Worker]:
    """A worker with its lane for each name.

    Raises:
        InputError: names that are not there, or do not go together.
    """
    gpus = available_devices()[1:]
    if devices is None:
        devices = (gpus if len(gpus) > 1 else gpus * 2) or [f"{STUB}0", f"{STUB}1"]
    stubs = [name for name in devices if name.startswith(STUB) and name.removeprefix(STUB).isdecimal()]
    if not devices or (len(stubs) != len(devices) and not set(devices) <= set(gpus)):
        raise InputError(
            f"--devices {','.join(devices)}: expected GPUs of this machine ({', '.join(gpus) or 'none'}) or "
            "devices of the stub driver, such as stub:0,stub:1, and not both"
        )
    kinds = {} if stubs else gpu_kinds(sorted(set(devices)))
    if len(set(kinds.values())) > 1:
        shown = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise InputError(f"GPUs of more than one kind: {shown}; stress each kind by itself with --devices")
    lanes = [Lane(LaneSpec("target", index, "cpu" if stubs else name)) for index, name in enumerate(devices)]
    return [
        Worker(f"target.{index}@{name}", name, lane)
        for index, (name, lane) in enumerate(zip(devices, lanes, strict=True))
    ]


def _enter(stack: ExitStack, workers: list[Worker], mode: str, stall_after: float) -> Stress:
    """Driver, FLA, serializer, and tuning that is not read from disk; `stack` takes all of it back."""
    if (source := os.environ.get("FLA_CACHE_MODE", "disabled")) != "disabled":
        raise InputError(
            f"FLA_CACHE_MODE={source}: FLA would take configurations from files, and no key would be cold; "
            "unset it for a stress"
        )
    serializer = Serializer(mode)
    ground = _stub_ground(stack) if workers[0].device.startswith(STUB) else _gpu_ground()
    serializer.install()
    stack.callback(serializer.uninstall)
    tuners = [tuner for tuner in kernels()[1] if tuner.base_fn.__module__.startswith("fla.")]
    stack.enter_context(_tuned_in_memory(tuners))
    state = Stress(
        serializer=serializer,
        workers=workers,
        alone=Worker("alone", workers[0].device, workers[0].lane),
        ground=ground,
        tuners=tuners,
        stall_after=stall_after,
    )
    serializer.on_cold = state.tuned
    return state


def _gpu_ground() -> Ground:
    operations = load_operations()
    return Ground(
        operations=list(operations),
        run=lambda worker, call: operations[call.operation](call.form, worker.lane.device),
        difference=tensor_difference,
        suspicion=not_finite,
    )


def _stub_ground(stack: ExitStack) -> Ground:
    by_thread: dict[int, list[Launch]] = defaultdict(list)

    def on_launch(launch: Launch) -> None:
        if not launch.benchmark:
            by_thread[launch.thread].append(launch)

    # Benchmarks scatter as real ones do: a key that is tuned twice may get two configurations.
    driver = stack.enter_context(stub_driver(on_launch=on_launch, bench_ms=lambda: random.uniform(1.0, 1.1)))
    operations = load_operations()

    def run(worker: Worker, call: Call) -> list[Launch]:
        driver.device = int(worker.device.removeprefix(STUB))
        launches = by_thread[threading.get_ident()] = []
        operations[call.operation](call.form, worker.lane.device)
        return launches

    def suspicion(launches: Sequence[Launch]) -> str | None:
        for launch in launches:
            if launch.loaded_on != launch.device:
                return f"{launch.kernel} of device {launch.loaded_on} was launched on {launch.device}"
        return None if launches else "nothing was launched"

    return Ground(
        operations=list(operations),
        run=run,
        difference=launch_difference,
        suspicion=suspicion,
    )


@contextmanager
def _tuned_in_memory(tuners: Sequence[Any]) -> Iterator[None]:
    """Tuning results are neither read from disk, which would be no tuning, nor written to it."""
    before = [(tuner, tuner.cache_results) for tuner in tuners]
    try:
        for tuner in tuners:
            tuner.cache_results = False
        yield
    finally:
        for tuner, value in before:
            tuner.cache_results = value


def _line(state: Stress) -> str:
    calls = sum(worker.calls for worker in state.workers)
    return (
        f"round {state.rounds}: so far {calls} calls in {len(state.workers)} threads, "
        f"{state.keys} cold keys, {state.compared} results compared, "
        f"{state.errors} errors, {state.differences} differences"
    )


def _report(state: Stress, seconds: float) -> dict[str, Any]:
    stub = state.workers[0].device.startswith(STUB)
    serializer = state.serializer
    return {
        "mode": serializer.mode,
        "passed": not state.findings,
        "seconds": round(seconds, 3),
        "kernels": "over the stub driver: launches are compared, outputs are not" if stub else "on GPUs",
        "devices": {} if stub else gpu_kinds(sorted({worker.device for worker in state.workers})),
        "versions": {package: version(package) for package in PACKAGES},
        "fallback": serializer.fallback,
        "rounds": state.rounds,
        "distinct_calls": len(state.distinct),
        "packed_calls": sum(call.form.boundaries is not None for call in state.distinct),
        "compared": state.compared,
        "cold_keys": state.keys,
        "errors": state.errors,
        "differences": state.differences,
        "findings": state.findings,
        "threads": [
            {
                "thread": worker.name,
                "calls": worker.calls,
                "errors": worker.errors,
                # Mode "none" installs nothing that could count.
                **({} if serializer.mode == "none" else attrs.asdict(serializer.counts(worker.name))),
                "first_error": worker.first_error,
            }
            for worker in (*state.workers, state.alone)
        ],
    }


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"mode {report['mode']}, {report['seconds']:.0f} s, {report['kernels']}")
    rows = report["threads"]
    always = ("thread", "calls", "errors", "launches", "cold_keys")
    names = [name for name in rows[0] if name in always or any(row[name] for row in rows)]
    names = [name for name in names if name != "first_error"]
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "thread" else "right")
    for row in report["threads"]:
        table.add_row(*(f"{row[name]:.2f}" if name.endswith("_s") else str(row[name]) for name in names))
    console.print(table)
    console.print(
        f"{report['compared']} results of {report['distinct_calls']} distinct calls, "
        f"{report['packed_calls']} of them packed, held against the same call alone"
    )
    if report["fallback"]:
        console.print(report["fallback"], markup=False)
    for finding in report["findings"]:
        console.print(finding, markup=False)
    for row in report["threads"]:
        if row["first_error"]:
            console.print(f"first error of {row['thread']}:", markup=False)
            console.print(row["first_error"], markup=False, highlight=False, soft_wrap=True)


def _judge(state: Stress) -> None:
    mode = state.serializer.mode
    if state.out_of_memory is not None:
        raise OutOfMemory(
            f"{state.out_of_memory}\nA stress needs about 4 GB per thread: free the device, or name another "
            "one with --devices"
        )
    if state.findings:
        cure = (
            "mode 'none' keeps nothing apart, so this is what the other modes are for"
            if mode == "none"
            else "do not train with this mode here: try --mode stage, and see `python -m engine doctor`"
        )
        raise DifferenceFound(
            f"stress in mode {mode!r}, round {state.rounds}: {state.errors} errors and {state.differences} "
            f"differences, first: {state.findings[0]}\n{cure}"
        )
    if not state.keys or not state.compared:
        raise DifferenceFound(
            f"stress in mode {mode!r} tried nothing: {state.keys} cold keys, "
            f"{state.compared} results compared; give it more --seconds"
        )
