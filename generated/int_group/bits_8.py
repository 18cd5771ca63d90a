"""int_group at bits = 8: integer codes with a zero point and a scale per group of columns.

    w = (q - z) * s

Built from the spec int_group (sha256 a7abeb406722a9b4) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import minmax
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float, as_type,
        integer, pad)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import _scale_planar


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - z) * s */
#define BITS 8
#define FIELDS 2
#define HAS_OFFSET
INLINE vf number(const Weight *w, vu codes) { return unsigned_number(codes); }
#define BASE (0)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    const vf z = FIELD(1);
    *scale = s;
    *offset = *scale * (-z);
}
"""


def unpack_gptq_v2(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of qweight int32 [K/4, N]; qzeros int32 [ceil(K/group), N/4]; scales scale_type [ceil(K/group), N]; g_idx int32
    [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros.t(), torch.uint8).unflatten(-1, (-1, 4))
    return {"g": g_idx, "q": qweight_bytes.flatten(1), "z": qzeros_bytes.permute(0, 2, 1).flatten(0, 1), "s": scales.t()}


def pack_gptq_v2(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v2."""
    qweight_bytes = q.unflatten(-1, (-1, 4))
    qzeros_bytes = z.unflatten(0, (-1, 4))
    return {"qweight": as_type(qweight_bytes, torch.int32).squeeze(-1).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous(), "scales": s.t().contiguous(),
            "g_idx": g}


def unpack_gptq_v1(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of qweight int32 [K/4, N]; qzeros int32 [ceil(K/group), N/4]; scales scale_type [ceil(K/group), N]; g_idx int32
    [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type((qzeros + 0x1010101).t(), torch.uint8).unflatten(-1, (-1, 4))
    return {"g": g_idx, "q": qweight_bytes.flatten(1), "z": qzeros_bytes.permute(0, 2, 1).flatten(0, 1), "s": scales.t()}


def pack_gptq_v1(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v1."""
    qweight_bytes = q.unflatten(-1, (-1, 4))
    qzeros_bytes = z.unflatten(0, (-1, 4))
    return {"qweight": as_type(qweight_bytes, torch.int32).squeeze(-1).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous() - 0x1010101,
            "scales": s.t().contiguous(), "g_idx": g}


def unpack_awq_contiguous(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, N: int) -> dict[str, Tensor]:
    """Fields of qweight int32 [K, ceil(N/4)]; qzeros int32 [K/group, ceil(N/4)]; scales scale_type [K/group, N]."""
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros.t(), torch.uint8).unflatten(-1, (-1, 4))
    return {"q": qweight_bytes.permute(0, 2, 1).flatten(0, 1)[:N, :], "z": qzeros_bytes.permute(0, 2, 1).flatten(0, 1)[:N, :],
            "s": scales.t()}


def pack_awq_contiguous(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, qzeros, scales of the fields; the inverse of unpack_awq_contiguous."""
    qweight_bytes = pad(q, (0, 0, 0, -q.shape[0] % 4)).unflatten(0, (-1, 4))
    qzeros_bytes = pad(z, (0, 0, 0, -z.shape[0] % 4)).unflatten(0, (-1, 4))
    return {"qweight": integer(qweight_bytes.transpose(-1, -2), torch.int32).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous(), "scales": s.t().contiguous()}


def unpack_pack_quantized(weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None,
        weight_g_idx: Tensor | None, *, N: int, K: int) -> dict[str, Tensor | None]:
    """Fields of weight_packed int32 [N, ceil(K/4)]; weight_scale scale_type [N, ceil(K/group)]; weight_zero_point int32
    [ceil(N/4), ceil(K/group)]; weight_g_idx int32 [K].
    """
    weight_packed_bytes = as_type(weight_packed, torch.uint8).unflatten(-1, (-1, 4))
    fields = {"g": weight_g_idx, "q": weight_packed_bytes.flatten(1)[:, :K], "s": weight_scale}
    if weight_zero_point is not None:
        weight_zero_point_bytes = as_type(weight_zero_point, torch.uint8).unflatten(-1, (-1, 4))
        fields["z"] = weight_zero_point_bytes.permute(0, 2, 1).flatten(0, 1)[:N, :]
    return fields


def pack_pack_quantized(g: Tensor | None, q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """weight_packed, weight_scale, weight_zero_point, weight_g_idx of the fields; the inverse of unpack_pack_quantized."""
    weight_packed_bytes = pad(q, (0, -q.shape[1] % 4, 0, 0)).unflatten(-1, (-1, 4))
    tensors = {"weight_packed": as_type(weight_packed_bytes, torch.int32).squeeze(-1), "weight_scale": s, "weight_g_idx": g}
    if z is not None:
        weight_zero_point_bytes = pad(z, (0, 0, 0, -z.shape[0] % 4)).unflatten(0, (-1, 4))
        tensors["weight_zero_point"] = integer(weight_zero_point_bytes.transpose(-1, -2), torch.int32)
    return tensors


def unpack_pack_quantized_0_8(weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor, *,
        K: int) -> dict[str, Tensor]:
    """Fields of weight_packed int32 [N, ceil(K/4)]; weight_scale scale_type [N, ceil(K/group)]; weight_zero_point int8 [N,
    ceil(K/group)].
    """
    r = as_type(weight_packed, torch.uint8).unflatten(-1, (-1, 4))
    return {"q": r.flatten(1)[:, :K], "z": (weight_zero_point + 0x80).view(torch.uint8), "s": weight_scale}


def pack_pack_quantized_0_8(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight_packed, weight_scale, weight_zero_point of the fields; the inverse of unpack_pack_quantized_0_8."""
    r = pad(q, (0, -q.shape[1] % 4, 0, 0)).unflatten(-1, (-1, 4))
    return {"weight_packed": as_type(r, torch.int32).squeeze(-1), "weight_scale": s,
            "weight_zero_point": z.view(torch.int8) - 0x80}


def unpack_int_quantized(weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None) -> dict[str, Tensor]:
    """Fields of weight int8 [N, K]; weight_scale scale_type [N, ceil(K/group)]; weight_zero_point int8 [N, ceil(K/group)]."""
    fields = {"q": weight.view(torch.uint8) + 128 & 255, "s": weight_scale}
    if weight_zero_point is not None:
        fields["z"] = weight_zero_point.view(torch.uint8) + 128 & 255
    return fields


def pack_int_quantized(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale, weight_zero_point of the fields; the inverse of unpack_int_quantized."""
    tensors = {"weight": (q - 128 & 255).view(torch.int8), "weight_scale": s}
    if z is not None:
        tensors["weight_zero_point"] = (z - 128 & 255).view(torch.int8)
    return tensors


def unpack_torchao_int8(qdata: Tensor, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
    """Fields of qdata int8 [N, K]; scale scale_type [N, ceil(K/group)]; zero_point int8 [N, ceil(K/group)]."""
    fields = {"q": qdata.view(torch.uint8) + 128 & 255, "s": scale}
    if zero_point is not None:
        fields["z"] = zero_point.view(torch.uint8) + 128 & 255
    return fields


def pack_torchao_int8(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """qdata, scale, zero_point of the fields; the inverse of unpack_torchao_int8."""
    tensors = {"qdata": (q - 128 & 255).view(torch.int8), "scale": s}
    if z is not None:
        tensors["zero_point"] = (z - 128 & 255).view(torch.int8)
    return tensors


def unpack_onnx_matmul_nbits(B: Tensor, scales: Tensor, zero_points: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of B uint8 [N, K]; scales scale_type [N, K/group]; zero_points uint8 [N, ceil(K/group)]."""
    return {"q": B, "z": zero_points, "s": scales}


def pack_onnx_matmul_nbits(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """B, scales, zero_points of the fields; the inverse of unpack_onnx_matmul_nbits."""
    return {"B": q, "scales": s, "zero_points": z}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor | None, *, K: int) -> dict[str, Tensor | None]:
    """Fields of q int32 [N, 32*ceil(K/128)]; s scale_type [N, ceil(K/group)]; z uint8 [N, ceil(K/group)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"q": r.unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K], "z": z, "s": s}


def pack_planar(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "z": z}


def decode(q: Tensor, s: Tensor, g: Tensor | None = None, z: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - z) * s.  q [N, K], s [N, ceil(K/group)], g [K], z [N,
    ceil(K/group)].
    """
    if g is not None:
        z, s = z if z is None else z[:, g], s[:, g]
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = q.to(torch.int16).unflatten(1, (s.shape[1], -1))
    z = 128 if z is None else z.to(torch.int16).unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    return torch.mul(as_float(q - z, out), s, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block, zero included, / (2^bits - 1); zero = the code of 0.
    options: by, symmetric, rounds, span.
    """
    q, z, s = minmax(weight, code="u8", zero="u8", scale=scale_type, rows=1, columns=group, axes=2, **options)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gptq_v2(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += n // 4
    scales += n
    q_word = tl.load(qweight + t * N, live, 0)
    if g_idx is None:
        g = t // (group // 4)
        z = (tl.load(qzeros + g * (N // 4), live, 0) >> 8 * (n % 4) & 255).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(4):
        q = (q_word >> 8 * h & 255).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 4 * t + h, live, 0)
            z = (tl.load(qzeros + g * (N // 4), live, 0) >> 8 * (n % 4) & 255).to(tl.int32)
            s = tl.load(scales + g * N, live, 0).to(tl.float32)
        state = use(state, 4 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_gptq_v1(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += n // 4
    scales += n
    q_word = tl.load(qweight + t * N, live, 0)
    if g_idx is None:
        g = t // (group // 4)
        z_word = tl.load(qzeros + g * (N // 4), live, 0) + 0x1010101
        z = (z_word >> 8 * (n % 4) & 255).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(4):
        q = (q_word >> 8 * h & 255).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 4 * t + h, live, 0)
            z_word = tl.load(qzeros + g * (N // 4), live, 0) + 0x1010101
            z = (z_word >> 8 * (n % 4) & 255).to(tl.int32)
            s = tl.load(scales + g * N, live, 0).to(tl.float32)
        state = use(state, 4 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_awq_contiguous(tensors, r, k, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit k of row r, in float32."""
    qweight, qzeros, scales = tensors
    group, = sizes
    qweight += r
    qzeros += r
    scales += 4 * r
    q_word = tl.load(qweight + k * tl.cdiv(N, 4), live, 0)
    g = k // group
    z_word = tl.load(qzeros + g * tl.cdiv(N, 4), live, 0)
    for h in tl.static_range(4):
        inside = live & (4 * r + h < N) & (k < K)
        q = (q_word >> 8 * h & 255).to(tl.int32)
        z = (z_word >> 8 * h & 255).to(tl.int32)
        s = tl.load(scales + h + g * N, inside, 0).to(tl.float32)
        state = use(state, k, (q - z) * s, inside, h)
    return state


@triton.jit
def _decode_pack_quantized(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit t of row n, in float32."""
    weight_packed, weight_scale, weight_zero_point, weight_g_idx = tensors
    group, = sizes
    weight_packed += n * tl.cdiv(K, 4)
    if weight_zero_point is None:
        z = 128
    else:
        weight_zero_point += n // 4 * tl.cdiv(K, group)
    weight_scale += n * tl.cdiv(K, group)
    q_word = tl.load(weight_packed + t, live, 0)
    if weight_g_idx is None:
        g = 4 * t // group
    if weight_zero_point is not None:
        if weight_g_idx is None:
            z = (tl.load(weight_zero_point + g, live, 0) >> 8 * (n % 4) & 255).to(tl.int32)
    if weight_g_idx is None:
        s = tl.load(weight_scale + g, live, 0).to(tl.float32)
    for h in tl.static_range(4):
        inside = live & (4 * t + h < K)
        q = (q_word >> 8 * h & 255).to(tl.int32)
        if weight_g_idx is not None:
            g = tl.load(weight_g_idx + 4 * t + h, inside, 0)
        if weight_zero_point is not None:
            if weight_g_idx is not None:
                z = (tl.load(weight_zero_point + g, inside, 0) >> 8 * (n % 4) & 255).to(tl.int32)
        if weight_g_idx is not None:
            s = tl.load(weight_scale + g, inside, 0).to(tl.float32)
        state = use(state, 4 * t + h, (q - z) * s, inside)
    return state


@triton.jit
def _decode_pack_quantized_0_8(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit t of row n, in float32."""
    weight_packed, weight_scale, weight_zero_point = tensors
    group, = sizes
    weight_packed += n * tl.cdiv(K, 4)
    weight_zero_point += n * tl.cdiv(K, group)
    weight_scale += n * tl.cdiv(K, group)
    q_word = tl.load(weight_packed + t, live, 0)
    g = 4 * t // group
    z_word = tl.load(weight_zero_point + g, live, 0).to(tl.int32) + 0x80
    z = (z_word & 255).to(tl.int32)
    s = tl.load(weight_scale + g, live, 0).to(tl.float32)
    for h in tl.static_range(4):
        inside = live & (4 * t + h < K)
        q = (q_word >> 8 * h & 255).to(tl.int32)
        state = use(state, 4 * t + h, (q - z) * s, inside)
    return state


@triton.jit
def _decode_int_quantized(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_scale, weight_zero_point = tensors
    group, = sizes
    weight += n * K
    if weight_zero_point is None:
        z = 128
    else:
        weight_zero_point += n * tl.cdiv(K, group)
    weight_scale += n * tl.cdiv(K, group)
    q_word = tl.load(weight + k, live, 0).to(tl.int32)
    q = ((q_word) + 128 & 255).to(tl.int32)
    g = k // group
    if weight_zero_point is not None:
        z_word = tl.load(weight_zero_point + g, live, 0).to(tl.int32)
        z = ((z_word) + 128 & 255).to(tl.int32)
    s = tl.load(weight_scale + g, live, 0).to(tl.float32)
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_onnx_matmul_nbits(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    B, scales, zero_points = tensors
    group, = sizes
    B += n * K
    if zero_points is None:
        z = 128
    else:
        zero_points += n * tl.cdiv(K, group)
    scales += n * (K // group)
    q = tl.load(B + k, live, 0).to(tl.int32)
    g = k // group
    if zero_points is not None:
        z = tl.load(zero_points + g, live, 0).to(tl.int32)
    s = tl.load(scales + g, live, 0).to(tl.float32)
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    q += 32 * (n * tl.cdiv(K, 128))
    if z is None:
        z1 = 128
    else:
        z += n * tl.cdiv(K, group)
    s += n * tl.cdiv(K, group)
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    g = (128 * t + 32 * j) // group
    if z is not None:
        z1 = tl.load(z + g, live, 0).to(tl.int32)
    s1 = tl.load(s + g, live, 0).to(tl.float32)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = (q_word >> 16 * i + 8 * h & 255).to(tl.int32)
            state = use(state, 128 * t + 32 * j + 16 * h + 2 * c + i, (q1 - z1) * s1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gptq_v2": Storage(unpack_gptq_v2, pack_gptq_v2, Kernels(_decode_gptq_v2, rows="N", units="K/4", last="n", lanes=(4,),
                order=(0, 1, 2))),
        "gptq_v1": Storage(unpack_gptq_v1, pack_gptq_v1, Kernels(_decode_gptq_v1, rows="N", units="K/4", last="n", lanes=(4,),
                order=(0, 1, 2))),
        "awq_contiguous": Storage(unpack_awq_contiguous, pack_awq_contiguous, Kernels(_decode_awq_contiguous, rows="ceil(N/4)",
                units="K", last="n", sums=4, lanes=(4,), order=(0, 2, 1))),
        "pack_quantized": Storage(unpack_pack_quantized, pack_pack_quantized, Kernels(_decode_pack_quantized, rows="N",
                units="ceil(K/4)", last="k", lanes=(4,), order=(0, 1, 2))),
        "pack_quantized_0_8": Storage(unpack_pack_quantized_0_8, pack_pack_quantized_0_8, Kernels(_decode_pack_quantized_0_8,
                rows="N", units="ceil(K/4)", last="k", lanes=(4,), order=(0, 1, 2))),
        "int_quantized": Storage(unpack_int_quantized, pack_int_quantized, Kernels(_decode_int_quantized, rows="N", units="K",
                last="k")),
        "torchao_int8": Storage(unpack_torchao_int8, pack_torchao_int8, Kernels(_decode_int_quantized, rows="N", units="K",
                last="k")),
        "onnx_matmul_nbits": Storage(unpack_onnx_matmul_nbits, pack_onnx_matmul_nbits, Kernels(_decode_onnx_matmul_nbits,
                rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u8, words=bitplanes.words_8, width=8, bits=8, base=(0, 2176),
                    in_order=True),
                    Sums(scale=group_sums.with_zero,
                    group_fields=(GroupField("scales", 1, "group"), GroupField("zero_points", 1, "group", 8, default=128.0)),
                    blocks=("group",)), {"skinny": {}}))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u8, words=bitplanes.words_8, width=8, bits=8, base=(0, 2176)),
                    Sums(scale=_scale_planar,
                    group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group", 8, default=128.0)),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"point": 1, "zero": (0, 0), "exact": True}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("s", "z")),
)
