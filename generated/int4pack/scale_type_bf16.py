"""int4pack at scale_type = bf16: torch's int4pack, 4-bit codes with a scale and a zero in floats per group.

    w = (q - 8) * s + z

Built from the spec int4pack (sha256 4c5af078cde936ea) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import float_middle
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float, as_type,
        cdiv, empty, joined, pad, spread, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - 8) * s + z */
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
    *offset = -8.0f * s + z;
}
"""


def unpack_tinygemm(qdata: Tensor, scale_and_zero: Tensor) -> dict[str, Tensor]:
    """Fields of qdata int32 [N/8, K/128, 128]; scale_and_zero scale_type [K/group, N, 2]."""
    r = as_type(qdata, torch.uint8)
    q_bytes = r.unflatten(-1, (8, 4, 4, 2, 2))
    return {"z": scale_and_zero[..., 1].t(), "s": scale_and_zero[..., 0].t(),
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 2, 1, 5, 7, 3, 4, 6).flatten(0, 1).flatten(1)}


def pack_tinygemm(z: Tensor, s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale_and_zero of the fields; the inverse of unpack_tinygemm."""
    q_split = q.unflatten(-1, (-1, 4, 2, 2, 4, 2)).unflatten(0, (-1, 8))
    r = (q_split[:, :, :, :, :, 0] | q_split[:, :, :, :, :, 1] << 4).permute(0, 2, 1, 5, 3, 6, 4).flatten(2)
    return {"qdata": as_type(r, torch.int32), "scale_and_zero": torch.stack([s.t(), z.t()], -1)}


def unpack_tile_packed(qdata: Tensor, scale_and_zero: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
    """Fields of qdata int32 [ceil(N/8), 8*ceil(K/1024), 128]; scale_and_zero scale_type [1024*ceil(K/1024)/group, 8*ceil(N/8),
    2].
    """
    qdata_bytes = as_type(qdata, torch.uint8)
    q_bytes = qdata_bytes.unflatten(-1, (8, 4, 4, 2, 2))
    scale_and_zero_bytes = as_type(scale_and_zero.permute(1, 0, 2), torch.uint8)
    return {"z": as_type(scale_and_zero_bytes, scale_and_zero.dtype)[..., 1][:N, :cdiv(K, group)],
            "s": as_type(scale_and_zero_bytes, scale_and_zero.dtype)[..., 0][:N, :cdiv(K, group)],
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 2, 1, 5, 7, 3, 4, 6).flatten(0, 1).flatten(1)[:N, :K]}


def pack_tile_packed(z: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
    """qdata, scale_and_zero of the fields; the inverse of unpack_tile_packed."""
    q_split = pad(q, (0, 1024 * cdiv(K, 1024) - K, 0, 8 * cdiv(N, 8) - N)).unflatten(-1, (-1, 4, 2, 2, 4, 2)).unflatten(0,
        (-1, 8))
    qdata_bytes = (q_split[:, :, :, :, :, 0] | q_split[:, :, :, :, :, 1] << 4).permute(0, 2, 1, 5, 3, 6, 4).flatten(2)
    scale_and_zero_bytes = empty((8 * cdiv(N, 8), 1024 * cdiv(K, 1024) // group, 4), torch.uint8, s.device)
    scale_and_zero_bytes[...,
        0:2] = as_type(pad(s, (0, 1024 * cdiv(K, 1024) // group - cdiv(K, group), 0, 8 * cdiv(N, 8) - N)).unsqueeze(-1),
        torch.uint8)
    scale_and_zero_bytes[...,
        2:4] = as_type(pad(z, (0, 1024 * cdiv(K, 1024) // group - cdiv(K, group), 0, 8 * cdiv(N, 8) - N)).unsqueeze(-1),
        torch.uint8)
    return {"qdata": as_type(qdata_bytes, torch.int32),
            "scale_and_zero": as_type(scale_and_zero_bytes, s.dtype).permute(1, 0, 2).contiguous()}


def unpack_torchao(qdata: Tensor, scale: Tensor, zero_point: Tensor) -> dict[str, Tensor]:
    """Fields of qdata int8 [N, K/2]; scale scale_type [K/group, N]; zero_point scale_type [K/group, N]."""
    r = qdata.view(torch.uint8)
    return {"z": zero_point.t(), "s": scale.t(), "q": spread(r, 4).flatten(1) + 8 & 15}


def pack_torchao(z: Tensor, s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale, zero_point of the fields; the inverse of unpack_torchao."""
    q_split = (q - 8 & 15).unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"qdata": as_type(r, torch.int8), "scale": s.t().contiguous(), "zero_point": z.t().contiguous()}


