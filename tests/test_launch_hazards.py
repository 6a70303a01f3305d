"""What a lock on launches does not cover: memory, loading, context, compilation, an unknown Triton."""

import contextvars
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import triton
from small_runs import assembled, small_project
from triton.compiler.compiler import CompiledKernel
from triton.runtime._allocation import _allocator
from triton.runtime.autotuner import Autotuner
from tuned_kernels import add_one, race, together, tuner
from wrong_fixes import replaced

from engine.errors import EngineError, OutOfMemory
from engine.lanes import open_run_lanes
from engine.runtime import serializer as serializer_module
from engine.runtime.failure import StageFailure
from engine.runtime.graph import LaneSpec, StageSpec, build_graph
from engine.runtime.inbox import Stopped
from engine.runtime.lane import Lane
from engine.runtime.race_probe import probe
from engine.runtime.scheduler import Scheduler
from engine.runtime.serializer import Serializer
from engine.runtime.stub_driver import stub_driver
from engine.runtime.timing import Timings

DRIVERS_WORDS = RuntimeError("Triton Error [CUDA]: out of memory")
TORCHS_WORDS = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB")


@pytest.fixture(autouse=True)
def nothing_installed():
    Serializer("none").install()
    yield
    Serializer("none").install()


@pytest.fixture
def serializer():
    made = Serializer("tune")
    made.install()
    yield made
    made.uninstall()


# Out of memory while tuning


class Short:
    """A benchmark that runs out of memory so many times, with a tensor in its frame each time."""

    def __init__(self, times, error=TORCHS_WORDS):
        self.times, self.error = times, error
        self.calls = 0
        self.held = []

    def __call__(self, call, quantiles):
        self.calls += 1
        if self.calls <= self.times:
            buffer = torch.zeros(8)
            self.held.append(weakref.ref(buffer))
            raise type(self.error)(*self.error.args)
        call()
        return [1.0, 1.0, 1.0]


@pytest.mark.parametrize("error", [TORCHS_WORDS, DRIVERS_WORDS], ids=["torch", "driver"])
def test_tuning_that_runs_out_of_memory_is_tried_once_more_after_everything_is_freed(serializer, error):
    benchmark, told = Short(1, error), []

    def freed(message):
        gc.collect()
        told.append((message, [held() for held in benchmark.held], sys.exc_info()[0], kernel.restore_copies))

    serializer.on_out_of_memory = freed
    kernel = tuner(benchmark=benchmark, restore=["y"])
    kernel.run(0, torch.zeros(2), 7, grid=(1,))
    message = f"{type(error).__name__}: {error}"
    assert told == [(message, [None], None, None)]  # no frame, no exception, no copy is left
    assert (7, "torch.float32") in kernel.cache
    counts = serializer.counts()
    assert counts.out_of_memory_retries == 1 and counts.cold_keys == 1


def test_copies_for_restoring_are_gone_when_memory_is_to_be_freed(serializer):
    told = []
    serializer.on_out_of_memory = lambda message: told.append(kernel.restore_copies)
    launches = Counter()

    def body(x, y, n):
        launches["all"] += 1
        if launches["all"] == 1:
            assert kernel.restore_copies
            raise DRIVERS_WORDS

    kernel, y = tuner(body, restore=["y"]), torch.full((2,), 5.0)
    kernel.run(0, y, 7, grid=(1,))
    assert told == [None] and y.tolist() == [5.0, 5.0]


def test_no_memory_the_second_time_names_kernel_key_device_and_cure(serializer):
    freed = []
    serializer.on_out_of_memory = freed.append
    benchmark = Short(1000)
    kernel = tuner(benchmark=benchmark)
    with pytest.raises(OutOfMemory) as error:
        kernel.run(torch.zeros(1), 0, 4096, grid=(1,))
    message = str(error.value)
    assert message.startswith("kernel scale (n=4096, x: torch.float32) on cpu: out of memory while")
    assert "Tried to allocate 256.00 MiB" in message and "Warm up before optimizer memory is taken" in message
    assert error.value.exit_code == 3
    assert len(freed) == 1 and benchmark.calls == 2
    assert probe() is None and not race(tuner)  # the lock is free


