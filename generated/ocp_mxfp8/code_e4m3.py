"""ocp_mxfp8 at code = e4m3: OCP MXFP8, 8-bit floats with a power of two per 32.

    w = e * q

Built from the spec ocp_mxfp8 (sha256 ba023f641f5ac9d2) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, cdiv, pad
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e4m3, e8m0


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = e * q */
#define BITS 8
#define FIELDS 1
#define BRAIN_NUMBERS
INLINE vf number(const Weight *w, vu codes) { return float_of_e4m3((vi)(codes & 255)); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf e = FIELD(0);
    *scale = e;
}
"""


def unpack_compressed_tensors(weight: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight code [N, K]; weight_scale uint8 [N, K/32]."""
    return {"e": as_type(weight_scale, torch.float8_e8m0fnu), "q": weight}


def pack_compressed_tensors(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_compressed_tensors."""
    return {"weight": q, "weight_scale": e.view(torch.uint8)}


def unpack_torchao(qdata: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Fields of qdata code [N, K]; scale float8_e8m0fnu [N, K/32]."""
    return {"e": scale, "q": qdata}


def pack_torchao(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao."""
    return {"qdata": q, "scale": e}


def unpack_torchao_swizzled(qdata: Tensor, scale: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of qdata code [N, K]; scale float8_e8m0fnu [ceil(N/128), ceil(K/128), 512]."""
    r = as_type(scale, torch.uint8)
    return {
            "e": as_type(r, torch.float8_e8m0fnu).unflatten(-1, (32, 4, 4)).permute(0, 3, 2, 1, 4).flatten(0, 2).flatten(1)[:N,
                :cdiv(K, 32)],
            "q": qdata}


def pack_torchao_swizzled(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qdata, scale of the fields; the inverse of unpack_torchao_swizzled."""
    r = pad(e, (0, -e.shape[1] % 4, 0, -e.shape[0] % 128)).unflatten(-1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1,
        4).view(torch.uint8).flatten(2)
    return {"qdata": q, "scale": as_type(r, torch.float8_e8m0fnu)}


def unpack_comfyui(weight: Tensor, weight_scale: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of weight float8_e4m3fn [N, K]; weight_scale float8_e8m0fnu [ceil(N/128), ceil(K/128), 512]."""
    r = as_type(weight_scale, torch.uint8)
    return {
            "e": as_type(r, torch.float8_e8m0fnu).unflatten(-1, (32, 4, 4)).permute(0, 3, 2, 1, 4).flatten(0, 2).flatten(1)[:N,
                :cdiv(K, 32)],
            "q": weight}


def pack_comfyui(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_comfyui."""
    r = pad(e, (0, -e.shape[1] % 4, 0, -e.shape[0] % 128)).unflatten(-1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1,
        4).view(torch.uint8).flatten(2)
    return {"weight": q, "weight_scale": as_type(r, torch.float8_e8m0fnu)}


def unpack_mlx(weight: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint32 [N, K/4]; scales uint8 [N, K/32]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 4))
    return {"e": as_type(scales, torch.float8_e8m0fnu), "q": as_type(r, torch.float8_e4m3fn).flatten(1)}


def pack_mlx(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales of the fields; the inverse of unpack_mlx."""
    r = q.unflatten(-1, (-1, 4)).view(torch.uint8)
    return {"weight": as_type(r, torch.uint32).squeeze(-1), "scales": e.view(torch.uint8)}


def unpack_planar(q: Tensor, e: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; e float8_e8m0fnu [N, ceil(K/32)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"e": e, "q": as_type(r, torch.float8_e4m3fn).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K]}


def pack_planar(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, e of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "e": e}


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * q.  e [N, ceil(K/32)], q [N, K]."""
    out = out if out is None else out.unflatten(1, (e.shape[1], -1))
    q = e4m3(q).unflatten(1, (e.shape[1], -1))
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
    weight, weight_scale = tensors
    weight_scale += n * (K // 32)
    weight += n * K
    e = device.e8m0(tl.load(weight_scale + k // 32, live, 0))
    q = device.e4m3(tl.load(weight + k, live, 0))
    return use(state, k, e * q, live)


@triton.jit
def _decode_torchao_swizzled(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale = tensors
    scale += 512 * (n // 128 * tl.cdiv(K, 128))
    qdata += n * K
    e = device.e8m0(tl.load(scale + 512 * (k // 32 // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32) + k // 32 % 4, live, 0))
    q = device.e4m3(tl.load(qdata + k, live, 0))
    return use(state, k, e * q, live)


@triton.jit
def _decode_mlx(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit t of row n, in float32."""
    weight, scales = tensors
    scales += n * (K // 32)
    weight += n * (K // 4)
    e = device.e8m0(tl.load(scales + t // 8, live, 0))
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(4):
        q = device.e4m3(q_word >> 8 * h & 255)
        state = use(state, 4 * t + h, e * q, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, e = tensors
    e += n * tl.cdiv(K, 32)
    q += 32 * (n * tl.cdiv(K, 128))
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = live & (128 * t + 32 * j + 2 * c < K)
    e1 = device.e8m0(tl.load(e + 4 * t + j, live, 0))
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = device.e4m3(q_word >> 16 * i + 8 * h & 255)
            state = use(state, 128 * t + 32 * j + 16 * h + 2 * c + i, e1 * q1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "compressed_tensors": Storage(unpack_compressed_tensors, pack_compressed_tensors, Kernels(_decode_compressed_tensors,
                rows="N", units="K", last="k")),
        "torchao": Storage(unpack_torchao, pack_torchao, Kernels(_decode_compressed_tensors, rows="N", units="K", last="k")),
        "torchao_swizzled": Storage(unpack_torchao_swizzled, pack_torchao_swizzled, Kernels(_decode_torchao_swizzled, rows="N",
                units="K", last="k")),
        "comfyui": Storage(unpack_comfyui, pack_comfyui, Kernels(_decode_torchao_swizzled, rows="N", units="K", last="k")),
        "mlx": Storage(unpack_mlx, pack_mlx, Kernels(_decode_mlx, rows="N", units="K/4", last="k", lanes=(4,), order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e4m3, words=bitplanes.words_8, width=8, bits=0, unit=(256.0, 1.0),
                    base=(0, 0)), Sums(scale=group_sums.scaled, group_fields=(GroupField("e", 1, 32, "e8m0"),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "e"}, settings={"power": "floor"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("e",)),
)
