"""fp8_tensor: FP8 E4M3 codes with one scale for the whole tensor, or none.

    w = q * s
    float32, rounded after each operation

    q      e4m3       [N, K]
    s      scale_type []

    safetensors: 8 bits per weight
    torchao: 8 bits per weight
    planar: 8 bits per weight

Built from the spec fp8_tensor (sha256 de6f2c8fa605928c) by qdsl 0.1.0.
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


def unpack_safetensors(weight: Tensor, weight_scale: Tensor | None) -> dict[str, Tensor]:
    """Fields of weight float8_e4m3fn [N, K]; weight_scale scale_type [1]."""
    fields = {"q": weight}
    if weight_scale is not None:
        fields["s"] = weight_scale.squeeze(0)
    return fields


def pack_safetensors(q: Tensor, s: Tensor | None) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_safetensors."""
    tensors = {"weight": q}
    if s is not None:
        tensors["weight_scale"] = s.unsqueeze(-1)
    return tensors


def unpack_torchao(qdata: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of qdata float8_e4m3fn [N, K]; scale scale_type [1, 1]."""
    return {"q": qdata, "s": scale.squeeze(1).squeeze(0)}


def pack_torchao(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao."""
    return {"qdata": q, "scale": s.unsqueeze(-1).unsqueeze(-1)}


def unpack_planar(q: Tensor, s: Tensor | None, *, K: int) -> dict[str, Tensor | None]:
    """Fields of q int32 [N, 32*ceil(K/128)]; s scale_type []."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"q": as_type(r, torch.float8_e4m3fn).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K], "s": s}


def pack_planar(q: Tensor, s: Tensor | None) -> dict[str, Tensor | None]:
    """q, s of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s}


def decode(q: Tensor, s: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s.  q [N, K], s []."""
    q = e4m3(q)
    s = 1 if s is None else s.float()
    return torch.mul(q, s, out=out)


def encode(weight: Tensor, *, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least,
    power, zeros.
    """
    q, s = absmax(weight, code="e4m3", scale=scale_type, rows=weight.shape[0], columns=weight.shape[1], axes=0, **options)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_safetensors(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_scale = tensors
    weight += n * K
    if weight_scale is None:
        s = 1.0
    else:
        s = device.scale(tl.load(weight_scale))
    q = device.e4m3(tl.load(weight + k, live, 0))
    return use(state, k, q * s, live)


@triton.jit
def _decode_torchao(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale = tensors
    qdata += n * K
    s = device.scale(tl.load(scale))
    q = device.e4m3(tl.load(qdata + k, live, 0))
    return use(state, k, q * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, s = tensors
    q += 32 * (n * tl.cdiv(K, 128))
    if s is None:
        s1 = 1.0
    else:
        s1 = device.scale(tl.load(s))
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
                    base=(0, 0), in_order=True),
                    Sums(finish=group_sums.scaled, row_fields=(GroupField("weight_scale", 0, 0, default=1.0),)), {"skinny": {}},
                    eight=EightBit("e4m3", "weight")))),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_torchao, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0), in_order=True), Sums(finish=group_sums.scaled, row_fields=(GroupField("scale", 0, 0),)),
                    {"skinny": {}}, eight=EightBit("e4m3", "qdata")))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0)), Sums(finish=group_sums.scaled, row_fields=(GroupField("s", 0, 0, default=1.0),)),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "s"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("s",)),
)

PROGRAM = {
    "name": "fp8_tensor", "title": "FP8 E4M3 codes with one scale for the whole tensor, or none",
    "source": "AutoFP8, ModelOpt FP8, compressed-tensors float-quantized (tensor), ComfyUI fp8_scaled and fp8_e4m3fn",
    "formula": "q * s", "bits": "8", "digest": "de6f2c8fa605928c",
    "params": {"scale_type": ("f32", "bf16", "f16", "e8m0")},
    "variants": {(): {
        "fields": {"q": ("e4m3", "N", "K"), "s": ("scale_type",)},
        "storages": {
            "safetensors": {"tensors": {
                "weight": ("e4m3", "N", "K", {"field": "q"}),
                "weight_scale": ("scale_type", "1",
                    {"aliases": ("weight_scale_inv", "scale", "qscale_weight", "scale_weight"), "optional": "s",
                    "slices": (("s", 0, []),)}),
            }},
            "torchao": {"tensors": {
                "qdata": ("e4m3", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                "scale": ("scale_type", "1", "1", {"aliases": ("_weight_scale",), "slices": (("s", 0, []),)}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "32*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                "s": ("scale_type", {"optional": "s", "field": "s"}),
            }},
        },
        "options": {
            "divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "zero"), "least": (),
            "power": ("up", "floor", "ceil", "even", "half"), "zeros": ("signed", "negative", "positive"),
        },
        "defaults": {"s": 1},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
