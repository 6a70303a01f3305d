"""doctor: each judgement told from facts, and one real run on the machine that tests run on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import pytest
import torch
from rich.console import Console
from small_runs import small_project

import engine.doctor
import engine.memory_free
from engine.copy_probe import copy_differences, patterns
from engine.disk_space import checkpoints
from engine.doctor import doctor, to_json
from engine.doctor_devices import (
    Gpu,
    architecture_findings,
    driver_findings,
    gpu_findings,
    read_triton_architectures,
    torch_support,
)
from engine.doctor_findings import Finding, examined
from engine.doctor_kernels import (
    Imported,
    import_findings,
    imports_of,
    imports_started,
    judge_race,
    kernel_findings,
)
from engine.doctor_links import link_findings, peer_finding, read_links
from engine.doctor_machine import (
    available_memory,
    cache_findings,
    compiler_findings,
    disk_findings,
    look_through,
    memory_findings,
    processor_findings,
)
from engine.doctor_versions import Installed, pair_findings, python_findings, read_installed
from engine.errors import DifferenceFound, EngineError, InputError
from engine.planning import plan_run
from engine.run import run
from engine.schedule import load_schedule
from engine.target.kernels import CPU_PATH, SLOW_PATH


def states(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.subject: finding.state for finding in findings}


def the(findings: Iterable[Finding], subject: str) -> Finding:
    return next(finding for finding in findings if finding.subject == subject)


def test_whatever_is_not_ok_has_to_say_what_cures_it() -> None:
    with pytest.raises(EngineError, match="cures"):
        Finding("disk", "warn", "full")


def test_a_check_that_raises_is_a_fail_with_its_exception_and_keeps_what_it_found() -> None:
    def check() -> Iterable[Finding]:
        yield Finding("first", "ok", "fine")
        raise RuntimeError("the driver went away")

    first, second = examined("second", check)
    assert first.state == "ok"
    assert second.state == "fail"
    assert "RuntimeError: the driver went away" in second.found


# What pairs with what.

FLA_NEEDS = ('torch>=2.7.0; extra == "cuda"', 'triton>=3.3; extra == "cuda"')


def installed(
    versions: Mapping[str, str | None], requirements: Mapping[str, tuple[str, ...]] | None = None
) -> Installed:
    usual = {
        "torch": "2.11.0+cu128",
        "triton": "3.6.0",
        "transformers": "5.17.0",
        "flash-linear-attention": "0.6.0",
        "fla-core": "0.6.0",
        "causal-conv1d": None,
    }
    needs = {
        "dflash-engine": ("torch>=2.11", "transformers>=5.17", "flash-linear-attention>=0.6"),
        "torch": ('triton==3.6.0; platform_system == "Linux"',),
        "flash-linear-attention": ("fla-core==0.6.0", "transformers<6,>=5.6.2"),
        "fla-core": FLA_NEEDS,
    }
    return Installed(
        python="3.12.1",
        versions=usual | versions,
        requirements=needs | (requirements or {}),
        python_range=None,
    )


PAIRS: list[tuple[dict[str, str | None], bool, dict[str, str]]] = [
    ({}, True, {"requirements": "ok", "triton for torch": "ok", "fla's needs": "ok"}),
    ({"triton": "3.7.1"}, True, {"requirements": "ok", "triton for torch": "warn", "fla's needs": "ok"}),
    ({"triton": "3.2.0"}, True, {"requirements": "ok", "triton for torch": "warn", "fla's needs": "fail"}),
    ({"triton": None}, True, {"requirements": "ok", "triton for torch": "fail", "fla's needs": "fail"}),
    ({"triton": None}, False, {"requirements": "ok", "triton for torch": "ok", "fla's needs": "warn"}),
    (
        {"flash-linear-attention": "0.5.2", "fla-core": "0.5.2", "triton": "3.9.0"},
        True,
        {
            "requirements": "fail",
            "triton for torch": "warn",
            "fla's needs": "fail",
            "known failure": "fail",
        },
    ),
    ({"triton": "3.9.0"}, True, {"requirements": "ok", "triton for torch": "warn", "fla's needs": "ok"}),
    (
        {"transformers": "5.10.2"},
        True,
        {"requirements": "fail", "triton for torch": "ok", "fla's needs": "ok"},
    ),
    (
        {"fla-core": None, "flash-linear-attention": None},
        True,
        {"requirements": "fail", "triton for torch": "ok", "fla's needs": "warn"},
    ),
]


@pytest.mark.parametrize("versions, gpus, expected", PAIRS)
def test_pairs_are_judged_by_metadata_and_by_what_is_known_to_fail(versions, gpus, expected) -> None:
    assert states(pair_findings(installed(versions), gpus=gpus)) == expected


def test_a_mismatch_names_both_sides_and_what_to_install() -> None:
    findings = list(pair_findings(installed({"transformers": "5.10.2", "triton": "3.7.1"}), gpus=True))
    own = the(findings, "requirements")
    assert "transformers 5.10.2 (>=5.17 is needed)" in own.found
    assert own.cure == 'pip install -U "transformers>=5.17"'
    pinned = the(findings, "triton for torch")
    assert "2.11.0+cu128" in pinned.found and "3.7.1" in pinned.found
    assert 'pip install "triton==3.6.0"' in pinned.cure
    known = list(pair_findings(installed({"fla-core": "0.5.2", "triton": "3.9.0"}), gpus=True))
    assert "fla-core 0.5.2 with triton 3.9.0" in the(known, "known failure").found


def test_a_build_of_torch_without_cuda_pins_no_triton() -> None:
    facts = installed({"torch": "2.13.0+cpu", "triton": "3.7.1"}, {"torch": ()})
    assert states(pair_findings(facts, gpus=False))["triton for torch"] == "ok"


def test_the_python_that_is_too_old_and_the_one_without_a_lock_are_told() -> None:
    facts = attrs.evolve(installed({}), python="3.10.4", python_range=">=3.11")
    assert states(python_findings(facts, free_threaded=False, gil=True)) == {"python": "fail", "gil": "ok"}
    facts = attrs.evolve(facts, python="3.14.0")
    told = list(python_findings(facts, free_threaded=True, gil=False))
    assert states(told) == {"python": "ok", "gil": "warn"}
    assert "its global lock is off" in told[1].found


def test_this_projects_own_ranges_are_found() -> None:
    facts = read_installed()
    assert any(line.startswith("transformers>=") for line in facts.requirements["dflash-engine"])
    assert facts.versions["torch"] == torch.__version__


# Drivers and GPUs.


@pytest.mark.parametrize(
    "driver, cuda, error, state, words",
    [
        (None, None, "Torch not compiled with CUDA enabled", "ok", "no NVIDIA driver"),
        (None, "13.0", "Found no NVIDIA driver", "ok", "everything runs on the CPU"),
        ("570.86.15", None, "Torch not compiled with CUDA enabled", "fail", "built without CUDA"),
        ("570.86.15", "12.8", None, "ok", "570.86.15"),
        ("570.86.15", "13.0", "The NVIDIA driver on your system is too old", "fail", "needs driver 580"),
        ("570.86.15", "13.0", None, "warn", "compatibility"),
        ("580.65.06", "13.0", "No CUDA GPUs are available", "fail", "No CUDA GPUs are available"),
        (None, "12.8", None, "ok", "unknown"),
    ],
)
def test_the_driver_is_judged_by_torchs_cuda_and_by_whether_it_works(
    driver, cuda, error, state, words
) -> None:
    (finding,) = driver_findings(driver, cuda, error)
    assert finding.state == state
    assert words in finding.found


@pytest.mark.parametrize(
    "capability, architectures, support",
    [
        ((9, 0), ["sm_80", "sm_90"], "native"),
        ((8, 9), ["sm_80", "sm_90"], "native"),
        ((9, 0), ["sm_90a"], "native"),
        ((10, 3), ["sm_100a"], None),
        ((10, 3), ["sm_100f"], "native"),
        ((12, 0), ["sm_90", "compute_90"], "compiled at start"),
        ((12, 0), ["sm_80", "sm_90"], None),
        ((7, 5), ["sm_80", "compute_80"], None),
        ((8, 0), ["sm_86"], None),
        ((12, 1), ["sm_120", "compute_120"], "native"),
    ],
)
def test_torch_runs_on_a_gpu_whose_code_or_older_ptx_it_has(capability, architectures, support) -> None:
    assert torch_support(capability, architectures) == support


def gpu(index: int, model: str = "H200", capability: tuple[int, int] = (9, 0), in_use: float = 0.6e9) -> Gpu:
    total = 150_000_000_000
    return Gpu(
        name=f"cuda:{index}", model=model, capability=capability, total=total, free=total - int(in_use)
    )


@pytest.mark.parametrize(
    "capability, torch_has, triton_has, state, words",
    [
        ((9, 0), ["sm_90"], ["sm_90", "sm_90a"], "ok", ""),
        ((12, 0), ["sm_90"], ["sm_90", "sm_120"], "fail", "no code for it; it has sm_90"),
        ((12, 0), ["compute_90"], ["sm_120"], "warn", "when it starts"),
        ((12, 0), ["sm_120"], ["sm_90", "sm_100"], "fail", "the latest it knows is sm_100"),
        ((9, 0), ["sm_90"], [], "warn", "unknown"),
        ((7, 5), ["sm_75"], ["sm_75"], "fail", "8.0 or newer"),
    ],
)
def test_an_architecture_needs_code_from_torch_and_from_triton(
    capability, torch_has, triton_has, state, words
) -> None:
    (finding,) = architecture_findings([gpu(0, capability=capability)], torch_has, triton_has)
    assert finding.state == state
    assert words in finding.found


def test_the_installed_tritons_assemblers_tell_their_architectures() -> None:
    assert {"sm_80", "sm_90a"} <= set(read_triton_architectures())


def test_gpus_of_two_kinds_fail_unless_the_schedule_uses_one_kind() -> None:
    mixed = [gpu(0), gpu(1), gpu(2, "A100", (8, 0))]
    finding = the(gpu_findings(mixed), "gpu kinds")
    assert finding.state == "fail"
    assert "cuda:2 is A100 (compute capability 8.0)" in finding.found
    assert "CUDA_VISIBLE_DEVICES" in finding.cure
    assert the(gpu_findings(mixed, ["cuda:0", "cuda:1"]), "gpu kinds").state == "ok"
    assert "gpu kinds" not in states(gpu_findings([gpu(0)]))


def test_memory_that_others_hold_is_a_warning_with_its_size() -> None:
    findings = list(gpu_findings([gpu(0), gpu(1, in_use=40e9)]))
    assert states(findings) == {"cuda:0": "ok", "cuda:1": "warn", "gpu kinds": "ok"}
    assert "40.0 GB are in use" in findings[1].found


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\n"
    "GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1\n"
    "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n  X    = Self\n"
)


def test_links_are_read_from_the_matrix_and_their_absence_is_a_warning() -> None:
    assert read_links(TOPOLOGY) == {
        ("GPU0", "GPU1"): "NV18",
        ("GPU0", "GPU2"): "SYS",
        ("GPU1", "GPU2"): "SYS",
    }
    gpus = [gpu(0), gpu(1), gpu(2)]
    (told,) = link_findings(gpus, TOPOLOGY)
    assert "NV18: GPU0-GPU1" in told.found and "SYS: GPU0-GPU2, GPU1-GPU2" in told.found
    assert states(link_findings(gpus, None)) == {"links": "warn"}
    assert not list(link_findings(gpus[:1], None))


def test_a_copy_that_flips_a_byte_or_never_happens_is_seen() -> None:
    sent = patterns((1, 4099))

    def flipped(to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)
        to[-1] ^= 1

    assert copy_differences("cpu", "cpu", sent) == {}
    assert copy_differences("cpu", "cpu", sent, copy=flipped) == {1: 1, 4099: 1}
    assert copy_differences("cpu", "cpu", sent, copy=lambda to, source: None) == {1: 1, 4099: 4099}


def test_corrupted_peer_copies_fail_and_missing_peer_access_warns() -> None:
    whole = {"cuda:0 → cuda:1": {}, "cuda:1 → cuda:0": {}}
    assert peer_finding("pair", whole, direct=True).state == "ok"
    assert peer_finding("pair", whole, direct=False).state == "warn"
    bad = peer_finding("pair", whole | {"cuda:1 → cuda:0": {4099: 17}}, direct=True)
    assert bad.state == "fail"
    assert "cuda:1 → cuda:0: 17 of 4,099 bytes" in bad.found


# FLA's import, kernels, launches.


def imports_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Imported]:
    monkeypatch.syspath_prepend(folder)
    with imports_started() as process:
        return {each.package: each for each in imports_of(process)}


def fake_fla(folder: Path, code: str) -> Path:
    (folder / "fla").mkdir()
    (folder / "fla/__init__.py").write_text(code)
    return folder


def test_an_fla_that_cannot_import_names_the_mismatch_in_the_errors_own_words(tmp_path, monkeypatch) -> None:
    folder = fake_fla(tmp_path, "from triton.runtime.autotuner import GoneSince39")
    imported = imports_with(folder, monkeypatch)
    versions = {"fla-core": "0.5.2", "triton": "3.9.0"}
    for gpus in (True, False):
        (finding,) = import_findings(imported, versions, gpus=gpus)
        assert finding.state == "fail"
        assert "FLA 0.5.2 does not import against Triton 3.9.0" in finding.found
        assert "ImportError: cannot import name 'GoneSince39'" in finding.found
        assert "fla/__init__.py, line 1" in finding.found
        assert "transformers would swallow this" in finding.found


def test_an_import_that_ends_its_process_is_told_as_an_import_that_failed(tmp_path, monkeypatch) -> None:
    imported = imports_with(fake_fla(tmp_path, "import os; os._exit(11)"), monkeypatch)
    (finding,) = import_findings(imported, {"fla-core": "0.6.0", "triton": "3.6.0"}, gpus=True)
    assert finding.state == "fail"
    assert "ended with code 11" in finding.found


def test_an_import_that_hangs_is_given_up_and_its_process_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(fake_fla(tmp_path, "import time; time.sleep(60)"))
    begin = time.monotonic()
    with imports_started() as process:
        (imported,) = imports_of(process, timeout=0.2)
    assert "did not end within 0.2 s" in (imported.error or "")
    assert process.returncode is not None
    assert time.monotonic() - begin < 30


def test_a_package_that_is_not_installed_is_no_import_error() -> None:
    gone = "ModuleNotFoundError: No module named 'fla'"
    assert not list(import_findings({"fla": Imported("fla", gone)}, {"fla-core": None}, gpus=True))
    convolution = {
        "fla": Imported("fla"),
        "causal_conv1d": Imported("causal_conv1d", "ImportError: undefined"),
    }
    versions = {"fla-core": "0.6.0", "causal-conv1d": "1.6.0"}
    assert states(import_findings(convolution, versions, gpus=True))["causal_conv1d import"] == "fail"
    assert states(import_findings(convolution, {"fla-core": "0.6.0"}, gpus=True)) == {"fla import": "ok"}


def test_slow_operations_fail_on_a_gpu_and_are_right_on_a_cpu() -> None:
    kernels = {"chunk_gated_delta_rule": SLOW_PATH, "causal_conv1d_fn": SLOW_PATH, "attention": "sdpa"}
    assert states(kernel_findings(kernels, on_gpu=True)) == {
        "kernel chunk_gated_delta_rule": "fail",
        "kernel causal_conv1d_fn": "warn",
        "kernel attention": "ok",
    }
    fused = kernels | {"chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"}
    assert the(kernel_findings(fused, on_gpu=True), "kernel chunk_gated_delta_rule").state == "ok"
    on_cpu = the(kernel_findings(fused, on_gpu=False), "kernel chunk_gated_delta_rule")
    assert (on_cpu.state, on_cpu.found) == ("ok", CPU_PATH)


RACE = TypeError("'NoneType' object is not a mapping")


@pytest.mark.parametrize(
    "mode, before, after, effective, state",
    [
        ("tune", RACE, None, True, "ok"),
        ("tune", RACE, RACE, True, "fail"),
        ("tune", RACE, None, False, "fail"),
        ("none", RACE, RACE, True, "warn"),
        ("tune", None, None, True, "ok"),
        ("none", None, None, False, "ok"),
    ],
)
def test_the_race_may_exist_and_has_to_be_gone_with_the_serializer(
    mode, before, after, effective, state
) -> None:
    found = list(judge_race(mode, before, after, effective=effective, triton="3.6.0"))
    assert states(found) == {"launch race": "ok", f"serializer, {mode}": state}
    assert ("race exists in this Triton" in found[0].found) == (before is not None)


# Caches, compilers, processors, memory, disk.


def test_cache_folders_tell_size_leftovers_and_other_users(tmp_path) -> None:
    kernels = tmp_path / "cache"
    (kernels / "ABC/tmp.pid_1_x").mkdir(parents=True)
    (kernels / "ABC/kernel.cubin").write_bytes(b"x" * 1000)
    (finding,) = cache_findings("triton", look_through(kernels), needed=True)
    assert finding.state == "ok" and "1 files" in finding.found
    old = time.time() - 86_400
    os.utime(kernels / "ABC/tmp.pid_1_x", (old, old))
    (kernels / "ABC/kernel.json").touch()
    left = look_through(kernels)
    assert left.partial == ("ABC/kernel.json", "ABC/tmp.pid_1_x")
    assert states(cache_findings("triton", left, needed=True)) == {"cache of triton": "warn"}
    others = look_through(kernels, user=os.getuid() + 1)
    assert others.foreign == (".", "ABC", "ABC/kernel.cubin", "ABC/kernel.json", "ABC/tmp.pid_1_x")
    (foreign,) = cache_findings("triton", others, needed=True)
    assert foreign.state == "warn" and "another user's" in foreign.found
    assert "TRITON_CACHE_DIR" in foreign.cure
    assert not look_through(kernels, seconds=-1).whole


def test_a_cache_that_cannot_be_written_fails_where_it_is_needed(tmp_path) -> None:
    absent = look_through(tmp_path / "not/there/yet")
    assert states(cache_findings("engine", absent, needed=False)) == {"cache of engine": "ok"}
    (tmp_path / "file").touch()
    blocked = look_through(tmp_path / "file")
    assert states(cache_findings("triton", blocked, needed=True)) == {"cache of triton": "fail"}
    assert states(cache_findings("engine", blocked, needed=False)) == {"cache of engine": "warn"}


def test_a_missing_compiler_fails_where_kernels_need_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(compiler_findings(gpus=True)) == {"C compiler": "fail", "C++ compiler": "warn"}
    told = list(compiler_findings(gpus=False))
    assert states(told) == {"C compiler": "warn", "C++ compiler": "warn"}
    assert "install one" in told[0].cure


def test_lanes_are_counted_against_cores_and_a_checkpoint_against_main_memory(tmp_path) -> None:
    lanes = ["cuda:0", "cuda:1", "cpu"]
    assert states(processor_findings(4, lanes, cpu_threads=2)) == {"processor cores": "ok"}
    assert states(processor_findings(3, lanes, cpu_threads=2)) == {"processor cores": "warn"}
    assert states(memory_findings(30_000_000_000, 24_000_000_000)) == {"main memory": "ok"}
    assert states(memory_findings(20_000_000_000, 24_000_000_000)) == {"main memory": "warn"}
    assert states(memory_findings(None, None)) == {"main memory": "warn"}
    assert available_memory(100, tmp_path) == 100
    (tmp_path / "memory.current").write_text("30\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(100, tmp_path) == 100
    (tmp_path / "memory.max").write_text("50\n")
    assert available_memory(100, tmp_path) == 20


def test_a_disk_that_holds_not_all_checkpoints_fails_with_how_many_it_holds(tmp_path) -> None:
    (finding,) = disk_findings(tmp_path, 100_000_000_000, 24_000_000_000, 5)
    assert finding.state == "fail"
    assert "room for 4" in finding.found and "120.0 GB in all" in finding.found
    assert states(disk_findings(tmp_path, 121_000_000_000, 24_000_000_000, 5)) == {"disk": "ok"}
    assert states(disk_findings(tmp_path, 1_000_000_000, None, 0)) == {"disk": "warn"}
    assert states(disk_findings(tmp_path, 100_000_000_000, None, 0)) == {"disk": "ok"}


def test_checkpoints_are_as_many_and_as_large_as_a_run_writes(tmp_path) -> None:
    small = ("train.lr=1e-3", "run.eval_every=0", "run.steps=3", "run.save_every=2")
    schedule = load_schedule(small_project(tmp_path), small)
    size, count = checkpoints(plan_run(schedule))
    result = run(schedule, console=Console(quiet=True))
    written = sorted((result.folder.path / "checkpoints").glob("step_*"))
    assert count == len(written)
    on_disk = sum(path.stat().st_size for path in written[0].rglob("*") if path.is_file())
    assert size == pytest.approx(on_disk, rel=0.2)  # headers and JSON weigh in a drafter this small


# The whole.


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return small_project(tmp_path_factory.mktemp("doctor"))


def real_doctor(arguments: str, *path: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of a doctor in a process that finds packages in `path` first."""
    code = (
        "import sys; from pathlib import Path; from engine.doctor import doctor\n"
        "from engine.errors import EngineError\n"
        f"try: doctor({arguments})\n"
        "except EngineError as error: sys.stderr.write(str(error)); sys.exit(error.exit_code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, *filter(None, sys.path))))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_torch_that_does_not_import_is_a_line_among_what_metadata_still_say(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    code, out, _ = real_doctor("None, as_json=True", tmp_path)
    by_subject = {each["subject"]: each for each in json.loads(out)["findings"]}
    assert code == 7
    assert by_subject["torch import"]["found"].startswith("OSError: libcudart.so.12")
    assert {"python", "triton", "requirements", "triton for torch"} <= by_subject.keys()


def test_a_real_run_says_everything_as_json_and_its_exit_code_agrees(project: Path) -> None:
    code, out, err = real_doctor(f"Path({str(project)!r}), as_json=True")
    report = json.loads(out)
    findings = report["findings"]
    assert not [each for each in findings if "the check itself failed" in each["found"]], out
    assert report["ok"] + report["warn"] + report["fail"] == len(findings) > 25
    assert code == (7 if report["fail"] else 0), err
    assert all(each["cure"] for each in findings if each["state"] != "ok")
    by_subject = {each["subject"]: each for each in findings}
    assert by_subject["schedule"]["found"].startswith("plans: 6 steps")
    assert by_subject["fla import"]["state"] == "ok", out
    assert by_subject["kernel chunk_gated_delta_rule"]["found"]
    assert any(subject.startswith("serializer, ") for subject in by_subject)
    assert {"python", "torch", "driver", "cache of engine", "disk", "device memory"} <= by_subject.keys()
    assert ("gpus" in by_subject) != torch.cuda.is_available()
    assert findings[0]["subject"] == "python"


@pytest.mark.gpu
def test_on_gpus_every_one_is_told_and_every_pair_is_tried() -> None:
    _, out, _ = real_doctor("None, as_json=True")
    by_subject = {each["subject"]: each for each in json.loads(out)["findings"]}
    count = torch.cuda.device_count()
    assert {f"cuda:{index}" for index in range(count)} <= by_subject.keys()
    pairs = [each for subject, each in by_subject.items() if "↔" in subject]
    assert len(pairs) == count * (count - 1) // 2
    assert all("bit for bit right" in each["found"] for each in pairs)
    assert any(subject.startswith("architecture sm_") for subject in by_subject)


def fixed(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(engine.doctor, "examine", lambda schedule, overrides: list(findings))


def test_a_failed_check_ends_with_exit_code_7_after_everything_was_printed(monkeypatch, capsys) -> None:
    fine, bad = Finding("torch", "ok", "2.11"), Finding("disk", "fail", "full", "free some")
    fixed(monkeypatch, bad, fine)
    with pytest.raises(DifferenceFound, match="1 of 2 checks failed: disk") as caught:
        doctor(None)
    assert caught.value.exit_code == 7
    printed = capsys.readouterr().out
    assert "→ free some" in printed and "2.11" in printed and "1 ok, 0 warn, 1 fail" in printed
    fixed(monkeypatch, fine, Finding("gil", "warn", "none", "take another"))
    assert len(doctor(None)) == 2


def test_json_goes_to_standard_output_alone_and_holds_every_field(monkeypatch, capsys) -> None:
    fixed(monkeypatch, Finding("disk", "fail", "full", "free some"))
    with pytest.raises(DifferenceFound):
        doctor(None, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "ok": 0,
        "warn": 0,
        "fail": 1,
        "findings": [{"subject": "disk", "state": "fail", "found": "full", "cure": "free some"}],
    }
    assert json.loads(to_json([])) == {"ok": 0, "warn": 0, "fail": 0, "findings": []}


def test_overrides_without_a_schedule_are_refused() -> None:
    with pytest.raises(InputError, match="--set"):
        doctor(None, ["train.lr=1"])


def schedule_findings(path: Path, *overrides: str) -> list[Finding]:
    return examined("schedule", engine.doctor._Planned(path, overrides).findings)


def test_a_schedule_that_cannot_be_planned_is_a_line_with_the_error(project: Path, tmp_path: Path) -> None:
    (finding,) = schedule_findings(project, "data.path=nowhere")
    assert finding.state == "fail" and finding.found.startswith("DataError: nowhere")
    assert "engine check" in finding.cure
    (finding,) = schedule_findings(tmp_path / "none.toml")
    assert finding.state == "fail" and "no such schedule" in finding.found


def test_a_schedule_that_does_not_fit_is_a_line_with_the_cures(project: Path, monkeypatch) -> None:
    assert states(schedule_findings(project)) == {"schedule": "ok", "device memory": "ok"}
    monkeypatch.setattr(engine.memory_free, "free_memory", lambda devices: dict.fromkeys(devices, 1000))
    finding = the(schedule_findings(project), "device memory")
    assert finding.state == "fail"
    assert "GB are free" in finding.found
    assert "data.token_budget" in finding.cure
