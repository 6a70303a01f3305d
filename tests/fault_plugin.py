"""A plugin that makes one thing go wrong at one step, loaded by its path: `use = "…/fault_plugin.py"`.

It wraps what the engine calls anyway, so that a fault happens where a real one would.
"""

import errno
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from engine.data.documents import Documents, open_documents
from engine.hookspecs import hookimpl

KEEPS_NUMBERS = True
"""It stands for a fault of the machine, which is no part of a run's recipe."""


@attrs.frozen(kw_only=True)
class Options:
    fault: str
    """exception, hang, slow, nan-taps, nan-gradient, disk-full, slow-report or unreadable."""
    at: int = 6
    """The micro-batch; the step, where the fault is in what is told of steps; the document read."""
    times: int = 1
    """From there on."""
    seconds: float = 60.0
    """Of a hang or a slow stage."""


def make(options: Options) -> Any:
    return {
        "nan-gradient": BadGradient,
        "disk-full": InReport,
        "slow-report": InReport,
        "unreadable": Unreadable,
    }.get(options.fault, InTarget)(options)


class Fault:
    def __init__(self, options: Options) -> None:
        self.options = options

    def due(self, number: int) -> bool:
        return self.options.at <= number < self.options.at + self.options.times


class InTarget(Fault):
    """In a target's forward: its lane counts the micro-batches of the one target by itself."""

    @hookimpl
    def wrap_target(self, target: Any) -> Any:
        return WrappedTarget(target, self)


class WrappedTarget:
    def __init__(self, target: Any, fault: Fault) -> None:
        # A start looks at the first micro-batch's taps once, before the run counts.
        self._target, self._fault, self._calls = target, fault, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward_taps(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        taps: list[torch.Tensor] = self._target.forward_taps(input_ids)
        number, options = self._calls, self._fault.options
        self._calls += 1
        if not self._fault.due(number):
            return taps
        if options.fault == "exception":
            raise ValueError("planted")
        if options.fault in ("hang", "slow"):
            time.sleep(options.seconds)
        if options.fault == "nan-taps":
            taps[1] = taps[1].clone()
            taps[1][0, 0, 0] = float("nan")
        return taps


class BadGradient(Fault):
    """In a drafter's backward."""

    @hookimpl
    def wrap_drafter(self, drafter: Any) -> Any:
        calls = iter(range(1 << 30))

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan") if self.due(next(calls)) else gradient

        drafter.layers[1].mlp.up_proj.weight.register_hook(spoil)
        return drafter


class InReport(Fault):
    """In what is written or told at a step, in the main thread."""

    @hookimpl
    def step_finished(self, step: int) -> None:
        if not self.due(step):
            return
        if self.options.fault == "slow-report":
            time.sleep(self.options.seconds)
        else:
            # No file may grow beyond this from here on, which the next checkpoint's must.
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))


class Unreadable(Fault):
    """Documents whose file fails half-way."""

    @hookimpl
    def open_data_source(self, path: str, vocab_size: int, mask_token_id: int) -> Documents:
        documents = open_documents(path, vocab_size=vocab_size, mask_token_id=mask_token_id)
        reads = iter(range(1 << 30))
        documents._parts[:] = [FailingPart(part, reads, self) for part in documents._parts]  # type: ignore
        return documents


class FailingPart:
    def __init__(self, part: Any, reads: Iterator[int], fault: Fault) -> None:
        self._part, self._reads, self._fault = part, reads, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def row(self, index: int) -> Any:
        if self._fault.due(next(self._reads)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self._part.path))
        return self._part.row(index)
