"""int_group at bits = 2: integer codes with a zero point and a scale per group of columns.

    w = (q - z) * s

Built from the spec int_group (sha256 a7abeb406722a9b4) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import minmax
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float, as_type,
        cdiv, integer, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import _scale_planar


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - z) * s */
#define BITS 2
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
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
    """Fields of qweight int32 [K/16, N]; qzeros int32 [ceil(K/group), N/16]; scales scale_type [ceil(K/group), N]; g_idx int32
    [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros, torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    return {"g": g_idx, "q": spread(qweight_bytes, 2).flatten(1),
            "z": torch.stack([qzeros_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(0, 2), "s": scales.t()}


def pack_gptq_v2(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v2."""
    q_split = q.unflatten(-1, (-1, 4, 4))
    qweight_bytes = joined(q_split, 2).squeeze(-1)
    z_split = z.unflatten(0, (-1, 4, 4))
    qzeros_bytes = sum(z_split[:, :, i] << 2 * i for i in range(4))
    return {"qweight": as_type(qweight_bytes, torch.int32).squeeze(-1).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous(), "scales": s.t().contiguous(),
            "g_idx": g}


def unpack_gptq_v1(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of qweight int32 [K/16, N]; qzeros int32 [ceil(K/group), N/16]; scales scale_type [ceil(K/group), N]; g_idx int32
    [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros + 0x55555555, torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    return {"g": g_idx, "q": spread(qweight_bytes, 2).flatten(1),
            "z": torch.stack([qzeros_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(0, 2), "s": scales.t()}


def pack_gptq_v1(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v1."""
    q_split = q.unflatten(-1, (-1, 4, 4))
    qweight_bytes = joined(q_split, 2).squeeze(-1)
    z_split = z.unflatten(0, (-1, 4, 4))
    qzeros_bytes = sum(z_split[:, :, i] << 2 * i for i in range(4))
    return {"qweight": as_type(qweight_bytes, torch.int32).squeeze(-1).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous() - 0x55555555,
            "scales": s.t().contiguous(), "g_idx": g}


def unpack_awq_contiguous(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, N: int) -> dict[str, Tensor]:
    """Fields of qweight int32 [K, ceil(N/16)]; qzeros int32 [K/group, ceil(N/16)]; scales scale_type [K/group, N]."""
    qweight_bytes = as_type(qweight, torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    qzeros_bytes = as_type(qzeros, torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    return {"q": torch.stack([qweight_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(0, 2)[:N, :],
            "z": torch.stack([qzeros_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(0, 2)[:N, :], "s": scales.t()}


def pack_awq_contiguous(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, qzeros, scales of the fields; the inverse of unpack_awq_contiguous."""
    q_split = pad(q, (0, 0, 0, -q.shape[0] % 16)).unflatten(0, (-1, 4, 4))
    qweight_bytes = sum(q_split[:, :, i] << 2 * i for i in range(4))
    z_split = pad(z, (0, 0, 0, -z.shape[0] % 16)).unflatten(0, (-1, 4, 4))
    qzeros_bytes = sum(z_split[:, :, i] << 2 * i for i in range(4))
    return {"qweight": integer(qweight_bytes.transpose(-1, -2), torch.int32).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous(), "scales": s.t().contiguous()}


def unpack_pack_quantized(weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None,
        weight_g_idx: Tensor | None, *, N: int, K: int) -> dict[str, Tensor | None]:
    """Fields of weight_packed int32 [N, ceil(K/16)]; weight_scale scale_type [N, ceil(K/group)]; weight_zero_point int32
    [ceil(N/16), ceil(K/group)]; weight_g_idx int32 [K].
    """
    weight_packed_bytes = as_type(weight_packed, torch.uint8).unflatten(-1, (-1, 4))
    fields = {"g": weight_g_idx, "q": spread(weight_packed_bytes, 2).flatten(1)[:, :K], "s": weight_scale}
    if weight_zero_point is not None:
        weight_zero_point_bytes = as_type(weight_zero_point, torch.uint8).unflatten(-1, (-1, 4))
        fields["z"] = spread(weight_zero_point_bytes, 2).permute(0, 2, 3, 1).flatten(0, 2)[:N, :]
    return fields


def pack_pack_quantized(g: Tensor | None, q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """weight_packed, weight_scale, weight_zero_point, weight_g_idx of the fields; the inverse of unpack_pack_quantized."""
    q_split = pad(q, (0, -q.shape[1] % 16, 0, 0)).unflatten(-1, (-1, 4, 4))
    weight_packed_bytes = joined(q_split, 2).squeeze(-1)
    tensors = {"weight_packed": as_type(weight_packed_bytes, torch.int32).squeeze(-1), "weight_scale": s, "weight_g_idx": g}
    if z is not None:
        z_split = pad(z, (0, 0, 0, -z.shape[0] % 16)).unflatten(0, (-1, 4, 4))
        weight_zero_point_bytes = sum(z_split[:, :, i] << 2 * i for i in range(4))
        tensors["weight_zero_point"] = integer(weight_zero_point_bytes.transpose(-1, -2), torch.int32)
    return tensors


def unpack_onnx_matmul_nbits(B: Tensor, scales: Tensor, zero_points: Tensor | None, *, K: int, group: int) -> dict[str, Tensor]:
    """Fields of B uint8 [N, K/4]; scales scale_type [N, K/group]; zero_points uint8 [N, ceil(K/4*group)]."""
    fields = {"q": spread(B, 2).flatten(1), "s": scales}
    if zero_points is not None:
        fields["z"] = spread(zero_points, 2).flatten(1)[:, :cdiv(K, group)]
    return fields


def pack_onnx_matmul_nbits(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """B, scales, zero_points of the fields; the inverse of unpack_onnx_matmul_nbits."""
    q_split = q.unflatten(-1, (-1, 4))
    B_bytes = joined(q_split, 2).squeeze(-1)
    tensors = {"B": B_bytes, "scales": s}
    if z is not None:
        z_split = pad(z, (0, -z.shape[1] % 4, 0, 0)).unflatten(-1, (-1, 4))
        zero_points_bytes = joined(z_split, 2).squeeze(-1)
        tensors["zero_points"] = zero_points_bytes
    return tensors


def unpack_planar(q: Tensor, s: Tensor, z: Tensor | None, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; s scale_type [N, ceil(K/group)]; z uint8 [N, ceil(K/group)]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 4, 2, 2))
    fields = {
            "q": torch.stack([q_bytes2 & 3, q_bytes2 >> 2 & 3, q_bytes2 >> 4 & 3, q_bytes2 >> 6], -5).unflatten(2,
                (2, 2)).permute(0, 1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K],
            "s": s}
    if z is not None:
        fields["z"] = z & 3
    return fields


def pack_planar(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_bytes = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4
        | q_split[:, :, 1, :, :, 1] << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    tensors = {"q": as_type(q_bytes, torch.int32).flatten(1), "s": s}
    if z is not None:
        z_bytes = torch.zeros(z.shape[0], z.shape[1], 1, dtype=torch.uint8, device=z.device)
        z_bytes[...] = z.unsqueeze(-1)
        tensors["z"] = z_bytes.squeeze(-1)
    return tensors


def decode(q: Tensor, s: Tensor, g: Tensor | None = None, z: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - z) * s.  q [N, K], s [N, ceil(K/group)], g [K], z [N,
    ceil(K/group)].
    """
    if g is not None:
        z, s = z if z is None else z[:, g], s[:, g]
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = q.view(torch.int8).unflatten(1, (s.shape[1], -1))
    z = 2 if z is None else z.view(torch.int8).unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    return torch.mul(as_float(q - z, out), s, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block, zero included, / (2^bits - 1); zero = the code of 0.
    options: by, symmetric, rounds, span.
    """
    q, z, s = minmax(weight, code="u2", zero="u2", scale=scale_type, rows=1, columns=group, axes=2, **options)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gptq_v2(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += n // 16
    scales += n
    q_word = tl.load(qweight + t * N, live, 0)
    if g_idx is None:
        g = t // (group // 16)
        z = (tl.load(qzeros + g * (N // 16), live, 0) >> 2 * (n % 16) & 3).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(16):
        q = (q_word >> 2 * h & 3).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 16 * t + h, live, 0)
            z = (tl.load(qzeros + g * (N // 16), live, 0) >> 2 * (n % 16) & 3).to(tl.int32)
            s = tl.load(scales + g * N, live, 0).to(tl.float32)
        state = use(state, 16 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_gptq_v1(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += n // 16
    scales += n
    q_word = tl.load(qweight + t * N, live, 0)
    if g_idx is None:
        g = t // (group // 16)
        z_word = tl.load(qzeros + g * (N // 16), live, 0) + 0x55555555
        z = (z_word >> 2 * (n % 16) & 3).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(16):
        q = (q_word >> 2 * h & 3).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 16 * t + h, live, 0)
            z_word = tl.load(qzeros + g * (N // 16), live, 0) + 0x55555555
            z = (z_word >> 2 * (n % 16) & 3).to(tl.int32)
            s = tl.load(scales + g * N, live, 0).to(tl.float32)
        state = use(state, 16 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_awq_contiguous(tensors, r, k, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit k of row r, in float32."""
    qweight, qzeros, scales = tensors
    group, = sizes
    qweight += r
    qzeros += r
    scales += 16 * r
    q_word = tl.load(qweight + k * tl.cdiv(N, 16), live, 0)
    g = k // group
    z_word = tl.load(qzeros + g * tl.cdiv(N, 16), live, 0)
    for h in tl.static_range(16):
        inside = live & (16 * r + h < N) & (k < K)
        q = (q_word >> 2 * h & 3).to(tl.int32)
        z = (z_word >> 2 * h & 3).to(tl.int32)
        s = tl.load(scales + h + g * N, inside, 0).to(tl.float32)
        state = use(state, k, (q - z) * s, inside, h)
    return state


@triton.jit
def _decode_pack_quantized(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit t of row n, in float32."""
    weight_packed, weight_scale, weight_zero_point, weight_g_idx = tensors
    group, = sizes
    weight_packed += n * tl.cdiv(K, 16)
    if weight_zero_point is None:
        z = 2
    else:
        weight_zero_point += n // 16 * tl.cdiv(K, group)
    weight_scale += n * tl.cdiv(K, group)
    q_word = tl.load(weight_packed + t, live, 0)
    if weight_g_idx is None:
        g = 16 * t // group
    if weight_zero_point is not None:
        if weight_g_idx is None:
            z = (tl.load(weight_zero_point + g, live, 0) >> 2 * (n % 16) & 3).to(tl.int32)
    if weight_g_idx is None:
        s = tl.load(weight_scale + g, live, 0).to(tl.float32)
    for h in tl.static_range(16):
        inside = live & (16 * t + h < K)
        q = (q_word >> 2 * h & 3).to(tl.int32)
        if weight_g_idx is not None:
            g = tl.load(weight_g_idx + 16 * t + h, inside, 0)
        if weight_zero_point is not None:
            if weight_g_idx is not None:
                z = (tl.load(weight_zero_point + g, inside, 0) >> 2 * (n % 16) & 3).to(tl.int32)
        if weight_g_idx is not None:
            s = tl.load(weight_scale + g, inside, 0).to(tl.float32)
        state = use(state, 16 * t + h, (q - z) * s, inside)
    return state


@triton.jit
def _decode_onnx_matmul_nbits(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit t of row n, in float32."""
    B, scales, zero_points = tensors
    group, = sizes
    B += n * (K // 4)
    if zero_points is None:
        z = 2
    else:
        zero_points += n * tl.cdiv(K, 4 * group)
    scales += n * (K // group)
    q_word = tl.load(B + t, live, 0)
    g = t // (group // 4)
    if zero_points is not None:
        z = (tl.load(zero_points + g // 4, live, 0) >> 2 * (g % 4) & 3).to(tl.int32)
    s = tl.load(scales + g, live, 0).to(tl.float32)
    for h in tl.static_range(4):
        q = (q_word >> 2 * h & 3).to(tl.int32)
        state = use(state, 4 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    q += 16 * (n * tl.cdiv(K, 256))
    if z is None:
        z1 = 2
    else:
        z += n * tl.cdiv(K, group)
    s += n * tl.cdiv(K, group)
    t = u // 16
    b = u // 4 % 4
    a = u % 4
    live = live & (256 * t + 32 * b + 2 * a < K)
    q_word = tl.load(q + 16 * t + 4 * a + b, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                for c in tl.static_range(2):
                    inside = live & (256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c < K)
                    q1 = (q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3).to(tl.int32)
                    g = (256 * t + 128 * h + 32 * b) // group
                    if z is not None:
                        z1 = (tl.load(z + g, inside, 0) & 3).to(tl.int32)
                    s1 = tl.load(s + g, inside, 0).to(tl.float32)
                    state = use(state, 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c, (q1 - z1) * s1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gptq_v2": Storage(unpack_gptq_v2, pack_gptq_v2, Kernels(_decode_gptq_v2, rows="N", units="K/16", last="n", lanes=(16,),
                order=(0, 1, 2))),
        "gptq_v1": Storage(unpack_gptq_v1, pack_gptq_v1, Kernels(_decode_gptq_v1, rows="N", units="K/16", last="n", lanes=(16,),
                order=(0, 1, 2))),
        "awq_contiguous": Storage(unpack_awq_contiguous, pack_awq_contiguous, Kernels(_decode_awq_contiguous, rows="ceil(N/16)",
                units="K", last="n", sums=16, lanes=(16,), order=(0, 2, 1))),
        "pack_quantized": Storage(unpack_pack_quantized, pack_pack_quantized, Kernels(_decode_pack_quantized, rows="N",
                units="ceil(K/16)", last="k", lanes=(16,), order=(0, 1, 2))),
        "onnx_matmul_nbits": Storage(unpack_onnx_matmul_nbits, pack_onnx_matmul_nbits, Kernels(_decode_onnx_matmul_nbits,
                rows="N", units="K/4", last="k", lanes=(4,), order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u2, words=bitplanes.words_2, width=2, bits=2),
                    Sums(scale=_scale_planar,
                    group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group", 2, default=2.0)), blocks=("group",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"point": 1, "zero": (0, 0), "exact": True, "spans": (4,)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("s", "z")),
)
