"""Copies, kernels and attention are compared before a run relies on them."""

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console
from small_runs import assembled, small_project, write_config
from torch import Tensor

from engine.device_trust import check_attention, check_kernels, probe_pairs, probed_links
from engine.dflash.attention import prepare_attention
from engine.errors import DifferenceFound, EngineError
from engine.lanes import open_run_lanes
from engine.planning import plan_run
from engine.run import run
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.links import PIECE_BYTES, Links, copy_through_host
from engine.runtime.pinned_ring import PinnedRing
from engine.schedule import load_schedule
from engine.target.kernel_check import kernel_errors, relative_error
from engine.target.kernels import bindings
from engine.target.loading import load_target
from engine.training_parts import load_parts
from plugins.async_copy import AsyncCopy, Options

ONE, TWO = torch.device("cpu"), torch.device("cpu", 0)
"""One memory by two names, which is all that the judgement of a pair looks at."""

SIZES = (1, 4_099)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("project"))


def flipping(to: Tensor, source: Tensor) -> None:
    to.copy_(source)
    to[-1] ^= 1


def probed(*pairs: tuple[torch.device, torch.device], **options: Any) -> tuple[Links, list[str]]:
    said: list[str] = []
    options = {"can_peer": lambda one, other: True, "sizes": SIZES} | options
    return probe_pairs(pairs, said.append, **options), said


# Pairs.


def test_a_pair_whose_copies_arrive_whole_copies_directly() -> None:
    links, said = probed((ONE, TWO), (TWO, ONE))
    assert not links.through_host and links.facts() == {"through_host": []}
    (line,) = said
    assert "2 of 2 ways direct" in line


def test_only_the_way_that_corrupts_goes_through_host_memory_and_is_said() -> None:
    ways = iter([flipping, Tensor.copy_])
    per_size = [way for way in ways for _ in SIZES]
    links, said = probed((ONE, TWO), (TWO, ONE), copy=lambda to, source: per_size.pop(0)(to, source))
    assert links.staged(ONE, TWO) and not links.staged(TWO, ONE)
    assert said[0].startswith("cpu → cpu:0: copies arrive corrupted (1 of 1 bytes; 1 of 4,099 bytes)")
    assert "1 of 2 ways direct" in said[1]


def test_a_copy_that_never_happens_is_a_corrupted_one() -> None:
    links, _ = probed((ONE, TWO), copy=lambda to, source: None)
    assert links.staged(ONE, TWO)


def test_a_pair_without_peer_access_is_not_tried_directly() -> None:
    def direct(to: Tensor, source: Tensor) -> None:
        raise AssertionError("copied directly")

    links, said = probed((ONE, TWO), can_peer=lambda one, other: False, copy=direct)
    assert links.staged(ONE, TWO) and "no peer access; copied through host memory" in said[0]


def test_copies_that_arrive_corrupted_through_host_memory_too_end_the_run() -> None:
    with pytest.raises(DifferenceFound, match=r"cpu → cpu:0: copies through host memory.*4,099") as found:
        probed((ONE, TWO), copy=flipping, staged_copy=flipping)
    assert found.value.exit_code == 7


def test_without_two_gpus_nothing_is_probed_or_said() -> None:
    said: list[str] = []
    assert not probed_links([torch.device("cpu"), torch.device("cuda", 0)], said.append).through_host
    assert not said


