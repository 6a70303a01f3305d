"""The fused softmax against the reference, in Triton's interpreter here and compiled on a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.dflash.objective import chunk_softmax, head_cross_entropy

INTERPRETED = """
import contextlib, torch
from tests.test_softmax_kernel import compare
import engine.dflash.softmax_kernel as kernel
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
kernel.LARGEST_PIECE = 64
for vocabulary in (7, 64, 300):
    for dtype in (torch.float32, torch.bfloat16):
        compare(vocabulary, dtype, "cpu")
"""


def compare(vocabulary: int, dtype: torch.dtype, device: str) -> None:
    """Every output of the kernel beside the reference's, on logits with large and tied values."""
    from engine.dflash.softmax_kernel import fused_softmax

    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, vocabulary, generator=generator) * 4).to(device, dtype)
    logits[0, vocabulary // 2] = 300.0  # its exponential overflows unless the maximum is taken off
    logits[1] = -200.0
    logits[2, -1] = 60.0
    labels = torch.tensor([0, vocabulary - 1, 1, 2, vocabulary // 2], device=device)
    entropy, predicted, gradient = fused_softmax(logits.clone(), labels, True)
    expected_entropy, expected_predicted, expected = chunk_softmax(logits.clone(), labels, True)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(gradient, expected)
    assert predicted.dtype == torch.int64
    untied = [0, 2, 3, 4]
    assert torch.equal(predicted[untied], expected_predicted[untied])
    assert bool((logits[1, predicted[1]] == logits[1].max()).item())
    kept = logits.clone()
    again, _, none = fused_softmax(kept, labels, False)
    assert none is None and torch.equal(again, entropy) and torch.equal(kept, logits)
    logits[3, vocabulary // 3] = float("nan")
    assert fused_softmax(logits, labels, False)[0].isnan().tolist() == [False, False, False, True, False]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_computes_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [37, 16384, 248320])
def test_the_compiled_kernel_computes_the_reference(vocabulary: int, dtype: torch.dtype) -> None:
    compare(vocabulary, dtype, "cuda")


@pytest.mark.gpu
def test_the_heads_gradient_is_the_references() -> None:
    from engine.dflash.softmax_kernel import fused_softmax

    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    head = torch.randn(50_000, 256, device="cuda", dtype=torch.bfloat16) * 0.1
    labels = torch.randint(0, 50_000, (300,), device="cuda")
    found = []
    for softmax in (chunk_softmax, fused_softmax):
        leaf = hidden.clone().requires_grad_()
        entropy, _ = head_cross_entropy(leaf, head, labels, 128, softmax=softmax)
        entropy.sum().backward()
        found.append((entropy.detach(), leaf.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=2e-2, atol=2e-2)