def test_it_is_tried_again_with_nobody_to_free_anything(serializer):
    kernel = tuner(benchmark=Short(1))
    kernel.run(0, 0, 7, grid=(1,))
    assert (7,) in kernel.cache


def test_other_errors_and_launches_with_known_keys_are_not_tried_again(serializer):
    freed = []
    serializer.on_out_of_memory = freed.append
    benchmark = Short(1, ValueError("shapes"))
    with pytest.raises(ValueError):
        tuner(benchmark=benchmark).run(0, 0, 7, grid=(1,))

    def body(x, y, n):
        raise TORCHS_WORDS

    with pytest.raises(torch.OutOfMemoryError):
        tuner(body, warm=(1,)).run(0, 0, 1, grid=(1,))
    assert not freed and benchmark.calls == 1


def test_copies_of_all_lanes_have_ended_before_a_tuning_is_tried_once_more(tmp_path, monkeypatch):
    run = open_run_lanes(assembled(small_project(tmp_path)))
    calls = []
    for lane in run.scheduler.lanes.values():
        monkeypatch.setattr(lane, "synchronize", lambda name=lane.name: calls.append(name))
    monkeypatch.setattr(gc, "collect", lambda *args: calls.append("collected"))

    def benchmark(call, quantiles):
        calls.append("benchmark")
        if calls.count("benchmark") == 1:
            raise TORCHS_WORDS
        return [1.0, 1.0, 1.0]

    tuner(benchmark=benchmark).run(0, 0, 7, grid=(1,))
    assert calls[0] == "benchmark"
    freed = calls.index("collected")
    assert set(calls[1:freed]) == set(run.scheduler.lanes)
    assert set(calls[freed:]) == {"collected", "benchmark"}


# Loading a compiled kernel


def compiled_kernel():
    """One of Triton's own, fresh from the compiler."""
    kernel = object.__new__(CompiledKernel)
    kernel.metadata = SimpleNamespace(
        shared=0, num_warps=4, tmem_size=None, name="k", num_stages=3, num_ctas=1
    )
    kernel.metadata.device = 0
    kernel.src = SimpleNamespace(fn=add_one.fn.fn)
    kernel.name, kernel.kernel, kernel.hash, kernel.metadata_group = "k", b"", "", {}
    kernel.module = kernel.function = kernel._run = None
    return kernel


def launched_with(kernel, driver, monkeypatch):
    """What two threads launch, the second while the first loads the kernel; and the loads."""
    loading, second = threading.Event(), threading.Event()
    functions, loads = [], []

    def load(name, binary, shared, device):
        loads.append(name)
        loading.set()
        second.wait(0.2)
        return 11, 12, 0, 0, 1024

    monkeypatch.setattr(driver.utils, "load_binary", load)

    def launch(after=None):
        if after is not None:
            after.wait(10)
        run, function = kernel.run, kernel.function  # the order in which Triton asks
        functions.append(function)
        second.set()
        return run

    assert not together(launch, lambda: launch(loading))
    return functions, loads


def test_a_kernel_that_another_thread_is_loading_is_waited_for(serializer, monkeypatch):
    with stub_driver(load_s=0) as driver:
        assert launched_with(compiled_kernel(), driver, monkeypatch) == ([12, 12], ["k"])
        serializer.uninstall()
        assert None in launched_with(compiled_kernel(), driver, monkeypatch)[0]


def test_a_kernel_that_found_no_memory_is_loaded_again(serializer, monkeypatch):
    with stub_driver(load_s=0) as driver:
        attempts = []

        def load(*binary):
            attempts.append(binary)
            if len(attempts) in (1, 3):
                raise RuntimeError("Triton Error [CUDA]: out of memory")
            return 11, 12, 0, 0, 1024

        monkeypatch.setattr(driver.utils, "load_binary", load)
        kernel = compiled_kernel()
        with pytest.raises(RuntimeError, match="out of memory"):
            kernel.run  # noqa: B018
        assert kernel.run is not None and kernel.function == 12
        add_one[(1,)](torch.zeros(4), 4)  # and so does a tuning whose kernel found none
        assert serializer.counts().out_of_memory_retries == 1


