"""coreml_lut at bits = 4: Core ML palettes, codes into a table of levels that rows share.

    w = lut[n // rows, q]

Built from the spec coreml_lut (sha256 981ef0cb705716c5) by qdsl 0.1.0.
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


def unpack_coreml(indices: Tensor, lut: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of indices uint8 [ceil(N*K/2)]; lut level_type [ceil(N/rows), 1, 16, 1]."""
    return {"lut": lut.squeeze(3).squeeze(1), "q": spread(indices, 4).flatten()[:N * K].unflatten(0, (N, K))}


def pack_coreml(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """indices, lut of the fields; the inverse of unpack_coreml."""
    q_split = pad(q.flatten(), (0, -q.numel() % 2)).unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"indices": r, "lut": lut.unsqueeze(1).unsqueeze(-1)}


def unpack_planar(q: Tensor, lut: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; lut level_type [ceil(N/rows), 16]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    return {"lut": lut, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, lut of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "lut": lut}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[n // rows, q].  lut [ceil(N/rows), 16], q [N, K]."""
    out = out if out is None else out.unflatten(0, (lut.shape[0], -1))
    q = q.view(torch.int8).unflatten(0, (lut.shape[0], -1))
    lut = lut.float()[:, None, None, :]
    return (lookup(lut, q) if out is None else out.copy_(lookup(lut, q))).flatten(0, 1)


def encode(weight: Tensor, *, rows: int, level_type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: levels of a stored table by k-means of the weights that share it; codes of the nearest
    levels.  importance: float32 [K].
    """
    q, lut = kmeans(weight, code="u4", levels=level_type, rows=rows, columns=weight.shape[1], axes=1, importance=importance)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_coreml(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    indices, lut = tensors
    rows, = sizes
    lut += 16 * (n // rows)
    q = (tl.load(indices + (k + n * K) // 2, live, 0) >> 4 * ((k + n * K) % 2) & 15).to(tl.int32)
    lut1 = tl.load(lut + q, live, 0).to(tl.float32)
    return use(state, k, lut1, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, lut = tensors
    rows, = sizes
    q += 16 * (n * tl.cdiv(K, 128))
    lut += 16 * (n // rows)
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
        "coreml": Storage(unpack_coreml, pack_coreml, Kernels(_decode_coreml, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.float_entries_of_16, words=bitplanes.words_4, width=8, bits=0,
                    unit=(1.0, 1.0), base=(0, 0), levels=Levels(stored=GroupField("lut", "rows", 0), entries=16)), Sums(),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, importance=True,
)
