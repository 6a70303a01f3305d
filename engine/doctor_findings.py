"""What a check of `doctor` comes to, and how a check that breaks is told from one that fails.

A check is a function that yields findings. It looks at a machine which may be broken in any way, so
whatever it raises becomes a finding of its own: one bad answer of a driver must not hide the rest.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import attrs

from engine.errors import EngineError

State = Literal["ok", "warn", "fail"]
"""`warn`: a run goes on, slower or at a risk; `fail`: it would end, crawl or compute wrongly."""

GB = 1e9


@attrs.frozen
class Finding:
    """One line of the report."""

    subject: str
    """What was looked at, such as `triton for torch` or `cuda:0`."""
    state: State
    found: str
    """What was found, with its figures."""
    cure: str = ""
    """What to do about it; only an `ok` may leave it out."""

    def __attrs_post_init__(self) -> None:
        if self.state != "ok" and not self.cure:
            raise EngineError(f"{self.subject}: a finding that is {self.state} has to say what cures it")


def examined(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run a check; where it raises, what it found so far and a `fail` with the exception."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as error:
        findings.append(
            Finding(
                subject,
                "fail",
                f"the check itself failed: {told(error)}",
                "mend what the exception names and run doctor again; if it names nothing of this machine, "
                "report it together with this output",
            )
        )
    return findings


def told(error: BaseException) -> str:
    """An exception's class and its words."""
    return f"{type(error).__name__}: {error}"


def gigabytes(size: float) -> str:
    """Bytes as GB of 10^9, as everywhere in the project."""
    return f"{size / GB:.{1 if size >= 10 * GB else 2 if size >= GB / 10 else 3}f} GB"
