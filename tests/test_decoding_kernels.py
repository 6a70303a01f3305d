"""On a GPU decoding takes kernels that any shape fits: none is tuned, and what comes out is the same."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_kernels import HERE, launch, load_kernels
from decoding_targets import EOS, builtin_target, counted_forwards, draft_from, drafter_for, tiny_target
from stub_process import findings_of
from test_target_rollback import MILD, ROUNDING, SIZE, differences, texts
from torch import Tensor

from engine import served_pair
from engine.dflash.speculation import decode_alone, speculate
from engine.evaluate import evaluate_checkpoint
from engine.run import run
from engine.runtime.stub_driver import stub_driver
from engine.runtime.tuning_cache import TuningCache
from engine.schedule import load_schedule
from engine.served_pair import earlier_tuning
from engine.target import cached_forward, decoding_kernels
from engine.target.cached_forward import (
    commit,
    pending_room,
    prefill,
    row_bytes,
    verify,
)
from engine.target.decoding_kernels import (
    CHUNKED,
    RECURRENT,
    TOKENS_IN_TURN,
    any_shape,
    any_shape_attention,
)
from engine.target.kernels import bindings
from engine.target.loading import Target

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def shapes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a device on which shapes cost something."""
    monkeypatch.setattr(decoding_kernels, "shapes_cost", lambda device: True)
    monkeypatch.setattr(cached_forward, "shapes_cost", lambda device: True)


