"""squeezellm at bits = 3: SqueezeLLM, codes into a table of levels that each row learns, with sparse outliers.

    w = lut[n, q]

Built from the spec squeezellm (sha256 3c2d445ac678d80e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kmeans
from qdsl.runtime import Branch, BranchTensor, Field, Kernels, Storage, Stored, Variant, as_type, integer, lookup
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_squeezellm(qweight: Tensor, lookup_table: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int32 [3*K/32, N]; lookup_table level_type [N, 8]."""
    r = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 12))
    q_words = integer(r.unflatten(-1, (4, 3)))
    return {"lut": lookup_table, "q": torch.stack([q_words >> 3 * i & 7 for i in range(8)], -1).to(torch.uint8).flatten(1)}


def pack_squeezellm(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qweight, lookup_table of the fields; the inverse of unpack_squeezellm."""
    q_split = q.unflatten(-1, (-1, 4, 8))
    q_packed = sum(q_split[..., i].to(torch.int32) << 3 * i for i in range(8))
    r = q_packed.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(2)
    return {"qweight": as_type(r, torch.int32).permute(1, 2, 0).contiguous().flatten(0, 1), "lookup_table": lut}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[n, q].  lut [N, 8], q [N, K]."""
    lut = lut.float()[:, None, :]
    q = q.view(torch.int8)
    return lookup(lut, q) if out is None else out.copy_(lookup(lut, q))


def encode(weight: Tensor, *, level_type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: levels of a stored table by k-means of the weights that share it; codes of the nearest
    levels.  importance: float32 [K].
    """
    q, lut = kmeans(weight, code="u3", levels=level_type, rows=1, columns=weight.shape[1], axes=1, importance=importance)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_squeezellm(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 32 weights of unit t of row n, in float32."""
    qweight, lookup_table = tensors
    qweight += n
    lookup_table += 8 * n
    q_0 = tl.load(qweight + 3 * (t * N), live, 0)
    q_1 = tl.load(qweight + 3 * (t * N) + N, live, 0)
    q_2 = tl.load(qweight + 3 * (t * N) + 2 * N, live, 0)
    q_words = (q_0, q_1, q_2)
    for h in tl.static_range(32):
        q = device.bits(q_words, 3 * h, 3).to(tl.int32)
        lut = tl.load(lookup_table + q, live, 0).to(tl.float32)
        state = use(state, 32 * t + h, lut, live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    fields={"lut": Field("level_type", "N", "8"), "q": Field("u3", "N", "K")},
    storages={
        "squeezellm": Storage(unpack=unpack_squeezellm, pack=pack_squeezellm, tensors={
            "qweight": Stored("i32", "3*K/32", "N"),
            "lookup_table": Stored("level_type", "N", "8"),
        }, kernels=Kernels(_decode_squeezellm, rows="N", units="K/32", last="n")),
    },
    decode=decode, encode=encode, importance=True,
    plus=(
        Branch("csr",  start=BranchTensor("rows", "i32", "?"), column=BranchTensor("cols", "i32", "?"),
                value=BranchTensor("vals", "f32", "?")),
        Branch("dense_rows",  row=BranchTensor("full_row_indices", "i32", "?"),
                row_value=BranchTensor("full_rows", "f32", "K", "?", digits=("K", "?"), order=((1,), (0,)))),
    ),
)
