"""hqq at bits = 2: HQQ with groups of consecutive weights (axis 1), integer codes with a zero point in floats.

    w = (q - z) * s

Built from the spec hqq (sha256 29265f514b220d1e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import float_zero
from qdsl.runtime import Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, pad
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import decode


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = (q - z) * s */
#define BITS 2
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f};
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
    """Fields of W_q uint8 [N*K/4*group, group]; scale scale_type [N*K/group, 1]; zero scale_type [N*K/group, 1]."""
    return {"z": zero.squeeze(1), "s": scale.squeeze(1),
            "q": torch.stack([W_q >> 6 - 2 * i & 3 for i in range(4)], -1).permute(2, 0, 1).flatten()[:N
                * K].unflatten(0, (N, K))}


def pack_hqq(z: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
    """W_q, scale, zero of the fields; the inverse of unpack_hqq."""
    q_split = q.flatten().unflatten(-1, (4, N * K // (4 * group), group))
    r = sum(q_split[i] << 6 - 2 * i for i in range(4))
    return {"W_q": r, "scale": s.unsqueeze(-1), "zero": z.unsqueeze(-1)}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; s scale_type [N, K/group]; z scale_type [N, K/group]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"z": z.flatten(), "s": s.flatten(),
            "q": torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0,
                1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]}


def pack_planar(z: Tensor, s: Tensor, q: Tensor, *, N: int, K: int, group: int) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    r = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4 | q_split[:, :, 1, :, :, 1]
        << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s.unflatten(-1, (N, K // group)), "z": z.unflatten(-1, (N, K // group))}


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = -least / scale; codes by both,
    unrounded.
    """
    q, z, s = float_zero(weight.reshape(1, -1), code="u2", zero=scale_type, scale=scale_type, rows=1, columns=group, axes=2)
    return {"q": q.reshape(weight.shape), "z": z.flatten(), "s": s.flatten()}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_hqq(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    W_q, scale, zero = tensors
    group, = sizes
    z = tl.load(zero + (k + n * K) // group, live, 0).to(tl.float32)
    s = tl.load(scale + (k + n * K) // group, live, 0).to(tl.float32)
    q = tl.load(W_q + (k + n * K) % group + (k + n * K) // group % (N * K // (4 * group))
        * group, live, 0) >> 6 - 2 * ((k + n * K) // group // (N * K // (4 * group))) & 3
    return use(state, k, (q - z) * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    z += n * (K // group)
    s += n * (K // group)
    q += 16 * (n * tl.cdiv(K, 256))
    t = u // 16
    b = u // 4 % 4
    a = u % 4
    live = live & (256 * t + 32 * b + 2 * a < K)
    q_word = tl.load(q + 16 * t + 4 * a + b, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                for c in tl.static_range(2):
                    inside = live & (256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c < K)
                    z1 = tl.load(z + (16 * t + 8 * h + 2 * b + i) // (group // 16), inside, 0).to(tl.float32)
                    s1 = tl.load(s + (16 * t + 8 * h + 2 * b + i) // (group // 16), inside, 0).to(tl.float32)
                    q1 = q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3
                    state = use(state, 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c, (q1 - z1) * s1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "hqq": Storage(unpack_hqq, pack_hqq, Kernels(_decode_hqq, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u2, words=bitplanes.words_2, width=2, bits=2),
                    Sums(scale=group_sums.with_zero, group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (4,)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("s", "z")),
)
