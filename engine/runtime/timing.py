"""Where the time goes: one row of timings.jsonl for each stage and each named part of one.

A lane must never be synchronised to be measured, so device time is a pair of events on its stream,
read later, once they are done; `drain` gives the rows that are complete so far.

Waiting is told apart from working: `waited_ms` is how long the lane stood still for others (input,
credit, an exclusive turn, a meeting, a parcel that was not ready), and `host_ms` and `device_ms`
leave it out. A lane with a stream stands still when the stream does: a thread that waits above a
busy device costs nothing, so its waits are measured between events as well. On a CPU the thread's
time is all there is. `start` is when the host began to launch.
"""

import threading
import time
from typing import Any

import attrs
import torch

from engine.runtime.launch_state import LaunchCounts


def timing_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event on `stream`, now, whose time can be read."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


@attrs.define(eq=False)
class Wait:
    """Some time for which a lane stood still."""

    seconds: float = 0.0
    """Of the thread."""
    between: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """Timing events around it on the lane's stream; they tell for how long that stood still."""

    @property
    def lost_ms(self) -> float:
        return self.between[0].elapsed_time(self.between[1]) if self.between else self.seconds * 1e3


@attrs.define(eq=False, kw_only=True)
class Span:
    """One stretch of work on one lane; a row once its events are done."""

    stage: str
    lane: str
    micro_batch: int | None
    step: int | None
    """Counted from 1, as in metrics.jsonl."""
    stream: torch.cuda.Stream | None
    tokens: int = 0
    bytes: int = 0
    launches: LaunchCounts | None = None
    """What the lane's thread launched and waited for within it."""
    start: float = attrs.field(factory=time.time)
    _begin: float = attrs.field(factory=time.perf_counter, init=False)
    _host: float | None = attrs.field(default=None, init=False)
    _first: torch.cuda.Event | None = attrs.field(init=False)
    _last: torch.cuda.Event | None = attrs.field(default=None, init=False)
    _inner_waits: list[Wait] = attrs.field(factory=list, init=False)
    _outer_waits: list[Wait] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._first = timing_event(self.stream) if self.stream else None

    def count(self, *, tokens: int = 0, bytes: int = 0) -> None:
        """Add what the work went through."""
        self.tokens += tokens
        self.bytes += bytes

    def wait(self, wait: Wait) -> None:
        """Add a wait: within the work until `end`, and after that one from before or behind it."""
        if self._host is None:
            self._inner_waits.append(wait)
            self._begin += wait.seconds
        else:
            self._outer_waits.append(wait)

    def end(self) -> None:
        """The work is launched."""
        self._host = time.perf_counter() - self._begin
        self._last = timing_event(self.stream) if self.stream else None

    @property
    def complete(self) -> bool:
        """Whether the device is through."""
        return all(event.query() for event in self._last_events())

    def synchronize(self) -> None:
        """Wait until the device is through."""
        for event in self._last_events():
            event.synchronize()

    def _last_events(self) -> list[torch.cuda.Event]:
        waits = [wait.between[1] for wait in self._outer_waits if wait.between]
        return waits if self._last is None else [self._last, *waits]

    def row(self) -> dict[str, Any]:
        """The row of timings.jsonl; the span must be complete."""
        host_ms = (self._host or 0.0) * 1e3
        device_ms, inner_ms = host_ms, sum(wait.lost_ms for wait in self._inner_waits)
        if self._first is not None and self._last is not None:
            device_ms = max(self._first.elapsed_time(self._last) - inner_ms, 0.0)
        waited_ms = inner_ms + sum(wait.lost_ms for wait in self._outer_waits)
        return {
            "stage": self.stage,
            "lane": self.lane,
            "micro_batch": self.micro_batch,
            "step": self.step,
            "start": self.start,
            "waited_ms": waited_ms,
            "host_ms": host_ms,
            "device_ms": device_ms,
            "tokens": self.tokens,
            "bytes": self.bytes,
        } | (self.launches.row() if self.launches else {})


class Timings:
    """Collects spans from all lanes; any thread may add and any thread may drain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def add(self, span: Span) -> None:
        """Take a span that has ended."""
        with self._lock:
            self._spans.append(span)

    def drain(self) -> list[dict[str, Any]]:
        """Rows whose device work is done, in the order in which their spans were added; waits for none."""
        with self._lock:
            spans, self._spans = self._spans, []
        complete = [(span, span.complete) for span in spans]
        with self._lock:
            self._spans = [span for span, done in complete if not done] + self._spans
        return [span.row() for span, done in complete if done]

    def flush(self) -> list[dict[str, Any]]:
        """All rows left, once their device work is done.

        After a failure `drain` is the one to call: a device that hangs would hold this one for good.
        """
        with self._lock:
            spans, self._spans = self._spans, []
        for span in spans:
            span.synchronize()
        return [span.row() for span in spans]
