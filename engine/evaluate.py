"""A checkpoint on held-out prompts, by two measures.

The walk scores every answer position in a few passes of target and drafter and follows the text as a greedy
server would: a draft is accepted where it is what the target itself would have said there. Decoding is the
real thing, with caches, and says besides what it is worth in tokens per second, and whether the output is
the target's own. The walk needs no decoding and is what runs during training, by the same function over the
run's own taps; each is a check of the other.

Both bring shapes that the training's kernels were not tuned for, so both take kernels that take any
(`target.decoding_kernels`).
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engine.data.batches import BatchPlan
from engine.data.documents import Documents
from engine.decoding_batch import rows_together
from engine.dflash.attention import flex_compiles
from engine.dflash.decoding import tokens_by_slot, walk_answers
from engine.dflash.objective import decay_weights
from engine.dflash.packing import PackedRow, pack_row
from engine.dflash.speculation import Decoded, decode_alone, explain_difference, speculate
from engine.dflash.training import Packed, Recipe, SharedWeights
from engine.errors import DifferenceFound, InputError
from engine.evaluation_report import (
    Acceptance,
    DecodingFigures,
    EvaluationReport,
    PromptDifference,
    WalkFigures,
)
from engine.rounding_null import is_reduced, measure_null
from engine.schedule import Data
from engine.schedule_agreement import GAMMA_BY_BLOCK_SIZE
from engine.served_pair import (
    Say,
    ServedPair,
    chosen_device,
    earlier_tuning,
    held_out_documents,
    load_pair,
)
from engine.target.decoding_kernels import any_shape, any_shape_attention
from engine.target.own_tokens import own_tokens_and_taps

LOSS_CHUNK = 1024

FLEX_ABOVE = 8192
"""Tokens of a document. Dense attention scores all of a document for each few blocks, on a GPU with whole
matrices of scores; from here on that is worth compiling FlexAttention, which training there takes anyway."""

SAY_EVERY_S = 5.0


def evaluate_checkpoint(
    path: Path,
    *,
    prompts: int | None = 200,
    data: str | None = None,
    target: str | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
    walks: bool = True,
    decodes: bool = True,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int | None = None,
    say: Say = lambda line: None,
) -> EvaluationReport:
    """Measure a checkpoint, or a run's latest, on held-out prompts.

    Args:
        prompts: at most so many documents; None: all.
        data: documents instead of the schedule's held-out ones.
        target, trust_remote_code, device: see `load_pair`.
        walks, decodes: which of the two measures to take.
        max_new_tokens: of an answer.
        temperature: 0 is greedy. seed: of the sampling.
        batch: prompts that are decoded together; None: 32, on a GPU as many as have room, up to 256.
        say: takes lines about progress.

    Raises:
        InputError: of the kind that fits, where something cannot be used or nothing is asked for.
    """
    if not walks and not decodes:
        raise InputError("--no-walk and --no-decoding leave nothing to evaluate: give one of the two")
    name = chosen_device(device)
    with earlier_tuning(name, say):
        pair = load_pair(path, target=target, trust_remote_code=trust_remote_code, device=name, say=say)
        if decodes and pair.schedule is not None and pair.schedule.train.zero_taps:
            raise InputError(
                f"{pair.checkpoint}: was trained with train.zero_taps, and decoding would give it the "
                "target's states; give --no-decoding"
            )
        documents = held_out_documents(pair, data, prompts)
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        return EvaluationReport(
            checkpoint=pair.checkpoint,
            target=pair.target.summary.folder,
            device=name,
            block_size=pair.config.block_size,
            numbers_changed_by=pair.changed_by,
            walk=walk_documents(pair, documents, say) if walks else None,
            decoding=decode_documents(pair, documents, batch=batch, say=say, **how) if decodes else None,
        )


def check_output(report: EvaluationReport) -> None:
    """Refuse greedy output that is not the target's own, near ties apart, and near ties that are too many.

    Raises:
        DifferenceFound: names the first prompt, or the share that differs.
    """
    if report.decoding and (unexplained := report.decoding.unexplained):
        raise DifferenceFound(
            f"greedy output is not the target's own for {len(unexplained)} of {report.decoding.prompts} "
            f"prompts, and no near tie explains it; prompt {unexplained[0].prompt}: {unexplained[0].words}"
        )
    if report.decoding and report.decoding.rounding_unknown:
        raise DifferenceFound(
            f"greedy output is not the target's own for {len(report.decoding.differences)} of "
            f"{report.decoding.prompts} prompts; a near tie explains each of them, but memory ran out while "
            "it was measured how often rounding makes one, so that rounding could not be told from a fault: "
            f"lower --batch (it was {report.decoding.batch}) or --max-new-tokens"
        )
    if report.decoding and (ties := len(report.decoding.differences)) > report.decoding.near_ties_allowed:
        raise DifferenceFound(
            f"greedy output is not the target's own for {ties} of {report.decoding.prompts} prompts; a near "
            f"tie explains each of them, but rounding leaves no more than "
            f"{report.decoding.near_ties_allowed}: something else is wrong, such as a state that is not "
            "rolled back"
        )


def walk_documents(pair: ServedPair, documents: Documents, say: Say) -> WalkFigures:
    """Score and walk the answers of some documents, against the target's own most likely tokens."""
    begin = time.perf_counter()
    section = pair.schedule.data if pair.schedule else Data(path=str(documents.path))
    batches = BatchPlan(
        documents,
        token_budget=section.token_budget,
        max_length=section.max_length,
        length_bucket=section.length_bucket,
        seed=0,
    )
    agreed = answered = 0
    told = begin
    recipe = _recipe(pair, section, longest=min(section.max_length, int(documents.lengths.max())))

    def packed() -> Iterator[tuple[PackedRow, Packed, Tensor]]:
        nonlocal agreed, answered, told
        for index in range(batches.per_epoch):
            if (now := time.perf_counter()) - told > SAY_EVERY_S:
                told = now
                say(f"walk: {index} of {batches.per_epoch} micro-batches in {now - begin:.1f} s")
            row, taps, own = _pack(pair, recipe, batches, index)
            counted = row.loss_mask & (row.position > 0)
            agreed += int((own == row.input_ids)[counted].sum())
            answered += int(counted.sum())
            yield row, taps, own

    dtype = next(pair.drafter.parameters()).dtype
    target = pair.target
    shared = SharedWeights(target.embed_tokens, target.lm_head).to(target.device, dtype)
    with any_shape_attention(target.device):  # the drafter's, in rows of any length
        walked = walk_answers(pair.drafter, shared, packed(), recipe)
    figures = WalkFigures(
        acceptance=Acceptance.of(walked.advances, walked.drafted, pair.config.block_size),
        documents=walked.documents,
        loss=walked.counts.loss,
        accuracy_by_slot=tuple(walked.counts.accuracy_by_slot),
        target_agreement=agreed / answered if answered else float("nan"),
        seconds=time.perf_counter() - begin,
    )
    say(f"walk: accepted length {figures.acceptance.accepted_length:.3f}, {figures.seconds:.1f} s")
    return figures


