"""fp6_llm: FP6-LLM, six-bit floats in planes of 2 and of 4 bits for tensor cores, with a scale for every row.

    w = q * s
    float32, rounded after each operation

    s      scale_type [N]
    q      e3m2       [N, K]

    fp6_llm: 6 bits per weight
    planar: 6.00098 bits per weight

Built from the spec fp6_llm (sha256 2d95bdbbc501f92c) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, pad
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e3m2


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s */
#define BITS 6
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[64] = {0.0f, 0.0625f, 0.125f, 0.1875f, 0.25f, 0.3125f, 0.375f, 0.4375f, 0.5f, 0.625f, 0.75f, 0.875f,
        1.0f, 1.25f, 1.5f, 1.75f, 2.0f, 2.5f, 3.0f, 3.5f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 10.0f, 12.0f, 14.0f, 16.0f, 20.0f, 24.0f,
        28.0f, 0.0f, -0.0625f, -0.125f, -0.1875f, -0.25f, -0.3125f, -0.375f, -0.4375f, -0.5f, -0.625f, -0.75f, -0.875f, -1.0f,
        -1.25f, -1.5f, -1.75f, -2.0f, -2.5f, -3.0f, -3.5f, -4.0f, -5.0f, -6.0f, -7.0f, -8.0f, -10.0f, -12.0f, -14.0f, -16.0f,
        -20.0f, -24.0f, -28.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_64(numbers, codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    *scale = s;
}
"""


