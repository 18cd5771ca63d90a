"""nf4_nested: NF4 of bitsandbytes, 4-bit codes into quantiles of a normal distribution, with scales in 8 bits.

    w = levels[q] * (steps[s] * t + o)
    float32, rounded after each operation

    o      f32 []
    t      f32 [ceil(N*K/256*block)]
    s      u8  [ceil(N*K/block)]
    q      u4  [N, K]

    bitsandbytes: 4.12695 bits per weight with block = 64
    planar: 4.12695 bits per weight with block = 64

Built from the spec nf4_nested (sha256 0f75b8719a683d5a) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import unit_level_nested
from qdsl.runtime import (Field, Format, GroupField, Kernels, MatrixUnitKernels, RowCodes, RowLoops, Storage, Stored, Table,
        Variant, as_type, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, gemv, lanes, skinny, tile_gemm
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


STEPS = Table("f32", -0.992968738079071, -0.9789062738418579, -0.96484375, -0.9507812261581421, -0.936718761920929,
        -0.922656238079071, -0.9085937738418579, -0.89453125, -0.8804687261581421, -0.866406261920929, -0.852343738079071,
        -0.8382812738418579, -0.82421875, -0.8101562261581421, -0.796093761920929, -0.782031238079071, -0.7679687738418579,
        -0.75390625, -0.7398437261581421, -0.725781261920929, -0.7117187976837158, -0.6976562738418579, -0.68359375,
        -0.6695312261581421, -0.655468761920929, -0.6414062976837158, -0.6273437738418579, -0.61328125, -0.5992187261581421,
        -0.585156261920929, -0.5710937976837158, -0.5570312738418579, -0.54296875, -0.5289062261581421, -0.5148437023162842,
        -0.500781238079071, -0.48671871423721313, -0.47265625, -0.4585937261581421, -0.44453126192092896, -0.43046873807907104,
        -0.4164062440395355, -0.40234375, -0.3882812261581421, -0.37421876192092896, -0.36015623807907104, -0.3460937440395355,
        -0.33203125, -0.3179687261581421, -0.30390626192092896, -0.28984373807907104, -0.2757812738418579, -0.26171875,
        -0.24765624105930328, -0.23359374701976776, -0.21953125298023224, -0.20546874403953552, -0.19140625, -0.17734375596046448,
        -0.16328124701976776, -0.14921875298023224, -0.13515624403953552, -0.12109375, -0.10703125596046448, -0.09859374910593033,
        -0.09578125923871994, -0.09296875447034836, -0.09015624970197678, -0.08734375238418579, -0.08453124761581421,
        -0.08171875774860382, -0.07890625298023224, -0.07609374821186066, -0.07328125089406967, -0.07046874612569809,
        -0.0676562562584877, -0.06484375149011612, -0.062031250447034836, -0.05921875312924385, -0.05640624836087227,
        -0.053593751043081284, -0.05078125, -0.047968748956918716, -0.04515625163912773, -0.04234374687075615,
        -0.039531249552965164, -0.03671875223517418, -0.033906251192092896, -0.031093750149011612, -0.028281250968575478,
        -0.025468749925494194, -0.02265625074505806, -0.019843751564621925, -0.017031250521540642, -0.014218750409781933,
        -0.011406250298023224, -0.009718749672174454, -0.009156249463558197, -0.008593750186264515, -0.008031249977648258,
        -0.0074687497690320015, -0.006906250026077032, -0.006343749817460775, -0.005781250074505806, -0.0052187503315508366,
        -0.0046562496572732925, -0.004093749914318323, -0.0035312497057020664, -0.002968749962747097, -0.002406249986961484,
        -0.001843750011175871, -0.001281249918974936, -0.0009437500848434865, -0.0008312499849125743, -0.0007187500596046448,
        -0.0006062500760890543, -0.000493750034365803, -0.0003812500217463821, -0.0002687500382307917, -0.00015625001105945557,
        -8.874999912222847e-05, -6.625000241911039e-05, -4.374999844003469e-05, -2.1249998098937795e-05, -7.749999895168003e-06,
        -3.250000190746505e-06, -5.500000384017767e-07, 0.0, 5.500000384017767e-07, 3.250000190746505e-06, 7.749999895168003e-06,
        2.1249998098937795e-05, 4.374999844003469e-05, 6.625000241911039e-05, 8.874999912222847e-05, 0.00015625001105945557,
        0.0002687500382307917, 0.0003812500217463821, 0.000493750034365803, 0.0006062500760890543, 0.0007187500596046448,
        0.0008312499849125743, 0.0009437500848434865, 0.001281249918974936, 0.001843750011175871, 0.002406249986961484,
        0.002968749962747097, 0.0035312497057020664, 0.004093749914318323, 0.0046562496572732925, 0.0052187503315508366,
        0.005781250074505806, 0.006343749817460775, 0.006906250026077032, 0.0074687497690320015, 0.008031249977648258,
        0.008593750186264515, 0.009156249463558197, 0.009718749672174454, 0.011406250298023224, 0.014218750409781933,
        0.017031250521540642, 0.019843751564621925, 0.02265625074505806, 0.025468749925494194, 0.028281250968575478,
        0.031093750149011612, 0.033906251192092896, 0.03671875223517418, 0.039531249552965164, 0.04234374687075615,
        0.04515625163912773, 0.047968748956918716, 0.05078125, 0.053593751043081284, 0.05640624836087227, 0.05921875312924385,
        0.062031250447034836, 0.06484375149011612, 0.0676562562584877, 0.07046874612569809, 0.07328125089406967,
        0.07609374821186066, 0.07890625298023224, 0.08171875774860382, 0.08453124761581421, 0.08734375238418579,
        0.09015624970197678, 0.09296875447034836, 0.09578125923871994, 0.09859374910593033, 0.10703125596046448, 0.12109375,
        0.13515624403953552, 0.14921875298023224, 0.16328124701976776, 0.17734375596046448, 0.19140625, 0.20546874403953552,
        0.21953125298023224, 0.23359374701976776, 0.24765624105930328, 0.26171875, 0.2757812738418579, 0.28984373807907104,
        0.30390626192092896, 0.3179687261581421, 0.33203125, 0.3460937440395355, 0.36015623807907104, 0.37421876192092896,
        0.3882812261581421, 0.40234375, 0.4164062440395355, 0.43046873807907104, 0.44453126192092896, 0.4585937261581421,
        0.47265625, 0.48671871423721313, 0.500781238079071, 0.5148437023162842, 0.5289062261581421, 0.54296875,
        0.5570312738418579, 0.5710937976837158, 0.585156261920929, 0.5992187261581421, 0.61328125, 0.6273437738418579,
        0.6414062976837158, 0.655468761920929, 0.6695312261581421, 0.68359375, 0.6976562738418579, 0.7117187976837158,
        0.725781261920929, 0.7398437261581421, 0.75390625, 0.7679687738418579, 0.782031238079071, 0.796093761920929,
        0.8101562261581421, 0.82421875, 0.8382812738418579, 0.852343738079071, 0.866406261920929, 0.8804687261581421, 0.89453125,
        0.9085937738418579, 0.922656238079071, 0.936718761920929, 0.9507812261581421, 0.96484375, 0.9789062738418579,
        0.992968738079071, 1.0)


PAIRED = Table("f32", -1.0, -0.28444138169288635, -0.6961928009986877, -0.18477343022823334, 0.07958029955625534,
        0.44070982933044434, 0.16093020141124725, 0.5626170039176941, -0.39491748809814453, -0.09105003625154495,
        -0.5250730514526367, 0.0, 0.33791524171829224, 1.0, 0.24611230194568634, 0.7229568362236023)


ROW_CODES = RowCodes((0, 4, 1, 5, 8, 12, 9, 13, 3, 6, 2, 7, 11, 15, 10, 14,), q=(16, 1))


ROW_FUNCTIONS = """
/* w = levels[q] * (steps[s] * t + o) */
#define BITS 4
#define FIELDS 3
static const float numbers[16] = {-1.0f, -0.28444138169288635f, -0.6961928009986877f, -0.18477343022823334f, 0.07958029955625534f,
        0.44070982933044434f, 0.16093020141124725f, 0.5626170039176941f, -0.39491748809814453f, -0.09105003625154495f,
        -0.5250730514526367f, 0.0f, 0.33791524171829224f, 1.0f, 0.24611230194568634f, 0.7229568362236023f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    const vf t = FIELD(1);
    const vf o = FIELD(2);
    *scale = s * t + o;
}
"""


def unpack_bitsandbytes(weight: Tensor, weight_absmax: Tensor, weight_nested_absmax: Tensor, weight_nested_offset: Tensor, *,
        N: int, K: int) -> dict[str, Tensor]:
    """Fields of weight uint8 [ceil(N*K/2), 1]; weight_absmax uint8 [ceil(N*K/block)]; weight_nested_absmax float32
    [ceil(N*K/256*block)]; weight_nested_offset float32 [].
    """
    r = weight.squeeze(1)
    return {"o": weight_nested_offset, "t": weight_nested_absmax, "s": weight_absmax,
            "q": spread(r, 4, high_first=True).flatten()[:N * K].unflatten(0, (N, K))}


def pack_bitsandbytes(o: Tensor, t: Tensor, s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_absmax, weight_nested_absmax, weight_nested_offset of the fields; the inverse of unpack_bitsandbytes."""
    q_split = pad(q.flatten(), (0, -q.numel() % 2)).unflatten(-1, (-1, 2))
    r = joined(q_split, 4, high_first=True).squeeze(-1)
    return {"weight": r.unsqueeze(-1), "weight_absmax": s, "weight_nested_absmax": t, "weight_nested_offset": o}


