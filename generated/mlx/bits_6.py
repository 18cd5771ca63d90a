"""mlx at bits = 6: MLX affine, integer codes with a scale and a bias in floats per group of columns.

    w = q * s + b

Built from the spec mlx (sha256 5f5a2374b16e8d33) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import edge_affine
from qdsl.runtime import Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, integer, pad
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import decode


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s + b */
#define BITS 6
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
INLINE vf number(const Weight *w, vu codes) { return unsigned_number(codes); }
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
    """Fields of weight uint32 [N, 3*K/16]; scales scale_type [N, K/group]; biases scale_type [N, K/group]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 12))
    q_words = integer(r.unflatten(-1, (4, 3)))
    return {"s": scales, "b": biases, "q": torch.stack([q_words >> 6 * i & 63 for i in range(4)], -1).to(torch.uint8).flatten(1)}


def pack_mlx(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales, biases of the fields; the inverse of unpack_mlx."""
    q_split = q.unflatten(-1, (-1, 4, 4))
    q_packed = sum(q_split[..., i].to(torch.int32) << 6 * i for i in range(4))
    r = q_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    return {"weight": as_type(r, torch.uint32).flatten(1), "scales": s, "biases": b}


def unpack_planar(q_0: Tensor, q_1: Tensor, s: Tensor, b: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/256)]; s scale_type [N, ceil(K/group)]; b scale_type
    [N, ceil(K/group)].
    """
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 3, q_bytes2 >> 4 & 3, q_bytes2 >> 2 & 3, q_bytes2 >> 6], -5).unflatten(2, (2, 2)).permute(0,
        1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    return {"s": s, "b": b, "q": q_low | q_high << 4}


def pack_planar(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, s, b of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, :, 0] >> 4) | (q_split2[:, :, 0, :, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, :, 0] >> 4)
        << 2 | (q_split2[:, :, 1, :, :, 1] >> 4) << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "s": s, "b": b}


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: min = the end of the block of larger magnitude; scale = what makes 0 a code."""
    q, s, b = edge_affine(weight, code="u6", scale=scale_type, min=scale_type, rows=1, columns=group, axes=2)
    return {"q": q, "s": s, "b": b}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_mlx(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit t of row n, in float32."""
    weight, scales, biases = tensors
    group, = sizes
    scales += n * (K // group)
    biases += n * (K // group)
    weight += 3 * (n * (K // 16))
    s = tl.load(scales + t // (group // 16), live, 0).to(tl.float32)
    b = tl.load(biases + t // (group // 16), live, 0).to(tl.float32)
    q_0 = tl.load(weight + 3 * t, live, 0)
    q_1 = tl.load(weight + 3 * t + 1, live, 0)
    q_2 = tl.load(weight + 3 * t + 2, live, 0)
    q_words = (q_0, q_1, q_2)
    for h in tl.static_range(16):
        q = device.bits(q_words, 6 * h, 6)
        state = use(state, 16 * t + h, q * s + b, live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, s, b = tensors
    group, = sizes
    s += n * tl.cdiv(K, group)
    b += n * tl.cdiv(K, group)
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 256))
    s1 = tl.load(s + k // group, live, 0).to(tl.float32)
    b1 = tl.load(b + k // group, live, 0).to(tl.float32)
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2) + 4 * (k % 128 // 8 % 4) & 15
    q_high = tl.load(q_1 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live, 0) >> 16 * (k % 256 % 2) + 4 * (k % 256 // 8 % 4) + 2 * (k % 256 // 128) & 3
    q = q_low | q_high << 4
    return use(state, k, q * s1 + b1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "mlx": Storage(unpack_mlx, pack_mlx, Kernels(_decode_mlx, rows="N", units="K/16", last="k", lanes=(16,),
                order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u6, words=bitplanes.words_6, width=4, bits=6),
                    Sums(scale=group_sums.with_offset, group_fields=(GroupField("s", 1, "group"), GroupField("b", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (0, 2)}}))),
    },
    decode=decode, encode=encode, scheme="edge_affine", roles={"code": "q", "scale": "s", "min": "b"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 6, ("s", "b")),
)
