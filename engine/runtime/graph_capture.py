"""CUDA graphs of a lane: a call recorded once, then launched as one thing.

Launching a large model costs Python a tenth of a second however little there is to compute, and all lanes
share one interpreter. A graph is launched by one call. What it may do is fixed: the same kernels, on the
same addresses. So inputs are copied in and outputs copied out, and it belongs to one lane: its replays are
launched on that lane's stream, one after another, whoever asks for them.

All graphs of a lane take their memory from one pool, in which a later graph reuses what an earlier one needs
only while it runs. Their outputs go to buffers that the lane's graphs share as well, outside the pool: were
they kept where they were computed, every graph would hold its own, and the next one could not reuse it.
Another lane has another pool, since two graphs of one pool must never run at once.

While a graph is recorded, waiting for the whole device is an error, in whichever thread: so recording takes
its turn with what compiles and tunes. Drawing from the device's default generator is one too; the engine
draws nothing on lanes, and a plugin uses a generator of its own. Other lanes go on launching and allocating.
The garbage collector is off meanwhile, for it may free something by a call that is forbidden then.
"""

import gc
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from engine.errors import EngineError, OutOfMemory, is_out_of_memory, words
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer

Call = Callable[[Tensor], Sequence[Tensor]]


@attrs.frozen(eq=False)
class CapturedCall:
    """A call of fixed shapes, recorded."""

    lane: Lane
    stream: torch.cuda.Stream
    """The lane's."""
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """What a replay reads."""
    outputs: tuple[Tensor, ...]
    """What a replay writes; views of buffers that the lane's other graphs write as well."""

    def replay(self, inputs: Tensor) -> list[Tensor]:
        """The outputs for other inputs of the same shape, as new tensors; the host does not wait.

        Called with another stream current, that stream goes on behind the replay.
        """
        lane, stream = self.lane, self.stream
        current = torch.cuda.current_stream(lane.device)
        foreign = current != stream
        if foreign:
            lane.wait(current.record_event())
            lane.keep(inputs)
        with torch.cuda.stream(stream):
            self.inputs.copy_(inputs, non_blocking=True)
            self.graph.replay()
            outputs = [buffer.clone() for buffer in self.outputs]
        if foreign:
            current.wait_stream(stream)
            for output in outputs:
                output.record_stream(current)
        return outputs

    def spoil(self) -> None:
        """Fill the output buffers with NaN, so that what a replay does not write shows."""
        for buffer in self.outputs:
            buffer.fill_(torch.nan)


class LaneGraphs:
    """The graphs of one lane: their pool, and the buffers that their outputs go to."""

    def __init__(self, lane: Lane, serializer: Serializer) -> None:
        """
        Raises:
            EngineError: a lane on a CPU.
        """
        if lane.stream is None:
            raise EngineError(f"{lane.name}: CUDA graphs need a GPU")
        self._lane, self._stream = lane, lane.stream
        self._serializer = serializer
        self._pool = torch.cuda.graph_pool_handle()
        self._buffers: list[Tensor] = []

    def capture(self, call: Call, inputs: Tensor, like: Sequence[Tensor], what: str) -> CapturedCall:
        """Record `call(inputs)`; with the lane active, and after it ran so often that nothing is cold.

        Args:
            inputs: any values; a replay brings its own.
            like: what the call returned, for the shapes and dtypes.
            what: what is recorded, for messages.

        Raises:
            OutOfMemory: the pool could not grow. EngineError: something that cannot be recorded.
        """
        lane = self._lane
        inputs = inputs.clone()
        outputs = self._views(like)
        graph = torch.cuda.CUDAGraph()
        with self._serializer.capturing(lane):
            collects = gc.isenabled()
            gc.collect()
            gc.disable()
            try:
                lane.synchronize()
                self._record(graph, call, inputs, outputs)
            except Exception as error:
                if is_out_of_memory(error):
                    raise OutOfMemory(
                        f"recording {what} as a CUDA graph ran out of memory: {words(error)}; lower the "
                        "plugin's shapes or data.token_budget"
                    ) from error
                raise EngineError(
                    f"{what} cannot be recorded as a CUDA graph: {type(error).__name__}: {words(error)}; "
                    "leave the plugin out, or the one that brought what cannot be recorded"
                ) from error
            finally:
                if collects:
                    gc.enable()
        return CapturedCall(lane, self._stream, graph, inputs, outputs)

    def _record(
        self, graph: torch.cuda.CUDAGraph, call: Call, inputs: Tensor, outputs: Sequence[Tensor]
    ) -> None:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for buffer, output in zip(outputs, call(inputs), strict=True):
                buffer.copy_(output)
        except BaseException as error:
            try:
                graph.capture_end()  # the stream must not stay in capture
            except Exception as second:
                error.add_note(f"ending the recording failed too: {type(second).__name__}: {words(second)}")
                _free_generator(self._lane.device)
            raise
        graph.capture_end()

    def _views(self, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Views of the shared buffers, which grow where one is too small; older graphs keep the old ones."""
        sizes = [buffer.numel() for buffer in self._buffers]
        wanted = [tensor.numel() for tensor in like]
        if len(sizes) != len(wanted) or any(a < b for a, b in zip(sizes, wanted, strict=True)):
            self._buffers = [torch.empty_like(tensor).flatten() for tensor in like]
        return tuple(
            buffer[: tensor.numel()].view(tensor.shape)
            for buffer, tensor in zip(self._buffers, like, strict=True)
        )

    @property
    def bytes(self) -> int:
        """Of device memory that pool and buffers hold."""
        pool = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self._pool))
        return int(pool) + sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)


def _free_generator(device: torch.device) -> None:
    """Let a device draw random numbers again. A recording that could not be ended leaves its generator's
    state marked as being recorded, and nothing takes the mark away; a copy of the state does not bear it."""
    generator = torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]
    generator.graphsafe_set_state(generator.clone_state())
