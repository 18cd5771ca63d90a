"""coreml_lut at bits = 6: Core ML palettes, codes into a table of levels that rows share.

    w = lut[n // rows, q]

Built from the spec coreml_lut (sha256 981ef0cb705716c5) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kmeans
from qdsl.runtime import Field, Kernels, Storage, Stored, Variant, integer, lookup, pad
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_coreml(indices: Tensor, lut: Tensor, *, N: int, K: int) -> dict[str, Tensor]:
    """Fields of indices uint8 [3*ceil(N*K/4)]; lut level_type [ceil(N/rows), 1, 64, 1]."""
    r = indices.unflatten(-1, (-1, 3))
    q_words = integer(r)
    return {"lut": lut.squeeze(3).squeeze(1),
            "q": torch.stack([q_words >> 6 * i & 63 for i in range(4)], -1).to(torch.uint8).flatten()[:N
                * K].unflatten(0, (N, K))}


def pack_coreml(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """indices, lut of the fields; the inverse of unpack_coreml."""
    q_split = pad(q.flatten(), (0, -q.numel() % 4)).unflatten(-1, (-1, 4))
    q_packed = sum(q_split[:, i].to(torch.int32) << 6 * i for i in range(4))
    r = q_packed.unsqueeze(-1).view(torch.uint8)[..., :3]
    return {"indices": r.flatten(), "lut": lut.unsqueeze(1).unsqueeze(-1)}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[n // rows, q].  lut [ceil(N/rows), 64], q [N, K]."""
    out = out if out is None else out.unflatten(0, (lut.shape[0], -1))
    q = q.view(torch.int8).unflatten(0, (lut.shape[0], -1))
    lut = lut.float()[:, None, None, :]
    return (lookup(lut, q) if out is None else out.copy_(lookup(lut, q))).flatten(0, 1)


def encode(weight: Tensor, *, rows: int, level_type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: levels of a stored table by k-means of the weights that share it; codes of the nearest
    levels.  importance: float32 [K].
    """
    q, lut = kmeans(weight, code="u6", levels=level_type, rows=rows, columns=weight.shape[1], axes=1, importance=importance)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_coreml(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    indices, lut = tensors
    rows, = sizes
    lut += 64 * (n // rows)
    q = device.stream(indices + 3 * ((k + n * K) // 4), 1, 6 * ((k + n * K) % 4), 6, 8, live).to(tl.int32)
    lut1 = tl.load(lut + q, live, 0).to(tl.float32)
    return use(state, k, lut1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"lut": Field("level_type", "ceil(N/rows)", "64"), "q": Field("u6", "N", "K")},
    storages={
        "coreml": Storage(unpack=unpack_coreml, pack=pack_coreml, reads=("N", "K"), tensors={
            "indices": Stored("u8", "3*ceil(N*K/4)"),
            "lut": Stored("level_type", "ceil(N/rows)", "1", "64", "1"),
        }, kernels=Kernels(_decode_coreml, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, importance=True, cuts=("ceil(N/rows)", "K"),
)
