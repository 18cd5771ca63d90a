"""hqq at bits = 3: HQQ with groups of consecutive weights (axis 1), integer codes with a zero point in floats.

    w = (q - z) * s

Built from the spec hqq (sha256 29265f514b220d1e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import float_zero
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, cdiv, integer,
        pad)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import decode


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


def unpack_hqq_3bit(W_q: Tensor, scale: Tensor, zero: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of W_q int32 [ceil(N*K/10*group), group]; scale scale_type [N*K/group, 1]; zero scale_type [N*K/group, 1]."""
    r = as_type(W_q, torch.uint8).unflatten(-1, (-1, 4))
    q_words = integer(r)
    return {"z": zero.squeeze(1), "s": scale.squeeze(1),
            "q": torch.stack([q_words >> 27 - 3 * i & 7 for i in range(10)], -1).to(torch.uint8).permute(2, 0, 1).flatten()[:N
                * K].unflatten(0, (N, K))}


def pack_hqq_3bit(z: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
    """W_q, scale, zero of the fields; the inverse of unpack_hqq_3bit."""
    r = torch.zeros(cdiv(N * K // group, 10), group, 4, dtype=torch.uint8, device=q.device)
    q_split = pad(q.flatten(), (0, 10 * (cdiv(N * K // group, 10) * group) - N * K)).unflatten(-1,
        (10, cdiv(N * K // group, 10), group))
    q_packed = sum(q_split[i].to(torch.int64) << 27 - 3 * i for i in range(10))
    r[...] = q_packed.unsqueeze(-1).view(torch.uint8)[..., :4]
    return {"W_q": as_type(r, torch.int32).squeeze(-1), "scale": s.unsqueeze(-1), "zero": z.unsqueeze(-1)}


def unpack_planar(q_0: Tensor, q_1: Tensor, s: Tensor, z: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/256)]; q_1 int32 [N, 16*ceil(K/512)]; s scale_type [N, K/group]; z scale_type [N,
    K/group].
    """
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0, 1,
        2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 6 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 3
        & 1, q_bytes2 >> 5 & 1, q_bytes2 >> 7], -5).unflatten(2, (2, 2, 2)).permute(0, 1, 2, 3, 6, 8, 4, 5, 7).flatten(1)[:, :K]
    return {"z": z.flatten(), "s": s.flatten(), "q": q_low | q_high << 2}


def pack_planar(z: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
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
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1),
            "s": s.unflatten(-1, (N, K // group)), "z": z.unflatten(-1, (N, K // group))}


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = -least / scale; codes by both,
    unrounded.
    """
    q, z, s = float_zero(weight.reshape(1, -1), code="u3", zero=scale_type, scale=scale_type, rows=1, columns=group, axes=2)
    return {"q": q.reshape(weight.shape), "z": z.flatten(), "s": s.flatten()}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_hqq_3bit(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    W_q, scale, zero = tensors
    group, = sizes
    z = tl.load(zero + (k + n * K) // group, live, 0).to(tl.float32)
    s = tl.load(scale + (k + n * K) // group, live, 0).to(tl.float32)
    q = tl.load(W_q + (k + n * K) % group + (k + n * K) // group % tl.cdiv(N * K // group, 10)
        * group, live, 0) >> 27 - 3 * ((k + n * K) // group // tl.cdiv(N * K // group, 10)) & 7
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, s, z = tensors
    group, = sizes
    z += n * (K // group)
    s += n * (K // group)
    q_0 += 16 * (n * tl.cdiv(K, 256))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    z1 = tl.load(z + k // group, live, 0).to(tl.float32)
    s1 = tl.load(s + k // group, live, 0).to(tl.float32)
    q_low = tl.load(q_0 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live,
        0) >> 16 * (k % 256 % 2) + 8 * (k % 256 // 16 % 2) + 4 * (k % 256 // 128) + 2 * (k % 256 // 8 % 2) & 3
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live,
        0) >> 16 * (k % 512 % 2) + 8 * (k % 512 // 16 % 2) + 4 * (k % 512 // 128 % 2) + 2 * (k % 512 // 8 % 2) + k % 512 // 256 & 1
    q = q_low | q_high << 2
    return use(state, k, (q - z1) * s1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "hqq_3bit": Storage(unpack_hqq_3bit, pack_hqq_3bit, Kernels(_decode_hqq_3bit, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u3, words=bitplanes.words_3, width=2, bits=3),
                    Sums(scale=group_sums.with_zero, group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (4, 4)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 3, ("s", "z")),
)
