"""aqlm_1x16: AQLM 1x16, for 8 columns a row of a codebook of 65536, and a scale per row.

    w = cb[q, k % 8] * s
    float32, rounded after each operation

    q      u16  [N, K/8]
    cb     real [65536, 8]
    s      real [N]

    aqlm: 2.00403 bits per weight

Built from the spec aqlm_1x16 (sha256 1f7be4cbadaaf5fb) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import vector_kmeans
from qdsl.runtime import Format, Kernels, Storage, Variant, entries
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_aqlm(codes: Tensor, codebooks: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of codes int16 [N, K/8, 1]; codebooks real [1, 65536, 1, 8]; scales real [N, 1, 1, 1]."""
    return {"q": codes.squeeze(2).to(torch.int32) & 65535, "cb": codebooks.squeeze(2).squeeze(0),
            "s": scales.squeeze(3).squeeze(2).squeeze(1)}


def pack_aqlm(q: Tensor, cb: Tensor, s: Tensor) -> dict[str, Tensor]:
    """codes, codebooks, scales of the fields; the inverse of unpack_aqlm."""
    return {"codes": q.to(torch.int16).unsqueeze(-1), "codebooks": cb.unsqueeze(0).unsqueeze(2),
            "scales": s.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1)}


def decode(q: Tensor, cb: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = cb[q, k % 8] * s.  q [N, K/8], cb [65536, 8], s [N]."""
    out = out if out is None else out.unflatten(1, (-1, 8))
    s = s.float()[..., None, None]
    cb = entries(cb.float(), q)
    return torch.mul(cb, s, out=out).flatten(1)


def encode(weight: Tensor, *, real: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: vectors of a stored table by k-means of runs of rows or columns, in units of the
    largest of a row where rows have scales; codes of the nearest vectors; of two tables each is fitted to what the other
    leaves.  importance: float32 [K].
    """
    q, s, cb = vector_kmeans(weight, code="u16", scale=real, levels=real, rows=1, columns=8, importance=importance)
    return {"q": q, "s": s, "cb": cb}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_aqlm(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    codes, codebooks, scales = tensors
    codes += n * (K // 8)
    scales += n
    s = tl.load(scales, n < N, 0).to(tl.float32)
    q = tl.load(codes + k // 8, live, 0).to(tl.uint16, bitcast=True).to(tl.int32)
    column = k % 8
    cb = tl.load(codebooks + 8 * q + column, live, 0).to(tl.float32)
    return use(state, k, cb * s, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "aqlm": Storage(unpack_aqlm, pack_aqlm, Kernels(_decode_aqlm, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, importance=True,
)

PROGRAM = {
    "name": "aqlm_1x16", "title": "AQLM 1x16, for 8 columns a row of a codebook of 65536, and a scale per row",
    "source": "aqlm checkpoints (QuantizedLinear, _dequantize_weight)", "formula": "cb[q, k % 8] * s", "bits": "2.004",
    "digest": "1f7be4cbadaaf5fb",
    "params": {"real": ("f16", "bf16")},
    "variants": {(): {
        "fields": {"q": ("u16", "N", "K/8"), "cb": ("real", "65536", "8"), "s": ("real", "N")},
        "storages": {"aqlm": {"tensors": {
            "codes": ("i16", "N", "K/8", "1", {"slices": (("q", 0, [0, 1]),)}),
            "codebooks": ("real", "1", "65536", "1", "8", {"slices": (("cb", 0, [1, 3]),)}),
            "scales": ("real", "N", "1", "1", "1", {"slices": (("s", 0, [0]),)}),
        }}},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
