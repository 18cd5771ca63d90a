"""mlx at bits = 2: MLX affine, integer codes with a scale and a bias in floats per group of columns.

    w = q * s + b

Built from the spec mlx (sha256 5f5a2374b16e8d33) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import edge_affine
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, joined, pad,
        spread)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import decode


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s + b */
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
    const vf b = FIELD(1);
    *scale = s;
    *offset = b;
}
"""


def unpack_mlx(weight: Tensor, scales: Tensor, biases: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint32 [N, K/16]; scales scale_type [N, K/group]; biases scale_type [N, K/group]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 4))
    return {"s": scales, "b": biases, "q": spread(r, 2).flatten(1)}


def pack_mlx(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales, biases of the fields; the inverse of unpack_mlx."""
    q_split = q.unflatten(-1, (-1, 4, 4))
    r = joined(q_split, 2).squeeze(-1)
    return {"weight": as_type(r, torch.uint32).squeeze(-1), "scales": s, "biases": b}


def unpack_planar(q: Tensor, s: Tensor, b: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; s scale_type [N, ceil(K/group)]; b scale_type [N, ceil(K/group)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"s": s, "b": b,
            "q": torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0,
                1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]}


def pack_planar(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, b of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    r = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4 | q_split[:, :, 1, :, :, 1]
        << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "b": b}


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: min = the end of the block of larger magnitude; scale = what makes 0 a code."""
    q, s, b = edge_affine(weight, code="u2", scale=scale_type, min=scale_type, rows=1, columns=group, axes=2)
    return {"q": q, "s": s, "b": b}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_mlx(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit t of row n, in float32."""
    weight, scales, biases = tensors
    group, = sizes
    scales += n * (K // group)
    biases += n * (K // group)
    weight += n * (K // 16)
    s = tl.load(scales + t // (group // 16), live, 0).to(tl.float32)
    b = tl.load(biases + t // (group // 16), live, 0).to(tl.float32)
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(16):
        q = q_word >> 2 * h & 3
        state = use(state, 16 * t + h, q * s + b, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, s, b = tensors
    group, = sizes
    s += n * tl.cdiv(K, group)
    b += n * tl.cdiv(K, group)
    q += 16 * (n * tl.cdiv(K, 256))
    t = u // 16
    a = u // 4 % 4
    e = u % 4
    live = live & (256 * t + 32 * a + 2 * e < K)
    q_word = tl.load(q + 16 * t + 4 * e + a, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                for c in tl.static_range(2):
                    inside = live & (256 * t + 128 * h + 32 * a + 16 * i + 8 * j + 2 * e + c < K)
                    s1 = tl.load(s + (8 * t + 4 * h + a) // (group // 32), inside, 0).to(tl.float32)
                    b1 = tl.load(b + (8 * t + 4 * h + a) // (group // 32), inside, 0).to(tl.float32)
                    q1 = q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3
                    state = use(state, 256 * t + 128 * h + 32 * a + 16 * i + 8 * j + 2 * e + c, q1 * s1 + b1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "mlx": Storage(unpack_mlx, pack_mlx, Kernels(_decode_mlx, rows="N", units="K/16", last="k", lanes=(16,),
                order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u2, words=bitplanes.words_2, width=2, bits=2),
                    Sums(scale=group_sums.with_offset, group_fields=(GroupField("s", 1, "group"), GroupField("b", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (4,)}}))),
    },
    decode=decode, encode=encode, scheme="edge_affine", roles={"code": "q", "scale": "s", "min": "b"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("s", "b")),
)
