"""Kernels: whether FLA imports, what each operation of the target would run as, whether launches race.

transformers binds FLA while it imports a model file and takes PyTorch's functions, without a word, if
that import raises anything. So the import is done here the way transformers does it, and what it
raises is shown. It happens in a process of its own: a machine without a GPU needs a stub of Triton's
driver for it, an import that is broken may end a process, and it takes seconds in which the other
checks go on.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs

from engine.builtin import TINY_HYBRID, resolve
from engine.doctor_findings import Finding, told

FLA_MODULES = ("fla", "fla.ops.gated_delta_rule")
"""What transformers imports to bind a Gated DeltaNet's operations."""

CONVOLUTION = "causal_conv1d"

IMPORT_TIMEOUT_S = 120.0

MARK = "doctor-imports:"


@attrs.frozen
class Imported:
    """What became of importing one package."""

    package: str
    error: str | None = None
    """The exception's class and words, with the place that raised it; None where the import worked."""


def report_imports() -> None:
    """Import FLA and causal_conv1d and print what became of it; the whole work of the process."""
    import torch

    stub: AbstractContextManager[Any] = nullcontext()
    if not torch.cuda.is_available():
        from engine.runtime.stub_driver import stub_driver

        stub = stub_driver()
    with stub:
        found = {"fla": _import_error(*FLA_MODULES), CONVOLUTION: _import_error(CONVOLUTION)}
    print(MARK + json.dumps(found), flush=True)


def _import_error(*modules: str) -> str | None:
    try:
        for module in modules:
            importlib.import_module(module)
    except BaseException as error:  # transformers swallows most; here all of them are wanted
        frames = traceback.extract_tb(error.__traceback__)
        place = f" (raised in {_short(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        return told(error) + place
    return None


def _short(file: str) -> str:
    """A module's file from its package on."""
    return file.rpartition("site-packages" + os.sep)[2]


@contextmanager
def imports_started() -> Iterator["subprocess.Popen[str]"]:
    """Start the process that imports; ended at the latest where the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from engine.doctor_kernels import report_imports; report_imports()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def imports_of(process: "subprocess.Popen[str]", timeout: float = IMPORT_TIMEOUT_S) -> list[Imported]:
    """Wait for the process; one that crashed or hung is told as FLA's import error."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return [Imported("fla", f"the import did not end within {timeout:g} s")]
    line = next((line for line in out.splitlines() if line.startswith(MARK)), None)
    if line is None:
        last = err.strip().splitlines()[-1:] or ["without a word"]
        return [Imported("fla", f"the importing process ended with code {process.returncode}: {last[0]}")]
    return [Imported(package, error) for package, error in json.loads(line.removeprefix(MARK)).items()]


def import_findings(
    imported: Mapping[str, Imported], versions: Mapping[str, str | None], *, gpus: bool
) -> Iterator[Finding]:
    """Whether the packages of GPU kernels import, by what their import raised.

    Args:
        imported: by package, as `imports_of` returns them.
        versions: by distribution; None where one is not installed.
        gpus: whether there is a GPU.
    """
    fla, triton = versions.get("fla-core"), versions.get("triton")
    error = imported["fla"].error if "fla" in imported else None
    if fla is None and error is not None and error.startswith("ModuleNotFoundError: No module named 'fla'"):
        pass  # the versions' part says that it is not there and what that costs
    elif error is None:
        where = "" if gpus else ", over a stub of its driver, since there is no GPU"
        yield Finding("fla import", "ok", f"FLA {fla} imports against Triton {triton or 'none'}{where}")
    else:
        yield Finding(
            "fla import",
            "fail",
            f"FLA {fla} does not import against Triton {triton or '(not installed)'}: {error}; transformers "
            "would swallow this and run Gated DeltaNet as PyTorch's functions, many times slower",
            'install a pair that works: pip install -U "flash-linear-attention[cuda]>=0.6", '
            "then the Triton that torch names above",
        )
    if versions.get("causal-conv1d") is not None and (broken := imported.get(CONVOLUTION)) and broken.error:
        yield Finding(
            "causal_conv1d import",
            "fail" if gpus else "warn",
            f"{broken.error}; transformers would swallow this and take PyTorch's convolution",
            "build it against this torch: pip install --no-build-isolation --force-reinstall causal-conv1d, "
            "or uninstall it",
        )