@pytest.fixture
def by_length(
    shapes_cost: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[Target, list[tuple[str, int]]]:
    """A hybrid whose plain functions are chosen by length, and which of them ran over how many tokens."""
    target = tiny_target(tmp_path, "hybrid", **MILD)
    monkeypatch.setattr(decoding_kernels, "tuned", lambda binding, device: True)
    ran: list[tuple[str, int]] = []

    def noting(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append((operation, args[0].shape[1]))
            return function(*args, **kwargs)

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call

    for binding in bindings(target.model):
        if binding.operation in (CHUNKED, RECURRENT):
            function = vars(binding.module)[binding.attribute]
            monkeypatch.setattr(binding.module, binding.attribute, noting(binding.operation, function))
    return target, ran


# --- which kernels run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return findings_of("decoding_launches.py", tmp_path_factory.mktemp("empty"))


def test_an_evaluation_through_fla_tunes_no_kernel_whatever_shapes_it_brings(findings: Any) -> None:
    assert findings["bound"].startswith("fla.")
    assert findings["any shape"]["cold"] == []
    assert findings["any shape"]["kernels"] == ["fused_recurrent_gated_delta_rule_fwd_kernel"]
    assert findings["any shape"]["variants"] <= 3  # with states coming in or not, with states kept or not


def test_as_the_model_file_would_have_it_each_number_of_rows_is_tuned_anew(findings: Any) -> None:
    cold = [kernel for kernel, _ in findings["as they come"]["cold"]]
    assert cold.count("chunk_local_cumsum_scalar_kernel") >= 6
    assert cold.count("chunk_gated_delta_rule_fwd_kernel_h_blockdim64") == 3


def test_short_inputs_go_token_by_token_and_long_ones_in_chunks(
    by_length: tuple[Target, list[tuple[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, ran = by_length
    monkeypatch.setattr(decoding_kernels, "TOKENS_IN_TURN", 8)
    for length, operation in ((3, RECURRENT), (8, RECURRENT), (9, CHUNKED)):
        ran.clear()
        prefill(target, texts(length))
        assert set(ran) == {(operation, length)}
    ran.clear()
    target.logits(torch.tensor(texts(3)))  # outside of the block: as it was
    assert set(ran) == {(CHUNKED, 3)}


def test_on_a_cpu_nothing_is_changed() -> None:
    model = builtin_target().model
    before = [vars(binding.module)[binding.attribute] for binding in bindings(model)]
    with any_shape(model, CPU):
        pass
    assert [vars(binding.module)[binding.attribute] for binding in bindings(model)] == before


def test_attention_is_not_cudnns_inside_and_may_be_again_outside(shapes_cost: None) -> None:
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    with any_shape_attention(CPU):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == allowed


# --- what comes out ---------------------------------------------------------------------------------------


def test_token_by_token_the_states_taken_back_are_the_same(
    by_length: tuple[Target, list[tuple[str, int]]],
) -> None:
    target, ran = by_length
    assert max(differences(target, rounds=8)) < ROUNDING
    assert any(operation == RECURRENT and tokens > 1 for operation, tokens in ran)


def test_greedy_text_is_the_same_with_more_tokens_pending(
    by_length: tuple[Target, list[tuple[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = by_length
    prompts = texts(3, 1, 6, 3, 5)
    alone = decode_alone(target, prompts, max_new_tokens=40, stop=[EOS])
    for wrong in (0.0, 0.2, 0.6):
        draft_from(monkeypatch, alone, wrong, target.summary.vocab_size)
        decoded = speculate(target, drafter_for(target), prompts, max_new_tokens=40, stop=[EOS])
        assert [result.tokens for result in decoded] == alone


def test_states_are_moved_less_often_and_never_fall_further_behind_than_there_is_room(
    shapes_cost: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tiny_target(tmp_path, "hybrid", **MILD)
    rows, _, _ = prefill(target, texts(6, 4, 9, 2))
    room = pending_room(CPU, 4, SIZE)
    assert room == 4 * SIZE
    forwards = counted_forwards(monkeypatch, target)
    drawn = torch.Generator().manual_seed(2)
    for _ in range(40):
        counts = torch.randint(1, SIZE + 1, (4,), generator=drawn).tolist()
        commit(rows, verify(rows, torch.tensor(texts(*[SIZE] * 4))), counts)
        assert max(map(len, rows.pending)) < room
    assert 40 < forwards() <= 56  # at a block's room it would be nearly 80


@pytest.mark.parametrize(
    "rows, size, room", [(1, 8, 32), (64, 8, 24), (64, 16, 16), (32, 16, 48), (256, 8, 8)]
)
def test_a_verification_stays_as_small_as_its_launches_are_long(
    shapes_cost: None, rows: int, size: int, room: int
) -> None:
    assert pending_room(CPU, rows, size) == room


def test_a_cpu_moves_states_as_soon_as_a_block_is_pending() -> None:
    assert pending_room(CPU, 1, 8) == 8


def test_what_a_row_remembers_is_counted_to_the_byte(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "hybrid")
    rows, _, _ = prefill(target, texts(7, 7))
    kept: list[Tensor] = [
        tensor for layer in rows.layers for tensor in (layer.keys, layer.values) if tensor is not None
    ]
    states = [state for layer in rows.layers for named in layer.states.values() for state in named.values()]
    assert kept and states
    total = sum(tensor.numel() * tensor.element_size() for tensor in [*kept, *states])
    assert 2 * row_bytes(rows, 7) == total
    assert row_bytes(rows, 8) - row_bytes(rows, 7) == sum(tensor[0, :, :1].nbytes for tensor in kept)


# --- tuning that is needed all the same -------------------------------------------------------------------


def test_a_key_tuned_while_decoding_is_told_and_kept_though_the_command_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_pair, "fingerprint", lambda: HERE)
    monkeypatch.setattr(served_pair, "cache_folder", lambda: tmp_path)
    with stub_driver(bench_s=0):
        kernels, lines = load_kernels(tmp_path), []
        with earlier_tuning("cuda:0", lines.append):
            launch(kernels.scale, 64, True)
            assert len(lines) == 1 and lines[0].startswith("tuned scale (64, True")
            # What another process would find now, had this one been killed.
            later = TuningCache(HERE, tmp_path, lines.append)
            assert "scale" in later.path.read_text()
        again = load_kernels(tmp_path)
        with earlier_tuning("cuda:0", lines.append):
            launch(again.scale, 64, True)
        assert again.benchmarks == [] and len(lines) == 1


# --- on a GPU ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_200_prompts_are_evaluated_within_a_minute_and_nothing_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = load_schedule(
        Path(__file__).parent.parent / "schedules/sequential_target_parallel_drafter.toml",
        ["run.steps=40", "run.eval_every=0", "target.dtype=bfloat16", "drafter.dtype=bfloat16"],
    )
    trained = run(schedule, output=tmp_path / "run").folder.path
    # Nothing that an earlier run tuned or compiled may hide what an evaluation needs.
    monkeypatch.setattr(served_pair, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    seconds = []
    for batch in (64, 64, None):
        lines: list[str] = []
        begin = time.perf_counter()
        found = evaluate_checkpoint(trained, device="cuda:0", prompts=200, batch=batch, say=lines.append)
        seconds.append(time.perf_counter() - begin)
        assert [line for line in lines if line.startswith("tuned")] == []
        assert found.decoding is not None and found.decoding.prompts == 200
        assert found.decoding.unexplained == []
    print(f"evaluations of 200 prompts: {', '.join(f'{one:.1f} s' for one in seconds)}")
    assert seconds[1] < 60 and seconds[2] < 60


@pytest.mark.gpu
def test_on_a_gpu_the_recurrent_kernel_gives_the_chunked_ones_logits_up_to_rounding() -> None:
    target = builtin_target(torch.float32, GPU)
    ids = torch.randint(4, 1000, (5, TOKENS_IN_TURN), generator=torch.Generator().manual_seed(3)).to(GPU)
    chunked = target.logits(ids)
    with any_shape(target.model, GPU):
        in_turn = target.logits(ids)
    reference = builtin_target(torch.float32, CPU).logits(ids.cpu())
    scale = reference.abs().max()
    error = (in_turn.cpu() - reference).abs().max() / scale
    assert error < 1.1 * (chunked.cpu() - reference).abs().max() / scale + 1e-4
