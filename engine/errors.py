"""Failures by cause. Each class carries the exit code that `python -m engine` ends with.

A message says what was asked, what was found and what to do; it is read at night by somebody
whose rented GPUs are idle.
"""

import sys


class EngineError(Exception):
    """Something inside the engine went wrong (exit code 1)."""

    exit_code = 1


class InputError(EngineError):
    """The user's input cannot be used: schedule, data, checkpoint or command line (exit code 2)."""

    exit_code = 2


class ScheduleError(InputError):
    """A schedule says something that cannot be, or that this engine does not know."""


class DataError(InputError):
    """Documents are missing, empty, corrupt or do not fit the target."""


class TargetError(InputError):
    """A target's folder or configuration cannot be used."""


class CheckpointError(InputError):
    """A checkpoint or an exported drafter is torn, foreign or unlike what was asked for."""


class OutOfMemory(EngineError):
    """A device ran out of memory (exit code 3)."""

    exit_code = 3


class NonFinite(EngineError):
    """A loss, gradient or hidden state is not finite (exit code 4)."""

    exit_code = 4


class Stalled(EngineError):
    """No progress for longer than the stage usually takes (exit code 5)."""

    exit_code = 5


class DiskError(EngineError):
    """Writing or reading files failed: disk full, no permission, I/O error (exit code 6)."""

    exit_code = 6


class DifferenceFound(EngineError):
    """A check ran to its end and found a difference (exit code 7)."""

    exit_code = 7


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, whichever library says so."""
    if isinstance(error, OutOfMemory):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, MemoryError) or "out of memory" in words(error).lower()


def words(error: BaseException) -> str:
    """`str(error)`, which for a stranger's exception may itself fail."""
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be read: {type(second).__name__})"


def exit_code_of(error: BaseException) -> int:
    """What `python -m engine` ends with after a failure whose cause is `error`."""
    if isinstance(error, EngineError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):  # a signal's own says which signal it was
        return int(getattr(error, "exit_code", 130))
    if is_out_of_memory(error):
        return OutOfMemory.exit_code
    return DiskError.exit_code if isinstance(error, OSError) else EngineError.exit_code
