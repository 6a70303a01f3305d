"""The stress finds what threads get wrong and nothing else; FLA runs over the stub in a process apart."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from engine.errors import InputError
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.stress import open_workers, stress
from engine.stress_calls import (
    PERIOD,
    TOKENS,
    Call,
    calls_of_round,
    forms_of_round,
    not_finite,
    tensor_difference,
    values,
)
from engine.stress_rounds import Ground, Stress, StressStalled, Worker, forget_keys, run_round

triton = pytest.importorskip("triton", reason="needs Triton")

import triton.language as tl  # noqa: E402

from engine.runtime.stub_driver import Launch, kernels, stub_driver  # noqa: E402

ROOT = Path(__file__).parent.parent

# Each case runs in its own try, and tells its report or its error.
OVER_THE_STUB = """
import contextlib, io, json, os, sys
os.environ["FLA_CACHE_RESULTS"] = "1"   # must not hide the race: tuning is never read from disk
import torch
from rich.console import Console
import engine.stress
from engine.runtime.stub_driver import stub_driver
from engine.stress_calls import Form, load_operations

unneeded = ("fla.layers", "fla.models")   # FLA's kernels are imported more quickly alone
sys.modules.update(dict.fromkeys(unneeded))
with stub_driver():
    load_operations()
for name in unneeded:
    del sys.modules[name]

REAL = engine.stress.load_operations

def outcome(mode, devices=None, rounds=1):
    written = io.StringIO()
    try:
        with contextlib.redirect_stdout(written):
            engine.stress.stress(
                120,
                mode=mode,
                devices=devices,
                console=Console(file=io.StringIO()),
                as_json=True,
                rounds=rounds,
            )
        error = None
    except Exception as caught:
        error = {"type": type(caught).__name__, "exit_code": caught.exit_code, "text": str(caught)}
    text = written.getvalue()
    return {"error": error, "report": json.loads(text) if text else None}

def planted(fault):
    def load():
        operations = dict(REAL())
        healthy = operations["convolution"]
        operations["convolution"] = lambda form, device: fault(healthy, form, device)
        return operations
    engine.stress.load_operations = load
    try:
        return outcome("tune")
    finally:
        engine.stress.load_operations = REAL

def another_length(healthy, form, device):
    import threading
    alone = threading.current_thread().name == "alone"
    return healthy(form if alone else Form(form.batch, form.length + 1, form.dtype), device)

def no_memory(healthy, form, device):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

