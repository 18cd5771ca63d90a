"""vptq_residual at bits = 16, more = 16, rows = 16: VPTQ, indices of vectors and of residuals, columns in an order of their own.

    w = round(round(round(cb[q, n % rows] + rs[r, n % rows], type) * a, type) + b, type)

Built from the spec vptq_residual (sha256 eb92c13f621a725c) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import vector_kmeans
from qdsl.runtime import Kernels, Storage, Variant, as_type, entries, integer, rounded, workspace
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.libraries.triton import tl, triton

from .bits_16_more_16_rows_8 import pack_vptq


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_vptq(indices: Tensor, centroids: Tensor, res_centroids: Tensor, weight_scale: Tensor | None,
        weight_bias: Tensor | None) -> dict[str, Tensor | None]:
    """Fields of indices int32 [1, N/16, K]; centroids type [1, 65536, 16]; res_centroids type [1, 65536, 16]; weight_scale
    type [K]; weight_bias type [K].
    """
    indices_bytes = as_type(indices.squeeze(0), torch.uint8).unflatten(-1, (-1, 4))
    return {"cb": centroids.squeeze(0), "rs": res_centroids.squeeze(0), "a": weight_scale, "b": weight_bias,
            "q": integer(indices_bytes[..., 0:2]) & 65535, "r": integer(indices_bytes[..., 2:4]) & 65535}


def decode(cb: Tensor, rs: Tensor, q: Tensor, r: Tensor, p: Tensor | None = None, a: Tensor | None = None,
        b: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = round(round(round(cb[q, n % rows] + rs[r, n % rows], type) *
    a, type) + b, type).  cb [65536, 16], rs [65536, 16], q [N/16, K], r [N/16, K], p [K], a [K], b [K].
    """
    type = cb.dtype
    out = out if out is None else out.unflatten(0, (-1, 16))
    a = 1 if a is None else a.float()[None, None, :]
    b = 0 if b is None else b.float()[None, None, :]
    cb = entries(cb.float(), q[:, None, :]).movedim(-1, 1).squeeze(2)
    rs = entries(rs.float(), r[:, None, :]).movedim(-1, 1).squeeze(2)
    space = workspace(out)
    w = torch.add(cb, rs, out=space)
    w = rounded(w, type, space)
    w = torch.mul(w, a, out=space)
    w = rounded(w, type, space)
    w = torch.add(w, b, out=space)
    return rounded(w, type, out).flatten(0, 1)


def encode(weight: Tensor, *, type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: vectors of a stored table by k-means of runs of rows or columns, in units of the
    largest of a row where rows have scales; codes of the nearest vectors; of two tables each is fitted to what the other
    leaves.  importance: float32 [K].
    """
    q, r, cb, rs = vector_kmeans(weight, code="u16", residual="u16", levels=type, residuals=type, rows=16, columns=1,
            importance=importance)
    return {"q": q, "r": r, "cb": cb, "rs": rs}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_vptq(tensors, i, k, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit k of row i, in float32."""
    indices, centroids, res_centroids, weight_scale, weight_bias = tensors
    if weight_scale is None:
        a = 1.0
    if weight_bias is None:
        b = 0.0
    indices += i // 2 * K
    if weight_scale is not None:
        a = tl.load(weight_scale + k, live, 0).to(tl.float32)
    if weight_bias is not None:
        b = tl.load(weight_bias + k, live, 0).to(tl.float32)
    q = (tl.load(indices + k, live, 0) & 65535).to(tl.int32)
    r = (tl.load(indices + k, live, 0) >> 16 & 65535).to(tl.int32)
    for h in tl.static_range(8):
        column = 8 * (i % 2) + h
        cb = tl.load(centroids + 16 * q + column, live, 0).to(tl.float32)
        rs = tl.load(res_centroids + 16 * r + column, live, 0).to(tl.float32)
        state = use(state, k,
            device.rounded(device.rounded(device.rounded(cb + rs, centroids.dtype.element_ty) * a, centroids.dtype.element_ty)
            + b, centroids.dtype.element_ty), live, h)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "vptq": Storage(unpack_vptq, pack_vptq, Kernels(_decode_vptq, rows="N/8", units="K", last="k", sums=8, lanes=(8,),
                order=(0, 2, 1))),
    },
    decode=decode, encode=encode, importance=True,
)
