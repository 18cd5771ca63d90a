"""hqq_axis0 at bits = 2: HQQ with groups of weights that lie far apart (axis 0), integer codes with a zero point in floats.

    w = (q - z) * s

Built from the spec hqq_axis0 (sha256 3cda0b3a6caab7c4) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import float_zero
from qdsl.runtime import Kernels, Storage, Variant
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import decode


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_hqq(W_q: Tensor, scale: Tensor, zero: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of W_q uint8 [group/4, N*K/group]; scale scale_type [1, N*K/group]; zero scale_type [1, N*K/group]."""
    return {"z": zero.squeeze(0), "s": scale.squeeze(0),
            "q": torch.stack([W_q >> 6 - 2 * i & 3 for i in range(4)], -1).permute(2, 0, 1).flatten()[:N
                * K].unflatten(0, (N, K))}


def pack_hqq(z: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
    """W_q, scale, zero of the fields; the inverse of unpack_hqq."""
    q_split = q.flatten().unflatten(-1, (4, group // 4, N * K // group))
    r = sum(q_split[i] << 6 - 2 * i for i in range(4))
    return {"W_q": r, "scale": s.unsqueeze(0), "zero": z.unsqueeze(0)}


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = -least / scale; codes by both,
    unrounded.
    """
    q, z, s = float_zero(weight.reshape(group, -1).t(), code="u2", zero=scale_type, scale=scale_type, rows=1, columns=group,
            axes=2)
    return {"q": q.t().reshape(weight.shape), "z": z.flatten(), "s": s.flatten()}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_hqq(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    W_q, scale, zero = tensors
    group, = sizes
    z = tl.load(zero + (k + n * K) % (N * K // group), live, 0).to(tl.float32)
    s = tl.load(scale + (k + n * K) % (N * K // group), live, 0).to(tl.float32)
    q = tl.load(W_q + (k + n * K) % (N * K // group) + (k + n * K) // (N * K // group) % (group // 4)
        * (N * K // group), live, 0) >> 6 - 2 * ((k + n * K) // (N * K // group) // (group // 4)) & 3
    return use(state, k, (q - z) * s, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "hqq": Storage(unpack_hqq, pack_hqq, Kernels(_decode_hqq, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode,
)
