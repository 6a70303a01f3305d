"""Launching autotuned Triton kernels from several threads.

Triton's `Autotuner.run` keeps the current call's arguments in `self.nargs`, on the one object that a
kernel has in a process, and `restore_copies` beside it. Whichever launch ends first takes them away
from all others: a thread that is tuning dies, or restores another thread's tensor without a word.

Two things mend that, both on Triton's class itself, so that kernels and subclasses that exist already
are covered. The state of a call becomes each thread's own, by data descriptors, which win over what
stands in an object's dictionary. And tuning is one thread's alone: a launch whose key is unknown
reaches `prune_configs` before it has done anything; there it is broken off, takes the lock, and
starts again. So every key is tuned once, and a launch with a known key never meets a lock. Nothing of
Triton's own code is repeated here. Whole launches one after another, the mode `launch`, is the same
with the lock around each; and it is all that remains for a Triton whose inside looks different.

A compiled kernel is put on its device when it is first launched, and is visible half-way; so that is
locked as well.
"""

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import attrs
import torch

from engine.errors import OutOfMemory, is_out_of_memory
from engine.runtime.inbox import POLL_S
from engine.runtime.launch_state import ColdKey, PerThread, ThreadState, ThreadStates

PATCH = "engine_patch"
"""The attribute of a replaced method that leads to the patch it belongs to."""

_ABSENT = object()


class _Cold(BaseException):
    """Breaks a launch off whose key is unknown. It has done nothing yet."""