# Worker threads


def works(**others):
    names = ["target-forward", "optimizer", "drafter-fwd-bwd"]
    return {name: others.get(name.replace("-", "_"), lambda *what: None) for name in names}


def graph():
    stages = [
        StageSpec("target-forward", "target"),
        StageSpec("drafter-fwd-bwd", "drafter", after=("target-forward",)),
        StageSpec("optimizer", "drafter", after=("drafter-fwd-bwd",), barrier=True),
    ]
    return build_graph(stages, [LaneSpec("target", 0, "cpu"), LaneSpec("drafter", 0, "cpu")], 1)


def allocate(size, alignment, stream):
    raise AssertionError


def test_lanes_have_the_allocator_that_was_set_in_the_main_thread():
    found = []

    def forward(lane, number, cargo):
        found.append(_allocator.get())

    def run():
        triton.set_allocator(allocate)
        scheduler = Scheduler(
            graph(), works(target_forward=forward), serializer=Serializer("tune"), timings=Timings()
        )
        scheduler.run(0, 2)
        together(lambda: found.append(_allocator.get()))

    contextvars.copy_context().run(run)
    assert found[:2] == [allocate] * 2
    assert found[2] is not allocate  # in a thread of its own making it is lost


def test_waits_for_launches_end_with_the_run_and_only_then(serializer):
    stops = []

    def forward(lane, number, cargo):
        stops.append(serializer._stop is lane.stop and not lane.stop.is_set())

    scheduler = Scheduler(graph(), works(target_forward=forward), serializer=serializer, timings=Timings())
    scheduler.run(0, 2)
    assert stops == [True] * 2
    assert serializer._stop is None


def test_a_run_renews_a_serializer_that_another_run_displaced(serializer):
    scheduler = Scheduler(graph(), works(), serializer=serializer, timings=Timings())
    Serializer("launch").install()
    assert not serializer.effective()
    scheduler.run(0, 1)
    assert serializer.effective()


def test_a_run_on_lanes_installs_its_schedules_mode_and_checks_it_at_every_epoch(tmp_path):
    parts = assembled(small_project(tmp_path), "run.epochs=2")
    run = open_run_lanes(parts)
    assert run.serializer.mode == "tune" and run.serializer.effective()
    epochs = []

    def overwritten_in_the_first_epoch(row):
        epochs.append(row["epoch"])
        Autotuner.run = overwriting

    original = Autotuner.run
    try:
        with pytest.raises(StageFailure, match="no longer in force.*overwriting"):
            run.train(0, parts.plan.total_steps, overwritten_in_the_first_epoch)
    finally:
        Autotuner.run = original
    assert set(epochs) == {0}


def overwriting(self, *args, **kwargs):
    """Somebody's idea of a launch."""


# Compilation


def lanes():
    made = [Lane(LaneSpec("drafter", number, "cpu")) for number in range(2)]
    made[1].stop = made[0].stop
    return made


def test_one_lane_compiles_at_a_time_in_any_mode():
    for mode in ("tune", "none"):
        made, serializer = lanes(), Serializer(mode)
        inside, most = 0, 0

        def compile(lane, serializer=serializer):
            nonlocal inside, most
            with serializer.compiling(lane) as wait:
                inside += 1
                most = max(most, inside)
                time.sleep(0.02)
                inside -= 1
            return wait

        assert not together(*(lambda lane=lane: compile(lane) for lane in made))
        assert most == 1


def test_a_lane_that_compiles_may_do_so_within_also_from_autograds_thread():
    first, second = lanes()
    serializer = Serializer("tune")
    order = []

    def other():
        with serializer.compiling(second) as wait:
            order.append("other")
            assert wait.seconds > 0

    with serializer.compiling(first):
        with serializer.compiling(first):
            pass
        waiting = threading.Thread(target=other, daemon=True)
        waiting.start()

        def backward():
            with serializer.compiling(first):
                time.sleep(0.05)
                order.append("backward")

        assert not together(backward)
        order.append("end")
    waiting.join(10)
    assert order == ["backward", "end", "other"]


