"""What is drawn has the target's distribution, whatever the drafter proposes and whatever is beside it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_targets import EOS, drafter_for, tiny_target
from torch import Tensor

from engine.dflash import speculation
from engine.dflash.speculation import decode_alone, speculate
from engine.errors import InputError, NonFinite
from engine.target import generation
from engine.target.loading import Target
from engine.target.sampling import (
    ACCEPT,
    CHOOSE,
    DRAFT,
    check_request,
    choose,
    draw,
    most_likely,
    probabilities,
    prompt_key,
    uniform,
)

VOCABULARY = 6
PROMPT = [3, 1, 4, 1]
SAMPLES = 4000
PROMPTS = [[5, 9, 12], [7], [30, 4, 4, 8, 21, 6], [11, 3, 5]]


# --- drawing ----------------------------------------------------------------------------------------------


def test_draws_follow_their_weights_and_never_take_one_of_zero() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0]).expand(80_000, -1)
    numbers = uniform(3, torch.arange(80_000), torch.tensor(0), CHOOSE)
    shares = draw(weights, numbers).bincount(minlength=6) / 80_000
    torch.testing.assert_close(shares, torch.tensor([0, 2, 0, 1, 5, 0]) / 8, atol=0.006, rtol=0)
    assert shares[[0, 2, 5]].eq(0).all()


def test_the_ends_of_the_unit_interval_draw_the_first_and_last_weight() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0])
    assert draw(weights, torch.tensor(0.0, dtype=torch.float64)) == 1
    largest = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
    assert draw(weights, largest) == 2
    generator = torch.Generator().manual_seed(1)
    totals = torch.randn(20_000, 1, generator=generator, dtype=torch.float64).mul(60).exp2()
    assert draw(torch.cat([totals, totals * 0], 1), largest.expand(20_000)).eq(0).all()


def test_small_probabilities_at_the_end_of_a_large_vocabulary_are_drawn() -> None:
    weights = torch.full((250_000,), 4e-6)
    numbers = torch.tensor([0.1, 0.5, 0.999, 1 - 2.0**-53], dtype=torch.float64)
    drawn = draw(weights.expand(4, -1), numbers).double() / 250_000
    torch.testing.assert_close(drawn, numbers, atol=5e-6, rtol=0)


def test_numbers_depend_on_seed_prompt_place_and_purpose() -> None:
    key, place = torch.tensor(prompt_key(PROMPT)), torch.tensor(4)
    same = uniform(1, key, place, DRAFT)
    assert torch.equal(same, uniform(1, key, place, DRAFT)) and 0 <= same < 1
    others = [
        uniform(2, key, place, DRAFT),
        uniform(1, torch.tensor(prompt_key([*PROMPT, 1])), place, DRAFT),
        uniform(1, key, place + 1, DRAFT),
        uniform(1, key, place, ACCEPT),
        uniform(1, key, place, CHOOSE),
    ]
    assert len({float(same), *map(float, others)}) == 6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_no_text(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, VOCABULARY)
    keys, places = torch.arange(3), torch.tensor([0, 11, 12])
    assert choose(logits, temperature, 0, keys, places).shape == (3,)
    logits[1] = bad
    with pytest.raises(NonFinite, match=r"row 1, token 11 of its answer are not finite \(1 of 3"):
        choose(logits, temperature, 0, keys, places)
    if bad < 0:
        logits[1, 2] = 0.0  # a token that may not be said is no fault
        assert choose(logits, temperature, 0, keys, places)[1] == 2


def test_a_single_nan_in_a_block_is_named_with_its_slot() -> None:
    logits = torch.zeros(2, 3, VOCABULARY)
    logits[1, 2, 4] = float("nan")
    with pytest.raises(NonFinite, match="the logits at row 1, slot 2 are"):
        most_likely(logits)
    with pytest.raises(NonFinite, match="the probabilities at row 1, slot 2 are"):
        draw(probabilities(logits, 1.0), torch.full((2, 3), 0.5, dtype=torch.float64))
    assert most_likely(logits[:, :2]).eq(0).all()  # of equal ones the first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_whose_states_overflow_ends_the_decoding(tmp_path: Path, temperature: float) -> None:
    target = tiny_target(tmp_path, "hybrid")
    with torch.no_grad():
        target.lm_head[-1] = float("nan")
    options: dict[str, Any] = {"max_new_tokens": 3, "stop": [], "temperature": temperature}
    with pytest.raises(NonFinite, match="token 0 of its answer"):
        decode_alone(target, PROMPTS, **options)
    with pytest.raises(NonFinite, match="token 0 of its answer"):
        speculate(target, drafter_for(target), PROMPTS, **options)


@pytest.mark.parametrize("temperature", [1e-5, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_draws_nothing_is_refused_with_advice(temperature: float) -> None:
    with pytest.raises(InputError, match="0 takes the most likely token"):
        check_request(PROMPTS, 4, temperature)


# --- the target's distribution ----------------------------------------------------------------------------


def joint(target: Target, temperature: float) -> Tensor:
    """Probabilities [V, V, V] of the first three tokens behind the prompt, by forwards without a cache."""
    texts = torch.tensor(
        [[*PROMPT, first, second] for first, second in itertools.product(range(VOCABULARY), repeat=2)]
    )
    p = probabilities(target.logits(texts), temperature).double()  # [V², L, V]
    p = p.view(VOCABULARY, VOCABULARY, texts.shape[1], VOCABULARY)
    first, second, third = p[0, 0, -3], p[:, 0, -2], p[:, :, -1]
    return first[:, None, None] * second[:, :, None] * third


def surprise(samples: list[list[int]], expected: Tensor) -> float:
    """Chi-square of samples against a joint distribution as a normal deviate; cells under 5 are merged."""
    cells = torch.tensor([(a * VOCABULARY + b) * VOCABULARY + c for a, b, c in samples])
    counts = cells.bincount(minlength=VOCABULARY**3).double()
    wanted = expected.flatten() * len(samples)
    rare = wanted < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    freedom = len(wanted) - 1
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    cube_root, spread = (chi_square / freedom) ** (1 / 3), 2 / (9 * freedom)  # Wilson and Hilferty
    return (cube_root - (1 - spread)) / spread**0.5


def many(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The same prompt many times, each with draws of its own, as under as many seeds."""
    numbers = itertools.count(1)
    for module in (speculation, generation):
        monkeypatch.setattr(module, "prompt_key", lambda prompt: next(numbers))
    return [PROMPT] * SAMPLES