def unpack_cpu_avx512(weight: Tensor, scales_and_zeros: Tensor, *, N: int) -> dict[str, Tensor]:
    """Fields of weight uint8 [ceil(N/64), K, 32]; scales_and_zeros scale_type [K/group, 64*ceil(N/64), 2]."""
    scales_and_zeros_bytes = as_type(scales_and_zeros.permute(1, 0, 2), torch.uint8)
    return {"z": as_type(scales_and_zeros_bytes, scales_and_zeros.dtype)[..., 1][:N, :],
            "s": as_type(scales_and_zeros_bytes, scales_and_zeros.dtype)[..., 0][:N, :],
            "q": torch.stack([weight & 15, weight >> 4], -2).permute(0, 2, 3, 1).flatten(0, 2)[:N, :]}


def pack_cpu_avx512(z: Tensor, s: Tensor, q: Tensor, *, N: int) -> dict[str, Tensor]:
    """weight, scales_and_zeros of the fields; the inverse of unpack_cpu_avx512."""
    q_split = pad(q, (0, 0, 0, -q.shape[0] % 64)).unflatten(0, (-1, 2, 32))
    weight_bytes = (q_split[:, 0] | q_split[:, 1] << 4).permute(0, 2, 1)
    scales_and_zeros_bytes = empty((64 * cdiv(N, 64), s.shape[1], 4), torch.uint8, s.device)
    scales_and_zeros_bytes[..., 0:2] = as_type(pad(s, (0, 0, 0, 64 * cdiv(N, 64) - N)).unsqueeze(-1), torch.uint8)
    scales_and_zeros_bytes[..., 2:4] = as_type(pad(z, (0, 0, 0, 64 * cdiv(N, 64) - N)).unsqueeze(-1), torch.uint8)
    return {"weight": weight_bytes, "scales_and_zeros": as_type(scales_and_zeros_bytes, s.dtype).permute(1, 0, 2).contiguous()}


def unpack_cpu_avx2(weight: Tensor, scales_and_zeros: Tensor, *, N: int) -> dict[str, Tensor]:
    """Fields of weight uint8 [ceil(N/32), K, 16]; scales_and_zeros scale_type [K/group, 32*ceil(N/32), 2]."""
    scales_and_zeros_bytes = as_type(scales_and_zeros.permute(1, 0, 2), torch.uint8)
    return {"z": as_type(scales_and_zeros_bytes, scales_and_zeros.dtype)[..., 1][:N, :],
            "s": as_type(scales_and_zeros_bytes, scales_and_zeros.dtype)[..., 0][:N, :],
            "q": torch.stack([weight & 15, weight >> 4], -2).permute(0, 2, 3, 1).flatten(0, 2)[:N, :]}


def pack_cpu_avx2(z: Tensor, s: Tensor, q: Tensor, *, N: int) -> dict[str, Tensor]:
    """weight, scales_and_zeros of the fields; the inverse of unpack_cpu_avx2."""
    q_split = pad(q, (0, 0, 0, -q.shape[0] % 32)).unflatten(0, (-1, 2, 16))
    weight_bytes = (q_split[:, 0] | q_split[:, 1] << 4).permute(0, 2, 1)
    scales_and_zeros_bytes = empty((32 * cdiv(N, 32), s.shape[1], 4), torch.uint8, s.device)
    scales_and_zeros_bytes[..., 0:2] = as_type(pad(s, (0, 0, 0, 32 * cdiv(N, 32) - N)).unsqueeze(-1), torch.uint8)
    scales_and_zeros_bytes[..., 2:4] = as_type(pad(z, (0, 0, 0, 32 * cdiv(N, 32) - N)).unsqueeze(-1), torch.uint8)
    return {"weight": weight_bytes, "scales_and_zeros": as_type(scales_and_zeros_bytes, s.dtype).permute(1, 0, 2).contiguous()}


def unpack_cpu_scalar(weight: Tensor, scales_and_zeros: Tensor, *, N: int) -> dict[str, Tensor]:
    """Fields of weight uint8 [ceil(N/32), K, 16]; scales_and_zeros scale_type [K/group, 32*ceil(N/32), 2]."""
    scales_and_zeros_bytes = as_type(scales_and_zeros.permute(1, 0, 2), torch.uint8)
    return {"z": as_type(scales_and_zeros_bytes, scales_and_zeros.dtype)[..., 1][:N, :],
            "s": as_type(scales_and_zeros_bytes, scales_and_zeros.dtype)[..., 0][:N, :],
            "q": spread(weight, 4).permute(0, 2, 3, 1).flatten(0, 2)[:N, :]}