def unpack_planar(code: Tensor, s: Tensor, t: Tensor, o: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of code int32 [N, 16*ceil(K/128)]; s uint8 [N, K/block]; t float32 [ceil(N*K/256*block)]; o float32 []."""
    r = as_type(code, torch.uint8).unflatten(-1, (-1, 64))
    code_bytes = r.unflatten(-1, (4, 8, 2))
    return {"o": o, "t": t, "s": s.flatten(),
            **ROW_CODES.fields(torch.stack([code_bytes & 15, code_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K])}


def pack_planar(o: Tensor, t: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, block: int) -> dict[str, Tensor]:
    """code, s, t, o of the fields; the inverse of unpack_planar."""
    code = ROW_CODES.codes(q=q)
    code_split = pad(code, (0, -code.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (code_split[:, :, :, 0] | code_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {"code": as_type(r, torch.int32).flatten(1), "s": s.unflatten(-1, (N, K // block)), "t": t, "o": o}


def decode(o: Tensor, t: Tensor, s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = levels[q] * (steps[s] * t + o).  o [], t
    [ceil(N*K/256*block)], s [ceil(N*K/block)], q [N, K].
    """
    shape = q.shape
    out = out if out is None else out.view(s.shape[0], -1)
    t = t.repeat_interleave(256)[:s.shape[0]].unsqueeze(-1)
    q = q.view(torch.int8).reshape(s.shape[0], -1)
    s = s.to(torch.int16).unsqueeze(-1)
    return torch.mul(LEVELS[q], STEPS[s] * t + o, out=out).view(shape)


def encode(weight: Tensor, *, block: int) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: codes as unit_level's; offset = the mean of its scales, which are coded so less the
    offset.
    """
    q, s, t, o = unit_level_nested(weight.reshape(1, -1), code="u4", scale="u8", super_scale="f32", offset="f32", rows=1,
            columns=block, axes=2, super_columns=256 * block, level=LEVELS, entry=STEPS)
    return {"q": q.reshape(weight.shape), "s": s.flatten(), "t": t.flatten(), "o": o}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_bitsandbytes(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_absmax, weight_nested_absmax, weight_nested_offset, levels, steps = tensors
    block, = sizes
    o = tl.load(weight_nested_offset)
    t = tl.load(weight_nested_absmax + (k + n * K) // (256 * block), live, 0)
    s = tl.load(weight_absmax + (k + n * K) // block, live, 0).to(tl.int32)
    q = (tl.load(weight + (k + n * K) // 2, live, 0) >> 4 - 4 * ((k + n * K) % 2) & 15).to(tl.int32)
    return use(state, k, tl.load(levels + q) * (tl.load(steps + s) * t + o), live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    code, s, t, o, paired, steps = tensors
    block, = sizes
    o1 = tl.load(o)
    s += n * (K // block)
    code += 16 * (n * tl.cdiv(K, 128))
    c = u // 16
    b = u // 4 % 4
    a = u % 4
    live = live & (128 * c + 32 * b + 2 * a < K)
    s1 = tl.load(s + (4 * c + b) // (block // 32), live, 0).to(tl.int32)
    code_word = tl.load(code + 16 * c + 4 * a + b, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * c + 32 * b + 16 * h + 8 * i + 2 * a + j < K)
                t1 = tl.load(t + (128 * c + 32 * b + 16 * h + 8 * i + 2 * a + j + n * K) // (256 * block), inside, 0)
                code1 = (code_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                state = use(state, 128 * c + 32 * b + 16 * h + 8 * i + 2 * a + j, tl.load(paired + code1)
                    * (tl.load(steps + s1) * t1 + o1), inside)
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


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = (steps[s] * t + o) * paired[code]."""
    s, t, o = fields
    return lanes.plus(total, sum * (s * t + o))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"o": Field("f32"), "t": Field("f32", "ceil(N*K/256*block)"), "s": Field("u8", "ceil(N*K/block)"),
            "q": Field("u4", "N", "K")},
    storages={
        "bitsandbytes": Storage(unpack=unpack_bitsandbytes, pack=pack_bitsandbytes, reads=("N", "K"), tensors={
            "weight": Stored("u8", "ceil(N*K/2)", "1"),
            "weight_absmax": Stored("u8", "ceil(N*K/block)", aliases=("weight.absmax",), bits=("s[1@0]",)),
            "weight_nested_absmax": Stored("f32", "ceil(N*K/256*block)", aliases=("weight.nested_absmax",), bits=("t[1@0]",)),
            "weight_nested_offset": Stored("f32", aliases=("nested_offset",), bits=("o[]",)),
        }, kernels=Kernels(_decode_bitsandbytes, rows="N", units="K", last="k", tables=(LEVELS, STEPS,))),
        "planar": Storage(unpack=unpack_planar, pack=pack_planar, reads=("K",), extents=("N", "K", "block"), tensors={
            "code": Stored("i32", "N", "16*ceil(K/128)"),
            "s": Stored("u8", "N", "K/block"),
            "t": Stored("f32", "ceil(N*K/256*block)", bits=("t[1@0]",)),
            "o": Stored("f32", bits=("o[]",)),
        }, kernels=Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k", digits=(4, 4), lanes=(2, 2, 2),
                order=(0, 1, 2, 4, 5, 3, 6), tables=(PAIRED, STEPS,),
                matrix_unit=MatrixUnitKernels(skinny, gemv=gemv, tile_gemm=tile_gemm, words=bitplanes.words_4,
                    numbers=bitplanes.paired_entries_of_16, table=_table_planar, scale=_scale_planar,
                    group_fields=(GroupField("s", 1, "block", 8, table=STEPS), GroupField("t", 1, "block", shared=256),
                    GroupField("o", 0, 0)), blocks=("block",), size=32, width=8, bits=0, unit=(2.0, 1.0), base=(0, 0),
                    zero=(0, 0)))),
    },
    decode=decode, encode=encode, cuts=("N", "ceil(N*K/block)"),
    row_loops=RowLoops(ROW_FUNCTIONS, "", 4, ("s", "t", "o"), row_codes=ROW_CODES, lookups={"s": STEPS}),
)

FORMAT = Format(
    name="nf4_nested", title="NF4 of bitsandbytes, 4-bit codes into quantiles of a normal distribution, with scales in 8 bits",
    source="bitsandbytes functional.py get_4bit_type, QuantState.as_dict", formula="levels[q] * (steps[s] * t + o)",
    variants={(): VARIANT},
    params={"block": (64, 32, 128, 256, 512, 1024, 2048, 4096)},
    sizes={"block": "K"},
    detect={"tensors": {"weight.quant_map": "levels", "weight.nested_quant_map": "steps",
        "weight.quant_state.bitsandbytes__nf4": {"quant_type": "nf4", "blocksize": "block",
        "dtype": ["bfloat16", "float16", "float32", "null"], "shape": ["N", "K"], "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": "weight_nested_offset"}}},
    digest="0f75b8719a683d5a",
)
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
