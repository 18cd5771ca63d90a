"""openvino_nf4: OpenVINO's NF4 constants, with levels rounded to float16, and one scale per group of columns.

    w = levels[q] * s
    float32, rounded after each operation

    s      f16 [N, ceil(K/group)]
    q      u4  [N, K]

    openvino: 4.25 bits per weight with group = 64
    planar: 4.25 bits per weight with group = 64

Built from the spec openvino_nf4 (sha256 6a84b31d9644944e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import unit_level
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowCodes, RowLoops, Storage, Sums, Table,
        Variant, as_type, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -1.0, -0.6962890625, -0.52490234375, -0.39501953125, -0.284423828125, -0.184814453125, -0.091064453125, 0.0,
        0.07958984375, 0.160888671875, 0.24609375, 0.337890625, 0.440673828125, 0.5625, 0.72314453125, 1.0)


PAIRED = Table("f32", -1.0, -0.284423828125, -0.6962890625, -0.184814453125, 0.07958984375, 0.440673828125, 0.160888671875,
        0.5625, -0.39501953125, -0.091064453125, -0.52490234375, 0.0, 0.337890625, 1.0, 0.24609375, 0.72314453125)


ROW_CODES = RowCodes((0, 4, 1, 5, 8, 12, 9, 13, 3, 6, 2, 7, 11, 15, 10, 14,), q=(16, 1))


ROW_FUNCTIONS = """
/* w = levels[q] * s */
#define BITS 4
#define FIELDS 1
static const float numbers[16] = {-1.0f, -0.284423828125f, -0.6962890625f, -0.184814453125f, 0.07958984375f, 0.440673828125f,
        0.160888671875f, 0.5625f, -0.39501953125f, -0.091064453125f, -0.52490234375f, 0.0f, 0.337890625f, 1.0f, 0.24609375f,
        0.72314453125f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    *scale = s;
}
"""


def unpack_openvino(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [N, K/2]; scale float16 [N, K/group]."""
    return {"s": scale, "q": spread(weight, 4).flatten(1)}


def pack_openvino(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scale of the fields; the inverse of unpack_openvino."""
    q_split = q.unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight": r, "scale": s}


def unpack_planar(code: Tensor, s: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of code int32 [N, 16*ceil(K/128)]; s float16 [N, ceil(K/group)]."""
    r = as_type(code, torch.uint8).unflatten(-1, (-1, 64))
    code_bytes = r.unflatten(-1, (4, 8, 2))
    return {"s": s,
            **ROW_CODES.fields(torch.stack([code_bytes & 15, code_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K])}


def pack_planar(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """code, s of the fields; the inverse of unpack_planar."""
    code = ROW_CODES.codes(q=q)
    code_split = pad(code, (0, -code.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (code_split[:, :, :, 0] | code_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {"code": as_type(r, torch.int32).flatten(1), "s": s}


def decode(s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = levels[q] * s.  s [N, ceil(K/group)], q [N, K]."""
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = q.view(torch.int8).unflatten(1, (s.shape[1], -1))
    s = s.float().unsqueeze(-1)
    return torch.mul(LEVELS[q], s, out=out).flatten(1)


def encode(weight: Tensor, *, group: int) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block; codes of the levels nearest to w * (1 /
    scale).
    """
    q, s = unit_level(weight, code="u4", scale="f16", rows=1, columns=group, axes=2, level=LEVELS)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_openvino(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    weight, scale, levels = tensors
    group, = sizes
    scale += n * (K // group)
    weight += n * (K // 2)
    s = tl.load(scale + t // (group // 2), live, 0).to(tl.float32)
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 2 * t + h, tl.load(levels + q) * s, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    code, s, paired = tensors
    group, = sizes
    s += n * tl.cdiv(K, group)
    code += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    s1 = tl.load(s + (128 * t + 32 * c) // group, live, 0).to(tl.float32)
    code_word = tl.load(code + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                code1 = (code_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, tl.load(paired + code1) * s1, inside)
    return state


@triton.jit
def _table_planar(g, N, F: tl.constexpr):
    """The numbers of paired[code] as words of bytes, in every lane."""
    if F == tl.float16:
        return codebook.table(g, N, 0x0,
            (-0x156d7300, -0x7fd9f2e8, 0x33d452, -0x361fff98, -0x524a4f48, 0x342d3329, 0xb4a9b2, 0x352f3831))
    else:
        return codebook.table(g, N, 0x0,
            (0x3d329280, 0x1025e2a3, 0x64535, 0x397c7f52, -0x41404141, 0x3f3e3e3d, 0x7f404241, 0x3f3e3f3e))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "openvino": Storage(unpack_openvino, pack_openvino, Kernels(_decode_openvino, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2), tables=(LEVELS,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6), tables=(PAIRED,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.paired_entries_of_16, words=bitplanes.words_4, width=8, bits=0,
                    unit=(2.0, 1.0), base=(0, 0), levels=Levels(_table_planar)),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("s", 1, "group"),), blocks=("group",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "", 4, ("s",), row_codes=ROW_CODES),
)

PROGRAM = {
    "name": "openvino_nf4",
    "title": "OpenVINO's NF4 constants, with levels rounded to float16, and one scale per group of columns",
    "source": "OpenVINO nf4 constants of opset 13, NNCF CompressWeightsMode.NF4", "formula": "levels[q] * s", "bits": "4.25",
    "digest": "6a84b31d9644944e",
    "params": {"group": (64, 128, 32, -1)},
    "sizes": {"group": "K"},
    "variants": {(): {
        "fields": {"s": ("f16", "N", "ceil(K/group)"), "q": ("u4", "N", "K")},
        "cuts": ("N", "ceil(K/group)"),
        "storages": {
            "openvino": {"tensors": {
                "weight": ("u8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "scale": ("f16", "N", "K/group", {"field": "s"}),
            }},
            "planar": {"tensors": {
                "code": ("i32", "N", "16*ceil(K/128)",
                    {"row_codes": (("code", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                "s": ("f16", "N", "ceil(K/group)", {"field": "s"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