def test_a_lane_that_waits_to_compile_wakes_when_the_run_stops():
    first, second = lanes()
    serializer = Serializer("tune")
    with serializer.compiling(first):

        def wait():
            with pytest.raises(Stopped), serializer.compiling(second):
                raise AssertionError("compiles beside another lane")

        assert not together(wait, lambda: (time.sleep(0.1), first.stop.set()), patience=5)


def test_a_failed_compilation_gives_the_turn_back():
    first, second = lanes()
    serializer = Serializer("tune")
    with pytest.raises(ValueError), serializer.compiling(first):
        raise ValueError
    with serializer.compiling(second) as wait:
        assert wait.seconds == 0


def test_lanes_may_compile_between_two_runs():
    """As an evaluation does whose shapes no step has met."""
    serializer = Serializer("tune")
    scheduler = Scheduler(graph(), works(), serializer=serializer, timings=Timings())
    scheduler.run(0, 1)
    for lane in scheduler.lanes.values():
        with serializer.compiling(lane):
            pass


# A Triton that is built otherwise


def without_a_trace(run):
    """What somebody may have wrapped around Triton's method before us."""
    return lambda self, *args, **kwargs: run(self, *args, **kwargs)


@pytest.mark.parametrize("mode", ["tune", "launch", "stage"])
def test_an_unknown_layout_makes_launches_take_turns_and_says_so(mode):
    with replaced(Autotuner, run=without_a_trace(Autotuner.run)):
        serializer = Serializer(mode)
        serializer.install()
        assert serializer.fallback is not None and "launches take turns" in serializer.fallback
        assert "Autotuner.run does without cache, nargs, prune_configs" in serializer.fallback
        assert serializer.effective() and probe() is None and not race(tuner)
        assert serializer.counts().launches == 2 and serializer.counts().launch_waited_s > 0
        serializer.uninstall()
        assert probe(timeout=10) is not None


def test_kernels_that_are_loaded_in_another_way_are_said_not_to_be_covered(monkeypatch):
    monkeypatch.delattr(CompiledKernel, "_init_handles")
    serializer = Serializer("tune")
    serializer.install()
    assert serializer.fallback is not None and "CompiledKernel has no _init_handles" in serializer.fallback
    assert serializer.effective() and probe() is None
    serializer.uninstall()


def test_state_per_thread_that_does_not_hold_falls_back_to_turns(monkeypatch):
    findings = iter([TypeError("bare"), TypeError("as before"), None])
    monkeypatch.setattr(serializer_module, "probe", lambda timeout: next(findings))
    serializer = Serializer("tune")
    serializer.install()
    assert (
        serializer.fallback is not None
        and "two launches still fail: TypeError: as before" in serializer.fallback
    )
    assert "nargs" not in vars(Autotuner) and serializer.effective()


def test_what_cannot_be_proven_stops_the_run_and_leaves_nothing_behind(monkeypatch):
    before = {name: value for name, value in vars(Autotuner).items()}
    monkeypatch.setattr(serializer_module, "probe", lambda timeout: TypeError("still"))
    serializer = Serializer("tune")
    with pytest.raises(EngineError, match=r"even one at a time \(TypeError: still;.*Install a Triton of"):
        serializer.install()
    assert dict(vars(Autotuner)) == before and not serializer.effective()


def test_a_probe_that_does_not_fit_says_so_instead_of_finding_a_race():
    def init(self, kernel):
        raise AssertionError

    with replaced(Autotuner, __init__=init), pytest.raises(EngineError, match="the race probe does not fit"):
        probe()


def test_installing_where_nothing_can_launch_imports_nothing_and_is_made_up_for_later():
    script = """
import sys
import torch
torch.cuda.is_available = lambda: False
from engine.runtime.serializer import Serializer
serializer = Serializer("tune")
serializer.install()
serializer.ensure()
assert not {"triton", "fla"} & {name.partition(".")[0] for name in sys.modules}, "imported"
assert not serializer.effective()
import triton.runtime.autotuner
serializer.ensure()
assert serializer.effective() and serializer.race_exists
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
