"""q3_k: GGML Q3_K, 3-bit codes around 4 with 6-bit scales in super-blocks of 256.

    w = d * (sc - 32) * (q - 4)
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u6  [N, K/16]
    q      u3  [N, K]

    gguf: 3.4375 bits per weight
    planar: 3.5625 bits per weight

Built from the spec q3_k (sha256 ba7e54dd4c97e861) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kquant_signmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, pad)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * (sc - 32) * (q - 4) */
#define BITS 3
#define FIELDS 2
#define BRAIN_NUMBERS
static const float numbers[16] = {-4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-4)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    *scale = d * sc - 32.0f * d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 110*K/256]."""
    r = blocks.unflatten(-1, (-1, 110))
    q_bytes = r[..., 32:96].unflatten(-1, (2, 32)).contiguous()
    q_low = torch.stack([q_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(1)
    q_bytes2 = r[..., 0:32].contiguous()
    q_high = torch.stack([q_bytes2 >> 1 * i & 1 for i in range(8)], -2).flatten(1)
    sc_bytes = r[..., 96:104].contiguous()
    sc_low = torch.stack([sc_bytes & 15, sc_bytes >> 4], -2).flatten(1)
    sc_bytes2 = r[..., 104:108].contiguous()
    sc_high = torch.stack([sc_bytes2 >> 2 * i & 3 for i in range(4)], -2).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 54], "sc": sc_low | sc_high << 4, "q": q_low | q_high << 2}


def pack_gguf(d: Tensor, sc: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 110), torch.uint8, q.device)
    q_split = q.unflatten(-1, (-1, 2, 4, 32))
    r[..., 32:96] = sum((q_split[:, :, :, i] & 3) << 2 * i for i in range(4)).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 8, 32))
    r[..., 0:32] = sum((q_split2[:, :, i] >> 2) << 1 * i for i in range(8))
    sc_split = sc.unflatten(-1, (-1, 2, 8))
    r[..., 96:104] = (sc_split[:, :, 0] & 15) | (sc_split[:, :, 1] & 15) << 4
    sc_split2 = sc.unflatten(-1, (-1, 4, 4))
    r[..., 104:108] = sum((sc_split2[:, :, i] >> 4) << 2 * i for i in range(4))
    r[..., 108:110] = as_type(d.unsqueeze(-1), torch.uint8)
    return {"blocks": r.flatten(1)}


def unpack_planar(q_0: Tensor, q_1: Tensor, d: Tensor, sc: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/256)]; q_1 int32 [N, 16*ceil(K/512)]; d float16 [N, K/256]; sc uint8 [N, K/16]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0, 1,
        2, 5, 7, 3, 4, 6).flatten(1)
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 6 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 3
        & 1, q_bytes2 >> 5 & 1, q_bytes2 >> 7], -5).unflatten(2, (2, 2, 2)).permute(0, 1, 2, 3, 6, 8, 4, 5, 7).flatten(1)[:, :K]
    return {"d": d, "sc": sc & 63, "q": q_low | q_high << 2}