results = {mode: outcome(mode) for mode in ("launch", "stage", "none")}
results["tune"] = outcome("tune", ["stub:0", "stub:0", "stub:1"], rounds=2)
results["another length"] = planted(another_length)
results["no memory"] = planted(no_memory)
sys.stdout.write(json.dumps(results))
"""


@pytest.fixture(scope="module")
def over_the_stub() -> dict[str, Any]:
    """What a stress says over the stub driver, by case."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("FLA_CACHE_MODE", None)
    done = subprocess.run(
        [sys.executable, "-c", OVER_THE_STUB], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("mode", ["tune", "launch", "stage"])
def test_real_fla_calls_from_two_threads_agree_with_one_thread_in_each_mode(
    over_the_stub: dict[str, Any], mode: str
) -> None:
    case = over_the_stub[mode]
    assert case["error"] is None
    report = case["report"]
    assert report["passed"] and report["mode"] == mode and not report["findings"]
    first, second, *others = report["threads"]
    assert report["cold_keys"] > 0 and report["compared"] > 0 and first["launches"] > first["calls"] > 0
    assert sum(row["errors"] for row in report["threads"]) == 0
    assert sum(row["cold_keys"] for row in report["threads"]) == report["cold_keys"], "a key was tuned twice"
    alone = others[-1]
    assert alone["thread"] == "alone" and alone["cold_keys"] == 0 and alone["tuning_waited_s"] == 0


def test_every_call_of_every_lane_is_compared_with_lanes_that_share_a_device_too(
    over_the_stub: dict[str, Any],
) -> None:
    report = over_the_stub["tune"]["report"]
    assert report["rounds"] == 2 and report["distinct_calls"] == 15 and report["packed_calls"] == 5
    assert report["compared"] == 45
    assert [(row["thread"], row["calls"]) for row in report["threads"]] == [
        ("target.0@stub:0", 45),
        ("target.1@stub:0", 45),
        ("target.2@stub:1", 45),
        ("alone", 30),
    ]


def test_without_a_serializer_the_race_is_found(over_the_stub: dict[str, Any]) -> None:
    case = over_the_stub["none"]
    assert case["error"]["type"] == "DifferenceFound" and case["error"]["exit_code"] == 7
    assert not case["report"]["passed"] and case["report"]["findings"]
    errors = [row["first_error"] for row in case["report"]["threads"] if row["first_error"]]
    assert any("'NoneType' object is not a mapping" in error for error in errors)


def test_a_call_that_differs_in_threads_is_found_and_named(over_the_stub: dict[str, Any]) -> None:
    case = over_the_stub["another length"]
    assert case["error"]["exit_code"] == 7
    assert case["report"]["errors"] == 0
    found = case["report"]["findings"][0]
    assert "convolution" in found and "causal_conv1d_fwd_kernel" in found and "T " in found


def test_out_of_memory_has_its_own_exit_code(over_the_stub: dict[str, Any]) -> None:
    case = over_the_stub["no memory"]
    assert case["error"]["type"] == "OutOfMemory" and case["error"]["exit_code"] == 3


def small_stress(run: Any, *, workers: int = 2, stall_after: float = 60.0) -> Stress:
    """A stress on CPU lanes of operations that compute something; no kernel, no Triton."""
    lanes = [Lane(LaneSpec("target", index, "cpu")) for index in range(workers)]
    return Stress(
        serializer=Serializer("none"),
        workers=[Worker(lane.name, f"cpu:{index}", lane) for index, lane in enumerate(lanes)],
        alone=Worker("alone", "cpu:0", lanes[0]),
        ground=Ground(operations=("sum",), run=run, difference=tensor_difference, suspicion=not_finite),
        tuners=[],
        stall_after=stall_after,
    )


def outputs(worker: Worker, call: Call) -> tuple[Tensor, ...]:
    return (torch.arange(call.form.length, dtype=torch.float32) * call.form.batch,)


def test_equal_outputs_are_no_finding() -> None:
    state = small_stress(outputs)
    for _ in range(4):
        run_round(state, time.monotonic() + 60)
    assert state.findings == [] and state.errors == 0
    assert state.rounds == 4 and state.compared == 2 * len(state.distinct) > 0


def test_one_bit_that_differs_between_a_thread_and_alone_is_found() -> None:
    def altered(worker: Worker, call: Call) -> tuple[Tensor, ...]:
        (output,) = outputs(worker, call)
        if threading.current_thread().name == "target.1@cpu":
            output.view(torch.int32)[7] ^= 1
        return (output,)

    state = small_stress(altered)
    run_round(state, time.monotonic() + 60)
    assert state.differences == len(state.distinct) == 1
    assert "target.1@cpu" in state.findings[0] and "1 of" in state.findings[0]


def test_a_device_that_differs_from_the_first_is_found_with_both_alone() -> None:
    def altered(worker: Worker, call: Call) -> tuple[Tensor, ...]:
        return (outputs(worker, call)[0] + (worker.device == "cpu:1"),)

    state = small_stress(altered)
    run_round(state, time.monotonic() + 60)
    assert state.differences == 1 and "cpu:1 differs from cpu:0, both alone" in state.findings[0]


def test_a_call_that_changes_from_one_time_to_the_next_is_told_from_a_race() -> None:
    def restless(worker: Worker, call: Call) -> tuple[Tensor, ...]:
        return (torch.tensor([float(time.perf_counter_ns())], dtype=torch.float64),)

    state = small_stress(restless, workers=1)
    run_round(state, time.monotonic() + 60)
    assert any("so this is no race" in finding for finding in state.findings)
    assert any("differs from this thread's first result" in finding for finding in state.findings)


def test_an_output_that_is_not_finite_is_found_although_all_agree() -> None:
    def broken(worker: Worker, call: Call) -> tuple[Tensor, ...]:
        return (outputs(worker, call)[0] / 0,)

    state = small_stress(broken)
    run_round(state, time.monotonic() + 60)
    assert "not finite" in state.findings[0]


def test_a_thread_that_leaves_early_is_an_error() -> None:
    def leave(worker: Worker, call: Call) -> tuple[Tensor, ...]:
        if worker.name == "target.1@cpu" and threading.current_thread().name != "alone":
            raise SystemExit
        return outputs(worker, call)

    state = small_stress(leave)
    run_round(state, time.monotonic() + 60)
    assert state.errors == 1 and "target.1@cpu" in state.findings[0]


def test_a_thread_without_progress_ends_the_stress_with_its_name() -> None:
    go_on = threading.Event()

    def hang(worker: Worker, call: Call) -> tuple[Tensor, ...]:
        if worker.name == "target.1@cpu":
            go_on.wait(30)
        return outputs(worker, call)

    state = small_stress(hang, stall_after=0.3)
    try:
        with pytest.raises(StressStalled, match=r"target\.1@cpu at sum") as caught:
            run_round(state, time.monotonic() + 60)
    finally:
        go_on.set()
    assert caught.value.exit_code == 5 and caught.value.stuck == ("target.1@cpu",)


def test_a_tuning_that_ends_elsewhere_is_progress_for_those_who_wait_for_it() -> None:
    def slow(worker: Worker, call: Call) -> tuple[Tensor, ...]:
        for _ in range(3):
            time.sleep(0.2)
            state.tuned_at = time.monotonic()
        return outputs(worker, call)

    state = small_stress(slow, workers=1, stall_after=0.5)
    run_round(state, 0.0)
    assert state.compared == 1


def test_tuned_keys_are_forgotten_in_every_round_and_the_rest_of_a_kernel_is_not() -> None:
    state = small_stress(outputs)
    state.tuners = [SimpleNamespace(cache={"key": index}, name=index) for index in range(20)]
    state.rounds = 1
    forget_keys(state)
    assert 0 < sum(not tuner.cache for tuner in state.tuners) < 20
    state.rounds = 2
    forget_keys(state)
    assert not any(tuner.cache for tuner in state.tuners)


def test_rounds_bring_new_cold_keys_and_begin_small() -> None:
    assert len(forms_of_round(0)) == 1
    forms = [form for number in range(20) for form in forms_of_round(number)]
    packed = [form.boundaries for form in forms if form.boundaries]
    assert len(packed) == 19
    assert all(list(cuts) == sorted(set(cuts)) and cuts[0] == 0 for cuts in packed)
    assert all(form.batch == 1 and form.boundaries[-1] == form.length for form in forms if form.boundaries)
    assert {form.dtype for form in forms} == {"bfloat16", "float16"}
    assert {form.batch for form in forms} == {1, 2, 3, 4}
    assert {form.state for form in forms} == {True, False}
    assert {-(-form.batch * form.length * 16 // 65_536) for form in forms} >= {1, 2}, "one l2norm key only"
    assert all(form.batch * form.length <= TOKENS for form in forms)
    assert calls_of_round(5, ["a", "b"]) == calls_of_round(5, ["a", "b"])


def test_a_difference_is_told_in_numbers_and_nan_equals_itself() -> None:
    output = torch.tensor([1.0, float("nan"), 3.0], dtype=torch.bfloat16)
    assert tensor_difference((output,), (output.clone(),)) is None
    other = output.clone()
    other[2] = 3.5
    assert tensor_difference((output,), (other,)) == "output 0: 1 of 3 elements, by up to 0.5"
    assert "[3]" in str(tensor_difference((output,), (output[:2],)))
    zero = torch.zeros(2)
    assert tensor_difference((zero,), (-zero,)) is not None, "signs of zero are bits too"


@pytest.mark.parametrize("devices", [["cuda:99"], ["stub:0", "cuda:0"], ["stub:x"], ["cpu"], []])
def test_devices_that_cannot_be_stressed_are_refused_by_name(devices: list[str]) -> None:
    with pytest.raises(InputError, match="--devices"):
        open_workers(devices)


def test_what_could_not_find_anything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--seconds"):
        stress(0, mode="tune", console=Console())
    monkeypatch.setenv("FLA_CACHE_MODE", "fuzzy")
    with pytest.raises(InputError, match="FLA_CACHE_MODE=fuzzy"):
        stress(1, mode="tune", devices=["stub:0"], console=Console())


@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (16, 32)], key=["n"])
@triton.jit
def _double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < n) * 2, mask=place < n)


