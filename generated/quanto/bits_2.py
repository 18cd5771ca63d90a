"""quanto at bits = 2: optimum-quanto qint4 and qint2, integer codes with a scale and a shift in floats per group of columns.

    w = q * s - z

Built from the spec quanto (sha256 68b791cb5e3f0ca8) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import float_middle
from qdsl.runtime import Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_type, pad, spread
from qdsl.runtime.gpu.kernels import bitplanes
from qdsl.runtime.libraries.triton import tl, triton

from .bits_4 import decode, _scale_planar


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s - z */
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
    *offset = -z;
}
"""


def unpack_quanto(data: Tensor, scale: Tensor, shift: Tensor) -> dict[str, Tensor]:
    """Fields of data uint8 [N/4, K]; scale scale_type [N, K/group]; shift scale_type [N, K/group]."""
    return {"s": scale, "z": shift, "q": spread(data, 2).permute(2, 0, 1).flatten(0, 1)}


def pack_quanto(s: Tensor, z: Tensor, q: Tensor) -> dict[str, Tensor]:
    """data, scale, shift of the fields; the inverse of unpack_quanto."""
    q_split = q.unflatten(0, (4, -1))
    r = sum(q_split[i] << 2 * i for i in range(4))
    return {"data": r, "scale": s, "shift": z}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; s scale_type [N, ceil(K/group)]; z scale_type [N, ceil(K/group)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"s": s, "z": z,
            "q": torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0,
                1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]}


def pack_planar(s: Tensor, z: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    r = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4 | q_split[:, :, 1, :, :, 1]
        << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "z": z}


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = least + offset * scale; codes by
    both, as stored.
    """
    q, z, s = float_middle(weight, code="u2", scale=scale_type, zero=scale_type, rows=1, columns=group, axes=2, negated=1)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_quanto(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    data, scale, shift = tensors
    group, = sizes
    scale += n * (K // group)
    shift += n * (K // group)
    data += n % (N // 4) * K
    s = tl.load(scale + k // group, live, 0).to(tl.float32)
    z = tl.load(shift + k // group, live, 0).to(tl.float32)
    q = tl.load(data + k, live, 0) >> 2 * (n // (N // 4)) & 3
    return use(state, k, q * s - z, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    s += n * tl.cdiv(K, group)
    z += n * tl.cdiv(K, group)
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
                    s1 = tl.load(s + (256 * t + 128 * h + 32 * b) // group, inside, 0).to(tl.float32)
                    z1 = tl.load(z + (256 * t + 128 * h + 32 * b) // group, inside, 0).to(tl.float32)
                    q1 = q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3
                    state = use(state, 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c, q1 * s1 - z1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "quanto": Storage(unpack_quanto, pack_quanto, Kernels(_decode_quanto, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u2, words=bitplanes.words_2, width=2, bits=2),
                    Sums(scale=_scale_planar, group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (4,)}}))),
    },
    decode=decode, encode=encode, scheme="float_middle", roles={"code": "q", "scale": "s", "zero": "z"}, settings={"negated": 1},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("s", "z")),
)
