"""ik_iq5_k: ik_llama.cpp IQ5_K, 5-bit codes into two tables of levels, 6-bit scales of blocks of 16.

    w = d * (sc - 32) * levels[32 * h + q]
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u6  [N, K/16]
    h      u1  [N, K/16]
    q      u5  [N, K]

    ik_llama: 5.5 bits per weight

Built from the spec ik_iq5_k (sha256 cfb853c1aad2602c) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import least_squares_nested
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Table, Variant, as_type, empty, joined, spread
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6, -1, 5, 11, 17, 23, 29, 36,
        43, 51, 59, 68, 77, 87, 97, 109, 121, -124, -112, -101, -90, -81, -72, -63, -55, -48, -41, -34, -28, -22, -16, -10, -4, 1,
        7, 13, 19, 25, 31, 38, 45, 53, 61, 70, 79, 89, 99, 111, 123)


def unpack_ik_llama(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 176*K/256]."""
    r = blocks.unflatten(-1, (-1, 176))
    sc_low = spread(r[..., 8:16], 4).flatten(1)
    sc_high = spread(r[..., 4:8], 2).flatten(1)
    q_bytes = r[..., 16:144].unflatten(-1, (4, 32)).contiguous()
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)
    q_bytes2 = r[..., 144:176].contiguous()
    q_high = torch.stack([q_bytes2 >> 1 * i & 1 for i in range(8)], -2).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 0], "sc": sc_low | sc_high << 4, "h": spread(r[..., 2:4], 1).flatten(1),
            "q": q_low | q_high << 4}


def pack_ik_llama(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_ik_llama."""
    r = empty((d.shape[0], d.shape[1], 176), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    h_split = h.unflatten(-1, (-1, 2, 8))
    r[..., 2:4] = joined(h_split, 1).squeeze(-1)
    sc_split = sc.unflatten(-1, (-1, 8, 2))
    r[..., 8:16] = joined(sc_split & 15, 4).squeeze(-1)
    sc_split2 = sc.unflatten(-1, (-1, 4, 4))
    r[..., 4:8] = joined(sc_split2 >> 4, 2).squeeze(-1)
    q_split = q.unflatten(-1, (-1, 4, 2, 32))
    r[..., 16:144] = ((q_split[:, :, :, 0] & 15) | (q_split[:, :, :, 1] & 15) << 4).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 8, 32))
    r[..., 144:176] = sum((q_split2[:, :, i] >> 4) << 1 * i for i in range(8))
    return {"blocks": r.flatten(1)}


def decode(d: Tensor, sc: Tensor, h: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (sc - 32) * levels[32 * h + q].  d [N, K/256], sc [N,
    K/16], h [N, K/16], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    sc = sc.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    h = h.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16, 16))
    return torch.mul(d * (sc - 32), LEVELS[32 * h + q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: as least_squares; scales are steps of a super-scale of columns or of the row.
    importance: float32 [K].
    """
    q, h, sc, d = least_squares_nested(weight, code="u5", choice="u1", scale="u6", super_scale="f16", columns=16, super_axes=2,
            super_columns=256,
            steps=(-32, -31, -30, -29, -28, -27, -26, -25, -24, -23, -22, -21, -20, -19, -18, -17, -16, -15, -14, -13, -12, -11,
                -10, -9, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
                20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31),
            values=(-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6, -1, 5, 11, 17, 23, 29, 36,
                43, 51, 59, 68, 77, 87, 97, 109, 121, -124, -112, -101, -90, -81, -72, -63, -55, -48, -41, -34, -28, -22, -16,
                -10, -4, 1, 7, 13, 19, 25, 31, 38, 45, 53, 61, 70, 79, 89, 99, 111, 123),
            importance=importance)
    return {"q": q, "h": h, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_ik_llama(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    blocks, levels = tensors
    blocks += 176 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 32
    c = u % 32
    d = tl.load(blocks_f16 + 88 * t, live, 0).to(tl.float32)
    q_word1 = tl.load(blocks + 176 * t + c + 144, live, 0)
    for i in tl.static_range(4):
        sc_word = tl.load(blocks + 176 * t + i + 4, live, 0)
        h_word = tl.load(blocks + 176 * t + i // 2 + 2, live, 0)
        q_word = tl.load(blocks + 176 * t + 32 * i + c + 16, live, 0)
        for j in tl.static_range(2):
            sc_low = tl.load(blocks + 176 * t + 2 * i + j + 8, live, 0) >> 4 * (c // 16) & 15
            sc_high = sc_word >> 4 * j + 2 * (c // 16) & 3
            sc = (sc_low | sc_high << 4).to(tl.int32)
            h = (h_word >> 4 * (i % 2) + 2 * j + c // 16 & 1).to(tl.int32)
            q_low = q_word >> 4 * j & 15
            q_high = q_word1 >> 2 * i + j & 1
            q = (q_low | q_high << 4).to(tl.int32)
            state = use(state, 256 * t + 64 * i + 32 * j + c, d * (sc - 32) * tl.load(levels + 32 * h + q), live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"d": Field("f16", "N", "K/256"), "sc": Field("u6", "N", "K/16"), "h": Field("u1", "N", "K/16"),
            "q": Field("u5", "N", "K")},
    storages={
        "ik_llama": Storage(unpack=unpack_ik_llama, pack=pack_ik_llama, tensors={
            "blocks": Stored("u8", "N", "176*K/256"),
        }, kernels=Kernels(_decode_ik_llama, rows="N", units="K/8", last="k", tables=(LEVELS,))),
    },
    decode=decode, encode=encode, importance=True,
)

FORMAT = Format(
    name="ik_iq5_k", title="ik_llama.cpp IQ5_K, 5-bit codes into two tables of levels, 6-bit scales of blocks of 16",
    source="ik_llama.cpp ggml-common.h block_iq5_k, iqk_quantize.cpp dequantize_row_iq5_k",
    formula="d * (sc - 32) * levels[32 * h + q]",
    variants={(): VARIANT},
    detect={"gguf": "IQ5_K"},
    digest="cfb853c1aad2602c",
)
SPEC = FORMAT.spec
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar = FORMAT.convert, FORMAT.requantize, FORMAT.planar
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