@pytest.fixture(params=["dense", pytest.param("hybrid", marks=pytest.mark.slow)])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return tiny_target(tmp_path, request.param, VOCABULARY, initializer_range=0.15)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_speculation_keeps_the_targets_distribution_of_three_tokens(
    target: Target, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    decoded = speculate(
        target,
        drafter_for(target, block_size=3),
        many(monkeypatch),
        max_new_tokens=3,
        stop=[],
        temperature=temperature,
        rows_at_once=SAMPLES,
    )
    advances = [count for result in decoded for count in result.acceptance]
    assert 0.1 < advances.count(1) / len(advances) < 0.9  # drafts are accepted, and rejected
    assert abs(surprise([result.tokens for result in decoded], joint(target, temperature))) < 3


def test_the_target_alone_has_the_same_distribution(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = decode_alone(
        target, many(monkeypatch), max_new_tokens=3, stop=[], temperature=1.0, rows_at_once=SAMPLES
    )
    assert abs(surprise(samples, joint(target, 1.0))) < 3
    assert surprise(samples, joint(target, 1.5)) > 10


@pytest.mark.parametrize("fault", ["every draft is accepted", "a rejected token is drawn from p alone"])
def test_wrong_rejection_rules_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    target = tiny_target(tmp_path, "dense", VOCABULARY, initializer_range=0.15)
    if fault.startswith("every"):

        def numbers(seed: int, keys: Tensor, places: Tensor, purpose: int) -> Tensor:
            return uniform(seed, keys, places, purpose) * (purpose != ACCEPT)

        monkeypatch.setattr(speculation, "uniform", numbers)
    else:
        accept: Any = speculation._accept

        def from_p(batch: Any, drafts: Tensor, proposal: Tensor, logits: Tensor, keys: Tensor) -> Any:
            leading, _ = accept(batch, drafts, proposal, logits, keys)
            p = probabilities(logits, batch.temperature)[torch.arange(len(drafts)), leading]
            return leading, draw(p, uniform(batch.seed, keys, batch.places() + leading, CHOOSE))

        monkeypatch.setattr(speculation, "_accept", from_p)
    decoded = speculate(
        target,
        drafter_for(target, block_size=3),
        many(monkeypatch),
        max_new_tokens=3,
        stop=[],
        temperature=1.0,
        rows_at_once=SAMPLES,
    )
    assert surprise([result.tokens for result in decoded], joint(target, 1.0)) > 10


# --- independence -----------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_neighbours_order_or_rows_at_once(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "hybrid")
    drafter = drafter_for(target)
    options: dict[str, Any] = {"max_new_tokens": 12, "stop": [EOS], "temperature": 1.0, "seed": 4}
    together = speculate(target, drafter, PROMPTS, **options)
    assert together == speculate(target, drafter, PROMPTS[::-1], rows_at_once=1, **options)[::-1]
    alone = decode_alone(target, PROMPTS, **options)
    assert alone == decode_alone(target, PROMPTS[::-1], rows_at_once=2, **options)[::-1]
    other_seed = decode_alone(target, PROMPTS, **{**options, "seed": 5})
    assert alone != other_seed


def test_a_temperature_near_zero_is_greedy(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "dense")
    options: dict[str, Any] = {"max_new_tokens": 16, "stop": []}
    greedy = decode_alone(target, PROMPTS, **options)
    assert decode_alone(target, PROMPTS, temperature=1e-4, **options) == greedy
    decoded = speculate(target, drafter_for(target), PROMPTS, temperature=1e-4, **options)
    assert [result.tokens for result in decoded] == greedy
