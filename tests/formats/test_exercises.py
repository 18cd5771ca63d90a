"""The exercises of docs/design.md: a target and a kernel, as an engineer would add them.

tests/formats/test_ops.py adds an operation, tests/checkpoint/test_producers.py a producer, and the page itself a format.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.core.shapes import axis
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.kernels import units
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.target import Candidate, Target
from tests.support.interpreter import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
# Adjacent units along K, along N, with several rows, and with one weight.
STORAGES = ("q4_0.gguf", "q4_0.planar", "q4_0.q4_0_r8", "int_group.gptq_v1", "int_group.awq", "q6_k.gguf")


class Decoded:
    """A target with one candidate: the decoded weight, times x in float32."""

    def lower(self, candidate: Candidate, packed: PackedWeight) -> str:
        return ""

    def candidates(self, packed: PackedWeight, rows: int, dtype: torch.dtype) -> Sequence[Candidate]:
        return [Candidate("decoded")]

    def run(self, candidate: Candidate, x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        out = x.float() @ packed.dequantize(torch.float32).T
        return (out if bias is None else out + bias).to(x.dtype)


def weight_of(name: str, n: int = 64, k: int = 256) -> PackedWeight:
    format, _, storage = name.partition(".")
    drawn = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    packed: PackedWeight = import_module(f"qdsl.generated.{format}").FORMAT.quantize(drawn)
    return packed.format.convert(packed, storage)


@pytest.mark.parametrize("name", STORAGES)
def test_a_target_of_three_methods(name: str) -> None:
    packed, x = weight_of(name), torch.randn(3, 256)
    targets: tuple[Target, ...] = (Decoded(), cpu)
    products = []
    for target in targets:
        first, *_ = target.candidates(packed, len(x), x.dtype)
        assert isinstance(target.lower(first, packed), str)
        products.append(target.run(first, x, packed, torch.ones(64)))
    assert torch.allclose(*products, rtol=1e-4, atol=1e-4)


@triton.jit
def add_weight(sums, k, w, live, row: tl.constexpr = 0):
    return sums + tl.where(live, w, 0.0)


@triton.jit
def sums(tensors, out, N, K, sizes, tiles, count, decode: tl.constexpr, AXIS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[n] = the sum of the weights in tile row n; a program takes BN of them, BK units at a time."""
    n = units.axis(tl.program_id(0) * BN, BN, BK, 1 - AXIS, False)
    total = tl.zeros(n.shape, tl.float32)
    for start in range(0, count, BK):
        u = units.axis(start, BK, BN, AXIS, False)
        total = decode(tensors, n, u, units.live(n, tiles, u, count, False), N, K, sizes, add_weight, total)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out + rows, tl.sum(total, AXIS), rows < tiles)


@pytest.mark.parametrize("name", STORAGES)
def test_a_kernel_of_twelve_lines(name: str) -> None:
    packed = weight_of(name).to(DEVICE)
    kernels, (n, k) = packed.layout.kernels, packed.shape
    tiles, count = (axis(text).extent(n, k, packed.sizes) or 0 for text in (kernels.rows, kernels.units))
    out = torch.empty(tiles, device=DEVICE)
    sums[(triton.cdiv(tiles, 16),)](launch.read_tensors(packed), out, n, k, launch.size_arguments(packed), tiles, count,
                                    kernels.decode, int(kernels.last == "k"), BN=16, BK=16)
    exact = packed.dequantize(torch.float32).double().view(tiles, -1).sum(1)
    assert torch.allclose(out.double(), exact, atol=1e-3)
