"""How a run fails: at which place, on which lane, of what, with whom left behind.

A failure carries what is needed at night: stage, lane, micro-batch and step, the exit code of its cause,
lanes that no stop reached, and, where memory ran out, who held it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from engine.errors import EngineError, exit_code_of, is_out_of_memory, words
from engine.runtime.memory_held import held_memory

GRACE_S = 3.0  # what lanes get to stop in after a failure; the run must end within 5 s of it


@attrs.frozen(kw_only=True)
class Place:
    """What a lane is at."""

    stage: str
    micro_batch: int | None = None
    step: int | None = None
    """Counted from 1, as in metrics.jsonl."""

    def __str__(self) -> str:
        batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.stage}{batch}" + ("" if self.step is None else f", step {self.step}")


class StageFailure(EngineError):
    """A stage failed; `__cause__` is its own exception, which the exit code is taken from."""

    def __init__(
        self,
        place: Place,
        lane: str,
        error: BaseException,
        stuck: Mapping[str, Place],
        held: Sequence[str] = (),
    ) -> None:
        """
        Args:
            stuck: lanes that did not stop in time, and what they are at.
            held: lines about who held memory, where it ran out.
        """
        message = f"{place} on {lane}: {type(error).__name__}: {words(error)}"
        if held:
            message += "\nwho held memory then:" + "".join(f"\n  {line}" for line in held)
        if stuck:
            left = "; ".join(f"{name} at {where}" for name, where in stuck.items())
            message += f"\nstill busy after {GRACE_S:g} s and left behind: {left}"
        super().__init__(message)
        self.stage = place.stage
        self.lane = lane
        self.micro_batch = place.micro_batch
        self.step = place.step
        """Counted from 1, as in metrics.jsonl."""
        self.stuck = tuple(stuck)
        """Names of lanes whose threads did not end."""
        self.exit_code = exit_code_of(error)

    def advise(self, lines: Sequence[str]) -> None:
        """Append what would help to the message."""
        self.add("what lowers the need:" + "".join(f"\n  - {line}" for line in lines))

    def add(self, line: str) -> None:
        """Append a line to the message."""
        self.args = (f"{self.args[0]}\n{line}",)


@attrs.frozen
class Failure:
    """The first thing that went wrong in a run, on its way to the main thread."""

    lane: str
    place: Place
    error: BaseException
    held: Sequence[str] = ()
    """Who held memory when it ran out."""


def held_at(error: BaseException, lanes: Sequence[Any]) -> Sequence[str]:
    """Who holds memory where `error` says that it ran out; a reading that fails hides nothing of it.

    Call it where `error` is caught: it holds the frames of the failed call, and they their tensors.
    """
    try:
        return held_memory(lanes) if is_out_of_memory(error) else ()
    except Exception as other:
        return [f"not known, for reading it failed: {type(other).__name__}: {words(other)}"]
