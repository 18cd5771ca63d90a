"""ik_iq4_ks: ik_llama.cpp IQ4_KS, a scale ahead of each row, 7-bit scales of blocks, 4-bit codes into two tables of levels.

    w = d * (2 * sc - 127) * levels[16 * h + q]
    float32, rounded after each operation

    d      f32 [N]
    sc     u7  [N, K/32]
    h      u1  [N, K/32]
    q      u4  [N, K]

    ik_llama: 4.25 bits per weight

Built from the spec ik_iq4_ks (sha256 f484603c1febc591) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import least_squares_nested
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Table, Variant, as_type
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113, -123, -100, -79, -61, -45, -31,
        -18, -6, 5, 17, 29, 42, 57, 73, 93, 117)


def unpack_ik_llama(rows: Tensor) -> dict[str, Tensor]:
    """Fields of rows uint8 [N, 4 + 136*K/256]."""
    head = rows[..., :4]
    blocks = rows[..., 4:]
    blocks_bytes = blocks.unflatten(-1, (-1, 136))
    q_bytes = blocks_bytes[..., 8:136].unflatten(-1, (8, 16)).contiguous()
    return {"d": as_type(head, torch.float32)[:, 0], "sc": (blocks_bytes[..., 0:8] >> 1).flatten(1),
            "h": (blocks_bytes[..., 0:8] & 1).flatten(1), "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)}


def pack_ik_llama(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """rows of the fields; the inverse of unpack_ik_llama."""
    head_bytes = as_type(d.unsqueeze(-1), torch.uint8)
    blocks_bytes = torch.zeros(h.shape[0], h.shape[1] // 8, 136, dtype=torch.uint8, device=h.device)
    blocks_bytes[..., 0:8] |= h.unflatten(-1, (-1, 8))
    blocks_bytes[..., 0:8] |= sc.unflatten(-1, (-1, 8)) << 1
    q_split = q.unflatten(-1, (-1, 8, 2, 16))
    blocks_bytes[..., 8:136] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).flatten(2)
    return {"rows": torch.cat([head_bytes, blocks_bytes.flatten(1)], -1)}


def decode(d: Tensor, sc: Tensor, h: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (2 * sc - 127) * levels[16 * h + q].  d [N], sc [N, K/32],
    h [N, K/32], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d[..., None, None]
    sc = sc.to(torch.int16).unsqueeze(-1)
    h = h.view(torch.int8).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(d * (2 * sc - 127), LEVELS[16 * h + q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: as least_squares; scales are steps of a super-scale of columns or of the row.
    importance: float32 [K].
    """
    q, h, sc, d = least_squares_nested(weight, code="u4", choice="u1", scale="u7", super_scale="f32", columns=32, super_axes=1,
            super_columns=weight.shape[1],
            steps=(-127, -125, -123, -121, -119, -117, -115, -113, -111, -109, -107, -105, -103, -101, -99, -97, -95, -93, -91,
                -89, -87, -85, -83, -81, -79, -77, -75, -73, -71, -69, -67, -65, -63, -61, -59, -57, -55, -53, -51, -49, -47,
                -45, -43, -41, -39, -37, -35, -33, -31, -29, -27, -25, -23, -21, -19, -17, -15, -13, -11, -9, -7, -5, -3, -1, 1,
                3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59,
                61, 63, 65, 67, 69, 71, 73, 75, 77, 79, 81, 83, 85, 87, 89, 91, 93, 95, 97, 99, 101, 103, 105, 107, 109, 111,
                113, 115, 117, 119, 121, 123, 125, 127),
            values=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113, -123, -100, -79, -61, -45, -31,
                -18, -6, 5, 17, 29, 42, 57, 73, 93, 117),
            importance=importance)
    return {"q": q, "h": h, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_ik_llama(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    rows, levels = tensors
    rows += n * (136 * (K // 256) + 4)
    rows_f32 = rows.to(tl.pointer_type(tl.float32))
    d = tl.load(rows_f32, n < N, 0)
    t = u // 128
    j = u // 16 % 8
    c = u % 16
    sc = (tl.load(rows + 136 * t + j + 4, live, 0) >> 1 & 127).to(tl.int32)
    h = (tl.load(rows + 136 * t + j + 4, live, 0) & 1).to(tl.int32)
    q_word = tl.load(rows + 136 * t + 16 * j + c + 12, live, 0)
    for i in tl.static_range(2):
        q = (q_word >> 4 * i & 15).to(tl.int32)
        state = use(state, 256 * t + 32 * j + 16 * i + c, d * (2 * sc - 127) * tl.load(levels + 16 * h + q), live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"d": Field("f32", "N"), "sc": Field("u7", "N", "K/32"), "h": Field("u1", "N", "K/32"), "q": Field("u4", "N", "K")},
    storages={
        "ik_llama": Storage(unpack=unpack_ik_llama, pack=pack_ik_llama, tensors={
            "rows": Stored("u8", "N", "4 + 136*K/256"),
        }, kernels=Kernels(_decode_ik_llama, rows="N", units="K/2", last="k", tables=(LEVELS,))),
    },
    decode=decode, encode=encode, importance=True,
)

FORMAT = Format(
    name="ik_iq4_ks", title="ik_llama.cpp IQ4_KS, a scale ahead of each row, 7-bit scales of blocks, 4-bit codes into two tables of levels",
    source="ik_llama.cpp ggml-common.h block_iq4_ks, iqk_quantize.cpp dequantize_row_iq4_ks",
    formula="d * (2 * sc - 127) * levels[16 * h + q]",
    variants={(): VARIANT},
    detect={"gguf": "IQ4_KS"},
    digest="f484603c1febc591",
)
SPEC = FORMAT.spec
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar = FORMAT.convert, FORMAT.requantize, FORMAT.planar
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
