"""The file of tuning results: what it holds for, what is believed of it, who may write it."""

import fcntl
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from counted_kernels import HERE, KERNELS, Kept, launch, load_kernels, start

import engine.runtime.tuning_file
from engine.runtime.stub_driver import stub_driver
from engine.runtime.tuning_cache import cache_folder, fingerprint
from engine.runtime.tuning_file import read_results, rewrite_results, tuning_file

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_gpu_needed():
    with stub_driver(bench_s=0):
        yield


@pytest.fixture
def kernels(tmp_path):
    return load_kernels(tmp_path)


@pytest.fixture
def cache(tmp_path):
    with_lines = Kept(tmp_path)
    yield with_lines
    with_lines.uninstall()


@pytest.mark.parametrize(
    "change",
    [
        dict(source=KERNELS.replace("tl.store(x, n)", "tl.store(x, n + 1)")),
        dict(source=KERNELS.replace("for warps in (2, 4)", "for warps in (2, 4, 8)")),
        dict(source=KERNELS.replace("for block in (16, 32)", "for block in (32, 16)")),
        dict(source=KERNELS.replace("def scale", "def scale_more").replace("\nimport", "\nimport", 1)),
        dict(fingerprint="another GPU-triton3"),
        dict(fingerprint="one GPU-triton4"),
    ],
    ids=["source", "configurations", "order", "name", "kind of GPU", "versions"],
)
def test_nothing_is_reused_across_a_change_of(tmp_path, change):
    start(tmp_path)
    if "scale_more" in change.get("source", ""):
        change["source"] += "\nscale = scale_more\n"
    kept, tuned, _ = start(tmp_path, **change)
    assert kept.reused == 0 and tuned >= 8 and kept.lines == []
    assert start(tmp_path)[0].reused == 2, "what it was before is kept"


def test_a_variable_that_changes_what_triton_compiles_counts(tmp_path, monkeypatch):
    start(tmp_path)
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert start(tmp_path)[0].reused == 0


def test_keys_that_look_alike_are_told_apart(tmp_path, kernels, cache):
    look_alikes = [(1,), ("1",), ((1,),), ("(1,)",), (None,), ("None",), (), (1.5,), ("a', 'b",), ("a", "b")]
    cache.install()
    for index, key in enumerate(look_alikes):
        kernels.scale.cache[key] = kernels.scale.configs[index % 4]
    cache.save()
    cache.uninstall()
    kernels, next_start = load_kernels(tmp_path), Kept(tmp_path)
    next_start.install()
    try:
        found = [kernels.scale.cache[key] for key in look_alikes]
    finally:
        next_start.uninstall()
    assert found == [kernels.scale.configs[index % 4] for index in range(len(look_alikes))]


def written(cache_path):
    return json.loads(cache_path.read_text())


