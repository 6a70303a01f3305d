"""What a target says behind rolled back tokens equals what it says of the text alone."""

from pathlib import Path

import pytest
import torch
from decoding_targets import CPU, LAYER_KINDS, TAPS, counted_forwards, tiny_target
from torch import Tensor

from engine.errors import EngineError, TargetError
from engine.target.cached_forward import TargetRows, commit, prefill, select, step, verify
from engine.target.loading import Target, load_target
from engine.target.row_cache import StoredLayer

SIZE = 4
VOCABULARY = 40
ROUNDING = 5e-5  # of float32 through four layers, relative to the largest
MILD = {"initializer_range": 0.1}
"""Weights that do not amplify rounding: at three times the size it comes to 1e-4 for some texts."""

TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(params=list(LAYER_KINDS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return tiny_target(tmp_path, request.param, **MILD)


def texts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY - 1, (length,), generator=generator).tolist() for length in lengths]


def uncached(target: Target, text: list[int], last: int) -> tuple[Tensor, Tensor]:
    """Logits and taps of a text's last tokens by forwards without a cache."""
    ids = torch.tensor([text])
    taps = torch.cat(target.forward_taps(ids), -1)
    return target.logits(ids)[0, -last:], taps[0, -last:]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def differences(target: Target, rounds: int, most: int = SIZE, seed: int = 5) -> list[float]:
    """Verify random blocks, commit random counts; the differences from uncached logits and taps."""
    generator = torch.Generator().manual_seed(seed)
    committed = texts(7, 3, 7, 1, 12)
    rows, _, _ = prefill(target, committed)
    found = []
    for _ in range(rounds):
        blocks = torch.randint(3, VOCABULARY - 1, (len(committed), SIZE), generator=generator)
        verification = verify(rows, blocks)
        for row, text in enumerate(committed):
            logits, taps = uncached(target, text + blocks[row].tolist(), SIZE)
            found.append(relative(verification.logits[row], logits))
            found.append(relative(verification.taps[row], taps))
        counts = torch.randint(1, most + 1, (len(committed),), generator=generator).tolist()
        commit(rows, verification, counts)
        committed = [text + blocks[row, : counts[row]].tolist() for row, text in enumerate(committed)]
        assert [len(text) for text in committed] == held_and_pending(rows)
    return found


def held_and_pending(rows: TargetRows) -> list[int]:
    return [length + len(more) for length, more in zip(rows.lengths, rows.pending, strict=True)]


def test_rows_that_accept_different_numbers_all_equal_uncached_forwards(target: Target) -> None:
    assert max(differences(target, rounds=10)) < ROUNDING


def test_prefill_equals_an_uncached_forward_for_prompts_of_any_lengths(target: Target) -> None:
    prompts = texts(9, 2, 9, 1, 5)
    _, logits, taps = prefill(target, prompts)
    for row, prompt in enumerate(prompts):
        expected, expected_taps = uncached(target, prompt, len(prompt))
        torch.testing.assert_close(logits[row], expected[-1], **TOLERANCE)
        torch.testing.assert_close(taps[row], expected_taps, **TOLERANCE)


def test_steps_go_on_where_the_committed_text_ends(target: Target) -> None:
    prompts, new = texts(6, 2, 11), texts(9, 9, 9, seed=2)
    rows, _, _ = prefill(target, prompts)
    for place in range(9):
        logits = step(rows, torch.tensor([text[place] for text in new]))
        for row, prompt in enumerate(prompts):
            expected, _ = uncached(target, prompt + new[row][: place + 1], 1)
            torch.testing.assert_close(logits[row], expected[0], **TOLERANCE)


def test_a_verification_leaves_its_rows_as_they_were(target: Target) -> None:
    rows, _, _ = prefill(target, texts(5, 8))
    blocks = torch.tensor(texts(SIZE, SIZE, seed=3))
    commit(rows, verify(rows, blocks), [1, 3])  # so that a hybrid's rows have pending tokens
    first, second = verify(rows, blocks), verify(rows, blocks)
    assert torch.equal(first.logits, second.logits) and torch.equal(first.taps, second.taps)


