"""Reference data computed by other people's code, reproduced; and the command that does it."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.errors import DifferenceFound, InputError
from engine.verify import compare, verify_files

GOLDEN = Path(__file__).parent / "golden"
REFERENCES = sorted(GOLDEN.glob("*.safetensors"))


def test_all_ten_training_references_are_here() -> None:
    assert len(REFERENCES) == 10


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_dense_reproduces_the_reference(path: Path) -> None:
    result = compare(path, device=torch.device("cpu"), backend="dense")
    assert result.tolerance == (1e-5, 1e-4)
    assert result.gradient is not None and result.passed, result


@pytest.mark.parametrize("path", REFERENCES[::3], ids=lambda path: path.stem)
def test_flex_reproduces_the_references_forward(path: Path) -> None:
    result = compare(path, device=torch.device("cpu"), backend="flex")
    assert result.gradient is None and result.passed, result


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["dense", "flex"])
@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_a_gpu_reproduces_the_reference(path: Path, backend: str) -> None:
    torch.set_float32_matmul_precision("highest")
    result = compare(path, device=torch.device("cuda:0"), backend=backend)
    assert result.tolerance == (1e-4, 1e-3)
    assert result.gradient is not None and result.passed, result


def test_a_difference_is_found_and_named(tmp_path: Path) -> None:
    source = GOLDEN / "one_layer_one_tap.safetensors"
    with safe_open(source, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["weight.norm.weight"] = tensors["weight.norm.weight"] * 1.001
    path = tmp_path / "changed.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(DifferenceFound, match=r"changed\.safetensors") as found:
        verify_files([source, path], device_name="cpu", attention="dense")
    assert found.value.exit_code == 7 and "one_layer" not in str(found.value)


@pytest.mark.parametrize("what", ["missing", "torn", "not a reference"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, what: str) -> None:
    path = tmp_path / "file.safetensors"
    if what == "torn":
        path.write_bytes(REFERENCES[0].read_bytes()[:1000])
    if what == "not a reference":
        save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(InputError, match=r"file\.safetensors"):
        verify_files([path], device_name="cpu", attention="dense")


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="cuda:99.*there are cpu"):
        verify_files(REFERENCES[:1], device_name="cuda:99", attention="dense")
