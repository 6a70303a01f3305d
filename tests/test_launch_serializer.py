"""Threads launch Triton's real autotuned kernels and find only their own arguments, in every mode."""

import gc
import statistics
import threading
import time
import weakref
from collections import Counter
from contextlib import nullcontext, suppress

import pytest
import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner, Heuristics
from tuned_kernels import add_one, race, switching_every, together, tuner
from wrong_fixes import (
    LOSE_THE_RACE,
    Cached,
    arguments_per_thread_and_no_lock,
    lock_made_in_a_patched_init,
    one_plain_lock_on_both_classes,
)

from engine.errors import EngineError
from engine.runtime.graph import LaneSpec
from engine.runtime.inbox import Stop, Stopped
from engine.runtime.lane import Lane
from engine.runtime.race_probe import probe
from engine.runtime.serializer import Serializer
from engine.runtime.stub_driver import stub_driver

SAFE = ["tune", "launch", "stage"]
METHODS = ["run", "prune_configs", "_bench", "warmup", "nargs", "restore_copies"]


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch, tmp_path):
    """What a run before has left is taken off; nothing that was ever tuned is found again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    Serializer("none").install()
    yield
    Serializer("none").install()


def installed(mode):
    serializer = Serializer(mode)
    serializer.install()
    return serializer


@pytest.fixture(params=SAFE)
def serializer(request):
    made = installed(request.param)
    yield made
    made.uninstall()


# The race


def test_triton_still_loses_arguments_between_threads_and_the_day_it_does_not_the_serializer_can_go():
    error = probe(timeout=10)
    assert isinstance(error, TypeError) and "NoneType" in str(error)


def test_a_serializer_proves_itself_before_and_after_it_is_installed(serializer):
    assert serializer.race_exists and serializer.effective() and serializer.fallback is None
    assert probe() is None
    assert not race(tuner) and not race(lambda **how: tuner(kind=Cached, **how))


@pytest.mark.parametrize("fix", LOSE_THE_RACE, ids=lambda fix: fix.__name__)
def test_a_lock_that_looks_right_loses_the_race(fix):
    with fix():
        assert isinstance(race(tuner, patience=5)[0], TypeError)
    assert race(tuner, patience=5)


def test_attributes_that_new_kernels_are_made_with_do_not_protect_those_that_exist():
    kernels = []

    def make_before(**how):
        kernels.append(tuner(**how))
        return kernels[-1]

    race(make_before, patience=5)
    with lock_made_in_a_patched_init():
        assert not race(tuner)

        def there_already(**how):
            kernels[0].__dict__.update(do_bench=how["benchmark"], cache={(1,): kernels[0].configs[0]})
            return kernels[0]

        assert race(there_already, patience=5)
    installed("tune")
    assert not race(there_already)


def test_one_plain_lock_on_a_class_and_its_subclass_waits_for_itself():
    with one_plain_lock_on_both_classes():
        (error,) = together(lambda: tuner(kind=Cached).run(0, 0, 1, grid=(1,)))
        assert isinstance(error, TimeoutError)
    serializer = installed("launch")
    assert not together(lambda: tuner(kind=Cached).run(0, 0, 1, grid=(1,)))
    assert serializer.counts().cold_keys == 1


def tuned_by(threads, fix):
    """How many benchmarks one key takes when several threads meet it."""
    benchmarks = Counter()

    def benchmark(call, quantiles):
        benchmarks["all"] += 1
        call()
        time.sleep(0.005)
        return [1.0, 1.0, 1.0]

    with fix():
        kernel = tuner(benchmark=benchmark)
        assert not together(*[lambda: kernel.run(0, 0, 7, grid=(1,))] * threads)
    return benchmarks["all"]


def test_a_key_that_several_threads_meet_is_tuned_once(serializer):
    assert tuned_by(6, nullcontext) == 3  # configurations
    assert serializer.counts().cold_keys == 1
    serializer.uninstall()
    assert tuned_by(2, arguments_per_thread_and_no_lock) == 6


def restored_beside_another():
    """Two threads tune two keys of a kernel that adds one; returns their tensors. Each began with its n."""
    inside = threading.Barrier(2)
    tensors = {n: torch.full((2,), float(n)) for n in (100, 200)}

    def body(x, y, n):
        y.add_(1)
        with suppress(threading.BrokenBarrierError):
            inside.wait(0.1)  # by now the other one has copied its tensor too, if it may

    kernel = tuner(body, restore=["y"])
    raised = together(*(lambda n=n, y=y: kernel.run(0, y, n, grid=(1,)) for n, y in tensors.items()))
    return raised, {n: tensor.tolist() for n, tensor in tensors.items()}


def test_a_tensor_that_tuning_changes_gets_its_own_values_back(serializer):
    raised, tensors = restored_beside_another()
    assert not raised and tensors == {100: [101.0] * 2, 200: [201.0] * 2}


def test_arguments_per_thread_alone_restore_another_threads_tensor_in_silence():
    with arguments_per_thread_and_no_lock():
        found = [restored_beside_another() for _ in range(3)]
    assert any(tensors != {100: [101.0] * 2, 200: [201.0] * 2} for _, tensors in found)


@pytest.mark.parametrize("interval", [5e-3, 1e-5])
@pytest.mark.parametrize("threads", [2, 4, 8])
@pytest.mark.parametrize("mode", SAFE)
def test_every_launch_gets_its_own_arguments(mode, threads, interval):
    serializer = installed(mode)
    keys, rounds = 4, 12
    seen, tensors = [Counter() for _ in range(threads)], {}

    def body(x, y, n):
        y.add_(1)
        seen[x][n] += 1
        assert threading.current_thread().name == f"worker-{x}", "launched with another thread's arguments"

    kernels = [tuner(body, restore=["y"]), tuner(body, kind=Cached)]

    def work(index):
        y = tensors[index] = torch.zeros(1)
        for number in range(rounds):
            for kernel in kernels:
                kernel.run(index, y, (number + index) % keys, grid=(1,))

    with switching_every(interval):
        assert not together(*(lambda index=index: work(index) for index in range(threads)))
    counts = serializer.counts()
    assert counts.launches == threads * rounds * 2 and counts.cold_keys == keys * 2
    # The first kernel restores what its benchmarks add; each of the second's leaves its one.
    added = sum(int(tensor) for tensor in tensors.values())
    assert added == threads * rounds * 2 + keys * 3
    assert sum(sum(of_thread.values()) for of_thread in seen) == threads * rounds * 2 + keys * 3 * 2


@pytest.mark.parametrize("mode", ["none", *SAFE])
def test_real_functions_with_heuristics_launch_through_tritons_own_path(mode):
    launches = []
    with stub_driver(on_launch=launches.append, bench_s=0.002, load_s=0) as driver:
        serializer = installed(mode)
        tensor = torch.zeros(64)

        def work(index):
            driver.set_current_device(index)
            for n in (64, 65, 100 + index, 64):
                add_one[(1,)](tensor, n)

        raised = together(*(lambda index=index: work(index) for index in range(4)))
        assert bool(raised) == (mode == "none")
        serializer.uninstall()
    if mode != "none":
        assert serializer.counts().launches == 16 and serializer.counts().cold_keys == 6
        assert all(launch.device == launch.loaded_on for launch in launches)
        real = [dict(launch.arguments) for launch in launches if not launch.benchmark]
        assert Counter(arguments["n"] for arguments in real) == {64: 8, 65: 4} | dict.fromkeys(
            range(100, 104), 1
        )
        assert all(arguments["EVEN"] == (arguments["n"] % 16 == 0) for arguments in real)


def test_heuristics_around_a_kernel_are_evaluated_once_though_a_cold_launch_starts_twice(serializer):
    evaluated = []
    kernel = tuner()
    kernel.fn.run = lambda *args, **kwargs: None
    outer = Heuristics(kernel, kernel.arg_names, {"EVEN": lambda args: evaluated.append(args["n"])})
    outer.run(0, 0, 3, grid=(1,))
    outer.run(0, 0, 3, grid=(1,))
    assert evaluated == [3, 3]


# Nested and failing launches


def test_a_launch_within_a_launch_of_the_same_kernel_leaves_the_outer_ones_arguments(serializer):
    cold = []
    serializer.on_cold = lambda key: cold.append(key.key)
    found = []

    def body(x, y, n):
        if n < 10:
            kernel.run(0, 0, n + 10, grid=(1,))
            found.append(kernel.nargs["n"])

    kernel = tuner(body)
    kernel.run(0, 0, 1, grid=(1,))
    kernel.run(0, 0, 1, grid=(1,))
    assert found == [1] * 5  # in three benchmarks and two launches
    assert cold == [(11,), (1,)]
    assert kernel.nargs is None
    assert serializer.counts().launches == 2 + 5


def test_a_warm_up_within_a_launch_compiles_without_taking_the_launch_apart(serializer):
    bodies = []

    def body(x, y, n):
        bodies.append(n)
        kernel.warmup(0, 0, n + 10, grid=(1,))

    kernel = tuner(body, warm=(1,))
    warmed = []
    kernel.fn.warmup = lambda x, y, n, BLOCK, **options: warmed.append((n, BLOCK))
    kernel.run(0, 0, 1, grid=(1,))
    assert bodies == [1] and warmed == [(11, 16), (11, 32), (11, 64)]
    assert serializer.counts().launches == 1


class Boom(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, Boom])
@pytest.mark.parametrize("when", ["tuning", "launching"])
def test_a_failed_launch_keeps_no_tensor_and_no_lock(serializer, when, error):
    def fail(*args, **options):
        raise error

    def benchmark(call, quantiles):
        if when == "tuning":
            call()
        return [1.0, 1.0, 1.0]

    kernel = tuner(fail, benchmark=benchmark, restore=["x"])

    def launch():
        tensor = torch.zeros(1)
        with pytest.raises(error):
            kernel.run(tensor, 0, 5, grid=(1,))
        return weakref.ref(tensor)

    kept = launch()
    assert kept() is None and kernel.nargs is None
    assert not serializer._states.mine.nargs and not serializer._states.mine.restore_copies
    works = tuner()
    assert not together(lambda: works.run(0, 0, 1, grid=(1,)), lambda: works.run(0, 0, 2, grid=(1,)))


def test_without_a_serializer_a_failed_launch_keeps_its_tensors():
    def fail(*anything):
        raise ValueError

    kernel, tensor = tuner(fail, warm=(5,)), torch.zeros(1)
    kept = weakref.ref(tensor)
    with pytest.raises(ValueError):
        kernel.run(tensor, 0, 5, grid=(1,))
    del tensor
    gc.collect()
    assert kept() is not None


class Alone(Autotuner):
    """Launches and tunes all by itself."""

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        n = self.nargs["n"]
        if (n,) not in self.cache:
            for config in self.configs:
                self._bench(*args, config=config, **kwargs)
            self.cache[(n,)] = self.configs[0]
        self.fn.run(*args, **kwargs, **self.cache[(n,)].all_kwargs())
        self.nargs = None


class PrunesAlone(Autotuner):
    def prune_configs(self, kwargs):
        return self.configs


@pytest.mark.parametrize("kind", [Alone, PrunesAlone])
def test_a_subclass_that_does_everything_itself_launches_one_at_a_time(kind):
    assert race(lambda **how: tuner(kind=kind, **how), patience=5)
    serializer = installed("tune")
    assert not race(lambda **how: tuner(kind=kind, **how))
    assert serializer.counts().launch_waited_s > 0
    run = vars(kind).get("run")
    serializer.uninstall()
    assert vars(kind).get("run") is not run
    assert race(lambda **how: tuner(kind=kind, **how), patience=5)


def test_a_subclass_that_is_imported_later_is_covered_from_the_next_check_on():
    serializer = installed("tune")

    class Later(Alone):
        def run(self, *args, **kwargs):
            self.fn.run(*args, BLOCK=16)

    before = Later.run
    serializer.ensure()
    assert Later.run is not before
    serializer.ensure()
    assert serializer.effective()
    serializer.uninstall()
    assert Later.run is before


# Waiting, counting, cost


def test_known_keys_are_launched_while_another_thread_tunes():
    installed("tune")
    tuning, done = threading.Event(), threading.Event()

    def benchmark(call, quantiles):
        tuning.set()
        assert done.wait(10), "the launch with a known key waited for the tuning"
        return [1.0, 1.0, 1.0]

    kernel = tuner(benchmark=benchmark, warm=(1,))

    def launch():
        tuning.wait(10)
        kernel.run(0, 0, 1, grid=(1,))
        done.set()

    assert not together(lambda: kernel.run(0, 0, 2, grid=(1,)), launch)


@pytest.mark.parametrize(("mode", "alone"), [("tune", False), ("stage", False), ("launch", True)])
def test_launches_with_known_keys_overlap_unless_the_mode_is_launch(mode, alone):
    serializer = installed(mode)
    inside = most = 0
    lock = threading.Lock()

    def body(x, y, n):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with lock:
            inside -= 1

    kernel = tuner(body, warm=(1,))
    assert not together(*[lambda: kernel.run(0, 0, 1, grid=(1,))] * 4)
    assert (most == 1) == alone
    assert (serializer.counts().launch_waited_s > 0) == alone


@pytest.mark.parametrize("mode", ["tune", "stage"])
def test_nobody_waits_at_all_once_every_key_is_known(mode):
    serializer = installed(mode)
    kernel = tuner()
    for n in range(4):
        kernel.run(0, 0, n, grid=(1,))
    before = serializer.counts()
    with switching_every(1e-5):
        assert not together(*[lambda: [kernel.run(0, 0, n % 4, grid=(1,)) for n in range(500)]] * 4)
    since = serializer.counts() - before
    assert since.launches == 2000
    assert since.tuning_waited_s == since.launch_waited_s == since.tuning_s == since.cold_keys == 0


def test_counts_tell_tunings_their_seconds_and_the_waits_for_them(serializer):
    cold = []
    serializer.on_cold = lambda key: cold.append((key, threading.current_thread().name))

    def benchmark(call, quantiles):
        call()
        time.sleep(0.01)
        return [1.0, 1.0, 1.0]

    kernel = tuner(benchmark=benchmark)
    assert not together(*(lambda n=n: kernel.run(0, 0, n, grid=(1,)) for n in (1, 2, 2)))
    counts = serializer.counts()
    assert counts.launches == 3 and counts.cold_keys == 2 and 0.06 <= counts.tuning_s < 5
    assert sorted(key.key for key, _ in cold) == [(1,), (2,)]
    assert all(key.kernel == "scale" and key.thread == thread for key, thread in cold)
    assert sum(key.seconds for key, _ in cold) == pytest.approx(counts.tuning_s, abs=0.01)
    assert counts.tuning_waited_s + counts.launch_waited_s > 0.03
    by_thread = [serializer.counts(f"worker-{number}") for number in range(3)]
    assert [each.launches for each in by_thread] == [1, 1, 1]
    assert sum(each.cold_keys for each in by_thread) == 2


def test_a_result_read_from_tritons_cache_folder_is_no_tuning():
    with stub_driver(bench_s=0, load_s=0):  # with an empty folder
        serializer = installed("tune")
        add_one.cache_results = True
        try:
            add_one[(1,)](torch.zeros(64), 64)
            assert serializer.counts().cold_keys == 1
            add_one.cache.clear()
            add_one[(1,)](torch.zeros(64), 64)
        finally:
            add_one.cache_results = False
            serializer.uninstall()
    assert serializer.counts().cold_keys == 1 and serializer.counts().launches == 2


def test_a_launch_with_a_known_key_costs_less_than_5_microseconds_more():
    kernel = tuner(warm=(1,))

    def each(count=2000):  # in this thread's own time: other processes want the cores too
        begin = time.thread_time()
        for _ in range(count):
            kernel.run(0, 0, 1, grid=(1,))
        return (time.thread_time() - begin) / count * 1e6

    bare, tuned = [], []
    for _ in range(9):
        serializer = Serializer("none")
        serializer.install()
        bare.append(each())
        serializer = installed("tune")
        tuned.append(each())
        serializer.uninstall()
    assert min(tuned) - min(bare) < 5, f"{min(bare):.2f} µs bare, {min(tuned):.2f} µs tuned"
    assert statistics.median(tuned) / statistics.median(bare) < 4


def test_a_thread_that_waits_for_a_tuning_wakes_when_the_run_stops(serializer):
    stop, tuning, end = Stop(), threading.Event(), threading.Event()

    def benchmark(call, quantiles):
        tuning.set()
        end.wait(30)
        return [1.0, 1.0, 1.0]

    kernel = tuner(benchmark=benchmark)

    def wait():
        tuning.wait(10)
        begin = time.perf_counter()
        try:
            with pytest.raises(Stopped):
                kernel.run(0, 0, 2, grid=(1,))
        finally:
            end.set()
        assert time.perf_counter() - begin < 2

    def end_the_run():
        tuning.wait(10)
        time.sleep(0.1)
        stop.set()

    with serializer.running(stop):
        assert not together(lambda: kernel.run(0, 0, 1, grid=(1,)), wait, end_the_run)
    kernel.run(0, 0, 3, grid=(1,))  # the lock is free, and no run is left that could be over


# Stages


def lanes(count=2):
    made = [Lane(LaneSpec("target", number, "cpu")) for number in range(count)]
    for lane in made[1:]:
        lane.stop = made[0].stop
    return made


def test_another_thread_may_launch_and_tune_while_a_forward_has_its_turn():
    serializer = installed("stage")
    kernel = tuner()
    with serializer.launching(lanes()[0]):
        assert not together(lambda: kernel.run(0, 0, 1, grid=(1,)), patience=5)
    assert serializer.counts().cold_keys == 1


def test_waiting_for_another_lanes_forward_is_counted():
    serializer = installed("stage")
    first, second = lanes()
    inside = threading.Event()

    def hold():
        with serializer.launching(first):
            inside.set()
            time.sleep(0.05)

    def wait():
        inside.wait(5)
        with serializer.launching(second):
            pass

    assert not together(hold, wait)
    assert serializer.counts("worker-1").stage_waited_s > 0.02
    assert serializer.counts("worker-0").stage_waited_s == 0


# Installation


def test_removal_leaves_tritons_classes_as_they_were():
    def state():
        return [{name: vars(kind).get(name) for name in (*METHODS, "_init_handles")} for kind in kinds]

    kinds = (Autotuner, CompiledKernel, Cached)
    before, kernel = state(), tuner()
    kernel.run(0, 0, 1, grid=(1,))
    serializer = installed("tune")
    serializer.install()
    assert state() != before
    kernel.run(0, 0, 2, grid=(1,))
    assert len(kernel.cache) == 2 and kernel.nargs is None
    serializer.uninstall()
    serializer.uninstall()
    assert state() == before and not serializer.effective()
    kernel.run(0, 0, 3, grid=(1,))
    assert probe(timeout=10) is not None
    assert serializer.counts().launches == 1


def test_a_second_serializer_takes_the_firsts_place_until_the_firsts_next_run():
    first = installed("tune")
    second = installed("launch")
    assert second.effective() and not first.effective()
    with pytest.raises(EngineError, match="another serializer was installed in this process"):
        first.ensure()
    with first.running(Stop()):
        assert first.effective() and not second.effective()
        assert probe() is None
    second.uninstall()  # has no part in it any more
    assert first.effective()


def test_whoever_overwrites_the_patch_is_named_at_the_next_check():
    original = Autotuner.run
    serializer = installed("tune")
    serializer.ensure()

    def run(self, *args, **kwargs):
        return None

    run.__module__ = "somebody.profiler"
    Autotuner.run = run
    try:
        assert not serializer.effective()
        with pytest.raises(
            EngineError, match=r'"tune" is no longer in force.*Autotuner.run is now somebody\.profiler\.'
        ):
            serializer.ensure()
        serializer.uninstall()
        assert Autotuner.run is run  # not ours to take away
    finally:
        Autotuner.run = original


def test_a_serializer_is_installed_in_the_main_thread_only():
    (error,) = together(lambda: Serializer("tune").install())
    assert isinstance(error, EngineError) and "install it in the main thread" in str(error)
    serializer = installed("tune")
    assert not together(serializer.install)  # there is nothing to do


def test_mode_none_takes_off_what_is_installed():
    before = installed("tune")
    serializer = installed("none")
    assert not before.effective() and not serializer.effective()
    serializer.ensure()
    assert probe(timeout=10) is not None
