"""kivi at bits = 2: KIVI, keys and values of a cache as codes with a scale and a least value per block of tokens or of channels.

    w = q * s + m

Built from the spec kivi (sha256 e650efe38bc40e87) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import float_middle
from qdsl.runtime import (Codes, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float, as_type,
        joined, pad, spread, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s + m */
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
    const vf m = FIELD(1);
    *scale = s;
    *offset = m;
}
"""


def unpack_rows(codes: Tensor, scale: Tensor, minimum: Tensor) -> dict[str, Tensor]:
    """Fields of codes uint8 [N, K/4]; scale scale_type [ceil(N/gn), ceil(K/gk)]; minimum scale_type [ceil(N/gn), ceil(K/gk)]."""
    return {"s": scale, "m": minimum, "q": spread(codes, 2).flatten(1)}


def pack_rows(s: Tensor, m: Tensor, q: Tensor) -> dict[str, Tensor]:
    """codes, scale, minimum of the fields; the inverse of unpack_rows."""
    q_split = q.unflatten(-1, (-1, 4))
    r = joined(q_split, 2).squeeze(-1)
    return {"codes": r, "scale": s, "minimum": m}


def unpack_planar(q: Tensor, s: Tensor, m: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; s scale_type [ceil(N/gn), ceil(K/gk)]; m scale_type [ceil(N/gn), ceil(K/gk)]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"s": s, "m": m,
            "q": torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0,
                1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]}


def pack_planar(s: Tensor, m: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, m of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    r = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4 | q_split[:, :, 1, :, :, 1]
        << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "m": m}


def decode(s: Tensor, m: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s + m.  s [ceil(N/gn), ceil(K/gk)], m [ceil(N/gn),
    ceil(K/gk)], q [N, K].
    """
    out = out if out is None else out.unflatten(0, (s.shape[0], -1)).unflatten(2, (s.shape[1], -1))
    q = q.unflatten(0, (s.shape[0], -1)).unflatten(2, (s.shape[1], -1))
    s = s.float()[:, None, :, None]
    m = m.float()[:, None, :, None]
    space = workspace(out)
    w = torch.mul(as_float(q, out), s, out=space)
    return torch.add(w, m, out=out).flatten(2).flatten(0, 1)


def encode(weight: Tensor, *, gn: int, gk: int, scale_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block / (2^bits - 1); zero = least + offset * scale; codes by
    both, as stored.
    """
    q, m, s = float_middle(weight, code="u2", scale=scale_type, zero=scale_type, rows=gn, columns=gk, axes=2)
    return {"q": q, "m": m, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_rows(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit t of row n, in float32."""
    codes, scale, minimum = tensors
    gn, gk = sizes
    scale += n // gn * tl.cdiv(K, gk)
    minimum += n // gn * tl.cdiv(K, gk)
    codes += n * (K // 4)
    q_word = tl.load(codes + t, live, 0)
    for h in tl.static_range(4):
        s = tl.load(scale + (4 * t + h) // gk, live, 0).to(tl.float32)
        m = tl.load(minimum + (4 * t + h) // gk, live, 0).to(tl.float32)
        q = q_word >> 2 * h & 3
        state = use(state, 4 * t + h, q * s + m, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, s, m = tensors
    gn, gk = sizes
    s += n // gn * tl.cdiv(K, gk)
    m += n // gn * tl.cdiv(K, gk)
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
                    s1 = tl.load(s + (256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c) // gk, inside, 0).to(tl.float32)
                    m1 = tl.load(m + (256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c) // gk, inside, 0).to(tl.float32)
                    q1 = q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3
                    state = use(state, 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c, q1 * s1 + m1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "rows": Storage(unpack_rows, pack_rows, Kernels(_decode_rows, rows="N", units="K/4", last="k", lanes=(4,),
                order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u2, words=bitplanes.words_2, width=2, bits=2),
                    Sums(scale=group_sums.with_offset, group_fields=(GroupField("s", "gn", "gk"), GroupField("m", "gn", "gk")),
                    blocks=("gk",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (4,)}}))),
    },
    decode=decode, encode=encode, scheme="float_middle", roles={"code": "q", "scale": "s", "zero": "m"},
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("s", "m")),
)
