"""Triton's and FLA's real launch path on a machine without a GPU.

What fails when threads launch kernels is Python code: the autotuner, heuristics, the binder of
`JITFunction.run`, the lazy loading of a compiled kernel, FLA's own autotuner and its memo of chunk
indices. All of it runs here as it is. Only three things are replaced: what compiles a kernel, what
puts it on a device, and what benchmarks it. A kernel computes nothing, so outputs hold whatever their
memory held; what can be observed is which kernel was launched from which thread and device, with
which arguments and which tuned configuration.

The stub belongs to the whole process while it is active: enter it once, in the main thread, before
the threads that launch. Kernels that exist already forget for that time what they were compiled to
and tuned for, and get it back. What a module learnt from the driver when it was imported inside stays
as it is, and transformers binds FLA's kernels wherever they can be imported: import FLA under the
stub only in a process that does nothing else.
"""

import gc
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs

HOPPER = 90
SHARED_MEMORY = 232_448  # bytes of a block on H100 and H200; FLA picks block sizes by it
MULTIPROCESSORS = 132
LAUNCHER_ARGUMENTS = 9  # grid (3), stream, function, metadata (2) and hooks (2) precede the kernel's own
CONTENTS = 1_024  # elements up to which the contents of an integer tensor are recorded

_ABSENT = object()


@attrs.frozen
class Launch:
    """One kernel that was put on a device, benchmarks included."""

    kernel: str
    device: int
    """The launching thread's current one."""
    loaded_on: int
    """The device whose thread compiled the kernel; another one than `device` is a mix-up."""
    thread: int
    """`threading.get_ident()`"""
    benchmark: bool
    """Whether the autotuner was trying a configuration."""
    grid: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    """`num_warps`, `num_stages` and `num_ctas` it was compiled with."""
    arguments: tuple[tuple[str, Any], ...]
    """By name, block sizes and other constants included. A tensor is its shape, strides and dtype, and
    its contents where it holds a few integers, as document boundaries do."""


