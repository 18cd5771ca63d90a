"""squeezellm at bits = 4: SqueezeLLM, codes into a table of levels that each row learns, with sparse outliers.

    w = lut[n, q]

Built from the spec squeezellm (sha256 3c2d445ac678d80e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kmeans
from qdsl.runtime import (Codes, GroupField, Kernels, Levels, MatrixUnitKernels, Storage, Sums, Variant, as_type, joined, lookup,
        pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_squeezellm(qweight: Tensor, lookup_table: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int32 [4*K/32, N]; lookup_table level_type [N, 16]."""
    r = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 16))
    return {"lut": lookup_table, "q": spread(r, 4).flatten(1)}


def pack_squeezellm(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qweight, lookup_table of the fields; the inverse of unpack_squeezellm."""
    q_split = q.unflatten(-1, (-1, 16, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"qweight": as_type(r, torch.int32).permute(1, 2, 0).contiguous().flatten(0, 1), "lookup_table": lut}


def unpack_planar(q: Tensor, lut: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; lut level_type [N, 16]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    return {"lut": lut, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, lut of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "lut": lut}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[n, q].  lut [N, 16], q [N, K]."""
    lut = lut.float()[:, None, :]
    q = q.view(torch.int8)
    return lookup(lut, q) if out is None else out.copy_(lookup(lut, q))


def encode(weight: Tensor, *, level_type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: levels of a stored table by k-means of the weights that share it; codes of the nearest
    levels.  importance: float32 [K].
    """
    q, lut = kmeans(weight, code="u4", levels=level_type, rows=1, columns=weight.shape[1], axes=1, importance=importance)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_squeezellm(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    qweight, lookup_table = tensors
    qweight += n
    lookup_table += 16 * n
    t = u // 4
    i = u % 4
    q_word = tl.load(qweight + 4 * (t * N) + i * N, live, 0)
    for h in tl.static_range(8):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        lut = tl.load(lookup_table + q, live, 0).to(tl.float32)
        state = use(state, 32 * t + 8 * i + h, lut, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, lut = tensors
    q += 16 * (n * tl.cdiv(K, 128))
    lut += 16 * n
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                q1 = (q_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                lut1 = tl.load(lut + q1, inside, 0).to(tl.float32)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, lut1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "squeezellm": Storage(unpack_squeezellm, pack_squeezellm, Kernels(_decode_squeezellm, rows="N", units="K/8", last="n",
                digits=(4,), lanes=(8,), order=(0, 1, 2, 3))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.float_entries_of_16, words=bitplanes.words_4, width=8, bits=0,
                    unit=(1.0, 1.0), base=(0, 0), levels=Levels(stored=GroupField("lut", 1, 0), entries=16)), Sums(),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, importance=True,
)
