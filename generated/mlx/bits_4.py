"""mlx at bits = 4: MLX affine, integer codes with a scale and a bias in floats per group of columns.

    w = q * s + b

Built from the spec mlx (sha256 5f5a2374b16e8d33) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import edge_affine
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float, as_type,
        joined, pad, spread, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s + b */
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
    const vf b = FIELD(1);
    *scale = s;
    *offset = b;
}
"""


def unpack_mlx(weight: Tensor, scales: Tensor, biases: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint32 [N, K/8]; scales scale_type [N, K/group]; biases scale_type [N, K/group]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 4))
    return {"s": scales, "b": biases, "q": spread(r, 4).flatten(1)}


def pack_mlx(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales, biases of the fields; the inverse of unpack_mlx."""
    q_split = q.unflatten(-1, (-1, 4, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight": as_type(r, torch.uint32).squeeze(-1), "scales": s, "biases": b}


def unpack_planar(q: Tensor, s: Tensor, b: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s scale_type [N, ceil(K/group)]; b scale_type [N, ceil(K/group)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"s": s, "b": b, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, b of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "b": b}


def decode(s: Tensor, b: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s + b.  s [N, ceil(K/group)], b [N, ceil(K/group)], q [N,
    K].
    """
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = q.unflatten(1, (s.shape[1], -1))
    s = s.float().unsqueeze(-1)
    b = b.float().unsqueeze(-1)
    space = workspace(out)
    w = torch.mul(as_float(q, out), s, out=space)
    return torch.add(w, b, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: min = the end of the block of larger magnitude; scale = what makes 0 a code."""
    q, s, b = edge_affine(weight, code="u4", scale=scale_type, min=scale_type, rows=1, columns=group, axes=2)
    return {"q": q, "s": s, "b": b}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_mlx(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit t of row n, in float32."""
    weight, scales, biases = tensors
    group, = sizes
    scales += n * (K // group)
    biases += n * (K // group)
    weight += n * (K // 8)
    s = tl.load(scales + t // (group // 8), live, 0).to(tl.float32)
    b = tl.load(biases + t // (group // 8), live, 0).to(tl.float32)
    q_word = tl.load(weight + t, live, 0)
    for h in tl.static_range(8):
        q = q_word >> 4 * h & 15
        state = use(state, 8 * t + h, q * s + b, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, b = tensors
    group, = sizes
    s += n * tl.cdiv(K, group)
    b += n * tl.cdiv(K, group)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    s1 = tl.load(s + (4 * t + j) // (group // 32), live, 0).to(tl.float32)
    b1 = tl.load(b + (4 * t + j) // (group // 32), live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = q_word >> 16 * i + 4 * h & 15
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, q1 * s1 + b1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "mlx": Storage(unpack_mlx, pack_mlx, Kernels(_decode_mlx, rows="N", units="K/8", last="k", lanes=(8,), order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=group_sums.with_offset, group_fields=(GroupField("s", 1, "group"), GroupField("b", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, scheme="edge_affine", roles={"code": "q", "scale": "s", "min": "b"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s", "b")),
)
