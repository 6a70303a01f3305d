"""What a thread's kernel launches are at, and what they came to.

Everything here is written by the thread that it belongs to and by no other, so counting a launch
takes no lock; whoever wants totals adds up what is there.
"""

import threading
from operator import attrgetter
from typing import Any

import attrs


@attrs.frozen
class ColdKey:
    """One tuning that took place."""

    kernel: str
    """The name of the kernel's Python function."""
    key: tuple[Any, ...]
    """As the autotuner files it."""
    seconds: float
    """Benchmarks, compilation and the launch itself; waiting for another thread's tuning left out."""
    thread: str


@attrs.define(eq=False)
class ThreadState:
    """One thread's launches."""

    thread: str
    nargs: dict[int, Any] = attrs.field(factory=dict)
    """By the id of the autotuner, for as long as one of its launches lasts."""
    restore_copies: dict[int, Any] = attrs.field(factory=dict)
    running: Any = None
    """The autotuner of the innermost launch."""
    restarted: bool = False
    """Whether that launch has the lock for its unknown key."""
    benchmarked: bool = False
    """Whether the innermost tuning came to a benchmark."""
    tunings: int = 0
    """How many launches, one within another, are tuning."""
    launches: int = 0
    cold_keys: int = 0
    tuning_s: float = 0.0
    tuning_waited_s: float = 0.0
    launch_waited_s: float = 0.0
    stage_waited_s: float = 0.0
    compile_waited_s: float = 0.0
    out_of_memory_retries: int = 0


class ThreadStates(threading.local):
    """The state of whichever thread asks, as `mine`; `everybody` gets those of all."""

    def __init__(self, everybody: list[ThreadState]) -> None:
        self.mine = ThreadState(threading.current_thread().name)
        everybody.append(self.mine)


class PerThread:
    """Stands on a class for an attribute of its objects and gives each thread a value of its own.

    Setting goes past the object's dictionary, and so does reading: it covers objects that are older
    than itself. `ThreadState` keeps the values; whoever sets one takes it out again.
    """

    def __init__(self, states: ThreadStates, name: str) -> None:
        self._states = states
        self._values = attrgetter(f"mine.{name}")

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        return self if instance is None else self._values(self._states).get(id(instance))

    def __set__(self, instance: Any, value: Any) -> None:
        self._values(self._states)[id(instance)] = value


@attrs.frozen(kw_only=True)
class LaunchCounts:
    """Totals over threads, from the serializer's making on."""

    launches: int = 0
    """Of autotuned kernels, benchmarks left out."""
    cold_keys: int = 0
    """Keys that were tuned; one that was read from Triton's cache folder is none."""
    tuning_s: float = 0.0
    """Seconds of tuning, compilation and the first launch included."""
    tuning_waited_s: float = 0.0
    """Seconds for which threads with an unknown key waited for another thread's tuning."""
    launch_waited_s: float = 0.0
    """Seconds waited for other launches; mode `launch` alone has any."""
    stage_waited_s: float = 0.0
    """Seconds waited for other lanes' forwards; mode `stage` alone has any."""
    compile_waited_s: float = 0.0
    """Seconds for which lanes that had to compile waited for another that did."""
    out_of_memory_retries: int = 0

    def row(self) -> dict[str, float]:
        """Its columns in timings.jsonl, seconds as milliseconds; what is zero is left out."""
        columns = {
            name.removesuffix("_s") + "_ms" if name.endswith("_s") else name: value
            * (1e3 if name.endswith("_s") else 1)
            for name, value in attrs.asdict(self).items()
        }
        return {name: value for name, value in columns.items() if value}

    def __sub__(self, earlier: "LaunchCounts") -> "LaunchCounts":
        """What came after `earlier`."""
        return LaunchCounts(
            **{name: value - getattr(earlier, name) for name, value in attrs.asdict(self).items()}
        )


def total(states: list[ThreadState]) -> LaunchCounts:
    """The sum over threads."""
    names = [field.name for field in attrs.fields(LaunchCounts)]
    return LaunchCounts(**{name: sum(getattr(state, name) for state in states) for name in names})
