"""A lane: a device, its streams, and what a stage may do with them.

A stage reads as straight PyTorch because its lane has made the right device and stream current.
Whatever crosses streams goes through the lane's primitives: `record` and `wait`, `copy_in` and
`copy_out` on copy streams of their own, by way of pinned host memory where the run's links say so or a
strategy asks for it. CPU lanes have no streams; everything else is the same, so that what is tested on a
CPU is the code that runs on GPUs.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.runtime.graph import LaneSpec
from engine.runtime.inbox import Stop
from engine.runtime.links import Links
from engine.runtime.parcel import Parcel, Tensors, like, listed
from engine.runtime.pinned_ring import PinnedRing
from engine.runtime.timing import Span, Timings, Wait, timing_event

LAUNCHED_AHEAD = 1


class Lane:
    """One worker's place. One thread at a time works on it."""

    def __init__(self, spec: LaneSpec, timings: Timings | None = None) -> None:
        """
        Args:
            timings: where spans go; a scheduler sets its own. Without, they are measured for nobody.
        """
        self.spec = spec
        self.name = spec.name
        self.device = torch.device(spec.device)
        self.timings = timings
        self.traced = False
        """Whether each span is an NVTX range too, for Nsight Systems."""
        self.stop = Stop()
        self.links = Links()
        """How copies between this lane's device and others travel; a run sets its own."""
        self.stream: torch.cuda.Stream | None = None
        """Where stages compute."""
        self.copy_in_stream: torch.cuda.Stream | None = None
        self.copy_out_stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
            self.copy_in_stream = torch.cuda.Stream(self.device)
            self.copy_out_stream = torch.cuda.Stream(self.device)
        self._spans: list[Span] = []
        self._launched: deque[torch.cuda.Event] = deque()
        self._worker = threading.RLock()

    def __repr__(self) -> str:
        return f"Lane({self.name})"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make device and compute stream current for this thread, with gradients on.

        Raises:
            EngineError: another thread works on the lane.
        """
        if not self._worker.acquire(blocking=False):
            raise EngineError(f"{self.name} is at work in another thread; use it between two runs")
        try:
            with torch.enable_grad():
                if self.stream is None:
                    yield
                else:
                    with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                        yield
        finally:
            self._worker.release()

    def synchronize(self) -> None:
        """Wait until the device is through with all that this lane launched, copies included."""
        for stream in (self.copy_in_stream, self.stream, self.copy_out_stream):
            if stream is not None:
                stream.synchronize()

    def record(self) -> torch.cuda.Event | None:
        """An event behind all that was launched on the compute stream; None on a CPU."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream of this lane (the compute stream by default) go on only after `event`.

        The thread goes on at once. On a CPU lane it is the thread that waits.
        """
        if event is None or event.query():
            return
        stream = stream or self.stream
        if stream is None:
            with self.waiting() as wait:
                begin = time.perf_counter()
                event.synchronize()
                wait.seconds = time.perf_counter() - begin
        elif stream == self.stream and self._spans:
            before = timing_event(stream)
            stream.wait_event(event)
            wait = Wait(between=(before, timing_event(stream)))
            for span in self._spans:
                span.wait(wait)
        else:
            stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Tell the allocator that a stream of this lane uses a tensor which another one made."""
        stream = stream or self.stream
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)

    def copy_in(self, parcel: Parcel[Tensors], *, ring: PinnedRing | None = None) -> Parcel[Tensors]:
        """Bring a parcel to this lane's device without making any thread or compute stream wait.

        Args:
            ring: go through this pinned host memory, whatever the links say.

        Returns:
            A parcel of copies for one reader, with the same note; the same parcel where it lies on
            this device already. Counts as one reading of the original.
        """
        if parcel.device == self.device:
            return parcel
        if ring is not None and parcel.device.type == "cuda" and self.stream is not None:
            return self.copy_in(parcel.lane.copy_out(parcel, ring))
        leaving = parcel.lane.copy_out_stream if parcel.device.type == "cuda" else self.copy_in_stream
        tensors = parcel.read(self, leaving)
        # torch copies between GPUs on the source's current stream, with the destination's waiting on
        # both sides of it: so both are made current, the destination last, for its device.
        with torch.cuda.stream(leaving), torch.cuda.stream(self.copy_in_stream):
            copies = [
                self.links.copy(
                    torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device),
                    tensor,
                    non_blocking=True,
                )
                for tensor in listed(tensors)
            ]
        last = self.copy_in_stream or leaving
        ready = None if last is None else last.record_event()
        if parcel.slot is not None:
            parcel.slot.release(ready)
        return Parcel(self, like(tensors, copies), device=self.device, ready=ready, note=parcel.note)

    def copy_out(self, parcel: Parcel[Tensors], ring: PinnedRing) -> Parcel[Tensors]:
        """Bring a parcel of this lane's device into pinned host memory, for one GPU lane to copy in.

        The thread waits only for a free slot. On a CPU lane the parcel stays as it is.

        Raises:
            EngineError: the parcel does not fit into a slot.
            Stopped: the run is over while no slot is free.
        """
        if self.copy_out_stream is None:
            return parcel
        tensors = parcel.read(self, self.copy_out_stream)
        slot = ring.reserve(listed(tensors), self.stop)
        copies = slot.views(listed(tensors))
        with torch.cuda.stream(self.copy_out_stream):
            for copy, tensor in zip(copies, listed(tensors), strict=True):
                copy.copy_(tensor, non_blocking=True)
        ready = slot.last_use = self.copy_out_stream.record_event()
        return Parcel(
            self,
            like(tensors, copies),
            device=torch.device("cpu"),
            ready=ready,
            note=parcel.note,
            slot=slot,
        )

    @contextmanager
    def span(self, part: str, *, tokens: int = 0, bytes: int = 0) -> Iterator[Span]:
        """Time a part of the running stage; its row is named `stage.part`."""
        outer = self._spans[-1] if self._spans else None
        span = self.begin(
            f"{outer.stage}.{part}" if outer else part,
            micro_batch=outer.micro_batch if outer else None,
            step=outer.step if outer else None,
        )
        span.count(tokens=tokens, bytes=bytes)
        try:
            yield span
        except BaseException:
            self._spans.remove(span)
            raise
        self.end(span)
        self.add(span)

    def count(self, *, tokens: int = 0, bytes: int = 0) -> None:
        """Add to what the running stage went through."""
        if self._spans:
            self._spans[0].count(tokens=tokens, bytes=bytes)

    @contextmanager
    def waiting(self) -> Iterator[Wait]:
        """Where the thread waits for another lane: set the `seconds`; all open spans count the wait."""
        wait = Wait()
        before = None if self.stream is None else timing_event(self.stream)
        yield wait
        if not wait.seconds:
            return
        if before is not None and self.stream is not None:
            wait.between = (before, timing_event(self.stream))
        for span in self._spans:
            span.wait(wait)

    def pace(self) -> None:
        """Called once per micro-batch: lets the thread run ahead of its device by one, not by many.

        Launching ahead keeps the device busy; but what is launched holds its memory, and credits
        bound only what waits between two threads.
        """
        if self.stream is None:
            return
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        self._launched.append(event)
        if len(self._launched) > LAUNCHED_AHEAD:
            self._launched.popleft().synchronize()

    def begin(self, stage: str, *, micro_batch: int | None, step: int | None) -> Span:
        """Open a span."""
        span = Span(
            stage=stage,
            lane=self.name,
            micro_batch=micro_batch,
            step=step,
            stream=self.stream,
        )
        self._spans.append(span)
        if self.traced and self.stream is not None:
            torch.cuda.nvtx.range_push(stage if micro_batch is None else f"{stage} {micro_batch}")
        return span

    def end(self, span: Span) -> None:
        """Close the innermost span."""
        self._spans.remove(span)
        span.end()
        if self.traced and self.stream is not None:
            torch.cuda.nvtx.range_pop()

    def abandon_spans(self) -> None:
        """Forget what a failure left open."""
        self._spans.clear()

    def add(self, span: Span) -> None:
        """Hand a closed span to the timings."""
        if self.timings is not None:
            self.timings.add(span)


def open_lanes(specs: Sequence[LaneSpec], timings: Timings | None = None) -> dict[str, Lane]:
    """A lane for each specification, by name."""
    return {spec.name: Lane(spec, timings) for spec in specs}
