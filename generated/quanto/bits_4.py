"""quanto at bits = 4: optimum-quanto qint4 and qint2, integer codes with a scale and a shift in floats per group of columns.

    w = q * s - z

Built from the spec quanto (sha256 68b791cb5e3f0ca8) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import float_middle
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float, as_type, pad,
        spread, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s - z */
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
    *offset = -z;
}
"""


def unpack_quanto(data: Tensor, scale: Tensor, shift: Tensor) -> dict[str, Tensor]:
    """Fields of data uint8 [N/2, K]; scale scale_type [N, K/group]; shift scale_type [N, K/group]."""
    return {"s": scale, "z": shift, "q": spread(data, 4).permute(2, 0, 1).flatten(0, 1)}


def pack_quanto(s: Tensor, z: Tensor, q: Tensor) -> dict[str, Tensor]:
    """data, scale, shift of the fields; the inverse of unpack_quanto."""
    q_split = q.unflatten(0, (2, -1))
    r = q_split[0] | q_split[1] << 4
    return {"data": r, "scale": s, "shift": z}


def unpack_planar(q: Tensor, s: Tensor, z: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s scale_type [N, ceil(K/group)]; z scale_type [N, ceil(K/group)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"s": s, "z": z, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(s: Tensor, z: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, z of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "z": z}


def decode(s: Tensor, z: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s - z.  s [N, ceil(K/group)], z [N, ceil(K/group)], q [N,
    K].
    """
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = q.unflatten(1, (s.shape[1], -1))
    s = s.float().unsqueeze(-1)
    z = z.float().unsqueeze(-1)
    space = workspace(out)
    w = torch.mul(as_float(q, out), s, out=space)
    return torch.sub(w, z, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = least + offset * scale; codes by
    both, as stored.
    """
    q, z, s = float_middle(weight, code="u4", scale=scale_type, zero=scale_type, rows=1, columns=group, axes=2, negated=1)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_quanto(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    data, scale, shift = tensors
    group, = sizes
    scale += n * (K // group)
    shift += n * (K // group)
    data += n % (N // 2) * K
    s = tl.load(scale + k // group, live, 0).to(tl.float32)
    z = tl.load(shift + k // group, live, 0).to(tl.float32)
    q = tl.load(data + k, live, 0) >> 4 * (n // (N // 2)) & 15
    return use(state, k, q * s - z, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, z = tensors
    group, = sizes
    s += n * tl.cdiv(K, group)
    z += n * tl.cdiv(K, group)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    s1 = tl.load(s + (128 * t + 32 * j) // group, live, 0).to(tl.float32)
    z1 = tl.load(z + (128 * t + 32 * j) // group, live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = q_word >> 16 * i + 4 * h & 15
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, q1 * s1 - z1, inside)
    return state


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = s * q - z."""
    s, z = fields
    total = lanes.plus(total, sum * s)
    return total + ones * lanes.offset(-z, s, BASE)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "quanto": Storage(unpack_quanto, pack_quanto, Kernels(_decode_quanto, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=_scale_planar, group_fields=(GroupField("s", 1, "group"), GroupField("z", 1, "group")),
                    blocks=("group",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, scheme="float_middle", roles={"code": "q", "scale": "s", "zero": "z"}, settings={"negated": 1},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s", "z")),
)
