"""int8_tensor: INT8 codes with one scale for the whole tensor and an optional zero point.

    w = (q - z) * s
    float32, rounded after each operation

    q      i8         [N, K]
    z      i8         []
    s      scale_type []

    safetensors: 8 bits per weight
    torchao: 8 bits per weight
    planar: 8 bits per weight

Built from the spec int8_tensor (sha256 cc9f384997f4a8ad) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Codes, EightBit, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant,
        as_float, as_type, pad)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - z) * s */
#define BITS 8
#define FIELDS 2
#define HAS_OFFSET
INLINE vf number(const Weight *w, vu codes) { return signed_number(codes); }
#define BASE (-128)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes ^ 128; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    const vf z = FIELD(1);
    *scale = s;
    *offset = *scale * (-z);
}
"""


def unpack_safetensors(weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None) -> dict[str, Tensor]:
    """Fields of weight int8 [N, K]; weight_scale scale_type [1]; weight_zero_point int8 [1]."""
    fields = {"q": weight, "s": weight_scale.squeeze(0)}
    if weight_zero_point is not None:
        fields["z"] = weight_zero_point.squeeze(0)
    return fields


def pack_safetensors(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale, weight_zero_point of the fields; the inverse of unpack_safetensors."""
    tensors = {"weight": q, "weight_scale": s.unsqueeze(-1)}
    if z is not None:
        tensors["weight_zero_point"] = z.unsqueeze(-1)
    return tensors


def unpack_torchao(qdata: Tensor, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
    """Fields of qdata int8 [N, K]; scale scale_type [1, 1]; zero_point int8 [1, 1]."""
    fields = {"q": qdata, "s": scale.squeeze(1).squeeze(0)}
    if zero_point is not None:
        fields["z"] = zero_point.squeeze(1).squeeze(0)
    return fields


def pack_torchao(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """qdata, scale, zero_point of the fields; the inverse of unpack_torchao."""
    tensors = {"qdata": q, "scale": s.unsqueeze(-1).unsqueeze(-1)}
    if z is not None:
        tensors["zero_point"] = z.unsqueeze(-1).unsqueeze(-1)
    return tensors


def unpack_planar(q: Tensor, s: Tensor, z: Tensor | None, *, K: int) -> dict[str, Tensor | None]:
    """Fields of q int32 [N, 32*ceil(K/128)]; s scale_type []; z int8 []."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"q": as_type(r, torch.int8).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K], "z": z, "s": s}


def pack_planar(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "z": z}


def decode(q: Tensor, s: Tensor, z: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - z) * s.  q [N, K], s [], z []."""
    q = q.to(torch.int16)
    z = 0 if z is None else z.to(torch.int16)
    s = s.float()
    return torch.mul(as_float(q - z, out), s, out=out)


def encode(weight: Tensor, *, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least."""
    q, s = absmax(weight, code="i8", scale=scale_type, rows=weight.shape[0], columns=weight.shape[1], axes=0,
            **{"divisor": 127.5, **options})
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_safetensors(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_scale, weight_zero_point = tensors
    weight += n * K
    if weight_zero_point is None:
        z = 0
    else:
        z = tl.load(weight_zero_point).to(tl.int32)
    s = tl.load(weight_scale).to(tl.float32)
    q = tl.load(weight + k, live, 0).to(tl.int32)
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, s, z = tensors
    q += 32 * (n * tl.cdiv(K, 128))
    if z is None:
        z1 = 0
    else:
        z1 = tl.load(z).to(tl.int32)
    s1 = tl.load(s).to(tl.float32)
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = ((q_word >> 16 * i + 8 * h & 255).to(tl.int32) ^ 128) - 128
            state = use(state, 128 * t + 32 * j + 16 * h + 2 * c + i, (q1 - z1) * s1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "safetensors": Storage(unpack_safetensors, pack_safetensors, Kernels(_decode_safetensors, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i8, words=bitplanes.words_8, width=8, bits=8, signed=True,
                    base=(128, 2304), in_order=True),
                    Sums(finish=group_sums.with_zero,
                    row_fields=(GroupField("weight_scale", 0, 0), GroupField("weight_zero_point", 0, 0, 8, default=0.0)),
                    ones=True), {"skinny": {}}, eight=EightBit("i8", "weight", sums=True)))),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_safetensors, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i8, words=bitplanes.words_8, width=8, bits=8, signed=True,
                    base=(128, 2304), in_order=True),
                    Sums(finish=group_sums.with_zero,
                    row_fields=(GroupField("scale", 0, 0), GroupField("zero_point", 0, 0, 8, default=0.0)), ones=True),
                    {"skinny": {}}, eight=EightBit("i8", "qdata", sums=True)))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i8, words=bitplanes.words_8, width=8, bits=8, signed=True,
                    base=(128, 2304)),
                    Sums(finish=group_sums.with_zero, row_fields=(GroupField("s", 0, 0), GroupField("z", 0, 0, 8, default=0.0)),
                    ones=True), {"skinny": {}, "tile_gemm": {"zero": (-128, 0), "sums": True}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "s"}, settings={"divisor": 127.5},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("s", "z")),
)

PROGRAM = {
    "name": "int8_tensor", "title": "INT8 codes with one scale for the whole tensor and an optional zero point",
    "source": "compressed-tensors int-quantized (tensor)", "formula": "(q - z) * s", "bits": "8", "digest": "cc9f384997f4a8ad",
    "params": {"scale_type": ("bf16", "f32", "f16")},
    "variants": {(): {
        "fields": {"q": ("i8", "N", "K"), "z": ("i8",), "s": ("scale_type",)},
        "storages": {
            "safetensors": {"tensors": {
                "weight": ("i8", "N", "K", {"field": "q"}),
                "weight_scale": ("scale_type", "1", {"slices": (("s", 0, []),)}),
                "weight_zero_point": ("i8", "1", {"optional": "z", "slices": (("z", 0, []),)}),
            }},
            "torchao": {"tensors": {
                "qdata": ("i8", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                "scale": ("scale_type", "1", "1", {"aliases": ("_weight_scale",), "slices": (("s", 0, []),)}),
                "zero_point": ("i8", "1", "1", {"aliases": ("_weight_zero_point",), "optional": "z", "slices": (("z", 0, []),)}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "32*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                "s": ("scale_type", {"field": "s"}),
                "z": ("i8", {"optional": "z", "field": "z"}),
            }},
        },
        "options": {"divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "away", "up"), "least": ()},
        "defaults": {"z": 0},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
