"""nf4: NF4 of bitsandbytes, 4-bit codes into quantiles of a normal distribution, with one scale per block.

    w = levels[q] * s
    float32, rounded after each operation

    s      f32 [ceil(N*K/block)]
    q      u4  [N, K]

    bitsandbytes: 4.5 bits per weight with block = 64
    planar: 4.5 bits per weight with block = 64

Built from the spec nf4 (sha256 c9f14513e0669b18) by qdsl 0.1.0.
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


LEVELS = Table("f32", -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


PAIRED = Table("f32", -1.0, -0.28444138169288635, -0.6961928009986877, -0.18477343022823334, 0.07958029955625534,
        0.44070982933044434, 0.16093020141124725, 0.5626170039176941, -0.39491748809814453, -0.09105003625154495,
        -0.5250730514526367, 0.0, 0.33791524171829224, 1.0, 0.24611230194568634, 0.7229568362236023)


ROW_CODES = RowCodes((0, 4, 1, 5, 8, 12, 9, 13, 3, 6, 2, 7, 11, 15, 10, 14,), q=(16, 1))


ROW_FUNCTIONS = """
/* w = levels[q] * s */
#define BITS 4
#define FIELDS 1
static const float numbers[16] = {-1.0f, -0.28444138169288635f, -0.6961928009986877f, -0.18477343022823334f, 0.07958029955625534f,
        0.44070982933044434f, 0.16093020141124725f, 0.5626170039176941f, -0.39491748809814453f, -0.09105003625154495f,
        -0.5250730514526367f, 0.0f, 0.33791524171829224f, 1.0f, 0.24611230194568634f, 0.7229568362236023f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    *scale = s;
}
"""


def unpack_bitsandbytes(weight: Tensor, weight_absmax: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of weight uint8 [ceil(N*K/2), 1]; weight_absmax float32 [ceil(N*K/block)]."""
    r = weight.squeeze(1)
    return {"s": weight_absmax, "q": spread(r, 4, high_first=True).flatten()[:N * K].unflatten(0, (N, K))}


def pack_bitsandbytes(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_absmax of the fields; the inverse of unpack_bitsandbytes."""
    q_split = pad(q.flatten(), (0, -q.numel() % 2)).unflatten(-1, (-1, 2))
    r = joined(q_split, 4, high_first=True).squeeze(-1)
    return {"weight": r.unsqueeze(-1), "weight_absmax": s}


def unpack_planar(code: Tensor, s: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of code int32 [N, 16*ceil(K/128)]; s float32 [N, K/block]."""
    r = as_type(code, torch.uint8).unflatten(-1, (-1, 64))
    code_bytes = r.unflatten(-1, (4, 8, 2))
    return {"s": s.flatten(),
            **ROW_CODES.fields(torch.stack([code_bytes & 15, code_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K])}


def pack_planar(s: Tensor, q: Tensor, *, N: int, K: int, block: int) -> dict[str, Tensor]:
    """code, s of the fields; the inverse of unpack_planar."""
    code = ROW_CODES.codes(q=q)
    code_split = pad(code, (0, -code.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (code_split[:, :, :, 0] | code_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {"code": as_type(r, torch.int32).flatten(1), "s": s.unflatten(-1, (N, K // block))}


def decode(s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = levels[q] * s.  s [ceil(N*K/block)], q [N, K]."""
    shape = q.shape
    out = out if out is None else out.view(s.shape[0], -1)
    q = q.view(torch.int8).reshape(s.shape[0], -1)
    s = s.unsqueeze(-1)
    return torch.mul(LEVELS[q], s, out=out).view(shape)


def encode(weight: Tensor, *, block: int) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block; codes of the levels nearest to w * (1 /
    scale).
    """
    q, s = unit_level(weight.reshape(1, -1), code="u4", scale="f32", rows=1, columns=block, axes=2, level=LEVELS)
    return {"q": q.reshape(weight.shape), "s": s.flatten()}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_bitsandbytes(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_absmax, levels = tensors
    block, = sizes
    s = tl.load(weight_absmax + (k + n * K) // block, live, 0)
    q = (tl.load(weight + (k + n * K) // 2, live, 0) >> 4 - 4 * ((k + n * K) % 2) & 15).to(tl.int32)
    return use(state, k, tl.load(levels + q) * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    code, s, paired = tensors
    block, = sizes
    s += n * (K // block)
    code += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    s1 = tl.load(s + (4 * t + c) // (block // 32), live, 0)
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
        "bitsandbytes": Storage(unpack_bitsandbytes, pack_bitsandbytes, Kernels(_decode_bitsandbytes, rows="N", units="K",
                last="k", tables=(LEVELS,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6), tables=(PAIRED,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.paired_entries_of_16, words=bitplanes.words_4, width=8, bits=0,
                    unit=(2.0, 1.0), base=(0, 0), levels=Levels(_table_planar)),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("s", 1, "block"),), blocks=("block",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "", 4, ("s",), row_codes=ROW_CODES),
)

PROGRAM = {
    "name": "nf4", "title": "NF4 of bitsandbytes, 4-bit codes into quantiles of a normal distribution, with one scale per block",
    "source": "bitsandbytes functional.py get_4bit_type, QuantState.as_dict", "formula": "levels[q] * s", "bits": "4.5",
    "digest": "c9f14513e0669b18",
    "params": {"block": (64, 32, 128, 256, 512, 1024, 2048, 4096)},
    "sizes": {"block": "K"},
    "detect": {"tensors": {
        "weight.quant_map": "levels",
        "weight.quant_state.bitsandbytes__nf4": {
            "quant_type": "nf4", "blocksize": "block", "dtype": ["bfloat16", "float16", "float32", "null"], "shape": ["N", "K"],
        },
    }},
    "tables": {"levels": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)},
    "variants": {(): {
        "fields": {"s": ("f32", "ceil(N*K/block)"), "q": ("u4", "N", "K")},
        "cuts": ("N", "ceil(N*K/block)"),
        "storages": {
            "bitsandbytes": {"tensors": {
                "weight": ("u8", "ceil(N*K/2)", "1", {"slices": (("q", 4, [[(2, -4), (0, 1, 0)]]),)}),
                "weight_absmax": ("f32", "ceil(N*K/block)", {"aliases": ("weight.absmax",), "field": "s"}),
            }},
            "planar": {"tensors": {
                "code": ("i32", "N", "16*ceil(K/128)",
                    {"row_codes": (("code", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                "s": ("f32", "N", "K/block", {"slices": (("s", 0, [[("K/block", 1, 1), (0, 1, 0)]]),)}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
