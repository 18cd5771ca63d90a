"""coreml_lut at bits = 8: Core ML palettes, codes into a table of levels that rows share.

    w = lut[n // rows, q]

Built from the spec coreml_lut (sha256 981ef0cb705716c5) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kmeans
from qdsl.runtime import Field, Kernels, Storage, Stored, Variant, lookup
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_coreml(indices: Tensor, lut: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of indices uint8 [N*K]; lut level_type [ceil(N/rows), 1, 256, 1]."""
    return {"lut": lut.squeeze(3).squeeze(1), "q": indices[:N * K].unflatten(0, (N, K))}


def pack_coreml(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """indices, lut of the fields; the inverse of unpack_coreml."""
    r = q.flatten()
    return {"indices": r, "lut": lut.unsqueeze(1).unsqueeze(-1)}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[n // rows, q].  lut [ceil(N/rows), 256], q [N, K]."""
    out = out if out is None else out.unflatten(0, (lut.shape[0], -1))
    q = q.to(torch.int16).unflatten(0, (lut.shape[0], -1))
    lut = lut.float()[:, None, None, :]
    return (lookup(lut, q) if out is None else out.copy_(lookup(lut, q))).flatten(0, 1)


def encode(weight: Tensor, *, rows: int, level_type: str) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: levels of a stored table by k-means of the weights that share it; codes of the nearest
    levels.
    """
    q, lut = kmeans(weight, code="u8", levels=level_type, rows=rows, columns=weight.shape[1], axes=1)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_coreml(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    indices, lut = tensors
    rows, = sizes
    indices += n * K
    lut += 256 * (n // rows)
    q = tl.load(indices + k, live, 0).to(tl.int32)
    lut1 = tl.load(lut + q, live, 0).to(tl.float32)
    return use(state, k, lut1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"lut": Field("level_type", "ceil(N/rows)", "256"), "q": Field("u8", "N", "K")},
    storages={
        "coreml": Storage(unpack=unpack_coreml, pack=pack_coreml, reads=("N", "K"), tensors={
            "indices": Stored("u8", "N*K"),
            "lut": Stored("level_type", "ceil(N/rows)", "1", "256", "1"),
        }, kernels=Kernels(_decode_coreml, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, cuts=("ceil(N/rows)", "K"),
)