@pytest.mark.parametrize(
    "damage, found",
    [
        (lambda text: "", "no JSON"),
        (lambda text: text[: len(text) // 2], "no JSON"),
        (lambda text: text.replace('"kernels"', '"\udcff'), "no JSON"),
        (lambda text: "[1, 2]", "schema is None"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "schema is 2"),
        (lambda text: text.replace(HERE, "elsewhere"), "fingerprint is 'elsewhere'"),
        (lambda text: text.replace('"kernels"', '"colonels"'), "no table `kernels`"),
    ],
    ids=["empty", "truncated", "bytes", "list", "schema", "foreign", "renamed"],
)
def test_a_file_that_cannot_be_used_costs_a_line_and_a_tuning_and_is_mended(tmp_path, damage, found):
    path = start(tmp_path)[0].path
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    kept, tuned, _ = start(tmp_path)
    assert (kept.reused, tuned) == (0, 8)
    assert len(kept.lines) == 1 and found in kept.lines[0] and str(path) in kept.lines[0]
    assert start(tmp_path)[:2][1] == 0


@pytest.mark.parametrize(
    "entry",
    [{"BLOCK": 64, "num_warps": 4}, {"BLOCK": 32}, {}, {"BLOCK": [32]}, "BLOCK", None, 7],
    ids=["foreign", "short", "empty", "nested", "text", "null", "number"],
)
def test_an_entry_that_is_none_of_the_kernels_own_is_dropped_and_the_rest_kept(tmp_path, entry):
    path = start(tmp_path)[0].path
    content = written(path)
    (entries,) = content["kernels"].values()
    entries["(64, True, 'torch.float32')"] = entry
    path.write_text(json.dumps(content))
    kept, tuned, winners = start(tmp_path)
    assert (kept.reused, kept.added, tuned, winners) == (1, 1, 4, [(32, 4)] * 2)
    assert len(kept.lines) == 1 and "dropped" in kept.lines[0] and "scale" in kept.lines[0]
    again = start(tmp_path)[0]
    assert (again.reused, again.lines) == (2, []), "the file is mended"


def test_a_kernel_that_is_no_table_is_dropped_and_the_rest_kept(tmp_path, cache):
    path = start(tmp_path)[0].path
    content = written(path)
    content["kernels"]["something"] = ["else"]
    path.write_text(json.dumps(content))
    kept, tuned, _ = start(tmp_path)
    assert (kept.reused, tuned) == (2, 0)
    assert len(kept.lines) == 1 and "something" in kept.lines[0]


def test_an_entry_that_stays_wrong_leaves_the_file_even_if_its_key_is_not_tuned_again(tmp_path, cache):
    path = start(tmp_path)[0].path
    path.write_text(path.read_text().replace('"BLOCK": 32', '"BLOCK": 31'))
    kernels = load_kernels(tmp_path)
    cache.install()
    assert (64, True, "torch.float32") not in kernels.scale.cache
    cache.save()
    (entries,) = written(path)["kernels"].values()
    assert list(entries) == ["(128, True, 'torch.float32')"]


@pytest.mark.parametrize(
    "source, argument",
    [
        (KERNELS, torch.float32),
        (KERNELS.replace('{"BLOCK": block}', '{"BLOCK": block, "KIND": tl.float32}'), True),
        (KERNELS.replace('{"BLOCK": block}', '{"BLOCK": block, "KIND": (1, 2)}'), True),
        (KERNELS.replace("num_warps=warps)", "num_warps=2, pre_hook=lambda args: None)"), True),
    ],
    ids=["key", "object", "tuple", "hook"],
)
def test_what_a_file_cannot_tell_apart_is_tuned_anew_and_said_once(tmp_path, cache, source, argument):
    kernels = load_kernels(tmp_path, source)
    cache.install()
    for n in (1, 2):
        tuner = kernels.scale
        tuner.cache[n, argument, "torch.float32"] = tuner.configs[-1]
    cache.save()
    assert (cache.added, cache.path.exists(), len(cache.lines)) == (0, False, 1)
    assert "scale" in cache.lines[0] and "tunes it anew" in cache.lines[0]


WRITER = """
import sys
from pathlib import Path
from engine.runtime.tuning_file import rewrite_results
for number in range(20):
    rewrite_results(Path(sys.argv[1]), "here", {"kernel": {f"{sys.argv[2]} {number}": {"BLOCK": 16}}}, {})
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "tuning" / "here.json"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    results, lines = read_results(path, "here")
    assert lines == []
    assert set(results["kernel"]) == {f"{rank} {number}" for rank in range(4) for number in range(20)}


def test_what_another_process_wrote_since_the_start_is_kept(tmp_path, cache, kernels):
    cache.install()
    start_elsewhere = {"elsewhere@1": {"(1,)": {"BLOCK": 8}}}
    rewrite_results(cache.path, HERE, start_elsewhere, {})
    launch(kernels.scale, 64, True)
    cache.save()
    assert len(read_results(cache.path, HERE)[0]) == 2


def test_a_file_that_another_process_does_not_let_go_of_is_written_next_time(
    tmp_path, cache, kernels, monkeypatch
):
    monkeypatch.setattr(engine.runtime.tuning_file, "LOCK_PATIENCE_S", 0.05)
    cache.install()
    launch(kernels.scale, 64, True)
    cache.path.parent.mkdir()
    with cache.path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache.save()
        assert not cache.path.exists() and "another process" in cache.lines[0]
    cache.save()
    assert len(cache.lines) == 1 and len(read_results(cache.path, HERE)[0]) == 1


def test_a_folder_that_cannot_be_used_costs_lines_not_the_run(tmp_path, kernels):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    kept = Kept(in_the_way)
    kept.install()
    launch(kernels.scale, 64, True)
    kept.save()
    kept.save()
    kept.uninstall()
    assert len(kernels.benchmarks) == 4
    assert len(kept.lines) == 2 and all(str(in_the_way) in line for line in kept.lines)


def test_nothing_new_writes_nothing(tmp_path):
    path = start(tmp_path)[0].path
    path.chmod(0o600)
    before = path.stat()
    assert start(tmp_path)[0].reused == 2
    assert path.stat().st_ino == before.st_ino


def test_the_cache_folder_is_the_users_unless_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_ENGINE_CACHE", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "named"
    monkeypatch.delenv("DFLASH_ENGINE_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "dflash-engine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "dflash-engine"


def test_a_fingerprint_names_gpu_and_versions_and_can_name_a_file(tmp_path, monkeypatch):
    import triton

    found = fingerprint()
    assert f"torch{torch.__version__}" in found and f"triton{triton.__version__}" in found
    if not torch.cuda.is_available():
        assert found.startswith("cpu-stub-")
    names = itertools.cycle(["NVIDIA H200", "NVIDIA A/B"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: next(names))
    monkeypatch.setattr(engine.runtime.tuning_file, "driver_version", lambda: "580.65.06")
    found = fingerprint()
    assert found.startswith("NVIDIA A/B+NVIDIA H200-torch") and found.endswith("-driver580.65.06")
    assert tuning_file(found, tmp_path).parent == tmp_path / "tuning"
