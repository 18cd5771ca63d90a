"""any_precision: any-precision LLM at 4 bits, planes of bits and for every row a table of levels.

    w = lut[n, q]
    float32, rounded after each operation

    lut    f16 [N, 16]
    q      u4  [N, K]

    any_precision: 4 bits per weight
    planar: 4.01562 bits per weight

Built from the spec any_precision (sha256 54ab48888bf9f3c4) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kmeans
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, Storage, Sums, Variant, as_type, lookup,
        pad)
from qdsl.runtime.gpu.kernels import bitplanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_any_precision(qweight: Tensor, lut4: Tensor) -> dict[str, Tensor]:
    """Fields of qweight int32 [4, N, 32*K/1024]; lut4 float16 [N, 16]."""
    qweight_0 = qweight[0]
    qweight_1 = qweight[1]
    qweight_2 = qweight[2]
    qweight_3 = qweight[3]
    qweight_0_bytes = as_type(qweight_0, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes = qweight_0_bytes.unflatten(-1, (32, 4))
    q_high = torch.stack([q_bytes >> 7 - i & 1 for i in range(8)], -1).flip(3).permute(0, 1, 3, 2, 4).flatten(1)
    qweight_1_bytes = as_type(qweight_1, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes2 = qweight_1_bytes.unflatten(-1, (32, 4))
    q_high2 = torch.stack([q_bytes2 >> 7 - i & 1 for i in range(8)], -1).flip(3).permute(0, 1, 3, 2, 4).flatten(1)
    qweight_2_bytes = as_type(qweight_2, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes3 = qweight_2_bytes.unflatten(-1, (32, 4))
    q_high3 = torch.stack([q_bytes3 >> 7 - i & 1 for i in range(8)], -1).flip(3).permute(0, 1, 3, 2, 4).flatten(1)
    qweight_3_bytes = as_type(qweight_3, torch.uint8).unflatten(-1, (-1, 128))
    q_bytes4 = qweight_3_bytes.unflatten(-1, (32, 4))
    q_low = torch.stack([q_bytes4 >> 7 - i & 1 for i in range(8)], -1).flip(3).permute(0, 1, 3, 2, 4).flatten(1)
    return {"lut": lut4, "q": q_low | q_high3 << 1 | q_high2 << 2 | q_high << 3}


def pack_any_precision(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """qweight, lut4 of the fields; the inverse of unpack_any_precision."""
    q_split = q.unflatten(-1, (-1, 4, 32, 8)).flip(2)
    qweight_0_bytes = sum((q_split[..., i] >> 3) << 7 - i for i in range(8)).permute(0, 1, 3, 2).flatten(2)
    qweight_1_bytes = sum((q_split[..., i] >> 2 & 1) << 7 - i for i in range(8)).permute(0, 1, 3, 2).flatten(2)
    qweight_2_bytes = sum((q_split[..., i] >> 1 & 1) << 7 - i for i in range(8)).permute(0, 1, 3, 2).flatten(2)
    qweight_3_bytes = sum((q_split[..., i] & 1) << 7 - i for i in range(8)).permute(0, 1, 3, 2).flatten(2)
    return {
            "qweight": torch.stack([as_type(qweight_0_bytes, torch.int32).flatten(1),
                as_type(qweight_1_bytes, torch.int32).flatten(1), as_type(qweight_2_bytes, torch.int32).flatten(1),
                as_type(qweight_3_bytes, torch.int32).flatten(1)], 0),
            "lut4": lut}


def unpack_planar(q: Tensor, lut: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; lut float16 [N, 16]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    return {"lut": lut, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(lut: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, lut of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "lut": lut}


def decode(lut: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[n, q].  lut [N, 16], q [N, K]."""
    lut = lut.float()[:, None, :]
    q = q.view(torch.int8)
    return lookup(lut, q) if out is None else out.copy_(lookup(lut, q))


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: levels of a stored table by k-means of the weights that share it; codes of the nearest
    levels.  importance: float32 [K].
    """
    q, lut = kmeans(weight, code="u4", levels="f16", rows=1, columns=weight.shape[1], axes=1, importance=importance)
    return {"q": q, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_any_precision(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 32 weights of unit u of row n, in float32."""
    qweight, lut4 = tensors
    qweight_0 = qweight
    qweight_0 += 32 * (n * (K // 1024))
    qweight_1 = qweight
    qweight_1 += 32 * (n * (K // 1024))
    qweight_2 = qweight
    qweight_2 += 32 * (n * (K // 1024))
    qweight_3 = qweight
    qweight_3 += 32 * (n * (K // 1024))
    lut4 += 16 * n
    t = u // 32
    j = u % 32
    q_word = tl.load(qweight_0 + 32 * t + j, live, 0)
    q_word1 = tl.load(qweight_1 + 32 * t + 32 * (N * (K // 1024)) + j, live, 0)
    q_word2 = tl.load(qweight_2 + 64 * (N * (K // 1024)) + 32 * t + j, live, 0)
    q_word3 = tl.load(qweight_3 + 96 * (N * (K // 1024)) + 32 * t + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(8):
            q_low = q_word3 >> 31 - 8 * h - i & 1
            q_high = q_word2 >> 31 - 8 * h - i & 1
            q_high1 = q_word1 >> 31 - 8 * h - i & 1
            q_high2 = q_word >> 31 - 8 * h - i & 1
            q = (q_low | q_high << 1 | q_high1 << 2 | q_high2 << 3).to(tl.int32)
            lut = tl.load(lut4 + q, live, 0).to(tl.float32)
            state = use(state, 1024 * t + 256 * h + 8 * j + i, lut, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, lut = tensors
    q += 16 * (n * tl.cdiv(K, 128))
    lut += 16 * n
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                q1 = (q_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                lut1 = tl.load(lut + q1, inside, 0).to(tl.float32)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, lut1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "any_precision": Storage(unpack_any_precision, pack_any_precision, Kernels(_decode_any_precision, rows="N", units="K/32",
                last="k", digits=(32,), lanes=(4, 8), order=(0, 1, 3, 2, 4))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.float_entries_of_16, words=bitplanes.words_4, width=8, bits=0,
                    unit=(1.0, 1.0), base=(0, 0), levels=Levels(stored=GroupField("lut", 1, 0), entries=16)), Sums(),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, importance=True,
)

PROGRAM = {
    "name": "any_precision", "title": "any-precision LLM at 4 bits, planes of bits and for every row a table of levels",
    "source": "any-precision-llm any_precision/quantization/pack.py; columns in whole warps of 1024", "formula": "lut[n, q]",
    "bits": "4 to 4.0156", "digest": "54ab48888bf9f3c4",
    "variants": {(): {
        "fields": {"lut": ("f16", "N", "16"), "q": ("u4", "N", "K")},
        "storages": {
            "any_precision": {"tensors": {
                "qweight": ("i32", "4", "N", "32*K/1024",
                    {"slices": (("q", 31, [0, [(8, -1), (32, 1, 1), (4, -8), (0, 32, 1)]], 3, 1, {"plane": (0, 0)}),
                    ("q", 31, [0, [(8, -1), (32, 1, 1), (4, -8), (0, 32, 1)]], 2, 1, {"plane": (0, 1)}),
                    ("q", 31, [0, [(8, -1), (32, 1, 1), (4, -8), (0, 32, 1)]], 1, 1, {"plane": (0, 2)}),
                    ("q", 31, [0, [(8, -1), (32, 1, 1), (4, -8), (0, 32, 1)]], 0, 1, {"plane": (0, 3)}))}),
                "lut4": ("f16", "N", "16", {"field": "lut"}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                "lut": ("f16", "N", "16", {"field": "lut"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