def pack_planar(d: Tensor, sc: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, d, sc of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, 0, :, :, 0] & 3) | (q_split[:, :, 0, :, :, 1] & 3) << 2 | (q_split[:, :, 1, :, :, 0] & 3) << 4
        | (q_split[:, :, 1, :, :, 1] & 3) << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 2, 2, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, 0, :, :, 0] >> 2) | (q_split2[:, :, 0, 0, :, :, 1] >> 2) << 2
        | (q_split2[:, :, 0, 1, :, :, 0] >> 2) << 4 | (q_split2[:, :, 0, 1, :, :, 1] >> 2) << 6
        | (q_split2[:, :, 1, 0, :, :, 0] >> 2) << 1 | (q_split2[:, :, 1, 0, :, :, 1] >> 2) << 3
        | (q_split2[:, :, 1, 1, :, :, 0] >> 2) << 5 | (q_split2[:, :, 1, 1, :, :, 1] >> 2)
        << 7).permute(0, 1, 4, 2, 5, 3).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] = sc.unsqueeze(-1)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "d": d,
            "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (sc - 32) * (q - 4).  d [N, K/256], sc [N, K/16], q [N,
    K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    sc = sc.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16, 16))
    return torch.mul(d * (sc - 32), as_float(q - 4, out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale by search for the least error; in steps of the super-block's largest, sign and
    all.  importance: float32 [K].
    """
    q, sc, d = kquant_signmax(weight, code="u3", scale="u6", super_scale="f16", columns=16, super_columns=256, by="exchange",
            spread=2, scale_offset=32, offset=4, importance=importance)
    return {"q": q, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 110 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 32
    j = u % 32
    d = tl.load(blocks_f16 + 55 * t + 54, live, 0).to(tl.float32)
    q_word1 = tl.load(blocks + 110 * t + j, live, 0)
    for h in tl.static_range(2):
        q_word = tl.load(blocks + 110 * t + 32 * h + j + 32, live, 0)
        for i in tl.static_range(4):
            sc_low = tl.load(blocks + 110 * t + 2 * i + j // 16 + 96, live, 0) >> 4 * h & 15
            sc_high = tl.load(blocks + 110 * t + 2 * (i % 2) + j // 16 + 104, live, 0) >> 4 * h + 2 * (i // 2) & 3
            sc = (sc_low | sc_high << 4).to(tl.int32)
            q_low = q_word >> 2 * i & 3
            q_high = q_word1 >> 4 * h + i & 1
            q = (q_low | q_high << 2).to(tl.int32)
            state = use(state, 256 * t + 128 * h + 32 * i + j, d * (sc - 32) * (q - 4), live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, d, sc = tensors
    d += n * (K // 256)
    sc += n * (K // 16)
    q_0 += 16 * (n * tl.cdiv(K, 256))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    d1 = tl.load(d + k // 256, live, 0).to(tl.float32)
    sc1 = (tl.load(sc + k // 16, live, 0) & 63).to(tl.int32)
    q_low = tl.load(q_0 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live,
        0) >> 16 * (k % 256 % 2) + 8 * (k % 256 // 16 % 2) + 4 * (k % 256 // 128) + 2 * (k % 256 // 8 % 2) & 3
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live,
        0) >> 16 * (k % 512 % 2) + 8 * (k % 512 // 16 % 2) + 4 * (k % 512 // 128 % 2) + 2 * (k % 512 // 8 % 2) + k % 512 // 256 & 1
    q = (q_low | q_high << 2).to(tl.int32)
    return use(state, k, d1 * (sc1 - 32) * (q - 4), live)


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = (d * sc - 32.0 * d) * (q - 4.0)."""
    d, sc = fields
    if BASE is not None:                             # else operands have no zero point any more
        sum += (-4.0 - BASE) * ones
    return lanes.plus(total, sum * (d * sc - 32.0 * d))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/8", last="k", digits=(32,), lanes=(2, 4),
                order=(0, 1, 3, 4, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u3, words=bitplanes.words_3, width=2, bits=3),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 16, 6)),
                    blocks=("256", "16")),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-4, -132), "exact": True, "spans": (4, 4)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 3, ("d", "sc")),
)

PROGRAM = {
    "name": "q3_k", "title": "GGML Q3_K, 3-bit codes around 4 with 6-bit scales in super-blocks of 256",
    "source": "ggml-common.h block_q3_K", "formula": "d * (sc - 32) * (q - 4)", "bits": "3.4375 to 3.5625",
    "digest": "ba7e54dd4c97e861",
    "detect": {"gguf": "Q3_K"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u6", "N", "K/16"), "q": ("u3", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "110*K/256",
                {"slices": (("q", 256, [0, [(32, 1, 1), (4, 2), (2, 32, 1), (0, 110, 1)]], 0, 2),
                ("q", 0, [0, [(32, 1, 1), (8, 1), (0, 110, 1)]], 2, 1), ("sc", 768, [0, [(8, 1, 1), (2, 4), (0, 110, 1)]], 0, 4),
                ("sc", 832, [0, [(4, 1, 1), (4, 2), (0, 110, 1)]], 4, 2), ("d", 864, [0, [(0, 110, 1)]]))})}},
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/256)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]], 0, 2),)}),
                "q_1": ("i32", "N", "16*ceil(K/512)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (2, 1), (0, 16, 1)]], 2,
                    1),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/16", {"padding": 192, "field": "sc"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
