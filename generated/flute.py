"""flute: FLUTE, 4-bit codes into a stored table of levels with a scale per group, in tiles of matrix units.

    w = lut[q] * s
    float32, rounded after each operation

    lut    level_type [16]
    s      level_type [N, ceil(K/group)]
    q      u4         [N, K]

    flute: 4.25 bits per weight with group = 64

Built from the spec flute (sha256 1c53064ec1f4b5cc) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import scaled_kmeans
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, as_type, joined, lookup, spread
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_flute(weight: Tensor, scales: Tensor, tables: Tensor) -> dict[str, Tensor]:
    """Fields of weight int16 [32*N/128, K/2, 2]; scales level_type [N, K/group]; tables level_type [16]."""
    r = as_type(weight.unflatten(0, (-1, 32)).permute(0, 3, 2, 1), torch.uint8)
    return {"lut": tables, "s": scales,
            "q": spread(r.unflatten(-1, (32, 2)), 4, high_first=True).permute(0, 1, 4, 3, 2, 5).flatten(0, 3).flatten(1)}


def pack_flute(lut: Tensor, s: Tensor, q: Tensor, *, N: int) -> dict[str, Tensor]:
    """weight, scales, tables of the fields; the inverse of unpack_flute."""
    q_split = q.unflatten(-1, (-1, 2)).unflatten(0, (N // 128, 2, 2, 32))
    r = joined(q_split, 4, high_first=True).squeeze(-1).permute(0, 1, 4, 3, 2).flatten(3)
    return {"weight": as_type(r, torch.int16).permute(0, 3, 2, 1).contiguous().flatten(0, 1), "scales": s, "tables": lut}


def decode(lut: Tensor, s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[q] * s.  lut [16], s [N, ceil(K/group)], q [N, K]."""
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = q.view(torch.int8).unflatten(1, (s.shape[1], -1))
    lut = lut.float()
    s = s.float().unsqueeze(-1)
    return torch.mul(lookup(lut, q), s, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, level_type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block; levels of the one stored table by k-means of
    all weights over their scales; codes of the nearest levels.  importance: float32 [K].
    """
    q, s, lut = scaled_kmeans(weight, code="u4", scale=level_type, levels=level_type, rows=1, columns=group, axes=2,
            importance=importance)
    return {"q": q, "s": s, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_flute(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, scales, tables = tensors
    group, = sizes
    scales += n * (K // group)
    weight += 64 * (n // 64 // 2 * (K // 2)) + n // 64 % 2
    s = tl.load(scales + k // group, live, 0).to(tl.float32)
    q = (tl.load(weight + 2 * (k // 2) + 2 * (n % 64 % 32 * (K // 2)), live, 0) >> 8 * (n % 64 // 32) - 4 * (k % 2) + 4
        & 15).to(tl.int32)
    lut = tl.load(tables + q, live, 0).to(tl.float32)
    return use(state, k, lut * s, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"lut": Field("level_type", "16"), "s": Field("level_type", "N", "ceil(K/group)"), "q": Field("u4", "N", "K")},
    storages={
        "flute": Storage(unpack=unpack_flute, pack=pack_flute, extents=("N",), tensors={
            "weight": Stored("i16", "32*N/128", "K/2", "2", seen=("N/4", "K")),
            "scales": Stored("level_type", "N", "K/group"),
            "tables": Stored("level_type", "16"),
        }, kernels=Kernels(_decode_flute, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, importance=True, cuts=("N", "ceil(K/group)"),
)

FORMAT = Format(
    name="flute", title="FLUTE, 4-bit codes into a stored table of levels with a scale per group, in tiles of matrix units",
    source="flute-kernel 0.4.2, flute/utils.py _pack_4bit with tile_P of 32, flute/integrations/base.py FluteLinear",
    formula="lut[q] * s",
    variants={(): VARIANT},
    params={"group": (64, 32, 128, 256), "level_type": ("f16", "bf16")},
    sizes={"group": "K"},
    digest="1c53064ec1f4b5cc",
)
SPEC = FORMAT.spec
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar = FORMAT.convert, FORMAT.requantize, FORMAT.planar
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
