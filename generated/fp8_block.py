"""fp8_block: FP8 E4M3 codes with one scale per two-dimensional block.

    w = q * s
    float32, rounded after each operation

    q      e4m3       [N, K]
    s      scale_type [ceil(N/bn), ceil(K/bk)]

    safetensors: 8.00195 bits per weight with bn = 128, bk = 128
    torchao: 8.00195 bits per weight with bn = 128, bk = 128
    planar: 8.00195 bits per weight with bn = 128, bk = 128

Built from the spec fp8_block (sha256 40a1624c2e4becde) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Codes, EightBit, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant,
        as_type, pad)
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


def unpack_safetensors(weight: Tensor, weight_scale_inv: Tensor) -> dict[str, Tensor]:
    """Fields of weight float8_e4m3fn [N, K]; weight_scale_inv scale_type [ceil(N/bn), ceil(K/bk)]."""
    return {"q": weight, "s": weight_scale_inv}


def pack_safetensors(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale_inv of the fields; the inverse of unpack_safetensors."""
    return {"weight": q, "weight_scale_inv": s}


def unpack_torchao(qdata: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of qdata float8_e4m3fn [N, K]; scale scale_type [ceil(N/bn), ceil(K/bk)]."""
    return {"q": qdata, "s": scale}


def pack_torchao(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao."""
    return {"qdata": q, "scale": s}


def unpack_planar(q: Tensor, s: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; s scale_type [ceil(N/bn), ceil(K/bk)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"q": as_type(r, torch.float8_e4m3fn).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K], "s": s}


def pack_planar(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """q, s of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s}


def decode(q: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s.  q [N, K], s [ceil(N/bn), ceil(K/bk)]."""
    out = out if out is None else out.unflatten(0, (s.shape[0], -1)).unflatten(2, (s.shape[1], -1))
    q = e4m3(q).unflatten(0, (s.shape[0], -1)).unflatten(2, (s.shape[1], -1))
    s = s.float()[:, None, :, None]
    return torch.mul(q, s, out=out).flatten(2).flatten(0, 1)


def encode(weight: Tensor, *, bn: int, bk: int, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least,
    power, zeros.
    """
    q, s = absmax(weight, code="e4m3", scale=scale_type, rows=bn, columns=bk, axes=2, **options)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_safetensors(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_scale_inv = tensors
    bn, bk = sizes
    weight += n * K
    weight_scale_inv += n // bn * tl.cdiv(K, bk)
    q = device.e4m3(tl.load(weight + k, live, 0))
    s = device.scale(tl.load(weight_scale_inv + k // bk, live, 0))
    return use(state, k, q * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, s = tensors
    bn, bk = sizes
    q += 32 * (n * tl.cdiv(K, 128))
    s += n // bn * tl.cdiv(K, bk)
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    s1 = device.scale(tl.load(s + (4 * t + j) // (bk // 32), live, 0))
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
                    base=(0, 0), in_order=True),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("weight_scale_inv", "bn", "bk"),), blocks=("bk",)),
                    {"skinny": {}}, eight=EightBit("e4m3", "weight", groups=True)))),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_safetensors, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0), in_order=True),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("scale", "bn", "bk"),), blocks=("bk",)),
                    {"skinny": {}}, eight=EightBit("e4m3", "qdata", groups=True)))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0)), Sums(scale=group_sums.scaled, group_fields=(GroupField("s", "bn", "bk"),), blocks=("bk",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "s"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("s",)),
)

PROGRAM = {
    "name": "fp8_block", "title": "FP8 E4M3 codes with one scale per two-dimensional block",
    "source": "DeepSeek-V3, Qwen3-FP8, transformers finegrained-fp8 and compressed-tensors block checkpoints", "formula": "q * s",
    "bits": "8.002", "digest": "40a1624c2e4becde",
    "params": {"bn": (128, 64, 32, 1, "any"), "bk": (128, 64, 32, "any"), "scale_type": ("f32", "bf16", "f16", "e8m0")},
    "sizes": {"bn": "N", "bk": "K"},
    "variants": {(): {
        "fields": {"q": ("e4m3", "N", "K"), "s": ("scale_type", "ceil(N/bn)", "ceil(K/bk)")},
        "cuts": ("ceil(N/bn)", "ceil(K/bk)"),
        "storages": {
            "safetensors": {"tensors": {
                "weight": ("e4m3", "N", "K", {"field": "q"}),
                "weight_scale_inv": ("scale_type", "ceil(N/bn)", "ceil(K/bk)",
                    {"aliases": ("weight_scale", "scale", "qscale_weight"), "field": "s"}),
            }},
            "torchao": {"tensors": {
                "qdata": ("e4m3", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                "scale": ("scale_type", "ceil(N/bn)", "ceil(K/bk)", {"aliases": ("_weight_scale",), "field": "s"}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "32*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                "s": ("scale_type", "ceil(N/bn)", "ceil(K/bk)", {"field": "s"}),
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
