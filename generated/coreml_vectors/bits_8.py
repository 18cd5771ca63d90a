"""coreml_vectors at bits = 8: Core ML palettes of vectors, a code for a few rows of a column into a table of vectors.

    w = lut[q, n % rows]

Built from the spec coreml_vectors (sha256 f4a5a480209d520e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import vector_kmeans
from qdsl.runtime import Kernels, Storage, Variant, entries
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_coreml(indices: Tensor, lut: Tensor) -> dict[str, Tensor]:
    """Fields of indices uint8 [N/4, K]; lut level_type [1, 1, 256, 4]."""
    return {"lut": lut.squeeze(1).squeeze(0), "q": indices}


def pack_coreml(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """indices, lut of the fields; the inverse of unpack_coreml."""
    return {"indices": q, "lut": lut.unsqueeze(0).unsqueeze(1)}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[q, n % rows].  lut [256, 4], q [N/4, K]."""
    out = out if out is None else out.unflatten(0, (-1, 4))
    lut = entries(lut.float(), q.to(torch.int16)[:, None, :]).movedim(-1, 1).squeeze(2)
    return (lut if out is None else out.copy_(lut)).flatten(0, 1)


def encode(weight: Tensor, *, level_type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: vectors of a stored table by k-means of runs of rows or columns, in units of the
    largest of a row where rows have scales; codes of the nearest vectors; of two tables each is fitted to what the other
    leaves.  importance: float32 [K].
    """
    q, lut = vector_kmeans(weight, code="u8", levels=level_type, rows=4, columns=1, importance=importance)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_coreml(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    indices, lut = tensors
    indices += n // 4 * K
    column = n % 4
    q = tl.load(indices + k, live, 0).to(tl.int32)
    lut1 = tl.load(lut + 4 * q + column, live, 0).to(tl.float32)
    return use(state, k, lut1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "coreml": Storage(unpack_coreml, pack_coreml, Kernels(_decode_coreml, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, importance=True,
)
