"""What was tuned is tuned once per machine: kept, found again, and never trusted further than that."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import timeit
from pathlib import Path

import pytest

pytest.importorskip("triton")

from counted_kernels import HERE, KERNELS, Kept, launch, load_kernels, start
from triton.runtime.autotuner import Autotuner, Config

from engine.errors import EngineError
from engine.runtime.serializer import Serializer
from engine.runtime.stub_driver import stub_driver
from engine.runtime.tuning_file import read_results

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_gpu_needed():
    with stub_driver(bench_s=0):
        yield
    assert "cache" not in vars(Autotuner), "a test left its cache installed"


@pytest.fixture
def kernels(tmp_path):
    return load_kernels(tmp_path)


@pytest.fixture
def cache(tmp_path):
    with_lines = Kept(tmp_path)
    yield with_lines
    with_lines.uninstall()


def test_a_second_process_benchmarks_nothing_and_runs_the_same_configurations(tmp_path):
    script = """
import json, sys
from pathlib import Path
import torch
import kernels_under_test as kernels
from engine.runtime.serializer import Serializer
from engine.runtime.stub_driver import stub_driver
from engine.runtime.tuning_cache import TuningCache, fingerprint

ran = []
with stub_driver(bench_s=0):
    kept = TuningCache(fingerprint(), Path(sys.argv[1]), lambda line: sys.exit(line))
    kept.install()
    for n in (8, 9):
        kernels.scale[(1,)](torch.zeros(4), n, True)
        kernels.shift[(1,)](torch.zeros(4), n)
        ran += [str(kernel.best_config) for kernel in (kernels.scale, kernels.shift)]
    kept.save()