def _pack(
    pair: ServedPair, recipe: Recipe, batches: BatchPlan, index: int
) -> tuple[PackedRow, Packed, Tensor]:
    """A micro-batch as one row, its taps for the drafter, and the target's own token at each slot."""
    batch = batches.micro_batch(index)
    row = pack_row(batch.input_ids, batch.loss_mask, batch.lengths, batch.document_ids)
    target = pair.target
    with any_shape(target.model, target.device):
        tokens, taps = own_tokens_and_taps(target, batch.input_ids.to(target.device), batch.loss_mask)
    own = tokens_by_slot(row, tokens)
    dtype = next(pair.drafter.parameters()).dtype
    packed = tuple(tensor.to(dtype) for tensor in recipe.features.pack(taps, row))
    if pair.schedule is not None and pair.schedule.train.zero_taps:
        packed = tuple(torch.zeros_like(tensor) for tensor in packed)
    return row, packed, own


def _recipe(pair: ServedPair, section: Data, longest: int) -> Recipe:
    """The strategies of the training. Attention is dense, which needs no compiling, unless the schedule
    insists on another or, on a GPU, the longest document asks for it."""
    config, schedule, host = pair.config, pair.schedule, pair.host
    weights = decay_weights(GAMMA_BY_BLOCK_SIZE.get(config.block_size))
    if schedule is not None:
        train = schedule.train
        weights = host.choose_named("make_objective", "train.objective", train.objective, train=train)
    asked = schedule.drafter.attention if schedule is not None else "auto"
    flex = flex_compiles(pair.target.device) and takes_flex(asked, longest)
    return Recipe(
        features=host.choose("make_feature_path", config=config),
        weights=weights,
        backend="flex" if flex else "dense",
        attention=host.choose("make_attention", config=config),
        chunk=schedule.train.loss_chunk if schedule else LOSS_CHUNK,
        max_anchors=section.max_anchors,
        seed=0,
    )


