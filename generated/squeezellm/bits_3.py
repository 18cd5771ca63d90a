"""squeezellm at bits = 3: SqueezeLLM, codes into a table of levels that each row learns, with sparse outliers.

    w = lut[n, q]

Built from the spec squeezellm (sha256 3c2d445ac678d80e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kmeans
from qdsl.runtime import (Codes, GroupField, Kernels, Levels, MatrixUnitKernels, Storage, Sums, Variant, as_type, integer, lookup,
        pad)
from qdsl.runtime.gpu.kernels import bitplanes, device
from qdsl.runtime.libraries.triton import tl, triton


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


def unpack_planar(q_0: Tensor, q_1: Tensor, lut: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/256)]; q_1 int32 [N, 16*ceil(K/512)]; lut level_type [N, 8]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 8, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 4 & 3, q_bytes >> 2 & 3, q_bytes >> 6], -4).unflatten(2, (2, 2)).permute(0, 1,
        2, 5, 3, 4, 6).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 8, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 6 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 5
        & 1, q_bytes2 >> 3 & 1, q_bytes2 >> 7], -4).unflatten(2, (2, 2, 2)).permute(0, 1, 2, 3, 6, 4, 5, 7).flatten(1)[:, :K]
    return {"lut": lut, "q": q_low | q_high << 2}


def pack_planar(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, lut of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 8, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, 0, :, 0] & 3) | (q_split[:, :, 0, :, 1] & 3) << 4 | (q_split[:, :, 1, :, 0] & 3) << 2
        | (q_split[:, :, 1, :, 1] & 3) << 6).permute(0, 1, 3, 2, 4).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 2, 2, 8, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, 0, :, 0] >> 2) | (q_split2[:, :, 0, 0, :, 1] >> 2) << 4 | (q_split2[:, :, 0, 1, :, 0] >> 2)
        << 2 | (q_split2[:, :, 0, 1, :, 1] >> 2) << 6 | (q_split2[:, :, 1, 0, :, 0] >> 2) << 1
        | (q_split2[:, :, 1, 0, :, 1] >> 2) << 5 | (q_split2[:, :, 1, 1, :, 0] >> 2) << 3 | (q_split2[:, :, 1, 1, :, 1] >> 2)
        << 7).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "lut": lut}


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


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, lut = tensors
    q_0 += 16 * (n * tl.cdiv(K, 256))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    lut += 8 * n
    q_low = tl.load(q_0 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live,
        0) >> 16 * (k % 256 // 16 % 2) + 8 * (k % 256 % 2) + 4 * (k % 256 // 8 % 2) + 2 * (k % 256 // 128) & 3
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live,
        0) >> 16 * (k % 512 // 16 % 2) + 8 * (k % 512 % 2) + 4 * (k % 512 // 8 % 2) + 2 * (k % 512 // 128 % 2) + k % 512 // 256 & 1
    q = (q_low | q_high << 2).to(tl.int32)
    lut1 = tl.load(lut + q, live, 0).to(tl.float32)
    return use(state, k, lut1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "squeezellm": Storage(unpack_squeezellm, pack_squeezellm, Kernels(_decode_squeezellm, rows="N", units="K/32", last="n",
                lanes=(32,), order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.float_entries_of_8, words=bitplanes.words_3, width=8, bits=0,
                    unit=(1.0, 1.0), base=(0, 0), levels=Levels(stored=GroupField("lut", 1, 0), entries=8)), Sums(),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 0), "spans": (2, 2)}}))),
    },
    decode=decode, encode=encode, importance=True,
)