print(json.dumps([len(kernels.benchmarks), kept.reused, kept.added, ran]))
"""
    (tmp_path / "kernels_under_test.py").write_text(KERNELS)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    first, second = (
        json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
        for _ in range(2)
    )
    assert first[:3] == [2 * 4 + 2 * 3, 0, 4]
    assert second[:3] == [0, 4, 0]
    assert first[3] == second[3]


def test_the_next_start_reuses_what_the_last_one_tuned(tmp_path):
    first, tuned, winners = start(tmp_path)
    assert (first.reused, first.added, tuned, first.lines) == (0, 2, 8, [])
    second, tuned, again = start(tmp_path, keys=(64, 128, 256))
    assert (second.reused, second.added, tuned, second.lines) == (2, 1, 4, [])
    assert winners == [(32, 4)] * 2 and again == [(32, 4)] * 3


def test_kernels_that_exist_and_keys_they_have_are_covered(tmp_path, kernels, cache):
    launch(kernels.scale, 64, True)
    cache.install()
    launch(kernels.scale, 64, True)
    launch(kernels.scale, 65, True)
    assert len(kernels.benchmarks) == 8 and cache.added == 2
    cache.save()
    cache.uninstall()
    assert start(tmp_path, keys=(64, 65))[:2][1] == 0


def test_what_tritons_own_cache_answers_is_kept_too(tmp_path, cache):
    source = KERNELS.replace("do_bench=do_bench", "do_bench=do_bench, cache_results=True")
    launch(load_kernels(tmp_path, source).scale, 64, True)
    kernels = load_kernels(tmp_path, source)
    cache.install()
    launch(kernels.scale, 64, True)
    assert (kernels.benchmarks, cache.added) == ([], 1)
    cache.save()
    assert len(read_results(cache.path, HERE)[0]) == 1


def test_a_hook_of_the_kernels_own_configuration_still_runs(tmp_path):
    source = KERNELS.replace("num_warps=warps)", "num_warps=warps, pre_hook=hook)").replace(
        "CONFIGS =", "ran = []\n\n\ndef hook(args):\n    ran.append(args['BLOCK'])\n\n\nCONFIGS ="
    )
    start(tmp_path, source)
    kernels, kept = load_kernels(tmp_path, source), Kept(tmp_path)
    kept.install()
    launch(kernels.scale, 64, True)
    kept.uninstall()
    assert (kernels.benchmarks, kernels.ran) == ([], [32])


def test_what_is_no_triton_kernel_is_left_alone(cache):
    class StandIn:
        arg_names = ["x", "n", "BLOCK"]

        def __init__(self):
            self.fn = lambda x, n, BLOCK: None

        def run(self, *args, **kwargs):
            pass

    cache.install()
    tuner = Autotuner(
        StandIn(),
        StandIn.arg_names,
        [Config({"BLOCK": block}) for block in (16, 32)],
        ["n"],
        None,
        None,
        do_bench=lambda call, quantiles: [1.0] * 3,
    )
    tuner.run(x=0, n=1, grid=(1,))
    cache.save()
    assert (len(tuner.cache), cache.added, cache.lines) == (1, 0, [])


def test_kernels_whose_configurations_fla_chooses_are_left_alone(tmp_path, monkeypatch, cache, kernels):
    start(tmp_path)
    module = sys.modules[type(kernels.scale).__module__]  # where FLA's class stands for this test
    monkeypatch.setattr(module, "FLA_CACHE_MODE", "strict", raising=False)
    cache.install()
    launch(kernels.scale, 64, True)
    launch(kernels.scale, 65, True)
    assert (len(kernels.benchmarks), cache.reused, cache.added) == (8, 0, 0)
    monkeypatch.setattr(module, "FLA_CACHE_MODE", "disabled")
    launch(kernels.scale, 128, True)
    assert (len(kernels.benchmarks), cache.reused) == (8, 1)


def test_threads_find_and_add_each_key_once(tmp_path, cache):
    start(tmp_path, keys=range(100))
    kernels = load_kernels(tmp_path)
    cache.install()
    failures, gate = [], threading.Barrier(8)
    own = kernels.scale.configs[-1]

    def lane(rank):
        try:
            gate.wait()
            for n in range(100):
                key = (n, True, "torch.float32")
                assert key in kernels.scale.cache
                assert kernels.scale.cache[key] is own
                kernels.shift.cache[rank, n] = own
                if n % 25 == rank:
                    cache.save()
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=lane, args=(rank,)) for rank in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    cache.save()
    assert failures == []
    assert (cache.reused, len(kernels.scale.cache)) == (100, 100)
    # `shift` has no such configuration, so nothing of it is kept; its entries are all there.
    assert len(kernels.shift.cache) == 800


def test_threads_that_tune_lose_no_key(tmp_path, cache, kernels):
    cache.install()
    own = kernels.scale.configs[0]

    def lane(rank):
        for n in range(50):
            kernels.scale.cache[rank, n] = own
            if n % 10 == rank:
                cache.save()

    threads = [threading.Thread(target=lane, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.save()
    (entries,) = read_results(cache.path, HERE)[0].values()
    assert len(entries) == cache.added == 400


def test_threads_that_meet_a_kernel_first_share_its_dictionary(cache, kernels):
    class Slow(dict):
        """Lets other threads run while it is copied."""

        def keys(self):
            time.sleep(0.02)
            return super().keys()

        __iter__ = None  # or it would be copied at once

    cache.install()
    vars(kernels.scale)["cache"] = Slow()
    gate, seen = threading.Barrier(4), []

    def meet():
        gate.wait()
        seen.append(kernels.scale.cache)

    threads = [threading.Thread(target=meet) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4 and len({id(entries) for entries in seen}) == 1


def test_removal_leaves_plain_dictionaries_with_all_entries(tmp_path, kernels, cache):
    launch(kernels.scale, 1, True)
    cache.install()
    launch(kernels.scale, 2, True)
    launch(kernels.shift, 3)
    held = kernels.scale.cache
    cache.uninstall()
    cache.uninstall()
    assert "cache" not in vars(Autotuner)
    assert type(kernels.scale.cache) is dict and len(kernels.scale.cache) == 2
    assert type(kernels.shift.cache) is dict and len(kernels.shift.cache) == 1
    launch(kernels.scale, 2, True)
    launch(kernels.scale, 3, True)
    assert len(kernels.benchmarks) == 4 + 4 + 3 + 4
    assert cache.added == 3
    held.clear()  # what somebody held on to is a dictionary like any other
    assert (2, True, "torch.float32") not in held
    with pytest.raises(KeyError):
        held[2, True, "torch.float32"]
    held[9, True] = kernels.scale.configs[0]
    assert (cache.added, cache.reused) == (3, 0)


def test_a_cache_can_be_installed_again_and_only_one_at_a_time(tmp_path, kernels, cache):
    cache.install()
    cache.install()
    launch(kernels.scale, 1, True)
    other = Kept(tmp_path / "other")
    with pytest.raises(EngineError, match="uninstall"):
        other.install()
    cache.uninstall()
    other.install()
    launch(kernels.scale, 1, True)
    other.uninstall()
    cache.install()
    launch(kernels.scale, 1, True)
    assert len(kernels.benchmarks) == 4
    assert (cache.added, other.added) == (1, 1)
    launch(load_kernels(tmp_path).scale, 1, True)
    assert cache.reused == 1, "what is not saved yet is known as well"


def test_a_dictionary_that_somebody_replaces_or_copies_behaves(tmp_path, kernels, cache):
    start(tmp_path, keys=(64,))
    cache.install()
    with pytest.raises(AttributeError, match="cache"):
        _ = Autotuner.__new__(Autotuner).cache
    assert launch(kernels.scale, 64, True) is kernels.scale.configs[-1]
    copied = copy.deepcopy(kernels.scale.cache)
    assert type(copied) is dict and list(copied) == [(64, True, "torch.float32")]
    kernels.scale.cache = {}
    assert launch(kernels.scale, 64, True) is kernels.scale.configs[-1]
    assert (kernels.benchmarks, cache.reused) == ([], 2)


@pytest.mark.parametrize("cache_first", [True, False])
@pytest.mark.parametrize("removed_first", [True, False])
def test_it_goes_with_another_patch_of_the_same_class(
    tmp_path, monkeypatch, cache_first, removed_first, cache
):
    """Per-thread `nargs`, a `run` that starts over once from `prune_configs`, in either order."""
    start(tmp_path, keys=(64,))
    kernels = load_kernels(tmp_path)
    of_thread, again, pruned = threading.local(), [], []

    class StartOver(BaseException):
        pass

    def install_other():
        run, prune = Autotuner.run, Autotuner.prune_configs

        def restarting(self, *args, **kwargs):
            try:
                return run(self, *args, **kwargs)
            except StartOver:
                return run(self, *args, **kwargs)

        def pruning(self, *args, **kwargs):
            pruned.append(self)
            if not again:
                again.append(self)
                raise StartOver
            return prune(self, *args, **kwargs)

        nargs = property(
            lambda self: of_thread.__dict__.get("nargs"),
            lambda self, value: setattr(of_thread, "nargs", value),
        )
        monkeypatch.setattr(Autotuner, "run", restarting)
        monkeypatch.setattr(Autotuner, "prune_configs", pruning)
        monkeypatch.setattr(Autotuner, "nargs", nargs, raising=False)

    for step in (cache.install, install_other) if cache_first else (install_other, cache.install):
        step()
    launch(kernels.scale, 64, True)
    assert (kernels.benchmarks, pruned, cache.reused) == ([], [], 1), "a reused key is a warm one"
    launch(kernels.scale, 65, True)
    assert (len(kernels.benchmarks), len(pruned), cache.added) == (4, 2, 1)
    for step in (cache.uninstall, monkeypatch.undo) if removed_first else (monkeypatch.undo, cache.uninstall):
        step()
    launch(kernels.scale, 64, True)
    assert type(kernels.scale.cache) is dict and len(kernels.scale.cache) == 2
    assert len(kernels.benchmarks) == 4


@pytest.mark.parametrize("mode", ["tune", "launch"])
@pytest.mark.parametrize("cache_first", [True, False])
def test_lanes_under_the_serializer_tune_each_key_once_and_reuse_it_later(tmp_path, mode, cache_first):
    for reused in (False, True):
        kernels, kept, serializer = load_kernels(tmp_path), Kept(tmp_path), Serializer(mode)
        failures = []

        def lane(kernels=kernels, failures=failures):
            try:
                for n in range(10):
                    launch(kernels.scale, n, True)
                    launch(kernels.shift, n)
            except BaseException as error:
                failures.append(error)

        for part in (kept, serializer) if cache_first else (serializer, kept):
            part.install()
        try:
            threads = [threading.Thread(target=lane) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            kept.save()
        finally:
            kept.uninstall()
            serializer.uninstall()
        assert failures == [] and kept.lines == []
        counts = serializer.counts()
        assert (kept.reused, kept.added, counts.cold_keys) == ((20, 0, 0) if reused else (0, 20, 20))
        assert len(kernels.benchmarks) == (0 if reused else 10 * 4 + 10 * 3)
        assert counts.tuning_waited_s == 0 or not reused


def test_a_warm_look_up_costs_less_than_half_a_microsecond_more(tmp_path, kernels, cache):
    tuner, key = kernels.scale, (64, True, "torch.float32")
    launch(tuner, 64, True)

    def as_run_does():
        return key in tuner.cache and tuner.cache[key]

    def quickest():
        return min(timeit.repeat(as_run_does, number=2000, repeat=25)) / 2000

    bare = quickest()
    cache.install()
    kept = quickest()
    print(f"a look-up costs {bare * 1e9:.0f} ns bare, {kept * 1e9:.0f} ns kept")
    assert kept - bare < 0.5e-6


def test_a_warm_launch_computes_no_hash(tmp_path, kernels, cache, monkeypatch):
    cache.install()
    launch(kernels.scale, 64, True)
    monkeypatch.setattr("engine.runtime.tuning_cache._kernel", lambda tuner: pytest.fail("hashed"))
    launch(kernels.scale, 64, True)


FLA = """
import json, sys
from pathlib import Path
from engine.runtime.serializer import Serializer
from engine.runtime.stub_driver import stub_driver
from engine.runtime.tuning_cache import TuningCache

benchmarks = []
with stub_driver(bench_s=0, on_launch=lambda it: it.benchmark and benchmarks.append(it.kernel)):
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    kept = TuningCache("stub", Path(sys.argv[1]), lambda line: sys.exit(line))
    kept.install()
    q, v = torch.randn(1, 256, 2, 64), torch.randn(1, 256, 2, 64)
    beta = torch.rand(1, 256, 2)
    chunk_gated_delta_rule(q, q, v, g=-beta, beta=beta, use_qk_l2norm_in_kernel=True)
    kept.save()
print(json.dumps([len(benchmarks), kept.reused, kept.added]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("results_in_tritons_cache", ["0", "1"])
def test_a_second_start_of_flas_gated_delta_rule_benchmarks_nothing(tmp_path, results_in_tritons_cache):
    if importlib.util.find_spec("fla") is None:
        pytest.skip("needs flash-linear-attention")
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "FLA_CACHE_RESULTS": results_in_tritons_cache,
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", FLA, str(tmp_path)]
    first, second = (
        json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
        for _ in range(2)
    )
    tuned, reused, added = first
    assert tuned > 0 and reused == 0 and added > 3
    assert second == [0, added, 0]
