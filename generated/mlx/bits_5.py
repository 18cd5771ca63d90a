"""mlx at bits = 5: MLX affine, integer codes with a scale and a bias in floats per group of columns.

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
#define BITS 5
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[32] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f,
        15.0f, 16.0f, 17.0f, 18.0f, 19.0f, 20.0f, 21.0f, 22.0f, 23.0f, 24.0f, 25.0f, 26.0f, 27.0f, 28.0f, 29.0f, 30.0f, 31.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_32(numbers, codes); }
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
    """Fields of weight uint32 [N, 5*K/32]; scales scale_type [N, K/group]; biases scale_type [N, K/group]."""
    r = as_type(weight, torch.uint8).unflatten(-1, (-1, 20))
    q_words = integer(r.unflatten(-1, (4, 5)))
    return {"s": scales, "b": biases, "q": torch.stack([q_words >> 5 * i & 31 for i in range(8)], -1).to(torch.uint8).flatten(1)}


def pack_mlx(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, scales, biases of the fields; the inverse of unpack_mlx."""
    q_split = q.unflatten(-1, (-1, 4, 8))
    q_packed = sum(q_split[..., i].to(torch.int64) << 5 * i for i in range(8))
    r = q_packed.unsqueeze(-1).view(torch.uint8)[..., :5].flatten(2)
    return {"weight": as_type(r, torch.uint32).flatten(1), "scales": s, "biases": b}


def unpack_planar(q_0: Tensor, q_1: Tensor, s: Tensor, b: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/512)]; s scale_type [N, ceil(K/group)]; b scale_type
    [N, ceil(K/group)].
    """
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 5 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 6
        & 1, q_bytes2 >> 3 & 1, q_bytes2 >> 7], -5).unflatten(2, (4, 2)).permute(0, 1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    return {"s": s, "b": b, "q": q_low | q_high << 4}


def pack_planar(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, s, b of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 4, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, :, 0] >> 4) | (q_split2[:, :, 0, :, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, :, 0] >> 4)
        << 1 | (q_split2[:, :, 1, :, :, 1] >> 4) << 5 | (q_split2[:, :, 2, :, :, 0] >> 4) << 2
        | (q_split2[:, :, 2, :, :, 1] >> 4) << 6 | (q_split2[:, :, 3, :, :, 0] >> 4) << 3 | (q_split2[:, :, 3, :, :, 1] >> 4)
        << 7).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "s": s, "b": b}


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: min = the end of the block of larger magnitude; scale = what makes 0 a code."""
    q, s, b = edge_affine(weight, code="u5", scale=scale_type, min=scale_type, rows=1, columns=group, axes=2)
    return {"q": q, "s": s, "b": b}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_mlx(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 32 weights of unit t of row n, in float32."""
    weight, scales, biases = tensors
    group, = sizes
    scales += n * (K // group)
    biases += n * (K // group)
    weight += 5 * (n * (K // 32))
    s = tl.load(scales + t // (group // 32), live, 0).to(tl.float32)
    b = tl.load(biases + t // (group // 32), live, 0).to(tl.float32)
    q_0 = tl.load(weight + 5 * t, live, 0)
    q_1 = tl.load(weight + 5 * t + 1, live, 0)
    q_2 = tl.load(weight + 5 * t + 2, live, 0)
    q_3 = tl.load(weight + 5 * t + 3, live, 0)
    q_4 = tl.load(weight + 5 * t + 4, live, 0)
    q_words = (q_0, q_1, q_2, q_3, q_4)
    for h in tl.static_range(32):
        q = device.bits(q_words, 5 * h, 5)
        state = use(state, 32 * t + h, q * s + b, live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, s, b = tensors
    group, = sizes
    s += n * tl.cdiv(K, group)
    b += n * tl.cdiv(K, group)
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    s1 = tl.load(s + k // group, live, 0).to(tl.float32)
    b1 = tl.load(b + k // group, live, 0).to(tl.float32)
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2) + 4 * (k % 128 // 8 % 4) & 15
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live, 0) >> 16 * (k % 512 % 2) + 4 * (k % 512 // 8 % 4) + k % 512 // 128 & 1
    q = q_low | q_high << 4
    return use(state, k, q * s1 + b1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "mlx": Storage(unpack_mlx, pack_mlx, Kernels(_decode_mlx, rows="N", units="K/32", last="k", lanes=(32,),
                order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u5, words=bitplanes.words_5, width=4, bits=5),
                    Sums(scale=group_sums.with_offset, group_fields=(GroupField("s", 1, "group"), GroupField("b", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (0, 1)}}))),
    },
    decode=decode, encode=encode, scheme="edge_affine", roles={"code": "q", "scale": "s", "min": "b"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 5, ("s", "b")),
)
