"""coreml_lut at bits = 2: Core ML palettes, codes into a table of levels that rows share.

    w = lut[n // rows, q]

Built from the spec coreml_lut (sha256 981ef0cb705716c5) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kmeans
from qdsl.runtime import Field, Kernels, Storage, Stored, Variant, joined, lookup, pad, spread
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_coreml(indices: Tensor, lut: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of indices uint8 [ceil(N*K/4)]; lut level_type [ceil(N/rows), 1, 4, 1]."""
    return {"lut": lut.squeeze(3).squeeze(1), "q": spread(indices, 2).flatten()[:N * K].unflatten(0, (N, K))}


def pack_coreml(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """indices, lut of the fields; the inverse of unpack_coreml."""
    q_split = pad(q.flatten(), (0, -q.numel() % 4)).unflatten(-1, (-1, 4))
    r = joined(q_split, 2).squeeze(-1)
    return {"indices": r, "lut": lut.unsqueeze(1).unsqueeze(-1)}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[n // rows, q].  lut [ceil(N/rows), 4], q [N, K]."""
    out = out if out is None else out.unflatten(0, (lut.shape[0], -1))
    q = q.view(torch.int8).unflatten(0, (lut.shape[0], -1))
    lut = lut.float()[:, None, None, :]
    return (lookup(lut, q) if out is None else out.copy_(lookup(lut, q))).flatten(0, 1)


def encode(weight: Tensor, *, rows: int, level_type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: levels of a stored table by k-means of the weights that share it; codes of the nearest
    levels.  importance: float32 [K].
    """
    q, lut = kmeans(weight, code="u2", levels=level_type, rows=rows, columns=weight.shape[1], axes=1, importance=importance)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_coreml(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    indices, lut = tensors
    rows, = sizes
    lut += 4 * (n // rows)
    q = (tl.load(indices + (k + n * K) // 4, live, 0) >> 2 * ((k + n * K) % 4) & 3).to(tl.int32)
    lut1 = tl.load(lut + q, live, 0).to(tl.float32)
    return use(state, k, lut1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"lut": Field("level_type", "ceil(N/rows)", "4"), "q": Field("u2", "N", "K")},
    storages={
        "coreml": Storage(unpack=unpack_coreml, pack=pack_coreml, reads=("N", "K"), tensors={
            "indices": Stored("u8", "ceil(N*K/4)"),
            "lut": Stored("level_type", "ceil(N/rows)", "1", "4", "1"),
        }, kernels=Kernels(_decode_coreml, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, importance=True, cuts=("ceil(N/rows)", "K"),
)
