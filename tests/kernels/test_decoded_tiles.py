"""Weights that are decoded and multiplied tile by tile: where tiles begin, and what the product is."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import linear

from bench.weights import choices, format_of
from qdsl.generated import int_group, nf4, q4_0
from qdsl.runtime import FormatError
from qdsl.runtime.gpu import costs, launch, product
from qdsl.runtime.gpu.costs import Candidate, decoded_tiles
from qdsl.runtime.weight.tiles import ALIGNED

# N and K of layers: Llama 3 8B, 70B, Qwen2.5 7B and 32B, a head, and sizes that divide nothing.
SHAPES = ((14336, 4096), (4096, 14336), (28672, 4096), (28672, 8192), (8192, 28672), (18944, 3584), (3584, 18944), (25600, 5120),
          (128256, 4096), (40000, 6912), (129, 1 << 21), (1, 4096))


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_few_equal_and_aligned(shape: tuple[int, int]) -> None:
    n, k = shape
    for name, storage, params in choices():
        form = format_of(name)
        try:
            packed = form.empty(shape, storage, **params)
        except FormatError:
            continue                                             # the storage has no weight of this shape
        if packed.layout.streams:
            continue
        for size in (2, 4, 8):
            tiles = decoded_tiles(packed, size)
            borders = [tiles[0][0], *(stop for _, stop in tiles)]
            rows = [stop - start for start, stop in tiles]
            assert borders[0] == 0 and borders[-1] == n and [*pairwise(borders)] == tiles
            assert all(border % ALIGNED == 0 and border % packed.step("N") == 0 for border in borders[:-1])
            step = max(ALIGNED, packed.step("N"))
            assert max(rows) == rows[0] and (len(tiles) == 1 or rows[0] * k * size <= costs.DECODED + step * k * size)
            assert len(tiles) <= -(-n * k * size // costs.DECODED) and set(rows[:-1]) <= {rows[0]}


def test_layers_of_common_models_are_one_tile() -> None:
    for shape in ((4096, 14336), (28672, 4096), (3584, 18944), (18944, 3584), (5120, 25600), (8192, 8192)):
        assert decoded_tiles(q4_0.FORMAT.empty(shape, "planar", "meta"), 2) == [(0, shape[0])]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_by_tiles_is_that_of_the_whole_weight(dtype: torch.dtype, with_bias: bool,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "DECODED", 128 * 256 * dtype.itemsize)
    numbers, generator = torch.randn(300, 256), torch.Generator().manual_seed(0)
    x = torch.randn(5, 256, generator=generator, dtype=dtype)
    bias = torch.randn(300, generator=generator) if with_bias else None
    for module, options in ((q4_0, {}), (nf4, {}), (int_group, {"bits": 4, "group": 128, "storage": "awq"})):
        packed = module.quantize(numbers[:296], **options)
        assert len(decoded_tiles(packed, dtype.itemsize)) == 3
        added = None if bias is None else bias[:296]
        out = product.product_by(Candidate("decode"), x, packed, added)
        weight, added = torch.empty(packed.shape, dtype=dtype), None if added is None else added.to(dtype)
        launch.dequantize(packed, weight)                        # the interpreter rounds otherwise than torch
        parts = [linear(x, weight[start:stop], None if added is None else added[start:stop])
                 for start, stop in decoded_tiles(packed, dtype.itemsize)]
        assert torch.equal(out, torch.cat(parts, 1))
