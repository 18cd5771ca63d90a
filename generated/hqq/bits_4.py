"""hqq at bits = 4: HQQ with groups of consecutive weights (axis 1), integer codes with a zero point in floats.

    w = (q - z) * s

Built from the spec hqq (sha256 29265f514b220d1e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import float_zero
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float, as_type, pad,
        spread, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
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


def unpack_hqq(W_q: Tensor, scale: Tensor, zero: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of W_q uint8 [N*K/2*group, group]; scale scale_type [N*K/group, 1]; zero scale_type [N*K/group, 1]."""
    return {"z": zero.squeeze(1), "s": scale.squeeze(1),
            "q": spread(W_q, 4, high_first=True).permute(2, 0, 1).flatten()[:N * K].unflatten(0, (N, K))}


def pack_hqq(z: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
    """W_q, scale, zero of the fields; the inverse of unpack_hqq."""
    q_split = q.flatten().unflatten(-1, (2, N * K // (2 * group), group))
    r = q_split[0] << 4 | q_split[1]
    return {"W_q": r, "scale": s.unsqueeze(-1), "zero": z.unsqueeze(-1)}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s scale_type [N, K/group]; z scale_type [N, K/group]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"z": z.flatten(), "s": s.flatten(),
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(z: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s.unflatten(-1, (N, K // group)), "z": z.unflatten(-1, (N, K // group))}


def decode(z: Tensor, s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - z) * s.  z [ceil(N*K/group)], s [ceil(N*K/group)], q [N,
    K].
    """
    shape = q.shape
    out = out if out is None else out.view(z.shape[0], -1)
    s = s.float().unsqueeze(-1)
    q = q.reshape(z.shape[0], -1)
    z = z.float().unsqueeze(-1)
    space = workspace(out)
    w = torch.sub(as_float(q, out), z, out=space)
    return torch.mul(w, s, out=out).view(shape)


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = -least / scale; codes by both,
    unrounded.
    """
    q, z, s = float_zero(weight.reshape(1, -1), code="u4", zero=scale_type, scale=scale_type, rows=1, columns=group, axes=2)
    return {"q": q.reshape(weight.shape), "z": z.flatten(), "s": s.flatten()}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_hqq(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    W_q, scale, zero = tensors
    group, = sizes
    z = tl.load(zero + (k + n * K) // group, live, 0).to(tl.float32)
    s = tl.load(scale + (k + n * K) // group, live, 0).to(tl.float32)
    q = tl.load(W_q + (k + n * K) % group + (k + n * K) // group % (N * K // (2 * group))
        * group, live, 0) >> 4 - 4 * ((k + n * K) // group // (N * K // (2 * group))) & 15
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    z += n * (K // group)
    s += n * (K // group)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            z1 = tl.load(z + (16 * t + 4 * j + h) // (group // 8), inside, 0).to(tl.float32)
            s1 = tl.load(s + (16 * t + 4 * j + h) // (group // 8), inside, 0).to(tl.float32)
            q1 = q_word >> 16 * i + 4 * h & 15
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, (q1 - z1) * s1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "hqq": Storage(unpack_hqq, pack_hqq, Kernels(_decode_hqq, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=group_sums.with_zero, group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s", "z")),
)
