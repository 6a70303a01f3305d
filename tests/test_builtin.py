"""The shipped target and conversations keep what they promise; the files themselves are tested."""

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from engine.builtin import HELD_OUT, TINY_HYBRID, TRAIN, resolve
from engine.builtin.kinds import KINDS
from engine.builtin.text import Conversation, conversation, is_set_aside
from engine.builtin.tokenizer import MASK, VOCABULARY, render_prompt
from engine.builtin.words import ambiguous_bodies, stdlib_pairs
from engine.data.chat import load_tokenizer, tokenizer_fingerprint
from engine.data.documents import Documents, assert_disjoint, open_documents
from engine.errors import InputError
from engine.target.loading import Target, load_target
from engine.target_agreement import rows_agreement
from tools.write_builtin_conversations import greedy

SIX_MEGABYTES = 6_000_000


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(resolve(TINY_HYBRID))


@cache
def documents(name: str) -> Documents:
    return open_documents(resolve(name), vocab_size=VOCABULARY)


@cache
def target() -> Target:
    torch.set_num_threads(1)
    return load_target(
        resolve(TINY_HYBRID),
        target_layer_ids=[0],
        dtype=torch.float32,
        device=torch.device("cpu"),
        keep_head=True,
    )


def model() -> torch.nn.Module:
    return target().model


@cache
def tokens_and_origins(name: str) -> list[tuple[np.ndarray, np.ndarray, Conversation]]:
    """Ids, mask and the conversation each document was made from."""
    manifest = documents(name).manifest
    assert manifest is not None
    seed, indices = manifest.source["text_seed"], manifest.source["conversations"]
    rows = [documents(name).document(at) for at in range(len(documents(name)))]
    return [
        (row.input_ids, row.loss_mask, conversation(seed, index))
        for row, index in zip(rows, indices, strict=True)
    ]


def answer_text(ids: np.ndarray, mask: np.ndarray) -> str:
    answer = ids[mask].tolist()
    assert answer[-1] == tokenizer().eos_token_id
    return tokenizer().decode(answer[:-1])


def training_record() -> dict[str, object]:
    return json.loads((resolve(TINY_HYBRID) / "training.json").read_text())


# --- the text ---------------------------------------------------------------------------------------------


def test_a_conversation_depends_on_seed_and_number_alone() -> None:
    forwards = [conversation(5, index) for index in range(300)]
    backwards = [conversation(5, index) for index in reversed(range(300))]
    assert forwards == backwards[::-1]
    assert forwards != [conversation(6, index) for index in range(300)]
    text = "".join(one.prompt + one.answer for one in forwards)
    # The shipped manifests name conversations by number, so another text under the same numbers is a fault.
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "5091a91d780b93d4"


def test_equal_prompts_have_equal_answers_and_every_kind_occurs() -> None:
    answers: dict[str, str] = {}
    for index in range(20_000):
        one = conversation(7, index)
        if one.answer in ambiguous_bodies():
            assert one.kind == "docstring"
            continue
        assert answers.setdefault(one.prompt, one.answer) == one.answer
    assert {conversation(7, index).kind for index in range(300)} == set(KINDS)


def test_the_frozen_functions_are_short_and_carry_their_licence() -> None:
    assert 1_000 <= len(stdlib_pairs()) <= 3_000
    assert len(ambiguous_bodies()) < 0.05 * len(stdlib_pairs())
    bodies = [ids for ids in tokenizer()([pair["body"] for pair in stdlib_pairs()]).input_ids]
    assert np.quantile([len(ids) for ids in bodies], 0.98) <= 120
    licence = Path(resolve(TINY_HYBRID)).parent / "stdlib_pairs.LICENSE"
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence.read_text()


# --- the tokenizer ----------------------------------------------------------------------------------------


def test_the_tokenizer_has_1024_ids_and_gives_every_text_back() -> None:
    assert len(tokenizer()) == VOCABULARY == max(tokenizer().get_vocab().values()) + 1
    texts = [
        "  two  blanks\r\n\ttab",
        "naïve Łódź 你好 🙂",
        "x" * 300,
        "3.14159e-26",
        "",
        "<|im_start|> by hand",
    ]
    for text in texts + [conversation(3, index).answer for index in range(200)]:
        assert tokenizer().decode(tokenizer()(text).input_ids) == text
    assert len(tokenizer()("20417").input_ids) == 5