class StubDriver:
    """What Triton takes for a driver. Devices exist as soon as they are named; each thread has one."""

    def __init__(
        self,
        *,
        arch: int,
        bench_s: float,
        compile_s: float,
        load_s: float,
        bench_ms: Callable[[], float],
        on_launch: Callable[[Launch], None] | None,
    ) -> None:
        self.arch = arch
        self.bench_s = bench_s
        self.compile_s = compile_s
        self.load_s = load_s
        self.bench_ms = bench_ms
        self.on_launch = on_launch
        self.utils = SimpleNamespace(
            get_device_properties=self._device_properties,
            load_binary=self._load_binary,
            unload_module=lambda module: None,
        )
        self._of_thread = threading.local()

    @property
    def device(self) -> int:
        """This thread's current device; 0 until it is set, as in CUDA."""
        return getattr(self._of_thread, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        self._of_thread.device = index

    # From here on: what Triton asks of a driver.

    def get_current_device(self) -> int:
        return self.device

    def set_current_device(self, index: int) -> None:
        self.device = index

    def get_current_stream(self, index: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return self._benchmark

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What makes a launcher of a kernel that is being loaded."""
        names = tuple(source.fn.arg_names)
        options = tuple((name, getattr(metadata, name)) for name in ("num_warps", "num_stages", "num_ctas"))

        def launch(*arguments: Any) -> None:
            if self.on_launch is None:
                return
            values = arguments[LAUNCHER_ARGUMENTS:]
            self.on_launch(
                Launch(
                    kernel=metadata.name,
                    device=self.device,
                    loaded_on=metadata.device,
                    thread=threading.get_ident(),
                    benchmark=getattr(self._of_thread, "benchmarks", 0) > 0,
                    grid=tuple(arguments[:3]),
                    options=options,
                    arguments=tuple(
                        (name, _described(value)) for name, value in zip(names, values, strict=True)
                    ),
                )
            )

        return launch

    def _device_properties(self, index: int) -> dict[str, int]:
        return {
            "multiprocessor_count": MULTIPROCESSORS,
            "max_shared_mem": SHARED_MEMORY,
            "warpSize": 32,
            "max_num_regs": 65_536,
        }

    def _load_binary(self, name: str, binary: Any, shared: int, device: int) -> tuple[int, ...]:
        time.sleep(self.load_s)
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads per block

    def _benchmark(self, call: Callable[[], Any], quantiles: Any = None, **options: Any) -> list[float]:
        """Twice the call and one wait, in which other threads get their turn as while a GPU works."""
        self._of_thread.benchmarks = getattr(self._of_thread, "benchmarks", 0) + 1
        try:
            call()
            call()
            time.sleep(self.bench_s)
        finally:
            self._of_thread.benchmarks -= 1
        return [self.bench_ms()] * 3


def _described(value: Any) -> Any:
    if not (hasattr(value, "data_ptr") and hasattr(value, "stride")):
        return value if isinstance(value, int | float | str | bool | None) else repr(value)
    shown = (tuple(value.shape), tuple(value.stride()), str(value.dtype))
    integers = not (value.is_floating_point() or value.is_complex())
    return (*shown, tuple(value.flatten().tolist())) if integers and value.numel() <= CONTENTS else shown


def _compiler(driver: StubDriver) -> Callable[..., Any]:
    """A stand-in for `triton.compile`, whose kernels load through Triton's own code."""
    from triton.compiler import CompiledKernel

    class StubKernel(CompiledKernel):  # type: ignore[misc,unused-ignore]
        def __init__(self, source: Any, metadata: SimpleNamespace) -> None:
            self.src, self.metadata, self.name = source, metadata, metadata.name
            self.hash, self.kernel, self.packed_metadata = metadata.name, b"", ()
            self.asm = self.metadata_group = dict[str, Any]()
            self.module = self.function = self._run = None

    def compile(source: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
        time.sleep(driver.compile_s)
        known = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, **(options or {})}
        name = source.fn.__name__
        return StubKernel(
            source, SimpleNamespace(**{**known, "name": name, "shared": 0, "device": driver.device})
        )

    return compile


@contextmanager
def stub_driver(
    *,
    arch: int = HOPPER,
    bench_s: float = 0.001,
    compile_s: float = 0.0,
    load_s: float = 0.0005,
    bench_ms: Callable[[], float] = lambda: 1.0,
    on_launch: Callable[[Launch], None] | None = None,
) -> Iterator[StubDriver]:
    """Let Triton launch kernels without a GPU inside the block; everything is as before afterwards.

    Tensors are the CPU's. FLA can be imported inside, also where its import needs a driver. Triton's
    cache folder is an empty one, so that no result of the stub reaches the real one. No thread may
    launch while the block is entered or left.

    Args:
        arch: compute capability, times ten, of the GPU that kernels believe in.
        bench_s: seconds that a benchmark of one configuration waits, with the interpreter's lock free.
        compile_s: the same for compiling a kernel, load_s: for loading it onto a device.
        bench_ms: what a benchmark says; where all say the same, the first configuration is chosen.
        on_launch: called for every launch, in the launching thread; what it raises is raised there.
    """
    import torch
    import triton
    import triton.compiler

    driver = StubDriver(
        arch=arch, bench_s=bench_s, compile_s=compile_s, load_s=load_s, bench_ms=bench_ms, on_launch=on_launch
    )
    capability = divmod(arch, 10)
    replaced: list[tuple[Any, str, Any]] = [(triton.compiler, "compile", _compiler(driver))]
    if not torch.cuda.is_available():
        # What FLA asks torch when it sees a CUDA target; without CUDA these raise.
        replaced += [
            (torch.cuda, "get_device_name", lambda device=None: f"stub of compute capability {arch / 10:g}"),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
        ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    choice = vars(triton.runtime.driver)  # where Triton keeps the driver in use; its layout varies
    chosen = dict(choice)
    with tempfile.TemporaryDirectory(prefix="stub-driver-") as folder, _environment(TRITON_CACHE_DIR=folder):
        kept = _set_aside()
        try:
            for owner, name, value in replaced:
                setattr(owner, name, value)
            triton.runtime.driver.set_active(driver)
            yield driver
        finally:
            choice.clear()
            choice.update(chosen)
            for owner, name, value in before:
                setattr(owner, name, value)
            _put_back(kept)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def kernels() -> tuple[list[Any], list[Any]]:
    """All compiled functions and all autotuners of the process, which Triton itself does not list."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    functions, tuners = [], []
    for thing in gc.get_objects():
        kind = type(thing)  # never isinstance, which would wake lazy proxies
        if issubclass(kind, JITFunction):
            functions.append(thing)
        elif issubclass(kind, Autotuner):
            tuners.append(thing)
    return functions, tuners


def _set_aside() -> list[tuple[Any, str, Any]]:
    """Take what was compiled and tuned, compiler and benchmarker from all kernels; returns it."""
    kept: list[tuple[Any, str, Any]] = []
    functions, tuners = kernels()
    for function in functions:
        kept.append((function, "device_caches", function.device_caches))
        kept.append((function, "compile", vars(function).pop("compile", _ABSENT)))
        function.device_caches = defaultdict(function.create_binder)
    for tuner in tuners:
        kept.append((tuner, "cache", tuner.cache))
        kept.append((tuner, "do_bench", vars(tuner).pop("do_bench", _ABSENT)))
        tuner.cache = {}
    return kept


def _put_back(kept: list[tuple[Any, str, Any]]) -> None:
    """The reverse; kernels made in the meantime are left without anything that the stub gave them."""
    _set_aside()
    for owner, name, value in kept:
        if value is _ABSENT:
            vars(owner).pop(name, None)
        else:
            setattr(owner, name, value)