def unpack_fp6_llm(packed_floatx_data: Tensor, scale: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of packed_floatx_data uint8 [N/64 x K/16 x 256 + N/64 x K/16 x 512]; scale scale_type [N]."""
    high = packed_floatx_data[..., :256 * (N // 64 * (K // 16))].unflatten(-1, (N // 64, K // 16, 256))
    low = packed_floatx_data[..., 256 * (N // 64 * (K // 16)):].unflatten(-1, (N // 64, K // 16, 512))
    q_bytes = high.unflatten(-1, (2, 8, 8, 2))
    q_high = torch.stack([q_bytes >> 6, q_bytes >> 4 & 3, q_bytes >> 2 & 3, q_bytes & 3], -4).unflatten(3,
        (2, 2)).flip(7).permute(0, 2, 3, 7, 5, 1, 4, 6).flatten(0, 4).flatten(1)
    q_bytes2 = low.unflatten(-1, (4, 8, 8, 2))
    q_low = torch.stack([q_bytes2 >> 4, q_bytes2 & 15], -3).flip(6).permute(0, 2, 6, 3, 1, 4, 5).flatten(0, 3).flatten(1)
    return {"s": scale, "q": q_low | q_high << 4}


def pack_fp6_llm(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """packed_floatx_data, scale of the fields; the inverse of unpack_fp6_llm."""
    q_split = q.unflatten(-1, (-1, 2, 8)).unflatten(0, (-1, 2, 2, 2, 8)).flip(3)
    high_bytes = ((q_split[:, :, 0, :, :, :, 0] >> 4) << 6 | (q_split[:, :, 0, :, :, :, 1] >> 4) << 4
        | (q_split[:, :, 1, :, :, :, 0] >> 4) << 2 | (q_split[:, :, 1, :, :, :, 1] >> 4)).permute(0, 4, 1, 3, 5, 2).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 2, 8)).unflatten(0, (-1, 4, 2, 8)).flip(2)
    low_bytes = ((q_split2[:, :, :, :, :, 0] & 15) << 4 | (q_split2[:, :, :, :, :, 1] & 15)).permute(0, 4, 1, 3, 5, 2).flatten(2)
    return {"packed_floatx_data": torch.cat([high_bytes.flatten(), low_bytes.flatten()], -1), "scale": s}


def unpack_planar(q_0: Tensor, q_1: Tensor, s: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/256)]; s scale_type [N]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 3, q_bytes2 >> 4 & 3, q_bytes2 >> 2 & 3, q_bytes2 >> 6], -5).unflatten(2, (2, 2)).permute(0,
        1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    return {"s": s, "q": q_low | q_high << 4}


def pack_planar(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, s of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, :, 0] >> 4) | (q_split2[:, :, 0, :, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, :, 0] >> 4)
        << 2 | (q_split2[:, :, 1, :, :, 1] >> 4) << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "s": s}


def decode(s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s.  s [N], q [N, K]."""
    s = s.float().unsqueeze(-1)
    q = e3m2(q)
    return torch.mul(q, s, out=out)


def encode(weight: Tensor, *, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least,
    power, zeros.
    """
    q, s = absmax(weight, code="e3m2", scale=scale_type, rows=1, columns=weight.shape[1], axes=1, **options)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_fp6_llm(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    packed_floatx_data, scale = tensors
    scale += n
    s = tl.load(scale, n < N, 0).to(tl.float32)
    high = packed_floatx_data
    high += 256 * (n // 64 * (K // 16))
    low = packed_floatx_data
    low += 512 * (n // 64 * (K // 16))
    q_low = tl.load(low + 512 * (k // 16) + 256 * (N // 64 * (K // 16)) + 128 * (n % 64 // 16) + 16 * (n % 64 % 8) + 2
        * (k % 16 % 8) - n % 64 // 8 % 2 + 1, live, 0) >> 4 - 4 * (k % 16 // 8) & 15
    q_high = tl.load(high + 256 * (k // 16) + 128 * (n % 64 // 32) + 16 * (n % 64 % 8) + 2 * (k % 16 % 8) - n % 64 // 8 % 2
        + 1, live, 0) >> 6 - 4 * (n % 64 // 16 % 2) - 2 * (k % 16 // 8) & 3
    q = device.e3m2(q_low | q_high << 4)
    return use(state, k, q * s, live)


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, s = tensors
    s += n
    s1 = tl.load(s, n < N, 0).to(tl.float32)
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 256))
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2) + 4 * (k % 128 // 8 % 4) & 15
    q_high = tl.load(q_1 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live, 0) >> 16 * (k % 256 % 2) + 4 * (k % 256 // 8 % 4) + 2 * (k % 256 // 128) & 3
    q = device.e3m2(q_low | q_high << 4)
    return use(state, k, q * s1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "fp6_llm": Storage(unpack_fp6_llm, pack_fp6_llm, Kernels(_decode_fp6_llm, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e3m2, words=bitplanes.words_6, width=8, bits=0, unit=(4096.0, 1.0),
                    base=(0, 0)), Sums(finish=group_sums.scaled, row_fields=(GroupField("s", 1, 0),)),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 0), "spans": (0, 2)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "s"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 6, ("s",)),
)

PROGRAM = {
    "name": "fp6_llm",
    "title": "FP6-LLM, six-bit floats in planes of 2 and of 4 bits for tensor cores, with a scale for every row",
    "source": "usyd-fsalab/fp6_llm weight_prepacking.h, torchao FloatxTensorCoreLayout(3, 2)", "formula": "q * s",
    "bits": "6 to 6.001", "digest": "2d95bdbbc501f92c",
    "params": {"scale_type": ("f16", "bf16")},
    "variants": {(): {
        "fields": {"s": ("scale_type", "N"), "q": ("e3m2", "N", "K")},
        "storages": {
            "fp6_llm": {
                "tensors": {
                    "packed_floatx_data": ("u8", "N/64 x K/16 x 256 + N/64 x K/16 x 512",
                        {"seen": ("N", "3*K/4"),
                        "slices": (("q", 14,
                        [[(8, 16, 2), (2, -8), (2, -4), (2, 128, 2), (0, 1, 0)], [(8, 2, 2), (2, -2), (0, 1, 1)]], 4, 2,
                        {"section": 0}),
                        ("q", 12, [[(8, 16, 2), (2, -8), (4, 128, 2), (0, 1, 0)], [(8, 2, 2), (2, -4), (0, 1, 1)]], 0, 4,
                        {"section": 1}))}),
                    "scale": ("scale_type", "N", {"field": "s"}),
                },
                "whole": True,
            },
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                "q_1": ("i32", "N", "16*ceil(K/256)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (2, 2), (0, 16, 1)]], 4, 2),)}),
                "s": ("scale_type", "N", {"field": "s"}),
            }},
        },
        "options": {
            "divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "zero"), "least": (),
            "power": ("up", "floor", "ceil", "even", "half"), "zeros": ("signed", "negative", "positive"),
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
