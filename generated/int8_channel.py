"""int8_channel: INT8 codes with one scale per output row and an optional zero point.

    w = (q - z) * s
    float32, rounded after each operation

    q      i8         [N, K]
    z      i8         [N]
    s      scale_type [N]

    safetensors: 8.00098 bits per weight
    torchao: 8.00098 bits per weight
    quanto: 8.00098 bits per weight
    eetq: 8 bits per weight
    planar: 8.00098 bits per weight

Built from the spec int8_channel (sha256 4573b2f277bacaa3) by qdsl 0.1.0.
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
    """Fields of weight int8 [N, K]; weight_scale scale_type [N, 1]; weight_zero_point int8 [N, 1]."""
    fields = {"q": weight, "s": weight_scale.squeeze(1)}
    if weight_zero_point is not None:
        fields["z"] = weight_zero_point.squeeze(1)
    return fields


def pack_safetensors(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale, weight_zero_point of the fields; the inverse of unpack_safetensors."""
    tensors = {"weight": q, "weight_scale": s.unsqueeze(-1)}
    if z is not None:
        tensors["weight_zero_point"] = z.unsqueeze(-1)
    return tensors


def unpack_torchao(qdata: Tensor, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
    """Fields of qdata int8 [N, K]; scale scale_type [N, 1]; zero_point int8 [N, 1]."""
    fields = {"q": qdata, "s": scale.squeeze(1)}
    if zero_point is not None:
        fields["z"] = zero_point.squeeze(1)
    return fields


def pack_torchao(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """qdata, scale, zero_point of the fields; the inverse of unpack_torchao."""
    tensors = {"qdata": q, "scale": s.unsqueeze(-1)}
    if z is not None:
        tensors["zero_point"] = z.unsqueeze(-1)
    return tensors


def unpack_quanto(data: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of data int8 [N, K]; scale scale_type [N, 1]."""
    return {"q": data, "s": scale.squeeze(1)}


def pack_quanto(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """data, scale of the fields; the inverse of unpack_quanto."""
    return {"data": q, "scale": s.unsqueeze(-1)}


def unpack_eetq(weight: Tensor, weight_scales: Tensor) -> dict[str, Tensor]:
    """Fields of weight int8 [N/2, 128*K/64]; weight_scales scale_type [N]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 128))
    return {
            "q": ((as_type(r, torch.int8).unflatten(-1, (2, 4, 8, 2)).permute(0, 2, 1, 3, 5, 4).flatten(0, 1).flatten(1) + 128
                & 255) ^ 128) - 128,
            "s": weight_scales}


def pack_eetq(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scales of the fields; the inverse of unpack_eetq."""
    r = (q - 128 & 255).unflatten(-1, (-1, 4, 2, 8)).unflatten(0, (-1, 2)).permute(0, 2, 1, 3, 5, 4).view(torch.uint8).flatten(2)
    return {"weight": as_type(r, torch.int8).flatten(1), "weight_scales": s}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor | None, *, K: int) -> dict[str, Tensor | None]:
    """Fields of q int32 [N, 32*ceil(K/128)]; s scale_type [N]; z int8 [N]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"q": as_type(r, torch.int8).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K], "z": z, "s": s}


def pack_planar(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "z": z}


