"""coreml_lut at bits = 6: Core ML palettes, codes into a table of levels that rows share.

    w = lut[n // rows, q]

Built from the spec coreml_lut (sha256 981ef0cb705716c5) by qdsl 0.1.0.
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


def unpack_planar(q_0: Tensor, q_1: Tensor, lut: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/256)]; lut level_type [ceil(N/rows), 64]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 3, q_bytes2 >> 4 & 3, q_bytes2 >> 2 & 3, q_bytes2 >> 6], -5).unflatten(2, (2, 2)).permute(0,
        1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    return {"lut": lut, "q": q_low | q_high << 4}


def pack_planar(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, lut of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, :, 0] >> 4) | (q_split2[:, :, 0, :, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, :, 0] >> 4)
        << 2 | (q_split2[:, :, 1, :, :, 1] >> 4) << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "lut": lut}


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


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, lut = tensors
    rows, = sizes
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 256))
    lut += 64 * (n // rows)
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2) + 4 * (k % 128 // 8 % 4) & 15
    q_high = tl.load(q_1 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live, 0) >> 16 * (k % 256 % 2) + 4 * (k % 256 // 8 % 4) + 2 * (k % 256 // 128) & 3
    q = (q_low | q_high << 4).to(tl.int32)
    lut1 = tl.load(lut + q, live, 0).to(tl.float32)
    return use(state, k, lut1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "coreml": Storage(unpack_coreml, pack_coreml, Kernels(_decode_coreml, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.loaded_by_planes, words=bitplanes.words_6, width=8, bits=0,
                    unit=(1.0, 1.0), base=(0, 0), levels=Levels(stored=GroupField("lut", "rows", 0), entries=64)), Sums(),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 0), "spans": (0, 2)}}))),
    },
    decode=decode, encode=encode, importance=True,
)
