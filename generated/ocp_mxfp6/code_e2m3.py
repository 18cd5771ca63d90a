"""ocp_mxfp6 at code = e2m3: OCP MXFP6, 6-bit floats with a power of two per 32.

    w = e * q

Built from the spec ocp_mxfp6 (sha256 16e577bbc8f11d5f) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, cdiv, integer,
        pad)
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e2m3, e8m0


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = e * q */
#define BITS 6
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[64] = {0.0f, 0.125f, 0.25f, 0.375f, 0.5f, 0.625f, 0.75f, 0.875f, 1.0f, 1.125f, 1.25f, 1.375f, 1.5f,
        1.625f, 1.75f, 1.875f, 2.0f, 2.25f, 2.5f, 2.75f, 3.0f, 3.25f, 3.5f, 3.75f, 4.0f, 4.5f, 5.0f, 5.5f, 6.0f, 6.5f, 7.0f, 7.5f,
        0.0f, -0.125f, -0.25f, -0.375f, -0.5f, -0.625f, -0.75f, -0.875f, -1.0f, -1.125f, -1.25f, -1.375f, -1.5f, -1.625f, -1.75f,
        -1.875f, -2.0f, -2.25f, -2.5f, -2.75f, -3.0f, -3.25f, -3.5f, -3.75f, -4.0f, -4.5f, -5.0f, -5.5f, -6.0f, -6.5f, -7.0f,
        -7.5f};
INLINE vf number(const Weight *w, vu codes) { return lookup_64(numbers, codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf e = FIELD(0);
    *scale = e;
}
"""


def unpack_compressed_tensors(weight_packed: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight_packed uint8 [N, 24*K/32]; weight_scale uint8 [N, K/32]."""
    r = weight_packed.unflatten(-1, (-1, 24))
    q_words = integer(r.unflatten(-1, (8, 3)))
    return {"e": as_type(weight_scale, torch.float8_e8m0fnu),
            "q": torch.stack([q_words >> 6 * i & 63 for i in range(4)], -1).to(torch.uint8).flatten(1)}


def pack_compressed_tensors(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight_packed, weight_scale of the fields; the inverse of unpack_compressed_tensors."""
    q_split = q.unflatten(-1, (-1, 8, 4))
    q_packed = sum(q_split[..., i].to(torch.int32) << 6 * i for i in range(4))
    r = q_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    return {"weight_packed": r.flatten(1), "weight_scale": e.view(torch.uint8)}


def unpack_torchao(qdata: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of qdata uint8 [N, K]; scale float8_e8m0fnu [N, K/32]."""
    return {"e": scale, "q": qdata & 63}


def pack_torchao(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao."""
    r = torch.zeros(q.shape[0], q.shape[1], 1, dtype=torch.uint8, device=q.device)
    r[...] = q.unsqueeze(-1)
    return {"qdata": r.squeeze(-1), "scale": e}


def unpack_torchao_swizzled(qdata: Tensor, scale: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of qdata uint8 [N, K]; scale float8_e8m0fnu [ceil(N/128), ceil(K/128), 512]."""
    scale_bytes = as_type(scale, torch.uint8)
    return {
            "e": as_type(scale_bytes, torch.float8_e8m0fnu).unflatten(-1, (32, 4, 4)).permute(0, 3, 2, 1, 4).flatten(0,
                2).flatten(1)[:N, :cdiv(K, 32)],
            "q": qdata & 63}


def pack_torchao_swizzled(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao_swizzled."""
    qdata_bytes = torch.zeros(q.shape[0], q.shape[1], 1, dtype=torch.uint8, device=q.device)
    qdata_bytes[...] = q.unsqueeze(-1)
    scale_bytes = pad(e, (0, -e.shape[1] % 4, 0, -e.shape[0] % 128)).unflatten(-1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0,
        3, 2, 1, 4).view(torch.uint8).flatten(2)
    return {"qdata": qdata_bytes.squeeze(-1), "scale": as_type(scale_bytes, torch.float8_e8m0fnu)}


def unpack_planar(q_0: Tensor, q_1: Tensor, e: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/256)]; e float8_e8m0fnu [N, ceil(K/32)]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 3, q_bytes2 >> 4 & 3, q_bytes2 >> 2 & 3, q_bytes2 >> 6], -5).unflatten(2, (2, 2)).permute(0,
        1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    return {"e": e, "q": q_low | q_high << 4}


def pack_planar(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, e of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, :, 0] >> 4) | (q_split2[:, :, 0, :, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, :, 0] >> 4)
        << 2 | (q_split2[:, :, 1, :, :, 1] >> 4) << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "e": e}


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * q.  e [N, ceil(K/32)], q [N, K]."""
    out = out if out is None else out.unflatten(1, (e.shape[1], -1))
    q = e2m3(q).unflatten(1, (e.shape[1], -1))
    e = e8m0(e).unsqueeze(-1)
    return torch.mul(e, q, out=out).flatten(1)


def encode(weight: Tensor, *, code: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least,
    power, zeros.
    """
    q, e = absmax(weight, code=code, scale="e8m0", rows=1, columns=32, axes=2, **{"power": "floor", **options})
    return {"q": q, "e": e}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_compressed_tensors(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight_packed, weight_scale = tensors
    weight_scale += n * (K // 32)
    weight_packed += 24 * (n * (K // 32))
    e = device.e8m0(tl.load(weight_scale + k // 32, live, 0))
    q = device.e2m3(device.stream(weight_packed + 24 * (k // 32), 1, 6 * (k % 32), 6, 8, live))
    return use(state, k, e * q, live)


@triton.jit
def _decode_torchao(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale = tensors
    scale += n * (K // 32)
    qdata += n * K
    e = device.e8m0(tl.load(scale + k // 32, live, 0))
    q = device.e2m3(tl.load(qdata + k, live, 0) & 63)
    return use(state, k, e * q, live)


@triton.jit
def _decode_torchao_swizzled(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale = tensors
    scale += 512 * (n // 128 * tl.cdiv(K, 128))
    qdata += n * K
    e = device.e8m0(tl.load(scale + 512 * (k // 32 // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32) + k // 32 % 4, live, 0))
    q = device.e2m3(tl.load(qdata + k, live, 0) & 63)
    return use(state, k, e * q, live)


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, e = tensors
    e += n * tl.cdiv(K, 32)
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 256))
    e1 = device.e8m0(tl.load(e + k // 32, live, 0))
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2) + 4 * (k % 128 // 8 % 4) & 15
    q_high = tl.load(q_1 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live, 0) >> 16 * (k % 256 % 2) + 4 * (k % 256 // 8 % 4) + 2 * (k % 256 // 128) & 3
    q = device.e2m3(q_low | q_high << 4)
    return use(state, k, e1 * q, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "compressed_tensors": Storage(unpack_compressed_tensors, pack_compressed_tensors, Kernels(_decode_compressed_tensors,
                rows="N", units="K", last="k")),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_torchao, rows="N", units="K", last="k")),
        "torchao_swizzled": Storage(unpack_torchao_swizzled, pack_torchao_swizzled, Kernels(_decode_torchao_swizzled, rows="N",
                units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e2m3, words=bitplanes.words_6, width=8, bits=0,
                    unit=(16384.0, 1.0), base=(0, 0)),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("e", 1, 32, "e8m0"),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0), "spans": (0, 2)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "e"}, settings={"power": "floor"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 6, ("e",)),
)
