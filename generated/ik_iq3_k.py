"""ik_iq3_k: ik_llama.cpp IQ3_K, 3-bit codes into two tables of levels, 4-bit scales and signs of blocks of 16.

    w = d * ((2 * (sc % 16) + 1) * (1 - 2 * (sc // 16))) * levels[8 * h + q]
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u5  [N, K/16]
    h      u1  [N, K/16]
    q      u3  [N, K]

    ik_llama: 3.4375 bits per weight

Built from the spec ik_iq3_k (sha256 795c04641c299935) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import least_squares_nested
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Table, Variant, as_type, empty, joined, spread
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -63, -40, -23, -10, 1, 13, 28, 47, -59, -36, -19, -6, 5, 17, 32, 51)


def unpack_ik_llama(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 110*K/256]."""
    r = blocks.unflatten(-1, (-1, 110))
    sc_low = spread(r[..., 6:14], 4).flatten(1)
    sc_high = spread(r[..., 4:6], 1).flatten(1)
    q_bytes = r[..., 14:78].unflatten(-1, (2, 32)).contiguous()
    q_low = torch.stack([q_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(1)
    q_bytes2 = r[..., 78:110].contiguous()
    q_high = torch.stack([q_bytes2 >> 1 * i & 1 for i in range(8)], -2).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 0], "sc": sc_low | sc_high << 4, "h": spread(r[..., 2:4], 1).flatten(1),
            "q": q_low | q_high << 2}


def pack_ik_llama(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_ik_llama."""
    r = empty((d.shape[0], d.shape[1], 110), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    h_split = h.unflatten(-1, (-1, 2, 8))
    r[..., 2:4] = joined(h_split, 1).squeeze(-1)
    sc_split = sc.unflatten(-1, (-1, 8, 2))
    r[..., 6:14] = joined(sc_split & 15, 4).squeeze(-1)
    sc_split2 = sc.unflatten(-1, (-1, 2, 8))
    r[..., 4:6] = joined(sc_split2 >> 4, 1).squeeze(-1)
    q_split = q.unflatten(-1, (-1, 2, 4, 32))
    r[..., 14:78] = sum((q_split[:, :, :, i] & 3) << 2 * i for i in range(4)).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 8, 32))
    r[..., 78:110] = sum((q_split2[:, :, i] >> 2) << 1 * i for i in range(8))
    return {"blocks": r.flatten(1)}


def decode(d: Tensor, sc: Tensor, h: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * ((2 * (sc % 16) + 1) * (1 - 2 * (sc // 16))) * levels[8 *
    h + q].  d [N, K/256], sc [N, K/16], h [N, K/16], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    sc = sc.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    h = h.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16, 16))
    return torch.mul(d * ((2 * (sc & 15) + 1) * (1 - 2 * (sc // 16))), LEVELS[8 * h + q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: as least_squares; scales are steps of a super-scale of columns or of the row.
    importance: float32 [K].
    """
    q, h, sc, d = least_squares_nested(weight, code="u3", choice="u1", scale="u5", super_scale="f16", columns=16, super_axes=2,
            super_columns=256,
            steps=(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21,
                -23, -25, -27, -29, -31),
            values=(-63, -40, -23, -10, 1, 13, 28, 47, -59, -36, -19, -6, 5, 17, 32, 51), importance=importance)
    return {"q": q, "h": h, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_ik_llama(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    blocks, levels = tensors
    blocks += 110 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 32
    c = u % 32
    d = tl.load(blocks_f16 + 55 * t, live, 0).to(tl.float32)
    q_word1 = tl.load(blocks + 110 * t + c + 78, live, 0)
    for i in tl.static_range(2):
        sc_word = tl.load(blocks + 110 * t + i + 4, live, 0)
        h_word = tl.load(blocks + 110 * t + i + 2, live, 0)
        q_word = tl.load(blocks + 110 * t + 32 * i + c + 14, live, 0)
        for j in tl.static_range(4):
            sc_low = tl.load(blocks + 110 * t + 4 * i + j + 6, live, 0) >> 4 * (c // 16) & 15
            sc_high = sc_word >> 2 * j + c // 16 & 1
            sc = (sc_low | sc_high << 4).to(tl.int32)
            h = (h_word >> 2 * j + c // 16 & 1).to(tl.int32)
            q_low = q_word >> 2 * j & 3
            q_high = q_word1 >> 4 * i + j & 1
            q = (q_low | q_high << 2).to(tl.int32)
            state = use(state, 256 * t + 128 * i + 32 * j + c, d * ((2 * (sc & 15) + 1) * (1 - 2 * (sc // 16)))
                * tl.load(levels + 8 * h + q), live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"d": Field("f16", "N", "K/256"), "sc": Field("u5", "N", "K/16"), "h": Field("u1", "N", "K/16"),
            "q": Field("u3", "N", "K")},
    storages={
        "ik_llama": Storage(unpack=unpack_ik_llama, pack=pack_ik_llama, tensors={
            "blocks": Stored("u8", "N", "110*K/256"),
        }, kernels=Kernels(_decode_ik_llama, rows="N", units="K/8", last="k", tables=(LEVELS,))),
    },
    decode=decode, encode=encode, importance=True,
)

FORMAT = Format(
    name="ik_iq3_k", title="ik_llama.cpp IQ3_K, 3-bit codes into two tables of levels, 4-bit scales and signs of blocks of 16",
    source="ik_llama.cpp ggml-common.h block_iq3_k, iqk_quantize.cpp dequantize_row_iq3_k",
    formula="d * ((2 * (sc % 16) + 1) * (1 - 2 * (sc // 16))) * levels[8 * h + q]",
    variants={(): VARIANT},
    detect={"gguf": "IQ3_K"},
    digest="795c04641c299935",
)
SPEC = FORMAT.spec
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar = FORMAT.convert, FORMAT.requantize, FORMAT.planar
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