def test_the_stub_driver_records_launches_and_leaves_nothing_behind() -> None:
    before = (dict(vars(triton.runtime.driver)), triton.compiler.compile, torch.cuda.get_device_capability)
    folder = os.environ.get("TRITON_CACHE_DIR")
    launches: list[Launch] = []
    x, cuts = torch.zeros(40), torch.tensor([0, 40])
    with stub_driver(bench_s=0, load_s=0, on_launch=launches.append) as driver:
        driver.device = 3
        _double[(2,)](x, cuts, 40)
        assert len(_double.cache) == 1
        assert os.environ["TRITON_CACHE_DIR"] != folder
        _double.fn.device_caches[5] = _double.fn.device_caches[3]
        driver.device = 5
        _double[(2,)](x, cuts, 40)
    mixed_up = launches.pop()
    assert (mixed_up.device, mixed_up.loaded_on) == (5, 3)
    last = launches[-1]
    assert (last.kernel, last.device, last.loaded_on, last.grid) == ("_double", 3, 3, (2, 1, 1))
    assert [launch.benchmark for launch in launches] == [True] * 4 + [False]
    assert dict(last.arguments)["x"] == ((40,), (1,), "torch.float32")
    assert dict(last.arguments)["y"] == ((2,), (1,), "torch.int64", (0, 40))
    assert dict(last.arguments)["BLOCK"] == 16 and dict(last.options)["num_warps"] == 4
    assert (
        dict(vars(triton.runtime.driver)),
        triton.compiler.compile,
        torch.cuda.get_device_capability,
    ) == before
    assert os.environ.get("TRITON_CACHE_DIR") == folder
    assert not _double.cache and not _double.fn.device_caches and "do_bench" not in vars(_double)
    assert "compile" not in vars(_double.fn), "what is compiled next would be a stub"
    assert _double in kernels()[1]