def decode(q: Tensor, s: Tensor, z: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - z) * s.  q [N, K], s [N], z [N]."""
    q = q.to(torch.int16)
    z = 0 if z is None else z.to(torch.int16).unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    return torch.mul(as_float(q - z, out), s, out=out)


def encode(weight: Tensor, *, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least."""
    q, s = absmax(weight, code="i8", scale=scale_type, rows=1, columns=weight.shape[1], axes=1, **{"divisor": 127.5, **options})
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
        weight_zero_point += n
        z = tl.load(weight_zero_point, n < N, 0).to(tl.int32)
    weight_scale += n
    s = tl.load(weight_scale, n < N, 0).to(tl.float32)
    q = tl.load(weight + k, live, 0).to(tl.int32)
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_quanto(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    data, scale = tensors
    data += n * K
    z = 0
    scale += n
    s = tl.load(scale, n < N, 0).to(tl.float32)
    q = tl.load(data + k, live, 0).to(tl.int32)
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_eetq(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_scales = tensors
    weight += 128 * (n // 2 * (K // 64))
    z = 0
    weight_scales += n
    s = tl.load(weight_scales, n < N, 0).to(tl.float32)
    q_word = tl.load(weight + 128 * (k // 64) + 64 * (n % 2) + 16 * (k % 64 // 16) + 2 * (k % 64 % 8)
        + k % 64 // 8 % 2, live, 0).to(tl.int32)
    q = (((q_word) + 128 & 255).to(tl.int32) ^ 128) - 128
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, s, z = tensors
    q += 32 * (n * tl.cdiv(K, 128))
    if z is None:
        z1 = 0
    else:
        z += n
        z1 = tl.load(z, n < N, 0).to(tl.int32)
    s += n
    s1 = tl.load(s, n < N, 0).to(tl.float32)
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
                    row_fields=(GroupField("weight_scale", 1, 0), GroupField("weight_zero_point", 1, 0, 8, default=0.0)),
                    ones=True), {"skinny": {}}, eight=EightBit("i8", "weight", sums=True)))),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_safetensors, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i8, words=bitplanes.words_8, width=8, bits=8, signed=True,
                    base=(128, 2304), in_order=True),
                    Sums(finish=group_sums.with_zero,
                    row_fields=(GroupField("scale", 1, 0), GroupField("zero_point", 1, 0, 8, default=0.0)), ones=True),
                    {"skinny": {}}, eight=EightBit("i8", "qdata", sums=True)))),
        "quanto": Storage(unpack_quanto, pack_quanto, Kernels(_decode_quanto, rows="N", units="K", last="k")),
        "eetq": Storage(unpack_eetq, pack_eetq, Kernels(_decode_eetq, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i8, words=bitplanes.words_8, width=8, bits=8, signed=True,
                    base=(128, 2304)),
                    Sums(finish=group_sums.with_zero, row_fields=(GroupField("s", 1, 0), GroupField("z", 1, 0, 8, default=0.0)),
                    ones=True), {"skinny": {}, "tile_gemm": {"zero": (-128, 0), "sums": True}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "s"}, settings={"divisor": 127.5},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("s", "z")),
)

PROGRAM = {
    "name": "int8_channel", "title": "INT8 codes with one scale per output row and an optional zero point",
    "source": "compressed-tensors int-quantized (channel), torchao Int8Tensor, optimum-quanto qint8", "formula": "(q - z) * s",
    "bits": "8 to 8.001", "digest": "4573b2f277bacaa3",
    "params": {"scale_type": ("bf16", "f32", "f16")},
    "variants": {(): {
        "fields": {"q": ("i8", "N", "K"), "z": ("i8", "N"), "s": ("scale_type", "N")},
        "storages": {
            "safetensors": {"tensors": {
                "weight": ("i8", "N", "K", {"field": "q"}),
                "weight_scale": ("scale_type", "N", "1", {"slices": (("s", 0, [0]),)}),
                "weight_zero_point": ("i8", "N", "1", {"optional": "z", "slices": (("z", 0, [0]),)}),
            }},
            "torchao": {"tensors": {
                "qdata": ("i8", "N", "K", {"aliases": ("_weight_qdata",), "field": "q"}),
                "scale": ("scale_type", "N", "1", {"aliases": ("_weight_scale",), "slices": (("s", 0, [0]),)}),
                "zero_point": ("i8", "N", "1", {"aliases": ("_weight_zero_point",), "optional": "z", "slices": (("z", 0, [0]),)}),
            }},
            "quanto": {
                "tensors": {
                    "data": ("i8", "N", "K", {"aliases": ("weight._data",), "field": "q"}),
                    "scale": ("scale_type", "N", "1", {"aliases": ("weight._scale",), "slices": (("s", 0, [0]),)}),
                },
                "options": {"divisor": 127},
            },
            "eetq": {
                "tensors": {
                    "weight": ("i8", "N/2", "128*K/64",
                        {"aliases": ("qweight",), "seen": ("K", "N"),
                        "slices": (("q", 0, [[(2, 64, 1), (0, 1, 0)], [(8, 2, 1), (2, 1, 1), (4, 16, 1), (0, 128, 1)]],
                        {"adds": -128}),)}),
                    "weight_scales": ("scale_type", "N", {"field": "s"}),
                },
                "options": {"divisor": 128, "ties": "away", "by": "exact"},
            },
            "planar": {"tensors": {
                "q": ("i32", "N", "32*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                "s": ("scale_type", "N", {"field": "s"}),
                "z": ("i8", "N", {"optional": "z", "field": "z"}),
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
