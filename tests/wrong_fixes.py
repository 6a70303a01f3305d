"""Locks that look right and are not. Each is put on Triton's autotuner inside its block."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import triton.runtime.autotuner as triton_module
from triton.runtime.autotuner import Autotuner

Fix = Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes, and restore or delete them afterwards."""
    before = {name: vars(owner).get(name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def locked(original: Callable[..., Any], lock_of: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(self, *args, **kwargs):
        with lock_of(self):
            return original(self, *args, **kwargs)

    return call


def lock_only_when_the_key_is_cold():
    lock, run = threading.RLock(), Autotuner.run

    def call(self, *args, **kwargs):
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        cold = tuple(named[name] for name in self.keys) not in self.cache
        with lock if cold else nullcontext():
            return run(self, *args, **kwargs)

    return replaced(Autotuner, run=call)


def lock_around_the_benchmark():
    lock = threading.RLock()
    return replaced(Autotuner, _bench=locked(Autotuner._bench, lambda tuner: lock))


def lock_per_thread():
    mine = threading.local()

    def lock_of(tuner):
        if not hasattr(mine, "lock"):
            mine.lock = threading.RLock()
        return mine.lock

    return replaced(Autotuner, run=locked(Autotuner.run, lock_of))


def lock_made_inside_the_wrapper():
    return replaced(Autotuner, run=locked(Autotuner.run, lambda tuner: threading.RLock()))


def another_class_in_tritons_module():
    lock = threading.RLock()

    class Locked(Autotuner):
        run = locked(Autotuner.run, lambda tuner: lock)

    return replaced(triton_module, Autotuner=Locked)


def lock_on_a_subclass():
    """As on FLA's class alone."""
    lock = threading.RLock()
    return replaced(Cached, run=locked(Cached.run, lambda tuner: lock))


def lock_made_in_a_patched_init():
    init = Autotuner.__init__

    def make(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.launch_lock = threading.RLock()

    def lock_of(tuner):
        return getattr(tuner, "launch_lock", nullcontext())

    @contextmanager
    def both():
        run = locked(Autotuner.run, lock_of)
        with replaced(Autotuner, __init__=make), replaced(Autotuner, run=run):
            yield

    return both()


def arguments_per_thread_and_no_lock():
    mine = threading.local()

    def read(tuner):
        return vars(mine).get(id(tuner))

    def write(tuner, value):
        vars(mine)[id(tuner)] = value

    return replaced(Autotuner, nargs=property(read, write))


def one_plain_lock_on_both_classes():
    lock = threading.Lock()

    @contextmanager
    def taken(tuner):
        if not lock.acquire(timeout=0.3):
            raise TimeoutError("waits for the lock that it has")
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def both():
        base, subclass = locked(Autotuner.run, taken), locked(Cached.run, taken)
        with replaced(Autotuner, run=base), replaced(Cached, run=subclass):
            yield

    return both()


class Cached(Autotuner):
    """Of the shape of FLA's: looks at something of its own, then launches as Triton does."""

    def run(self, *args, **kwargs):
        return super().run(*args, **kwargs)


LOSE_THE_RACE: list[Fix] = [
    lock_only_when_the_key_is_cold,
    lock_around_the_benchmark,
    lock_per_thread,
    lock_made_inside_the_wrapper,
    another_class_in_tritons_module,
    lock_on_a_subclass,
]