def test_the_chat_template_marks_the_answer_with_its_end_token() -> None:
    one = conversation(3, 1)
    rendered = tokenizer().apply_chat_template(
        one.messages(), return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [
        token for token, mark in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mark
    ]
    assert tokenizer().decode(marked) == one.answer + "<|im_end|>"
    prompt = tokenizer().apply_chat_template(one.messages()[:1], add_generation_prompt=True, tokenize=False)
    assert prompt == render_prompt(one.prompt)


# --- the shipped conversations ----------------------------------------------------------------------------


def test_the_mask_token_occurs_in_no_document() -> None:
    mask_token_id = tokenizer().convert_tokens_to_ids(MASK)
    assert mask_token_id not in (tokenizer().pad_token_id, tokenizer().eos_token_id)
    for name in (TRAIN, HELD_OUT):
        assert all((ids != mask_token_id).all() for ids, _, _ in tokens_and_origins(name))


def test_at_least_4000_conversations_ship_and_their_answers_differ() -> None:
    everything = tokens_and_origins(TRAIN) + tokens_and_origins(HELD_OUT)
    assert len(everything) >= 4_000 and len(tokens_and_origins(HELD_OUT)) >= 300
    by_prompt = {tuple(ids[~mask]): tuple(ids[mask]) for ids, mask, _ in everything}
    assert len(set(by_prompt.values())) >= 0.85 * len(by_prompt)
    lengths = np.array([len(ids) for ids, _, _ in everything])
    assert lengths.max() <= 320 and np.quantile(lengths, 0.95) <= 224


def test_every_shipped_prompt_was_set_aside_from_the_targets_training() -> None:
    trained_on = training_record()["conversations"]
    for name in (TRAIN, HELD_OUT):
        manifest = documents(name).manifest
        assert manifest is not None and min(manifest.source["conversations"]) >= trained_on
        assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer())
        for ids, mask, origin in tokens_and_origins(name):
            assert is_set_aside(origin.answer) and origin.answer not in ambiguous_bodies()
            assert tokenizer().decode(ids[~mask].tolist()) == render_prompt(origin.prompt)


def test_no_held_out_answer_occurs_in_training() -> None:
    assert_disjoint(documents(TRAIN), documents(HELD_OUT))
    trained = {tuple(ids[mask]) for ids, mask, _ in tokens_and_origins(TRAIN)}
    assert not trained & {tuple(ids[mask]) for ids, mask, _ in tokens_and_origins(HELD_OUT)}


@pytest.mark.parametrize("kind", ["copying", "spelling"])
def test_the_target_copies_and_spells_on_held_out_prompts(kind: str) -> None:
    marks = [
        answer_text(ids, mask) == origin.answer
        for ids, mask, origin in tokens_and_origins(HELD_OUT)
        if origin.kind == kind
    ]
    assert len(marks) >= 20
    assert np.mean(marks) >= 0.8


# --- the shipped target -----------------------------------------------------------------------------------


def test_the_weights_are_those_of_the_record_and_small() -> None:
    weights = resolve(TINY_HYBRID) / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == training_record()["sha256"]
    assert sum(path.stat().st_size for path in resolve(TINY_HYBRID).iterdir()) <= SIX_MEGABYTES
    for name in (TRAIN, HELD_OUT):
        manifest = documents(name).manifest
        assert manifest is not None and manifest.source["target_sha256"] == training_record()["sha256"]
        assert sum(path.stat().st_size for path in resolve(name).iterdir()) <= SIX_MEGABYTES


def test_the_target_agrees_with_the_shipped_answers() -> None:
    everything = tokens_and_origins(TRAIN)[::20] + tokens_and_origins(HELD_OUT)[::8]
    agreed = supervised = 0
    for at in range(0, len(everything), 50):
        batch = sorted(everything, key=lambda row: len(row[0]))[at : at + 50]
        longest = len(batch[-1][0])
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, (tokens, marks, _) in enumerate(batch):
            ids[row, : len(tokens)] = torch.from_numpy(tokens)
            mask[row, : len(tokens)] = torch.from_numpy(marks)
        counts = rows_agreement(target(), ids, mask)
        agreed, supervised = agreed + counts.agreed, supervised + counts.supervised
    assert supervised > 5_000
    assert agreed / supervised >= 0.999


def test_greedy_decoding_gives_the_shipped_answers_again() -> None:
    rows = tokens_and_origins(HELD_OUT)
    length = int(np.median([(~mask).sum() for _, mask, _ in rows]))
    same_length = [(ids, mask) for ids, mask, _ in rows if (~mask).sum() == length]
    assert same_length
    prompts = torch.tensor(np.stack([ids[~mask] for ids, mask in same_length]))
    answers = greedy(model(), prompts, 160, tokenizer().eos_token_id)
    assert answers == [ids[mask].tolist() for ids, mask in same_length]


def test_greedy_decoding_stops_at_the_limit() -> None:
    prompts = torch.tensor([tokenizer()(render_prompt("Spell these words: lamp, boat")).input_ids])
    assert [len(answer) for answer in greedy(model(), prompts, 3, tokenizer().eos_token_id)] == [3]


# --- names ------------------------------------------------------------------------------------------------


def test_a_path_that_is_not_built_in_comes_back_as_it_is() -> None:
    assert resolve("data/train") == Path("data/train")
    assert resolve(TINY_HYBRID).is_dir()


def test_an_unknown_built_in_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="builtin:tiny-hybird.*builtin:tiny-hybrid.*held_out"):
        resolve("builtin:tiny-hybird")
