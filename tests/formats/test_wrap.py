"""Tensors that say N and K by the shapes of files, by block lengths or how many elements they have; storages with streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qdsl
from qdsl.generated import mlx
from qdsl.runtime import FormatError
from tests.support.formats import same_bits

QSERVE = """
format: qserve
title: QServe W4A8, codes in tiles of 32 rows and 32 columns, scales of two levels
params: {group: [128, 64]}
weight: [N, K]
fields:
  q: u4[n, k]
  s: i8[n, k // group]
  z: i8[n, k // group]
  d: f16[n]
decode: (q * s + z) * d
storage:
  qserve:
    qweight:
      tensor: i8[t<N/32, u<K/32, word]
      record: "c<8 x<2 e<4 a<2 f<4 y<2: q[32*t + 16*y + 8*a + c, 32*u + 16*x + 4*e + f]"
      seen: [N, K/2]
    s2_scales:
      tensor: i8[g<K/group, n<N]
      record: s[n, g]
    s2_zeros:
      tensor: i8[g<K/group, n<N]
      record: z[n, g]
    s1_scales:
      tensor: f16[n<N]
      record: d[n]
"""
TILES = """
format: tiles
title: codes in tiles that files give as one axis, a scale per group of columns
params: {group: [128, 64]}
weight: [N, K]
fields:
  q: u8[n, k]
  s: f16[n, k // group]
decode: q * s
storage:
  tiles:
    weight:
      tensor: u8[t<N/16, u<K/16, word]
      record: "a<16 b<16: q[16*t + a, 16*u + b]"
    scales:
      tensor: f16[g<K/group, n<N]
      record: s[n, g]
"""
LANES = """
format: lanes8
title: bytes, plain and in an entropy code
weight: [N, K]
fields:
  q: e4m3[n, k]
  s: f32[n]
decode: q * s
encode: absmax(code=q, scale=s)
storage:
  plain:
    weight:
      tensor: e4m3[n<N, k<K]
      record: q[n, k]
    scale:
      tensor: f32[n<N]
      record: s[n]
  coded:
    exponents:
      tensor: u8[n<N, k<K]
      record: q[n, k].at(3):4 pad:4
      stream: huffman_lanes
    rest:
      tensor: u8[n<N, t<K/2 word]
      record: q[n, 2*t].lo:3 q[n, 2*t].hi:1 q[n, 2*t + 1].lo:3 q[n, 2*t + 1].hi:1
    scale:
      tensor: f32[n<N]
      record: s[n]
    weight_shape:
      tensor: i64[word]
      record: N K
"""


def spec(folder: Path, text: str) -> Path:
    path = folder / f"{text.split()[1]}.yaml"
    path.write_text(text.lstrip())
    return path


def test_the_shape_that_files_give(tmp_path: Path) -> None:
    qserve = qdsl.load(spec(tmp_path, QSERVE))
    tensors = {"qweight": torch.zeros(64, 128, dtype=torch.int8), "s1_scales": torch.ones(64, dtype=torch.float16),
               "s2_scales": torch.ones(2, 64, dtype=torch.int8), "s2_zeros": torch.ones(2, 64, dtype=torch.int8)}
    packed = qserve.wrap(tensors)
    assert packed.shape == (64, 256) and packed.params == {"group": 128} and not packed.notes
    with pytest.raises(FormatError, match=r"'qweight' \[96, 128\] says N = 96, but 's2_scales' .* so N = 64"):
        qserve.wrap({**tensors, "qweight": torch.zeros(96, 128, dtype=torch.int8)})


def test_block_lengths_and_counts(tmp_path: Path) -> None:
    """K is the groups times their length, or the elements of the tiles over N."""
    tiles = qdsl.load(spec(tmp_path, TILES))
    tensors = {"weight": torch.zeros(64 * 256, dtype=torch.uint8), "scales": torch.ones(4, 64, dtype=torch.float16)}
    assert tiles.wrap(tensors, group=64).shape == tiles.wrap(tensors).shape == (64, 256)
    with pytest.raises(FormatError, match=r"\[ceil\(|needs \[N/16, K/16, 256\] = \[4, 32, 256\]"):
        tiles.wrap(tensors, group=128)
    with pytest.raises(FormatError, match="do not say what N and K are"):
        tiles.wrap({**tensors, "scales": torch.ones(256, dtype=torch.float16)})


def test_parameters_that_mean_several_shapes() -> None:
    packed = mlx.quantize(torch.zeros(8, 256), bits=4, group=64)
    with pytest.raises(FormatError, match=r"\[8, 256\] with bits=4, group=64, .* or \[8, 128\] with bits=8, group=32"):
        mlx.wrap(packed.tensors)
    assert mlx.wrap(packed.tensors, bits=4).shape == mlx.wrap(packed.tensors, (8, 256)).shape == (8, 256)


def test_codes_of_which_a_tensor_holds_some_bits_have_no_kernels_for_matrix_units(tmp_path: Path) -> None:
    storages = qdsl.load(spec(tmp_path, LANES)).FORMAT.variant({}).storages
    assert storages["plain"].kernels.matrix_unit is not None and storages["coded"].kernels.matrix_unit is None


@pytest.mark.parametrize("rows", [64, 8])
def test_a_storage_with_a_stream(tmp_path: Path, rows: int) -> None:
    lanes = qdsl.load(spec(tmp_path, LANES))
    packed = lanes.quantize(torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)))
    coded = lanes.convert(packed, "coded")
    assert coded.storage == "coded" and same_bits(lanes.dequantize(coded), lanes.dequantize(packed))
    back = lanes.convert(coded, "plain")
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
