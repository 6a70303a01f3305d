"""Replicas of the drafter are compared by checksum, and one flipped bit is found."""

from pathlib import Path

import pytest
import torch
from small_runs import assembled, small_project, write_config
from test_lanes import exactly, lanes_of, on_lanes

from engine.errors import DifferenceFound
from engine.lanes import open_run_lanes
from engine.replica_check import checksums
from engine.runtime.failure import StageFailure
from engine.training_parts import TrainingParts


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


def flip_a_bit_before_forward(parts: TrainingParts, rank: int, call: int, name: str) -> None:
    """Let one replica's parameter lose a bit right before its drafter's `call`-th forward, from 0."""
    drafter = parts.drafters[rank].drafter
    calls = iter(range(1 << 30))

    def hook(module: torch.nn.Module, arguments: object) -> None:
        if next(calls) == call:
            words = dict(drafter.named_parameters())[name].data.view(torch.uint8)
            words.view(-1)[-1] ^= 1

    drafter.register_forward_pre_hook(hook)


PARAMETER = "layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("drafters", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bit_flipped_in_one_replica_is_found_within_check_every_steps(
    project: Path, drafters: int, dtype: str, rank: int
) -> None:
    settings = lanes_of(1, drafters, 1, micro_batches=drafters)
    parts = assembled(project, *settings, f"drafter.dtype={dtype}", "run.check_every=3")
    flip_a_bit_before_forward(parts, rank, 3, PARAMETER)  # in the fourth step, healed at its end
    lanes = open_run_lanes(parts)
    done: list[int] = []
    with pytest.raises(StageFailure) as found:
        lanes.scheduler.run(0, 9, lambda step, results: done.append(step + 1))
    assert isinstance(found.value.__cause__, DifferenceFound) and found.value.exit_code == 7
    told = str(found.value)
    assert done[-1] == 5 and "step 6: replicas of the drafter differ in 1 of 25 parameters" in told
    assert f"first in {PARAMETER}: " in told and "resume from a checkpoint of step 3 or before" in told
    if drafters == 3:
        others = " and ".join(f"drafter.{other}@cpu" for other in range(3) if other != rank)
        assert f"drafter.{rank}@cpu differs from {others}" in told


def test_replicas_that_agree_pass_and_the_check_changes_no_number(project: Path) -> None:
    settings = lanes_of(2, 3, 2)
    exactly(
        on_lanes(project, *settings, "run.check_every=1", seed=1),
        on_lanes(project, *settings, "run.check_every=0", seed=2),
    )


def test_what_the_check_has_folded_lasts_over_stretches(project: Path) -> None:
    parts = assembled(project, *lanes_of(1, 2, 1, micro_batches=2), "run.check_every=4")
    flip_a_bit_before_forward(parts, 1, 1, PARAMETER)
    lanes = open_run_lanes(parts)
    assert lanes.scheduler.run(0, 3, None) == 3
    with pytest.raises(StageFailure, match="step 4: replicas of the drafter differ"):
        lanes.scheduler.run(3, 6, None)


def test_never_means_never(project: Path) -> None:
    parts = assembled(project, *lanes_of(1, 2, 1, micro_batches=2), "run.check_every=0")
    flip_a_bit_before_forward(parts, 1, 0, PARAMETER)
    assert open_run_lanes(parts).scheduler.run(0, 3, None) == 3


def test_every_bit_of_a_tensor_weighs_in_its_checksum() -> None:
    for dtype, shape in (
        (torch.bfloat16, (3, 5)),
        (torch.float32, (7,)),
        (torch.bfloat16, (2, 8)),
        (torch.float32, ()),
    ):
        tensor = torch.randn(shape).to(dtype)
        (before,) = checksums([tensor]).tolist()
        stored = tensor.view(-1).view(torch.uint8)
        for byte in range(stored.numel()):
            for bit in range(8):
                stored[byte] ^= 1 << bit
                assert checksums([tensor]).tolist() != [before]
                stored[byte] ^= 1 << bit
        assert checksums([tensor]).tolist() == [before]


def test_rows_that_changed_places_change_the_checksum() -> None:
    tensor = torch.randn(6, 8)
    one, other = checksums([tensor, tensor[[1, 0, 2, 3, 4, 5]]]).tolist()
    assert one != other


@pytest.mark.gpu
def test_a_checksum_is_the_same_on_every_device() -> None:
    tensors = [torch.randn(300, 500).bfloat16(), torch.randn(77), torch.randn(9, 9)]
    assert checksums(tensors).tolist() == checksums([tensor.cuda() for tensor in tensors]).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("call", [0, 4])
def test_a_bit_flipped_on_one_of_two_gpus_is_found_within_check_every_steps(project: Path, call: int) -> None:
    devices = 'devices={targets = ["cuda:0", "cuda:1"], drafters = ["cuda:0", "cuda:1"]}'
    target = write_config(project.parent / "heads", linear_key_head_dim=32, linear_value_head_dim=32)
    settings = [devices, "drafter.dtype=bfloat16", "drafter.attention=dense", "run.check_every=3"]
    settings += [f"target.path={target}"]
    parts = assembled(project, *settings)
    flip_a_bit_before_forward(parts, 1, call, PARAMETER)
    with pytest.raises(StageFailure, match=f"step {call // 3 * 3 + 3}: .*first in {PARAMETER}") as found:
        open_run_lanes(parts).scheduler.run(0, 9, None)
    assert found.value.exit_code == 7