def takes_flex(asked: Literal["auto", "dense", "flex"], longest: int) -> bool:
    """Whether the walk on a GPU takes FlexAttention, by what the schedule says and the longest document."""
    return asked == "flex" or (asked == "auto" and longest > FLEX_ABOVE)


def decode_documents(
    pair: ServedPair,
    documents: Documents,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch: int | None,
    say: Say,
) -> DecodingFigures:
    """Decode the prompts of some documents with the drafter and by the target alone, and compare.

    Args:
        documents: a prompt is what stands before a document's first answer.
        batch: prompts that are decoded together; None: as many as `evaluate_checkpoint` says.
    """
    prompts = [_prompt(documents, number) for number in range(len(documents))]
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > (limit := pair.target.summary.max_position_embeddings):
        raise InputError(
            f"--max-new-tokens {max_new_tokens}: the longest prompt and its answer are {longest} tokens, and "
            f"the target has {limit} positions; lower it, or take shorter documents"
        )
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))  # equal lengths together
    drafter = pair.config, pair.drafter.fc.weight.element_size()
    batch = batch or rows_together(pair.target, prompts[order[0]], longest, drafter)
    groups = [order[start : start + batch] for start in range(0, len(order), batch)]
    how: dict[str, Any] = {
        "stop": pair.stop,
        "temperature": temperature,
        "seed": seed,
        "rows_at_once": batch,
    }
    ours: dict[int, Decoded] = {}
    alone: dict[int, list[int]] = {}
    seconds = alone_seconds = 0.0
    if pair.target.device.type == "cuda":  # kernels are compiled and loaded before the clock runs
        begin = _now(pair)
        first = [prompts[number] for number in groups[0]]
        few = min(max_new_tokens, 2 * pair.config.block_size)
        speculate(pair.target, pair.drafter, first, max_new_tokens=few, **how)
        decode_alone(pair.target, first, max_new_tokens=few, **how)
        say(f"decoding {batch} prompts at a time; kernels ready after {_now(pair) - begin:.1f} s")
    for group in groups:
        given = [prompts[place] for place in group]
        begin = _now(pair)
        decoded = speculate(pair.target, pair.drafter, given, max_new_tokens=max_new_tokens, **how)
        between = _now(pair)
        by_target = decode_alone(pair.target, given, max_new_tokens=max_new_tokens, **how)
        seconds += between - begin
        alone_seconds += _now(pair) - between
        ours |= dict(zip(group, decoded, strict=True))
        alone |= dict(zip(group, by_target, strict=True))
        say(f"decoded {len(ours)} of {len(prompts)} prompts in {seconds + alone_seconds:.1f} s")
    committed = [tokens for one in ours.values() for tokens in one.acceptance]
    drafted = [tokens for one in ours.values() for tokens in one.drafted]
    greedy = temperature == 0
    differences = [
        PromptDifference(prompt=place, words=str(found), near_tie=found.near_tie)
        for place, prompt in enumerate(prompts)
        if greedy
        and (found := explain_difference(pair.target, prompt, ours[place].tokens, alone[place])) is not None
    ]
    rounding = None
    measures = bool(differences) and is_reduced(pair.target.dtype)
    if measures:
        say(f"{len(differences)} outputs differ: the target decodes some again, of other numbers together")
        rounding = measure_null(
            pair.target,
            prompts,
            alone,
            {difference.prompt for difference in differences},
            max_new_tokens=max_new_tokens,
            stop=pair.stop,
            groups=groups,
        )
    return DecodingFigures(
        acceptance=Acceptance.of(committed, drafted, pair.config.block_size),
        prompts=len(prompts),
        batch=batch,
        temperature=temperature,
        tokens=sum(len(one.tokens) for one in ours.values()),
        seconds=seconds,
        alone_tokens=sum(map(len, alone.values())),
        alone_seconds=alone_seconds,
        ended=sum(one.tokens[-1] in pair.stop for one in ours.values()),
        identical=len(prompts) - len(differences) if greedy else None,
        differences=tuple(differences),
        rounding=rounding,
        rounding_unknown=measures and rounding is None,
    )


def _prompt(documents: Documents, number: int) -> list[int]:
    ids: list[int] = documents.document(number).input_ids[: int(documents.first_labels[number])].tolist()
    return ids


def _now(pair: ServedPair) -> float:
    """The time once the device has done all that was asked of it."""
    if pair.target.device.type == "cuda":
        torch.cuda.synchronize(pair.target.device)
    return time.perf_counter()
