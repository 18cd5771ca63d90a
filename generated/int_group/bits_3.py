"""int_group at bits = 3: integer codes with a zero point and a scale per group of columns.

    w = (q - z) * s

Built from the spec int_group (sha256 a7abeb406722a9b4) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import minmax
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float, as_type,
        cdiv, empty, integer, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, device
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import _scale_planar


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - z) * s */
#define BITS 3
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f};
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
    """Fields of qweight int32 [3*K/32, N]; qzeros int32 [ceil(K/group), 3*N/32]; scales scale_type [ceil(K/group), N]; g_idx
    int32 [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 12))
    q_words = integer(qweight_bytes.unflatten(-1, (4, 3)))
    qzeros_bytes = as_type(qzeros.unflatten(-1, (-1, 3)).permute(1, 0, 2), torch.uint8)
    z_words = integer(qzeros_bytes.unflatten(-1, (4, 3)))
    return {"g": g_idx, "q": torch.stack([q_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).flatten(1),
            "z": torch.stack([z_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).permute(0, 2, 3, 1).flatten(0, 2),
            "s": scales.t()}


def pack_gptq_v2(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v2."""
    q_split = q.unflatten(-1, (-1, 4, 8))
    q_packed = sum(q_split[..., i].to(torch.int32) << 3 * i for i in range(8))
    qweight_bytes = q_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    z_split = z.unflatten(0, (-1, 4, 8))
    z_packed = sum(z_split[:, :, i].to(torch.int32) << 3 * i for i in range(8)).permute(0, 2, 1)
    qzeros_bytes = z_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    return {"qweight": as_type(qweight_bytes, torch.int32).permute(1, 2, 0).contiguous().flatten(0, 1),
            "qzeros": as_type(qzeros_bytes, torch.int32).permute(1, 0, 2).contiguous().flatten(1), "scales": s.t().contiguous(),
            "g_idx": g}


def unpack_gptq_v1(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of qweight int32 [3*K/32, N]; qzeros int32 [ceil(K/group), 3*N/32]; scales scale_type [ceil(K/group), N]; g_idx
    int32 [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 12))
    q_words = integer(qweight_bytes.unflatten(-1, (4, 3)))
    qzeros_bytes = as_type(qzeros.unflatten(-1, (-1, 3)).permute(1, 0, 2), torch.uint8)
    z_words = integer(qzeros_bytes.unflatten(-1, (4, 3)))
    return {"g": g_idx, "q": torch.stack([q_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).flatten(1),
            "z": torch.stack([z_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).permute(0, 2, 3, 1).flatten(0,
                2) + 1 & 7,
            "s": scales.t()}


def pack_gptq_v1(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v1."""
    q_split = q.unflatten(-1, (-1, 4, 8))
    q_packed = sum(q_split[..., i].to(torch.int32) << 3 * i for i in range(8))
    qweight_bytes = q_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    z_split = (z - 1 & 7).unflatten(0, (-1, 4, 8))
    z_packed = sum(z_split[:, :, i].to(torch.int32) << 3 * i for i in range(8)).permute(0, 2, 1)
    qzeros_bytes = z_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    return {"qweight": as_type(qweight_bytes, torch.int32).permute(1, 2, 0).contiguous().flatten(0, 1),
            "qzeros": as_type(qzeros_bytes, torch.int32).permute(1, 0, 2).contiguous().flatten(1), "scales": s.t().contiguous(),
            "g_idx": g}


def unpack_gptq_p(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of qweight int32 [3*K/32, N]; qzeros int32 [ceil(K/group), 3*N/32]; scales scale_type [ceil(K/group), N]; g_idx
    int32 [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 12))
    q_low = spread(qweight_bytes[..., 0:8], 2).flatten(1)
    q_high = spread(qweight_bytes[..., 8:12], 1).flatten(1)
    qzeros_bytes = as_type(qzeros.unflatten(-1, (-1, 3)).permute(1, 0, 2), torch.uint8)
    z_low = spread(qzeros_bytes[..., 0:8], 2).permute(0, 2, 3, 1).flatten(0, 2)
    z_high = spread(qzeros_bytes[..., 8:12], 1).permute(0, 2, 3, 1).flatten(0, 2)
    return {"g": g_idx, "q": q_low | q_high << 2, "z": z_low | z_high << 2, "s": scales.t()}


def pack_gptq_p(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor | None]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_p."""
    qweight_bytes = empty((q.shape[0], q.shape[1] // 32, 12), torch.uint8, q.device)
    q_split = q.unflatten(-1, (-1, 8, 4))
    qweight_bytes[..., 0:8] = joined(q_split & 3, 2).squeeze(-1)
    q_split2 = q.unflatten(-1, (-1, 4, 8))
    qweight_bytes[..., 8:12] = joined(q_split2 >> 2, 1).squeeze(-1)
    qzeros_bytes = empty((z.shape[0] // 32, z.shape[1], 12), torch.uint8, z.device)
    z_split = z.unflatten(0, (-1, 8, 4))
    qzeros_bytes[..., 0:8] = sum((z_split[:, :, i] & 3) << 2 * i for i in range(4)).permute(0, 2, 1)
    z_split2 = z.unflatten(0, (-1, 4, 8))
    qzeros_bytes[..., 8:12] = sum((z_split2[:, :, i] >> 2) << 1 * i for i in range(8)).permute(0, 2, 1)
    return {"qweight": as_type(qweight_bytes, torch.int32).permute(1, 2, 0).contiguous().flatten(0, 1),
            "qzeros": as_type(qzeros_bytes, torch.int32).permute(1, 0, 2).contiguous().flatten(1), "scales": s.t().contiguous(),
            "g_idx": g}


def unpack_awq_contiguous(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, N: int) -> dict[str, Tensor]:
    """Fields of qweight int32 [K, ceil(3*N/32)]; qzeros int32 [K/group, ceil(3*N/32)]; scales scale_type [K/group, N]."""
    qweight_bytes = as_type(pad(qweight, (0, -qweight.shape[1] % 3)).unflatten(-1, (-1, 3)).permute(1, 0, 2), torch.uint8)
    q_words = integer(qweight_bytes.unflatten(-1, (4, 3)))
    qzeros_bytes = as_type(pad(qzeros, (0, -qzeros.shape[1] % 3)).unflatten(-1, (-1, 3)).permute(1, 0, 2), torch.uint8)
    z_words = integer(qzeros_bytes.unflatten(-1, (4, 3)))
    return {
        "q": torch.stack([q_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).permute(0, 2, 3, 1).flatten(0, 2)[:N, :],
        "z": torch.stack([z_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).permute(0, 2, 3, 1).flatten(0, 2)[:N, :],
        "s": scales.t(),
    }


def pack_awq_contiguous(q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, qzeros, scales of the fields; the inverse of unpack_awq_contiguous."""
    q_split = pad(q, (0, 0, 0, -q.shape[0] % 32)).unflatten(0, (-1, 4, 8))
    q_packed = sum(q_split[:, :, i].to(torch.int32) << 3 * i for i in range(8)).permute(0, 2, 1)
    qweight_bytes = q_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    z_split = pad(z, (0, 0, 0, -z.shape[0] % 32)).unflatten(0, (-1, 4, 8))
    z_packed = sum(z_split[:, :, i].to(torch.int32) << 3 * i for i in range(8)).permute(0, 2, 1)
    qzeros_bytes = z_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    return {
        "qweight": as_type(qweight_bytes, torch.int32).permute(1, 0, 2).contiguous().flatten(1)[:,
            :cdiv(3 * q.shape[0], 32)].contiguous(),
        "qzeros": as_type(qzeros_bytes, torch.int32).permute(1, 0, 2).contiguous().flatten(1)[:,
            :cdiv(3 * z.shape[0], 32)].contiguous(),
        "scales": s.t().contiguous(),
    }


def unpack_pack_quantized(weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None,
        weight_g_idx: Tensor | None, *, N: int, K: int) -> dict[str, Tensor | None]:
    """Fields of weight_packed int32 [N, ceil(3*K/32)]; weight_scale scale_type [N, ceil(K/group)]; weight_zero_point int32
    [ceil(3*N/32), ceil(K/group)]; weight_g_idx int32 [K].
    """
    weight_packed_bytes = as_type(pad(weight_packed, (0, -weight_packed.shape[1] % 3)), torch.uint8).unflatten(-1, (-1, 12))
    q_words = integer(weight_packed_bytes.unflatten(-1, (4, 3)))
    fields = {"g": weight_g_idx, "q": torch.stack([q_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).flatten(1)[:, :K],
            "s": weight_scale}
    if weight_zero_point is not None:
        weight_zero_point_bytes = as_type(pad(weight_zero_point, (0, 0, 0, -weight_zero_point.shape[0] % 3)).unflatten(0,
            (-1, 3)).permute(0, 2, 1), torch.uint8)
        z_words = integer(weight_zero_point_bytes.unflatten(-1, (4, 3)))
        fields["z"] = torch.stack([z_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).permute(0, 2, 3, 1).flatten(0,
            2)[:N, :]
    return fields


def pack_pack_quantized(g: Tensor | None, q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """weight_packed, weight_scale, weight_zero_point, weight_g_idx of the fields; the inverse of unpack_pack_quantized."""
    q_split = pad(q, (0, -q.shape[1] % 32, 0, 0)).unflatten(-1, (-1, 4, 8))
    q_packed = sum(q_split[..., i].to(torch.int32) << 3 * i for i in range(8))
    weight_packed_bytes = q_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    tensors = {"weight_packed": as_type(weight_packed_bytes, torch.int32).flatten(1)[:, :cdiv(3 * q.shape[1], 32)].contiguous(),
            "weight_scale": s, "weight_g_idx": g}
    if z is not None:
        z_split = pad(z, (0, 0, 0, -z.shape[0] % 32)).unflatten(0, (-1, 4, 8))
        z_packed = sum(z_split[:, :, i].to(torch.int32) << 3 * i for i in range(8)).permute(0, 2, 1)
        weight_zero_point_bytes = z_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
        tensors["weight_zero_point"] = as_type(weight_zero_point_bytes, torch.int32).permute(0, 2, 1).contiguous().flatten(0,
            1)[:cdiv(3 * z.shape[0], 32)].contiguous()
    return tensors


def unpack_pack_quantized_0_17(weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None,
        weight_g_idx: Tensor | None, *, N: int, K: int) -> dict[str, Tensor | None]:
    """Fields of weight_packed int32 [N, ceil(K/10)]; weight_scale scale_type [N, ceil(K/group)]; weight_zero_point int32
    [ceil(N/10), ceil(K/group)]; weight_g_idx int32 [K].
    """
    weight_packed_bytes = as_type(weight_packed, torch.uint8).unflatten(-1, (-1, 4))
    q_words = integer(weight_packed_bytes)
    fields = {"g": weight_g_idx,
            "q": torch.stack([q_words >> 3 * i & 7 for i in range(10)], -1).to(torch.uint8).flatten(1)[:, :K], "s": weight_scale}
    if weight_zero_point is not None:
        weight_zero_point_bytes = as_type(weight_zero_point, torch.uint8).unflatten(-1, (-1, 4))
        z_words = integer(weight_zero_point_bytes)
        fields["z"] = torch.stack([z_words >> 3 * i & 7 for i in range(10)], -1).to(torch.uint8).permute(0, 2, 1).flatten(0,
            1)[:N, :]
    return fields


def pack_pack_quantized_0_17(g: Tensor | None, q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor | None]:
    """weight_packed, weight_scale, weight_zero_point, weight_g_idx of the fields; the inverse of unpack_pack_quantized_0_17."""
    weight_packed_bytes = torch.zeros(q.shape[0], cdiv(q.shape[1], 10), 4, dtype=torch.uint8, device=q.device)
    q_split = pad(q, (0, -q.shape[1] % 10, 0, 0)).unflatten(-1, (-1, 10))
    q_packed = sum(q_split[..., i].to(torch.int64) << 3 * i for i in range(10))
    weight_packed_bytes[...] = q_packed.unsqueeze(-1).view(torch.uint8)[..., :4]
    tensors = {"weight_packed": as_type(weight_packed_bytes, torch.int32).squeeze(-1), "weight_scale": s, "weight_g_idx": g}
    if z is not None:
        weight_zero_point_bytes = torch.zeros(cdiv(z.shape[0], 10), z.shape[1], 4, dtype=torch.uint8, device=z.device)
        z_split = pad(z, (0, 0, 0, -z.shape[0] % 10)).unflatten(0, (-1, 10))
        z_packed = sum(z_split[:, i].to(torch.int64) << 3 * i for i in range(10))
        weight_zero_point_bytes[...] = z_packed.unsqueeze(-1).view(torch.uint8)[..., :4]
        tensors["weight_zero_point"] = as_type(weight_zero_point_bytes, torch.int32).squeeze(-1)
    return tensors


def unpack_planar(q_0: Tensor, q_1: Tensor, s: Tensor, z: Tensor | None, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/256)]; q_1 int32 [N, 16*ceil(K/512)]; s scale_type [N, ceil(K/group)]; z uint8 [N,
    ceil(K/group)].
    """
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0, 1,
        2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 6 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 3
        & 1, q_bytes2 >> 5 & 1, q_bytes2 >> 7], -5).unflatten(2, (2, 2, 2)).permute(0, 1, 2, 3, 6, 8, 4, 5, 7).flatten(1)[:, :K]
    fields = {"q": q_low | q_high << 2, "s": s}
    if z is not None:
        fields["z"] = z & 7
    return fields


def pack_planar(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, 0, :, :, 0] & 3) | (q_split[:, :, 0, :, :, 1] & 3) << 2 | (q_split[:, :, 1, :, :, 0] & 3) << 4
        | (q_split[:, :, 1, :, :, 1] & 3) << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 2, 2, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, 0, :, :, 0] >> 2) | (q_split2[:, :, 0, 0, :, :, 1] >> 2) << 2
        | (q_split2[:, :, 0, 1, :, :, 0] >> 2) << 4 | (q_split2[:, :, 0, 1, :, :, 1] >> 2) << 6
        | (q_split2[:, :, 1, 0, :, :, 0] >> 2) << 1 | (q_split2[:, :, 1, 0, :, :, 1] >> 2) << 3
        | (q_split2[:, :, 1, 1, :, :, 0] >> 2) << 5 | (q_split2[:, :, 1, 1, :, :, 1] >> 2)
        << 7).permute(0, 1, 4, 2, 5, 3).flatten(2)
    tensors = {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "s": s}
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
    z = 4 if z is None else z.view(torch.int8).unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    return torch.mul(as_float(q - z, out), s, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block, zero included, / (2^bits - 1); zero = the code of 0.
    options: by, symmetric, rounds, span.
    """
    q, z, s = minmax(weight, code="u3", zero="u3", scale=scale_type, rows=1, columns=group, axes=2, **options)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gptq_v2(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 32 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += 3 * (n // 32)
    scales += n
    q_0 = tl.load(qweight + 3 * (t * N), live, 0)
    q_1 = tl.load(qweight + 3 * (t * N) + N, live, 0)
    q_2 = tl.load(qweight + 3 * (t * N) + 2 * N, live, 0)
    q_words = (q_0, q_1, q_2)
    if g_idx is None:
        g = t // (group // 32)
        z = device.stream(qzeros + 3 * (g * (N // 32)), 1, 3 * (n % 32), 3, 32, live).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(32):
        q = device.bits(q_words, 3 * h, 3).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 32 * t + h, live, 0)
            z = device.stream(qzeros + 3 * (g * (N // 32)), 1, 3 * (n % 32), 3, 32, live).to(tl.int32)
            s = tl.load(scales + g * N, live, 0).to(tl.float32)
        state = use(state, 32 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_gptq_v1(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 32 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += 3 * (n // 32)
    scales += n
    q_0 = tl.load(qweight + 3 * (t * N), live, 0)
    q_1 = tl.load(qweight + 3 * (t * N) + N, live, 0)
    q_2 = tl.load(qweight + 3 * (t * N) + 2 * N, live, 0)
    q_words = (q_0, q_1, q_2)
    if g_idx is None:
        g = t // (group // 32)
        z = (device.stream(qzeros + 3 * (g * (N // 32)), 1, 3 * (n % 32), 3, 32, live) + 1 & 7).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(32):
        q = device.bits(q_words, 3 * h, 3).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 32 * t + h, live, 0)
            z = (device.stream(qzeros + 3 * (g * (N // 32)), 1, 3 * (n % 32), 3, 32, live) + 1 & 7).to(tl.int32)
            s = tl.load(scales + g * N, live, 0).to(tl.float32)
        state = use(state, 32 * t + h, (q - z) * s, live)
    return state


@triton.jit
def _decode_gptq_p(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 32 weights of unit t of row n, in float32."""
    qweight, qzeros, scales, g_idx = tensors
    group, = sizes
    qweight += n
    qzeros += 3 * (n // 32)
    scales += n
    q_word1 = tl.load(qweight + 3 * (t * N) + 2 * N, live, 0)
    if g_idx is None:
        g = t // (group // 32)
        z_low = tl.load(qzeros + 3 * (g * (N // 32)) + n % 32 // 16, live, 0) >> 2 * (n % 32 % 16) & 3
        z_high = tl.load(qzeros + 3 * (g * (N // 32)) + 2, live, 0) >> n % 32 & 1
        z = (z_low | z_high << 2).to(tl.int32)
        s = tl.load(scales + g * N, live, 0).to(tl.float32)
    for h in tl.static_range(2):
        q_word = tl.load(qweight + 3 * (t * N) + h * N, live, 0)
        for i in tl.static_range(16):
            q_low = q_word >> 2 * i & 3
            q_high = q_word1 >> 16 * h + i & 1
            q = (q_low | q_high << 2).to(tl.int32)
            if g_idx is not None:
                g = tl.load(g_idx + 32 * t + 16 * h + i, live, 0)
                z_low = tl.load(qzeros + 3 * (g * (N // 32)) + n % 32 // 16, live, 0) >> 2 * (n % 32 % 16) & 3
                z_high = tl.load(qzeros + 3 * (g * (N // 32)) + 2, live, 0) >> n % 32 & 1
                z = (z_low | z_high << 2).to(tl.int32)
                s = tl.load(scales + g * N, live, 0).to(tl.float32)
            state = use(state, 32 * t + 16 * h + i, (q - z) * s, live)
    return state


@triton.jit
def _decode_awq_contiguous(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qweight, qzeros, scales = tensors
    group, = sizes
    qweight += 3 * (n // 32)
    qzeros += 3 * (n // 32)
    scales += n
    q = device.stream(qweight + k * tl.cdiv(3 * N, 32), 1, 3 * (n % 32), 3, 32, live).to(tl.int32)
    g = k // group
    z = device.stream(qzeros + g * tl.cdiv(3 * N, 32), 1, 3 * (n % 32), 3, 32, live).to(tl.int32)
    s = tl.load(scales + g * N, live, 0).to(tl.float32)
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_pack_quantized(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 32 weights of unit t of row n, in float32."""
    weight_packed, weight_scale, weight_zero_point, weight_g_idx = tensors
    group, = sizes
    weight_packed += n * tl.cdiv(3 * K, 32)
    if weight_zero_point is None:
        z = 4
    else:
        weight_zero_point += 3 * (n // 32 * tl.cdiv(K, group))
    weight_scale += n * tl.cdiv(K, group)
    q_0 = tl.load(weight_packed + 3 * t, live, 0)
    q_1 = tl.load(weight_packed + 3 * t + 1, live & (3 * t + 1 < tl.cdiv(3 * K, 32)), 0)
    q_2 = tl.load(weight_packed + 3 * t + 2, live & (3 * t + 2 < tl.cdiv(3 * K, 32)), 0)
    q_words = (q_0, q_1, q_2)
    if weight_g_idx is None:
        g = 32 * t // group
    if weight_zero_point is not None:
        if weight_g_idx is None:
            z = device.stream(weight_zero_point + g, tl.cdiv(K, group), 3 * (n % 32), 3, 32, live).to(tl.int32)
    if weight_g_idx is None:
        s = tl.load(weight_scale + g, live, 0).to(tl.float32)
    for h in tl.static_range(32):
        inside = live & (32 * t + h < K)
        q = device.bits(q_words, 3 * h, 3).to(tl.int32)
        if weight_g_idx is not None:
            g = tl.load(weight_g_idx + 32 * t + h, inside, 0)
        if weight_zero_point is not None:
            if weight_g_idx is not None:
                z = device.stream(weight_zero_point + g, tl.cdiv(K, group), 3 * (n % 32), 3, 32, inside).to(tl.int32)
        if weight_g_idx is not None:
            s = tl.load(weight_scale + g, inside, 0).to(tl.float32)
        state = use(state, 32 * t + h, (q - z) * s, inside)
    return state


@triton.jit
def _decode_pack_quantized_0_17(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 10 weights of unit t of row n, in float32."""
    weight_packed, weight_scale, weight_zero_point, weight_g_idx = tensors
    group, = sizes
    weight_packed += n * tl.cdiv(K, 10)
    if weight_zero_point is None:
        z = 4
    else:
        weight_zero_point += n // 10 * tl.cdiv(K, group)
    weight_scale += n * tl.cdiv(K, group)
    q_word = tl.load(weight_packed + t, live, 0)
    for h in tl.static_range(10):
        inside = live & (10 * t + h < K)
        q = (q_word >> 3 * h & 7).to(tl.int32)
        if weight_g_idx is None:
            g = (10 * t + h) // group
        if weight_zero_point is not None:
            if weight_g_idx is None:
                z = (tl.load(weight_zero_point + g, inside, 0) >> 3 * (n % 10) & 7).to(tl.int32)
        if weight_g_idx is not None:
            g = tl.load(weight_g_idx + 10 * t + h, inside, 0)
        if weight_zero_point is not None:
            if weight_g_idx is not None:
                z = (tl.load(weight_zero_point + g, inside, 0) >> 3 * (n % 10) & 7).to(tl.int32)
        if weight_g_idx is None:
            s = tl.load(weight_scale + g, inside, 0).to(tl.float32)
        else:
            s = tl.load(weight_scale + g, inside, 0).to(tl.float32)
        state = use(state, 10 * t + h, (q - z) * s, inside)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, s, z = tensors
    group, = sizes
    q_0 += 16 * (n * tl.cdiv(K, 256))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    if z is None:
        z1 = 4
    else:
        z += n * tl.cdiv(K, group)
    s += n * tl.cdiv(K, group)
    q_low = tl.load(q_0 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live,
        0) >> 16 * (k % 256 % 2) + 8 * (k % 256 // 16 % 2) + 4 * (k % 256 // 128) + 2 * (k % 256 // 8 % 2) & 3
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live,
        0) >> 16 * (k % 512 % 2) + 8 * (k % 512 // 16 % 2) + 4 * (k % 512 // 128 % 2) + 2 * (k % 512 // 8 % 2) + k % 512 // 256 & 1
    q = (q_low | q_high << 2).to(tl.int32)
    g = k // group
    if z is not None:
        z1 = (tl.load(z + g, live, 0) & 7).to(tl.int32)
    s1 = tl.load(s + g, live, 0).to(tl.float32)
    return use(state, k, (q - z1) * s1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gptq_v2": Storage(unpack_gptq_v2, pack_gptq_v2, Kernels(_decode_gptq_v2, rows="N", units="K/32", last="n", lanes=(32,),
                order=(0, 1, 2))),
        "gptq_v1": Storage(unpack_gptq_v1, pack_gptq_v1, Kernels(_decode_gptq_v1, rows="N", units="K/32", last="n", lanes=(32,),
                order=(0, 1, 2))),
        "gptq_p": Storage(unpack_gptq_p, pack_gptq_p, Kernels(_decode_gptq_p, rows="N", units="K/32", last="n", lanes=(2, 16),
                order=(0, 1, 2, 3))),
        "awq_contiguous": Storage(unpack_awq_contiguous, pack_awq_contiguous, Kernels(_decode_awq_contiguous, rows="N", units="K",
                last="k")),
        "pack_quantized": Storage(unpack_pack_quantized, pack_pack_quantized, Kernels(_decode_pack_quantized, rows="N",
                units="ceil(K/32)", last="k", lanes=(32,), order=(0, 1, 2))),
        "pack_quantized_0_17": Storage(unpack_pack_quantized_0_17, pack_pack_quantized_0_17, Kernels(_decode_pack_quantized_0_17,
                rows="N", units="ceil(K/10)", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u3, words=bitplanes.words_3, width=2, bits=3),
                    Sums(scale=_scale_planar,
                    group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group", 3, default=4.0)), blocks=("group",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"point": 1, "zero": (0, 0), "exact": True, "spans": (4, 4)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 3, ("s", "z")),
)
