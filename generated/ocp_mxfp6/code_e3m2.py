"""ocp_mxfp6 at code = e3m2: OCP MXFP6, 6-bit floats with a power of two per 32.

    w = e * q

Built from the spec ocp_mxfp6 (sha256 16e577bbc8f11d5f) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.runtime import Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e3m2, e8m0

from .code_e2m3 import (unpack_compressed_tensors, pack_compressed_tensors, unpack_torchao, pack_torchao, unpack_torchao_swizzled,
        pack_torchao_swizzled, unpack_planar, pack_planar, encode)


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = e * q */
#define BITS 6
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[64] = {0.0f, 0.0625f, 0.125f, 0.1875f, 0.25f, 0.3125f, 0.375f, 0.4375f, 0.5f, 0.625f, 0.75f, 0.875f,
        1.0f, 1.25f, 1.5f, 1.75f, 2.0f, 2.5f, 3.0f, 3.5f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 10.0f, 12.0f, 14.0f, 16.0f, 20.0f, 24.0f,
        28.0f, 0.0f, -0.0625f, -0.125f, -0.1875f, -0.25f, -0.3125f, -0.375f, -0.4375f, -0.5f, -0.625f, -0.75f, -0.875f, -1.0f,
        -1.25f, -1.5f, -1.75f, -2.0f, -2.5f, -3.0f, -3.5f, -4.0f, -5.0f, -6.0f, -7.0f, -8.0f, -10.0f, -12.0f, -14.0f, -16.0f,
        -20.0f, -24.0f, -28.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_64(numbers, codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf e = FIELD(0);
    *scale = e;
}
"""


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * q.  e [N, ceil(K/32)], q [N, K]."""
    out = out if out is None else out.unflatten(1, (e.shape[1], -1))
    q = e3m2(q).unflatten(1, (e.shape[1], -1))
    e = e8m0(e).unsqueeze(-1)
    return torch.mul(e, q, out=out).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_compressed_tensors(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight_packed, weight_scale = tensors
    weight_scale += n * (K // 32)
    weight_packed += 24 * (n * (K // 32))
    e = device.e8m0(tl.load(weight_scale + k // 32, live, 0))
    q = device.e3m2(device.stream(weight_packed + 24 * (k // 32), 1, 6 * (k % 32), 6, 8, live))
    return use(state, k, e * q, live)


@triton.jit
def _decode_torchao(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale = tensors
    scale += n * (K // 32)
    qdata += n * K
    e = device.e8m0(tl.load(scale + k // 32, live, 0))
    q = device.e3m2(tl.load(qdata + k, live, 0) & 63)
    return use(state, k, e * q, live)


@triton.jit
def _decode_torchao_swizzled(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale = tensors
    scale += 512 * (n // 128 * tl.cdiv(K, 128))
    qdata += n * K
    e = device.e8m0(tl.load(scale + 512 * (k // 32 // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32) + k // 32 % 4, live, 0))
    q = device.e3m2(tl.load(qdata + k, live, 0) & 63)
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
    q = device.e3m2(q_low | q_high << 4)
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
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e3m2, words=bitplanes.words_6, width=8, bits=0, unit=(4096.0, 1.0),
                    base=(0, 0)), Sums(scale=group_sums.scaled, group_fields=(GroupField("e", 1, 32, "e8m0"),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0), "spans": (0, 2)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "e"}, settings={"power": "floor"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 6, ("e",)),
)