def test_rows_that_stay_are_not_touched_by_those_that_leave(target: Target) -> None:
    prompts = texts(5, 14, 8)
    rows, _, _ = prefill(target, prompts)
    blocks = torch.tensor(texts(SIZE, SIZE, SIZE, seed=3))
    commit(rows, verify(rows, blocks), [2, 4, 1])
    select(rows, [2, 0])
    more = torch.tensor(texts(SIZE, SIZE, seed=4))
    verification = verify(rows, more)
    for row, text in enumerate([prompts[2] + blocks[2, :1].tolist(), prompts[0] + blocks[0, :2].tolist()]):
        logits, _ = uncached(target, text + more[row].tolist(), SIZE)
        torch.testing.assert_close(verification.logits[row], logits, **TOLERANCE)


def test_taps_of_sliding_layers_are_those_of_the_whole_model(tmp_path: Path) -> None:
    # A view of the first layers that forgot how its model attends would forget the windows too.
    for kind in ("all-sliding", "mixed-sliding"):
        target = tiny_target(tmp_path, kind, **MILD)
        ids = torch.tensor(texts(20))
        states = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        for tap, layer in zip(target.forward_taps(ids), TAPS, strict=True):
            assert torch.equal(tap, states[layer + 1])


@pytest.mark.parametrize("fault", ["states are not taken back", "convolution is not taken back"])
def test_a_hybrid_without_rollback_of_its_states_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    target = tiny_target(tmp_path, "hybrid", **MILD)
    assert max(differences(target, rounds=4)) < ROUNDING
    kept = "recurrent_states" if fault.startswith("states") else "conv_states"
    given = StoredLayer.given

    def careless(self: StoredLayer, rows: Tensor | None, slots: int, owned: bool) -> object:
        layer = given(self, rows, slots, owned)
        if kept in self.states and rows is None:
            setattr(layer, kept, dict(self.states[kept]))  # the forward writes into what should be kept
        return layer

    monkeypatch.setattr(StoredLayer, "given", careless)
    assert max(differences(target, rounds=4)) > 100 * ROUNDING


def test_a_hybrid_takes_at_most_two_forwards_a_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(tmp_path, "hybrid", **MILD)
    rows, _, _ = prefill(target, texts(6, 4, 9, 2))
    forwards = counted_forwards(monkeypatch, target)
    for counts in ([1, 2, 3, 4], [4, 3, 2, 1], [2, 2, 4, 1], [4, 4, 4, 4], [1, 1, 1, 3]):
        before = forwards()
        commit(rows, verify(rows, torch.tensor(texts(*[SIZE] * 4))), counts)
        assert forwards() - before <= 2
        assert all(len(pending) < SIZE for pending in rows.pending)


def test_a_hybrid_that_accepts_whole_blocks_needs_one_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(tmp_path, "hybrid", **MILD)
    rows, _, _ = prefill(target, texts(6, 4))
    forwards = counted_forwards(monkeypatch, target)
    for _ in range(3):
        commit(rows, verify(rows, torch.tensor(texts(SIZE, SIZE))), [SIZE, SIZE])
    assert forwards() == 3 and rows.lengths == [6 + 12, 4 + 12]


def test_eager_attention_sees_the_same(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "mixed-sliding")
    target.model.set_attn_implementation("eager")
    target._view.config._attn_implementation = "eager"
    assert max(differences(target, rounds=4)) < ROUNDING


def test_decoding_with_a_target_without_its_head_is_refused(tmp_path: Path) -> None:
    tiny_target(tmp_path, "dense")
    cut = load_target(tmp_path, target_layer_ids=TAPS, dtype=torch.float32, device=CPU, init="random")
    with pytest.raises(EngineError, match="keep_head"):
        prefill(cut, [[5, 6]])


def test_attention_that_takes_no_mask_is_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "dense")
    target.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(TargetError, match="flash_attention_2.*walk"):
        prefill(target, [[5, 6]])
