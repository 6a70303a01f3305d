"""The fused target's own kernels compute what the table's plain PyTorch functions do, and refuse the rest."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import EngineError
from engine.target import fused_operations
from engine.target.fused_check import relative_error
from engine.target.fused_operations import gpu_operations, torch_operations

INTERPRETED = """
import torch
from engine.target import convolution_kernel, fp8_kernels, fused_gates, fused_operations, swiglu_kernel
from engine.target.fp8 import QuantizedRows
from engine.target.fused_operations import Norm
from engine.target.rotary_kernel import norm_and_rotate

def close(a, b):
    assert a.shape == b.shape and torch.allclose(a, b, atol=1e-5, rtol=1e-5), (a - b).abs().max()

def room(rows, width, device):  # the interpreter rounds to 8 bits wrongly, so scaled values stay float32
    return torch.empty(rows, width), torch.empty(rows, 1)

fp8_kernels._room, fp8_kernels.PIECE = room, 64

def quantised(rows, expected):
    close(rows.scales, expected.abs().amax(1, keepdim=True) / 448)
    close(rows.values * rows.scales, expected)

torch.manual_seed(0)
rows, length = 6, 3
for heads, width, rotary, apart, normed in ((3, 20, 8, 40, True), (4, 16, 16, 16, False)):
    x = torch.randn(rows, heads, apart)[..., :width]
    norm = Norm(torch.randn(width), 1e-6) if normed else None
    angle = torch.randn(length, rotary // 2).repeat(1, 2)
    args = x, norm, angle.cos(), angle.sin()
    close(norm_and_rotate(*args), fused_operations.rotate(*args))

x, residual, norm = torch.randn(rows, 200), torch.randn(rows, 200), Norm(torch.randn(200), 1e-6)
for branch in (x, None):
    got, total = fp8_kernels.add_norm(branch, residual, norm, True)
    expected, expected_total = fused_operations.add_norm(branch, residual, norm, True)
    quantised(got, expected)
    close(got.plain, expected)
    close(total, expected_total)
quantised(fp8_kernels.swiglu(x, residual), fused_operations.swiglu(x, residual))
x, wide, norm = torch.randn(rows, 6, 40), torch.randn(rows, 6, 80), Norm(torch.randn(40), 1e-6)
gate = wide[..., 40:]
quantised(fp8_kernels.gate_heads(x, gate), fused_operations.gate_heads(x, gate))
quantised(fp8_kernels.gate_heads(x, None), fused_operations.gate_heads(x, None))
quantised(fp8_kernels.gated_norm(x, gate, norm), fused_operations.gated_norm(x, gate, norm))

fused_gates.TILE = 512  # 8 heads a program, of 36
close(fused_gates.gated_norm(x, gate, norm), fused_operations.gated_norm(x, gate, norm))
close(fused_gates.gate_heads(x, gate), fused_operations.gate_heads(x, gate))
assert fused_gates.gate_heads(x, None).data_ptr() == x.data_ptr()

swiglu_kernel.BLOCK = 64
for rows, width in ((6, 200), (3, 64), (1, 5)):
    gate, up = torch.randn(2, rows, width) * 5
    gate[0, 0], gate[0, 1] = -200.0, 200.0
    close(swiglu_kernel.swiglu(gate, up), fused_operations.swiglu(gate, up))

# Tiles of two heads' lanes and steps, so that rows end inside of them and begin behind another row's end.
for key_dim, keys, values, lanes, rows, length in (
    (16, 32, 96, 2, 2, 21), (16, 16, 40, 1, 3, 8), (32, 32, 32, 4, 1, 1), (64, 64, 128, 1, 2, 50)
):
    convolution_kernel.TILE = key_dim * lanes
    channels = 2 * keys + values
    x = torch.randn(rows, length + 5, channels + 24)[:, 3 : length + 3, 8 : channels + 8]
    weight = torch.randn(4, channels)
    args = x, weight, keys, values, key_dim
    got, expected = convolution_kernel.convolve(*args), fused_operations.convolve(*args)
    for one, other in zip(got, expected):
        assert one.is_contiguous()
        close(one, other)
    assert len({part.untyped_storage().data_ptr() for part in got}) == 1
    q = got[0].unflatten(2, (-1, key_dim))
    close(q.norm(dim=3), torch.ones(q.shape[:3]))
"""


def test_the_project_s_own_kernels_compute_what_plain_pytorch_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_kernels_refuse_what_they_would_read_wrongly() -> None:
    pytest.importorskip("triton")
    from engine.target.convolution_kernel import convolve
    from engine.target.swiglu_kernel import swiglu

    x, wide = torch.randn(4, 32), torch.randn(4, 64)
    with pytest.raises(EngineError, match=r"\(4, 32\) with strides \(64, 1\); give it whole products"):
        swiglu(x, wide[:, :32])
    with pytest.raises(EngineError, match="of one shape"):
        swiglu(x, wide)
    mixed, weight = torch.randn(2, 5, 96), torch.randn(4, 96)
    for message, arguments in (
        ("a power of two up to 1024; these heads have 24", (mixed, weight, 24, 48, 24)),
        ("96 channels are not two times 32 and 48", (mixed, weight, 32, 48, 16)),
        ("are no whole heads of 32", (mixed, weight, 24, 48, 32)),
        (r"4 taps of 96 channels side by side; its weight is \(3, 96\)", (mixed, weight[:3], 32, 32, 16)),
        ("x has strides", (mixed.transpose(1, 2).contiguous().transpose(1, 2), weight, 32, 32, 16)),
    ):
        with pytest.raises(EngineError, match=message):
            convolve(*arguments)


@pytest.mark.gpu
def test_on_a_gpu_the_table_s_kernels_take_views_and_return_what_plain_pytorch_does() -> None:
    torch.manual_seed(0)
    device, table, plain = torch.device("cuda", 0), gpu_operations(), torch_operations()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    norm = fused_operations.Norm(torch.rand(256, device=device) + 0.5, 1e-6)
    small = fused_operations.Norm(torch.rand(64, device=device) + 0.5, 1e-6)
    cos, sin = torch.randn(2, 100, 32, device=device)
    wide = draw(200, 6, 128)
    mixed = draw(2, 100, 320)
    unit = F.normalize(draw(2, 2, 100, 2, 32).float(), dim=-1).bfloat16()
    A_log, dt_bias = torch.rand(2, 4, device=device)
    calls: dict[str, tuple[Any, ...]] = {
        "add_norm": (draw(200, 256), draw(200, 256), norm, False),
        "swiglu": (draw(200, 512), draw(200, 512)),
        "convolve": (mixed[..., 32:288], draw(4, 256), 64, 128, 32),
        "delta_rule": (
            *unit,
            draw(2, 100, 4, 32),
            *draw(2, 100, 8).chunk(2, dim=2),
            A_log,
            dt_bias,
        ),
        "gated_norm": (draw(200, 4, 64), draw(200, 4, 64), small),
        "rotate": (wide[..., :64], small, cos, sin),
        "gate_heads": (draw(200, 6, 64), wide[..., 64:]),
    }
    for name, arguments in calls.items():
        got, expected = (getattr(operations, name)(*arguments) for operations in (table, plain))
        got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
        for x, y in zip(got, expected, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype
            assert relative_error(x, y) < (0.02 if name == "delta_rule" else 0.005), name