def pack_cpu_scalar(z: Tensor, s: Tensor, q: Tensor, *, N: int) -> dict[str, Tensor]:
    """weight, scales_and_zeros of the fields; the inverse of unpack_cpu_scalar."""
    q_split = pad(q, (0, 0, 0, -q.shape[0] % 32)).unflatten(0, (-1, 16, 2))
    weight_bytes = (q_split[:, :, 0] | q_split[:, :, 1] << 4).permute(0, 2, 1)
    scales_and_zeros_bytes = empty((32 * cdiv(N, 32), s.shape[1], 4), torch.uint8, s.device)
    scales_and_zeros_bytes[..., 0:2] = as_type(pad(s, (0, 0, 0, 32 * cdiv(N, 32) - N)).unsqueeze(-1), torch.uint8)
    scales_and_zeros_bytes[..., 2:4] = as_type(pad(z, (0, 0, 0, 32 * cdiv(N, 32) - N)).unsqueeze(-1), torch.uint8)
    return {"weight": weight_bytes, "scales_and_zeros": as_type(scales_and_zeros_bytes, s.dtype).permute(1, 0, 2).contiguous()}


def unpack_cpu_rest(weight: Tensor, scales_and_zeros: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [K, N/2]; scales_and_zeros scale_type [K/group, N, 2]."""
    r = weight.t()
    return {"z": scales_and_zeros[..., 1].t(), "s": scales_and_zeros[..., 0].t(),
            "q": spread(r, 4).permute(0, 2, 1).flatten(0, 1)}


def pack_cpu_rest(z: Tensor, s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales_and_zeros of the fields; the inverse of unpack_cpu_rest."""
    q_split = q.unflatten(0, (-1, 2))
    r = q_split[:, 0] | q_split[:, 1] << 4
    return {"weight": r.t().contiguous(), "scales_and_zeros": torch.stack([s.t(), z.t()], -1)}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s scale_type [N, ceil(K/group)]; z scale_type [N, ceil(K/group)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"z": z, "s": s, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(z: Tensor, s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "z": z}


def decode(z: Tensor, s: Tensor, q: Tensor, g: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - 8) * s + z.  z [N, ceil(K/group)], s [N, ceil(K/group)],
    q [N, K], g [K].
    """
    if g is not None:
        z, s = z[:, g], s[:, g]
    out = out if out is None else out.unflatten(1, (z.shape[1], -1))
    q = q.view(torch.int8).unflatten(1, (z.shape[1], -1))
    z = z.float().unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    space = workspace(out)
    w = torch.mul(as_float(q - 8, out), s, out=space)
    return torch.add(w, z, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = least + offset * scale; codes by
    both, as stored.
    """
    q, z, s = float_middle(weight, code="u4", zero=scale_type, scale=scale_type, rows=1, columns=group, axes=2, offset=8)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_tinygemm(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale_and_zero = tensors
    group, = sizes
    scale_and_zero += 2 * n
    qdata += 128 * (n // 8 * (K // 128))
    g = k // group
    z = tl.load(scale_and_zero + 2 * (g * N) + 1, live, 0).to(tl.float32)
    s = tl.load(scale_and_zero + 2 * (g * N), live, 0).to(tl.float32)
    q = (tl.load(qdata + 128 * (k // 128) + 16 * (n % 8) + 4 * (k % 128 // 2 % 4) + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2)
        + 4 * (k % 128 // 8 % 4) & 15).to(tl.int32)
    return use(state, k, (q - 8) * s + z, live)


@triton.jit
def _decode_tile_packed(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale_and_zero = tensors
    group, = sizes
    scale_and_zero += 2 * n
    qdata += 1024 * (n // 8 * tl.cdiv(K, 1024))
    g = k // group
    z = tl.load(scale_and_zero + 16 * (g * tl.cdiv(N, 8)) + 1, live, 0).to(tl.float32)
    s = tl.load(scale_and_zero + 16 * (g * tl.cdiv(N, 8)), live, 0).to(tl.float32)
    q = (tl.load(qdata + 128 * (k // 128) + 16 * (n % 8) + 4 * (k % 128 // 2 % 4) + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2)
        + 4 * (k % 128 // 8 % 4) & 15).to(tl.int32)
    return use(state, k, (q - 8) * s + z, live)


@triton.jit
def _decode_torchao(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    qdata, scale, zero_point = tensors
    group, = sizes
    zero_point += n
    scale += n
    qdata += n * (K // 2)
    g = t // (group // 2)
    z = tl.load(zero_point + g * N, live, 0).to(tl.float32)
    s = tl.load(scale + g * N, live, 0).to(tl.float32)
    q_word = tl.load(qdata + t, live, 0).to(tl.int32)
    for h in tl.static_range(2):
        q = ((q_word >> 4 * h & 15) + 8 & 15).to(tl.int32)
        state = use(state, 2 * t + h, (q - 8) * s + z, live)
    return state


@triton.jit
def _decode_cpu_avx512(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, scales_and_zeros = tensors
    group, = sizes
    scales_and_zeros += 2 * n
    weight += 32 * (n // 64 * K)
    g = k // group
    z = tl.load(scales_and_zeros + 128 * (g * tl.cdiv(N, 64)) + 1, live, 0).to(tl.float32)
    s = tl.load(scales_and_zeros + 128 * (g * tl.cdiv(N, 64)), live, 0).to(tl.float32)
    q = (tl.load(weight + 32 * k + n % 64 % 32, live, 0) >> 4 * (n % 64 // 32) & 15).to(tl.int32)
    return use(state, k, (q - 8) * s + z, live)


@triton.jit
def _decode_cpu_avx2(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, scales_and_zeros = tensors
    group, = sizes
    scales_and_zeros += 2 * n
    weight += 16 * (n // 32 * K)
    g = k // group
    z = tl.load(scales_and_zeros + 64 * (g * tl.cdiv(N, 32)) + 1, live, 0).to(tl.float32)
    s = tl.load(scales_and_zeros + 64 * (g * tl.cdiv(N, 32)), live, 0).to(tl.float32)
    q = (tl.load(weight + 16 * k + n % 32 % 16, live, 0) >> 4 * (n % 32 // 16) & 15).to(tl.int32)
    return use(state, k, (q - 8) * s + z, live)


@triton.jit
def _decode_cpu_scalar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, scales_and_zeros = tensors
    group, = sizes
    scales_and_zeros += 2 * n
    weight += 16 * (n // 32 * K)
    g = k // group
    z = tl.load(scales_and_zeros + 64 * (g * tl.cdiv(N, 32)) + 1, live, 0).to(tl.float32)
    s = tl.load(scales_and_zeros + 64 * (g * tl.cdiv(N, 32)), live, 0).to(tl.float32)
    q = (tl.load(weight + 16 * k + n % 32 // 2, live, 0) >> 4 * (n % 32 % 2) & 15).to(tl.int32)
    return use(state, k, (q - 8) * s + z, live)


@triton.jit
def _decode_cpu_rest(tensors, r, k, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit k of row r, in float32."""
    weight, scales_and_zeros = tensors
    group, = sizes
    scales_and_zeros += 4 * r
    weight += r
    g = k // group
    q_word = tl.load(weight + k * (N // 2), live, 0)
    for h in tl.static_range(2):
        z = tl.load(scales_and_zeros + 2 * h + 2 * (g * N) + 1, live, 0).to(tl.float32)
        s = tl.load(scales_and_zeros + 2 * h + 2 * (g * N), live, 0).to(tl.float32)
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, k, (q - 8) * s + z, live, h)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    z += n * tl.cdiv(K, group)
    s += n * tl.cdiv(K, group)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    g = (4 * t + j) // (group // 32)
    z1 = tl.load(z + g, live, 0).to(tl.float32)
    s1 = tl.load(s + g, live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = (q_word >> 16 * i + 4 * h & 15).to(tl.int32)
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, (q1 - 8) * s1 + z1, inside)
    return state


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = s * q - 8.0 * s + z."""
    s, z = fields
    total = lanes.plus(total, sum * s)
    return total + ones * lanes.offset(-8.0 * s + z, s, BASE)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "tinygemm": Storage(unpack_tinygemm, pack_tinygemm, Kernels(_decode_tinygemm, rows="N", units="K", last="k")),
        "tile_packed": Storage(unpack_tile_packed, pack_tile_packed, Kernels(_decode_tile_packed, rows="N", units="K", last="k")),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_torchao, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2))),
        "cpu_avx512": Storage(unpack_cpu_avx512, pack_cpu_avx512, Kernels(_decode_cpu_avx512, rows="N", units="K", last="k")),
        "cpu_avx2": Storage(unpack_cpu_avx2, pack_cpu_avx2, Kernels(_decode_cpu_avx2, rows="N", units="K", last="k")),
        "cpu_scalar": Storage(unpack_cpu_scalar, pack_cpu_scalar, Kernels(_decode_cpu_scalar, rows="N", units="K", last="k")),
        "cpu_rest": Storage(unpack_cpu_rest, pack_cpu_rest, Kernels(_decode_cpu_rest, rows="N/2", units="K", last="n", sums=2,
                lanes=(2,), order=(0, 2, 1))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=_scale_planar, group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, scheme="float_middle", roles={"code": "q", "zero": "z", "scale": "s"}, settings={"offset": 8},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s", "z")),
)
