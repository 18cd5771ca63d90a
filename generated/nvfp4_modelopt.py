"""nvfp4_modelopt: NVFP4, 4-bit floats with an 8-bit float per 16 times a scale of the whole weight.

    w = s * g * q
        + low_rank(svdquant_lora_b, svdquant_lora_a)
    float32, rounded after each operation

    s      e4m3 [N, ceil(K/16)]
    g      f32  []
    q      e2m1 [N, K]

    modelopt: 4.5 bits per weight
    torchao: 4.5 bits per weight
    torchao_swizzled: 4.5 bits per weight
    comfyui: 4.5 bits per weight
    mlx: 4.5 bits per weight
    planar: 4.5 bits per weight

Built from the spec nvfp4_modelopt (sha256 62d0dede6da98cbb) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import nested_absmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant,
        as_type, cdiv, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e2m1, e4m3


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = s * g * q */
#define BITS 4
#define FIELDS 2
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, 0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f,
        -6.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-12)
#define UNIT 0.5f
static const uint8_t byte_numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf g = FIELD(0);
    const vf s = FIELD(1);
    *scale = g * s;
}
"""


def unpack_modelopt(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [N, K/2]; weight_scale float8_e4m3fn [N, K/16]; weight_scale_2 float32 []."""
    return {"s": weight_scale, "g": weight_scale_2, "q": spread(weight, 4).flatten(1)}


def pack_modelopt(s: Tensor, g: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale, weight_scale_2 of the fields; the inverse of unpack_modelopt."""
    q_split = q.unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight": r, "weight_scale": s, "weight_scale_2": g}


def unpack_torchao(qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of qdata uint8 [N, K/2]; scale float8_e4m3fn [N, K/16]; per_tensor_scale float32 []."""
    return {"s": scale, "g": per_tensor_scale, "q": spread(qdata, 4).flatten(1)}


def pack_torchao(s: Tensor, g: Tensor | None, q: Tensor) -> dict[str, Tensor | None]:
    """qdata, scale, per_tensor_scale of the fields; the inverse of unpack_torchao."""
    q_split = q.unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"qdata": r, "scale": s, "per_tensor_scale": g}


def unpack_torchao_swizzled(qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor | None, *, N: int,
        K: int) -> dict[str, Tensor | None]:
    """Fields of qdata uint8 [N, 8*K/16]; scale float8_e4m3fn [ceil(N/128), ceil(K/64), 512]; per_tensor_scale float32 []."""
    qdata_bytes = qdata.unflatten(-1, (-1, 8))
    scale_bytes = as_type(scale, torch.uint8)
    return {
            "s": as_type(scale_bytes, torch.float8_e4m3fn).unflatten(-1, (32, 4, 4)).permute(0, 3, 2, 1, 4).flatten(0,
                2).flatten(1)[:N, :cdiv(K, 16)],
            "g": per_tensor_scale, "q": spread(qdata_bytes, 4).flatten(1)}


def pack_torchao_swizzled(s: Tensor, g: Tensor | None, q: Tensor) -> dict[str, Tensor | None]:
    """qdata, scale, per_tensor_scale of the fields; the inverse of unpack_torchao_swizzled."""
    q_split = q.unflatten(-1, (-1, 8, 2))
    qdata_bytes = joined(q_split, 4).squeeze(-1)
    scale_bytes = pad(s, (0, -s.shape[1] % 4, 0, -s.shape[0] % 128)).unflatten(-1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0,
        3, 2, 1, 4).view(torch.uint8).flatten(2)
    return {"qdata": qdata_bytes.flatten(1), "scale": as_type(scale_bytes, torch.float8_e4m3fn), "per_tensor_scale": g}


def unpack_comfyui(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of weight uint8 [N, K/2]; weight_scale float8_e4m3fn [ceil(N/128), ceil(K/64), 512]; weight_scale_2 float32 []."""
    weight_scale_bytes = as_type(weight_scale, torch.uint8)
    return {
            "s": as_type(weight_scale_bytes, torch.float8_e4m3fn).unflatten(-1, (32, 4, 4)).permute(0, 3, 2, 1, 4).flatten(0,
                2).flatten(1)[:N, :cdiv(K, 16)],
            "g": weight_scale_2, "q": spread(weight, 4, high_first=True).flatten(1)}


def pack_comfyui(s: Tensor, g: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale, weight_scale_2 of the fields; the inverse of unpack_comfyui."""
    q_split = q.unflatten(-1, (-1, 2))
    weight_bytes = joined(q_split, 4, high_first=True).squeeze(-1)
    weight_scale_bytes = pad(s, (0, -s.shape[1] % 4, 0, -s.shape[0] % 128)).unflatten(-1, (-1, 4)).unflatten(0,
        (-1, 4, 32)).permute(0, 3, 2, 1, 4).view(torch.uint8).flatten(2)
    return {"weight": weight_bytes, "weight_scale": as_type(weight_scale_bytes, torch.float8_e4m3fn), "weight_scale_2": g}


def unpack_mlx(weight: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint32 [N, K/8]; scales uint8 [N, K/16]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 4))
    return {"s": as_type(scales, torch.float8_e4m3fn), "q": spread(r, 4).flatten(1)}


def pack_mlx(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales of the fields; the inverse of unpack_mlx."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight": as_type(r, torch.uint32).squeeze(-1), "scales": s.view(torch.uint8)}


def unpack_planar(q: Tensor, g: Tensor | None, s: Tensor, *, K: int) -> dict[str, Tensor | None]:
    """Fields of q int32 [N, 16*ceil(K/128)]; g float32 []; s float8_e4m3fn [N, ceil(K/16)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 2 & 3], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]
    q_high = torch.stack([q_bytes >> 4 & 3, q_bytes >> 6], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]
    return {"s": s, "g": g, "q": q_low | q_high << 2}


def pack_planar(s: Tensor, g: Tensor | None, q: Tensor) -> dict[str, Tensor | None]:
    """q, g, s of the fields; the inverse of unpack_planar."""
    r = torch.zeros(q.shape[0], cdiv(q.shape[1], 128), 64, dtype=torch.uint8, device=q.device)
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r[...] |= ((q_split[:, :, :, 0] & 3) | (q_split[:, :, :, 1] & 3) << 2).permute(0, 1, 3, 2, 4).flatten(2)
    r[...] |= ((q_split[:, :, :, 0] >> 2) << 4 | (q_split[:, :, :, 1] >> 2) << 6).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "g": g}


def decode(s: Tensor, q: Tensor, g: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = s * g * q.  s [N, ceil(K/16)], q [N, K], g []."""
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = e2m1(q).unflatten(1, (s.shape[1], -1))
    s = e4m3(s).unsqueeze(-1)
    g = 1 if g is None else g
    return torch.mul(s * g, q, out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: super-scale from the largest magnitude of the weight; scale = largest of the block /
    divisor, in its units.  options: empty, least, amax, by, ties, zeros.
    """
    q, s, g = nested_absmax(weight, code="e2m1", scale="e4m3", super_scale="f32", rows=1, columns=16, axes=2, divisor=6,
            **{"empty": 1, "least": 0.001953125, **options})
    return {"q": q, "s": s, "g": g}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_modelopt(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    weight, weight_scale, weight_scale_2 = tensors
    weight_scale += n * (K // 16)
    g = tl.load(weight_scale_2)
    weight += n * (K // 2)
    s = device.e4m3(tl.load(weight_scale + t // 8, live, 0))
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(2):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 2 * t + h, s * g * q, live)
    return state


@triton.jit
def _decode_torchao(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    qdata, scale, per_tensor_scale = tensors
    scale += n * (K // 16)
    if per_tensor_scale is None:
        g = 1.0
    else:
        g = tl.load(per_tensor_scale)
    qdata += n * (K // 2)
    s = device.e4m3(tl.load(scale + t // 8, live, 0))
    q_word = tl.load(qdata + t, live, 0)
    for h in tl.static_range(2):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 2 * t + h, s * g * q, live)
    return state


@triton.jit
def _decode_torchao_swizzled(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    qdata, scale, per_tensor_scale = tensors
    scale += 512 * (n // 128 * tl.cdiv(K, 64))
    if per_tensor_scale is None:
        g = 1.0
    else:
        g = tl.load(per_tensor_scale)
    qdata += 8 * (n * (K // 16))
    t = u // 8
    i = u % 8
    s = device.e4m3(tl.load(scale + 512 * (t // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32) + t % 4, live, 0))
    q_word = tl.load(qdata + 8 * t + i, live, 0)
    for h in tl.static_range(2):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 16 * t + 2 * i + h, s * g * q, live)
    return state


@triton.jit
def _decode_comfyui(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    weight, weight_scale, weight_scale_2 = tensors
    weight_scale += 512 * (n // 128 * tl.cdiv(K, 64))
    g = tl.load(weight_scale_2)
    weight += n * (K // 2)
    s = device.e4m3(tl.load(weight_scale + 512 * (t // 8 // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32) + t // 8 % 4, live, 0))
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(2):
        q = device.e2m1(q_word >> 4 - 4 * h & 15)
        state = use(state, 2 * t + h, s * g * q, live)
    return state


@triton.jit
def _decode_mlx(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    weight, scales = tensors
    scales += n * (K // 16)
    g = 1
    weight += n * (K // 8)
    s = device.e4m3(tl.load(scales + t // 2, live, 0))
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(8):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 8 * t + h, s * g * q, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, g, s = tensors
    s += n * tl.cdiv(K, 16)
    if g is None:
        g1 = 1.0
    else:
        g1 = tl.load(g)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                s1 = device.e4m3(tl.load(s + 8 * t + 2 * c + h, inside, 0))
                q_low = q_word >> 16 * h + 8 * j + 2 * i & 3
                q_high = q_word >> 16 * h + 8 * j + 2 * i + 4 & 3
                q1 = device.e2m1(q_low | q_high << 2)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, s1 * g1 * q1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "modelopt": Storage(unpack_modelopt, pack_modelopt, Kernels(_decode_modelopt, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2))),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_torchao, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2))),
        "torchao_swizzled": Storage(unpack_torchao_swizzled, pack_torchao_swizzled, Kernels(_decode_torchao_swizzled, rows="N",
                units="K/2", last="k", digits=(8,), lanes=(2,), order=(0, 1, 2, 3))),
        "comfyui": Storage(unpack_comfyui, pack_comfyui, Kernels(_decode_comfyui, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2))),
        "mlx": Storage(unpack_mlx, pack_mlx, Kernels(_decode_mlx, rows="N", units="K/8", last="k", lanes=(8,), order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e2m1, words=bitplanes.words_4, width=8, bits=0,
                    unit=(16384.0, 1.0), base=(0, 0), levels=Levels(codebook.two_part_table)),
                    Sums(scale=group_sums.scaled, finish=group_sums.scaled, group_fields=(GroupField("s", 1, 16, "e4m3"),),
                    row_fields=(GroupField("g", 0, 0, default=1.0),), blocks=("16",)),
                    {"skinny": {}, "gemv": {"raw": bitplanes.raw_e2m1}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("g", "s")),
)

PROGRAM = {
    "name": "nvfp4_modelopt", "title": "NVFP4, 4-bit floats with an 8-bit float per 16 times a scale of the whole weight",
    "source": "ModelOpt NVFP4 (weight_scale_2), torchao NVFP4Tensor (per_tensor_scale), comfy-kitchen TensorCoreNVFP4Layout",
    "formula": "s * g * q", "bits": "4.5", "digest": "62d0dede6da98cbb",
    "detect": {"claimed": ["comfyui"]},
    "variants": {(): {
        "fields": {"s": ("e4m3", "N", "ceil(K/16)"), "g": ("f32",), "q": ("e2m1", "N", "K")},
        "cuts": ("N", "ceil(K/16)"),
        "storages": {
            "modelopt": {"tensors": {
                "weight": ("u8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "weight_scale": ("e4m3", "N", "K/16", {"field": "s"}),
                "weight_scale_2": ("f32", {"field": "g"}),
            }},
            "torchao": {"tensors": {
                "qdata": ("u8", "N", "K/2", {"aliases": ("_weight_qdata",), "slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "scale": ("e4m3", "N", "K/16", {"aliases": ("_weight_scale",), "field": "s"}),
                "per_tensor_scale": ("f32", {"aliases": ("_weight_per_tensor_scale",), "optional": "g", "field": "g"}),
            }},
            "torchao_swizzled": {"tensors": {
                "qdata": ("u8", "N", "8*K/16",
                    {"aliases": ("_weight_qdata",), "slices": (("q", 0, [0, [(2, 4), (8, 1, 1), (0, 8, 1)]]),)}),
                "scale": ("e4m3", "ceil(N/128)", "ceil(K/64)", "512",
                    {"aliases": ("_weight_scale",), "seen": ("32*ceil(N/128)", "16*ceil(K/64)"),
                    "slices": (("s", 0, [[(32, 16, 2), (4, 4, 2), (0, 1, 0)], [(4, 1, 2), (0, 1, 1)]]),)}),
                "per_tensor_scale": ("f32", {"aliases": ("_weight_per_tensor_scale",), "optional": "g", "field": "g"}),
            }},
            "comfyui": {"tensors": {
                "weight": ("u8", "N", "K/2", {"slices": (("q", 4, [0, [(2, -4), (0, 1, 1)]]),)}),
                "weight_scale": ("e4m3", "ceil(N/128)", "ceil(K/64)", "512",
                    {"seen": ("128*ceil(N/128)", "4*ceil(K/64)"),
                    "slices": (("s", 0, [[(32, 16, 2), (4, 4, 2), (0, 1, 0)], [(4, 1, 2), (0, 1, 1)]]),)}),
                "weight_scale_2": ("f32", {"field": "g"}),
            }},
            "mlx": {
                "tensors": {
                    "weight": ("u32", "N", "K/8", {"slices": (("q", 0, [0, [(8, 4), (0, 1, 1)]]),)}),
                    "scales": ("u8", "N", "K/16", {"field": "s"}),
                },
                "options": {"amax": 2688},
            },
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 2), (2, 16), (4, 1, 1), (0, 16, 1)]], 0, 2),
                    ("q", 4, [0, [(2, 8), (4, 4, 1), (2, 2), (2, 16), (4, 1, 1), (0, 16, 1)]], 2, 2))}),
                "g": ("f32", {"optional": "g", "field": "g"}),
                "s": ("e4m3", "N", "ceil(K/16)", {"field": "s"}),
            }},
        },
        "options": {
            "empty": (), "least": (), "amax": (), "by": ("stored", "inverse"), "ties": ("even", "zero"),
            "zeros": ("signed", "negative", "positive"),
        },
        "defaults": {"g": 1},
        "plus": (("low_rank", {"up": ("svdquant_lora_b", "bf16", "N", "?"), "down": ("svdquant_lora_a", "bf16", "?", "K")},
            False),),
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
