"""Commands as people type them: exit codes, messages, and nothing left behind."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import save_file
from small_runs import EOS, MASK, PAD, VOCAB, small_project, write_config, write_random

from engine import cli
from engine.data.shards import write_documents

GOLDEN = Path(__file__).parent / "golden"


def engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str]:
    """Run a command in this process; returns its exit code and all that it printed."""
    monkeypatch.setattr(sys, "argv", ["engine", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    output = capsys.readouterr()
    return code, output.out + output.err


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return small_project(tmp_path)


@pytest.mark.parametrize(
    "words, there_are",
    [
        (["export", "runs/latest", "there", "--format", "gguf"], "dflash, speculators"),
        (["prepare", "in.jsonl", "--output", "there", "--answers", "gguf"], "all, last, target"),
        (["prepare", "in.jsonl", "--output", "there", "--dtype", "gguf"], "bfloat16, float32"),
    ],
    ids=["format", "answers", "dtype"],
)
def test_a_word_that_an_option_does_not_know_is_told_with_those_it_does(
    capsys, monkeypatch, words: list[str], there_are: str
) -> None:
    code, output = engine(capsys, monkeypatch, *words)
    said = " ".join(output.replace("│", " ").split())
    assert code == 2 and f"there is no 'gguf'; there are {there_are}" in said
    assert "Value error" not in said


BAD_SETTINGS = [
    ("train.lrr=1e-3", ["train.lrr", "did you mean", "train.lr"]),
    ("serialise.launches=tune", ["serialise"]),
    ("data.token_budget=lots", ["data.token_budget", "lots", "whole number"]),
    ("train.lr=-1", ["train.lr", "-1"]),
    ("train.micro_batches=true", ["train.micro_batches"]),
    ("drafter.target_layer_ids=[0, 1, 3]", ["drafter.target_layer_ids[2] = 3", "4 layers", "0…2"]),
    ("drafter.target_layer_ids=[1, 1, 2]", ["drafter.target_layer_ids", "distinct"]),
    (f"drafter.mask_token_id={PAD}", [str(PAD), "pad"]),
    (f"drafter.mask_token_id={EOS}", [str(EOS), "EOS"]),
    (f"drafter.mask_token_id={VOCAB}", [str(VOCAB), "vocabulary"]),
    ("drafter.mask_token_id=5", ["mask_token_id 5", "occurs"]),
    ("drafter.kv_heads=3", ["drafter.kv_heads"]),
    ("drafter.sliding_window=0", ["drafter.sliding_window"]),
    ("drafter.head_dim=15", ["drafter.head_dim"]),
    ("drafter.attention=flex", ["drafter.attention", "dense"]),
    ('devices={targets=["cuda:9"], drafters=["cpu"]}', ["cuda:9", "no such device"]),
    (
        'devices={targets=["cpu"], drafters=["cpu","cpu","cpu"]}',
        ["devices.drafters", "train.micro_batches = 2"],
    ),
    ("data.path=nowhere", ["nowhere"]),
    ("target.path=nowhere", ["nowhere"]),
    ("target.path=builtin:nothing", ["builtin:nothing", "builtin:tiny-hybrid"]),
    ("drafter.init=nowhere", ["drafter.init", "nowhere"]),
    ("run.steps=0", ["run.steps"]),
    ("data.max_length=1000", ["data.max_length", "token_budget"]),
]


@pytest.mark.parametrize("setting, words", BAD_SETTINGS, ids=[setting for setting, _ in BAD_SETTINGS])
def test_bad_settings_end_with_exit_code_2_and_no_run_folder(
    capsys, monkeypatch, project: Path, setting: str, words: list[str]
) -> None:
    code, output = engine(capsys, monkeypatch, "run", project, "--set", setting)
    assert code == 2, output
    assert all(word in output for word in words), output
    assert "Traceback" not in output
    assert not (project.parent / "runs").exists()


def all_zero_masks(root: Path) -> str:
    table = pa.table({"input_ids": [[1, 2, 3, 4], [1, 2, 3]], "loss_mask": [[0, 0, 0, 0], [0, 0, 0]]})
    (root / "zero").mkdir()
    pq.write_table(table, root / "zero/rows.parquet")
    return "data.path"


def no_rows(root: Path) -> str:
    (root / "zero").mkdir()
    return "data.path"


def torn_arrow(root: Path) -> str:
    shard = next(write_random(root / "zero", seed=5).glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return "data.path"


def other_vocabulary(root: Path) -> str:
    write_documents(root / "zero", [([1, 2, 3, 4], [0, 1, 1, 1])], vocab_size=VOCAB + 32)
    return "data.path"


def held_out_is_training(root: Path) -> str:
    write_random(root / "zero", seed=1)
    return "data.held_out"


def torn_target(root: Path) -> str:
    folder = write_config(root / "zero")
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    return "target.path"


def target_of_another_shape(root: Path) -> str:
    import torch

    folder = write_config(root / "zero")
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return "target.path"


BAD_FILES = {
    all_zero_masks: ["zero", "supervised"],
    no_rows: ["zero"],
    torn_arrow: ["shard-00000.arrow"],
    other_vocabulary: ["vocabulary", str(VOCAB + 32)],
    held_out_is_training: ["zero", "train"],
    torn_target: ["model.safetensors"],
    target_of_another_shape: ["55 of the 56 tensors", "model.layers.0"],
}


@pytest.mark.parametrize("make", BAD_FILES, ids=lambda make: make.__name__)
def test_bad_files_are_named_with_exit_code_2_and_no_run_folder(
    capsys, monkeypatch, project: Path, make
) -> None:
    key = make(project.parent)
    settings = ["--set", f"{key}={project.parent / 'zero'}", "--set", "target.init=checkpoint"]
    if key != "target.path":
        settings = settings[:2]
    code, output = engine(capsys, monkeypatch, "run", project, *settings)
    assert code == 2, output
    assert all(word in output for word in BAD_FILES[make]), output
    assert "Traceback" not in output
    assert not (project.parent / "runs").exists()


def test_an_unwritable_output_folder_is_found_at_start(capsys, monkeypatch, project: Path) -> None:
    (project.parent / "file").write_text("")
    code, output = engine(
        capsys, monkeypatch, "run", project, "--output", project.parent / "file" / "run", "--steps", 1
    )
    assert code == 2 and "file/run" in output, output


def test_an_output_folder_with_another_run_needs_resume_or_overwrite(
    capsys, monkeypatch, project: Path
) -> None:
    output = project.parent / "out"
    arguments = ("run", project, "--output", output, "--steps", 1, "--set", "run.eval_every=0")
    assert engine(capsys, monkeypatch, *arguments)[0] == 0
    code, text = engine(capsys, monkeypatch, *arguments)
    assert code == 2 and "--resume" in text and "--overwrite" in text
    assert engine(capsys, monkeypatch, *arguments, "--overwrite")[0] == 0
    assert engine(capsys, monkeypatch, "run", project, "--output", output, "--steps", 2, "--resume")[0] == 0


def test_each_run_gets_a_new_folder_and_latest_points_at_it(capsys, monkeypatch, project: Path) -> None:
    for number in (1, 2):
        assert engine(capsys, monkeypatch, "run", project, "--steps", 1)[0] == 0
        assert (project.parent / "runs/latest").resolve().name == f"small-{number}"


def test_check_prints_the_effective_configuration_and_runs_nothing(
    capsys, monkeypatch, project: Path
) -> None:
    code, output = engine(capsys, monkeypatch, "check", project, "--set", "train.lr=3e-4")
    assert code == 0
    assert "lr = 0.0003" in output and "betas" in output and "6 steps" in output
    assert "micro-batches per epoch" in output.replace("\n", " ") or "micro-batch" in output
    assert not (project.parent / "runs").exists()


@pytest.mark.parametrize("schedule", sorted(Path("schedules").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_schedule_reads(schedule: Path) -> None:
    from engine.schedule import load_schedule

    assert load_schedule(schedule).drafter.mask_token_id


def test_verify_exits_with_7_beyond_the_tolerance(capsys, monkeypatch, tmp_path: Path) -> None:
    reference = GOLDEN / "one_layer_one_tap.safetensors"
    assert engine(capsys, monkeypatch, "verify", reference)[0] == 0
    monkeypatch.setattr("engine.verify.FORWARD_TOLERANCE", {"cpu": 1e-9})
    code, output = engine(capsys, monkeypatch, "verify", reference)
    assert code == 7 and "one_layer_one_tap" in output


@pytest.mark.parametrize(
    "failure, code",
    [
        (MemoryError("4 GB"), 3),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 3),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_causes_have_exit_codes_of_their_own(capsys, monkeypatch, failure: BaseException, code: int) -> None:
    def fail() -> None:
        raise failure

    monkeypatch.setattr(cli, "app", fail)
    found, output = engine(capsys, monkeypatch)
    assert found == code
    assert ("Traceback" in output) == (code == 1)


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_importing_the_package_is_quick_and_loads_no_torch() -> None:
    quickest = min(float(python(IMPORT_TIME)) for _ in range(3))
    assert quickest < 0.3  # of processor time, so that a busy machine does not decide


IMPORT_TIME = """
import sys, time
begin = time.process_time()
import engine, engine.cli
print(time.process_time() - begin)
assert not {"torch", "transformers", "triton", "fla", "jax"} & set(sys.modules)
"""


def test_help_is_quick() -> None:
    code = """
import atexit, sys, time
atexit.register(lambda: print("seconds", time.process_time()))
sys.argv = ["engine", "--help"]
from engine.cli import main
main()
"""
    assert float(python(code).rpartition("seconds")[2]) < 1.5


def test_jax_is_never_imported() -> None:
    modules = [
        ".".join(path.with_suffix("").parts)
        for folder in ("engine", "plugins")
        for path in sorted(Path(folder).rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py")
    ]
    code = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax"):
            raise AssertionError(f"{{name}} was imported")
sys.meta_path.insert(0, Refuse())
for name in {modules!r}:
    importlib.import_module(name)
print(len({modules!r}), "jax" in sys.modules)
"""
    assert python(code) == f"{len(modules)} False"
    assert MASK not in (EOS, PAD)
