"""mxfp4: GGML MXFP4, 4-bit floats with a power of two per 32.

    w = e * level[q]
    float32, rounded after each operation

    e      e8m0h [N, K/32]
    q      u4    [N, K]

    gguf: 4.25 bits per weight
    planar: 4.25 bits per weight

Built from the spec mxfp4 (sha256 30ee6433a4669068) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import absmax_level
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Table, Variant,
        as_type, cdiv, empty, pad)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e8m0h


# -- reference -------------------------------------------------------------------------------------------------------


LEVEL = Table("f32", 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


ROW_FUNCTIONS = """
/* w = e * level[q] */
#define BITS 4
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f, 0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f,
        -12.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-12)
#define UNIT 1.0f
static const uint8_t byte_numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf e = FIELD(0);
    *scale = e;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 17*K/32]."""
    r = blocks.unflatten(-1, (-1, 17))
    q_bytes = r[..., 1:17].contiguous()
    return {"e": r[..., 0:1].squeeze(-1), "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)}


def pack_gguf(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((e.shape[0], e.shape[1], 17), torch.uint8, e.device)
    r[..., 0:1] = e.unsqueeze(-1)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 1:17] = q_split[:, :, 0] | q_split[:, :, 1] << 4
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, e: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; e uint8 [N, K/32]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 2 & 3], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]
    q_high = torch.stack([q_bytes >> 4 & 3, q_bytes >> 6], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]
    return {"e": e, "q": q_low | q_high << 2}


def pack_planar(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, e of the fields; the inverse of unpack_planar."""
    r = torch.zeros(q.shape[0], cdiv(q.shape[1], 128), 64, dtype=torch.uint8, device=q.device)
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r[...] |= ((q_split[:, :, :, 0] & 3) | (q_split[:, :, :, 1] & 3) << 2).permute(0, 1, 3, 2, 4).flatten(2)
    r[...] |= ((q_split[:, :, :, 0] >> 2) << 4 | (q_split[:, :, :, 1] >> 2) << 6).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "e": e}


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * level[q].  e [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    e = e8m0h(e).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(e, LEVEL[q], out=out).flatten(1)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / largest level; of levels the nearest, of two
    the first.
    """
    q, e = absmax_level(weight, code="u4", scale="e8m0h", rows=1, columns=32, axes=2, level=LEVEL)
    return {"q": q, "e": e}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    blocks, level = tensors
    blocks += 17 * (n * (K // 32))
    t = u // 16
    i = u % 16
    e = device.e8m0h(tl.load(blocks + 17 * t, live, 0))
    q_word = tl.load(blocks + 17 * t + i + 1, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 32 * t + 16 * h + i, e * tl.load(level + q), live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, e, level = tensors
    e += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    e1 = device.e8m0h(tl.load(e + 4 * t + c, live, 0))
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                q_low = q_word >> 16 * h + 8 * j + 2 * i & 3
                q_high = q_word >> 16 * h + 8 * j + 2 * i + 4 & 3
                q1 = (q_low | q_high << 2).to(tl.int32)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, e1 * tl.load(level + q1), inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/2", last="k", digits=(16,), lanes=(2,),
                order=(0, 1, 3, 2), tables=(LEVEL,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6), tables=(LEVEL,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e2m1, words=bitplanes.words_4, width=8, bits=0,
                    unit=(32768.0, 2.0), base=(0, 0), levels=Levels(codebook.two_part_table)),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("e", 1, 32, "e8m0h"),), blocks=("32",)),
                    {"skinny": {}, "gemv": {"raw": bitplanes.raw_e2m1}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, scheme="absmax_level", roles={"code": "q", "scale": "e"}, settings={"level": LEVEL},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("e",)),
)

PROGRAM = {
    "name": "mxfp4", "title": "GGML MXFP4, 4-bit floats with a power of two per 32",
    "source": "ggml-common.h block_mxfp4 and kvalues_mxfp4", "formula": "e * level[q]", "bits": "4.25",
    "digest": "30ee6433a4669068",
    "detect": {"gguf": "MXFP4"},
    "variants": {(): {
        "fields": {"e": ("e8m0h", "N", "K/32"), "q": ("u4", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "17*K/32",
                {"slices": (("e", 0, [0, [(0, 17, 1)]]), ("q", 8, [0, [(16, 1, 1), (2, 4), (0, 17, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 2), (2, 16), (4, 1, 1), (0, 16, 1)]], 0, 2),
                    ("q", 4, [0, [(2, 8), (4, 4, 1), (2, 2), (2, 16), (4, 1, 1), (0, 16, 1)]], 2, 2))}),
                "e": ("e8m0h", "N", "K/32", {"field": "e"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