def target_kernels(folder: Path | None, *, trust_remote_code: bool = False) -> dict[str, str]:
    """What each operation of a target is bound to, as `bound_kernels` names it.

    The model is built without memory, so the largest targets take no longer than small ones.

    Args:
        folder: the target's; None is the built-in one.
    """
    import torch

    from engine.target.loading import load_target, read_target_config

    folder = folder or resolve(TINY_HYBRID)
    layers = read_target_config(folder).layers
    target = load_target(
        folder,
        target_layer_ids=(max(0, layers - 2),),
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        init="random",
        trust_remote_code=trust_remote_code,
    )
    return target.kernels()


def kernel_findings(kernels: Mapping[str, str], *, on_gpu: bool) -> Iterator[Finding]:
    """One line per operation of the target.

    Args:
        kernels: of a model without memory. on_gpu: whether the target's lanes run on GPUs.
    """
    from engine.target.kernels import CPU_PATH, CUDA_ONLY_PACKAGES, SLOW_PATH

    for operation, implementation in kernels.items():
        subject = f"kernel {operation}"
        if not on_gpu:
            # Targets on a CPU are routed to PyTorch's functions whatever was bound.
            bound = implementation == SLOW_PATH or implementation.startswith(CUDA_ONLY_PACKAGES)
            yield Finding(subject, "ok", CPU_PATH if bound else implementation)
        elif implementation != SLOW_PATH:
            yield Finding(subject, "ok", implementation)
        elif operation.startswith(CONVOLUTION):
            yield Finding(
                subject, "warn", implementation, "pip install --no-build-isolation causal-conv1d, or go on"
            )
        else:
            yield Finding(
                subject,
                "fail",
                implementation,
                'pip install "flash-linear-attention[cuda]>=0.6"; where it is installed, see `fla import`',
            )


def race_findings(mode: str, *, triton: str | None) -> Iterator[Finding]:
    """Whether two threads that launch one autotuned kernel corrupt each other, without and with the
    serializer that a run installs.

    Args:
        mode: the schedule's `serialize.launches`.
        triton: its version; None where it is not installed.
    """
    if triton is None:
        yield Finding("launch race", "ok", "no Triton, so nothing is autotuned")
        return
    from engine.runtime.race_probe import probe
    from engine.runtime.serializer import Serializer

    before = probe()
    serializer = Serializer(mode)
    serializer.install()
    try:
        after, effective = probe(), serializer.effective()
    finally:
        serializer.uninstall()
    yield from judge_race(mode, before, after, effective=effective, triton=triton)


def judge_race(
    mode: str, before: BaseException | None, after: BaseException | None, *, effective: bool, triton: str
) -> Iterator[Finding]:
    """The findings of `race_findings` from what was seen: an exception where the race was met."""
    if before is None:
        yield Finding("launch race", "ok", f"two threads can launch side by side in Triton {triton} as it is")
    else:
        yield Finding(
            "launch race", "ok", f"race exists in this Triton ({triton}): {told(before)}; kept apart by a run"
        )
    subject = f"serializer, {mode}"
    if mode == "none" and before is None:
        yield Finding(subject, "ok", "keeps nothing apart, and nothing has to be")
    elif mode == "none":
        yield Finding(
            subject,
            "warn",
            'serialize.launches = "none" keeps nothing apart; runs on GPUs can fail or compute wrong numbers',
            'set serialize.launches = "tune"; "none" is for debugging',
        )
    elif after is not None or not effective:
        seen = told(after) if after is not None else "the serializer says that it is not in effect"
        yield Finding(
            subject,
            "fail",
            f"installed, and launches still race: {seen}",
            'set serialize.launches = "launch", or install a Triton of 3.6 to 3.9; see docs/launches.md',
        )
    else:
        yield Finding(subject, "ok", "installed, the race is gone")
