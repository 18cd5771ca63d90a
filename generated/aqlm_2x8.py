"""aqlm_2x8: AQLM 2x8, for 8 columns the sum of a row of each of two codebooks of 256, and a scale per row.

    w = (cb[0, a, k % 8] + cb[1, b, k % 8]) * s
    float32, rounded after each operation

    a      u8   [N, K/8]
    b      u8   [N, K/8]
    cb     real [2, 256, 8]
    s      real [N]

    aqlm: 2.00024 bits per weight

Built from the spec aqlm_2x8 (sha256 6db760537205e866) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import vector_kmeans
from qdsl.runtime import Format, Kernels, Storage, Variant, as_type, empty, entries, workspace
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_aqlm(codes: Tensor, codebooks: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of codes int8 [N, K/8, 2]; codebooks real [2, 256, 1, 8]; scales real [N, 1, 1, 1]."""
    r = as_type(codes, torch.uint8)
    return {"a": r[..., 0:1].squeeze(-1), "b": r[..., 1:2].squeeze(-1), "cb": codebooks.squeeze(2),
            "s": scales.squeeze(3).squeeze(2).squeeze(1)}


def pack_aqlm(a: Tensor, b: Tensor, cb: Tensor, s: Tensor) -> dict[str, Tensor]:
    """codes, codebooks, scales of the fields; the inverse of unpack_aqlm."""
    r = empty((a.shape[0], a.shape[1], 2), torch.uint8, a.device)
    r[..., 0:1] = a.unsqueeze(-1)
    r[..., 1:2] = b.unsqueeze(-1)
    return {"codes": as_type(r, torch.int8), "codebooks": cb.unsqueeze(2), "scales": s.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1)}


def decode(a: Tensor, b: Tensor, cb: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (cb[0, a, k % 8] + cb[1, b, k % 8]) * s.  a [N, K/8], b [N,
    K/8], cb [2, 256, 8], s [N].
    """
    out = out if out is None else out.unflatten(1, (-1, 8))
    s = s.float()[..., None, None]
    cb_0 = entries(cb.float()[0], a)
    cb_1 = entries(cb.float()[1], b)
    space = workspace(out)
    w = torch.add(cb_0, cb_1, out=space)
    return torch.mul(w, s, out=out).flatten(1)


def encode(weight: Tensor, *, real: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: vectors of a stored table by k-means of runs of rows or columns, in units of the
    largest of a row where rows have scales; codes of the nearest vectors; of two tables each is fitted to what the other
    leaves.  importance: float32 [K].
    """
    a, b, s, cb = vector_kmeans(weight, code="u8", residual="u8", scale=real, levels=real, rows=1, columns=8,
            importance=importance)
    return {"a": a, "b": b, "s": s, "cb": cb}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_aqlm(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    codes, codebooks, scales = tensors
    codes += 2 * (n * (K // 8))
    scales += n
    s = tl.load(scales, n < N, 0).to(tl.float32)
    a = tl.load(codes + 2 * (k // 8), live, 0).to(tl.uint8, bitcast=True).to(tl.int32)
    b = tl.load(codes + 2 * (k // 8) + 1, live, 0).to(tl.uint8, bitcast=True).to(tl.int32)
    column = k % 8
    cb = tl.load(codebooks + 8 * a + column, live, 0).to(tl.float32)
    cb1 = tl.load(codebooks + 8 * b + column + 2048, live, 0).to(tl.float32)
    return use(state, k, (cb + cb1) * s, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "aqlm": Storage(unpack_aqlm, pack_aqlm, Kernels(_decode_aqlm, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, importance=True,
)

PROGRAM = {
    "name": "aqlm_2x8", "title": "AQLM 2x8, for 8 columns the sum of a row of each of two codebooks of 256, and a scale per row",
    "source": "aqlm checkpoints (QuantizedLinear, _dequantize_weight)", "formula": "(cb[0, a, k % 8] + cb[1, b, k % 8]) * s",
    "bits": "2.0002", "digest": "6db760537205e866",
    "params": {"real": ("f16", "bf16")},
    "variants": {(): {
        "fields": {"a": ("u8", "N", "K/8"), "b": ("u8", "N", "K/8"), "cb": ("real", "2", "256", "8"), "s": ("real", "N")},
        "storages": {"aqlm": {"tensors": {
            "codes": ("i8", "N", "K/8", "2", {"slices": (("a", 0, [0, 1]), ("b", 8, [0, 1]))}),
            "codebooks": ("real", "2", "256", "1", "8", {"slices": (("cb", 0, [0, 1, 3]),)}),
            "scales": ("real", "N", "1", "1", "1", {"slices": (("s", 0, [0]),)}),
        }}},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
