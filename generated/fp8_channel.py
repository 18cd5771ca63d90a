"""fp8_channel: FP8 E4M3 codes with one scale per output row.

    w = q * s
    float32, rounded after each operation

    q      e4m3       [N, K]
    s      scale_type [N]

    safetensors: 8.00098 bits per weight
    torchao: 8.00098 bits per weight
    quanto: 8.00098 bits per weight
    fp8_lane: 6.80098 bits per weight where weights are normal
    planar: 8.00098 bits per weight

Built from the spec fp8_channel (sha256 72dfc31be592abc9) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Codes, EightBit, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant,
        as_type, cdiv, pad)
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e4m3


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s */
#define BITS 8
#define FIELDS 1
#define BRAIN_NUMBERS
INLINE vf number(const Weight *w, vu codes) { return float_of_e4m3((vi)(codes & 255)); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    *scale = s;
}
"""


def unpack_safetensors(weight: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight float8_e4m3fn [N, K]; weight_scale scale_type [N, 1]."""
    return {"q": weight, "s": weight_scale.squeeze(1)}


def pack_safetensors(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_safetensors."""
    return {"weight": q, "weight_scale": s.unsqueeze(-1)}


def unpack_torchao(qdata: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of qdata float8_e4m3fn [N, K]; scale scale_type [N, 1]."""
    return {"q": qdata, "s": scale.squeeze(1)}


def pack_torchao(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao."""
    return {"qdata": q, "scale": s.unsqueeze(-1)}


def unpack_quanto(data: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of data float8_e4m3fn [N, K]; scale scale_type [N, 1]."""
    return {"q": data, "s": scale.squeeze(1)}


def pack_quanto(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """data, scale of the fields; the inverse of unpack_quanto."""
    return {"data": q, "scale": s.unsqueeze(-1)}


def unpack_fp8_lane(exponents: Tensor, sign_mantissa: Tensor, weight_scale: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of exponents uint8 [N, K]; sign_mantissa uint8 [N, ceil(K/2)]; weight_scale scale_type [N, 1]."""
    q_high = exponents & 15
    q_low = torch.stack([sign_mantissa & 7, sign_mantissa >> 4 & 7], -1).flatten(1)[:, :K]
    q_high2 = torch.stack([sign_mantissa >> 3 & 1, sign_mantissa >> 7], -1).flatten(1)[:, :K]
    return {"q": as_type((q_low | q_high << 3 | q_high2 << 7).to(torch.uint8), torch.float8_e4m3fn), "s": weight_scale.squeeze(1)}


def pack_fp8_lane(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """exponents, sign_mantissa, weight_scale of the fields; the inverse of unpack_fp8_lane."""
    exponents_bytes = torch.zeros(q.shape[0], q.shape[1], 1, dtype=torch.uint8, device=q.device)
    exponents_bytes[...] = (q.view(torch.uint8) >> 3 & 15).unsqueeze(-1)
    sign_mantissa_bytes = torch.zeros(q.shape[0], cdiv(q.shape[1], 2), 1, dtype=torch.uint8, device=q.device)
    q_split = pad(q.view(torch.uint8), (0, -q.shape[1] % 2, 0, 0)).unflatten(-1, (-1, 2))
    sign_mantissa_bytes[...] |= ((q_split[..., 0] & 7) | (q_split[..., 1] & 7) << 4).unsqueeze(-1)
    sign_mantissa_bytes[...] |= ((q_split[..., 0] >> 7) << 3 | (q_split[..., 1] >> 7) << 7).unsqueeze(-1)
    return {"exponents": exponents_bytes.squeeze(-1), "sign_mantissa": sign_mantissa_bytes.squeeze(-1),
            "weight_scale": s.unsqueeze(-1)}


def unpack_planar(q: Tensor, s: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; s scale_type [N]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"q": as_type(r, torch.float8_e4m3fn).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K], "s": s}


def pack_planar(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """q, s of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s}


def decode(q: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s.  q [N, K], s [N]."""
    q = e4m3(q)
    s = s.float().unsqueeze(-1)
    return torch.mul(q, s, out=out)


def encode(weight: Tensor, *, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least,
    power, zeros.
    """
    q, s = absmax(weight, code="e4m3", scale=scale_type, rows=1, columns=weight.shape[1], axes=1, **options)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_safetensors(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_scale = tensors
    weight += n * K
    weight_scale += n
    s = device.scale(tl.load(weight_scale, n < N, 0))
    q = device.e4m3(tl.load(weight + k, live, 0))
    return use(state, k, q * s, live)


@triton.jit
def _decode_fp8_lane(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    exponents, sign_mantissa, weight_scale = tensors
    exponents += n * K
    sign_mantissa += n * tl.cdiv(K, 2)
    weight_scale += n
    s = device.scale(tl.load(weight_scale, n < N, 0))
    q_low = tl.load(sign_mantissa + k // 2, live, 0) >> 4 * (k % 2) & 7
    q_high = tl.load(exponents + k, live, 0) & 15
    q_high1 = tl.load(sign_mantissa + k // 2, live, 0) >> 4 * (k % 2) + 3 & 1
    q = device.e4m3(q_low | q_high << 3 | q_high1 << 7)
    return use(state, k, q * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, s = tensors
    q += 32 * (n * tl.cdiv(K, 128))
    s += n
    s1 = device.scale(tl.load(s, n < N, 0))
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = device.e4m3(q_word >> 16 * i + 8 * h & 255)
            state = use(state, 128 * t + 32 * j + 16 * h + 2 * c + i, q1 * s1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "safetensors": Storage(unpack_safetensors, pack_safetensors, Kernels(_decode_safetensors, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0), in_order=True), Sums(finish=group_sums.scaled, row_fields=(GroupField("weight_scale", 1, 0),)),
                    {"skinny": {}}, eight=EightBit("e4m3", "weight")))),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_safetensors, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0), in_order=True), Sums(finish=group_sums.scaled, row_fields=(GroupField("scale", 1, 0),)),
                    {"skinny": {}}, eight=EightBit("e4m3", "qdata")))),
        "quanto": Storage(unpack_quanto, pack_quanto, Kernels(_decode_safetensors, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0), in_order=True), Sums(finish=group_sums.scaled, row_fields=(GroupField("scale", 1, 0),)),
                    {"skinny": {}}, eight=EightBit("e4m3", "data")))),
        "fp8_lane": Storage(unpack_fp8_lane, pack_fp8_lane, Kernels(_decode_fp8_lane, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0)), Sums(finish=group_sums.scaled, row_fields=(GroupField("s", 1, 0),)),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "s"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("s",)),
)

PROGRAM = {
    "name": "fp8_channel", "title": "FP8 E4M3 codes with one scale per output row",
    "source": "compressed-tensors float-quantized (channel), ModelOpt FP8 per channel, optimum-quanto qfloat8",
    "formula": "q * s", "bits": "8.001", "digest": "72dfc31be592abc9",
    "params": {"scale_type": ("bf16", "f32", "f16", "e8m0")},
    "variants": {(): {
        "fields": {"q": ("e4m3", "N", "K"), "s": ("scale_type", "N")},
        "storages": {
            "safetensors": {"tensors": {
                "weight": ("e4m3", "N", "K", {"field": "q"}),
                "weight_scale": ("scale_type", "N", "1",
                    {"aliases": ("weight_scale_inv", "scale", "qscale_weight"), "slices": (("s", 0, [0]),)}),
            }},
            "torchao": {"tensors": {
                "qdata": ("e4m3", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                "scale": ("scale_type", "N", "1", {"aliases": ("_weight_scale",), "slices": (("s", 0, [0]),)}),
            }},
            "quanto": {"tensors": {
                "data": ("e4m3", "N", "K", {"aliases": ("weight._data",), "field": "q"}),
                "scale": ("scale_type", "N", "1", {"aliases": ("weight._scale",), "slices": (("s", 0, [0]),)}),
            }},
            "fp8_lane": {
                "tensors": {
                    "words": ("i32", "?"), "starts": ("i32", "?", "?"), "table": ("i16", "256"),
                    "sign_mantissa": ("u8", "N", "ceil(K/2)",
                        {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]], 0, 3), ("q", 3, [0, [(2, 4), (0, 1, 1)]], 7, 1))}),
                    "weight_scale": ("scale_type", "N", "1", {"slices": (("s", 0, [0]),)}),
                    "weight_shape": ("shape", "2"),
                },
                "streams": {"exponents": ("huffman_lanes", ("u8", "N", "K", {"slices": (("q", 0, [0, 1], 3, 4),)}),
                    {"words": "words", "starts": "starts", "table": "table"})},
                "shape": "weight_shape",
            },
            "planar": {"tensors": {
                "q": ("i32", "N", "32*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
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
