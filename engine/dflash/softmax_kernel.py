"""The softmax behind the head in one kernel: entropy, argmax and gradient of a row of logits.

Operation by operation in float32, a logit is read and written a dozen times, and with 248,320 of them in
each of 7,680 rows that is a tenth of the drafter's step. Here a program owns a row, reads it once for
maximum, sum and argmax, and once more to write the gradient over it; what is between stays in registers,
in float32. The numbers are those of `objective.chunk_softmax` but for the order of the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_PIECE = 16384
"""Logits that a program holds at a time: 32 registers of each thread, two programs on a multiprocessor."""


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    logits_pointer,
    row_stride,
    labels_pointer,
    entropy_pointer,
    predicted_pointer,
    vocabulary,
    WITH_GRADIENT: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_pointer += row * row_stride
    label = tl.load(labels_pointer + row)
    label_logit = tl.load(logits_pointer + label).to(tl.float32)
    columns = tl.arange(0, PIECE)
    largest = -float("inf")
    place = 0
    total = 0.0
    for start in range(0, vocabulary, PIECE):
        column = start + columns
        x = tl.load(logits_pointer + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        piece_largest = tl.max(x, axis=0)
        if piece_largest > largest:
            # A new maximum comes seldom, so its place is looked for only then.
            place = tl.min(tl.where(x == piece_largest, column, vocabulary), axis=0)
            total *= tl.exp(largest - piece_largest)
            largest = piece_largest
        total += tl.sum(tl.exp(x - largest), axis=0)
    log_sum = largest + tl.log(total)
    tl.store(entropy_pointer + row, log_sum - label_logit)
    tl.store(predicted_pointer + row, place)
    if WITH_GRADIENT:
        for start in range(0, vocabulary, PIECE):
            column = start + columns
            inside = column < vocabulary
            x = tl.load(logits_pointer + column, mask=inside, other=0.0).to(tl.float32)
            change = tl.exp(x - log_sum) - tl.where(column == label, 1.0, 0.0)
            tl.store(logits_pointer + column, change.to(logits_pointer.dtype.element_ty), mask=inside)


def fused_softmax(
    logits: Tensor, labels: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """An `objective.ChunkSoftmax` on a GPU; the gradient takes the place of the logits.

    A row that holds a NaN has an entropy of NaN, as the reference's.
    """
    rows, vocabulary = logits.shape
    cross_entropy = torch.empty(rows, dtype=torch.float32, device=logits.device)
    predicted = torch.empty(rows, dtype=torch.int64, device=logits.device)
    piece = min(LARGEST_PIECE, triton.next_power_of_2(vocabulary))
    with torch.cuda.device_of(logits):
        _rows_kernel[(rows,)](
            logits,
            logits.stride(0),
            labels,
            cross_entropy,
            predicted,
            vocabulary,
            WITH_GRADIENT=with_gradient,
            PIECE=piece,
            num_warps=max(4, min(16, piece // 1024)),
        )
    return cross_entropy, predicted, logits if with_gradient else None