@attrs.define(eq=False, kw_only=True)
class AutotunerPatch:
    """Keeps launches apart while it is installed."""

    states: ThreadStates
    whole_launches: bool
    """Whether launches with known keys take turns too."""
    layout_known: bool = True
    """Whether to keep calls' state per thread; without, only whole launches can be kept apart."""
    on_cold: Callable[[ColdKey], None]
    """Called in the launching thread, after a key was tuned."""
    free_memory: Callable[[str], None]
    """Called with the message of an out of memory in tuning, before it is tried again."""
    check_stop: Callable[[], None]
    """Called while a thread waits for the lock; what it raises ends the wait."""
    owner: Any = None
    """Whose it is, for whoever finds it installed."""
    active: bool = attrs.field(default=False, init=False)
    _lock: Any = attrs.field(factory=threading.RLock, init=False)
    _replaced: list[tuple[Any, str, Any, Any]] = attrs.field(factory=list, init=False)
    """(owner, name, what stands there now, what stood there before)."""

    def install(self) -> None:
        """Put it on Triton's classes. No thread may be launching."""
        from triton.runtime.autotuner import Autotuner

        self.active = True
        if self.layout_known:
            for name in ("nargs", "restore_copies"):
                self._replace(Autotuner, name, PerThread(self.states, name))
            self._replace(Autotuner, "_bench", self._benchmarking(Autotuner._bench))
            self._replace(Autotuner, "prune_configs", self._pruning(Autotuner.prune_configs))
            self._replace(Autotuner, "warmup", self._calling(Autotuner.warmup, launches=False))
        run = self._calling(Autotuner.run, launches=True) if self.layout_known else Autotuner.run
        self._replace(Autotuner, "run", self._alone(run) if self.whole_launches else run)
        self.cover_subclasses()
        self._lock_loading()

    def remove(self) -> None:
        """Take it off again, but for what somebody else has replaced since. No thread may be launching."""
        for owner, name, ours, before in reversed(self._replaced):
            if vars(owner).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()
        self.active = False

    def overwritten(self) -> list[str]:
        """What somebody else has put in our place, and who."""
        found = []
        for owner, name, ours, _ in self._replaced:
            value = vars(owner).get(name)
            if value is not ours:
                found.append(f"{owner.__name__}.{name} is now {_origin(value)}")
        return found

    def cover_subclasses(self) -> None:
        """Let subclasses that do the launching or the pruning all by themselves launch one at a time.

        Those that call `super()`, as FLA's does, come through our methods and need nothing.
        """
        from triton.runtime.autotuner import Autotuner

        for kind in _subclasses(Autotuner):
            own = [vars(kind)[name] for name in ("run", "prune_configs") if name in vars(kind)]
            if any(patch_of(method) is self for method in own) or all(map(_calls_super, own)):
                continue
            self._replace(kind, "run", self._alone(kind.run))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        if isinstance(value, FunctionType):
            setattr(value, PATCH, self)
        self._replaced.append((owner, name, value, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def _calling(self, original: Callable[..., Any], *, launches: bool) -> Callable[..., Any]:
        """`run` or `warmup` with this thread's state around it, restored for the launch outside of it."""
        states, tune = self.states, self._tune

        def call(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            state = states.mine
            key = id(tuner)
            nargs, copies = state.nargs, state.restore_copies
            running, restarted = state.running, state.restarted
            outer_nargs, outer_copies = nargs.get(key), copies.get(key)
            state.running, state.restarted = tuner if launches else None, False
            state.launches += launches
            try:
                try:
                    return original(tuner, *args, **kwargs)
                except _Cold:
                    pass  # and out of this block, or its traceback would hold the arguments meanwhile
                return tune(original, tuner, state, args, kwargs)
            finally:
                state.running, state.restarted = running, restarted
                _put_back(nargs, key, outer_nargs)
                _put_back(copies, key, outer_copies)

        return call

    def _pruning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        states = self.states

        def prune_configs(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            state = states.mine
            if state.running is tuner and not state.restarted:
                raise _Cold
            return original(tuner, *args, **kwargs)

        return prune_configs

    def _benchmarking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Tells tuning from reading another process's result, which comes through `prune_configs` too."""
        states = self.states

        def _bench(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            states.mine.benchmarked = True
            return original(tuner, *args, **kwargs)

        return _bench

    def _alone(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A `run` that no other such launch overlaps."""
        states, lock, wait, known = self.states, self._lock, self._wait, self.layout_known

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            if not lock.acquire(blocking=False):
                states.mine.launch_waited_s += wait()
            try:
                if not known:
                    states.mine.launches += 1
                return original(tuner, *args, **kwargs)
            finally:
                lock.release()

        return run

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else tunes inside the block; in mode `launch` nobody else launches."""
        if not self._lock.acquire(blocking=False):
            self._wait()
        try:
            yield
        finally:
            self._lock.release()

    def _wait(self) -> float:
        """Take the lock, which another thread has; returns the seconds."""
        begin = time.perf_counter()
        while not self._lock.acquire(timeout=POLL_S):
            self.check_stop()
        return time.perf_counter() - begin

    def _tune(
        self,
        original: Callable[..., Any],
        tuner: Any,
        state: ThreadState,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Start a launch again, with the lock; by then another thread may have tuned its key."""
        if not self._lock.acquire(blocking=False):
            state.tuning_waited_s += self._wait()
        outer, begin, cold = state.benchmarked, time.perf_counter(), None
        state.restarted, state.benchmarked = True, False
        state.tunings += 1
        try:
            known = set(tuner.cache)
            result = self._with_a_retry(original, tuner, state, args, kwargs)
            if state.benchmarked:
                seconds = time.perf_counter() - begin
                tuned = [key for key in list(tuner.cache) if key not in known]
                cold = ColdKey(_name(tuner), tuned[-1] if tuned else (), seconds, state.thread)
        finally:
            state.tunings -= 1
            if state.benchmarked and not state.tunings:
                state.tuning_s += time.perf_counter() - begin
            state.benchmarked = outer
            self._lock.release()
        if cold is not None:
            state.cold_keys += 1
            self.on_cold(cold)
        return result

    def _with_a_retry(
        self,
        original: Callable[..., Any],
        tuner: Any,
        state: ThreadState,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return original(tuner, *args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = f"{type(error).__name__}: {error}"
        # Only here is the traceback gone, with the tensors of the frames that it led through.
        state.restore_copies.pop(id(tuner), None)
        state.out_of_memory_retries += 1
        self.free_memory(message)
        try:
            return original(tuner, *args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(_no_memory(tuner, args, kwargs, error)) from error

    def _lock_loading(self) -> None:
        """Let one thread at a time put a compiled kernel on its device, and nobody launch it half-way."""
        from triton.compiler.compiler import CompiledKernel

        original, lock = vars(CompiledKernel).get("_init_handles"), threading.RLock()
        if original is None:
            return  # `unknown_layout` says so

        def _init_handles(kernel: Any) -> None:
            with lock:
                original(kernel)

        def run(kernel: Any) -> Any:
            # Triton looks at `_run`, which is there first; the function to be launched is there last. A
            # kernel that found no memory is loaded again, where Triton would launch a function of None.
            if kernel.function is None:
                kernel._init_handles()
            return kernel._run

        self._replace(CompiledKernel, "_init_handles", _init_handles)
        self._replace(CompiledKernel, "run", property(run))


def unknown_layout() -> str | None:
    """What of the installed Triton's autotuner is not as this module needs it; None if all is."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.autotuner import Autotuner

    methods = {
        name: inspect.unwrap(vars(Autotuner).get(name, _ABSENT))
        for name in ("run", "prune_configs", "_bench", "warmup")
    }
    missing = [name for name, method in methods.items() if not isinstance(method, FunctionType)]
    if missing:
        return f"Autotuner has no {', '.join(missing)}"
    unused = {"nargs", "prune_configs", "cache"} - set(methods["run"].__code__.co_names)
    if unused:
        return f"Autotuner.run does without {', '.join(sorted(unused))}"
    if "_init_handles" not in vars(CompiledKernel):
        return "CompiledKernel has no _init_handles, so two lanes on one GPU may launch a half-loaded kernel"
    return None


def installed_patch() -> AutotunerPatch | None:
    """The patch that is on Triton's autotuner, if any. Imports nothing."""
    module = sys.modules.get("triton.runtime.autotuner")
    return None if module is None else patch_of(module.Autotuner.run)


def patch_of(method: Any) -> AutotunerPatch | None:
    """The patch that a method of Triton's classes belongs to, if it does."""
    found = getattr(method, PATCH, None)
    return found if isinstance(found, AutotunerPatch) else None


def _put_back(values: dict[int, Any], key: int, value: Any) -> None:
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value


def _subclasses(kind: Any) -> Iterator[Any]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def _calls_super(method: Any) -> bool:
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is not None and bool({"super", "Autotuner"} & set(code.co_names))


def _origin(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{name}" if module and name else repr(value)


def _name(tuner: Any) -> str:
    return str(tuner.base_fn.__name__)


def _no_memory(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> str:
    named = dict(zip(tuner.arg_names, args, strict=False)) | kwargs
    key = [f"{name}={named[name]}" for name in tuner.keys if name in named]
    key += [f"{name}: {value.dtype}" for name, value in named.items() if hasattr(value, "dtype")]
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    return (
        f"kernel {_name(tuner)} ({', '.join(key) or 'no key'}) on {device}: out of memory while it was "
        f"tuned, and again alone with all cached memory freed: {type(error).__name__}: {error}\n"
        "Tuning needs 256 MB for a buffer that empties the L2 cache, and copies of what the kernel changes. "
        "Warm up before optimizer memory is taken, lower data.token_budget, or put fewer lanes on the device"
    )
