"""nunchaku_int4: Nunchaku INT4 (SVDQuant), codes and factors of a low rank in tiles of matrix units.

    w = q * s / m
        + low_rank(proj_up, proj_down)
    float32, rounded after each operation

    q      i4         [N, K]
    s      scale_type [N, K/64]
    m      scale_type [K]

    nunchaku: 4.25 bits per weight
    planar: 4.25098 bits per weight

Built from the spec nunchaku_int4 (sha256 edd2b19b29c16823) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, joined, pad, spread, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s / m */
#define BITS 4
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, -8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f,
        -1.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-8)
#define UNIT 1.0f
static const uint8_t byte_numbers[16] = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    *scale = s;
}
"""


def unpack_nunchaku(qweight: Tensor, wscales: Tensor, smooth_factor: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int8 [N/128, K/64, 8, 8, 4, 2, 2, 4]; wscales scale_type [N/128, K/64, 8, 4, 2, 2]; smooth_factor
    scale_type [K/128, 8, 4, 2, 2].
    """
    r = as_type(qweight.permute(0, 2, 5, 3, 1, 6, 4, 7), torch.uint8)
    return {"q": ((spread(r, 4).flatten(0, 3).flatten(1)).view(torch.int8) ^ 8) - 8,
            "s": wscales.permute(0, 2, 4, 3, 5, 1).flatten(0, 4), "m": smooth_factor.permute(0, 1, 3, 2, 4).flatten()}


def pack_nunchaku(q: Tensor, s: Tensor, m: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """qweight, wscales, smooth_factor of the fields; the inverse of unpack_nunchaku."""
    q_split = q.view(torch.uint8).unflatten(-1, (K // 64, 2, 4, 4, 2)).unflatten(0, (N // 128, 8, 2, 8))
    r = joined(q_split & 15, 4).squeeze(-1)
    return {"qweight": as_type(r, torch.int8).permute(0, 4, 1, 3, 6, 2, 5, 7).contiguous(),
            "wscales": s.unflatten(0, (N // 128, 8, 2, 4, 2)).permute(0, 5, 1, 3, 2, 4).contiguous(),
            "smooth_factor": m.unflatten(-1, (K // 128, 8, 2, 4, 2)).permute(0, 1, 3, 2, 4).contiguous()}


def unpack_planar(q: Tensor, s: Tensor, m: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s scale_type [N, K/64]; m scale_type [K]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {
            "q": ((torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:,
                :K]).view(torch.int8) ^ 8) - 8,
            "s": s, "m": m}


def pack_planar(q: Tensor, s: Tensor, m: Tensor) -> dict[str, Tensor]:
    """q, s, m of the fields; the inverse of unpack_planar."""
    q_split = pad(q.view(torch.uint8), (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "m": m}


def decode(q: Tensor, s: Tensor, m: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s / m.  q [N, K], s [N, K/64], m [K]."""
    out = out if out is None else out.unflatten(1, (-1, 64))
    q = q.unflatten(1, (-1, 64))
    s = s.float().unsqueeze(-1)
    m = m.float().unflatten(0, (-1, 64))[None, :, :]
    space = workspace(out)
    w = torch.mul(as_float(q, out), s, out=space)
    return torch.div(w, m, out=out).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_nunchaku(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qweight, wscales, smooth_factor = tensors
    qweight += 4096 * (n // 8 // 2 // 8 * (K // 64)) + 512 * (n // 8 // 2 % 8) + 64 * (n % 8) + 8 * (n // 8 % 2)
    wscales += 128 * (n // 2 // 4 // 2 // 8
        * (K // 64)) + 16 * (n // 2 // 4 // 2 % 8) + 4 * (n // 2 % 4) + 2 * (n // 2 // 4 % 2) + n % 2
    q = ((tl.load(qweight + 4096 * (k // 8 // 4 // 2) + 16 * (k // 8 % 4) + 4 * (k // 8 // 4 % 2) + k % 8 // 2, live, 0) >> 4
        * (k % 8 % 2) & 15).to(tl.int32) ^ 8) - 8
    s = tl.load(wscales + 128 * (k // 64), live, 0).to(tl.float32)
    m = tl.load(smooth_factor + 128 * (k // 2 // 4 // 2 // 8) + 16 * (k // 2 // 4 // 2 % 8) + 4 * (k // 2 % 4) + 2
        * (k // 2 // 4 % 2) + k % 2, live, 0).to(tl.float32)
    return use(state, k, tl.div_rn(q * s, m), live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, m = tensors
    q += 16 * (n * tl.cdiv(K, 128))
    s += n * (K // 64)
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    s1 = tl.load(s + 2 * t + j // 2, live, 0).to(tl.float32)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = ((q_word >> 16 * i + 4 * h & 15).to(tl.int32) ^ 8) - 8
            m1 = tl.load(m + 128 * t + 32 * j + 8 * h + 2 * c + i, inside, 0).to(tl.float32)
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, tl.div_rn(q1 * s1, m1), inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "nunchaku": Storage(unpack_nunchaku, pack_nunchaku, Kernels(_decode_nunchaku, rows="N", units="K", last="k",
                divides=True)),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5), divides=True,
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i4, words=bitplanes.words_4, signed=True, base=(8, 136)),
                    Sums(scale=group_sums.scaled_codes, group_fields=(GroupField("s", 1, 64),), blocks=("64",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-8, -136)}}))),
    },
    decode=decode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s",), columns="/m"),
)

PROGRAM = {
    "name": "nunchaku_int4", "title": "Nunchaku INT4 (SVDQuant), codes and factors of a low rank in tiles of matrix units",
    "source": "nunchaku, packer.py NunchakuWeightPacker with warps of 128 rows; deepcompressor writes it", "formula": "q * s / m",
    "bits": "4.25 to 4.251", "digest": "edd2b19b29c16823",
    "params": {"scale_type": ("bf16", "f16")},
    "detect": {"bias": "permuted"},
    "variants": {(): {
        "fields": {"q": ("i4", "N", "K"), "s": ("scale_type", "N", "K/64"), "m": ("scale_type", "K")},
        "storages": {
            "nunchaku": {
                "tensors": {
                    "qweight": ("i8", "N/128", "K/64", "8", "8", "4", "2", "2", "4",
                        {"seen": ("N", "K/2"),
                        "slices": (("q", 0,
                        [[(8, 1, 3), (2, 1, 5), (8, 1, 2), (0, 1, 0)], [(2, 4), (4, 1, 7), (4, 1, 4), (2, 1, 6), (0, 1, 1)]]),)}),
                    "wscales": ("scale_type", "N/128", "K/64", "8", "4", "2", "2",
                        {"seen": ("K/64", "N"),
                        "slices": (("s", 0, [[(2, 1, 5), (4, 1, 3), (2, 1, 4), (8, 1, 2), (0, 1, 0)], 1]),)}),
                    "smooth_factor": ("scale_type", "K/128", "8", "4", "2", "2",
                        {"aliases": ("smooth",), "seen": ("K",),
                        "slices": (("m", 0, [[(2, 1, 4), (4, 1, 2), (2, 1, 3), (8, 1, 1), (0, 1, 0)]]),)}),
                },
                "whole": True,
            },
            "planar": {
                "tensors": {
                    "q": ("i32", "N", "16*ceil(K/128)",
                        {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                    "s": ("scale_type", "N", "K/64", {"field": "s"}),
                    "m": ("scale_type", "K", {"field": "m"}),
                },
                "factor": "/m",
            },
        },
        "only_read": True,
        "plus": (("low_rank",
            {"up": ("proj_up", "scale_type", "N", "?",
            {"digits": ("N/16", "?", "8", "4", "2", "2", "2"), "order": ((0, 4, 2), (1, 5, 3, 6)), "aliases": ("lora_up",)}),
            "down": ("proj_down", "scale_type", "K", "?",
            {"digits": ("K/16", "?", "8", "4", "2", "2", "2"), "order": ((1, 4, 2), (0, 5, 3, 6)), "aliases": ("lora_down",)})},
            False),),
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
