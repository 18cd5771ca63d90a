"""int_group at bits = 4: integer codes with a zero point and a scale per group of columns.

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
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - z) * s */
#define BITS 4
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f,
        15.0f};
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
    """Fields of qweight int32 [K/8, N]; qzeros int32 [ceil(K/group), N/8]; scales scale_type [ceil(K/group), N]; g_idx int32
    [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros, torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    return {"g": g_idx, "q": spread(qweight_bytes, 4).flatten(1),
            "z": torch.stack([qzeros_bytes & 15, qzeros_bytes >> 4], -2).flatten(0, 2), "s": scales.t()}


def pack_gptq_v2(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v2."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    qweight_bytes = joined(q_split, 4).squeeze(-1)
    z_split = z.unflatten(0, (-1, 4, 2))
    qzeros_bytes = z_split[:, :, 0] | z_split[:, :, 1] << 4
    return {"qweight": as_type(qweight_bytes, torch.int32).squeeze(-1).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous(), "scales": s.t().contiguous(),
            "g_idx": g}


def unpack_gptq_v1(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of qweight int32 [K/8, N]; qzeros int32 [ceil(K/group), N/8]; scales scale_type [ceil(K/group), N]; g_idx int32
    [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros + 0x11111111, torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    return {"g": g_idx, "q": spread(qweight_bytes, 4).flatten(1),
            "z": torch.stack([qzeros_bytes & 15, qzeros_bytes >> 4], -2).flatten(0, 2), "s": scales.t()}


def pack_gptq_v1(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v1."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    qweight_bytes = joined(q_split, 4).squeeze(-1)
    z_split = z.unflatten(0, (-1, 4, 2))
    qzeros_bytes = z_split[:, :, 0] | z_split[:, :, 1] << 4
    return {"qweight": as_type(qweight_bytes, torch.int32).squeeze(-1).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous() - 0x11111111,
            "scales": s.t().contiguous(), "g_idx": g}


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int32 [K, N/8]; qzeros int32 [K/group, N/8]; scales scale_type [K/group, N]."""
    qweight_bytes = as_type(qweight, torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    q_bytes = qweight_bytes.unflatten(1, (2, 2))
    qzeros_bytes = as_type(qzeros, torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    z_bytes = qzeros_bytes.unflatten(1, (2, 2))
    return {"q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 3, 1, 2, 4).flatten(0, 3),
            "z": torch.stack([z_bytes & 15, z_bytes >> 4], -4).permute(0, 3, 1, 2, 4).flatten(0, 3), "s": scales.t()}


def pack_awq(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, qzeros, scales of the fields; the inverse of unpack_awq."""
    q_split = q.unflatten(0, (-1, 2, 2, 2))
    qweight_bytes = (q_split[:, :, 0] | q_split[:, :, 1] << 4).permute(0, 2, 1, 3).flatten(1, 2)
    z_split = z.unflatten(0, (-1, 2, 2, 2))
    qzeros_bytes = (z_split[:, :, 0] | z_split[:, :, 1] << 4).permute(0, 2, 1, 3).flatten(1, 2)
    return {"qweight": integer(qweight_bytes.transpose(-1, -2), torch.int32).t().contiguous(),
            "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous(), "scales": s.t().contiguous()}


def unpack_awq_gemv(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, K: int, group: int) -> dict[str, Tensor]:
    """Fields of qweight int32 [N, K/8]; qzeros int32 [N, 128*ceil(K/1024)/group]; scales scale_type [N,
    1024*ceil(K/1024)/group].
    """
    qweight_bytes = as_type(qweight, torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros, torch.uint8).unflatten(-1, (-1, 4))
    return {"q": spread(qweight_bytes, 4).flatten(1), "z": spread(qzeros_bytes, 4).flatten(1)[:, :cdiv(K, group)],
            "s": scales[:, :cdiv(K, group)]}


def pack_awq_gemv(q: Tensor, z: Tensor, s: Tensor, *, K: int, group: int) -> dict[str, Tensor]:
    """qweight, qzeros, scales of the fields; the inverse of unpack_awq_gemv."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    qweight_bytes = joined(q_split, 4).squeeze(-1)
    z_split = pad(z, (0, 8 * (128 * cdiv(K, 1024) // group) - cdiv(K, group), 0, 0)).unflatten(-1, (-1, 4, 2))
    qzeros_bytes = joined(z_split, 4).squeeze(-1)
    return {"qweight": as_type(qweight_bytes, torch.int32).squeeze(-1), "qzeros": as_type(qzeros_bytes, torch.int32).squeeze(-1),
            "scales": pad(s, (0, 1024 * cdiv(K, 1024) // group - cdiv(K, group), 0, 0))}


def unpack_pack_quantized(weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None,
        weight_g_idx: Tensor | None, *, N: int, K: int) -> dict[str, Tensor | None]:
    """Fields of weight_packed int32 [N, ceil(K/8)]; weight_scale scale_type [N, ceil(K/group)]; weight_zero_point int32
    [ceil(N/8), ceil(K/group)]; weight_g_idx int32 [K].
    """
    weight_packed_bytes = as_type(weight_packed, torch.uint8).unflatten(-1, (-1, 4))
    fields = {"g": weight_g_idx, "q": spread(weight_packed_bytes, 4).flatten(1)[:, :K], "s": weight_scale}
    if weight_zero_point is not None:
        weight_zero_point_bytes = as_type(weight_zero_point, torch.uint8).unflatten(-1, (-1, 4))
        fields["z"] = spread(weight_zero_point_bytes, 4).permute(0, 2, 3, 1).flatten(0, 2)[:N, :]
    return fields


def pack_pack_quantized(g: Tensor | None, q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """weight_packed, weight_scale, weight_zero_point, weight_g_idx of the fields; the inverse of unpack_pack_quantized."""
    q_split = pad(q, (0, -q.shape[1] % 8, 0, 0)).unflatten(-1, (-1, 4, 2))
    weight_packed_bytes = joined(q_split, 4).squeeze(-1)
    tensors = {"weight_packed": as_type(weight_packed_bytes, torch.int32).squeeze(-1), "weight_scale": s, "weight_g_idx": g}
    if z is not None:
        z_split = pad(z, (0, 0, 0, -z.shape[0] % 8)).unflatten(0, (-1, 4, 2))
        weight_zero_point_bytes = z_split[:, :, 0] | z_split[:, :, 1] << 4
        tensors["weight_zero_point"] = integer(weight_zero_point_bytes.transpose(-1, -2), torch.int32)
    return tensors


def unpack_pack_quantized_0_8(weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor, *,
        K: int) -> dict[str, Tensor]:
    """Fields of weight_packed int32 [N, ceil(K/8)]; weight_scale scale_type [N, ceil(K/group)]; weight_zero_point int8 [N,
    ceil(K/group)].
    """
    weight_packed_bytes = as_type(weight_packed, torch.uint8).unflatten(-1, (-1, 4))
    weight_zero_point_bytes = (weight_zero_point + 0x8).view(torch.uint8)
    return {"q": spread(weight_packed_bytes, 4).flatten(1)[:, :K], "z": weight_zero_point_bytes & 15, "s": weight_scale}


def pack_pack_quantized_0_8(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight_packed, weight_scale, weight_zero_point of the fields; the inverse of unpack_pack_quantized_0_8."""
    q_split = pad(q, (0, -q.shape[1] % 8, 0, 0)).unflatten(-1, (-1, 4, 2))
    weight_packed_bytes = joined(q_split, 4).squeeze(-1)
    weight_zero_point_bytes = torch.zeros(z.shape[0], z.shape[1], 1, dtype=torch.uint8, device=z.device)
    weight_zero_point_bytes[...] = z.unsqueeze(-1)
    return {"weight_packed": as_type(weight_packed_bytes, torch.int32).squeeze(-1), "weight_scale": s,
            "weight_zero_point": as_type(weight_zero_point_bytes, torch.int8).squeeze(-1) - 0x8}


def unpack_marlin(qweight: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int32 [K/16, 128*N/64]; scales scale_type [K/group, 64*N/64]."""
    qweight_bytes = as_type(qweight.unflatten(-1, (-1, 128)).permute(1, 0, 2), torch.uint8)
    q_bytes = qweight_bytes.unflatten(-1, (8, 4, 4, 2, 2))
    scales_bytes = as_type(scales.unflatten(-1, (-1, 64)).permute(1, 0, 2), torch.uint8)
    return {"q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 5, 7, 2, 1, 3, 4, 6).flatten(0, 3).flatten(1),
            "s": as_type(scales_bytes, scales.dtype).unflatten(-1, (8, 8)).permute(0, 3, 2, 1).flatten(0, 2)}


def pack_marlin(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, scales of the fields; the inverse of unpack_marlin."""
    q_split = q.unflatten(-1, (-1, 2, 4, 2)).unflatten(0, (-1, 4, 2, 8))
    qweight_bytes = (q_split[:, :, :, :, :, 0] | q_split[:, :, :, :, :, 1] << 4).permute(0, 4, 3, 5, 1, 6, 2).flatten(2)
    scales_bytes = as_type(s.unflatten(0, (-1, 8, 8)).permute(0, 3, 2, 1).unsqueeze(-1), torch.uint8).flatten(2)
    return {"qweight": as_type(qweight_bytes, torch.int32).permute(1, 0, 2).contiguous().flatten(1),
            "scales": as_type(scales_bytes, s.dtype).permute(1, 0, 2).contiguous().flatten(1)}


def unpack_modelopt(weight: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [N/2, K]; weight_scale scale_type [N, ceil(K/group)]."""
    return {"q": spread(weight, 4).permute(0, 2, 1).flatten(0, 1) + 8 & 15, "s": weight_scale}


def pack_modelopt(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_modelopt."""
    q_split = (q - 8 & 15).unflatten(0, (-1, 2))
    r = q_split[:, 0] | q_split[:, 1] << 4
    return {"weight": r, "weight_scale": s}


def unpack_xpu_int4pack(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int32 [N, K/8]; scales scale_type [ceil(K/group), N]; qzeros int8 [ceil(K/group), N]."""
    qweight_bytes = as_type(qweight, torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = qzeros.t().view(torch.uint8)
    return {"q": spread(qweight_bytes, 4).flatten(1), "z": qzeros_bytes & 15, "s": scales.t()}


def pack_xpu_int4pack(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, scales, qzeros of the fields; the inverse of unpack_xpu_int4pack."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    qweight_bytes = joined(q_split, 4).squeeze(-1)
    qzeros_bytes = torch.zeros(z.shape[0], z.shape[1], 1, dtype=torch.uint8, device=z.device)
    qzeros_bytes[...] = z.unsqueeze(-1)
    return {"qweight": as_type(qweight_bytes, torch.int32).squeeze(-1), "scales": s.t().contiguous(),
            "qzeros": as_type(qzeros_bytes, torch.int8).squeeze(-1).t().contiguous()}


def unpack_torchao_plain_int32(qdata: Tensor, scale: Tensor, zero_point: Tensor) -> dict[str, Tensor]:
    """Fields of qdata int32 [N, K/8]; scale scale_type [K/group, N]; zero_point int8 [K/group, N]."""
    qdata_bytes = as_type(qdata, torch.uint8).unflatten(-1, (-1, 4))
    zero_point_bytes = zero_point.t().view(torch.uint8)
    return {"q": spread(qdata_bytes, 4).flatten(1), "z": zero_point_bytes & 15, "s": scale.t()}


def pack_torchao_plain_int32(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qdata, scale, zero_point of the fields; the inverse of unpack_torchao_plain_int32."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    qdata_bytes = joined(q_split, 4).squeeze(-1)
    zero_point_bytes = torch.zeros(z.shape[0], z.shape[1], 1, dtype=torch.uint8, device=z.device)
    zero_point_bytes[...] = z.unsqueeze(-1)
    return {"qdata": as_type(qdata_bytes, torch.int32).squeeze(-1), "scale": s.t().contiguous(),
            "zero_point": as_type(zero_point_bytes, torch.int8).squeeze(-1).t().contiguous()}


def unpack_onnx_matmul_nbits(B: Tensor, scales: Tensor, zero_points: Tensor | None, *, K: int, group: int) -> dict[str, Tensor]:
    """Fields of B uint8 [N, K/2]; scales scale_type [N, K/group]; zero_points uint8 [N, ceil(K/2*group)]."""
    fields = {"q": spread(B, 4).flatten(1), "s": scales}
    if zero_points is not None:
        fields["z"] = spread(zero_points, 4).flatten(1)[:, :cdiv(K, group)]
    return fields


def pack_onnx_matmul_nbits(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """B, scales, zero_points of the fields; the inverse of unpack_onnx_matmul_nbits."""
    q_split = q.unflatten(-1, (-1, 2))
    B_bytes = joined(q_split, 4).squeeze(-1)
    tensors = {"B": B_bytes, "scales": s}
    if z is not None:
        z_split = pad(z, (0, -z.shape[1] % 2, 0, 0)).unflatten(-1, (-1, 2))
        zero_points_bytes = joined(z_split, 4).squeeze(-1)
        tensors["zero_points"] = zero_points_bytes
    return tensors


def unpack_openvino_u4(weight: Tensor, zero_point: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [N, K/2]; zero_point uint8 [N, K/2*group]; scale scale_type [N, K/group]."""
    return {"q": spread(weight, 4).flatten(1), "z": spread(zero_point, 4).flatten(1), "s": scale}


def pack_openvino_u4(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight, zero_point, scale of the fields; the inverse of unpack_openvino_u4."""
    q_split = q.unflatten(-1, (-1, 2))
    weight_bytes = joined(q_split, 4).squeeze(-1)
    z_split = z.unflatten(-1, (-1, 2))
    zero_point_bytes = joined(z_split, 4).squeeze(-1)
    return {"weight": weight_bytes, "zero_point": zero_point_bytes, "scale": s}


def unpack_openvino_i4(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [N, K/2]; scale scale_type [N, K/group]."""
    return {"q": spread(weight, 4).flatten(1) + 8 & 15, "s": scale}


def pack_openvino_i4(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight, scale of the fields; the inverse of unpack_openvino_i4."""
    q_split = (q - 8 & 15).unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight": r, "scale": s}


def unpack_trt_llm(weight: Tensor, weights_scaling_factor: Tensor) -> dict[str, Tensor]:
    """Fields of weight int8 [N/4, 128*K/64]; weights_scaling_factor scale_type [ceil(K/group), N]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes = r.unflatten(-1, (4, 2, 8, 2))
    return {"q": torch.stack([q_bytes & 15, q_bytes >> 4], -3).permute(0, 2, 1, 3, 6, 4, 5).flatten(0, 1).flatten(1),
            "s": weights_scaling_factor.t()}


def pack_trt_llm(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight, weights_scaling_factor of the fields; the inverse of unpack_trt_llm."""
    q_split = q.unflatten(-1, (-1, 2, 2, 2, 8)).unflatten(0, (-1, 4))
    r = (q_split[:, :, :, :, :, 0] | q_split[:, :, :, :, :, 1] << 4).permute(0, 2, 1, 3, 5, 4).flatten(2)
    return {"weight": as_type(r, torch.int8).flatten(1), "weights_scaling_factor": s.t().contiguous()}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor | None, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s scale_type [N, ceil(K/group)]; z uint8 [N, ceil(K/group)]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 4, 2, 2))
    fields = {"q": torch.stack([q_bytes2 & 15, q_bytes2 >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K], "s": s}
    if z is not None:
        fields["z"] = z & 15
    return fields


def pack_planar(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_bytes = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
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
    z = 8 if z is None else z.view(torch.int8).unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    return torch.mul(as_float(q - z, out), s, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block, zero included, / (2^bits - 1); zero = the code of 0.
    options: by, symmetric, rounds, span.
    """
    q, z, s = minmax(weight, code="u4", zero="u4", scale=scale_type, rows=1, columns=group, axes=2, **options)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gptq_v2(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += n // 8
    scales += n
    q_word = tl.load(qweight + t * N, live, 0)
    if g_idx is None:
        g = t // (group // 8)
        z = (tl.load(qzeros + g * (N // 8), live, 0) >> 4 * (n % 8) & 15).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(8):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 8 * t + h, live, 0)
            z = (tl.load(qzeros + g * (N // 8), live, 0) >> 4 * (n % 8) & 15).to(tl.int32)
            s = tl.load(scales + g * N, live, 0).to(tl.float32)
        state = use(state, 8 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_gptq_v1(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += n // 8
    scales += n
    q_word = tl.load(qweight + t * N, live, 0)
    if g_idx is None:
        g = t // (group // 8)
        z_word = tl.load(qzeros + g * (N // 8), live, 0) + 0x11111111
        z = (z_word >> 4 * (n % 8) & 15).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(8):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 8 * t + h, live, 0)
            z_word = tl.load(qzeros + g * (N // 8), live, 0) + 0x11111111
            z = (z_word >> 4 * (n % 8) & 15).to(tl.int32)
            s = tl.load(scales + g * N, live, 0).to(tl.float32)
        state = use(state, 8 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_awq(tensors, r, k, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit k of row r, in float32."""
    qweight, qzeros, scales = tensors
    group, = sizes
    qweight += r
    qzeros += r
    scales += 8 * r
    q_word = tl.load(qweight + k * (N // 8), live, 0)
    g = k // group
    z_word = tl.load(qzeros + g * (N // 8), live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            q = (q_word >> 16 * i + 4 * h & 15).to(tl.int32)
            z = (z_word >> 16 * i + 4 * h & 15).to(tl.int32)
            s = tl.load(scales + 2 * h + i + g * N, live, 0).to(tl.float32)
            state = use(state, k, (q - z) * s, live, 2 * h + i)
    return state


@triton.jit
def _decode_awq_gemv(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    qweight, qzeros, scales = tensors
    group, = sizes
    qweight += n * (K // 8)
    qzeros += n * (128 * tl.cdiv(K, 1024) // group)
    scales += n * (1024 * tl.cdiv(K, 1024) // group)
    q_word = tl.load(qweight + t, live, 0)
    g = t // (group // 8)
    z = (tl.load(qzeros + g // 8, live, 0) >> 4 * (g % 8) & 15).to(tl.int32)
    s = tl.load(scales + g, live, 0).to(tl.float32)
    for h in tl.static_range(8):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 8 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_pack_quantized(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    weight_packed, weight_scale, weight_zero_point, weight_g_idx = tensors
    group, = sizes
    weight_packed += n * tl.cdiv(K, 8)
    if weight_zero_point is None:
        z = 8
    else:
        weight_zero_point += n // 8 * tl.cdiv(K, group)
    weight_scale += n * tl.cdiv(K, group)
    q_word = tl.load(weight_packed + t, live, 0)
    if weight_g_idx is None:
        g = 8 * t // group
    if weight_zero_point is not None:
        if weight_g_idx is None:
            z = (tl.load(weight_zero_point + g, live, 0) >> 4 * (n % 8) & 15).to(tl.int32)
    if weight_g_idx is None:
        s = tl.load(weight_scale + g, live, 0).to(tl.float32)
    for h in tl.static_range(8):
        inside = live & (8 * t + h < K)
        q = (q_word >> 4 * h & 15).to(tl.int32)
        if weight_g_idx is not None:
            g = tl.load(weight_g_idx + 8 * t + h, inside, 0)
        if weight_zero_point is not None:
            if weight_g_idx is not None:
                z = (tl.load(weight_zero_point + g, inside, 0) >> 4 * (n % 8) & 15).to(tl.int32)
        if weight_g_idx is not None:
            s = tl.load(weight_scale + g, inside, 0).to(tl.float32)
        state = use(state, 8 * t + h, (q - z) * s, inside)
    return state


@triton.jit
def _decode_pack_quantized_0_8(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    weight_packed, weight_scale, weight_zero_point = tensors
    group, = sizes
    weight_packed += n * tl.cdiv(K, 8)
    weight_zero_point += n * tl.cdiv(K, group)
    weight_scale += n * tl.cdiv(K, group)
    q_word = tl.load(weight_packed + t, live, 0)
    g = 8 * t // group
    z_word = tl.load(weight_zero_point + g, live, 0).to(tl.int32) + 0x8
    z = (z_word & 15).to(tl.int32)
    s = tl.load(weight_scale + g, live, 0).to(tl.float32)
    for h in tl.static_range(8):
        inside = live & (8 * t + h < K)
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 8 * t + h, (q - z) * s, inside)
    return state


@triton.jit
def _decode_marlin(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qweight, scales = tensors
    group, = sizes
    qweight += 128 * (n // 64)
    z = 8
    scales += 64 * (n // 64)
    q = (tl.load(qweight + 128 * (k // 16 * (N // 64)) + 16 * (n % 64 % 8) + 4 * (k % 16 // 2 % 4) + n % 64 // 16, live, 0) >> 16
        * (k % 16 % 2) + 8 * (n % 64 // 8 % 2) + 4 * (k % 16 // 8) & 15).to(tl.int32)
    g = k // group
    s = tl.load(scales + 64 * (g * (N // 64)) + 8 * (n % 64 % 8) + n % 64 // 8, live, 0).to(tl.float32)
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_modelopt(tensors, r, k, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit k of row r, in float32."""
    weight, weight_scale = tensors
    group, = sizes
    weight += r * K
    z = 8
    weight_scale += 2 * (r * tl.cdiv(K, group))
    q_word = tl.load(weight + k, live, 0).to(tl.int32)
    g = k // group
    for h in tl.static_range(2):
        q = ((q_word >> 4 * h & 15) + 8 & 15).to(tl.int32)
        s = tl.load(weight_scale + g + h * tl.cdiv(K, group), live, 0).to(tl.float32)
        state = use(state, k, (q - z) * s, live, h)
    return state


@triton.jit
def _decode_xpu_int4pack(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    qweight, scales, qzeros = tensors
    group, = sizes
    qweight += n * (K // 8)
    qzeros += n
    scales += n
    q_word = tl.load(qweight + t, live, 0)
    g = t // (group // 8)
    z = (tl.load(qzeros + g * N, live, 0) & 15).to(tl.int32)
    s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(8):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 8 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_onnx_matmul_nbits(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    B, scales, zero_points = tensors
    group, = sizes
    B += n * (K // 2)
    if zero_points is None:
        z = 8
    else:
        zero_points += n * tl.cdiv(K, 2 * group)
    scales += n * (K // group)
    q_word = tl.load(B + t, live, 0)
    g = t // (group // 2)
    if zero_points is not None:
        z = (tl.load(zero_points + g // 2, live, 0) >> 4 * (g % 2) & 15).to(tl.int32)
    s = tl.load(scales + g, live, 0).to(tl.float32)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 2 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_openvino_u4(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    weight, zero_point, scale = tensors
    group, = sizes
    weight += n * (K // 2)
    zero_point += n * (K // (2 * group))
    scale += n * (K // group)
    q_word = tl.load(weight + t, live, 0)
    g = t // (group // 2)
    z = (tl.load(zero_point + g // 2, live, 0) >> 4 * (g % 2) & 15).to(tl.int32)
    s = tl.load(scale + g, live, 0).to(tl.float32)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 2 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_openvino_i4(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    weight, scale = tensors
    group, = sizes
    weight += n * (K // 2)
    z = 8
    scale += n * (K // group)
    q_word = tl.load(weight + t, live, 0).to(tl.int32)
    g = t // (group // 2)
    s = tl.load(scale + g, live, 0).to(tl.float32)
    for h in tl.static_range(2):
        q = ((q_word >> 4 * h & 15) + 8 & 15).to(tl.int32)
        state = use(state, 2 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_trt_llm(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weights_scaling_factor = tensors
    group, = sizes
    weight += 128 * (n // 4 * (K // 64))
    z = 8
    weights_scaling_factor += n
    q = (tl.load(weight + 128 * (k // 64) + 32 * (n % 4) + 16 * (k % 64 // 32) + 2 * (k % 64 % 8) + k % 64 // 16 % 2, live, 0)
        >> 4 * (k % 64 // 8 % 2) & 15).to(tl.int32)
    g = k // group
    s = tl.load(weights_scaling_factor + g * N, live, 0).to(tl.float32)
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    q += 16 * (n * tl.cdiv(K, 128))
    if z is None:
        z1 = 8
    else:
        z += n * tl.cdiv(K, group)
    s += n * tl.cdiv(K, group)
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    g = (128 * t + 32 * j) // group
    if z is not None:
        z1 = (tl.load(z + g, live, 0) & 15).to(tl.int32)
    s1 = tl.load(s + g, live, 0).to(tl.float32)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = (q_word >> 16 * i + 4 * h & 15).to(tl.int32)
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, (q1 - z1) * s1, inside)
    return state


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = s * (q - z)."""
    s, z = fields
    if BASE is not None:                             # else operands have no zero point any more
        sum += (-z - BASE) * ones
    return lanes.plus(total, sum * s)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gptq_v2": Storage(unpack_gptq_v2, pack_gptq_v2, Kernels(_decode_gptq_v2, rows="N", units="K/8", last="n", lanes=(8,),
                order=(0, 1, 2))),
        "gptq_v1": Storage(unpack_gptq_v1, pack_gptq_v1, Kernels(_decode_gptq_v1, rows="N", units="K/8", last="n", lanes=(8,),
                order=(0, 1, 2))),
        "awq": Storage(unpack_awq, pack_awq, Kernels(_decode_awq, rows="N/8", units="K", last="n", sums=8, lanes=(4, 2),
                order=(0, 2, 3, 1))),
        "awq_gemv": Storage(unpack_awq_gemv, pack_awq_gemv, Kernels(_decode_awq_gemv, rows="N", units="K/8", last="k", lanes=(8,),
                order=(0, 1, 2))),
        "pack_quantized": Storage(unpack_pack_quantized, pack_pack_quantized, Kernels(_decode_pack_quantized, rows="N",
                units="ceil(K/8)", last="k", lanes=(8,), order=(0, 1, 2))),
        "pack_quantized_0_8": Storage(unpack_pack_quantized_0_8, pack_pack_quantized_0_8, Kernels(_decode_pack_quantized_0_8,
                rows="N", units="ceil(K/8)", last="k", lanes=(8,), order=(0, 1, 2))),
        "marlin": Storage(unpack_marlin, pack_marlin, Kernels(_decode_marlin, rows="N", units="K", last="k")),
        "modelopt": Storage(unpack_modelopt, pack_modelopt, Kernels(_decode_modelopt, rows="N/2", units="K", last="k", sums=2,
                lanes=(2,), order=(0, 2, 1))),
        "xpu_int4pack": Storage(unpack_xpu_int4pack, pack_xpu_int4pack, Kernels(_decode_xpu_int4pack, rows="N", units="K/8",
                last="k", lanes=(8,), order=(0, 1, 2))),
        "torchao_plain_int32": Storage(unpack_torchao_plain_int32, pack_torchao_plain_int32, Kernels(_decode_xpu_int4pack,
                rows="N", units="K/8", last="k", lanes=(8,), order=(0, 1, 2))),
        "onnx_matmul_nbits": Storage(unpack_onnx_matmul_nbits, pack_onnx_matmul_nbits, Kernels(_decode_onnx_matmul_nbits,
                rows="N", units="K/2", last="k", lanes=(2,), order=(0, 1, 2))),
        "openvino_u4": Storage(unpack_openvino_u4, pack_openvino_u4, Kernels(_decode_openvino_u4, rows="N", units="K/2", last="k",
                lanes=(2,), order=(0, 1, 2))),
        "openvino_i4": Storage(unpack_openvino_i4, pack_openvino_i4, Kernels(_decode_openvino_i4, rows="N", units="K/2", last="k",
                lanes=(2,), order=(0, 1, 2))),
        "trt_llm": Storage(unpack_trt_llm, pack_trt_llm, Kernels(_decode_trt_llm, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=_scale_planar,
                    group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group", 4, default=8.0)), blocks=("group",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"point": 1, "zero": (0, 0), "exact": True}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s", "z")),
)