def test_what_a_launch_callback_raises_is_raised_and_the_stub_is_gone_after_it() -> None:
    def refuse(launch: Launch) -> None:
        raise MemoryError("out of memory")

    active = dict(vars(triton.runtime.driver))
    with pytest.raises(MemoryError), stub_driver(on_launch=refuse):
        _double[(1,)](torch.zeros(4), torch.zeros(4), 4)
    assert dict(vars(triton.runtime.driver)) == active


@pytest.mark.gpu
def test_values_are_the_same_on_every_device_and_in_every_call() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    drawn = [values(3, PERIOD, dtype="bfloat16", device=device, salt=2) for device in devices * 2]
    assert all(tensor_difference((drawn[0],), (other,)) is None for other in drawn)
    assert -1 <= float(drawn[0].min()) < -0.9 and 0.9 < float(drawn[0].max()) <= 1
    assert abs(float(drawn[0].float().mean())) < 0.01
    assert not torch.equal(drawn[0][0], drawn[0][1].roll(1))


@pytest.mark.gpu
@pytest.mark.slow
def test_on_gpus_threads_get_the_bits_that_one_thread_gets(tmp_path: Path) -> None:
    code = (
        "from rich.console import Console; from engine.stress import stress; "
        "stress(60, mode='tune', console=Console(), as_json=True)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["passed"] and report["cold_keys"] > 0 and report["compared"] > 0
