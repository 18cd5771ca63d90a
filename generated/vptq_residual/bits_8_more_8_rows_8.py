"""vptq_residual at bits = 8, more = 8, rows = 8: VPTQ, indices of vectors and of residuals, columns in an order of their own.

    w = round(round(round(cb[q, n % rows] + rs[r, n % rows], type) * a, type) + b, type)

Built from the spec vptq_residual (sha256 eb92c13f621a725c) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import vector_kmeans
from qdsl.runtime import Kernels, Storage, Variant, as_type, cdiv, entries, pad, rounded, workspace
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_vptq(indices: Tensor, centroids: Tensor, res_centroids: Tensor, weight_scale: Tensor | None,
        weight_bias: Tensor | None, *, K: int) -> dict[str, Tensor | None]:
    """Fields of indices int32 [1, N/8, ceil(K/2)]; centroids type [1, 256, 8]; res_centroids type [1, 256, 8]; weight_scale
    type [K]; weight_bias type [K].
    """
    indices_bytes = as_type(indices.squeeze(0), torch.uint8).unflatten(-1, (-1, 4))
    return {"cb": centroids.squeeze(0), "rs": res_centroids.squeeze(0), "a": weight_scale, "b": weight_bias,
            "q": indices_bytes[..., 0:3:2].flatten(1)[:, :K], "r": indices_bytes[..., 1:4:2].flatten(1)[:, :K]}


def pack_vptq(cb: Tensor, rs: Tensor, a: Tensor | None, b: Tensor | None, q: Tensor, r: Tensor) -> dict[str, Tensor | None]:
    """indices, centroids, res_centroids, weight_scale, weight_bias of the fields; the inverse of unpack_vptq."""
    indices_bytes = torch.zeros(q.shape[0], cdiv(q.shape[1], 2), 4, dtype=torch.uint8, device=q.device)
    indices_bytes[..., 0:3:2] |= pad(q, (0, -q.shape[1] % 2, 0, 0)).unflatten(-1, (-1, 2))
    indices_bytes[..., 1:4:2] |= pad(r, (0, -r.shape[1] % 2, 0, 0)).unflatten(-1, (-1, 2))
    return {"indices": as_type(indices_bytes, torch.int32).squeeze(-1).unsqueeze(0), "centroids": cb.unsqueeze(0),
            "res_centroids": rs.unsqueeze(0), "weight_scale": a, "weight_bias": b}


def decode(cb: Tensor, rs: Tensor, q: Tensor, r: Tensor, p: Tensor | None = None, a: Tensor | None = None,
        b: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = round(round(round(cb[q, n % rows] + rs[r, n % rows], type) *
    a, type) + b, type).  cb [256, 8], rs [256, 8], q [N/8, K], r [N/8, K], p [K], a [K], b [K].
    """
    type = cb.dtype
    out = out if out is None else out.unflatten(0, (-1, 8))
    a = 1 if a is None else a.float()[None, None, :]
    b = 0 if b is None else b.float()[None, None, :]
    cb = entries(cb.float(), q.to(torch.int16)[:, None, :]).movedim(-1, 1).squeeze(2)
    rs = entries(rs.float(), r.to(torch.int16)[:, None, :]).movedim(-1, 1).squeeze(2)
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
    q, r, cb, rs = vector_kmeans(weight, code="u8", residual="u8", levels=type, residuals=type, rows=8, columns=1,
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
    indices += i * tl.cdiv(K, 2)
    if weight_scale is not None:
        a = tl.load(weight_scale + k, live, 0).to(tl.float32)
    if weight_bias is not None:
        b = tl.load(weight_bias + k, live, 0).to(tl.float32)
    q = (tl.load(indices + k // 2, live, 0) >> 16 * (k % 2) & 255).to(tl.int32)
    r = (tl.load(indices + k // 2, live, 0) >> 16 * (k % 2) + 8 & 255).to(tl.int32)
    for h in tl.static_range(8):
        column = h
        cb = tl.load(centroids + 8 * q + column, live, 0).to(tl.float32)
        rs = tl.load(res_centroids + 8 * r + column, live, 0).to(tl.float32)
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