@pytest.mark.parametrize(
    "shape, dtype", [((1000, 3), torch.bfloat16), ((), torch.float32), ((0, 4), torch.int64)]
)
def test_a_staged_copy_is_the_same_bytes_in_pieces(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source = (torch.randn(shape) * 1000).to(dtype)
    destination = torch.full(shape, 7, dtype=dtype)
    ring = PinnedRing(2, 1024)
    copy_through_host(destination, source, ring, leaving=None, arriving=None)
    assert torch.equal(destination, source)
    with pytest.raises(EngineError, match="one shape and dtype"):
        copy_through_host(destination, source.double(), ring, leaving=None, arriving=None)


def test_a_transposed_source_and_a_trained_parameter_are_copied_as_they_are() -> None:
    links = Links([(ONE, ONE)])
    source = torch.randn(PIECE_BYTES // 4 // 64 + 5, 64)
    parameter = torch.nn.Parameter(torch.zeros(64, source.shape[0]))
    assert links.copy(parameter, source.t()) is parameter
    assert torch.equal(parameter, source.t())
    assert links.to(source, ONE) is source


def test_every_lane_has_the_links_of_its_run(project: Path) -> None:
    parts = attrs.evolve(assembled(project), links=Links([(ONE, TWO)]))
    lanes = open_run_lanes(parts).scheduler.lanes.values()
    assert lanes and all(lane.links is parts.links for lane in lanes)


def test_async_copy_takes_a_pair_that_corrupts_for_one_without_peer_access(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plugins.async_copy.peer_access", lambda source, destination: True)
    pairs = [[Lane(LaneSpec(role, 0, "cpu"))] for role in ("target", "drafter")]
    for lanes, index in zip(pairs, (0, 1), strict=True):
        lanes[0].device = torch.device("cuda", index)
    chosen = []
    for links in (Links(), Links([(pairs[0][0].device, pairs[1][0].device)])):
        pairs[1][0].links = links
        chosen.append(sorted(AsyncCopy(Options()).make_transfer(*pairs, parcel_bytes=1).rings))
    assert chosen == [[], ["target.0@cpu"]]


@pytest.mark.gpu
@pytest.mark.parametrize("megabytes", [1, 97])
def test_a_staged_copy_on_a_gpu_waits_for_its_source_and_holds_up_its_reader(megabytes: int) -> None:
    device = torch.device("cuda", 0)
    links = Links([(device, device)])
    for _ in range(3):
        source = torch.empty(megabytes << 18, device=device)
        torch.cuda._sleep(20_000_000)
        source.normal_()
        destination = links.copy(torch.empty_like(source), source)
        assert torch.equal(destination, source)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
def test_two_gpus_of_this_machine_copy_rightly_both_ways() -> None:
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    said: list[str] = []
    links = probed_links(devices, said.append)
    assert "of 2 ways direct, bit for bit right" in said[-1]
    staged, said = probed(tuple(devices), tuple(devices[::-1]), copy=flipping)  # type: ignore[arg-type]
    assert len(staged.through_host) == 2 and "0 of 2 ways direct" in said[-1]
    assert links is not staged


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("transfer", ["plugins.plain_copy", "plugins.async_copy"])
def test_a_run_over_untrusted_gpus_computes_what_it_computes_over_trusted_ones(
    project: Path, transfer: str
) -> None:
    write_config(project.parent / "heads", linear_key_head_dim=32, linear_value_head_dim=32)
    schedule = project.with_name("untrusted.toml")
    schedule.write_text(project.read_text() + f'[[plugin]]\nuse = "{transfer}"\n')
    settings = ['devices={targets = ["cuda:0", "cuda:1"], drafters = ["cuda:0", "cuda:1"]}']
    settings += ['drafter.attention="dense"', "stage.transfer.depth=2", f"target.path={project.parent}/heads"]
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    losses = []
    for links in (Links(), Links([(devices[0], devices[1]), (devices[1], devices[0])])):
        parts = load_parts(plan_run(load_schedule(schedule, settings)), lambda line: None, links=links)
        rows: list[dict] = []
        open_run_lanes(parts).scheduler.run(0, 4, lambda step, results: rows.append(results[0]))  # noqa: B023
        losses.append([row["loss"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Kernels.


def bound_to(
    monkeypatch: pytest.MonkeyPatch, project: Path, operation: str, kernel: Callable[..., Any]
) -> Any:
    """The parts of a small run whose target's operation is bound to `kernel`, as a model file binds one."""
    parts = assembled(project)
    binding = next(each for each in bindings(parts.targets[0].model) if each.operation == operation)
    func_name, implementation, torch_function = operation, kernel, binding.plain

    @functools.wraps(binding.plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        assert func_name and torch_function
        return implementation(*args, **kwargs)

    monkeypatch.setattr(binding.module, binding.attribute, wrapped)
    return parts


def like_plain(parts: Any, operation: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    plain = next(each for each in bindings(parts.targets[0].model) if each.operation == operation).plain

    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

    return kernel


OPERATIONS = ["chunk_gated_delta_rule", "causal_conv1d_fn"]


def test_a_target_that_runs_as_plain_pytorch_is_not_compared(project: Path) -> None:
    parts = assembled(project)
    said: list[str] = []
    check_kernels(parts, said.append)
    assert not said and kernel_errors(parts.targets[0]) == []


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "change, shown",
    [
        (lambda x: x * 1.05, "0.05 from plain PyTorch"),
        (lambda x: torch.where(x == x.max(), torch.nan, x), "inf from plain PyTorch"),
        (lambda x: x.roll(1, 1), "from plain PyTorch"),
        (lambda x: x.roll(1, 0), "from plain PyTorch"),
    ],
    ids=["off by 5 %", "one NaN", "shifted", "rows mixed up"],
)
def test_a_kernel_that_computes_wrong_numbers_is_named_with_device_and_error(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    change: Callable[[Tensor], Tensor],
    shown: str,
) -> None:
    kernel = like_plain(assembled(project), operation, change)
    parts = bound_to(monkeypatch, project, operation, kernel)
    with pytest.raises(DifferenceFound) as found:
        check_kernels(parts, lambda line: None)
    assert f"{operation} (" in str(found.value) and "on cpu is" in str(found.value)
    assert shown in str(found.value) and found.value.exit_code == 7


def test_a_kernel_that_rounds_to_bfloat16_passes_and_its_error_is_said(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = OPERATIONS[0]
    kernel = like_plain(assembled(project), operation, lambda x: x.bfloat16().to(x.dtype))
    parts = bound_to(monkeypatch, project, operation, kernel)
    before = [vars(each.module)[each.attribute] for each in bindings(parts.targets[0].model)]
    said: list[str] = []
    check_kernels(parts, said.append)
    assert (
        said[0].startswith("kernels against plain PyTorch: chunk_gated_delta_rule 1.") and "e-03" in said[0]
    )
    assert before == [vars(each.module)[each.attribute] for each in bindings(parts.targets[0].model)]


def test_a_kernel_that_raises_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image")

    parts = bound_to(monkeypatch, project, OPERATIONS[0], broken)
    with pytest.raises(EngineError, match=r"chunk_gated_delta_rule .* on cpu failed.*no kernel image"):
        check_kernels(parts, lambda line: None)


def test_a_run_whose_kernel_is_wrong_ends_before_its_first_step_and_leaves_no_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_to(monkeypatch, project, OPERATIONS[0], like_plain(assembled(project), OPERATIONS[0], Tensor.neg))
    monkeypatch.setattr("engine.target.loading.route_cpu_calls_to_torch", lambda model: None)
    with pytest.raises(DifferenceFound, match="chunk_gated_delta_rule"):
        run(load_schedule(project), output=tmp_path / "run", console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_relative_errors_are_of_norms_and_never_hide_a_nan() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative_error([one * 1.1], [one]) == pytest.approx(0.1, rel=1e-5)
    assert relative_error([one, one.clone().fill_(torch.nan)], [one, one]) == float("inf")


@pytest.mark.gpu
def test_the_kernels_of_this_gpu_compute_what_plain_pytorch_computes(project: Path) -> None:
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # as those of the large targets
    folder = write_config(project.parent / "heads_128", **heads)
    device = torch.device("cuda", 0)
    target = load_target(folder, target_layer_ids=(0, 2), dtype=torch.bfloat16, device=device, init="random")
    errors = kernel_errors(target)
    print(*errors, sep="\n")
    assert {error.operation for error in errors} >= {"chunk_gated_delta_rule"}
    assert not [str(error) for error in errors if error.bad]


# Attention.


def with_attention(project: Path, builder: Any = prepare_attention) -> Any:
    parts = assembled(project, "data.max_anchors=8")
    recipe = attrs.evolve(parts.recipe, backend="flex", attention=builder)
    return attrs.evolve(parts, plan=attrs.evolve(parts.plan, recipe=recipe))


def skewed(*arguments: Any) -> Any:
    attend = prepare_attention(*arguments)
    return lambda *tensors: attend(*tensors) * 1.05


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_agrees_with_the_dense_one_and_its_error_is_said(project: Path) -> None:
    said: list[str] = []
    check_attention(with_attention(project), said.append, backward=False)
    assert said[0].startswith("flex attention against the dense one: ")


def test_attention_that_differs_is_named_with_layer_device_and_error(project: Path) -> None:
    with pytest.raises(
        DifferenceFound, match=r"flex attention on cpu: output of a \w+ layer is 0\.05"
    ) as found:
        check_attention(with_attention(project, skewed), lambda line: None, backward=False)
    assert found.value.exit_code == 7


def test_gradients_are_compared_too(project: Path) -> None:
    def straight(*arguments: Any) -> Any:
        attend = prepare_attention("dense", *arguments[1:])

        def stopped(kind: str, q: Tensor, *keys: Tensor) -> Tensor:
            return attend(kind, q, *(key * 1.0 + (key - key.detach()) * 0.2 for key in keys))

        return stopped

    with pytest.raises(DifferenceFound, match=r"gradient of \w+ of a \w+ layer is 0\.2"):
        check_attention(with_attention(project, straight), lambda line: None)


def test_dense_attention_is_its_own_reference_and_not_compared(project: Path) -> None:
    said: list[str] = []
    check_attention(assembled(project), said.append)
    assert not said


@pytest.mark.gpu
def test_compiled_attention_of_this_gpu_agrees_forward_and_backward(project: Path) -> None:
    settings = ['devices={targets = ["cuda:0"], drafters = ["cuda:0"]}', 'drafter.dtype="bfloat16"']
    parts = assembled(project, *settings, "drafter.attention=flex")
    said: list[str] = []
    check_attention(parts, said.append)
    assert said
