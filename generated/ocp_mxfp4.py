"""ocp_mxfp4: OCP MXFP4, 4-bit floats with a power of two per 32.

    w = e * q
    float32, rounded after each operation

    e      e8m0 [N, K/32]
    q      e2m1 [N, K]

    compressed_tensors: 4.25 bits per weight
    modelopt: 4.25 bits per weight
    gpt_oss: 4.25 bits per weight
    deepseek: 4.25 bits per weight
    torchao: 4.25 bits per weight
    torchao_swizzled: 4.25 bits per weight
    mlx: 4.25 bits per weight
    planar: 4.25 bits per weight

Built from the spec ocp_mxfp4 (sha256 4b272c8ccfc17b5e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant,
        as_type, cdiv, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e2m1, e8m0


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = e * q */
#define BITS 4
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, 0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f,
        -6.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-12)
#define UNIT 0.5f
static const uint8_t byte_numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf e = FIELD(0);
    *scale = e;
}
"""


def unpack_compressed_tensors(weight_packed: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight_packed uint8 [N, K/2]; weight_scale uint8 [N, K/32]."""
    return {"e": as_type(weight_scale, torch.float8_e8m0fnu), "q": spread(weight_packed, 4).flatten(1)}


def pack_compressed_tensors(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight_packed, weight_scale of the fields; the inverse of unpack_compressed_tensors."""
    q_split = q.unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight_packed": r, "weight_scale": e.view(torch.uint8)}


def unpack_modelopt(weight: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [N, K/2]; weight_scale uint8 [N, K/32]."""
    return {"e": as_type(weight_scale, torch.float8_e8m0fnu), "q": spread(weight, 4).flatten(1)}


def pack_modelopt(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_modelopt."""
    q_split = q.unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight": r, "weight_scale": e.view(torch.uint8)}


def unpack_gpt_oss(blocks: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, K/32, 16]; scales uint8 [N, K/32]."""
    return {"e": as_type(scales, torch.float8_e8m0fnu), "q": spread(blocks, 4).flatten(1)}


def pack_gpt_oss(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks, scales of the fields; the inverse of unpack_gpt_oss."""
    q_split = q.unflatten(-1, (-1, 16, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"blocks": r, "scales": e.view(torch.uint8)}


def unpack_deepseek(weight: Tensor, weight_scale_inv: Tensor) -> dict[str, Tensor]:
    """Fields of weight int8 [N, K/2]; weight_scale_inv float8_e8m0fnu [N, K/32]."""
    r = weight.view(torch.uint8)
    return {"e": weight_scale_inv, "q": spread(r, 4).flatten(1)}


def pack_deepseek(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale_inv of the fields; the inverse of unpack_deepseek."""
    q_split = q.unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight": as_type(r, torch.int8), "weight_scale_inv": e}


def unpack_torchao(qdata: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of qdata uint8 [N, K/2]; scale float8_e8m0fnu [N, K/32]."""
    return {"e": scale, "q": spread(qdata, 4).flatten(1)}


def pack_torchao(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao."""
    q_split = q.unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"qdata": r, "scale": e}


def unpack_torchao_swizzled(qdata: Tensor, scale: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of qdata uint8 [N, 16*K/32]; scale float8_e8m0fnu [ceil(N/128), ceil(K/128), 512]."""
    qdata_bytes = qdata.unflatten(-1, (-1, 16))
    scale_bytes = as_type(scale, torch.uint8)
    return {
            "e": as_type(scale_bytes, torch.float8_e8m0fnu).unflatten(-1, (32, 4, 4)).permute(0, 3, 2, 1, 4).flatten(0,
                2).flatten(1)[:N, :cdiv(K, 32)],
            "q": spread(qdata_bytes, 4).flatten(1)}


def pack_torchao_swizzled(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao_swizzled."""
    q_split = q.unflatten(-1, (-1, 16, 2))
    qdata_bytes = joined(q_split, 4).squeeze(-1)
    scale_bytes = pad(e, (0, -e.shape[1] % 4, 0, -e.shape[0] % 128)).unflatten(-1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0,
        3, 2, 1, 4).view(torch.uint8).flatten(2)
    return {"qdata": qdata_bytes.flatten(1), "scale": as_type(scale_bytes, torch.float8_e8m0fnu)}


def unpack_mlx(weight: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint32 [N, K/8]; scales uint8 [N, K/32]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 4))
    return {"e": as_type(scales, torch.float8_e8m0fnu), "q": spread(r, 4).flatten(1)}


def pack_mlx(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales of the fields; the inverse of unpack_mlx."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight": as_type(r, torch.uint32).squeeze(-1), "scales": e.view(torch.uint8)}


def unpack_planar(q: Tensor, e: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; e float8_e8m0fnu [N, K/32]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 2 & 3], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]
    q_high = torch.stack([q_bytes >> 4 & 3, q_bytes >> 6], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]
    return {"e": e, "q": q_low | q_high << 2}


def pack_planar(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, e of the fields; the inverse of unpack_planar."""
    r = torch.zeros(q.shape[0], cdiv(q.shape[1], 128), 64, dtype=torch.uint8, device=q.device)
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r[...] |= ((q_split[:, :, :, 0] & 3) | (q_split[:, :, :, 1] & 3) << 2).permute(0, 1, 3, 2, 4).flatten(2)
    r[...] |= ((q_split[:, :, :, 0] >> 2) << 4 | (q_split[:, :, :, 1] >> 2) << 6).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "e": e}


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * q.  e [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    e = e8m0(e).unsqueeze(-1)
    q = e2m1(q).unflatten(1, (-1, 32))
    return torch.mul(e, q, out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least,
    power, zeros.
    """
    q, e = absmax(weight, code="e2m1", scale="e8m0", rows=1, columns=32, axes=2, **{"power": "floor", **options})
    return {"q": q, "e": e}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_compressed_tensors(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    weight_packed, weight_scale = tensors
    weight_scale += n * (K // 32)
    weight_packed += n * (K // 2)
    e = device.e8m0(tl.load(weight_scale + t // 16, live, 0))
    q_word = tl.load(weight_packed + t, live, 0)
    for h in tl.static_range(2):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 2 * t + h, e * q, live)
    return state


@triton.jit
def _decode_gpt_oss(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    blocks, scales = tensors
    scales += n * (K // 32)
    blocks += 16 * (n * (K // 32))
    t = u // 16
    i = u % 16
    e = device.e8m0(tl.load(scales + t, live, 0))
    q_word = tl.load(blocks + 16 * t + i, live, 0)
    for h in tl.static_range(2):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 32 * t + 2 * i + h, e * q, live)
    return state


@triton.jit
def _decode_torchao_swizzled(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    qdata, scale = tensors
    scale += 512 * (n // 128 * tl.cdiv(K, 128))
    qdata += 16 * (n * (K // 32))
    t = u // 16
    i = u % 16
    e = device.e8m0(tl.load(scale + 512 * (t // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32) + t % 4, live, 0))
    q_word = tl.load(qdata + 16 * t + i, live, 0)
    for h in tl.static_range(2):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 32 * t + 2 * i + h, e * q, live)
    return state


@triton.jit
def _decode_mlx(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    weight, scales = tensors
    scales += n * (K // 32)
    weight += n * (K // 8)
    e = device.e8m0(tl.load(scales + t // 4, live, 0))
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(8):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 8 * t + h, e * q, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, e = tensors
    e += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    e1 = device.e8m0(tl.load(e + 4 * t + c, live, 0))
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                q_low = q_word >> 16 * h + 8 * j + 2 * i & 3
                q_high = q_word >> 16 * h + 8 * j + 2 * i + 4 & 3
                q1 = device.e2m1(q_low | q_high << 2)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, e1 * q1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "compressed_tensors": Storage(unpack_compressed_tensors, pack_compressed_tensors, Kernels(_decode_compressed_tensors,
                rows="N", units="K/2", last="k", lanes=(2,), order=(0, 1, 2))),
        "modelopt": Storage(unpack_modelopt, pack_modelopt,
            Kernels(_decode_compressed_tensors, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2))),
        "gpt_oss": Storage(unpack_gpt_oss, pack_gpt_oss, Kernels(_decode_gpt_oss, rows="N", units="K/2", last="k", digits=(16,),
                lanes=(2,), order=(0, 1, 2, 3))),
        "deepseek": Storage(unpack_deepseek, pack_deepseek,
            Kernels(_decode_compressed_tensors, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2))),
        "torchao": Storage(unpack_torchao, pack_torchao,
            Kernels(_decode_compressed_tensors, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2))),
        "torchao_swizzled": Storage(unpack_torchao_swizzled, pack_torchao_swizzled, Kernels(_decode_torchao_swizzled, rows="N",
                units="K/2", last="k", digits=(16,), lanes=(2,), order=(0, 1, 2, 3))),
        "mlx": Storage(unpack_mlx, pack_mlx, Kernels(_decode_mlx, rows="N", units="K/8", last="k", lanes=(8,), order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e2m1, words=bitplanes.words_4, width=8, bits=0,
                    unit=(16384.0, 1.0), base=(0, 0), levels=Levels(codebook.two_part_table)),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("e", 1, 32, "e8m0"),), blocks=("32",)),
                    {"skinny": {}, "gemv": {"raw": bitplanes.raw_e2m1}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "e"}, settings={"power": "floor"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("e",)),
)

PROGRAM = {
    "name": "ocp_mxfp4", "title": "OCP MXFP4, 4-bit floats with a power of two per 32",
    "source": "OCP Microscaling Formats 1.0; compressed-tensors, ModelOpt, gpt-oss, DeepSeek-V4, torchao MXTensor",
    "formula": "e * q", "bits": "4.25", "digest": "4b272c8ccfc17b5e",
    "variants": {(): {
        "fields": {"e": ("e8m0", "N", "K/32"), "q": ("e2m1", "N", "K")},
        "storages": {
            "compressed_tensors": {"tensors": {
                "weight_packed": ("u8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "weight_scale": ("u8", "N", "K/32", {"field": "e"}),
            }},
            "modelopt": {"tensors": {
                "weight": ("u8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "weight_scale": ("u8", "N", "K/32", {"field": "e"}),
            }},
            "gpt_oss": {"tensors": {
                "blocks": ("u8", "N", "K/32", "16",
                    {"aliases": ("_blocks", "gate_up_proj_blocks", "down_proj_blocks"),
                    "slices": (("q", 0, [0, [(2, 4), (16, 1, 2), (0, 1, 1)]]),)}),
                "scales": ("u8", "N", "K/32", {"aliases": ("_scales", "gate_up_proj_scales", "down_proj_scales"), "field": "e"}),
            }},
            "deepseek": {"tensors": {
                "weight": ("i8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "weight_scale_inv": ("e8m0", "N", "K/32", {"aliases": ("scale",), "field": "e"}),
            }},
            "torchao": {"tensors": {
                "qdata": ("u8", "N", "K/2", {"aliases": ("_weight_qdata",), "slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "scale": ("e8m0", "N", "K/32", {"aliases": ("_weight_scale",), "field": "e"}),
            }},
            "torchao_swizzled": {"tensors": {
                "qdata": ("u8", "N", "16*K/32",
                    {"aliases": ("_weight_qdata",), "slices": (("q", 0, [0, [(2, 4), (16, 1, 1), (0, 16, 1)]]),)}),
                "scale": ("e8m0", "ceil(N/128)", "ceil(K/128)", "512",
                    {"aliases": ("_weight_scale",), "seen": ("32*ceil(N/128)", "16*ceil(K/128)"),
                    "slices": (("e", 0, [[(32, 16, 2), (4, 4, 2), (0, 1, 0)], [(4, 1, 2), (0, 1, 1)]]),)}),
            }},
            "mlx": {"tensors": {
                "weight": ("u32", "N", "K/8", {"slices": (("q", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                "scales": ("u8", "N", "K/32", {"field": "e"}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 2), (2, 16), (4, 1, 1), (0, 16, 1)]], 0, 2),
                    ("q", 4, [0, [(2, 8), (4, 4, 1), (2, 2), (2, 16), (4, 1, 1), (0, 16, 1)]], 2, 2))}),
                "e": ("e8m0", "N", "K/32", {"field": "e"}),
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
