"""ocp_mxfp8 at code = e5m2: OCP MXFP8, 8-bit floats with a power of two per 32.

    w = e * q

Built from the spec ocp_mxfp8 (sha256 ba023f641f5ac9d2) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.runtime import Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e5m2, e8m0

from .code_e4m3 import (unpack_compressed_tensors, pack_compressed_tensors, unpack_torchao, pack_torchao, unpack_torchao_swizzled,
        pack_torchao_swizzled, pack_planar, encode)


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = e * q */
#define BITS 8
#define FIELDS 1
#define BRAIN_NUMBERS
INLINE vf number(const Weight *w, vu codes) { return float_of_e5m2((vi)(codes & 255)); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf e = FIELD(0);
    *scale = e;
}
"""


def unpack_planar(q: Tensor, e: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; e float8_e8m0fnu [N, ceil(K/32)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"e": e, "q": as_type(r, torch.float8_e5m2).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K]}


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * q.  e [N, ceil(K/32)], q [N, K]."""
    out = out if out is None else out.unflatten(1, (e.shape[1], -1))
    q = e5m2(q).unflatten(1, (e.shape[1], -1))
    e = e8m0(e).unsqueeze(-1)
    return torch.mul(e, q, out=out).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_compressed_tensors(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, weight_scale = tensors
    weight_scale += n * (K // 32)
    weight += n * K
    e = device.e8m0(tl.load(weight_scale + k // 32, live, 0))
    q = device.e5m2(tl.load(weight + k, live, 0))
    return use(state, k, e * q, live)


@triton.jit
def _decode_torchao_swizzled(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    qdata, scale = tensors
    scale += 512 * (n // 128 * tl.cdiv(K, 128))
    qdata += n * K
    e = device.e8m0(tl.load(scale + 512 * (k // 32 // 4) + 16 * (n % 128 % 32) + 4 * (n % 128 // 32) + k // 32 % 4, live, 0))
    q = device.e5m2(tl.load(qdata + k, live, 0))
    return use(state, k, e * q, live)


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
            q1 = device.e5m2(q_word >> 16 * i + 8 * h & 255)
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
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e5m2, words=bitplanes.words_8, width=8, bits=0, unit=(1.0, 1.0),
                    base=(0, 0)), Sums(scale=group_sums.scaled, group_fields=(GroupField("e", 1, 32, "e8m0"),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "e"}, settings={"power": "floor"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("e",)),
)
