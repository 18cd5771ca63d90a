"""q6_k: GGML Q6_K, 6-bit codes around 32 with 8-bit scales in super-blocks of 256.

    w = d * sc * (q - 32)
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     i8  [N, K/16]
    q      u6  [N, K]

    gguf: 6.5625 bits per weight
    planar: 6.5625 bits per weight

Built from the spec q6_k (sha256 d5378445898da666) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kquant_signmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * sc * (q - 32) */
#define BITS 6
#define FIELDS 2
#define BRAIN_NUMBERS
INLINE vf number(const Weight *w, vu codes) { return unsigned_number(codes) - 32.0f; }
#define BASE (-32)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    *scale = d * sc;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 210*K/256]."""
    r = blocks.unflatten(-1, (-1, 210))
    q_bytes = r[..., 0:128].unflatten(-1, (2, 64)).contiguous()
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)
    q_bytes2 = r[..., 128:192].unflatten(-1, (2, 32)).contiguous()
    q_high = torch.stack([q_bytes2 >> 2 * i & 3 for i in range(4)], -2).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 104], "sc": as_type(r[..., 192:208], torch.int8).flatten(1),
            "q": q_low | q_high << 4}


def pack_gguf(d: Tensor, sc: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 210), torch.uint8, q.device)
    q_split = q.unflatten(-1, (-1, 2, 2, 64))
    r[..., 0:128] = ((q_split[:, :, :, 0] & 15) | (q_split[:, :, :, 1] & 15) << 4).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 2, 4, 32))
    r[..., 128:192] = sum((q_split2[:, :, :, i] >> 4) << 2 * i for i in range(4)).flatten(2)
    r[..., 192:208] = sc.unflatten(-1, (-1, 16)).view(torch.uint8)
    r[..., 208:210] = as_type(d.unsqueeze(-1), torch.uint8)
    return {"blocks": r.flatten(1)}


def unpack_planar(q_0: Tensor, q_1: Tensor, d: Tensor, sc: Tensor) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/256)]; d float16 [N, K/256]; sc int8 [N, K/16]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 3, q_bytes2 >> 4 & 3, q_bytes2 >> 2 & 3, q_bytes2 >> 6], -5).unflatten(2, (2, 2)).permute(0,
        1, 2, 5, 7, 3, 4, 6).flatten(1)
    return {"d": d, "sc": sc, "q": q_low | q_high << 4}


def pack_planar(d: Tensor, sc: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, d, sc of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, :, 0] >> 4) | (q_split2[:, :, 0, :, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, :, 0] >> 4)
        << 2 | (q_split2[:, :, 1, :, :, 1] >> 4) << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "d": d,
            "sc": sc}


def decode(d: Tensor, sc: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * sc * (q - 32).  d [N, K/256], sc [N, K/16], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    sc = sc.unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16, 16))
    return torch.mul(d * sc, as_float(q - 32, out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale by search for the least error; in steps of the super-block's largest, sign and
    all.  importance: float32 [K].
    """
    q, sc, d = kquant_signmax(weight, code="u6", scale="i8", super_scale="f16", columns=16, super_columns=256, offset=32,
            importance=importance)
    return {"q": q, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 210 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 64
    j = u // 32 % 2
    c = u % 32
    d = tl.load(blocks_f16 + 105 * t + 104, live, 0).to(tl.float32)
    q_word1 = tl.load(blocks + 210 * t + 32 * j + c + 128, live, 0)
    for h in tl.static_range(2):
        q_word = tl.load(blocks + 210 * t + 64 * j + 32 * h + c, live, 0)
        for i in tl.static_range(2):
            sc = tl.load(blocks + 210 * t + 8 * j + 4 * i + 2 * h + c // 16 + 192, live, 0).to(tl.int8, bitcast=True)
            q_low = q_word >> 4 * i & 15
            q_high = q_word1 >> 4 * i + 2 * h & 3
            q = (q_low | q_high << 4).to(tl.int32)
            state = use(state, 256 * t + 128 * j + 64 * i + 32 * h + c, d * sc * (q - 32), live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, d, sc = tensors
    d += n * (K // 256)
    sc += n * (K // 16)
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 256))
    d1 = tl.load(d + k // 256, live, 0).to(tl.float32)
    sc1 = tl.load(sc + k // 16, live, 0)
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2) + 4 * (k % 128 // 8 % 4) & 15
    q_high = tl.load(q_1 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live, 0) >> 16 * (k % 256 % 2) + 4 * (k % 256 // 8 % 4) + 2 * (k % 256 // 128) & 3
    q = (q_low | q_high << 4).to(tl.int32)
    return use(state, k, d1 * sc1 * (q - 32), live)


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = d * sc * (q - 32.0)."""
    d, sc = fields
    if BASE is not None:                             # else operands have no zero point any more
        sum += (-32.0 - BASE) * ones
    return lanes.plus(total, sum * (d * sc))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/4", last="k", digits=(2, 32),
                lanes=(2, 2), order=(0, 1, 2, 5, 4, 3))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u6, words=bitplanes.words_6, width=4, bits=6),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 16, 8)),
                    blocks=("256", "16")),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-32, -160), "exact": True, "spans": (0, 2)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 6, ("d", "sc")),
)

PROGRAM = {
    "name": "q6_k", "title": "GGML Q6_K, 6-bit codes around 32 with 8-bit scales in super-blocks of 256",
    "source": "ggml-common.h block_q6_K", "formula": "d * sc * (q - 32)", "bits": "6.5625", "digest": "d5378445898da666",
    "detect": {"gguf": "Q6_K"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("i8", "N", "K/16"), "q": ("u6", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "210*K/256",
                {"slices": (("q", 0, [0, [(64, 1, 1), (2, 4), (2, 64, 1), (0, 210, 1)]], 0, 4),
                ("q", 1024, [0, [(32, 1, 1), (4, 2), (2, 32, 1), (0, 210, 1)]], 4, 2),
                ("sc", 1536, [0, [(16, 1, 1), (0, 210, 1)]]), ("d", 1664, [0, [(0, 210, 1)]]))})}},
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                "q_1": ("i32", "N", "16*ceil(K/256)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (2, 2), (0, 16, 1)]], 4, 2),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("i8", "N", "K/16", {"field": "sc"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
