"""Greedy speculative decoding gives the target's own text, and the acceptance that others measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_targets import (
    CPU,
    EOS,
    LAYER_KINDS,
    builtin_drafter,
    builtin_target,
    counted_forwards,
    draft_from,
    drafter_for,
    held_out,
    tiny_target,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.builtin.tokenizer import VOCABULARY
from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import build_drafter
from engine.dflash.speculation import Decoded, decode_alone, explain_difference, speculate
from engine.errors import InputError
from engine.target.loading import load_target
from engine.target.row_cache import StoredLayer

GOLDEN = Path(__file__).parent / "golden/decoding/decode.safetensors"
PROMPTS = [[5, 9, 12], [7], [30, 4, 4, 8, 21, 6], [11, 3, 5], [9, 9, 31, 17]]


# --- others' decoding -------------------------------------------------------------------------------------


def test_the_reference_decoding_comes_out_again_at_every_verification(tmp_path: Path) -> None:
    with safe_open(GOLDEN, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    settings = json.loads(metadata["target_config"]) | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    weights = {
        name.removeprefix("target."): tensor for name, tensor in tensors.items() if name.startswith("target.")
    }
    save_file(weights, tmp_path / "model.safetensors")
    config = DrafterConfig.from_server_json(json.loads(metadata["config"]))
    target = load_target(
        tmp_path,
        target_layer_ids=config.target_layer_ids,
        dtype=torch.float64,
        device=CPU,
        keep_head=True,
    )
    drafter = build_drafter(config, CPU, torch.float64)
    drafter.load_state_dict(
        {
            name.removeprefix("drafter."): tensor
            for name, tensor in tensors.items()
            if name.startswith("drafter.")
        }
    )
    prompts = tensors["prompts"].tolist()
    # A few tokens more than the reference's 60, whose last verifications ran past them.
    decoded = speculate(target, drafter, prompts, max_new_tokens=72, stop=[])
    alone = decode_alone(target, prompts, max_new_tokens=60, stop=[])
    for number, (prompt, result) in enumerate(zip(prompts, decoded, strict=True)):
        assert prompt + result.tokens[:60] == tensors[f"output.{number}"][0].tolist()
        assert prompt + alone[number] == tensors[f"greedy.{number}"][0].tolist()
        acceptance = tensors[f"acceptance.{number}"].tolist()
        assert result.acceptance[: len(acceptance)] == acceptance


# --- the target's own text --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(LAYER_KINDS))
def test_drafts_of_every_quality_leave_the_targets_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    target = tiny_target(tmp_path, kind)
    drafter = drafter_for(target)
    alone = decode_alone(target, PROMPTS, max_new_tokens=40, stop=[EOS])
    for wrong in (0.0, 0.2, 1.0):
        draft_from(monkeypatch, alone, wrong, target.summary.vocab_size)
        decoded = speculate(target, drafter, PROMPTS, max_new_tokens=40, stop=[EOS])
        assert [result.tokens for result in decoded] == alone
        advances = [count for result in decoded for count in result.acceptance]
        if wrong == 0:
            assert all(count == 8 for result in decoded for count in result.acceptance[:-1])
        elif wrong == 1:
            assert set(advances) == {1}
        else:
            assert len(set(advances)) > 3


def test_a_fresh_drafter_is_useless_and_harmless(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "hybrid")
    decoded = speculate(target, drafter_for(target), PROMPTS, max_new_tokens=24, stop=[])
    assert [result.tokens for result in decoded] == decode_alone(target, PROMPTS, max_new_tokens=24, stop=[])


def decode_held_out(monkeypatch: pytest.MonkeyPatch, count: int, limit: int) -> list[Decoded]:
    prompts, answers = held_out(count)
    draft_from(monkeypatch, answers, 0.15, VOCABULARY)
    return speculate(builtin_target(), builtin_drafter(), prompts, max_new_tokens=limit, stop=[EOS])


def test_held_out_answers_of_the_built_in_hybrid_come_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = decode_held_out(monkeypatch, 20, limit=48)
    assert [result.tokens for result in decoded] == [answer[:48] for answer in held_out(20)[1]]
    assert {count for result in decoded for count in result.acceptance} == set(range(1, 9))


@pytest.mark.slow
def test_200_held_out_answers_of_the_built_in_hybrid_come_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, _ = held_out(200)
    alone = decode_alone(builtin_target(), prompts, max_new_tokens=320, stop=[EOS])
    decoded = decode_held_out(monkeypatch, 200, limit=320)
    for prompt, result, own in zip(prompts, decoded, alone, strict=True):
        difference = explain_difference(builtin_target(), prompt, result.tokens, own)
        assert difference is None or difference.near_tie, str(difference)


def test_a_rollback_that_leaves_recurrent_states_as_they_are_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = StoredLayer.given

    def careless(self: StoredLayer, rows: Tensor | None, slots: int, owned: bool) -> object:
        return given(self, rows, slots, True)  # a verification may write into what should be kept

    monkeypatch.setattr(StoredLayer, "given", careless)
    decoded = decode_held_out(monkeypatch, 8, limit=40)
    prompts, answers = held_out(8)
    wrong = [
        explain_difference(builtin_target(), prompt, result.tokens, answer[:40])
        for prompt, result, answer in zip(prompts, decoded, answers, strict=True)
    ]
    assert any(difference is not None and not difference.near_tie for difference in wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_differences_from_the_targets_own_text_are_near_ties(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    device = torch.device("cuda:0")
    target, drafter = builtin_target(dtype, device), builtin_drafter(dtype, device)
    prompts, answers = held_out(100)
    alone = decode_alone(target, prompts, max_new_tokens=320, stop=[EOS])
    draft_from(monkeypatch, answers, 0.15, VOCABULARY)
    decoded = speculate(target, drafter, prompts, max_new_tokens=320, stop=[EOS])
    differences = [
        explain_difference(target, prompt, result.tokens, own)
        for prompt, result, own in zip(prompts, decoded, alone, strict=True)
    ]
    found = [difference for difference in differences if difference is not None]
    assert all(difference.near_tie for difference in found), [str(difference) for difference in found]
    assert len(found) <= 20
    assert {count for result in decoded for count in result.acceptance} == set(range(1, 9))


# --- ends, batches, reports -------------------------------------------------------------------------------


def test_answers_end_with_their_stop_token_or_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(tmp_path, "dense")
    free = decode_alone(target, PROMPTS, max_new_tokens=30, stop=[])
    stop = {free[0][0], free[1][5], free[2][17]}  # in the prefill, inside a block, in a later one
    expected = [
        tokens[: next((at + 1 for at, token in enumerate(tokens) if token in stop), 30)] for tokens in free
    ]
    assert decode_alone(target, PROMPTS, max_new_tokens=30, stop=stop) == expected
    draft_from(monkeypatch, free, 0.1, target.summary.vocab_size)
    decoded = speculate(target, drafter_for(target), PROMPTS, max_new_tokens=30, stop=stop)
    assert [result.tokens for result in decoded] == expected
    for result in decoded:
        assert sum(result.acceptance) == len(result.tokens) - 1
        assert len(result.drafted) == len(result.acceptance)
        assert all(
            count - drafted in (0, 1)
            for count, drafted in zip(result.acceptance, result.drafted, strict=True)
        )
        assert all(count == drafted + 1 for count, drafted in zip(result.acceptance[:-1], result.drafted))  # noqa: B905


@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_results_do_not_depend_on_how_many_prompts_are_decoded_at_once(
    tmp_path: Path, rows_at_once: int
) -> None:
    target = tiny_target(tmp_path, "hybrid")
    drafter = drafter_for(target)
    decoded = speculate(target, drafter, PROMPTS, max_new_tokens=12, stop=[EOS], rows_at_once=rows_at_once)
    assert decoded == [
        speculate(target, drafter, [prompt], max_new_tokens=12, stop=[EOS])[0] for prompt in PROMPTS
    ]
    assert decode_alone(target, PROMPTS, max_new_tokens=12, stop=[EOS], rows_at_once=rows_at_once) == [
        result.tokens for result in decoded
    ]


def test_tokens_are_told_as_they_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path, "dense")
    alone = decode_alone(target, PROMPTS, max_new_tokens=30, stop=[])
    draft_from(monkeypatch, alone, 0.3, target.summary.vocab_size)
    told: dict[int, list[tuple[list[int], int]]] = {index: [] for index in range(len(PROMPTS))}
    decoded = speculate(
        target,
        drafter_for(target),
        PROMPTS,
        max_new_tokens=30,
        stop=[],
        on_tokens=lambda index, tokens, drafted: told[index].append((tokens, drafted)),
    )
    for index, result in enumerate(decoded):
        assert [token for tokens, _ in told[index] for token in tokens] == result.tokens
        assert [len(tokens) for tokens, _ in told[index][1:]] == result.acceptance
        assert [drafted for _, drafted in told[index]] == [0, *result.drafted]


def test_one_token_is_the_prefills_and_needs_no_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(tmp_path, "dense")
    forwards = counted_forwards(monkeypatch, target)
    (decoded,) = speculate(target, drafter_for(target), [[5, 6]], max_new_tokens=1, stop=[])
    assert forwards() == 1 and len(decoded.tokens) == 1 and decoded.acceptance == []


@pytest.mark.parametrize(
    "changes, named",
    [({"target_layer_ids": (0, 1)}, "taps"), ({"vocab_size": 41, "mask_token_id": 40}, "vocab_size")],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    target = tiny_target(tmp_path, "dense")
    with pytest.raises(InputError, match=named):
        speculate(target, drafter_for(target, **changes), [[5]], max_new_tokens=4, stop=[])


@pytest.mark.parametrize(
    "request_, message",
    [
        ({"prompts": [[5], []]}, "prompt 1 has no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -0.5}, "temperature = -0.5"),
    ],
)
def test_what_cannot_be_decoded_is_refused(tmp_path: Path, request_: dict[str, Any], message: str) -> None:
    target = tiny_target(tmp_path, "dense")
    options: dict[str, Any] = {"prompts": [[5]], "max_new_tokens": 4, "stop": [], **request_}
    prompts = options.pop("prompts")
    with pytest.raises(InputError, match=message):
        speculate(target, drafter_for(target), prompts, **options)
    with pytest.raises(InputError, match=message):
        decode_alone(target, prompts, **options)


# --- differences ------------------------------------------------------------------------------------------


def test_a_difference_is_a_near_tie_only_where_both_tokens_are_most_likely(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "dense")
    prompt = PROMPTS[2]
    (alone,) = decode_alone(target, [prompt], max_new_tokens=12, stop=[])
    assert explain_difference(target, prompt, alone, list(alone)) is None

    other = (alone[7] + 1) % target.summary.vocab_size
    ours = [*alone[:7], other, *alone[8:]]
    fault = explain_difference(target, prompt, ours, alone)
    assert fault is not None and not fault.near_tie
    assert (fault.place, fault.ours, fault.alone) == (7, other, alone[7])
    assert fault.top[0] == alone[7] and fault.gap > fault.bound and "not a tie" in str(fault)

    with torch.no_grad():  # another token with the same row of the head has the same logit everywhere
        target.lm_head[other] = target.lm_head[alone[7]]
    tie = explain_difference(target, prompt, ours, alone)
    assert tie is not None and tie.near_tie and tie.gap == 0


def test_an_answer_that_ends_early_is_a_difference_and_no_tie(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "dense")
    (alone,) = decode_alone(target, [PROMPTS[0]], max_new_tokens=12, stop=[])
    difference = explain_difference(target, PROMPTS[0], alone[:5], alone)
    assert difference is not None and not difference.near_tie
    assert (difference.place, difference.ours, difference.alone) == (5, None, alone[5])
